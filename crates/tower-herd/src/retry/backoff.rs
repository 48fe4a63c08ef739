//! How long to wait before the next attempt: pure functions of numbers, no clock and no timer.
//!
//! Clients that fail together and wait the same time come back together. What spreads them is a
//! random part that is as wide as the wait itself; what keeps them from hammering is an upper bound
//! that doubles. Every kind here is a uniform draw from a range, and every range stays wide at the
//! cap: a jitter that is cut off by a `min` turns into a constant there, and the herd is back
//! (STYLE: "jitter survives the cap").
//!
//! With `b(n) = min(cap, base * 2^n)`, and `n` counted from 0:
//!
//! | kind | range | source |
//! |---|---|---|
//! | [`Backoff::Full`] | `[0, b(n)]` | AWS Architecture Blog, *Exponential Backoff And Jitter* (2015) |
//! | [`Backoff::Equal`] | `[b(n)/2, b(n)]` | same |
//! | [`Backoff::Decorrelated`] | `[base, min(cap, 3 * previous wait)]` | same; there the draw is cut at the cap, here its upper end is |
//! | [`Backoff::PlusMinus`] | `[b(n) * (1 - s), b(n) * (1 + s)]` | the usual fix for cron-like fleets; may pass the cap by `s` |
//!
//! A server's own wait is a floor: the range is then `[hint, hint + max(hint/2, b(n))]`
//! ([`after_pushback`]). A thousand separate processes that are told "Retry-After: 30" in one second
//! so come back over 15 s, and none before its 30 s are over. After a pushback the backoff starts
//! again from `n = 0` (gRPC proposal A6).

use crate::random::Random;
use std::time::Duration;

/// The shape of the wait. See the [module](self).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Backoff {
    /// Anywhere between nothing and the bound: the fewest calls in all, and the default.
    #[default]
    Full,
    /// Half of the bound for certain, the other half at random: never a very short wait.
    Equal,
    /// Grows from the wait drawn before, not from the count of attempts.
    Decorrelated,
    /// The bound itself, give or take this fraction of it (0.3: plus or minus 30 percent). Spreads
    /// calls inside a second, and hardly more: prefer it only where waits must be predictable.
    PlusMinus(f64),
}

/// The waits that a draw may give: from `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The shortest wait.
    pub low: Duration,
    /// The longest wait.
    pub high: Duration,
}

impl Range {
    /// Draws from the part of the range that ends within `left`; none if not even `low` fits. Only
    /// the jitter gives way to a deadline, never the floor.
    pub fn draw(self, left: Duration, random: &mut Random) -> Option<Duration> {
        let spread = self.high.min(left).checked_sub(self.low)?;
        Some(self.low.saturating_add(random.up_to(spread)))
    }
}

/// `min(cap, base * 2^n)`, saturating: the bound of attempt `n`, counted from 0.
///
/// ```
/// use std::time::Duration;
/// use tower_herd::retry::backoff::bound;
///
/// let (base, cap) = (Duration::from_millis(500), Duration::from_secs(30));
/// assert_eq!(bound(base, cap, 0), Duration::from_millis(500));
/// assert_eq!(bound(base, cap, 3), Duration::from_secs(4));
/// assert_eq!(bound(base, cap, u32::MAX), cap);
/// ```
#[must_use]
pub fn bound(base: Duration, cap: Duration, n: u32) -> Duration {
    let factor = 1_u32.checked_shl(n).unwrap_or(u32::MAX);
    base.saturating_mul(factor).min(cap)
}

/// The range after a reply that names its own wait: never before `hint`, and spread over half of it
/// or over the backoff's bound, whichever is longer.
#[must_use]
pub fn after_pushback(hint: Duration, bound: Duration) -> Range {
    Range { low: hint, high: hint.saturating_add(bound.max(hint / 2)) }
}

impl Backoff {
    /// The waits that are possible before attempt `n` is repeated; `previous` is the wait before
    /// (only [`Backoff::Decorrelated`] looks at it; at first it is `base`).
    #[must_use]
    pub fn range(self, base: Duration, cap: Duration, n: u32, previous: Duration) -> Range {
        let bound = bound(base, cap, n);
        match self {
            Backoff::Full => Range { low: Duration::ZERO, high: bound },
            Backoff::Equal => Range { low: bound / 2, high: bound },
            Backoff::Decorrelated => {
                let high = previous.max(base).saturating_mul(3).min(cap);
                Range { low: base.min(high), high }
            }
            Backoff::PlusMinus(spread) => {
                let spread = scale(bound, clean(spread));
                Range { low: bound.saturating_sub(spread), high: bound.saturating_add(spread) }
            }
        }
    }
}

/// A fraction between 0 and 1, whatever was given.
fn clean(spread: f64) -> f64 {
    if spread.is_nan() { 0.0 } else { spread.clamp(0.0, 1.0) }
}

/// `duration * factor` for a factor up to 1, without the panic of `mul_f64` at the far end.
fn scale(duration: Duration, factor: f64) -> Duration {
    // Rounding may pass the whole by a little.
    Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(duration).min(duration)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Seeds;
    use proptest::prelude::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn vectors() -> serde_json::Value {
        serde_json::from_str(include_str!("../../tests/vectors/backoff.json")).unwrap()
    }

    #[test]
    fn full_jitter_bounds_of_the_published_formula() {
        for case in vectors()["full_jitter_upper_bounds"].as_array().unwrap() {
            let (base, cap) = (MS(case["base_ms"].as_u64().unwrap()), MS(case["cap_ms"].as_u64().unwrap()));
            for (n, expected) in (0..).zip(case["bounds_ms"].as_array().unwrap()) {
                let range = Backoff::Full.range(base, cap, n, base);
                assert_eq!(
                    range,
                    Range { low: Duration::ZERO, high: MS(expected.as_u64().unwrap()) },
                    "n {n}"
                );
            }
        }
    }

    #[test]
    fn plus_minus_of_the_vectors() {
        for case in vectors()["plus_minus"]["cases"].as_array().unwrap() {
            let base = MS(case["base_ms"].as_u64().unwrap());
            let kind = Backoff::PlusMinus(case["spread"].as_f64().unwrap());
            let range = kind.range(base, MS(60_000), 0, base);
            let expected = Range {
                low: MS(case["min_ms"].as_u64().unwrap()),
                high: MS(case["max_ms"].as_u64().unwrap()),
            };
            let off = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_micros(1);
            assert!(off(range.low, expected.low) && off(range.high, expected.high), "{range:?}");
        }
    }

    #[test]
    fn the_kinds_differ() {
        let range = |kind: Backoff| kind.range(MS(100), MS(10_000), 3, MS(500));
        assert_eq!(range(Backoff::Full), Range { low: MS(0), high: MS(800) });
        assert_eq!(range(Backoff::Equal), Range { low: MS(400), high: MS(800) });
        assert_eq!(range(Backoff::Decorrelated), Range { low: MS(100), high: MS(1500) });
        assert_eq!(range(Backoff::PlusMinus(0.5)), Range { low: MS(400), high: MS(1200) });
    }

    #[test]
    fn the_floor_is_never_shortened() {
        let range = after_pushback(MS(30_000), MS(500));
        assert_eq!(range, Range { low: MS(30_000), high: MS(45_000) });
        let mut random = Seeds::from_seed(1).session();
        assert_eq!(range.draw(MS(29_999), &mut random), None);
        assert_eq!(range.draw(MS(30_000), &mut random), Some(MS(30_000)));
        assert_eq!(after_pushback(Duration::ZERO, MS(500)).high, MS(500), "a hint of zero still spreads");
    }

    fn kinds() -> impl Strategy<Value = Backoff> {
        prop_oneof![
            Just(Backoff::Full),
            Just(Backoff::Equal),
            Just(Backoff::Decorrelated),
            any::<f64>().prop_map(Backoff::PlusMinus)
        ]
    }

    proptest! {
        #[test]
        fn nothing_overflows_and_jitter_survives_the_cap(
            kind in kinds(), base in any::<u64>(), cap in any::<u64>(), n in any::<u32>(), previous in any::<u64>(),
        ) {
            let (base, cap) = (Duration::from_nanos(base), Duration::from_nanos(cap));
            let range = kind.range(base, cap, n, Duration::from_nanos(previous));
            prop_assert!(range.low <= range.high);
            prop_assert!(range.high <= cap * 2);
            let long = after_pushback(Duration::MAX, bound(Duration::MAX, Duration::MAX, n));
            prop_assert_eq!(long.low, Duration::MAX);
            // At the cap, with room above the base, what is drawn still differs.
            if cap > MS(10) && base < cap / 2 && !matches!(kind, Backoff::PlusMinus(s) if clean(s) < 0.01) {
                let at_cap = kind.range(base.max(Duration::from_nanos(1)), cap, 64, cap);
                prop_assert!(at_cap.high.saturating_sub(at_cap.low) >= cap / 100, "{:?}", at_cap);
            }
        }

        #[test]
        fn a_draw_stays_in_its_range(low in 0..1u64 << 40, width in 0..1u64 << 40, left in 0..1u64 << 41, seed: u64) {
            let range = Range { low: Duration::from_nanos(low), high: Duration::from_nanos(low + width) };
            let left = Duration::from_nanos(left);
            match range.draw(left, &mut Seeds::from_seed(seed).session()) {
                None => prop_assert!(range.low > left),
                Some(wait) => prop_assert!(range.low <= wait && wait <= range.high.min(left)),
            }
        }
    }
}
