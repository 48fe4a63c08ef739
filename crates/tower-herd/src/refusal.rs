//! A "no" of our own: nothing was sent, and the caller is told until when.
//!
//! A refusal is not a failure of the provider: it costs no attempt and touches no statistic. It
//! travels as an error, often wrapped by the client in use, so it is searched for in the whole chain
//! of sources with [`Refusal::find`].
//!
//! A server hands it on: [`Refusal::to_response`] and [`Refusal::to_grpc_response`] say on the wire how long to
//! wait, or that waiting is of no use, and [`error_reply`] and [`grpc_error_reply`] do so for any error of a
//! stack. A throttle further in stays a 429 with its wait, and does not become a bare 500
//! (aws-samples/bedrock-access-gateway#88).
//!
//! # Stacks in front of stacks
//!
//! On the wire a refusal is a 503, and to who stands in front of that server a 503 is a failure: its breaker would
//! open because ours is open, and its throttle would shed because ours sheds. So the reply bears a mark,
//! `tower-herd-refused`, with the [name](RefusalKind::as_str) of the kind, and the HTTP classifier reads a
//! marked 503 (gRPC: 14) as what it is, a [`Throttled`](crate::Kind::Throttled) of
//! [local](crate::signal::Origin::Local) origin; a terminal one, which names no wait, as a
//! [`Failed`](crate::Kind::Failed) of such origin, not to be sent again:
//!
//! - breaker, throttle and ceiling of the outer stack take no notice, neither for nor against the server;
//! - what is throttled is sent again after the told wait, free of charge, or goes on to the next rung;
//! - it sets no pause. It is about this call (no slot for it, not its turn), or its instant is the latest and not
//!   the real one: an open breaker closes by a probe, and the probes of the inner stack are calls of the outer one.
//!
//! A 429 (`Paused`, `Tokens`) needs no mark: the provider's own rate stands in the way, until then, of everybody.

use std::{error::Error, fmt, sync::Arc, time::Duration};
use tokio::time::Instant;

/// The mark of a refusal on the wire.
#[cfg(feature = "http")]
pub(crate) const REFUSED: &str = "tower-herd-refused";

/// A refusal by one of our layers. See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// What kind of "no" this is; it tells which layer decided.
    pub kind: RefusalKind,
    /// Why, in words for a log.
    pub why: &'static str,
    /// The provider, or the ladder, that was not called.
    pub provider: Arc<str>,
    /// The scope below the provider, if the decision was about one.
    pub scope: Option<Arc<str>>,
    /// When a call may pass: exact for a pause, an estimate for a queue, and for an open breaker the latest: its
    /// probes may close it long before. None: asking again is of no use.
    pub retry_at: Option<Instant>,
    #[cfg(feature = "retry-token")]
    not_before: Option<crate::retry_token::Wait>,
}

/// Which layer said no, and to what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalKind {
    /// [`RetryAfterLayer`](crate::RetryAfterLayer): the provider is paused for longer than the caller can wait.
    Paused,
    /// [`FleetLimitLayer`](crate::FleetLimitLayer): no free slot, and the queue is full or too slow.
    NoSlot,
    /// [`HashedFailoverLayer`](crate::HashedFailoverLayer): no rung of the ladder could take the call in time.
    NoRung,
    /// [`BreakerLayer`](crate::breaker): the provider is broken.
    Open,
    /// [`RampedReadmissionLayer`](crate::readmission): the provider recovers, and this task is not among
    /// those that it gets back already.
    NotReadmitted,
    /// [`BudgetLayer`](crate::budget): so much of the provider's traffic fails that a share of it is not
    /// sent at all.
    Shed,
    /// [`TokenLimitLayer`](crate::token_limit): the tokens of a minute are used up until then.
    Tokens,
    /// [`TokenLimitLayer`](crate::token_limit): the call alone costs more tokens than there ever are at once.
    TooLarge,
    /// [`SpendLayer`](crate::spend): the task's money, or its tokens, are used up.
    Spend,
    /// The stack is shutting down and takes no new calls.
    Draining,
    /// The task's deadline has passed.
    Deadline,
    /// The retry budget is used up.
    Budget,
    /// The task's attempts are used up.
    Exhausted,
    /// [`RetryTokenLayer`](crate::retry_token) or its breaker: the job is not to be run yet, by anyone. Put it back
    /// until `retry_at`, without an attempt.
    NotBefore,
}

impl RefusalKind {
    /// A short fixed name, for events and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            RefusalKind::Paused => "paused",
            RefusalKind::NoSlot => "no_slot",
            RefusalKind::NoRung => "no_rung",
            RefusalKind::Open => "open",
            RefusalKind::NotReadmitted => "not_readmitted",
            RefusalKind::Shed => "shed",
            RefusalKind::Tokens => "tokens",
            RefusalKind::TooLarge => "too_large",
            RefusalKind::Spend => "spend",
            RefusalKind::Draining => "draining",
            RefusalKind::Deadline => "deadline",
            RefusalKind::Budget => "budget",
            RefusalKind::Exhausted => "exhausted",
            RefusalKind::NotBefore => "not_before",
        }
    }

    /// Whether asking again, later, cannot help this task.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(
            self,
            RefusalKind::Budget
                | RefusalKind::Exhausted
                | RefusalKind::Deadline
                | RefusalKind::Spend
                | RefusalKind::Draining
        )
    }
}

impl Refusal {
    /// A refusal; terminal kinds have no `retry_at`.
    #[must_use]
    pub fn new(kind: RefusalKind, why: &'static str, provider: Arc<str>, retry_at: Option<Instant>) -> Self {
        Refusal {
            kind,
            why,
            provider,
            scope: None,
            retry_at,
            #[cfg(feature = "retry-token")]
            not_before: None,
        }
    }

    /// Of a refusal of kind [`NotBefore`](RefusalKind::NotBefore): what the token said, namely for how long its key was
    /// closed, how many runs have been granted since the last success, and what stands in the way. `retry_at` is
    /// later: it is spread, so that jobs which were refused together do not come back together.
    #[cfg(feature = "retry-token")]
    #[must_use]
    pub fn not_before(&self) -> Option<&crate::retry_token::Wait> {
        self.not_before.as_ref()
    }

    #[cfg(feature = "retry-token")]
    pub(crate) fn with_not_before(mut self, wait: crate::retry_token::Wait) -> Self {
        self.not_before = Some(wait);
        self
    }

    /// The same about a scope of the provider.
    #[must_use]
    pub fn with_scope(mut self, scope: Option<Arc<str>>) -> Self {
        self.scope = scope;
        self
    }

    /// The first refusal in the chain that starts with `error` and follows its sources.
    #[must_use]
    pub fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Refusal> {
        crate::chain::chain(error).find_map(<dyn Error>::downcast_ref)
    }

    /// The time until `retry_at`, counted from now; none if asking again is of no use.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        self.retry_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// The status of this refusal as an HTTP reply: 429 where the provider's own rate is what
    /// stands in the way (`Paused`, `Tokens`), else 503.
    #[cfg(feature = "http")]
    #[must_use]
    pub fn status(&self) -> http::StatusCode {
        match self.kind {
            RefusalKind::Paused | RefusalKind::Tokens => http::StatusCode::TOO_MANY_REQUESTS,
            _ => http::StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// This refusal as an HTTP reply, with `Retry-After` in whole seconds, rounded up, so that who
    /// obeys it is never early. Terminal refusals carry `x-should-retry: false` instead. All bear the
    /// [mark](self#stacks-in-front-of-stacks) `tower-herd-refused`.
    #[cfg(feature = "http")]
    #[must_use]
    pub fn to_response<B: Default>(&self) -> http::Response<B> {
        let mut response = http::Response::new(B::default());
        *response.status_mut() = self.status();
        self.mark(response.headers_mut());
        match self.hint() {
            Some(wait) => {
                let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
                response.headers_mut().insert(http::header::RETRY_AFTER, seconds.into());
            }
            None => {
                let no = http::HeaderValue::from_static("false");
                response.headers_mut().insert("x-should-retry", no);
            }
        }
        response
    }
}

#[cfg(feature = "http")]
impl Refusal {
    /// Tells the stacks further out that nothing failed.
    fn mark(&self, headers: &mut http::HeaderMap) {
        headers.insert(REFUSED, http::HeaderValue::from_static(self.kind.as_str()));
    }

    /// The wait to tell others; none if asking again is of no use.
    fn hint(&self) -> Option<Duration> {
        self.wait().filter(|_| !self.kind.is_terminal())
    }

    /// The status of this refusal as a gRPC reply: 8 (resource exhausted) where the provider's own rate is
    /// what stands in the way, else 14 (unavailable).
    #[must_use]
    pub fn grpc_status(&self) -> u8 {
        match self.kind {
            RefusalKind::Paused => 8,
            _ => 14,
        }
    }

    /// This refusal as a gRPC reply of trailers only, with its wait in `grpc-retry-pushback-ms`, rounded up;
    /// -1, "not again", if it is terminal.
    #[must_use]
    pub fn to_grpc_response<B: Default>(&self) -> http::Response<B> {
        let mut response = grpc_response(self.grpc_status(), &self.to_string());
        self.mark(response.headers_mut());
        let pushback = match self.hint() {
            Some(wait) => {
                let millis = wait.as_nanos().div_ceil(1_000_000);
                u64::try_from(millis).unwrap_or(u64::MAX).into()
            }
            None => http::HeaderValue::from_static("-1"),
        };
        response.headers_mut().insert(crate::http::grpc::PUSHBACK, pushback);
        response
    }
}

/// An error of a stack as an HTTP reply, for who serves others with it: a refusal as
/// [`Refusal::to_response`] has it, else 504 if the provider did not answer in time and 502 if it could not
/// be reached or broke off.
#[cfg(feature = "http")]
#[must_use]
pub fn error_reply<B: Default>(error: &(dyn Error + 'static)) -> http::Response<B> {
    if let Some(refusal) = Refusal::find(error) {
        return refusal.to_response();
    }
    let mut response = http::Response::new(B::default());
    *response.status_mut() =
        if is_timeout(error) { http::StatusCode::GATEWAY_TIMEOUT } else { http::StatusCode::BAD_GATEWAY };
    response
}

/// The same for gRPC: a refusal as [`Refusal::to_grpc_response`] has it, else status 4 (deadline exceeded) or 14
/// (unavailable). What the error says stays here.
#[cfg(feature = "http")]
#[must_use]
pub fn grpc_error_reply<B: Default>(error: &(dyn Error + 'static)) -> http::Response<B> {
    match Refusal::find(error) {
        Some(refusal) => refusal.to_grpc_response(),
        None if is_timeout(error) => grpc_response(4, "no answer in time"),
        None => grpc_response(14, "no answer"),
    }
}

#[cfg(feature = "http")]
fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    crate::chain::chain(error).any(|error| {
        #[cfg(feature = "attempt-timeout")]
        if error.is::<crate::attempt_timeout::AttemptTimeout>() {
            return true;
        }
        error
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
    })
}

/// A gRPC reply of trailers only.
#[cfg(feature = "http")]
fn grpc_response<B: Default>(status: u8, message: &str) -> http::Response<B> {
    use crate::http::grpc;
    use std::fmt::Write;
    // gRPC over HTTP/2: printable ASCII but for the percent sign, the rest by its bytes.
    let encode = |mut text: String, byte: &u8| {
        match byte {
            b'%' => text.push_str("%25"),
            b' '..=b'~' => text.push(char::from(*byte)),
            _ => write!(text, "%{byte:02X}").expect("a string takes all"),
        }
        text
    };
    let message = message.as_bytes().iter().fold(String::new(), encode);
    let mut response = http::Response::new(B::default());
    *response.version_mut() = http::Version::HTTP_2;
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
    headers.insert(grpc::STATUS, u16::from(status).into());
    headers.insert(grpc::MESSAGE, message.try_into().expect("printable ASCII"));
    response
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not sent to {}", self.provider)?;
        if let Some(scope) = &self.scope {
            write!(f, " ({scope})")?;
        }
        write!(f, ": {}", self.why)?;
        match self.wait() {
            Some(wait) if wait.is_zero() => write!(f, "; may be tried again now"),
            Some(wait) => write!(f, "; may be tried again in {:.1} s", wait.as_secs_f64()),
            None => write!(f, "; trying again will not help"),
        }
    }
}

impl Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BoxError;

    #[derive(Debug)]
    struct Wrapper(BoxError);
    impl fmt::Display for Wrapper {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the client failed")
        }
    }
    impl Error for Wrapper {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&*self.0)
        }
    }

    fn paused(after: Duration) -> Refusal {
        Refusal::new(
            RefusalKind::Paused,
            "it asked for a pause",
            "search".into(),
            Some(Instant::now() + after),
        )
    }

    #[test]
    fn found_at_any_depth() {
        let mut error: BoxError = paused(Duration::ZERO).into();
        assert!(Refusal::find(&*error).is_some());
        for _ in 0..5 {
            error = Box::new(Wrapper(error));
            assert_eq!(Refusal::find(&*error).map(|r| r.kind), Some(RefusalKind::Paused));
        }
        let io: BoxError = std::io::Error::other(paused(Duration::ZERO)).into();
        assert!(Refusal::find(&*io).is_some(), "io::Error hides what it holds from source()");
        assert!(Refusal::find(&std::io::Error::other("plain")).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn says_how_long() {
        assert_eq!(
            paused(Duration::from_millis(1500)).to_string(),
            "not sent to search: it asked for a pause; may be tried again in 1.5 s"
        );
        let spent = Refusal::new(RefusalKind::Exhausted, "its 3 attempts are used up", "search".into(), None);
        assert!(spent.to_string().ends_with("trying again will not help"), "{spent}");
    }

    // brandur/redis-cell#58: floored seconds let the caller come back early.
    #[cfg(feature = "http")]
    #[tokio::test(start_paused = true)]
    async fn as_http_reply_the_wait_is_rounded_up() {
        for (millis, seconds) in [(0, "0"), (1, "1"), (1000, "1"), (1001, "2"), (59_999, "60")] {
            let reply = paused(Duration::from_millis(millis)).to_response::<String>();
            assert_eq!(reply.status(), 429);
            assert_eq!(reply.headers()["retry-after"], seconds, "{millis} ms");
        }
        let spent = Refusal::new(RefusalKind::Budget, "", "p".into(), None).to_response::<String>();
        assert_eq!(
            (spent.status().as_u16(), &spent.headers()["x-should-retry"]),
            (503, &"false".parse().unwrap())
        );
    }
}
