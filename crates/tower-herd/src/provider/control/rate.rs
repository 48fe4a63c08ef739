//! Pacing: a rate that is configured, that headers tell, or that refusals teach.

use super::{CONTRADICTIONS, Control, Event, WINDOW, nanos};
use crate::Time;
use std::time::Duration;

/// A caller that is late by the grain of its timer does not lose its turn: tokio's timers are up to
/// a millisecond late, and a busy host adds some more.
pub(super) const LATE: Duration = Duration::from_millis(4);

/// Where a pace comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Configured,
    Told,
    /// Refusals contradict a ceiling: it is the rate.
    Learned,
    /// It may be the rate, and a pause costs more than to heed both.
    Suspected,
}

/// A pause up to this is worth a better estimate of the rate.
const CHEAP: Duration = Duration::from_secs(2);

/// Pacing by rate (a GCRA: `tat` is the theoretical arrival time).
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) gap: u64,
    pub(super) burst: u64,
    pub(super) tat: Time,
    pub(super) source: Source,
    /// Learned pace: the gap before the last raise, and when the next raise may be.
    before: Option<u64>,
    step: u64,
    raise_at: Time,
    /// No more than a lower bound: raised at once, and not only when a probe is due.
    loose: bool,
}

impl Pace {
    pub(super) fn new(gap: u64, burst: u64, tat: Time, source: Source) -> Self {
        Pace {
            gap: gap.max(1),
            burst: burst.max(1),
            tat,
            source,
            before: None,
            step: 5,
            raise_at: tat,
            loose: false,
        }
    }

    /// A second's worth at most in one burst: minutes are often counted by the second.
    pub(super) fn configured(every: Duration) -> Self {
        let gap = nanos(every).max(1);
        Pace::new(gap, 1_000_000_000 / gap, Time::ZERO, Source::Configured)
    }

    /// Told by the owner or by the provider, and not guessed from refusals.
    pub(super) fn is_known(&self) -> bool {
        matches!(self.source, Source::Configured | Source::Told)
    }

    pub(super) fn ready(&self) -> Time {
        Time::from_nanos(
            self.tat.as_nanos().saturating_sub(self.gap.saturating_mul(self.burst.saturating_sub(1))),
        )
    }

    pub(super) fn in_hand(&self, now: Time) -> u64 {
        let full = self.gap.saturating_mul(self.burst);
        full.saturating_sub(nanos(self.tat.saturating_since(now))) / self.gap.max(1)
    }

    /// The same number of tokens at another gap.
    pub(super) fn at_gap(&self, now: Time, gap: u64) -> Time {
        let ahead = u128::from(nanos(self.tat.saturating_since(now)));
        let scaled = ahead * u128::from(gap) / u128::from(self.gap.max(1));
        if gap == self.gap { self.tat } else { after(now, u64::try_from(scaled).unwrap_or(u64::MAX), 1) }
    }

    /// It is empty; but the server itself says that one call may go at `open`.
    pub(super) fn drain(&mut self, now: Time, open: Time) {
        let empty = after(now, self.gap, self.burst).min(after(open, self.gap, self.burst - 1));
        self.tat = self.tat.max(empty);
    }

    pub(super) fn took_one(&mut self, now: Time) {
        let margin = match self.source {
            Source::Configured | Source::Told => self.gap / 64,
            Source::Learned | Source::Suspected => 0,
        };
        let from = self.tat.max(now.saturating_sub(LATE));
        self.tat = after(after(from, self.gap, 1), margin, 1);
    }
}

pub(super) fn after(from: Time, gap: u64, times: u64) -> Time {
    Time::from_nanos(from.as_nanos().saturating_add(gap.saturating_mul(times)))
}

impl Control {
    /// Whether calls are held back by the rate now; until when.
    pub(super) fn held_by_rate(&mut self, now: Time, waiting: usize) -> Option<Time> {
        self.raise_pace(now, waiting);
        let ready = self.pace.as_ref()?.ready();
        if now >= ready || self.on_trial(now, waiting) {
            return None;
        }
        if let Some(bucket) = &mut self.bucket {
            bucket.held = true;
        }
        let trial_at = self.headers.trial_at().filter(|at| *at > now);
        Some(trial_at.map_or(ready, |at| at.min(ready)))
    }

    /// A learned pace creeps up, rarely at first, then in doubling steps.
    fn raise_pace(&mut self, now: Time, waiting: usize) {
        let every = self.latency.unwrap_or(WINDOW).max(WINDOW);
        let Some(p) = &mut self.pace else { return };
        let learned = match p.source {
            Source::Learned => true,
            Source::Suspected => now < p.ready(),
            Source::Configured | Source::Told => false,
        };
        if !learned || waiting == 0 || (now < self.probe_at && !p.loose) || now < p.raise_at {
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

    /// Refused for the rate: between two refusals the bucket was emptied once.
    pub(super) fn rate_refused(&mut self, now: Time, sent: Time, since: Option<Event>) {
        let Some(e) = since else { return };
        let accepted = u64::from(e.admits.saturating_sub(1)).max(1);
        let mut time = sent.saturating_since(e.sent);
        // what refills in a pause is taken to be worth a second at most
        time = time.saturating_sub(e.cost.saturating_sub(WINDOW));
        // A small bucket is full again long before a pause ends, and what overflows is not seen: where the
        // pause outweighs the time in use, the rate may be far higher. To find out costs one more pause.
        let idle = e.cost.min(WINDOW);
        let loose = self.pace.is_none() && e.cost <= CHEAP && idle > time.saturating_sub(idle);
        let seen = (nanos(time) / accepted).max(1);
        let seen = seen.saturating_add(seen / 32);
        let (gap, missed) = match self.pace {
            Some(p) if matches!(p.source, Source::Learned | Source::Suspected) => {
                let least = p.gap.saturating_add(p.gap / 32).max(2);
                let most = p.before.map_or(p.gap.saturating_mul(2), |b| b.saturating_add(b / 32)).max(least);
                (seen.clamp(least, most), p.before.is_some())
            }
            _ => (seen, false),
        };
        if self.pace.is_some_and(|p| p.source == Source::Told) {
            self.disbelieve(now);
        }
        self.misses = if missed { self.misses.saturating_add(1) } else { 0 };
        let sure = self.pace.is_some_and(|p| p.source == Source::Learned);
        if sure || self.contradictions >= CONTRADICTIONS {
            self.contradictions = 0;
            self.pace = Some(Pace { loose, ..Pace::new(gap, 1, now, Source::Learned) });
            // the ceiling only guards: what the rate needs, and as much again
            self.limit = self.set.max;
            self.cap = self.set.max.unwrap_or(self.cap.max(self.set.start));
        } else {
            self.pace = Some(Pace { loose, ..Pace::new(gap, 1, now, Source::Suspected) });
        }
    }
}
