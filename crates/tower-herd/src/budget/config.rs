use std::time::Duration;

/// What adaptive throttling goes by, as plain data, for configuration files. Durations are
/// text there (`window = "30s"`), and what is left out has its default.
///
/// It belongs to the provider (or the scope) that is throttled, and all layers in front of it share it:
/// see [`BudgetLayer::configured`](super::BudgetLayer::configured).
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct BudgetSettings {
    /// How many requests may be attempted for each one that is accepted before a share of them is
    /// refused. At least 1; 2, the default, refuses nothing while half of them are accepted, and sends
    /// twice what a drowning provider accepts. Lower is stricter.
    pub k: f64,
    /// How far back requests and accepts are counted, to a thirtieth. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub window: Duration,
    /// The largest share that is refused, above 0 and up to 1. Default 0.9: one call in ten is always
    /// sent, and finds out whether the provider is back.
    pub cap: f64,
    /// With fewer requests in the window than this, nothing is refused: of one call that failed the formula
    /// would refuse a half, and a client that calls every few seconds would wait for its luck. Default 5.
    pub least: u32,
}

impl Default for BudgetSettings {
    fn default() -> Self {
        BudgetSettings { k: 2.0, window: Duration::from_secs(30), cap: 0.9, least: 5 }
    }
}

impl BudgetSettings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// How many requests for each one that is accepted; at least 1.
    #[must_use]
    pub fn k(mut self, k: f64) -> Self {
        self.k = k;
        self
    }
    /// How far back is counted.
    #[must_use]
    pub fn window(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }
    /// The largest share that is refused.
    #[must_use]
    pub fn cap(mut self, cap: f64) -> Self {
        self.cap = cap;
        self
    }

    /// With fewer requests in the window nothing is refused.
    #[must_use]
    pub fn least(mut self, requests: u32) -> Self {
        self.least = requests;
        self
    }

    /// The field that cannot be meant, and why. Written so that what is not a number fails too.
    pub(crate) fn fault(&self) -> Option<(&'static str, &'static str)> {
        const LONGEST: Duration = Duration::from_secs(3600);
        if !(self.k >= 1.0 && self.k.is_finite()) {
            return Some(("k", "must be at least 1: below that a healthy provider would be throttled"));
        }
        if self.window < Duration::from_secs(1) || self.window > LONGEST {
            return Some(("window", "must be from a second to an hour"));
        }
        if !(self.cap > 0.0 && self.cap <= 1.0) {
            return Some((
                "cap",
                "must be above 0 and at most 1; to let all pass, turn the layer's switch off",
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_meant_is_named() {
        let good = BudgetSettings::new();
        assert_eq!(good.fault(), None);
        let field = |settings: BudgetSettings| settings.fault().map(|(field, _)| field);
        for k in [0.99, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(field(good.k(k)), Some("k"), "{k}");
        }
        for window in [Duration::ZERO, Duration::from_millis(999), Duration::MAX] {
            assert_eq!(field(good.window(window)), Some("window"), "{window:?}");
        }
        for cap in [0.0, 1.1, -1.0, f64::NAN] {
            assert_eq!(field(good.cap(cap)), Some("cap"), "{cap}");
        }
        assert_eq!(field(good.k(1.0).window(Duration::from_secs(1)).cap(1.0)), None);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn loads_from_a_file() {
        let settings: BudgetSettings = serde_json::from_str(r#"{ "k": 1.5, "window": "60s" }"#).unwrap();
        assert_eq!(settings, BudgetSettings::new().k(1.5).window(Duration::from_secs(60)));
        let back = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<BudgetSettings>(&back).unwrap(), settings);
        assert!(serde_json::from_str::<BudgetSettings>(r#"{ "kk": 1.5 }"#).is_err());
    }
}
