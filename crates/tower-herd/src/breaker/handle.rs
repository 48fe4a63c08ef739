use super::Alert;
use crate::{Provider, Switch};
use std::fmt;
use tokio::time::Instant;

/// One breaker, read and steered from outside. A handle: clones are the same.
///
/// From [`BreakerLayer::handle`](super::BreakerLayer::handle).
#[derive(Clone)]
pub struct BreakerHandle(Provider);

/// How a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum BreakerState {
    /// Calls pass, and their outcomes are counted.
    Closed,
    /// Nobody calls but a probe.
    Open,
    /// Its open time is over and no probe has succeeded yet: still nobody calls but a probe.
    HalfOpen,
    /// An operator has opened it: nobody calls, and nothing is probed.
    Forced,
}

impl BreakerHandle {
    pub(super) fn new(provider: &Provider) -> Self {
        BreakerHandle(provider.clone())
    }

    /// How it stands. In [`Mode::Observe`](crate::Mode::Observe): how it would.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        self.0.breaker_state()
    }

    /// The end of its open time, if a trip has opened it.
    #[must_use]
    pub fn open_until(&self) -> Option<Instant> {
        self.0.broken_until().map(|until| self.0.clock().instant(until))
    }

    /// Failures among the last calls.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.0.breaker().failures()
    }

    /// The incident that goes on, from the first trip to the end of the ramp: its alert, with what has been
    /// refused since.
    #[must_use]
    pub fn incident(&self) -> Option<Alert> {
        self.0.incident()
    }

    /// Opens it until [`close`](Self::close) or [`reset`](Self::reset): nobody calls, and nothing is
    /// probed. Raises no alert.
    pub fn force_open(&self) {
        self.0.open_breaker();
    }

    /// Closes it as a good probe does: what follows one (the ramp) follows.
    pub fn close(&self) {
        self.0.close_breaker();
    }

    /// Closes it and forgets all: its window is empty, and its incident over.
    pub fn reset(&self) {
        self.0.reset_breaker();
    }

    /// Its switch.
    #[must_use]
    pub fn switch(&self) -> Switch {
        self.0.breaker().switch()
    }
}

impl fmt::Debug for BreakerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BreakerHandle")
            .field("provider", self.0.name())
            .field("scope", &self.0.scope_name())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
