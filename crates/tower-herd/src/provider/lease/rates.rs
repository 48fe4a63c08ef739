//! Rates that the fleet shares: requests and tokens a minute, in chunks that were taken out of one bucket before
//! anybody may use them.

use super::{Core, Link, lock};
use crate::{
    Time,
    store::{Chunk, Grant, Quantity, RateReport},
};
use std::time::Duration;

/// Where the chunks of a provider stand.
#[derive(Debug, Default)]
pub(in crate::provider) struct Rates {
    requests: Rate,
    tokens: Rate,
}

#[derive(Debug, Default)]
struct Rate {
    /// The chunk that came last; 0: none, or some of it was given back.
    chunk: u64,
    until: Time,
    /// Spent a second, lately.
    speed: f64,
    measured: Time,
    per_minute: u64,
}

/// What is spent until the next chunk, and a quarter more.
const AHEAD: f64 = 1.25;

impl Rate {
    /// So much was spent since this was last asked for.
    fn spent(&mut self, now: Time, amount: u64) {
        let passed = now.saturating_since(self.measured).as_secs_f64();
        if self.measured > Time::ZERO && passed < 0.05 {
            // Too short a time to tell a speed from.
            self.speed += amount as f64 / 2.0;
            return;
        }
        let speed = if passed > 0.0 { amount as f64 / passed } else { 0.0 };
        // Half of it is of the last second or so.
        let weight = (passed / 2.0).clamp(0.1, 1.0);
        self.speed += (speed - self.speed) * weight;
        self.measured = now;
    }

    /// Whether what is left of the last chunk may still be given back.
    fn is_valid(&self, now: Time) -> bool {
        now < self.until && self.chunk > 0
    }

    fn report(&mut self, of: Quantity, want: u64, least: u64, rest: u64) -> RateReport {
        let chunk = if rest > 0 { self.chunk } else { 0 };
        if rest > 0 {
            // Once.
            self.chunk = 0;
        }
        RateReport { of, want, least, chunk, rest }
    }

    fn ahead(&self, renew: Duration) -> u64 {
        (self.speed * renew.as_secs_f64() * AHEAD).ceil() as u64
    }
}

impl Core {
    /// What it needs of each rate, and what it gives back.
    pub(super) fn rate_reports(&self, link: &Link, now: Time) -> Vec<RateReport> {
        let renew = lock(&link.lease).settings().renew_every();
        let known = lock(&self.settings).clone().unwrap_or_default();
        let mut reports = Vec::new();
        let mut rates = lock(&link.rates);
        if known.requests_per_minute.is_some() {
            let rate = &mut rates.requests;
            let report = self.control(|control, _, waiting| {
                let purse = control.purse(true)?;
                let (spent, left) = purse.look(now);
                rate.spent(now, spent);
                let need =
                    u64::try_from(waiting).unwrap_or(u64::MAX).saturating_add(rate.ahead(renew)).max(1);
                let rest = if rate.is_valid(now) { purse.surplus(now, need) } else { 0 };
                let least = u64::from(waiting > 0 && left == 0);
                Some(rate.report(Quantity::Requests, need.saturating_sub(left), least, rest))
            });
            reports.extend(report);
        } else {
            self.control(|control, _, _| control.purse(false).is_some());
        }
        if known.tokens_per_minute.is_some() {
            let rate = &mut rates.tokens;
            let report = self.tokens.change(now, |flow| {
                let asked = flow.look(now);
                rate.spent(now, asked.spent);
                let need = asked.waiting.saturating_add(rate.ahead(renew)).max(1);
                let rest = if rate.is_valid(now) { flow.surplus(now, need) } else { 0 };
                let first = asked.owes.saturating_add(asked.first.saturating_sub(asked.holds));
                // More than there ever is at once is paid in parts: a debt takes any, and comes first.
                let least = if first > asked.burst { 0 } else { first };
                let want = need.saturating_sub(asked.holds).saturating_add(asked.owes).max(first);
                rate.report(Quantity::Tokens, want, least, rest)
            });
            reports.push(report);
        }
        reports
    }

    pub(super) fn keep_rates(&self, link: &Link, grant: &Grant, now: Time) {
        for chunk in &grant.rates {
            self.keep_chunk(link, chunk, now);
        }
    }

    fn keep_chunk(&self, link: &Link, chunk: &Chunk, now: Time) {
        // From when its report was sent, at the latest: an exchange takes no longer than its timeout.
        let timeout = lock(&link.lease).settings().timeout();
        let valid = Duration::from_millis(chunk.valid).saturating_sub(timeout);
        let until = now.saturating_add(valid);
        {
            let mut rates = lock(&link.rates);
            let rate = match chunk.of {
                Quantity::Requests => &mut rates.requests,
                Quantity::Tokens => &mut rates.tokens,
            };
            (rate.chunk, rate.until, rate.per_minute) = (chunk.chunk, until, chunk.per_minute);
        }
        match chunk.of {
            Quantity::Requests => self.control(|control, _, _| {
                if let Some(purse) = control.purse(true) {
                    purse.fill(now, chunk.amount, until);
                }
            }),
            Quantity::Tokens => {
                let share = lock(&link.lease).share(chunk.per_minute);
                self.tokens.change(now, |flow| flow.fill(now, chunk.amount, until, share, chunk.burst));
            }
        }
    }

    /// The store is lost: its share of each rate, with no burst.
    pub(super) fn fend(&self, link: &Link) {
        let now = self.clock().now();
        let share = |per_minute| {
            let lease = lock(&link.lease);
            lease.share(per_minute)
        };
        let (requests, tokens) = {
            let rates = lock(&link.rates);
            (rates.requests.per_minute, rates.tokens.per_minute)
        };
        if requests > 0 {
            let every = Duration::from_secs(60) / u32::try_from(share(requests)).unwrap_or(u32::MAX).max(1);
            self.control(|control, _, _| {
                if let Some(purse) = control.purse(true) {
                    purse.fend(every);
                }
            });
        }
        if tokens > 0 {
            let share = share(tokens);
            self.tokens.change(now, |flow| flow.fend(now, share));
        }
    }
}
