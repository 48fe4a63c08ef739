//! What counts the outcomes of calls beside the limit: the breaker's window, the throttle's accepts.
//!
//! Each scope (and the provider itself) has a [`Watch`]. A call is told to the watch of its scope and to
//! that of its provider: when it starts ([`Watch::begin`]), and exactly once when it is known what became
//! of it ([`Watch::settled`]). A good head of a reply with a body is not yet known to be one: it settles
//! at the end of the body, or where that is dropped.

use super::ramp::Tally;
use crate::{Kind, Time};
#[cfg(feature = "budget")]
use crate::{budget::Throttle, random::Seeds};
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "budget")]
use std::sync::{Arc, OnceLock};

/// The counters of one scope.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Somebody counts here; else calls pass with this one look.
    active: AtomicBool,
    #[cfg(feature = "breaker")]
    pub(crate) breaker: crate::breaker::Cell,
    #[cfg(feature = "budget")]
    throttle: OnceLock<Arc<Throttle>>,
    /// Of the ramp, while one runs.
    pub(super) tally: Tally,
}

/// What a call was sent under.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watched {
    /// Which it was: later calls have higher numbers (or the same, of two at one instant).
    start: u64,
    /// The breaker's epoch.
    epoch: u32,
    /// Its task has failed elsewhere: a failure here may be the request's own fault.
    elsewhere: bool,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The reply, or the error in its place, says this. Never [`Kind::Refused`]: nothing was sent then.
    Reply(Kind),
    /// It was dropped after the deadline of its task had passed.
    TimedOut,
    /// It was dropped by a caller who gave up: no verdict.
    Dropped,
}

impl Verdict {
    fn is_failure(self) -> bool {
        matches!(self, Verdict::Reply(Kind::Failed | Kind::Overloaded) | Verdict::TimedOut)
    }
}

/// What follows from the outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The breaker opens.
    Tripped(Time),
    /// It is open, and stays so.
    ProbeFailed(Time),
}

impl Watch {
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed) || self.tally.is_on()
    }

    /// Somebody counts here from now on.
    #[cfg(feature = "breaker")]
    pub(crate) fn activate(&self) {
        self.active.store(true, Ordering::Relaxed);
    }

    /// A call starts, the `start`-th; `elsewhere`: its task has failed at another rung.
    #[inline]
    pub(super) fn begin(&self, start: u64, elsewhere: bool) -> Watched {
        #[cfg(feature = "budget")]
        if let Some(throttle) = self.throttle.get() {
            throttle.sent();
        }
        self.tally.began();
        #[cfg(feature = "breaker")]
        let epoch = self.breaker.epoch();
        #[cfg(not(feature = "breaker"))]
        let epoch = 0;
        Watched { start, epoch, elsewhere }
    }

    /// A call that began as `watched` came to this.
    #[inline]
    #[must_use]
    pub(super) fn settled(
        &self,
        watched: Watched,
        verdict: Verdict,
        now: impl FnOnce() -> Time + Copy,
    ) -> Option<Effect> {
        #[cfg(feature = "budget")]
        if let Some(throttle) = self.throttle.get() {
            throttle.settled(verdict, now);
        }
        self.tally.settled(verdict);
        if watched.elsewhere && verdict.is_failure() {
            return None;
        }
        #[cfg(feature = "breaker")]
        return self.breaker.settled(watched.epoch, watched.start, verdict, now);
        #[cfg(not(feature = "breaker"))]
        {
            let _ = (watched.start, watched.epoch, now);
            None
        }
    }

    pub(super) fn incident_over(&self, now: Time) {
        let _ = now;
        #[cfg(feature = "breaker")]
        self.breaker.incident_over();
    }

    /// What decides the share of calls that are not sent; from now on it hears of all calls.
    #[cfg(feature = "budget")]
    pub(super) fn throttle(&self, seeds: &Seeds) -> &Arc<Throttle> {
        self.active.store(true, Ordering::Relaxed);
        self.throttle.get_or_init(|| Arc::new(Throttle::new(seeds)))
    }
}
