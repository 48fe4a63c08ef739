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
    pub(super) fn sheds(&self) -> bool {
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
        let share = refusal_share(requests, accepts, state.settings.k, state.settings.cap);
        let sheds = share > 0.0;
        // Read first: a store takes the cache line from all who read it.
        if self.sheds() != sheds {
            self.sheds.store(sheds, Ordering::Relaxed);
        }
        share
    }
}
