//! The question that is asked for each call: may it go now?

use super::rate::LATE;
use super::{Admitted, BlockedUntil, Control, Probe, SPAN, WINDOW};
use crate::Time;

impl Control {
    /// May one more call go now? `busy` are in flight, `waiting` wait (the asker included).
    ///
    /// # Errors
    /// The instant at which to ask again, if it is known.
    pub fn admit(&mut self, now: Time, busy: u32, waiting: usize) -> Result<Admitted, BlockedUntil> {
        if now < self.pause {
            return Err(BlockedUntil(Some(self.pause)));
        }
        self.settle_probe(now);
        self.probe_due = now >= self.probe_at;
        if let Some(r) = &mut self.release {
            if now >= r.until {
                self.release = None;
            } else if r.even.is_none() {
                let n = u32::try_from(waiting).unwrap_or(u32::MAX).max(1);
                r.even = Some(r.window / 16 * 15 / n);
            }
        }
        if let (Some(r), Some(l)) = (self.release, self.latency) {
            // what is still in service there may be all that is allowed now
            let first = r.from.saturating_add(l / 4);
            if r.doubt && busy > self.plan() && now < first {
                return Err(BlockedUntil(Some(first)));
            }
        }
        if busy >= self.cap {
            self.look_above(now, busy)?;
        } else if let Some(at) = self.turnaround.full(now, busy, self.cap) {
            return Err(BlockedUntil(Some(at)));
        }
        if let Some(ready) = self.held_by_rate(now, waiting) {
            return Err(BlockedUntil(Some(ready)));
        }
        if let Some(ready) = self.held_by_purse(now) {
            return Err(BlockedUntil(ready));
        }
        let rest = self.latency.unwrap_or(SPAN).saturating_mul(2).max(WINDOW);
        if busy == 0 && self.idle.is_some_and(|t| now.saturating_since(t) > rest) {
            self.warm = 0;
        }
        let mut due = now;
        let above = self.limit.is_some_and(|l| busy >= l);
        if self.release.is_some() || busy >= self.warm || above {
            let mut gap = self.spacing(now, busy);
            if above {
                gap = gap.max(self.refusal.unwrap_or_default().saturating_mul(2));
            }
            let at = self.last.map_or(now, |t| t.saturating_add(gap));
            if now < at {
                return Err(BlockedUntil(Some(at)));
            }
            due = at.max(now.saturating_sub(LATE));
        }
        let rank = busy.saturating_add(1);
        self.idle = None;
        self.turnaround.look(now, rank);
        // A timer is late by its grain: the next turn counts from when this one was due.
        self.last = Some(due);
        self.warm = self.warm.max(rank);
        let first = rank > self.high;
        self.high = self.high.max(rank);
        if above {
            self.probe = Some(Probe { rank, at: now });
        }
        if let Some(e) = &mut self.event {
            e.admits = e.admits.saturating_add(1);
        }
        if let Some(p) = &mut self.pace {
            p.took_one(now);
        }
        self.spend(now);
        self.admitted += 1;
        self.trial_sent();
        Ok(Admitted { stamp: self.stamp, rank, nth: self.admitted, at: now, first })
    }
}
