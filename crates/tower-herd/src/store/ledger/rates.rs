//! Rates over the whole fleet: buckets that fill up, and chunks that are taken out of them beforehand.
//!
//! What is handed out over any time W is at most `rate * W + burst`. Since a chunk is used up to `valid` after it
//! was handed out, a provider sees at most `rate * (W + valid) + burst`, whoever crashes: what is lost with a
//! process is not used at all.

use super::shares::{Ask, shares};
use crate::store::{Chunk, Quantity, RateLimit, RateReport};

/// A chunk is to be used, or given back, within two renewals.
const VALID: u64 = 2000;
/// One unit, in those of a level: a rate a minute is then so many a millisecond, without any remainder.
const UNIT: u64 = 60_000;
/// Bounds of what is configured, so that the numbers of Lua hold every level exactly.
pub(super) const MOST: u64 = 2_000_000_000;
/// The longest silence that fills a bucket.
const SILENCE: u64 = 3_600_000;

/// What one process has of one rate.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    /// What it asked for and was not given yet.
    pub(super) want: u64,
    chunk: u64,
    amount: u64,
    until: u64,
}

/// One rate.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    limit: RateLimit,
    pub(super) level: u64,
    at: u64,
    /// What was handed out since `since`, and in as long a time before: what may still be on its way.
    since: u64,
    handed: u64,
    before: u64,
}

/// A part of a rate, and when to ask for more.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub(super) amount: u64,
    pub(super) again: Option<u64>,
}

impl Bucket {
    /// It begins empty: nobody knows what was handed out before.
    pub(super) fn new(now: u64, limit: RateLimit) -> Self {
        let mut bucket = Bucket {
            limit: RateLimit { per_minute: 0, burst: 0 },
            level: 0,
            at: now,
            since: now,
            handed: 0,
            before: 0,
        };
        bucket.configure(limit);
        bucket
    }

    pub(super) fn configure(&mut self, limit: RateLimit) {
        self.limit = RateLimit { per_minute: limit.per_minute.min(MOST), burst: limit.burst.min(MOST) };
        self.level = self.level.min(self.limit.burst * UNIT);
    }

    pub(super) fn fill(&mut self, now: u64) {
        let elapsed = now.saturating_sub(self.at).min(SILENCE);
        self.level = (self.level + self.limit.per_minute * elapsed).min(self.limit.burst * UNIT);
        self.at = now;
        if now >= self.since + VALID {
            self.before = if now >= self.since + 2 * VALID { 0 } else { self.handed };
            (self.since, self.handed) = (now, 0);
        }
    }

    /// The rest of the last chunk, once, and while it is valid.
    pub(super) fn give_back(&mut self, now: u64, held: &mut Held, report: &RateReport) {
        if report.chunk == 0 || report.chunk != held.chunk || now >= held.until {
            return;
        }
        let rest = report.rest.min(held.amount);
        self.level = (self.level + rest * UNIT).min(self.limit.burst * UNIT);
        self.handed = self.handed.saturating_sub(rest);
        (held.chunk, held.amount) = (0, 0);
    }

    /// A reply told what is left. What others were handed and may not have used yet is not theirs twice; so
    /// the bucket is lower than that, and never higher than it was.
    pub(super) fn observe(&mut self, now: u64, own: &Held, left: u64) {
        let own = if now < own.until { own.amount } else { 0 };
        let others = (self.handed + self.before).saturating_sub(own);
        self.level = self.level.min(left.min(MOST).saturating_sub(others) * UNIT);
    }

    /// The part of one who wants some, `asks[own]`.
    pub(super) fn part(&self, least: u64, asks: &[Ask], own: usize) -> Part {
        let Some(Ask { want, .. }) = asks.get(own).copied() else { return Part::default() };
        let there = self.level / UNIT;
        let least = least.min(want);
        let fair = shares(there, asks).get(own).copied().unwrap_or(0);
        // A part that pays for no call is of no use.
        let amount = if least > there { 0 } else { fair.max(least) };
        let again = (least > there && least <= self.limit.burst && self.limit.per_minute > 0)
            .then(|| (least * UNIT - self.level).div_ceil(self.limit.per_minute).clamp(20, 1000));
        Part { amount, again }
    }

    /// Takes a part out, as the chunk of this number.
    pub(super) fn take(&mut self, now: u64, held: &mut Held, amount: u64, chunk: u64) {
        self.level -= amount * UNIT;
        self.handed += amount;
        (held.chunk, held.amount, held.until) = (chunk, amount, now + VALID);
        held.want = held.want.saturating_sub(amount);
    }

    pub(super) fn chunk(&self, of: Quantity, chunk: u64, amount: u64) -> Chunk {
        let RateLimit { per_minute, burst } = self.limit;
        Chunk { of, chunk, amount, valid: if amount > 0 { VALID } else { 0 }, per_minute, burst }
    }
}
