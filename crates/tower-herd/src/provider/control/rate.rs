//! Pacing: a rate that headers tell, that refusals teach, or that is configured.

use super::{Control, Event, LimitHeaders, WINDOW, nanos};
use crate::Time;
use std::time::Duration;

/// Pacing by rate (a GCRA: `tat` is the theoretical arrival time).
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) gap: u64,
    pub(super) burst: u64,
    pub(super) tat: Time,
    /// From headers, as opposed to from refusals.
    pub(super) told: bool,
    /// Learned pace: the gap before the last raise, and when the next raise may be.
    pub(super) before: Option<u64>,
    pub(super) step: u64,
    pub(super) raise_at: Time,
}

impl Pace {
    pub(super) fn ready(&self) -> Time {
        Time::from_nanos(
            self.tat.as_nanos().saturating_sub(self.gap.saturating_mul(self.burst.saturating_sub(1))),
        )
    }

    pub(super) fn in_hand(&self, now: Time) -> u64 {
        let full = self.gap.saturating_mul(self.burst);
        full.saturating_sub(nanos(self.tat.saturating_since(now))) / self.gap.max(1)
    }

    pub(super) fn drain(&mut self, now: Time) {
        self.tat = self
            .tat
            .max(Time::from_nanos(now.as_nanos().saturating_add(self.gap.saturating_mul(self.burst))));
    }
}

impl Control {
    /// A learned pace creeps up, rarely at first, then in doubling steps.
    pub(super) fn raise_pace(&mut self, now: Time, waiting: usize) {
        let every = self.latency.unwrap_or(WINDOW).max(WINDOW);
        let Some(p) = &mut self.pace else { return };
        if p.told || waiting == 0 || now < self.probe_at || now < p.raise_at {
            return;
        }
        p.before = Some(p.gap);
        p.gap = (p.gap.saturating_mul(100) / (100 + p.step)).max(1);
        p.step = (p.step * 2).min(100);
        p.raise_at = now.saturating_add(every);
        if let Some(e) = &mut self.event {
            // what this pace brings is counted from here
            e.sent = now;
            e.cost = Duration::ZERO;
            e.admits = 0;
        }
    }

    pub(super) fn on_headers(&mut self, now: Time, sent: Time, busy: u32, h: LimitHeaders) {
        let used = h.limit.saturating_sub(h.remaining);
        let least = nanos(h.reset.saturating_sub(h.resolution));
        if h.limit == 0 || used == 0 || least == 0 {
            return;
        }
        self.told_since = true;
        // "remaining" is whole tokens, so what is missing is in (used - 1, used]
        let low = (least / used).max(1);
        let high = nanos(h.reset).checked_div(used - 1).unwrap_or(u64::MAX);
        let (old, tat) = match self.pace {
            Some(p) if p.told => (Some(p.gap), p.tat),
            _ => {
                // what was refused before is explained now
                self.limit = self.set.max;
                self.cap = self.limit.unwrap_or(self.cap);
                self.contradictions = 0;
                (None, now)
            }
        };
        let (gap, fresh) = match old {
            Some(g) if g <= high => (g.max(low), low > g.saturating_add(g / 8)),
            _ => (low, true),
        };
        // Never more in hand than the server says was left; when this bucket is new to us, less
        // what may have left since.
        let gone = if fresh { used.saturating_add(u64::from(busy)) } else { used };
        let from = if fresh { now } else { sent };
        let tat = tat.max(Time::from_nanos(from.as_nanos().saturating_add(gap.saturating_mul(gone))));
        // one token is kept back, for what rounding hides
        let burst = (h.limit - 1).max(1);
        self.pace = Some(Pace { gap, burst, tat, told: true, before: None, step: 5, raise_at: now });
    }

    /// Refused though headers tell the rate. True if the rate cannot be the reason.
    pub(super) fn told_rate_refused(&mut self, now: Time) -> bool {
        let known = std::mem::replace(&mut self.told_since, false);
        let Some(p) = &mut self.pace else { return true };
        let room = p.in_hand(now);
        p.drain(now);
        known && room > 1 + p.burst / 4
    }

    /// Refused for the rate: between two refusals the bucket was emptied once.
    pub(super) fn rate_refused(&mut self, now: Time, sent: Time, since: Option<Event>) {
        let Some(e) = since else { return };
        let accepted = u64::from(e.admits.saturating_sub(1)).max(1);
        let mut time = sent.saturating_since(e.sent);
        // what refills in a pause is taken to be worth a second at most
        time = time.saturating_sub(e.cost.saturating_sub(WINDOW));
        let seen = (nanos(time) / accepted).max(1);
        let seen = seen.saturating_add(seen / 32);
        let (gap, missed) = match self.pace {
            None => (seen, false),
            Some(p) => {
                let least = p.gap.saturating_add(p.gap / 32).max(2);
                let most = p.before.map_or(p.gap.saturating_mul(2), |b| b.saturating_add(b / 32)).max(least);
                (seen.clamp(least, most), p.before.is_some())
            }
        };
        self.misses = if missed { self.misses.saturating_add(1) } else { 0 };
        self.pace = Some(Pace { gap, burst: 1, tat: now, told: false, before: None, step: 5, raise_at: now });
        // the ceiling only guards: what the rate needs, and as much again
        self.limit = self.set.max;
        self.cap = self.set.max.unwrap_or(self.cap.max(self.set.start));
    }
}
