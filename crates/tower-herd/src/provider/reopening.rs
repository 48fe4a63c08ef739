//! What follows when a breaker closes.

use super::Scope;
use crate::Time;
use std::time::Duration;

impl Scope {
    /// It may be called again, after it was broken for `closed_for`. The incident lasts until the ramp that
    /// follows has ended ([`Self::incident_over`]); where none runs, it is over.
    pub(super) fn reopened(&self, now: Time, closed_for: Duration) {
        let _ = closed_for;
        self.incident_over(now);
    }

    /// All its traffic is back: the next trip is another incident.
    pub(super) fn incident_over(&self, now: Time) {
        self.watch.incident_over(now);
    }
}
