use super::Amount;
use crate::usage::{Usage, Weigh};

/// What a model costs, for a million tokens each.
///
/// A call is charged the sum over its tokens, each part rounded up to a millionth of the unit.
///
/// ```
/// use tower_herd::{spend::{Amount, Prices}, usage::Usage};
///
/// let prices = Prices::new("2.50".parse()?, "10".parse()?).cached("1.25".parse()?);
/// let usage = Usage { input: 1_000_000, cached: 400_000, output: 1_000, ..Usage::default() };
/// assert_eq!(prices.cost(&usage), "2.01".parse()?); // 1.50 + 0.50 + 0.01
/// # Ok::<(), tower_herd::spend::AmountError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct Prices {
    /// Tokens in.
    pub input: Amount,
    /// Tokens out.
    pub output: Amount,
    /// Tokens in that came from the provider's cache. None (the default): as those in.
    #[cfg_attr(feature = "serde", serde(default))]
    pub cached: Option<Amount>,
    /// Tokens in that were written to it. None (the default): as those in.
    #[cfg_attr(feature = "serde", serde(default))]
    pub cache_write: Option<Amount>,
}

const MILLION: u64 = 1_000_000;

impl Prices {
    /// Tokens in, and tokens out.
    #[must_use]
    pub const fn new(input: Amount, output: Amount) -> Self {
        Prices { input, output, cached: None, cache_write: None }
    }

    /// With another price for tokens from the cache.
    #[must_use]
    pub const fn cached(mut self, price: Amount) -> Self {
        self.cached = Some(price);
        self
    }

    /// With another price for tokens that are written to it.
    #[must_use]
    pub const fn cache_write(mut self, price: Amount) -> Self {
        self.cache_write = Some(price);
        self
    }

    /// What such a call costs.
    #[must_use]
    pub fn cost(&self, usage: &Usage) -> Amount {
        // Whatever a reply tells, no token is paid twice, and none is free by a subtraction.
        let cached = usage.cached.min(usage.input);
        let written = usage.cache_write.min(usage.input - cached);
        let plain = usage.input - cached - written;
        let part = |price: Amount, tokens| price.mul_div_ceil(tokens, MILLION);
        part(self.input, plain)
            + part(self.cached.unwrap_or(self.input), cached)
            + part(self.cache_write.unwrap_or(self.input), written)
            + part(self.output, usage.output)
    }

    /// The most that a call with so many tokens in, and at most so many out, can cost: an estimate to
    /// reserve by.
    #[must_use]
    pub fn at_most(&self, input: u64, output: u64) -> Amount {
        let dearest = self.input.max(self.cache_write.unwrap_or(self.input));
        dearest.mul_div_ceil(input, MILLION) + self.output.mul_div_ceil(output, MILLION)
    }
}

impl Weigh for Prices {
    type Unit = Amount;
    fn weigh(&self, usage: &Usage) -> Amount {
        self.cost(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prices() -> Prices {
        Prices::new("3".parse().unwrap(), "15".parse().unwrap())
            .cached("0.3".parse().unwrap())
            .cache_write("3.75".parse().unwrap())
    }

    #[test]
    fn each_part_has_its_price() {
        let usage = |input, cached, cache_write, output| Usage { input, cached, cache_write, output };
        for (usage, micros) in [
            (usage(1_000_000, 0, 0, 0), 3_000_000),
            (usage(1_000_000, 1_000_000, 0, 0), 300_000),
            (usage(1_000_000, 0, 1_000_000, 0), 3_750_000),
            (usage(0, 0, 0, 1_000_000), 15_000_000),
            (usage(1, 1, 0, 0), 1),
            // Nonsense is not paid twice.
            (usage(10, 99, 99, 0), 3),
            (usage(0, 99, 99, 0), 0),
        ] {
            assert_eq!(prices().cost(&usage).as_micros(), micros, "{usage:?}");
        }
        let plain = Prices::new("3".parse().unwrap(), "15".parse().unwrap());
        assert_eq!(
            plain.cost(&usage(10, 5, 5, 0)).as_micros(),
            30,
            "as those in, where nothing else is said"
        );
    }

    proptest! {
        #[test]
        fn no_call_costs_more_than_the_most(input: u32, cached: u32, cache_write: u32, output: u32) {
            let (input, output) = (u64::from(input), u64::from(output));
            let usage = Usage { input, cached: cached.into(), cache_write: cache_write.into(), output };
            // Each part may be rounded up.
            prop_assert!(prices().cost(&usage) <= prices().at_most(input, output) + Amount::micros(2));
        }

        #[test]
        fn nothing_overflows(input: u64, cached: u64, cache_write: u64, output: u64) {
            let usage = Usage { input, cached, cache_write, output };
            prop_assert!(prices().cost(&usage) <= Amount::MAX);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn from_files() {
        let file = r#"{"input": "3", "output": 15, "cached": 0.3, "cache_write": "3.75"}"#;
        let read: Prices = serde_json::from_str(file).unwrap();
        assert_eq!(read, prices());
        let again = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<Prices>(&again).unwrap(), read);
        assert!(serde_json::from_str::<Prices>(r#"{"input": 3, "output": 15, "ouptut": 1}"#).is_err());
        assert!(serde_json::from_str::<Prices>(r#"{"input": 3}"#).is_err());
    }
}
