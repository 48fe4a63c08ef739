//! What an error proves about the request: whether it may have been executed.

use crate::{BoxError, Executed, Kind, Refusal, Signal, chain::chain};
use std::{error::Error, fmt, io};

/// Marks an error as proof that the request was not executed.
///
/// After a timeout nobody knows whether a charge went through; after a failed connect everybody
/// does. The second may be sent again even where a second charge would hurt
/// ([`Safety::Once`](crate::Safety::Once)). The classifier knows such errors of hyper-util's client
/// (feature `hyper-util`) and `io::ErrorKind::ConnectionRefused` anywhere in a chain. A client with
/// connect errors of its own wraps them:
///
/// ```
/// use tower_herd::{BoxError, NotExecuted};
///
/// # struct ClientError;
/// # impl ClientError { fn is_connect(&self) -> bool { true } }
/// # impl From<ClientError> for BoxError { fn from(_: ClientError) -> BoxError { "no route".into() } }
/// fn mark(error: ClientError) -> BoxError {
///     if error.is_connect() { NotExecuted::new(error).into() } else { error.into() }
/// }
/// # assert!(mark(ClientError).is::<NotExecuted>());
/// ```
#[derive(Debug)]
pub struct NotExecuted(BoxError);

impl NotExecuted {
    /// `error`, marked.
    pub fn new(error: impl Into<BoxError>) -> Self {
        NotExecuted(error.into())
    }

    /// The error inside.
    #[must_use]
    pub fn into_inner(self) -> BoxError {
        self.0
    }

    /// Whether something in the chain that starts with `error` proves that the request was not
    /// executed.
    #[must_use]
    pub fn is_proven_by(error: &(dyn Error + 'static)) -> bool {
        chain(error).any(proves)
    }
}

impl fmt::Display for NotExecuted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Error for NotExecuted {
    // The marked error itself is a link of the chain: what it is may matter to others.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

fn proves(error: &(dyn Error + 'static)) -> bool {
    if error.is::<NotExecuted>() {
        return true;
    }
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return error.kind() == io::ErrorKind::ConnectionRefused;
    }
    #[cfg(feature = "hyper-util")]
    {
        if let Some(error) = error.downcast_ref::<hyper_util::client::legacy::Error>() {
            return error.is_connect();
        }
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            // RFC 9113, 8.7: the stream was closed before any application processing.
            return error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
        }
    }
    false
}

/// Whether a wait of ours ran out: the call may still run at the provider.
#[cfg(any(feature = "fleet-limit", feature = "http"))]
pub(crate) fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    chain(error).any(|link| {
        #[cfg(feature = "attempt-timeout")]
        if link.is::<crate::AttemptTimeout>() {
            return true;
        }
        link.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
    })
}

/// What an error in place of a reply says, as far as its chain tells.
///
/// A [`Refusal`] of our own is [`Kind::Refused`]; everything else is [`Kind::Failed`], not executed
/// if [`NotExecuted::is_proven_by`] says so. Made for the error arm of a
/// [`classify_fn`](crate::classify_fn).
#[must_use]
pub fn signal_of_error(error: &(dyn Error + 'static)) -> Signal {
    #[allow(unused_mut, reason = "what a timeout tells is known with its feature only")]
    let mut failed = Signal::new(Kind::Failed);
    let mut proven = false;
    for link in chain(error) {
        if link.is::<Refusal>() {
            return Signal::new(Kind::Refused);
        }
        proven |= proves(link);
        #[cfg(feature = "attempt-timeout")]
        if let Some(timeout) = link.downcast_ref::<crate::AttemptTimeout>()
            && timeout.phase == crate::attempt_timeout::Phase::Headers
        {
            failed = failed.timed_out(timeout.after);
        }
    }
    if proven { failed.with_executed(Executed::No) } else { failed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RefusalKind;

    #[derive(Debug)]
    struct Wrapper(BoxError);
    impl fmt::Display for Wrapper {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("wrapped")
        }
    }
    impl Error for Wrapper {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&*self.0)
        }
    }

    #[test]
    fn what_an_error_proves() {
        let io = |kind| BoxError::from(io::Error::from(kind));
        let wrap = |error| BoxError::from(Wrapper(error));
        let refusal = || Refusal::new(RefusalKind::Paused, "", "p".into(), None);
        for (error, kind, executed) in [
            (io(io::ErrorKind::ConnectionRefused), Kind::Failed, Executed::No),
            (wrap(wrap(io(io::ErrorKind::ConnectionRefused))), Kind::Failed, Executed::No),
            (
                io::Error::other(Wrapper(io(io::ErrorKind::ConnectionRefused))).into(),
                Kind::Failed,
                Executed::No,
            ),
            (wrap(NotExecuted::new("dns").into()), Kind::Failed, Executed::No),
            (io::Error::other(NotExecuted::new("dns")).into(), Kind::Failed, Executed::No),
            (io(io::ErrorKind::ConnectionReset), Kind::Failed, Executed::Maybe),
            (io(io::ErrorKind::TimedOut), Kind::Failed, Executed::Maybe),
            ("text".into(), Kind::Failed, Executed::Maybe),
            (wrap(refusal().into()), Kind::Refused, Executed::No),
            (NotExecuted::new(io::Error::other(refusal())).into(), Kind::Refused, Executed::No),
        ] {
            let signal = signal_of_error(&*error);
            assert_eq!((signal.kind, signal.executed), (kind, executed), "{error:?}");
            assert_eq!(
                NotExecuted::is_proven_by(&*error),
                executed == Executed::No && kind == Kind::Failed || error.is::<NotExecuted>(),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_mark_hides_nothing() {
        let marked = NotExecuted::new(io::Error::from(io::ErrorKind::AddrNotAvailable));
        assert_eq!(marked.to_string(), io::Error::from(io::ErrorKind::AddrNotAvailable).to_string());
        assert!(marked.source().is_some_and(<dyn Error>::is::<io::Error>));
        assert!(marked.into_inner().is::<io::Error>());
    }

    #[cfg(feature = "hyper-util")]
    #[test]
    fn a_refused_stream_that_we_sent_ourselves_proves_nothing() {
        let local = h2::Error::from(h2::Reason::REFUSED_STREAM);
        assert!(!NotExecuted::is_proven_by(&local));
    }

    #[cfg(feature = "hyper-util")]
    #[tokio::test]
    async fn a_stream_that_the_server_refused_was_not_executed() {
        for (reason, proven) in [(h2::Reason::REFUSED_STREAM, true), (h2::Reason::INTERNAL_ERROR, false)] {
            let (ours, theirs) = tokio::io::duplex(4096);
            let server = tokio::spawn(async move {
                let mut connection = h2::server::handshake(theirs).await.unwrap();
                let (_, mut respond) = connection.accept().await.unwrap().unwrap();
                respond.send_reset(reason);
                while connection.accept().await.is_some() {}
            });
            let (client, connection) = h2::client::handshake(ours).await.unwrap();
            let connection = tokio::spawn(connection);
            let (reply, _) =
                client.ready().await.unwrap().send_request(http::Request::new(()), true).unwrap();
            let error = Wrapper(reply.await.unwrap_err().into());
            assert_eq!(NotExecuted::is_proven_by(&error), proven, "{reason}");
            server.abort();
            connection.abort();
        }
    }
}
