use super::Budget;
use crate::{Clock, Time};
use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// A share of the original requests of the last window, and a small reserve for quiet times.
///
/// Default: 10 percent of the last 30 s, and a reserve of 3 calls that refills by one every 10 s. A
/// clone is the same budget.
///
/// The arithmetic is exact, in millionths of a call: a ratio of 0.6 grants 0.6 (tower-rs/tower#857
/// grants 1.0). Over any stretch of time `[a, b]`,
///
/// `withdrawals - refunds <= ratio * deposits + reserve + (b - a) / refill`,
///
/// where deposits and refunds count from `a - window` on: what was paid in, or given back, may be used
/// for that long. What is given back fills the reserve first.
///
/// [`per_minute`](RatioBudget::per_minute) adds a hard ceiling, for a provider that must never see more
/// repetitions than so many, however much traffic pays in.
///
/// The clock is read for one deposit in eight and for every withdrawal. Deposits between two readings
/// count as made at the first: credit may expire a little early, and is never invented. Memory is
/// fixed, whatever the rate.
///
/// ```
/// use tower_herd::budget::{Budget, RatioBudget};
/// let budget = RatioBudget::new(0.1).reserve(0, std::time::Duration::from_secs(10));
/// (0..25).for_each(|_| budget.deposit());
/// assert!(budget.try_withdraw() && budget.try_withdraw() && !budget.try_withdraw());
/// ```
#[derive(Clone)]
pub struct RatioBudget {
    settings: Settings,
    #[cfg(feature = "store")]
    providers: Arc<[crate::Provider]>,
    pot: Arc<Pot>,
    parts: Arc<Mutex<HashMap<Box<str>, RatioBudget>>>,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    /// Millionths of a call for each deposit.
    ratio: u64,
    window: Duration,
    /// Of the reserve, in millionths of a call.
    full: u64,
    refill: Duration,
    /// The most withdrawals in any minute.
    ceiling: Option<u32>,
}

struct Pot {
    clock: Clock,
    settings: Settings,
    /// Of the fleet that it is the budget of: what this process has of the reserve.
    #[cfg(feature = "store")]
    provider: Option<crate::Provider>,
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
    now: Time,
    /// When the last withdrawals were made, as many of them as the ceiling allows: older ones do not
    /// matter. Empty without a ceiling.
    last: VecDeque<Time>,
}

const MINUTE: Duration = Duration::from_secs(60);

impl Ledger {
    fn new(settings: &Settings) -> Self {
        Ledger {
            now: Time::ZERO,
            last: VecDeque::new(),
            buckets: [0; BUCKETS],
            newest: 0,
            credit: 0,
            reserve: settings.full,
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
        let step = (nanos(settings.refill) / CALL).max(1);
        let steps = nanos(now.saturating_since(self.refilled)) / step;
        self.refilled = self.refilled.saturating_add(Duration::from_nanos(steps.saturating_mul(step)));
        self.reserve = self.reserve.saturating_add(steps).min(settings.full);
        self.now = self.now.max(now);
    }

    fn withdraw(&mut self, settings: &Settings) -> bool {
        if self.credit.saturating_add(self.reserve) < CALL || !self.below_ceiling(settings) {
            return false;
        }
        // Credit that expires soonest goes first, the reserve last.
        let due = (0..BUCKETS as u64).rev().fold(CALL, |due, age| self.take_from(age, due));
        self.reserve -= due;
        true
    }

    /// Whether one more keeps every minute within the ceiling; notes it if so. What is given back still
    /// counts here: the ceiling is on what was asked for, so that it holds whatever becomes of it.
    fn below_ceiling(&mut self, settings: &Settings) -> bool {
        let Some(most) = settings.ceiling else { return true };
        while self.last.front().is_some_and(|at| self.now.saturating_since(*at) >= MINUTE) {
            self.last.pop_front();
        }
        let below = self.last.len() < most as usize;
        if below {
            self.last.push_back(self.now);
        }
        below
    }

    /// Gives one back: to the reserve as far as it has room, where it does not expire and can never be
    /// more than the reserve, the rest to the credit of this moment.
    fn give_back(&mut self, settings: &Settings) {
        let room = settings.full.saturating_sub(self.reserve).min(CALL);
        self.reserve += room;
        self.pay_in(CALL - room);
    }

    /// What is not there any more, since it was withdrawn or has expired, is not owed.
    fn take_back(&mut self, amount: u64) {
        (0..BUCKETS as u64).fold(amount, |due, age| self.take_from(age, due));
    }

    /// Takes up to `due` from the bucket of this age; what is still due then.
    fn take_from(&mut self, age: u64, due: u64) -> u64 {
        let Some(number) = self.newest.checked_sub(age) else { return due };
        let bucket = &mut self.buckets[(number % BUCKETS as u64) as usize];
        let taken = due.min(*bucket);
        *bucket -= taken;
        self.credit -= taken;
        due - taken
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
        Self::with(Settings { ratio, window, full: 3 * CALL, refill, ceiling: None })
    }

    fn with(settings: Settings) -> Self {
        RatioBudget {
            settings,
            #[cfg(feature = "store")]
            providers: Arc::default(),
            pot: Arc::new(Pot::new(settings)),
            parts: Arc::default(),
        }
    }

    /// Other settings, afresh; for the same providers.
    fn change(&self, settings: Settings) -> Self {
        #[cfg(feature = "store")]
        return Self::with(settings).shared(self.providers.clone());
        #[cfg(not(feature = "store"))]
        Self::with(settings)
    }

    /// The same for a fleet of several processes, which share these providers: the reserve of each provider is
    /// that of all of them, or a tenth of its ceiling where that is more, divided by the processes that share
    /// it. Where their store is lost it stays what it was. For providers of one process it changes nothing.
    /// Starts afresh.
    #[cfg(feature = "store")]
    #[must_use]
    pub fn for_fleet<'a>(self, providers: impl IntoIterator<Item = &'a crate::Provider>) -> Self {
        self.shared(providers.into_iter().cloned().collect())
    }

    #[cfg(feature = "store")]
    fn shared(&self, providers: Arc<[crate::Provider]>) -> Self {
        let only = if let [only] = &*providers { Some(only.clone()) } else { None };
        let pot = Arc::new(Pot::of(self.settings, only));
        RatioBudget { providers, pot, ..Self::with(self.settings) }
    }

    /// The pot of one provider.
    fn part(&self, provider: &str) -> Self {
        #[cfg(feature = "store")]
        if let Some(provider) = self.providers.iter().find(|known| &**known.name() == provider) {
            let pot = Arc::new(Pot::of(self.settings, Some(provider.clone())));
            return RatioBudget { pot, ..Self::with(self.settings) };
        }
        let _ = provider;
        Self::with(self.settings)
    }

    /// The same with another window. Starts afresh.
    #[must_use]
    pub fn window(self, window: Duration) -> Self {
        self.change(Settings { window, ..self.settings })
    }

    /// The same with another reserve: so many calls at most, one more every `refill`. Starts afresh.
    #[must_use]
    pub fn reserve(self, calls: u32, refill: Duration) -> Self {
        self.change(Settings { full: u64::from(calls) * CALL, refill, ..self.settings })
    }

    /// The same with at most so many withdrawals in any 60 s, whatever was paid in; default: no such
    /// ceiling. What is refunded still counts. Remembers the instants of so many withdrawals at most.
    /// Starts afresh.
    #[must_use]
    pub fn per_minute(self, calls: u32) -> Self {
        self.change(Settings { ceiling: Some(calls), ..self.settings })
    }

    /// Calls that could be taken out now, the ceiling of a minute aside.
    #[must_use]
    pub fn balance(&self) -> f64 {
        let ledger = self.pot.up_to_date();
        ledger.credit.saturating_add(ledger.reserve) as f64 / CALL as f64
    }
}

impl Pot {
    fn new(settings: Settings) -> Self {
        Pot {
            clock: Clock::new(),
            settings,
            #[cfg(feature = "store")]
            provider: None,
            fresh: AtomicU32::new(0),
            ledger: Mutex::new(Ledger::new(&settings)),
        }
    }

    /// One whose reserve is a fleet's: this process begins with none of it.
    #[cfg(feature = "store")]
    fn of(settings: Settings, provider: Option<crate::Provider>) -> Self {
        let mut pot = Pot { provider, ..Pot::new(settings) };
        if pot.provider.as_ref().is_some_and(crate::Provider::is_shared) {
            pot.ledger.get_mut().unwrap_or_else(PoisonError::into_inner).reserve = 0;
        }
        pot
    }

    /// As they are now for this process.
    fn settings(&self) -> Settings {
        let settings = self.settings;
        #[cfg(feature = "store")]
        if let Some((ceiling, members)) = self.provider.as_ref().and_then(crate::Provider::fleet_share) {
            let full = settings.full.max(u64::from(ceiling) * CALL / 10) / u64::from(members.max(1));
            return Settings { full, refill: settings.refill.saturating_mul(members), ..settings };
        }
        settings
    }

    fn up_to_date(&self) -> std::sync::MutexGuard<'_, Ledger> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = u64::from(self.fresh.swap(0, Ordering::Relaxed));
        // Their age is unknown: as old as they can be. The clock is read under the lock, so that it
        // never runs backwards here.
        ledger.pay_in(fresh.saturating_mul(self.settings.ratio));
        ledger.advance(&self.settings(), self.clock.now());
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
        self.pot.up_to_date().withdraw(&self.pot.settings)
    }

    fn refund(&self) {
        self.pot.up_to_date().give_back(&self.pot.settings());
    }

    fn take_back(&self) {
        self.pot.up_to_date().take_back(self.pot.settings.ratio);
    }

    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let part = parts.entry(provider.into()).or_insert_with(|| self.part(provider));
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
            .field("reserve", &(self.settings.full / CALL))
            .field("refill", &self.settings.refill)
            .field("per_minute", &self.settings.ceiling)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Unlimited, *};
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

    #[tokio::test(start_paused = true)]
    async fn a_minute_has_its_ceiling_and_keeps_it() {
        let budget = RatioBudget::new(1.0).per_minute(4);
        (0..1000).for_each(|_| budget.deposit());
        assert_eq!(drained(&budget), 4, "whatever was paid in");
        budget.refund();
        assert_eq!(drained(&budget), 0, "asked for is asked for");
        tokio::time::advance(Duration::from_nanos(59_999_999_999)).await;
        (0..1000).for_each(|_| budget.deposit());
        assert_eq!(drained(&budget), 0);
        tokio::time::advance(Duration::from_nanos(1)).await;
        assert_eq!(drained(&budget), 4);
        assert_eq!(drained(&RatioBudget::default().per_minute(0)), 0);
        let part = budget.open("a").unwrap();
        (0..1000).for_each(|_| part.deposit());
        assert_eq!((0..99).filter(|_| part.try_withdraw()).count(), 4, "each part its own");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_given_back_to_the_reserve_is_never_more_than_the_reserve() {
        let budget = RatioBudget::new(0.0);
        assert_eq!(drained(&budget), 3);
        (0..3).for_each(|_| budget.refund());
        assert_eq!(budget.balance(), 3.0);
        tokio::time::advance(S(3600)).await;
        assert_eq!(drained(&budget), 3, "it does not refill on top of what came back");
    }

    // Law 3 for who is alone: one call every five seconds pays in a tenth of a call, and the reserve is
    // what lets it repeat the one that failed.
    #[tokio::test(start_paused = true)]
    async fn a_lone_agent_that_calls_every_five_seconds_gets_its_retry() {
        let budget = RatioBudget::default();
        for call in 0..2000u32 {
            budget.deposit();
            // One in ten fails once, and now and then one fails twice.
            let failures = if call % 50 == 0 { 2 } else { u32::from(call % 10 == 0) };
            for _ in 0..failures {
                assert!(budget.try_withdraw(), "call {call}");
            }
            tokio::time::advance(S(5)).await;
        }
    }

    proptest! {
        /// Law 3 for one process: over every stretch of time, and exactly; with refunds, and with a
        /// ceiling.
        #[test]
        fn never_more_than_the_ratio_and_the_reserve(
            ratio in 0..=1_000_000u64,
            burst in 0..5u64,
            ceiling in prop::option::of(0..60u32),
            // (milliseconds until, deposits, some of them taken back, attempts to withdraw, refunds of what is out)
            steps in prop::collection::vec((0..20_000u64, 0..60u64, 0..20u64, 0..40u64, 0..6u64), 1..40),
        ) {
            let settings = Settings { ratio, window: S(30), full: burst * CALL, refill: S(10), ceiling };
            let mut ledger = Ledger::new(&settings);
            let (mut now, mut out, mut history) = (0, 0, Vec::new());
            for (gap, deposits, taken_back, asked, refunds) in steps {
                now += gap;
                ledger.advance(&settings, Time::from_nanos(now * 1_000_000));
                ledger.pay_in(deposits * ratio);
                let before = ledger.credit;
                (0..taken_back).for_each(|_| ledger.take_back(ratio));
                prop_assert_eq!(ledger.credit, before.saturating_sub(taken_back * ratio));
                let refunds = refunds.min(out);
                (0..refunds).for_each(|_| ledger.give_back(&settings));
                let granted = (0..asked).filter(|_| ledger.withdraw(&settings)).count() as u64;
                out = out + granted - refunds;
                let available = ledger.credit + ledger.reserve;
                let full = ceiling.is_some_and(|most| ledger.last.len() == most as usize);
                prop_assert!(granted == asked || available < CALL || full, "refused with {} at hand", available);
                prop_assert_eq!(ledger.credit, ledger.buckets.iter().sum::<u64>());
                prop_assert!(ledger.reserve <= burst * CALL);
                history.push((now, deposits, granted, refunds));
            }
            for (i, &(from, ..)) in history.iter().enumerate() {
                for &(to, ..) in &history[i..] {
                    let sum = |low: u64, of: fn(&(u64, u64, u64, u64)) -> u64| {
                        history.iter().filter(|h| low <= h.0 && h.0 <= to).map(of).sum::<u64>()
                    };
                    let (granted, early) = (sum(from, |h| h.2), from.saturating_sub(30_000));
                    let (paid, refunded) = (sum(early, |h| h.1), sum(early, |h| h.3));
                    let most = (refunded + burst) * CALL + paid * ratio + (to - from) * 100;
                    prop_assert!(granted * CALL <= most, "{} of {} in {}..{}", granted, most, from, to);
                    if let Some(ceiling) = ceiling.filter(|_| to - from < 60_000) {
                        prop_assert!(granted <= u64::from(ceiling), "{} in {}..{}", granted, from, to);
                    }
                }
            }
        }
    }
}
