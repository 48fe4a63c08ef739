//! The ceiling: what one refusal tells about it, and how it grows.

use super::{ACCEPT, Admitted, BlockedUntil, Control, DEAR, Event, GAP_MAX, WINDOW, blur};
use crate::Time;
use std::time::Duration;

/// A call above the limit that was neither refused nor served yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) rank: u32,
    pub(super) at: Time,
}

impl Control {
    /// How long until a call that was not refused counts as accepted.
    pub(super) fn accept_after(&self) -> Duration {
        self.refusal.map_or(WINDOW, |r| r.saturating_mul(4)).max(ACCEPT)
    }

    /// Whether a pause of this length costs several calls.
    pub(super) fn is_dear(&self, cost: Duration) -> bool {
        self.latency.is_some_and(|l| cost >= l.saturating_mul(DEAR))
    }

    pub(super) fn gap(&self, cost: Duration) -> Duration {
        let base = cost.saturating_mul(self.set.probe_gap);
        base.saturating_mul(1 << self.misses.min(10)).min(GAP_MAX.max(base))
    }

    /// All of the cap is in flight: is it time to try one above the limit?
    pub(super) fn look_above(&mut self, now: Time, busy: u32) -> Result<(), BlockedUntil> {
        let full = Err(BlockedUntil(None));
        let Some(l) = self.limit else { return full };
        if let Some(p) = self.probe {
            return Err(BlockedUntil(Some(p.at.saturating_add(self.accept_after()))));
        }
        if self.cap < l || busy >= self.top() || busy > self.cap {
            return full;
        }
        // Nothing came back in a whole pause: calls outlast hints here, so a pause is cheap, and
        // whether the limit is one on concurrency shows at once.
        let verify = self.event.is_some_and(|e| !e.verified && e.admits == 0);
        if !verify && (now < self.probe_at || self.release.is_some()) {
            return full;
        }
        if let Some(e) = &mut self.event {
            e.verified = true;
        }
        self.cap = self.cap.max(l.saturating_add(self.step).min(self.top()));
        if busy < self.cap { Ok(()) } else { full }
    }

    /// A call above the limit that was not refused in time has proven it wrong.
    pub(super) fn settle_probe(&mut self, now: Time) {
        if let Some(p) = self.probe.filter(|p| now >= p.at.saturating_add(self.accept_after())) {
            self.accepted_above(now, p.rank);
        }
    }

    pub(super) fn accepted_above(&mut self, now: Time, rank: u32) {
        self.probe = None;
        let Some(l) = self.limit else { return };
        if rank <= l {
            return;
        }
        self.limit = Some(rank);
        if rank > blur(self.base) {
            // more than blur: the quota has grown
            self.base = rank;
            self.misses = 0;
            self.shaded = false;
        }
        let pause = self.pause;
        let fresh = |e: &&mut Event| now < pause.saturating_add(e.cost.saturating_mul(3));
        if let Some(e) = self.event.as_mut().filter(fresh) {
            // refused at this level a moment ago, accepted now
            self.contradictions += 2;
            e.verified = false;
        }
        if rank >= self.cap {
            self.step = self.step.saturating_mul(2);
            self.cap = rank.saturating_add(self.step).min(self.top());
        }
    }

    /// The provider was serving `served` when it refused. Whether that was accepted a moment ago.
    pub(super) fn cut_to(&mut self, served: u32, call: Admitted, since: Option<Event>) -> bool {
        let s = served.max(self.set.floor);
        let step = std::mem::replace(&mut self.step, 1);
        // Accepted up to here and refused at the first step beyond: that is the limit. Had this level
        // been reached before, the limit fell, and nobody knows how far; or it is none on concurrency.
        let some = since.is_none_or(|e| e.admits > 1);
        let bracketed = call.first && some;
        let mut near = false;
        match self.limit {
            Some(l) if call.rank > l && s >= l => {
                // A probe failed: the limit is as it was. Where it is known to be blurred, what the
                // probe gained within the blur is given back.
                let l = if self.shaded && l <= blur(self.base) { self.base.min(l) } else { l };
                self.misses = self.misses.saturating_add(1);
                self.exact = true;
                self.limit = Some(l);
                self.cap = l;
                if let Some(r) = &mut self.release {
                    r.doubt = false;
                }
                if step == 1 {
                    // at the first step: that confirms it
                    self.contradictions = self.contradictions.saturating_sub(1);
                    if let Some(e) = &mut self.event {
                        e.verified = true;
                    }
                }
                return false;
            }
            Some(l) if s >= l - l / 4 && some && !call.first => {
                // Refused where it was accepted a moment ago: the provider counts a finished call a
                // little longer than we do. A pause between calls helps; if it does not, fewer places
                // (what we saw in service is one below already).
                self.contradictions += 1;
                self.misses = self.misses.saturating_add(1);
                let again = self.turnaround.is_on();
                let longer = s + 2 >= l && self.turnaround.lengthen(self.latency);
                if longer && !self.is_dear(self.event.map_or(Duration::ZERO, |e| e.cost)) {
                    if let Some(r) = &mut self.release {
                        r.doubt = !again;
                    }
                    self.cap = l;
                    return true;
                }
                self.shaded = true;
                near = true;
            }
            Some(l) => {
                if some && (!call.first || self.exact && s + 1 < l) {
                    self.contradictions += 2;
                }
                // If that was what the last refusal was about, it was no matter of milliseconds.
                self.turnaround.undo();
                self.misses = 0;
                self.shaded = false;
            }
            None => self.misses = 0,
        }
        self.limit = Some(s);
        self.base = s;
        self.exact = bracketed;
        if let Some(r) = &mut self.release {
            r.doubt = !bracketed;
        }
        // Refused again though nothing was accepted in between: the limit is further down.
        let lost = since.is_some_and(|e| e.admits == 1);
        self.cap = if lost { (s - s / 4).max(self.set.floor) } else { s };
        near
    }

    /// A probe that ended without a verdict proves nothing; another may go.
    pub(super) fn lose_probe(&mut self, call: Admitted) {
        if self.probe.is_some_and(|p| p.rank == call.rank && p.at == call.at) {
            self.probe = None;
        }
        self.trial_lost(call);
    }
}
