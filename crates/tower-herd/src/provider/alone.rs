//! A provider of one process: what stands in the place of its [lease](super::lease) without the feature `store`.

use super::{Core, PauseReason, Scope};
use crate::Time;
use std::{convert::Infallible, time::Duration};

pub(super) type Tie = Infallible;

pub(super) fn tie(_fleet: &super::fleet::Shared) -> Option<Tie> {
    None
}

impl Core {
    #[inline]
    pub(super) fn is_in_time(&self) -> bool {
        true
    }
    #[inline]
    pub(crate) fn check_lease(&self) {}
    pub(super) fn no_lease(&self) -> Option<&'static str> {
        None
    }
    pub(super) fn tell_limits(&self) {}
    #[inline]
    pub(super) fn demand(&self) {}
    #[inline]
    pub(super) fn has_shed(&self) {}
    pub(super) fn tell_pause(&self, _on: Option<&Scope>, _wait: Duration, _reason: PauseReason) {}
    pub(super) fn tell_cleared(&self, _on: Option<&Scope>) {}
    pub(super) fn tell_throttled(&self, _generation: u64, _wait: Duration) {}
    pub(super) fn tell_overloaded(&self, _generation: u64, _wait: Option<Duration>) {}
    #[inline]
    pub(super) fn may_probe(&self, _on: &Scope, _now: Time) -> bool {
        true
    }
    #[inline]
    pub(super) fn used_leave(&self, _on: &Scope) {}
    pub(super) fn tell_probed(&self, _on: &Scope, _failed: bool) {}
}

#[cfg(feature = "breaker")]
impl Core {
    pub(super) fn tell_closed(&self, _on: Option<&Scope>) {}
    pub(super) fn tell_opened(
        &self,
        _on: Option<&Scope>,
        _wait: Duration,
        _probes: super::broken::Probes,
        alert: Option<crate::breaker::Alert>,
    ) -> Option<crate::breaker::Alert> {
        alert
    }
}
