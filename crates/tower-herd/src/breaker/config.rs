use crate::SettingsError;
use std::time::Duration;

/// When a breaker opens, and how it is probed. Part of what is known about a provider: all layers for one
/// provider (or one scope of it) share one breaker, with one set of settings.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct BreakerSettings {
    /// How many calls it looks at: the last so many, by when they were sent. Default 20; at most 1000.
    pub window: u32,
    /// It opens when this share of a full window has failed: at `ceil(ratio * window)` failures, which is
    /// also the least number of calls that can open it. Default 0.9.
    pub ratio: f64,
    /// How long it is open if no probe succeeds; up to a quarter is added, so that processes which tripped
    /// together do not come back together. After it there are still only probes. Default 10 min.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub open: Duration,
    /// The first probe goes a uniform time between this and twice this after the trip; each one that fails
    /// doubles the range, up to `last_probe`. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub first_probe: Duration,
    /// The longest time between two probes; at least twice `first_probe`. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub last_probe: Duration,
    /// A probe that takes longer is given up, and another may go. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub probe_timeout: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        BreakerSettings {
            window: 20,
            ratio: 0.9,
            open: Duration::from_secs(600),
            first_probe: Duration::from_secs(5),
            last_probe: Duration::from_secs(30),
            probe_timeout: Duration::from_secs(30),
        }
    }
}

impl BreakerSettings {
    /// 18 failures among the last 20 calls.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// 5 failures among the last 5 calls: for providers that fail whole or not at all, and are called
    /// rarely. One that fails a fifth of its calls opens it every half a minute at 100 calls a second.
    #[must_use]
    pub fn strict() -> Self {
        Self::default().window(5).ratio(1.0)
    }
    /// How many calls it looks at.
    #[must_use]
    pub fn window(mut self, calls: u32) -> Self {
        self.window = calls;
        self
    }
    /// The share of failures at which it opens.
    #[must_use]
    pub fn ratio(mut self, ratio: f64) -> Self {
        self.ratio = ratio;
        self
    }
    /// How long it is open if no probe succeeds.
    #[must_use]
    pub fn open(mut self, time: Duration) -> Self {
        self.open = time;
        self
    }
    /// The least time to the first probe, and the longest between two.
    #[must_use]
    pub fn probes(mut self, first: Duration, last: Duration) -> Self {
        (self.first_probe, self.last_probe) = (first, last);
        self
    }
    /// A probe that takes longer is given up.
    #[must_use]
    pub fn probe_timeout(mut self, time: Duration) -> Self {
        self.probe_timeout = time;
        self
    }

    /// Failures in the window that open it.
    pub(crate) fn trip(&self) -> usize {
        // Less a hair: 0.07 x 100 is 7.000000000000001.
        let failures = (self.ratio * f64::from(self.window) - 1e-9).ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "in 1..=1000, as checked"
        )]
        let failures = failures as usize;
        failures.max(1)
    }

    pub(crate) fn check(&self, provider: &str) -> Result<(), SettingsError> {
        const LONGEST: Duration = Duration::from_secs(24 * 3600);
        let wrong = |field, why| Err(SettingsError { provider: provider.into(), field, why });
        if !(1..=1000).contains(&self.window) {
            return wrong("window", "must be 1 to 1000 calls");
        }
        if !(self.ratio > 0.0 && self.ratio <= 1.0) {
            return wrong("ratio", "must be above 0, and 1 at most");
        }
        if self.open.is_zero() || self.open > LONGEST {
            return wrong("open", "must be above zero, and 24 h at most");
        }
        if self.first_probe.is_zero() {
            return wrong("first_probe", "must be above zero, or a broken provider would be called at once");
        }
        if self.last_probe < self.first_probe.saturating_mul(2) {
            return wrong("last_probe", "must be at least twice the first, to leave room for jitter");
        }
        if self.last_probe > LONGEST {
            return wrong("last_probe", "must be 24 h at most");
        }
        if self.probe_timeout.is_zero() {
            return wrong("probe_timeout", "must be above zero, or probes would pile up");
        }
        Ok(())
    }
}
