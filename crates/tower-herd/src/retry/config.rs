use super::backoff::Backoff;
use crate::task::{DEFAULT_ALLOWANCE, DEFAULT_DEADLINE};
use std::{fmt, time::Duration};

/// The settings of a [`JitteredRetryLayer`](super::JitteredRetryLayer) as plain data, for
/// configuration files. Durations are text there (`base = "500ms"`, `cap = "1m 30s"`), and what is left
/// out has its default.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct RetryConfig {
    /// Wire calls that may fail before the layer gives up, the first one included; at least 1. The
    /// task's own allowance counts too: the smaller of both binds. Default 3.
    pub attempts: u32,
    /// Bound of the first wait; it doubles from there. Default 500 ms.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub base: Duration,
    /// The same after a 429 without a hint. Default 1 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub throttled_base: Duration,
    /// Where the bound stops growing. Never shortens a server's own wait. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub cap: Duration,
    /// The shape of the jitter. Default full.
    pub backoff: Backoff,
    /// How often a request is delivered again after a 429, or asked for again while its idempotency key is in
    /// flight, apart from `attempts`. Default 10.
    pub redeliveries: u32,
    /// Requests that may sleep at one time in all services of the layer. Default 10 000.
    pub max_sleepers: usize,
    /// How long a request may take in all where its task names no deadline. Default 60 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub deadline: Duration,
    /// Whether a repetition meets the same idempotency domain as the call before it; false where a
    /// ladder below may send it elsewhere. Default true.
    pub same_domain: bool,
}

impl Default for RetryConfig {
    fn default() -> Self {
        RetryConfig {
            attempts: DEFAULT_ALLOWANCE,
            base: Duration::from_millis(500),
            throttled_base: Duration::from_secs(1),
            cap: Duration::from_secs(30),
            backoff: Backoff::Full,
            redeliveries: 10,
            max_sleepers: 10_000,
            deadline: DEFAULT_DEADLINE,
            same_domain: true,
        }
    }
}

/// Why a [`RetryConfig`] is none.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum InvalidRetryConfig {
    /// `attempts` is 0: nothing could ever be sent.
    NoAttempts,
    /// `base` or `throttled_base` is 0: attempts would follow each other without any wait.
    NoBase,
    /// `cap` is shorter than a base.
    CapBelowBase,
    /// The spread of [`Backoff::PlusMinus`] is not in `(0, 1]`: all clients would wait alike.
    Spread(f64),
}

impl fmt::Display for InvalidRetryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidRetryConfig::NoAttempts => f.write_str("retry: `attempts` must be at least 1"),
            InvalidRetryConfig::NoBase => {
                f.write_str("retry: `base` and `throttled_base` must be longer than 0")
            }
            InvalidRetryConfig::CapBelowBase => f.write_str("retry: `cap` must not be shorter than a base"),
            InvalidRetryConfig::Spread(spread) => {
                write!(f, "retry: a spread of {spread} is not above 0 and at most 1")
            }
        }
    }
}

impl std::error::Error for InvalidRetryConfig {}

impl RetryConfig {
    /// # Errors
    ///
    /// Says which setting cannot be meant.
    pub fn validate(&self) -> Result<(), InvalidRetryConfig> {
        let longest = self.base.max(self.throttled_base);
        match self.backoff {
            _ if self.attempts == 0 => Err(InvalidRetryConfig::NoAttempts),
            _ if self.base.is_zero() || self.throttled_base.is_zero() => Err(InvalidRetryConfig::NoBase),
            _ if self.cap < longest => Err(InvalidRetryConfig::CapBelowBase),
            // Written so that what is not a number fails too.
            Backoff::PlusMinus(spread) if !(spread > 0.0 && spread <= 1.0) => {
                Err(InvalidRetryConfig::Spread(spread))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_meant_is_a_typed_error() {
        let invalid = |change: fn(&mut RetryConfig)| {
            let mut config = RetryConfig::default();
            change(&mut config);
            config.validate().unwrap_err()
        };
        assert_eq!(RetryConfig::default().validate(), Ok(()));
        assert_eq!(invalid(|c| c.attempts = 0), InvalidRetryConfig::NoAttempts);
        assert_eq!(invalid(|c| c.base = Duration::ZERO), InvalidRetryConfig::NoBase);
        assert_eq!(invalid(|c| c.throttled_base = Duration::ZERO), InvalidRetryConfig::NoBase);
        assert_eq!(invalid(|c| c.cap = Duration::from_millis(999)), InvalidRetryConfig::CapBelowBase);
        let spread = invalid(|c| c.backoff = Backoff::PlusMinus(f64::NAN));
        assert!(spread.to_string().contains("NaN"), "{spread}");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn loads_from_a_file() {
        let text = r#"{ "attempts": 5, "base": "100ms", "backoff": { "plus-minus": 0.3 } }"#;
        let config: RetryConfig = serde_json::from_str(text).unwrap();
        let expected = RetryConfig {
            attempts: 5,
            base: Duration::from_millis(100),
            backoff: Backoff::PlusMinus(0.3),
            ..RetryConfig::default()
        };
        assert_eq!(config, expected);
        let back = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<RetryConfig>(&back).unwrap(), config);
        assert!(
            serde_json::from_str::<RetryConfig>(r#"{ "atempts": 5 }"#).is_err(),
            "a typing error is an error"
        );
    }
}
