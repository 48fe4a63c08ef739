//! The retry budget: how large a share of the traffic may be repetitions.
//!
//! Backoff spreads one client's calls and caps nothing: in an outage every client still sends every
//! attempt it has, and three nested layers of four attempts send 64. A budget is shared by all calls
//! to a provider. Each original request pays in a fraction of a call; each repetition takes out a
//! whole one, before it sleeps. So a provider in trouble sees `1 + ratio` times its usual load and not
//! `attempts` times, while a single unlucky call is repeated at once.
//!
//! [`RatioBudget`] is that plain rule. Other policies implement [`Budget`].
//!
//! Not charged: a re-delivery after a 429 (nothing was executed, and the server's pause spaces it),
//! and waiting for a refusal of our own.

use crate::{Clock, Time};
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// What a repetition is asked of. Shared by every layer that repeats calls to the same provider; also
/// by retry code that is not ours. Never blocks.
pub trait Budget: Send + Sync + 'static {
    /// One original request is sent (not a repetition).
    fn deposit(&self);
    /// Takes out one call. Asked when a repetition is scheduled, before the wait; on `false` none is
    /// sent.
    #[must_use]
    fn try_withdraw(&self) -> bool;
    /// A call that was taken out is not sent after all.
    fn refund(&self);
    /// Opens the part that is kept for one provider, where one handle serves a ladder of several; none:
    /// one pot for all. A layer that knows where a call goes (the ladder) does so once for each rung,
    /// and deposits there.
    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let _ = provider;
        None
    }
    /// The part of this provider, if somebody opened it. The retry layer withdraws from the part of
    /// the provider whose reply it holds, else from the one pot: a part into which nobody pays would
    /// soon be empty.
    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let _ = provider;
        None
    }
    /// Tells pots apart: two handles of one pot give the same number, so that a task that passes two
    /// layers of one budget deposits once (twitter/finagle#956).
    fn id(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }
}

impl<B: Budget + ?Sized> Budget for Arc<B> {
    fn deposit(&self) {
        (**self).deposit();
    }
    fn try_withdraw(&self) -> bool {
        (**self).try_withdraw()
    }
    fn refund(&self) {
        (**self).refund();
    }
    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        (**self).open(provider)
    }
    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        (**self).of(provider)
    }
    fn id(&self) -> usize {
        (**self).id()
    }
}

/// No limit but the attempts of each request. For tests, and where something else holds the share of
/// repetitions down.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl Budget for Unlimited {
    fn deposit(&self) {}
    fn try_withdraw(&self) -> bool {
        true
    }
    fn refund(&self) {}
}

/// A share of the original requests of the last window, and a small reserve for quiet times.
///
/// Default: 10 percent of the last 30 s, and a reserve of 3 calls that refills by one every 10 s. A
/// clone is the same budget.
///
/// The arithmetic is exact, in millionths of a call: a ratio of 0.6 grants 0.6 (tower-rs/tower#857
/// grants 1.0). Over any stretch of time `[a, b]`, without refunds,
///
/// `withdrawals <= ratio * deposits in [a - window, b] + reserve + (b - a) / refill`.
///
/// The clock is read for one deposit in eight and for every withdrawal. Deposits between two readings
/// count as made at the first: credit may expire a little early, and is never invented. Memory is
/// fixed, whatever the rate.
///
/// ```
/// use tower_herd::retry::budget::{Budget, RatioBudget};
/// let budget = RatioBudget::new(0.1).reserve(0, std::time::Duration::from_secs(10));
/// (0..25).for_each(|_| budget.deposit());
/// assert!(budget.try_withdraw() && budget.try_withdraw() && !budget.try_withdraw());
/// ```
#[derive(Clone)]
pub struct RatioBudget {
    settings: Settings,
    pot: Arc<Pot>,
    parts: Arc<Mutex<HashMap<Box<str>, RatioBudget>>>,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    /// Millionths of a call for each deposit.
    ratio: u64,
    window: Duration,
    burst: u64,
    refill: Duration,
}

struct Pot {
    clock: Clock,
    settings: Settings,
    /// Deposits since the clock was last read.
    fresh: AtomicU32,
    ledger: Mutex<Ledger>,
}

const CALL: u64 = 1_000_000;
const BUCKETS: usize = 30;
const READ_EVERY: u32 = 8;

/// The pure part: credit in millionths of a call, by the bucket of time in which it was paid in.
#[derive(Debug)]
struct Ledger {
    buckets: [u64; BUCKETS],
    /// Number of the newest bucket, counted from the origin of the clock.
    newest: u64,
    credit: u64,
    reserve: u64,
    refilled: Time,
}

impl Ledger {
    fn new(settings: &Settings) -> Self {
        Ledger {
            buckets: [0; BUCKETS],
            newest: 0,
            credit: 0,
            reserve: settings.burst.saturating_mul(CALL),
            refilled: Time::ZERO,
        }
    }

    fn pay_in(&mut self, amount: u64) {
        let bucket = &mut self.buckets[(self.newest % BUCKETS as u64) as usize];
        *bucket = bucket.saturating_add(amount);
        self.credit = self.credit.saturating_add(amount);
    }

    /// Moves on to `now`: what is older than the window is gone, the reserve has refilled.
    fn advance(&mut self, settings: &Settings, now: Time) {
        let width = (nanos(settings.window) / BUCKETS as u64).max(1);
        let newest = (now.as_nanos() / width).max(self.newest);
        for number in (self.newest + 1..=newest).take(BUCKETS) {
            let gone = std::mem::take(&mut self.buckets[(number % BUCKETS as u64) as usize]);
            self.credit = self.credit.saturating_sub(gone);
        }
        self.newest = newest;
        let full = settings.burst.saturating_mul(CALL);
        let step = (nanos(settings.refill) / CALL).max(1);
        let steps = nanos(now.saturating_since(self.refilled)) / step;
        self.refilled = self.refilled.saturating_add(Duration::from_nanos(steps.saturating_mul(step)));
        self.reserve = self.reserve.saturating_add(steps).min(full);
    }

    fn withdraw(&mut self) -> bool {
        if self.credit.saturating_add(self.reserve) < CALL {
            return false;
        }
        // Credit that expires soonest goes first, the reserve last.
        let mut due = CALL;
        for age in (0..BUCKETS as u64).rev() {
            let Some(number) = self.newest.checked_sub(age) else { continue };
            let bucket = &mut self.buckets[(number % BUCKETS as u64) as usize];
            let taken = due.min(*bucket);
            *bucket -= taken;
            self.credit -= taken;
            due -= taken;
        }
        self.reserve -= due;
        true
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl RatioBudget {
    /// A budget of this ratio (0.1: ten percent), to the millionth; negative or not a number: 0.
    #[must_use]
    pub fn new(ratio: f64) -> Self {
        // The cast saturates, and turns what is not a number into 0.
        let ratio = (ratio * CALL as f64).round() as u64;
        let (window, refill) = (Duration::from_secs(30), Duration::from_secs(10));
        Self::with(Settings { ratio, window, burst: 3, refill })
    }

    fn with(settings: Settings) -> Self {
        let pot = Pot {
            clock: Clock::new(),
            settings,
            fresh: AtomicU32::new(0),
            ledger: Mutex::new(Ledger::new(&settings)),
        };
        RatioBudget { settings, pot: Arc::new(pot), parts: Arc::default() }
    }

    /// The same with another window. Starts afresh.
    #[must_use]
    pub fn window(self, window: Duration) -> Self {
        Self::with(Settings { window, ..self.settings })
    }

    /// The same with another reserve: so many calls at most, one more every `refill`. Starts afresh.
    #[must_use]
    pub fn reserve(self, calls: u32, refill: Duration) -> Self {
        Self::with(Settings { burst: calls.into(), refill, ..self.settings })
    }

    /// Calls that could be taken out now.
    #[must_use]
    pub fn balance(&self) -> f64 {
        let ledger = self.pot.up_to_date();
        ledger.credit.saturating_add(ledger.reserve) as f64 / CALL as f64
    }
}

impl Pot {
    fn up_to_date(&self) -> std::sync::MutexGuard<'_, Ledger> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = u64::from(self.fresh.swap(0, Ordering::Relaxed));
        // Their age is unknown: as old as they can be. The clock is read under the lock, so that it
        // never runs backwards here.
        ledger.pay_in(fresh.saturating_mul(self.settings.ratio));
        ledger.advance(&self.settings, self.clock.now());
        ledger
    }
}

impl Default for RatioBudget {
    fn default() -> Self {
        Self::new(0.1)
    }
}

impl Budget for RatioBudget {
    #[inline]
    fn deposit(&self) {
        if self.pot.fresh.fetch_add(1, Ordering::Relaxed) >= READ_EVERY - 1 {
            drop(self.pot.up_to_date());
        }
    }

    fn try_withdraw(&self) -> bool {
        self.pot.up_to_date().withdraw()
    }

    fn refund(&self) {
        self.pot.up_to_date().pay_in(CALL);
    }

    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let part = parts.entry(provider.into()).or_insert_with(|| Self::with(self.settings));
        Some(Arc::new(part.clone()))
    }

    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.get(provider).map(|part| Arc::new(part.clone()) as Arc<dyn Budget>)
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.pot).addr()
    }
}

impl fmt::Debug for RatioBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RatioBudget")
            .field("ratio", &(self.settings.ratio as f64 / CALL as f64))
            .field("window", &self.settings.window)
            .field("reserve", &self.settings.burst)
            .field("refill", &self.settings.refill)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn drained(budget: &RatioBudget) -> u32 {
        (0..).take_while(|_| budget.try_withdraw()).last().map_or(0, |n| n + 1)
    }

    #[test]
    fn grants_of_the_vectors() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/vectors/budget.json")).unwrap();
        for case in vectors["deposit_budget"]["cases"].as_array().unwrap() {
            let number = |key: &str| case[key].as_u64().unwrap();
            let budget = RatioBudget::new(case["ratio"].as_f64().unwrap())
                .window(S(number("ttl_s") * 1000))
                .reserve((number("min_retries_per_s") * number("ttl_s")) as u32, S(1_000_000));
            (0..number("deposits")).for_each(|_| budget.deposit());
            assert_eq!(u64::from(drained(&budget)), number("withdrawals"), "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_default_is_ten_percent_of_thirty_seconds_and_a_reserve_of_three() {
        let budget = RatioBudget::default();
        assert_eq!(drained(&budget), 3);
        tokio::time::advance(S(10)).await;
        assert_eq!(drained(&budget), 1);
        tokio::time::advance(S(3600)).await;
        assert_eq!(drained(&budget), 3, "the reserve fills up and no further");
        (0..100).for_each(|_| budget.deposit());
        assert_eq!(drained(&budget), 10);
        (0..100).for_each(|_| budget.deposit());
        tokio::time::advance(S(30)).await;
        assert_eq!(drained(&budget), 3, "credit is gone after the window, the reserve is back");
    }

    #[test]
    fn each_provider_has_its_own_part() {
        let budget = RatioBudget::default();
        assert!(budget.of("a").is_none(), "not opened");
        let (a, b) = (budget.open("a").unwrap(), budget.open("b").unwrap());
        while a.try_withdraw() {}
        assert!(!budget.of("a").unwrap().try_withdraw());
        assert!(b.try_withdraw() && budget.try_withdraw());
        assert_eq!(a.id(), budget.of("a").unwrap().id());
        assert_ne!(a.id(), b.id());
        assert_eq!(Arc::new(budget.clone()).id(), budget.id());
        assert!(Unlimited.try_withdraw() && Unlimited.open("a").is_none());
    }

    #[test]
    fn settings_out_of_range_are_harmless() {
        for ratio in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            for time in [Duration::ZERO, Duration::MAX] {
                let budget = RatioBudget::new(ratio).window(time).reserve(u32::MAX, time);
                (0..20).for_each(|_| budget.deposit());
                budget.refund();
                assert!(budget.try_withdraw());
            }
        }
    }

    proptest! {
        /// Law 3 for one process: over every stretch of time, and exactly.
        #[test]
        fn never_more_than_the_ratio_and_the_reserve(
            ratio in 0..=1_000_000u64,
            burst in 0..5u64,
            // (milliseconds until, deposits, attempts to withdraw)
            steps in prop::collection::vec((0..20_000u64, 0..60u64, 0..40u64), 1..40),
        ) {
            let settings = Settings { ratio, window: S(30), burst, refill: S(10) };
            let mut ledger = Ledger::new(&settings);
            let (mut now, mut history) = (0, Vec::new());
            for (gap, deposits, asked) in steps {
                now += gap;
                ledger.advance(&settings, Time::from_nanos(now * 1_000_000));
                ledger.pay_in(deposits * ratio);
                let granted = (0..asked).filter(|_| ledger.withdraw()).count() as u64;
                let available = ledger.credit + ledger.reserve;
                prop_assert!(granted == asked || available < CALL, "refused with {} at hand", available);
                prop_assert_eq!(ledger.credit, ledger.buckets.iter().sum::<u64>());
                history.push((now, deposits, granted));
            }
            for (i, &(from, ..)) in history.iter().enumerate() {
                for &(to, ..) in &history[i..] {
                    let within = |at: u64, low: u64| low <= at && at <= to;
                    let granted: u64 = history.iter().filter(|h| within(h.0, from)).map(|h| h.2).sum();
                    let paid: u64 = history.iter().filter(|h| within(h.0, from.saturating_sub(30_000))).map(|h| h.1).sum();
                    let most = paid * ratio + burst * CALL + (to - from) * 100;
                    prop_assert!(granted * CALL <= most, "{} of {} in {}..{}", granted, most, from, to);
                }
            }
        }
    }
}
