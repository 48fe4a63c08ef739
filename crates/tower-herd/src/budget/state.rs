//! Requests and accepts of the last window, and the share to refuse. Pure, but for the lock and the
//! atomics of [`Throttle`], which is what the sensor and the layer share.

use super::BudgetSettings;
use crate::{
    Kind, Time,
    provider::Verdict,
    random::{Random, Seeds},
};
use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The share of calls to refuse: `max(0, (requests - k * accepts) / (requests + 1))`, at most `cap`
/// (Site Reliability Engineering, chapter 21). `requests` counts all that was attempted, what was refused
/// here included.
///
/// ```
/// # use tower_herd::budget::refusal_share;
/// assert_eq!(refusal_share(100, 50, 2.0, 0.9), 0.0); // half of it is accepted: nothing is refused
/// assert_eq!(refusal_share(99, 25, 2.0, 0.9), 0.49);
/// assert_eq!(refusal_share(1000, 0, 2.0, 0.9), 0.9);
/// ```
#[must_use]
pub fn refusal_share(requests: u64, accepts: u64, k: f64, cap: f64) -> f64 {
    let (requests, accepts) = (requests as f64, accepts as f64);
    ((requests - k * accepts) / (requests + 1.0)).clamp(0.0, cap)
}

const BUCKETS: usize = 30;

/// What happened in one thirtieth of the window.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Calls that were sent, less those that were dropped in it, which may be more.
    sent: i64,
    /// Calls of which it became known that they were accepted.
    accepted: i64,
    /// ... and that they were not.
    failed: i64,
    /// Calls that were refused here.
    shed: i64,
}

impl Bucket {
    fn add(&mut self, other: Bucket, sign: i64) {
        self.sent += sign * other.sent;
        self.accepted += sign * other.accepted;
        self.failed += sign * other.failed;
        self.shed += sign * other.shed;
    }
}

/// Sums over a rolling window, in fixed memory.
///
/// What became of a call is known when it ends, and what ends late ends unlike what ends early: errors
/// come fast, answers slowly. So the accepts of the window are those that are known, or, where more are
/// still on their way, the calls that were sent and are not known to have failed. Else the first fast
/// errors of a healthy but slow provider would look like an outage.
#[derive(Debug)]
pub(super) struct Window {
    buckets: [Bucket; BUCKETS],
    sum: Bucket,
    newest: u64,
    width: u64,
}

impl Window {
    fn new(window: Duration) -> Self {
        let nanos = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        let width = (nanos / BUCKETS as u64).max(1);
        Window { buckets: [Bucket::default(); BUCKETS], sum: Bucket::default(), newest: 0, width }
    }

    /// Moves on to `now`; what is older than the window is gone. Time that runs backwards stands still.
    fn advance(&mut self, now: Time) {
        let newest = (now.as_nanos() / self.width).max(self.newest);
        for number in (self.newest + 1..=newest).take(BUCKETS) {
            let gone = std::mem::take(&mut self.buckets[(number % BUCKETS as u64) as usize]);
            self.sum.add(gone, -1);
        }
        self.newest = newest;
    }

    fn add(&mut self, what: Bucket) {
        self.buckets[(self.newest % BUCKETS as u64) as usize].add(what, 1);
        self.sum.add(what, 1);
    }

    /// Requests and accepts of the window.
    pub(super) fn counts(&self) -> (u64, u64) {
        let Bucket { sent, accepted, failed, shed } = self.sum;
        let accepts = accepted.max(sent - failed).max(0);
        ((accepts + failed + shed).unsigned_abs(), accepts.unsigned_abs())
    }
}

/// Whether the provider took the request: one that is at fault itself was taken, and answered.
#[inline]
fn is_accepted(kind: Kind) -> bool {
    matches!(kind, Kind::Success | Kind::Empty | Kind::Rejected)
}

/// What the layers in front of one provider, or scope, share with its sensor.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// No two alike in one process: a task remembers by it where it was refused.
    id: u32,
    /// Whether any share is refused: read by every call, written when that changes.
    sheds: AtomicBool,
    /// Calls sent (lower half) and accepted (upper half) since the window was last moved on.
    fresh: Apart<AtomicU64>,
    state: Apart<Mutex<State>>,
}

/// In cache lines of its own (processors fetch them in pairs): all calls write it.
#[derive(Debug)]
#[repr(align(128))]
struct Apart<T>(T);

#[derive(Debug)]
struct State {
    given: Option<BudgetSettings>,
    settings: BudgetSettings,
    window: Window,
    random: Random,
}

/// Where and when a call was refused: a task is counted by it once in a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shed {
    throttle: u32,
    bucket: u32,
}

impl Shed {
    /// Both in one number, which is never 0.
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.throttle) << 32 | u64::from(self.bucket)
    }

    /// Whether `packed` is of the same throttle, and if so, whether it still counts.
    pub(crate) fn is_counted_by(self, packed: u64) -> Option<bool> {
        (packed >> 32 == u64::from(self.throttle))
            .then(|| self.bucket.wrapping_sub(packed as u32) < BUCKETS as u32)
    }
}

const SENT: u64 = 1;
const ACCEPTED: u64 = 1 << 32;
/// The clock is read for one success in so many. Calls between two readings count as made at the later.
const READ_EVERY: u64 = 8;

impl Throttle {
    pub(crate) fn new(seeds: &Seeds) -> Self {
        static IDS: AtomicU32 = AtomicU32::new(1);
        let settings = BudgetSettings::default();
        let state =
            State { given: None, settings, window: Window::new(settings.window), random: seeds.session() };
        Throttle {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            sheds: AtomicBool::new(false),
            fresh: Apart(AtomicU64::new(0)),
            state: Apart(Mutex::new(state)),
        }
    }

    /// Whether calls have to ask.
    #[inline]
    pub(crate) fn sheds(&self) -> bool {
        self.sheds.load(Ordering::Relaxed)
    }

    /// A call is sent.
    #[inline]
    pub(crate) fn sent(&self) {
        self.fresh.0.fetch_add(SENT, Ordering::Relaxed);
    }

    /// It came to this.
    #[inline]
    pub(crate) fn settled(&self, verdict: Verdict, now: impl FnOnce() -> Time) {
        match verdict {
            Verdict::Reply(kind) if is_accepted(kind) => {
                let fresh = self.fresh.0.fetch_add(ACCEPTED, Ordering::Relaxed);
                if fresh / ACCEPTED >= READ_EVERY - 1 {
                    self.catch_up(now());
                }
            }
            Verdict::Dropped => self.unaccepted(now(), Bucket { sent: -1, ..Bucket::default() }),
            _ => self.unaccepted(now(), Bucket { failed: 1, ..Bucket::default() }),
        }
    }

    #[cold]
    #[inline(never)]
    fn catch_up(&self, now: Time) {
        // Who finds it taken leaves it to the other.
        if let Ok(mut state) = self.state.0.try_lock() {
            self.up_to(&mut state, now);
            self.publish(&state);
        }
    }

    #[cold]
    #[inline(never)]
    fn unaccepted(&self, now: Time, what: Bucket) {
        let mut state = self.lock();
        self.up_to(&mut state, now);
        state.window.add(what);
        self.publish(&state);
    }

    /// For how long a call is refused, if it is. `counts` says whether this refusal is to be counted as a
    /// request: not the second one of a task in one window, and not where the call is sent all the same.
    #[cold]
    #[inline(never)]
    pub(super) fn draw(&self, now: Time, counts: impl FnOnce(Shed) -> bool) -> Option<Duration> {
        let mut state = self.lock();
        self.up_to(&mut state, now);
        let share = self.publish(&state);
        if share <= 0.0 || state.random.unit() >= share {
            return None;
        }
        // The number of the bucket may wrap: only how far apart two of them are is of interest.
        if counts(Shed { throttle: self.id, bucket: state.window.newest as u32 }) {
            state.window.add(Bucket { shed: 1, ..Bucket::default() });
        }
        const SECOND: Duration = Duration::from_secs(1);
        Some(SECOND + state.random.up_to(SECOND))
    }

    /// The share that is refused now.
    pub(super) fn share(&self, now: Time) -> f64 {
        let mut state = self.lock();
        self.up_to(&mut state, now);
        self.publish(&state)
    }

    /// Takes these settings, unless others were given before.
    pub(super) fn configure(&self, settings: BudgetSettings) -> bool {
        let mut state = self.lock();
        match state.given {
            Some(given) => given == settings,
            None => {
                if settings.window != state.settings.window {
                    state.window = Window::new(settings.window);
                }
                (state.given, state.settings) = (Some(settings), settings);
                self.publish(&state);
                true
            }
        }
    }

    pub(super) fn settings(&self) -> BudgetSettings {
        self.lock().settings
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn up_to(&self, state: &mut State, now: Time) {
        let fresh = self.fresh.0.swap(0, Ordering::Relaxed);
        state.window.advance(now);
        let (sent, accepted) = ((fresh % ACCEPTED) as i64, (fresh / ACCEPTED) as i64);
        state.window.add(Bucket { sent, accepted, ..Bucket::default() });
    }

    fn publish(&self, state: &State) -> f64 {
        let (requests, accepts) = state.window.counts();
        let share = match state.settings {
            settings if requests < u64::from(settings.least) => 0.0,
            settings => refusal_share(requests, accepts, settings.k, settings.cap),
        };
        let sheds = share > 0.0;
        // Read first: a store takes the cache line from all who read it.
        if self.sheds() != sheds {
            self.sheds.store(sheds, Ordering::Relaxed);
        }
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    fn throttle(seed: u64, settings: BudgetSettings) -> Throttle {
        let throttle = Throttle::new(&Seeds::from_seed(seed));
        assert!(throttle.configure(settings));
        throttle
    }

    /// One call at this instant, if it is let through: whether it was, and was accepted.
    fn call(throttle: &Throttle, now: Time, accepted: impl FnOnce() -> bool) -> Option<bool> {
        if throttle.sheds() && throttle.draw(now, |_| true).is_some() {
            return None;
        }
        throttle.sent();
        let accepted = accepted();
        let kind = if accepted { Kind::Success } else { Kind::Failed };
        throttle.settled(Verdict::Reply(kind), || now);
        Some(accepted)
    }

    fn vectors(part: &str) -> (Vec<serde_json::Value>, serde_json::Value) {
        let mut vectors: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/vectors/budget.json")).unwrap();
        let part = vectors[part].take();
        (part["cases"].as_array().unwrap().clone(), part)
    }

    #[test]
    fn shares_of_the_vectors() {
        let (cases, part) = vectors("adaptive_throttling");
        for case in cases {
            let count = |key: &str| case[key].as_u64().unwrap();
            let share = refusal_share(
                count("requests"),
                count("accepts"),
                case["k"].as_f64().unwrap(),
                f64::INFINITY,
            );
            let expected = case["reject_probability"].as_f64().unwrap();
            assert!((share - expected).abs() <= part["tolerance"].as_f64().unwrap(), "{share}: {case}");
        }
    }

    /// What is sent a second once it has settled; `counts`: the refusals here are requests.
    fn settles_at(demand: u64, capacity: u64, k: f64, counts: bool) -> f64 {
        let throttle = throttle(1, BudgetSettings::new().k(k).cap(1.0));
        let (mut sent, mut credit) = (0, 0.0);
        const SECONDS: u64 = 400;
        for n in 0..demand * SECONDS {
            let now = Time::from_nanos(n * 1_000_000_000 / demand);
            credit = f64::min(credit + capacity as f64 / demand as f64, capacity as f64);
            if throttle.sheds() && throttle.draw(now, |_| counts).is_some() {
                continue;
            }
            let accepted = credit >= 1.0;
            credit -= if accepted { 1.0 } else { 0.0 };
            let kind = if accepted { Kind::Success } else { Kind::Overloaded };
            throttle.sent();
            throttle.settled(Verdict::Reply(kind), || now);
            sent += u64::from(n >= demand * SECONDS / 2);
        }
        sent as f64 / (SECONDS / 2) as f64
    }

    #[test]
    fn what_is_sent_settles_at_k_times_what_is_accepted() {
        let (cases, part) = vectors("adaptive_throttling_steady_state");
        let tolerance = part["tolerance_relative"].as_f64().unwrap();
        for case in cases {
            let number = |key: &str| case[key].as_f64().unwrap();
            let (demand, capacity) = (number("demand") as u64, number("capacity") as u64);
            let near = |sent: f64, expected: &str| (sent / number(expected) - 1.0).abs() <= tolerance;
            let sent = settles_at(demand, capacity, number("k"), true);
            assert!(near(sent, "sent_per_s"), "{sent}: {case}");
            // The classic mistake, and that this test would see it.
            let wrong = settles_at(demand, capacity, number("k"), false);
            assert!(near(wrong, "wrong_if_about"), "{wrong}: {case}");
        }
    }

    #[test]
    fn each_verdict_counts_as_it_should() {
        use Verdict::{Dropped, Reply, TimedOut};
        for (verdict, requests, accepts) in [
            (Reply(Kind::Success), 1, 1),
            (Reply(Kind::Empty), 1, 1),
            (Reply(Kind::Rejected), 1, 1),
            (Reply(Kind::Throttled), 1, 0),
            (Reply(Kind::Overloaded), 1, 0),
            (Reply(Kind::Failed), 1, 0),
            (Reply(Kind::Depleted), 1, 0),
            (Reply(Kind::Misconfigured), 1, 0),
            (TimedOut, 1, 0),
            (Dropped, 0, 0),
        ] {
            let throttle = throttle(1, BudgetSettings::new());
            throttle.sent();
            throttle.settled(verdict, || at(1));
            throttle.share(at(1));
            assert_eq!(throttle.lock().window.counts(), (requests, accepts), "{verdict:?}");
            throttle.share(at(40_000));
            assert_eq!(throttle.lock().window.counts(), (0, 0), "{verdict:?}: the window has passed");
        }
    }

    #[test]
    fn fast_errors_of_a_slow_provider_are_no_outage() {
        // Ten a second; two in ten fail at once, the others answer after a minute.
        let throttle = throttle(1, BudgetSettings::new());
        for n in 0..1200u64 {
            let now = at(n * 100);
            throttle.sent();
            if n % 5 == 4 {
                throttle.settled(Verdict::Reply(Kind::Failed), || now);
            } else if n >= 600 {
                throttle.settled(Verdict::Reply(Kind::Success), || now);
            }
            assert!(!throttle.sheds(), "after {n}");
        }
        // A hundred that were sent at once answer, or fail, a minute later.
        let throttle = self::throttle(1, BudgetSettings::new());
        (0..100).for_each(|_| throttle.sent());
        throttle.share(at(0));
        for n in 0..100 {
            let kind = if n % 5 == 4 { Kind::Failed } else { Kind::Success };
            throttle.settled(Verdict::Reply(kind), || at(60_000));
            assert!(!throttle.sheds(), "after {n}");
        }
    }

    #[test]
    fn calls_that_hang_until_they_time_out_are_an_outage() {
        let throttle = throttle(1, BudgetSettings::new());
        for n in 0..900u64 {
            throttle.sent();
            if n >= 300 {
                throttle.settled(Verdict::TimedOut, || at(n * 100));
            }
        }
        assert_eq!(throttle.share(at(90_000)), 0.9);
    }

    #[test]
    fn after_a_healthy_hour_an_outage_is_noticed_within_the_window() {
        let throttle = throttle(1, BudgetSettings::new());
        for n in 0..3600 * 10 {
            assert_eq!(call(&throttle, at(n * 100), || true), Some(true));
        }
        let begin = 3_600_000;
        for n in 0..600 {
            call(&throttle, at(begin + n * 100), || false);
        }
        assert_eq!(throttle.share(at(begin + 60_000)), 0.9);
    }

    // The bar: a total outage after a healthy hour, 100 calls a second.
    #[test]
    fn back_to_95_percent_within_75_s_of_the_return() {
        for seed in 0..20 {
            let throttle = throttle(seed, BudgetSettings::new());
            // An hour, or what is left of one in the window.
            let down = if seed == 0 { 3_600_000 } else { 60_000 };
            let up = down + 600_000;
            let mut served = Vec::new();
            for n in 0..(up + 100_000) / 10 {
                let ms = n * 10;
                let outcome = call(&throttle, at(ms), || !(down..up).contains(&ms));
                match ms {
                    ms if ms < down => assert_eq!(outcome, Some(true), "healthy: seed {seed}"),
                    ms if ms >= up => served.push(outcome == Some(true)),
                    _ => {}
                }
            }
            // The first second from which on 95 of 100 calls are served.
            let seconds: Vec<_> =
                served.chunks(100).map(|second| second.iter().filter(|ok| **ok).count()).collect();
            let back = seconds.iter().rposition(|served| *served < 95).unwrap() + 1;
            assert!((20..=75).contains(&back), "after {back} s: seed {seed}, {seconds:?}");
            assert_eq!(throttle.share(at(up + 200_000)), 0.0);
        }
    }

    #[test]
    fn settings_are_given_once() {
        let throttle = Throttle::new(&Seeds::from_seed(1));
        assert_eq!(throttle.settings(), BudgetSettings::default());
        let strict = BudgetSettings::new().k(1.5);
        assert!(throttle.configure(strict) && throttle.configure(strict));
        assert!(!throttle.configure(BudgetSettings::new()));
        assert_eq!(throttle.settings(), strict);
    }

    /// Refusals among 1000 draws, after so many accepted and failed calls, and what is left of them after
    /// `later`.
    fn refusals(settings: BudgetSettings, accepted: u64, failed: u64, later: u64) -> usize {
        let throttle = throttle(7, settings);
        (0..accepted).for_each(|_| assert!(call(&throttle, at(0), || true).is_some()));
        (0..failed).for_each(|_| {
            throttle.sent();
            throttle.settled(Verdict::Reply(Kind::Failed), || at(0));
        });
        (0..1000).filter(|_| throttle.draw(at(later), |_| false).is_some()).count()
    }

    #[test]
    fn each_setting_changes_what_is_refused() {
        let new = BudgetSettings::new;
        assert_eq!(refusals(new(), 50, 50, 0), 0);
        assert!((200..300).contains(&refusals(new().k(1.5), 50, 50, 0)), "a quarter");
        assert!((850..950).contains(&refusals(new(), 0, 100, 0)), "0.9 at most");
        assert!((450..550).contains(&refusals(new().cap(0.5), 0, 100, 0)));
        assert_eq!(refusals(new(), 0, 100, 31_000), 0);
        assert!(refusals(new().window(Duration::from_secs(60)), 0, 100, 31_000) > 850);
    }

    #[test]
    fn a_refusal_lasts_one_to_two_seconds_and_a_seed_repeats_it() {
        let waits = |seed| {
            let throttle = throttle(seed, BudgetSettings::new());
            (0..1000).for_each(|_| assert_ne!(call(&throttle, at(0), || false), Some(true)));
            (0..500).filter_map(|_| throttle.draw(at(0), |_| true)).collect::<Vec<_>>()
        };
        let all = waits(3);
        assert!(all.iter().all(|wait| (1000..=2000).contains(&wait.as_millis())));
        let late = all.iter().filter(|wait| wait.as_millis() >= 1500).count();
        assert!((170..280).contains(&late), "{late} of {} in the second half", all.len());
        assert_eq!(all, waits(3));
        assert_ne!(all, waits(4));
    }

    proptest! {
        #[test]
        fn the_share_is_within_its_bounds_and_monotone(
            requests in 0..1_000_000u64,
            accepts in 0..1_000_000u64,
            more in 1..1000u64,
            k in 1.0..10.0f64,
            cap in 0.01..=1.0f64,
        ) {
            let accepts = accepts.min(requests);
            let share = refusal_share(requests, accepts, k, cap);
            prop_assert!((0.0..=cap).contains(&share));
            prop_assert!(refusal_share(requests + more, accepts, k, cap) >= share, "more that are not accepted");
            prop_assert!(refusal_share(requests + more, accepts + more, k, cap) <= share, "more that are");
            if accepts as f64 * k >= requests as f64 {
                prop_assert_eq!(share, 0.0);
            }
        }

        /// Whatever happens in whatever order: the sums are those of the buckets, the share is in its
        /// bounds, and nobody is refused while at least 1/k of what ended in the window was accepted.
        #[test]
        fn a_provider_that_accepts_enough_is_not_throttled(
            k in 1.0..4.0f64,
            seed in any::<u64>(),
            steps in prop::collection::vec((0..5000u64, 0..6u8), 1..300),
        ) {
            let throttle = throttle(seed, BudgetSettings::new().k(k));
            let (mut now, mut ended) = (0, Vec::new());
            for (gap, what) in steps {
                now += gap;
                match what {
                    0 | 1 => throttle.sent(),
                    2 | 3 => {
                        throttle.settled(Verdict::Reply(Kind::Success), || at(now));
                        ended.push((now, true));
                    }
                    4 => {
                        throttle.settled(Verdict::Reply(Kind::Failed), || at(now));
                        ended.push((now, false));
                    }
                    _ => throttle.settled(Verdict::Dropped, || at(now)),
                }
                let share = throttle.share(at(now));
                prop_assert!((0.0..=0.9).contains(&share));
                prop_assert_eq!(share > 0.0, throttle.sheds());
                let state = throttle.lock();
                let mut sum = Bucket::default();
                state.window.buckets.iter().for_each(|bucket| sum.add(*bucket, 1));
                prop_assert_eq!(format!("{sum:?}"), format!("{:?}", state.window.sum));
                let from = (now / 1000).saturating_sub(BUCKETS as u64 - 1) * 1000;
                let window = ended.iter().filter(|(at, _)| *at >= from);
                let (mut all, mut good) = (0, 0);
                window.for_each(|(_, ok)| { all += 1; good += u64::from(*ok); });
                let (requests, accepts) = state.window.counts();
                prop_assert!(accepts >= good && requests - accepts == all - good, "{requests} {accepts}");
                if good as f64 * k >= all as f64 {
                    prop_assert_eq!(share, 0.0);
                }
            }
        }

        /// A task is counted once in a window by each throttle that refuses it.
        #[test]
        fn a_task_counts_once_a_window(gaps in prop::collection::vec(0..20_000u64, 1..60)) {
            let (first, second) = (throttle(1, BudgetSettings::new()), throttle(2, BudgetSettings::new()));
            let task = crate::Task::new(1);
            let mut now = 0;
            let mut last: [Option<u64>; 2] = [None; 2];
            for gap in gaps {
                now += gap;
                for (throttle, last) in [&first, &second].into_iter().zip(&mut last) {
                    // Enough that fails to refuse most.
                    (0..50).for_each(|_| throttle.settled(Verdict::Reply(Kind::Failed), || at(now)));
                    let mut counted = None;
                    let refused = throttle.draw(at(now), |shed| *counted.insert(task.first_shed(shed)));
                    let due = last.is_none_or(|last| now / 1000 - last / 1000 >= BUCKETS as u64);
                    prop_assert_eq!(counted, refused.map(|_| due));
                    if counted == Some(true) {
                        *last = Some(now);
                    }
                }
            }
        }
    }
}
