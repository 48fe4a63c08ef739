use crate::SettingsError;
use crate::retry_token::Schedule;
use std::time::Duration;

/// When the breaker of a dependency opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct JobBreakerSettings {
    /// It opens after so many failures in a row, of all processes. Default 5.
    pub failures: u32,
    /// How long it stays open; after it, one probe. Default 10 min.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub open: Duration,
    /// The share of it that is added or taken off at random. Default 0.1.
    pub jitter: f64,
    /// A probe whose process has died, or whose caller has dropped it, is given up after this, and another may go. (One
    /// that runs prolongs it.) Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub probe_timeout: Duration,
}

impl Default for JobBreakerSettings {
    fn default() -> Self {
        JobBreakerSettings {
            failures: 5,
            open: Duration::from_secs(600),
            jitter: 0.1,
            probe_timeout: Duration::from_secs(30),
        }
    }
}

impl JobBreakerSettings {
    /// 5 failures in a row, 10 min.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// It opens after so many failures in a row.
    #[must_use]
    pub fn failures(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }
    /// How long it stays open.
    #[must_use]
    pub fn open(mut self, time: Duration) -> Self {
        self.open = time;
        self
    }
    /// The share of it that is added or taken off.
    #[must_use]
    pub fn jitter(mut self, share: f64) -> Self {
        self.jitter = share;
        self
    }
    /// A probe that is lost is given up after this.
    #[must_use]
    pub fn probe_timeout(mut self, time: Duration) -> Self {
        self.probe_timeout = time;
        self
    }

    pub(super) fn check(&self, name: &str) -> Result<(), SettingsError> {
        let wrong = |field, why| Err(SettingsError { provider: name.into(), field, why });
        if self.failures == 0 {
            return wrong("failures", "must be at least 1, or it would never close");
        }
        if self.open < Schedule::LEAST_HOLD || self.open > Schedule::MOST {
            return wrong("open", "must be 100 ms to 7 days");
        }
        if !(0.0..1.0).contains(&self.jitter) {
            return wrong("jitter", "must be 0 to below 1");
        }
        if self.probe_timeout < Schedule::LEAST_HOLD || self.probe_timeout > Schedule::MOST {
            return wrong("probe_timeout", "must be 100 ms to 7 days");
        }
        Ok(())
    }

    /// The open time of one opening, for a `u` of `[0, 1)`.
    pub(super) fn opening(&self, u: f64) -> Duration {
        let time = self.open.as_secs_f64() * (1.0 + self.jitter * (2.0 * u - 1.0));
        Duration::try_from_secs_f64(time).unwrap_or(self.open)
    }

    /// The wait of the claim that counts a failure: as short as there is.
    pub(super) fn counting() -> Schedule {
        flat(Schedule::LEAST)
    }

    /// The wait of the claim of a probe.
    pub(super) fn probing(&self) -> Schedule {
        flat(self.probe_timeout)
    }
}

fn flat(wait: Duration) -> Schedule {
    let flat = Schedule::new().growth(wait, 1.0, wait).and_then(|schedule| schedule.jitter(0.0));
    flat.expect("in the bounds, as checked")
}
