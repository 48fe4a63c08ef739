//! What follows when a breaker closes: the ramp, where there is one, and the end of the incident.

use super::{Core, Scope};
use crate::Time;
use std::time::Duration;

impl Core {
    /// `on` (none: the whole provider) may be called again, after it was broken for `closed_for`. The incident
    /// lasts until the ramp that follows has ended; where none follows, it is over.
    pub(super) fn reopened(&self, on: Option<&Scope>, now: Time, closed_for: Duration) {
        let scope = on.unwrap_or(&self.root);
        if self.has_ramp() {
            scope.begin_ramp(now, closed_for);
        } else {
            scope.incident_over(now);
        }
    }
}

impl Scope {
    /// All its traffic is back: the next trip is another incident.
    pub(super) fn incident_over(&self, now: Time) {
        self.watch.incident_over(now);
    }
}
