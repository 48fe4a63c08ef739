//! Limit headers: a rate that replies tell.
//!
//! # What headers are worth
//! A header tells a bucket's size, what is left in it and when it is full again. The last is told in
//! units that may be longer than the bucket takes to fill, and any of it may be about another quota.
//! So headers are believed as far as the calls bear them out:
//! * *Reset over use* bounds the rate from both sides where the reset is told finely enough.
//! * *What flowed in* between two replies (the change of what is left, and the calls in between) is the
//!   rate however coarse the reset; where the two disagree by a quarter, the flow is right.
//! * *What is left* is always believed: so many calls may go at least, whatever the pace.
//! * A bucket that stays full although we hold calls back is refilled faster than we thought.
//! * More calls served at once than the bucket holds, or more than it had left: the headers are about
//!   something else. They are not looked at again for ten minutes.

use super::rate::{Pace, Source, after};
use super::{Admitted, Control, LimitHeaders, PAUSE_MAX, WINDOW, nanos};
use crate::Time;
use std::time::Duration;

/// Headers that lied are not believed again for so long.
const DISTRUST: Duration = Duration::from_secs(600);
/// Tokens that must have flowed in before their number tells a rate.
const FLOW: u64 = 16;
/// Buckets of fewer tokens than this tell nothing without a fine reset.
const FEW: u64 = 8;

/// A bucket's level as one reply told it.
///
/// Nobody says whether it is the level when the call came or when its reply left. So both are
/// reckoned with, and the slower rate of the two is taken.
#[derive(Clone, Copy, Debug)]
struct Level {
    left: u64,
    sent: Mark,
    seen: Mark,
}

/// An instant, and how many had been admitted by then.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Time,
    admitted: u64,
}

/// What is known of the bucket that headers tell of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    size: u64,
    /// What flowed in is counted from here; none while it was full in between.
    from: Option<Level>,
    /// Where to count from later on.
    next: Option<Level>,
    last: Level,
    /// The least and the most time a token can take, as its resets told.
    low: u64,
    high: u64,
    /// They are not true.
    wrong: bool,
    /// Since when calls are paced as they are.
    paced: Time,
    /// A call was held back for the rate.
    pub(super) held: bool,
    /// When this size was told first, if there was another before.
    since: Option<Time>,
}

impl Bucket {
    fn new(size: u64, level: Level, now: Time) -> Self {
        let from = (level.left < size).then_some(level);
        Bucket {
            size,
            from,
            next: None,
            last: level,
            low: 0,
            high: u64::MAX,
            wrong: false,
            paced: now,
            held: false,
            since: None,
        }
    }

    /// Takes the next level; the time in which one token flows in, if that can be told.
    fn flow(&mut self, level: Level, span: Duration) -> Option<u64> {
        self.last = level;
        if level.left >= self.size {
            // It may have been full for long: nothing can be said of what flowed in.
            (self.from, self.next) = (None, None);
            return None;
        }
        let Some(from) = self.from else {
            self.from = Some(level);
            return None;
        };
        let between = |from_mark: Mark, mark: Mark| {
            let admitted = mark.admitted.saturating_sub(from_mark.admitted);
            let refilled = (level.left + admitted).saturating_sub(from.left);
            let time = mark.at.saturating_since(from_mark.at);
            (refilled >= FLOW && time >= span).then(|| nanos(time) / refilled)
        };
        let flow = between(from.sent, level.sent).zip(between(from.seen, level.seen)).map(|(a, b)| a.max(b));
        match self.next {
            None => self.next = Some(level),
            Some(next) if flow.is_some() && level.sent.at.saturating_since(next.sent.at) >= span => {
                (self.from, self.next) = (Some(next), Some(level));
            }
            Some(_) => {}
        }
        flow
    }
}

/// Calls sent although the bucket is said to be empty, to see whether it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    first: u64,
    left: u64,
    unserved: u64,
}

/// What is known of headers in general.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Headers {
    /// The admission of the call whose reply spoke last.
    pub(super) told: Time,
    /// One spoke since the last event.
    since: bool,
    /// They explain what was refused: a ceiling learned before is forgotten, once.
    explain: bool,
    distrust: Time,
    trial: Option<Trial>,
    trial_at: Option<Time>,
    failed_trials: u32,
}

impl Headers {
    /// When calls may be tried although the bucket is said to be empty.
    pub(super) fn trial_at(&self) -> Option<Time> {
        self.trial_at
    }
}

impl Control {
    /// Whether this call goes although the bucket is said to be empty. Only where the headers make the
    /// provider far slower than it was seen to be, and as rarely as other probes.
    pub(super) fn on_trial(&mut self, now: Time, waiting: usize) -> bool {
        let (Some(p), Some(latency)) = (&self.pace, self.latency) else { return false };
        if let Some(trial) = &self.headers.trial {
            return trial.left > 0;
        }
        let slow = p.gap.saturating_mul(u64::from(self.proven)) > nanos(latency).saturating_mul(4);
        if p.source != Source::Told || !slow || waiting == 0 {
            return false;
        }
        let cost = self.event.map_or(self.set.bare, |e| e.cost.max(self.set.bare));
        let rest = cost.saturating_mul(self.set.probe_gap << self.headers.failed_trials.min(8));
        if now < *self.headers.trial_at.get_or_insert(now.saturating_add(rest)) {
            return false;
        }
        // More than it says is left, by more than rounding hides.
        let calls = self.bucket.map_or(0, |bucket| bucket.last.left.min(bucket.size / 8)) + 3;
        self.headers.trial = Some(Trial { first: self.admitted + 1, left: calls, unserved: calls });
        true
    }

    /// One more call goes.
    pub(super) fn trial_sent(&mut self) {
        if let Some(trial) = &mut self.headers.trial {
            trial.left = trial.left.saturating_sub(1);
        }
    }

    /// A call of a trial was served.
    pub(super) fn trial_served(&mut self, now: Time, call: Admitted) {
        if let Some(trial) = self.headers.trial.as_mut().filter(|trial| call.nth >= trial.first) {
            trial.unserved -= 1;
            if trial.unserved == 0 {
                self.disbelieve(now);
            }
        }
    }

    /// It ended without a verdict.
    pub(super) fn trial_lost(&mut self, call: Admitted) {
        if self.headers.trial.is_some_and(|trial| call.nth >= trial.first) {
            self.headers.trial = None;
            self.headers.trial_at = None;
        }
    }

    fn trial_refused(&mut self, call: Admitted) {
        if self.headers.trial.is_some_and(|trial| call.nth >= trial.first) {
            self.headers.trial = None;
            self.headers.trial_at = None;
            self.headers.failed_trials += 1;
        }
    }

    /// The headers speak of something else.
    pub(super) fn disbelieve(&mut self, now: Time) {
        self.headers = Headers { distrust: now.saturating_add(DISTRUST), ..Headers::default() };
        self.bucket = None;
        self.pace = self.set.rate.map(|rate| Pace::configured(rate.every));
    }

    /// The reply of `call` told the level of a bucket.
    pub(super) fn on_headers(&mut self, now: Time, call: Admitted, busy: u32, h: LimitHeaders) {
        // The call that left last knows best.
        let useless = h.limit == 0 || h.reset > PAUSE_MAX || (h.reset.is_zero() && h.remaining < h.limit);
        if useless || call.at < self.headers.told || now < self.headers.distrust {
            return;
        }
        self.headers.told = call.at;
        self.headers.since = true;
        let left = h.remaining.min(h.limit);
        let used = h.limit - left;
        let plenty = left >= h.limit.div_ceil(2) && self.bucket.is_some_and(|bucket| bucket.held);
        // "remaining" is whole tokens, so what is missing is in (used - 1, used]
        let low = nanos(h.reset.saturating_sub(h.resolution)).checked_div(used).unwrap_or(0);
        let high = nanos(h.reset).checked_div(used.saturating_sub(1)).unwrap_or(u64::MAX);
        let latency = self.latency.unwrap_or(WINDOW);
        let refill = nanos(latency.saturating_mul(3)).checked_div(low).unwrap_or(u64::MAX);
        let crowd = h.limit.saturating_add(refill).saturating_add(2);
        // A quota that has just fallen still serves what came before.
        let settled =
            self.bucket.is_none_or(|b| b.size == h.limit && b.since.is_none_or(|since| call.at > since));
        if settled && u64::from(call.rank) > crowd && call.stamp == self.stamp {
            return self.disbelieve(now);
        }
        let old = self.pace.filter(|p| p.source == Source::Told).map(|p| p.gap);
        let nth = if call.nth > 0 { call.nth } else { self.admitted };
        let level = Level {
            left,
            sent: Mark { at: call.at, admitted: nth },
            seen: Mark { at: now, admitted: self.admitted },
        };
        let (mut flow, mut scaled) = (None, None);
        match &mut self.bucket {
            Some(bucket) if bucket.size == h.limit => flow = bucket.flow(level, latency.max(WINDOW)),
            other => {
                // As a rule it is the same window with another share.
                scaled = other.as_ref().and_then(|b| old.map(|gap| gap.saturating_mul(b.size) / h.limit));
                let since = other.as_ref().map(|_| now);
                *other = Some(Bucket { since, ..Bucket::new(h.limit, level, now) });
            }
        }
        // All resets that were told finely bound it; one that contradicts them tells that it changed.
        let (mut bounds, mut changed) = (None, scaled.is_some());
        if let Some(bucket) = self.bucket.as_mut().filter(|bucket| !bucket.wrong) {
            if low > bucket.high.saturating_add(bucket.high / 8) || high < bucket.low - bucket.low / 8 {
                (bucket.low, bucket.high, changed) = (0, u64::MAX, true);
            }
            if low > 0 {
                bucket.low = bucket.low.max(low);
                bucket.high = bucket.high.min(high).max(bucket.low);
            }
            bounds = (bucket.low > 0).then_some((bucket.low, bucket.high));
        }
        let (gap, fresh) = match (old.filter(|_| !changed || bounds.is_none()), bounds) {
            (Some(gap), Some((low, high))) => (gap.clamp(low, high), false),
            (None, Some((low, high))) => (low.midpoint(high.min(low.saturating_mul(2))), true),
            // A few tokens are rounding.
            (Some(_), None) if h.limit < FEW => {
                self.pace = None;
                return;
            }
            (Some(gap), None) => {
                // Faster than it flows in while there is plenty: if it flows in as fast as calls go, it
                // is the calls that are slow.
                let flow = flow.map(|flow| if plenty { flow - flow / 16 } else { flow });
                (scaled.or(flow).unwrap_or(gap), changed)
            }
            (None, None) => match flow {
                Some(flow) if h.limit >= FEW => (flow, true),
                None if used >= h.limit.div_ceil(2) && h.limit >= FEW => (high, true),
                _ => return,
            },
        };
        let fine = self.bucket.is_some_and(|bucket| bucket.low > 0);
        let gap = match (flow, &mut self.bucket) {
            (Some(flow), Some(bucket)) if gap > flow.saturating_add(flow / 4) => {
                // Whatever its reset says is not true.
                (bucket.low, bucket.high, bucket.wrong) = (0, u64::MAX, true);
                flow
            }
            _ => gap,
        };
        // Never more in hand than the server says was left at that call's admission, nor less than what
        // was left less what may have been sent since; when this bucket is new to us, less what is in
        // flight.
        let since = if call.nth > 0 { self.admitted.saturating_sub(call.nth) } else { busy.into() };
        let least = after(call.at, gap, used);
        let most = after(call.at, gap, used.saturating_add(since)).max(after(now, gap, used));
        let mut tat = match self.pace {
            Some(p) if !fresh => p.at_gap(now, gap).max(least),
            _ => after(now, gap, used.saturating_add(busy.into())),
        };
        let short = nanos(tat.saturating_since(most)) / gap.max(1);
        tat = tat.min(most);
        let mut gap = gap;
        if let Some(bucket) = &mut self.bucket {
            if fresh {
                bucket.paced = now;
            } else if short >= h.limit.div_ceil(2)
                && used <= h.limit / 4
                && gap > bucket.low
                && call.at > bucket.paced
            {
                // By half a bucket fuller than it would be at this pace.
                *bucket = Bucket {
                    low: bucket.low,
                    wrong: bucket.wrong,
                    since: bucket.since,
                    ..Bucket::new(h.limit, level, now)
                };
                gap = (gap / 2).max(bucket.low);
            }
        }
        let gap = gap.max(self.set.rate.map_or(1, |rate| nanos(rate.every)));
        if !self.headers.explain && used >= h.limit.div_ceil(4) {
            // what was refused before is explained now
            self.headers.explain = true;
            self.limit = self.set.max;
            self.cap = self.limit.unwrap_or(self.cap);
            self.contradictions = 0;
        }
        // one token is kept back for what rounding hides, and some where the rate is less certain
        let burst = h.limit.saturating_sub(1 + if fine { 0 } else { h.limit / 16 });
        self.pace = Some(Pace::new(gap, burst, tat, Source::Told));
    }

    /// Refused though headers tell the rate. True if the rate cannot be the reason.
    pub(super) fn told_rate_refused(&mut self, now: Time, call: Admitted) -> bool {
        self.trial_refused(call);
        let known = std::mem::replace(&mut self.headers.since, false);
        let open = self.pause.max(now);
        let Some(p) = &mut self.pace else { return true };
        if known && p.in_hand(now) > 1 + p.burst / 4 {
            return true;
        }
        p.drain(now, open);
        if let Some(bucket) = &mut self.bucket {
            (bucket.from, bucket.next) = (None, None);
        }
        false
    }
}
