//! What Redis says, in the words of the store.

use redis::{ErrorKind, RedisError};
use std::{error::Error, fmt};
use tower_herd::store::{StoreError, StoreErrorKind};

/// An error of the server, in its own words.
#[derive(Debug)]
struct Said(String);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Said {}

pub(crate) fn store_error(error: RedisError) -> StoreError {
    let kind = kind(&error);
    match error.code() {
        Some(code) => StoreError::new(kind, Said(format!("{code} {}", error.detail().unwrap_or_default()))),
        None => StoreError::new(kind, error),
    }
}

pub(crate) fn timed_out() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// The first word of an error.
///
/// Redis 6.2 wraps what a command inside a script says into an `ERR`, and only there it is looked for in the text.
fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    let detail = error.detail().unwrap_or_default();
    if code != "ERR" || !detail.contains("script") {
        return Some(code);
    }
    let inner = detail.split_whitespace().find_map(|word| {
        let word = word.strip_prefix('-').unwrap_or(word);
        let looks = word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_uppercase());
        (looks && of_code(word).is_some()).then_some(word)
    });
    Some(inner.unwrap_or(code))
}

fn of_code(code: &str) -> Option<StoreErrorKind> {
    Some(match code {
        "LOADING" | "OOM" | "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "NOREPLICAS"
        | "BUSY" | "MISCONF" | "MOVED" | "ASK" | "UNBLOCKED" => StoreErrorKind::Unavailable,
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" => StoreErrorKind::Denied,
        _ => return None,
    })
}

pub(crate) fn kind(error: &RedisError) -> StoreErrorKind {
    if let Some(code) = code(error) {
        let says = |text| error.detail().is_some_and(|detail| detail.starts_with(text));
        return match of_code(code) {
            Some(kind) => kind,
            None if code != "ERR" => StoreErrorKind::Invalid,
            None if says("max number of clients") => StoreErrorKind::Unavailable,
            // A command inside the script: 7.0, and 7.2 and later.
            None if says("The user executing the script can't") || says("ACL failure in script") => {
                StoreErrorKind::Denied
            }
            None => StoreErrorKind::Invalid,
        };
    }
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => StoreErrorKind::Timeout,
        ErrorKind::Io | ErrorKind::ClusterConnectionNotFound => StoreErrorKind::Unreachable,
        ErrorKind::AuthenticationFailed => StoreErrorKind::Denied,
        ErrorKind::MasterNameNotFoundBySentinel | ErrorKind::NoValidReplicasFoundBySentinel => {
            StoreErrorKind::Unavailable
        }
        _ => StoreErrorKind::Invalid,
    }
}

/// What an error says about the connection it came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is as good as before.
    Keep,
    /// It is broken, does not answer, or leads to a server that is not the one any more.
    Replace,
}

pub(crate) fn verdict(error: &RedisError) -> Verdict {
    match code(error) {
        // A replica now, cut off from its primary, or one that has forgotten who we are.
        Some("READONLY" | "MASTERDOWN" | "NOAUTH") => Verdict::Replace,
        Some(_) => Verdict::Keep,
        None => Verdict::Replace,
    }
}

pub(crate) fn is_denied(error: &RedisError) -> bool {
    kind(error) == StoreErrorKind::Denied
}

/// The node that a command belongs to, and whether only this once.
pub(crate) fn redirect(error: &RedisError) -> Option<(&str, bool)> {
    let once = match error.code()? {
        "ASK" => true,
        "MOVED" => false,
        _ => return None,
    };
    Some((error.redirect_node()?.0, once))
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::ServerErrorKind;

    fn says(code: &'static str, detail: &str) -> RedisError {
        redis::make_extension_error(code.to_owned(), Some(detail.to_owned()))
    }

    #[test]
    fn what_the_server_says_has_a_kind_and_is_kept_word_for_word() {
        let table = [
            (says("OOM", "command not allowed when used memory > 'maxmemory'."), StoreErrorKind::Unavailable),
            (says("NOAUTH", "Authentication required."), StoreErrorKind::Denied),
            (
                says("WRONGPASS", "invalid username-password pair or user is disabled."),
                StoreErrorKind::Denied,
            ),
            (says("BUSY", "Redis is busy running a script."), StoreErrorKind::Unavailable),
            (says("NOREPLICAS", "Not enough good replicas to write."), StoreErrorKind::Unavailable),
            (
                says("WRONGTYPE", "Operation against a key holding the wrong kind of value"),
                StoreErrorKind::Invalid,
            ),
            (says("ERR", "max number of clients reached"), StoreErrorKind::Unavailable),
            (
                says("ERR", "Error running script (call to f_1): @user_script:1: -OOM command not allowed"),
                StoreErrorKind::Unavailable,
            ),
            (
                says(
                    "ERR",
                    "Error running script (call to f_1): @user_script:1: -NOPERM this user has no permissions",
                ),
                StoreErrorKind::Denied,
            ),
            (
                says("ERR", "The user executing the script can't run this command or subcommand script: 1"),
                StoreErrorKind::Denied,
            ),
            (
                says("ERR", "ACL failure in script: User herd has no permissions to run the 'hset' command"),
                StoreErrorKind::Denied,
            ),
            (says("ERR", "Error running script: attempt to index a nil value"), StoreErrorKind::Invalid),
        ];
        for (error, kind) in table {
            let text = format!("{} {}", error.code().unwrap(), error.detail().unwrap());
            let error = store_error(error);
            assert_eq!(error.kind(), kind, "{text}");
            assert_eq!(error.source().unwrap().to_string(), text);
        }
        for (server, expected) in [
            (ServerErrorKind::BusyLoading, StoreErrorKind::Unavailable),
            (ServerErrorKind::ReadOnly, StoreErrorKind::Unavailable),
            (ServerErrorKind::MasterDown, StoreErrorKind::Unavailable),
            (ServerErrorKind::ClusterDown, StoreErrorKind::Unavailable),
            (ServerErrorKind::TryAgain, StoreErrorKind::Unavailable),
            (ServerErrorKind::NoPerm, StoreErrorKind::Denied),
            (ServerErrorKind::CrossSlot, StoreErrorKind::Invalid),
        ] {
            assert_eq!(kind(&RedisError::from((server.into(), "x"))), expected, "{server:?}");
        }
        assert_eq!(kind(&timed_out()), StoreErrorKind::Timeout);
        assert_eq!(
            kind(&std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
            StoreErrorKind::Unreachable
        );
    }

    #[test]
    fn a_connection_is_replaced_where_another_may_help() {
        assert_eq!(verdict(&timed_out()), Verdict::Replace);
        assert_eq!(
            verdict(&says("READONLY", "You can't write against a read only replica.")),
            Verdict::Replace
        );
        assert_eq!(verdict(&says("NOAUTH", "Authentication required.")), Verdict::Replace);
        assert_eq!(verdict(&says("OOM", "command not allowed")), Verdict::Keep);
        assert_eq!(verdict(&says("LOADING", "Redis is loading the dataset in memory")), Verdict::Keep);
    }
}
