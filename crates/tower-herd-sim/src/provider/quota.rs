//! Quotas as pure arithmetic: no clock is read here, instants come in as arguments.

use std::time::Duration;

use crate::seconds;

/// How much a provider lets through. Several limits may hold at once; `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quota {
    /// Calls that may be served at the same time.
    pub concurrency: Option<u32>,
    /// Requests a second.
    pub requests: Option<Rate>,
    /// Tokens a second, charged with the cost of each call.
    pub tokens: Option<Rate>,
}

impl Quota {
    /// No limit at all.
    pub fn unlimited() -> Self {
        Self::default()
    }

    /// At most `calls` at the same time.
    pub fn concurrency(calls: u32) -> Self {
        Self { concurrency: Some(calls), ..Self::default() }
    }

    /// A request rate.
    pub fn requests(rate: Rate) -> Self {
        Self { requests: Some(rate), ..Self::default() }
    }

    /// A token rate.
    pub fn tokens(rate: Rate) -> Self {
        Self { tokens: Some(rate), ..Self::default() }
    }
}

/// A rate and the way in which it refills.
#[must_use = "a rate limits nothing by itself"]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Units a second.
    pub per_second: f64,
    /// Units that may be used at once after a rest.
    pub burst: f64,
    /// How it refills.
    pub window: Window,
}

/// How a rate refills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Window {
    /// Continuously, up to the burst: a token bucket that starts full.
    Refilling,
    /// All at once at each multiple of this period since the provider's start.
    Fixed(Duration),
}

impl Rate {
    /// A token bucket that holds one second's worth, and at least one unit.
    pub fn per_second(per_second: f64) -> Self {
        Self { per_second, burst: per_second.max(1.0), window: Window::Refilling }
    }

    /// Changes what may be used at once (at least one unit).
    pub fn burst(mut self, units: f64) -> Self {
        self.burst = units.max(1.0);
        self
    }

    /// Turns the rate into fixed windows of `period`, each with its share of the rate (at least 1).
    pub fn fixed(mut self, period: Duration) -> Self {
        self.burst = (self.per_second * period.as_secs_f64()).floor().max(1.0);
        self.window = Window::Fixed(period);
        self
    }
}

/// The level of one [`Rate`]: a bucket that refills continuously or in fixed windows.
#[derive(Clone, Debug)]
pub struct Bucket {
    rate: Rate,
    level: f64,
    at: Duration,
}

// Rounding errors of repeated refills must not refuse a call that is due.
const EPSILON: f64 = 1e-6;

impl Bucket {
    /// A full bucket, at instant `at` of the provider's time.
    pub fn full(rate: Rate, at: Duration) -> Self {
        Self { rate, level: rate.burst, at }
    }

    /// The rate this bucket enforces.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Brings the level up to `now`.
    pub fn refill(&mut self, now: Duration) {
        if now <= self.at {
            return;
        }
        match self.rate.window {
            Window::Refilling => {
                let gained = now.saturating_sub(self.at).as_secs_f64() * self.rate.per_second;
                self.level = (self.level + gained).min(self.rate.burst);
            }
            Window::Fixed(period) => {
                if window_of(now, period) != window_of(self.at, period) {
                    self.level = self.rate.burst;
                }
            }
        }
        self.at = now;
    }

    /// Whether a call of this cost would be let through now.
    ///
    /// A call that costs more than the bucket ever holds passes when the bucket is full.
    pub fn has(&mut self, now: Duration, cost: f64) -> bool {
        self.refill(now);
        self.level + EPSILON >= cost.min(self.rate.burst)
    }

    /// Takes the cost; the level may go below zero for an oversized call.
    pub fn take(&mut self, now: Duration, cost: f64) {
        self.refill(now);
        self.level -= cost;
    }

    /// Whole units left.
    pub fn remaining(&mut self, now: Duration) -> u64 {
        self.refill(now);
        (self.level + EPSILON).max(0.0).floor() as u64
    }

    /// Time until a call of this cost would be let through.
    pub fn wait(&mut self, now: Duration, cost: f64) -> Duration {
        if self.has(now, cost) {
            return Duration::ZERO;
        }
        match self.rate.window {
            Window::Refilling => seconds((cost.min(self.rate.burst) - self.level) / self.rate.per_second),
            Window::Fixed(period) => until_next(now, period),
        }
    }

    /// Time until the bucket is full again.
    pub fn until_full(&mut self, now: Duration) -> Duration {
        self.refill(now);
        match self.rate.window {
            Window::Refilling => seconds((self.rate.burst - self.level) / self.rate.per_second),
            Window::Fixed(period) => until_next(now, period),
        }
    }

    /// Changes the rate; what is left stays, up to the new burst.
    pub fn set_rate(&mut self, now: Duration, rate: Rate) {
        self.refill(now);
        self.level = self.level.min(rate.burst);
        self.rate = rate;
    }
}

fn window_of(at: Duration, period: Duration) -> u128 {
    at.as_nanos() / period.as_nanos().max(1)
}

fn until_next(at: Duration, period: Duration) -> Duration {
    let into = at.as_nanos() % period.as_nanos().max(1);
    period.saturating_sub(Duration::from_nanos(u64::try_from(into).unwrap_or(u64::MAX)))
}

/// A quota with its levels: decides whether one more call fits.
///
/// The provider owns one; the oracle keeps a second one as its mirror of what it knows.
#[derive(Clone, Debug)]
pub struct Meter {
    quota: Quota,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

impl Meter {
    /// A fresh meter, its buckets full.
    pub fn new(quota: Quota, now: Duration) -> Self {
        Self {
            quota,
            requests: quota.requests.map(|r| Bucket::full(r, now)),
            tokens: quota.tokens.map(|r| Bucket::full(r, now)),
        }
    }

    /// The quota in force.
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// Whether a call fits beside `in_service` others.
    pub fn fits(&mut self, now: Duration, in_service: usize, cost: f64) -> bool {
        self.quota.concurrency.is_none_or(|c| in_service < c as usize)
            && self.requests.as_mut().is_none_or(|b| b.has(now, 1.0))
            && self.tokens.as_mut().is_none_or(|b| b.has(now, cost))
    }

    /// Charges a call that was let through.
    pub fn charge(&mut self, now: Duration, cost: f64) {
        if let Some(b) = &mut self.requests {
            b.take(now, 1.0);
        }
        if let Some(b) = &mut self.tokens {
            b.take(now, cost);
        }
    }

    /// Time until the buckets would let a call of this cost through (concurrency is not a matter of time).
    pub fn wait(&mut self, now: Duration, cost: f64) -> Duration {
        let requests = self.requests.as_mut().map_or(Duration::ZERO, |b| b.wait(now, 1.0));
        let tokens = self.tokens.as_mut().map_or(Duration::ZERO, |b| b.wait(now, cost));
        requests.max(tokens)
    }

    /// The request bucket, if there is one.
    pub fn requests(&mut self) -> Option<&mut Bucket> {
        self.requests.as_mut()
    }

    /// The token bucket, if there is one.
    pub fn tokens(&mut self) -> Option<&mut Bucket> {
        self.tokens.as_mut()
    }

    /// Changes the quota; levels carry over up to the new burst.
    pub fn set(&mut self, now: Duration, quota: Quota) {
        fn change(bucket: &mut Option<Bucket>, rate: Option<Rate>, now: Duration) {
            match (bucket.as_mut(), rate) {
                (Some(b), Some(r)) => b.set_rate(now, r),
                (_, rate) => *bucket = rate.map(|r| Bucket::full(r, now)),
            }
        }
        change(&mut self.requests, quota.requests, now);
        change(&mut self.tokens, quota.tokens, now);
        self.quota = quota;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_bucket_refills_to_its_burst_and_no_further() {
        let mut b = Bucket::full(Rate::per_second(10.0), ms(0));
        for _ in 0..10 {
            assert!(b.has(ms(0), 1.0));
            b.take(ms(0), 1.0);
        }
        assert!(!b.has(ms(0), 1.0));
        assert_eq!(b.wait(ms(0), 1.0), ms(100));
        assert!(!b.has(ms(99), 1.0));
        assert!(b.has(ms(100), 1.0));
        assert_eq!(b.remaining(ms(60_000)), 10);
        assert_eq!(b.until_full(ms(60_000)), ms(0));
    }

    #[test]
    fn a_slow_rate_still_holds_one_request() {
        let mut b = Bucket::full(Rate::per_second(0.1), ms(0));
        assert!(b.has(ms(0), 1.0));
        b.take(ms(0), 1.0);
        assert_eq!(b.wait(ms(0), 1.0), ms(10_000));
    }

    #[test]
    fn fixed_windows_refill_at_once() {
        let mut b = Bucket::full(Rate::per_second(3.0).fixed(ms(1000)), ms(0));
        for _ in 0..3 {
            b.take(ms(400), 1.0);
        }
        assert!(!b.has(ms(999), 1.0));
        assert_eq!(b.wait(ms(400), 1.0), ms(600));
        assert_eq!(b.remaining(ms(1000)), 3);
    }

    #[test]
    fn an_oversized_call_passes_a_full_bucket_and_is_paid_for() {
        let mut b = Bucket::full(Rate::per_second(10.0), ms(0));
        assert!(b.has(ms(0), 25.0));
        b.take(ms(0), 25.0);
        assert_eq!(b.wait(ms(0), 1.0), ms(1600));
    }

    #[test]
    fn a_cut_keeps_at_most_the_new_burst() {
        let mut m = Meter::new(Quota::requests(Rate::per_second(100.0)), ms(0));
        m.set(ms(0), Quota::requests(Rate::per_second(20.0)));
        for _ in 0..20 {
            assert!(m.fits(ms(0), 0, 1.0));
            m.charge(ms(0), 1.0);
        }
        assert!(!m.fits(ms(0), 0, 1.0));
        assert_eq!(m.wait(ms(0), 1.0), ms(50));
    }
}
