//! How long a key is closed after a grant: a pure function of its streak and of one random number.

use std::{error::Error, fmt, time::Duration};

/// How the waits of a key grow: `min(cap, base * factor^(streak - 1))`, times `1 + jitter * (2u - 1)` for a `u`
/// that is uniform in `[0, 1)` and drawn anew for each grant.
///
/// The defaults are 2 s, doubling up to 10 min, plus or minus 30 %: 2, 4, 8 s and so on, as most queues have them.
/// The jitter is a share of the wait, so it never swamps a short one (sidekiq/sidekiq#5324), and it goes on top of
/// the cap, so that keys at the cap still spread: no wait is longer than `cap * (1 + jitter)`.
///
/// A schedule that exists can be meant: what cannot is refused where it is set, or loaded.
///
/// ```
/// use std::time::Duration;
/// use tower_herd::retry_token::Schedule;
///
/// let schedule = Schedule::new().growth(Duration::from_secs(1), 2.0, Duration::from_secs(60))?.jitter(0.2)?;
/// assert_eq!(schedule.delay(3, 0.5), Duration::from_secs(4));
/// assert_eq!(schedule.delay(u32::MAX, 0.5), Duration::from_secs(60));
/// // All retries at once is no schedule (timgit/pg-boss#839).
/// assert_eq!(Schedule::new().growth(Duration::ZERO, 2.0, Duration::from_secs(60)).unwrap_err().field, "base");
/// # Ok::<(), tower_herd::retry_token::ScheduleError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "Plain", into = "Plain")
)]
pub struct Schedule {
    base: Duration,
    factor: f64,
    cap: Duration,
    jitter: f64,
    hold: Option<Duration>,
}

/// A schedule that cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleError {
    /// The field at fault.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: &'static str,
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a retry schedule's {} {}", self.field, self.why)
    }
}

impl Error for ScheduleError {}

impl Default for Schedule {
    fn default() -> Self {
        Schedule {
            base: Duration::from_secs(2),
            factor: 2.0,
            cap: Duration::from_secs(600),
            jitter: 0.3,
            hold: None,
        }
    }
}

impl Schedule {
    /// The shortest base: below it a wait protects nothing, and zero would be a hot loop.
    pub const LEAST: Duration = Duration::from_millis(1);
    /// The longest cap, and the longest hold.
    pub const MOST: Duration = Duration::from_secs(7 * 24 * 3600);
    /// The shortest hold: a third of it lies between two heartbeats.
    pub const LEAST_HOLD: Duration = Duration::from_millis(100);

    /// 2 s, doubling up to 10 min, plus or minus 30 %; nothing is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The wait after the first grant, what each further one multiplies it by, and the longest before jitter. A factor
    /// of 1 keeps the wait as it is.
    ///
    /// # Errors
    ///
    /// If `base` is below 1 ms, `factor` not in 1 to 100, or `cap` below `base` or above 7 days.
    pub fn growth(self, base: Duration, factor: f64, cap: Duration) -> Result<Self, ScheduleError> {
        Schedule { base, factor, cap, ..self }.checked()
    }

    /// The share of a wait that is added or taken off at most. Default 0.3. 0 switches it off.
    ///
    /// # Errors
    ///
    /// If it is not in 0 to below 1: a wait must not become none.
    pub fn jitter(self, share: f64) -> Result<Self, ScheduleError> {
        Schedule { jitter: share, ..self }.checked()
    }

    /// Keeps a key closed for as long as its run goes on: each grant closes it for at least `lease`, and a
    /// heartbeat every third of that prolongs it. For runs that may last longer than their wait, on queues
    /// whose own lock does not outlast them (graphile/worker#169 started a job of four hours twice). None, the default:
    /// the queue sees to it that a job that runs is not handed out again.
    ///
    /// After a failure the key is closed for the rest of the lease, if that is longer than the wait.
    ///
    /// # Errors
    ///
    /// If it is below 100 ms or above 7 days.
    pub fn hold(self, lease: Option<Duration>) -> Result<Self, ScheduleError> {
        Schedule { hold: lease, ..self }.checked()
    }

    /// The wait after the first grant.
    #[must_use]
    pub const fn base(&self) -> Duration {
        self.base
    }

    /// What each further grant multiplies it by.
    #[must_use]
    pub const fn factor(&self) -> f64 {
        self.factor
    }

    /// The longest wait before jitter.
    #[must_use]
    pub const fn cap(&self) -> Duration {
        self.cap
    }

    /// The share of the wait that is jitter.
    #[must_use]
    pub const fn spread(&self) -> f64 {
        self.jitter
    }

    /// The least time that a grant closes its key for.
    #[must_use]
    pub const fn lease(&self) -> Option<Duration> {
        self.hold
    }

    /// The exponent from which on the cap holds: a store that computes `base * factor^n` itself takes
    /// `min(streak - 1, this)` for `n`, and cannot overflow.
    #[must_use]
    pub fn last_exponent(&self) -> u32 {
        let exponent = (self.cap.as_secs_f64() / self.base.as_secs_f64()).ln() / self.factor.ln();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates; NaN is 0")]
        let exponent = exponent.ceil() as u32;
        // The factor 1 has none, and 2^31 - 1 is what SQL's integers hold.
        if self.factor > 1.0 { exponent.min(i32::MAX.cast_unsigned()) } else { 0 }
    }

    /// The wait after the grant that made the streak this long (1: the first), for a `u` of `[0, 1]`.
    #[must_use]
    pub fn delay(&self, streak: u32, u: f64) -> Duration {
        // Before multiplying: 2^n of a long streak overflowed elsewhere, and came back negative
        // (yigit/android-priority-jobqueue#419).
        let exponent = streak.saturating_sub(1).min(self.last_exponent());
        let grown = self.base.as_secs_f64() * self.factor.powf(f64::from(exponent));
        let u = if u.is_nan() { 0.5 } else { u.clamp(0.0, 1.0) };
        let wait = grown.min(self.cap.as_secs_f64()) * (1.0 + self.jitter * (2.0 * u - 1.0));
        Duration::try_from_secs_f64(wait).unwrap_or(self.cap)
    }

    /// For how long that grant closes its key: the delay, or the lease if it is longer.
    #[must_use]
    pub fn window(&self, streak: u32, u: f64) -> Duration {
        self.delay(streak, u).max(self.hold.unwrap_or_default())
    }

    fn checked(self) -> Result<Self, ScheduleError> {
        let wrong = |field, why| Err(ScheduleError { field, why });
        if self.base < Self::LEAST {
            return wrong("base", "must be at least 1 ms, or all retries would come at once");
        }
        if !(1.0..=100.0).contains(&self.factor) {
            return wrong("factor", "must be 1 to 100");
        }
        if self.cap < self.base {
            return wrong("cap", "must not be below the base");
        }
        if self.cap > Self::MOST {
            return wrong("cap", "must be 7 days at most");
        }
        if !(0.0..1.0).contains(&self.jitter) {
            return wrong("jitter", "must be 0 to below 1, or a wait could become none");
        }
        match self.hold {
            Some(hold) if hold < Self::LEAST_HOLD => wrong("hold", "must be at least 100 ms"),
            Some(hold) if hold > Self::MOST => wrong("hold", "must be 7 days at most"),
            _ => Ok(self),
        }
    }
}

/// As it is written in a file.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Plain {
    #[serde(with = "humantime_serde")]
    base: Duration,
    factor: f64,
    #[serde(with = "humantime_serde")]
    cap: Duration,
    jitter: f64,
    #[serde(with = "humantime_serde")]
    hold: Option<Duration>,
}

#[cfg(feature = "serde")]
impl Default for Plain {
    fn default() -> Self {
        Schedule::default().into()
    }
}

#[cfg(feature = "serde")]
impl From<Schedule> for Plain {
    fn from(Schedule { base, factor, cap, jitter, hold }: Schedule) -> Self {
        Plain { base, factor, cap, jitter, hold }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<Plain> for Schedule {
    type Error = ScheduleError;
    fn try_from(Plain { base, factor, cap, jitter, hold }: Plain) -> Result<Self, ScheduleError> {
        Schedule { base, factor, cap, jitter, hold }.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Seeds;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HALF: f64 = 0.5;

    #[test]
    fn two_seconds_doubling_up_to_ten_minutes() {
        let schedule = Schedule::new();
        let waits: Vec<u64> = (1..=12).map(|streak| schedule.delay(streak, HALF).as_secs()).collect();
        assert_eq!(waits, [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600]);
        assert_eq!(schedule.delay(0, HALF), 2 * SECOND, "no grant is the first");
    }

    // yigit/android-priority-jobqueue#419, onosproject/onos-lib-go#127: 2^n overflowed, and the retry came at once.
    // oban-bg/oban#245, #476: near attempt 1,200 the backoff broke.
    #[test]
    fn a_long_streak_stays_at_the_cap() {
        for streak in [30, 31, 32, 63, 64, 65, 1024, 1200, u32::MAX] {
            assert_eq!(Schedule::new().delay(streak, HALF), 600 * SECOND, "{streak}");
        }
        let slow = Schedule::new().growth(SECOND, 1.001, Schedule::MOST).unwrap();
        assert_eq!(slow.delay(u32::MAX, HALF), Schedule::MOST, "a slow growth gets there too");
        let flat = Schedule::new().growth(SECOND, 1.0, 5 * SECOND).unwrap();
        assert_eq!((flat.delay(u32::MAX, HALF), flat.last_exponent()), (SECOND, 0));
        assert_eq!(Schedule::new().last_exponent(), 9, "2 * 2^9 > 600");
    }

    // timgit/pg-boss#839: a base of 0 let all retries come at once.
    #[test]
    fn what_cannot_be_meant_is_refused_and_names_its_field() {
        let new = Schedule::new;
        for (schedule, field) in [
            (new().growth(Duration::ZERO, 2.0, SECOND), "base"),
            (new().growth(Duration::from_micros(999), 2.0, SECOND), "base"),
            (new().growth(SECOND, 0.99, SECOND), "factor"),
            (new().growth(SECOND, f64::NAN, SECOND), "factor"),
            (new().growth(SECOND, f64::INFINITY, SECOND), "factor"),
            (new().growth(SECOND, 2.0, SECOND / 2), "cap"),
            (new().growth(SECOND, 2.0, Duration::MAX), "cap"),
            (new().jitter(1.0), "jitter"),
            (new().jitter(-0.1), "jitter"),
            (new().jitter(f64::NAN), "jitter"),
            (new().hold(Some(Duration::ZERO)), "hold"),
            (new().hold(Some(Duration::MAX)), "hold"),
        ] {
            assert_eq!(schedule.unwrap_err().field, field);
        }
        assert!(new().growth(Schedule::LEAST, 1.0, Schedule::LEAST).is_ok());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn loaded_like_other_settings_and_refused_like_them() {
        let json = r#"{ "base": "500ms", "cap": "1m", "hold": "30s" }"#;
        let schedule: Schedule = serde_json::from_str(json).unwrap();
        let expected = Schedule::new().growth(SECOND / 2, 2.0, 60 * SECOND).unwrap();
        assert_eq!(schedule, expected.hold(Some(30 * SECOND)).unwrap());
        let again: Schedule = serde_json::from_str(&serde_json::to_string(&schedule).unwrap()).unwrap();
        assert_eq!(again, schedule);
        for wrong in [r#"{ "base": "0s" }"#, r#"{ "bases": "1s" }"#, r#"{ "jitter": 1.5 }"#] {
            assert!(serde_json::from_str::<Schedule>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_lease_is_a_floor() {
        let held = Schedule::new().hold(Some(10 * SECOND)).unwrap();
        assert_eq!((held.window(1, HALF), held.window(5, HALF)), (10 * SECOND, 32 * SECOND));
        assert_eq!(held.delay(1, HALF), 2 * SECOND);
    }

    /// The largest distance of the samples, in `[0, 1]`, from a uniform distribution.
    fn kolmogorov_smirnov(samples: &mut [f64]) -> f64 {
        samples.sort_by(f64::total_cmp);
        let n = samples.len() as f64;
        let distance = |(i, x): (usize, &f64)| (x - i as f64 / n).abs().max((x - (i + 1) as f64 / n).abs());
        samples.iter().enumerate().map(distance).fold(0.0, f64::max)
    }

    /// Within 1.95 / sqrt(n) at a level of 0.1 %.
    fn is_uniform(samples: &mut [f64]) -> bool {
        kolmogorov_smirnov(samples) < 1.95 / (samples.len() as f64).sqrt()
    }

    #[test]
    fn jitter_is_uniform_in_its_range_and_finer_than_a_second() {
        const SAMPLES: usize = 100_000;
        let schedule = Schedule::new().growth(SECOND, 2.0, 60 * SECOND).unwrap();
        for streak in [1, 3, 64] {
            let base = schedule.delay(streak, HALF).as_secs_f64();
            let mut random = Seeds::from_seed(u64::from(streak)).session();
            let waits: Vec<f64> =
                (0..SAMPLES).map(|_| schedule.delay(streak, random.unit()).as_secs_f64() / base).collect();
            assert!(waits.iter().all(|wait| (0.7..=1.3).contains(wait)), "streak {streak}");
            let mean = waits.iter().sum::<f64>() / SAMPLES as f64;
            assert!((mean - 1.0).abs() < 0.01, "streak {streak}: {mean}");
            let mut unit: Vec<f64> = waits.iter().map(|wait| (wait - 0.7) / 0.6).collect();
            assert!(is_uniform(&mut unit), "streak {streak}");
        }
        // The control: waits of whole seconds, as tower's own backoff has them around a base of 1 s, are no such
        // thing.
        let mut random = Seeds::from_seed(1).session();
        let mut whole: Vec<f64> = (0..SAMPLES)
            .map(|_| (schedule.delay(1, random.unit()).as_secs_f64().round() - 0.7) / 0.6)
            .collect();
        assert!(!is_uniform(&mut whole));
    }

    proptest! {
        #[test]
        fn no_wait_is_none_or_above_the_cap_and_its_jitter(
            base in 1_u64..1_000_000, factor in 1.0_f64..=100.0, cap in 0_u64..10_000_000, jitter in 0.0_f64..0.99,
            streak: u32, u in prop_oneof![Just(0.0), Just(1.0), Just(f64::NAN), any::<f64>(), 0.0..1.0_f64],
        ) {
            let (base, cap) = (Duration::from_millis(base), Duration::from_millis(base + cap));
            let schedule = Schedule::new().growth(base, factor, cap).unwrap().jitter(jitter).unwrap();
            let wait = schedule.delay(streak, u).as_secs_f64();
            prop_assert!(wait >= base.as_secs_f64() * (1.0 - jitter) - 1e-9);
            prop_assert!(wait <= cap.as_secs_f64() * (1.0 + jitter) + 1e-6);
            prop_assert!(schedule.delay(streak, HALF) <= schedule.delay(streak.saturating_add(1), HALF));
        }
    }
}
