use crate::SettingsError;
use std::time::Duration;

/// Along which curve a recovering provider gets its tasks back.
///
/// Whatever the curve, a ramp takes no longer than the provider was closed: a longer one runs through its
/// curve so much faster. The formulas and where they come from stand in the [module](super)'s table.
///
/// ```
/// use std::time::Duration;
/// use tower_herd::{Fleet, RampedReadmissionLayer, readmission::Profile};
///
/// let search = Fleet::local().provider("search");
/// let gentle = Profile::geometric(0.01, 1.5, Duration::from_secs(60));
/// let layer = RampedReadmissionLayer::new(&search).profile(gentle)?;
/// # let _ = layer;
/// # Ok::<(), tower_herd::SettingsError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(tag = "curve", rename_all = "kebab-case", deny_unknown_fields)
)]
#[non_exhaustive]
pub enum Profile {
    /// A first share at once, which then grows by the same factor in each step of time, without jumps:
    /// `initial * factor^(t / every)`.
    Geometric {
        /// The share of tasks at the beginning: above 0, at most 1.
        initial: f64,
        /// What it is multiplied by in each step: more than 1.
        factor: f64,
        /// The length of a step: at least a millisecond.
        #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
        every: Duration,
    },
    /// Envoy's slow start: `max(min_weight, (max(t, 1 s) / window)^(1 / aggression))`. With an aggression
    /// of 1 it is a straight line. A tenth of the window is a step.
    SlowStart {
        /// How long it takes: at least a millisecond.
        #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
        window: Duration,
        /// The least share: above 0, at most 1.
        min_weight: f64,
        /// Above 1 it starts steeply, below 1 it ends so. Above 0.
        aggression: f64,
    },
}

/// 5 %, doubling every 5 s: complete after 21.6 s.
impl Default for Profile {
    fn default() -> Self {
        Profile::geometric(0.05, 2.0, Duration::from_secs(5))
    }
}

impl Profile {
    /// `initial` of the tasks at once, then `factor` times as many after each `every`.
    #[must_use]
    pub const fn geometric(initial: f64, factor: f64, every: Duration) -> Self {
        Profile::Geometric { initial, factor, every }
    }

    /// 5 %, and half as much again every 15 min: for vendors who ask that traffic grow by no more than that.
    #[must_use]
    pub const fn half_more_every_15_min() -> Self {
        Profile::geometric(0.05, 1.5, Duration::from_secs(15 * 60))
    }

    /// 5 %, and twice as much every 20 min: for stores that split their ranges under load.
    #[must_use]
    pub const fn doubling_every_20_min() -> Self {
        Profile::geometric(0.05, 2.0, Duration::from_secs(20 * 60))
    }

    /// Envoy's slow start with its defaults, a straight line from 10 %, over this window.
    #[must_use]
    pub const fn slow_start(window: Duration) -> Self {
        Profile::SlowStart { window, min_weight: 0.1, aggression: 1.0 }
    }

    pub(crate) fn check(&self, provider: &str) -> Result<(), SettingsError> {
        const LEAST: Duration = Duration::from_millis(1);
        let wrong = |field, why| Err(SettingsError { provider: provider.into(), field, why });
        let is_share = |share: f64| share > 0.0 && share <= 1.0;
        match *self {
            Profile::Geometric { initial, .. } if !is_share(initial) => {
                wrong("ramp.initial", "must be above 0 and at most 1")
            }
            Profile::Geometric { factor, .. } if !(factor > 1.0 && factor.is_finite()) => {
                wrong("ramp.factor", "must be more than 1, or the share would never grow")
            }
            Profile::Geometric { every, .. } if every < LEAST => {
                wrong("ramp.every", "must be at least a millisecond")
            }
            Profile::SlowStart { window, .. } if window < LEAST => {
                wrong("ramp.window", "must be at least a millisecond")
            }
            Profile::SlowStart { min_weight, .. } if !is_share(min_weight) => {
                wrong("ramp.min_weight", "must be above 0 and at most 1")
            }
            Profile::SlowStart { aggression, .. } if !(aggression > 0.0 && aggression.is_finite()) => {
                wrong("ramp.aggression", "must be more than 0")
            }
            _ => Ok(()),
        }
    }

    /// The share after so many nanoseconds.
    pub(super) fn share(&self, after: u64) -> f64 {
        let share = match *self {
            Profile::Geometric { initial, factor, every } => {
                initial * factor.powf(after as f64 / nanos(every) as f64)
            }
            Profile::SlowStart { window, min_weight, aggression } => {
                let time = after.max(SECOND) as f64 / nanos(window) as f64;
                time.powf(aggression.recip()).max(min_weight)
            }
        };
        share.min(1.0)
    }

    /// After how many nanoseconds the share is this: the inverse of [`share`](Self::share), rounded up.
    pub(super) fn reaches(&self, share: f64) -> u64 {
        // A cast from a float saturates.
        match *self {
            Profile::Geometric { initial, .. } if share <= initial => 0,
            Profile::Geometric { initial, factor, every } => {
                ((share / initial).ln() / factor.ln() * nanos(every) as f64).ceil() as u64
            }
            Profile::SlowStart { .. } if share <= self.share(0) => 0,
            Profile::SlowStart { window, aggression, .. } => {
                (share.powf(aggression) * nanos(window) as f64).ceil() as u64
            }
        }
    }

    /// The share that it begins with.
    pub(crate) fn share_at_first(&self) -> f64 {
        self.share(0)
    }

    /// The length of a step in nanoseconds: what a step back takes back.
    pub(super) fn step(&self) -> u64 {
        match *self {
            Profile::Geometric { every, .. } => nanos(every),
            Profile::SlowStart { window, .. } => (nanos(window) / 10).max(1),
        }
    }
}

const SECOND: u64 = 1_000_000_000;

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(serde::Deserialize)]
    struct Vectors {
        slow_start: SlowStart,
    }
    #[derive(serde::Deserialize)]
    struct SlowStart {
        window_s: u64,
        min_weight: f64,
        t_s: Vec<u64>,
        aggression: std::collections::BTreeMap<String, Vec<f64>>,
        tolerance: f64,
    }

    #[test]
    fn slow_start_of_the_vectors() {
        let vectors: Vectors =
            serde_json::from_str(include_str!("../../tests/vectors/ramp_and_breaker.json")).unwrap();
        let all = vectors.slow_start;
        let mut compared = 0;
        for (aggression, expected) in &all.aggression {
            let profile = Profile::SlowStart {
                window: Duration::from_secs(all.window_s),
                min_weight: all.min_weight,
                aggression: aggression.parse().unwrap(),
            };
            for (second, share) in all.t_s.iter().zip(expected) {
                let ours = profile.share(second * SECOND);
                assert!((ours - share).abs() <= all.tolerance, "aggression {aggression}, {second} s: {ours}");
                compared += 1;
            }
        }
        assert_eq!(compared, 24);
    }

    #[test]
    fn the_curves_by_their_figures() {
        let after = |profile: Profile, seconds: u64| profile.share(seconds * SECOND);
        let default = [0, 5, 10, 15, 20, 22].map(|second| after(Profile::default(), second));
        assert_eq!(default, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]);
        assert_eq!(Profile::default().reaches(1.0).div_ceil(1_000_000), 21_610);
        let quarter = 15 * 60;
        let half_more = [0, 1, 2].map(|n| after(Profile::half_more_every_15_min(), n * quarter));
        assert_eq!(half_more, [0.05, 0.05 * 1.5, 0.05 * 2.25]);
        assert_eq!(after(Profile::doubling_every_20_min(), 40 * 60), 0.2);
        let line =
            [0, 6, 30, 60, 90].map(|second| after(Profile::slow_start(Duration::from_secs(60)), second));
        assert_eq!(line, [0.1, 0.1, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let every = Duration::from_secs(5);
        let slow = |window, min_weight, aggression| Profile::SlowStart { window, min_weight, aggression };
        for (profile, field) in [
            (Profile::geometric(0.0, 2.0, every), "ramp.initial"),
            (Profile::geometric(1.1, 2.0, every), "ramp.initial"),
            (Profile::geometric(f64::NAN, 2.0, every), "ramp.initial"),
            (Profile::geometric(0.1, 1.0, every), "ramp.factor"),
            (Profile::geometric(0.1, f64::INFINITY, every), "ramp.factor"),
            (Profile::geometric(0.1, f64::NAN, every), "ramp.factor"),
            (Profile::geometric(0.1, 2.0, Duration::ZERO), "ramp.every"),
            (slow(Duration::ZERO, 0.1, 1.0), "ramp.window"),
            (slow(every, -0.1, 1.0), "ramp.min_weight"),
            (slow(every, 0.1, 0.0), "ramp.aggression"),
            (slow(every, 0.1, f64::NAN), "ramp.aggression"),
        ] {
            let error = profile.check("search").unwrap_err();
            assert_eq!((error.field, &*error.provider), (field, "search"), "{profile:?}");
        }
        for profile in [
            Profile::default(),
            Profile::half_more_every_15_min(),
            Profile::doubling_every_20_min(),
            Profile::slow_start(every),
            Profile::geometric(1.0, 2.0, every),
        ] {
            assert_eq!(profile.check("search"), Ok(()), "{profile:?}");
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn profiles_load_from_configuration() {
        let text = r#"{"curve":"geometric","initial":0.1,"factor":3.0,"every":"1m"}"#;
        let profile: Profile = serde_json::from_str(text).unwrap();
        assert_eq!(profile, Profile::geometric(0.1, 3.0, Duration::from_secs(60)));
        for profile in [Profile::default(), Profile::slow_start(Duration::from_secs(9))] {
            let there_and_back = serde_json::to_string(&profile).unwrap();
            assert_eq!(serde_json::from_str::<Profile>(&there_and_back).unwrap(), profile);
        }
        let unknown = r#"{"curve":"geometric","initial":0.1,"factor":3.0,"every":"1s","x":1}"#;
        assert!(serde_json::from_str::<Profile>(unknown).is_err());
    }

    /// Any curve that passes the check.
    pub(crate) fn profiles() -> impl Strategy<Value = Profile> {
        let millis = || (1u64..10_000_000).prop_map(Duration::from_millis);
        prop_oneof![
            (0.0001f64..=1.0, 1.0001f64..100.0, millis())
                .prop_map(|(initial, factor, every)| Profile::geometric(initial, factor, every)),
            (0.0001f64..=1.0, 0.05f64..20.0, millis()).prop_map(|(min_weight, aggression, window)| {
                Profile::SlowStart { window, min_weight, aggression }
            }),
        ]
    }

    proptest! {
        #[test]
        fn shares_grow_from_something_to_one(profile in profiles(), a: u64, b: u64) {
            let (early, late) = (a.min(b), a.max(b));
            let shares = [profile.share(0), profile.share(early), profile.share(late)];
            prop_assert!(0.0 < shares[0] && shares[0] <= shares[1] && shares[1] <= shares[2] && shares[2] <= 1.0);
            prop_assert!(profile.share(profile.reaches(1.0)) > 1.0 - 1e-9);
        }

        #[test]
        fn a_share_is_reached_when_it_is_said_to_be(profile in profiles(), share in 0.0f64..1.0) {
            let at = profile.reaches(share);
            prop_assert!(profile.share(at) >= share * (1.0 - 1e-9));
            // A tick earlier it is not, but for what two ticks of a steep curve differ by.
            if at > SECOND + 1 {
                prop_assert!(profile.share(at - 2) <= share * (1.0 + 1e-6), "{} {}", profile.share(at - 2), share);
            }
        }
    }
}
