//! What one reply says: the small value that everything else is decided by.
//!
//! A status code alone does not tell what to do. The same 429 may mean "wait two seconds" or "the
//! account is empty"; a timeout may or may not have charged a card. A [`Signal`] keeps these apart:
//! its [`Kind`] says which way to go, [`Pushback`] what the server asked for, [`Executed`] whether
//! the request may have taken effect, [`ResendAdvice`] what the reply says about sending it again.
//!
//! The last column is how the [breaker](crate::breaker) counts it.
//!
//! | kind | sent again here | next rung | ceiling | breaker |
//! |---|---|---|---|---|
//! | [`Success`](Kind::Success) | - | - | may grow | success |
//! | [`Empty`](Kind::Empty) | no | free rung: yes; paid rung: the chain ends | may grow | success |
//! | [`Throttled`](Kind::Throttled) | after the pause, if safe | only into a free slot, if the wait exceeds the hint patience | one cut an event | neutral |
//! | [`Overloaded`](Kind::Overloaded) | after the pause, if safe | if safe | one cut | failure |
//! | [`Failed`](Kind::Failed) | if safe | if safe | neutral | failure |
//! | [`Depleted`](Kind::Depleted) | never | yes | neutral | neutral |
//! | [`Misconfigured`](Kind::Misconfigured) | never | yes | neutral | neutral |
//! | [`Rejected`](Kind::Rejected) | never (421, 425 may; a key in flight is asked for again) | no, the chain ends | neutral | neutral |
//! | [`Refused`](Kind::Refused) | at its `retry_at`, free of charge | yes | neutral | neutral |

use std::time::Duration;

/// What a reply, or an error in its place, says. See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Signal {
    /// Which of the nine answers this is.
    pub kind: Kind,
    /// The wait that the server asked for.
    pub pushback: Pushback,
    /// Whether the request may have taken effect.
    pub executed: Executed,
    /// What the reply says about sending the request again.
    pub resend: ResendAdvice,
    /// What a pause that follows from this reply covers.
    pub reach: Reach,
    /// Who speaks: the provider, or one of our own layers.
    pub origin: Origin,
    /// The quota that the reply's limit headers tell, if they tell one.
    pub quota: Option<Quota>,
    reporter: Reporter,
    given: Given,
}

/// Which provider has learned from the reply already (0: none): a gate further out, that could not see
/// its sensor, must not tell it again. No part of what the reply says, so two signals do not differ by it.
#[derive(Clone, Copy, Default)]
struct Reporter(usize);

impl PartialEq for Reporter {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Reporter {}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0 == 0 { "None" } else { "Some" })
    }
}

/// The time that a call had whose timeout this is, in microseconds; 0: it is none. No part of what the reply says
/// either.
#[derive(Clone, Copy, Default)]
struct Given(u32);

impl PartialEq for Given {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Given {}

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0 == 0 { "None" } else { "Some" })
    }
}

/// The nine kinds of answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The call worked (2xx, 1xx, 3xx, gRPC 0).
    Success,
    /// The call worked and found nothing: a healthy provider without an answer. Only the caller can
    /// tell (see [`classify_fn`](crate::classify_fn)).
    Empty,
    /// Healthy, and not at this rate (429, 420, GitHub's 403, gRPC 8).
    Throttled,
    /// Too busy to serve (529; 503 or 413 with a hint).
    Overloaded,
    /// Broken: timeout, connect error, 408, 5xx.
    Failed,
    /// The account has nothing left (402, `insufficient_quota`, a daily quota).
    Depleted,
    /// This rung's key or configuration is wrong (401, 403, unknown model).
    Misconfigured,
    /// The request is at fault (other 4xx).
    Rejected,
    /// A [`Refusal`](crate::Refusal) of our own: nothing was sent.
    Refused,
}

impl Kind {
    /// A short fixed name, for events and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Success => "success",
            Kind::Empty => "empty",
            Kind::Throttled => "throttled",
            Kind::Overloaded => "overloaded",
            Kind::Failed => "failed",
            Kind::Depleted => "depleted",
            Kind::Misconfigured => "misconfigured",
            Kind::Rejected => "rejected",
            Kind::Refused => "refused",
        }
    }

    /// Whether the provider answered as a healthy one does.
    #[must_use]
    pub const fn is_success(self) -> bool {
        matches!(self, Kind::Success | Kind::Empty)
    }
}

/// The server's own wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushback {
    /// It gave no usable hint.
    None,
    /// Not before this time has passed. Parsed whole, however long.
    After(Duration),
    /// Not again (gRPC A6: a negative or unparsable pushback).
    Never,
}

impl Pushback {
    /// The wait, if the server named one.
    #[must_use]
    pub const fn wait(self) -> Option<Duration> {
        match self {
            Pushback::After(wait) => Some(wait),
            Pushback::None | Pushback::Never => None,
        }
    }
}

/// Whether the request may have taken effect at the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// Proven not: 429, connect failure, refused stream, a refusal of our own.
    No,
    /// Nobody knows: timeout or reset after the request was sent, 5xx.
    Maybe,
    /// It did.
    Yes,
}

/// What the reply says about sending the request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResendAdvice {
    /// Nothing: the safety of the request and the evidence of execution decide.
    BySafety,
    /// It may be sent again (`x-should-retry: true`, 421, 425, gRPC 10). Never overrides the
    /// request's own safety.
    Allowed,
    /// It must not be sent again here.
    Never,
    /// The same request, under the same idempotency key, is being executed at this moment (a 409 that says
    /// so): asking again later gives its reply, and costs nothing. Never overrides the request's own safety.
    InProgress,
}

/// What a pause covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The scope of the call (model, route, account key).
    Scope,
    /// The whole provider.
    Provider,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The provider, or the way to it.
    Provider,
    /// One of our own layers.
    Local,
}

/// A quota as told by a reply's limit headers.
///
/// For a bucket that refills steadily, `(limit - remaining) / reset` is its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Requests (or tokens) the bucket holds when full.
    pub limit: u32,
    /// What is left of it.
    pub remaining: u32,
    /// Time until it is full again, or until the window ends.
    pub reset: Duration,
    /// The error of `reset`: the unit it was told in, or both units where it is the difference of
    /// two rounded instants. A bucket that fills within it tells no rate.
    pub resolution: Duration,
    /// Whether it is a fixed window that is filled at once at its end (GitHub), and not a bucket
    /// that refills steadily.
    pub fixed_window: bool,
}

impl Signal {
    /// A signal of this kind, with what usually goes with it: see the table of the [module](self).
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        let executed = match kind {
            Kind::Success | Kind::Empty | Kind::Rejected => Executed::Yes,
            Kind::Throttled | Kind::Refused | Kind::Depleted | Kind::Misconfigured => Executed::No,
            Kind::Overloaded | Kind::Failed => Executed::Maybe,
        };
        let resend = match kind {
            Kind::Depleted | Kind::Misconfigured | Kind::Rejected => ResendAdvice::Never,
            _ => ResendAdvice::BySafety,
        };
        let (reach, origin) = match kind {
            Kind::Depleted | Kind::Misconfigured => (Reach::Provider, Origin::Provider),
            Kind::Refused => (Reach::Scope, Origin::Local),
            _ => (Reach::Scope, Origin::Provider),
        };
        let (pushback, quota, reporter) = (Pushback::None, None, Reporter(0));
        Signal { kind, pushback, executed, resend, reach, origin, quota, reporter, given: Given(0) }
    }

    /// The answer to a request whose idempotency key is in flight already: an earlier call under the same key
    /// has not ended. `Rejected`, since this call did nothing, and executed *maybe*, since the other one may.
    ///
    /// A retry layer asks again, for a request that may suffer it, after the wait or its own backoff, as
    /// often as it delivers a throttled one again, and charges nothing for it. A ladder stays where it is.
    /// The HTTP classifier knows the usual forms (see `http`); for another one, return this from a
    /// classifier of your own.
    #[must_use]
    pub const fn in_progress() -> Self {
        Signal::new(Kind::Rejected).with_executed(Executed::Maybe).with_resend(ResendAdvice::InProgress)
    }

    /// The refusal of another stack, as it came over the wire: nothing failed, and nothing was sent. Without a wait
    /// it is the end of the task there, which may have come after a call: not throttled, and not to be sent again.
    #[cfg(feature = "http")]
    pub(crate) const fn refused_elsewhere(pushback: Pushback) -> Self {
        let mut signal = match pushback {
            Pushback::After(_) => Signal::new(Kind::Throttled),
            Pushback::None | Pushback::Never => Signal::new(Kind::Failed).with_resend(ResendAdvice::Never),
        };
        signal.origin = Origin::Local;
        signal.with_pushback(pushback)
    }

    /// What an observer is told of it: to him it is a refusal.
    pub(crate) const fn as_refusal(mut self) -> Self {
        self.kind = Kind::Refused;
        self
    }

    /// Whether it is one.
    pub(crate) const fn is_refused_elsewhere(&self) -> bool {
        matches!((self.kind, self.origin), (Kind::Throttled | Kind::Failed, Origin::Local))
    }

    /// The same once a provider, known by this number, has learned from it.
    pub(crate) const fn reported_by(mut self, provider: usize) -> Self {
        self.reporter = Reporter(provider);
        self
    }

    pub(crate) const fn is_reported_by(&self, provider: usize) -> bool {
        self.reporter.0 == provider
    }

    /// The same for a reply that did not come within this time.
    #[cfg(feature = "attempt-timeout")]
    pub(crate) fn timed_out(mut self, after: Duration) -> Self {
        self.given = Given(u32::try_from(after.as_micros()).unwrap_or(u32::MAX).max(1));
        self
    }

    /// Within which time it did not come, if that is what went wrong.
    pub(crate) fn timed_out_after(&self) -> Option<Duration> {
        (self.given.0 > 0).then(|| Duration::from_micros(self.given.0.into()))
    }

    /// The same with the server's wait.
    #[must_use]
    pub const fn with_pushback(mut self, pushback: Pushback) -> Self {
        self.pushback = pushback;
        self
    }

    /// The same with other evidence of execution.
    #[must_use]
    pub const fn with_executed(mut self, executed: Executed) -> Self {
        self.executed = executed;
        self
    }

    /// The same with other advice about sending it again.
    #[must_use]
    pub const fn with_resend(mut self, resend: ResendAdvice) -> Self {
        self.resend = resend;
        self
    }

    /// The same with another reach of its pause.
    #[must_use]
    pub const fn with_reach(mut self, reach: Reach) -> Self {
        self.reach = reach;
        self
    }

    /// The same with the quota of the reply's limit headers.
    #[must_use]
    pub const fn with_quota(mut self, quota: Option<Quota>) -> Self {
        self.quota = quota;
        self
    }
}
