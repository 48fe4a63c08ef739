use std::{error::Error, fmt, iter::Sum, str::FromStr};

/// What may be spent, or was: millionths of a unit of your choice (a dollar, a token, a credit), never
/// negative.
///
/// Whole numbers only: five times 0.15 is 0.75, to the last digit, which no float promises. Sums saturate.
/// The unit is the same for all that share an [`Allowance`](super::Allowance); nothing converts.
///
/// ```
/// use tower_herd::spend::Amount;
///
/// let cents: Amount = "0.15".parse()?;
/// assert_eq!(cents, Amount::micros(150_000));
/// assert_eq!(cents + cents, "0.3".parse()?);
/// assert_eq!(Amount::units(2_000).to_string(), "2000");
/// # Ok::<(), tower_herd::spend::AmountError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Amount(u64);

const MICROS: u64 = 1_000_000;

impl Amount {
    /// Nothing.
    pub const ZERO: Amount = Amount(0);
    /// The most there is: 9.2 × 10^12 units.
    pub const MAX: Amount = Amount(i64::MAX as u64);

    /// So many millionths of a unit.
    #[must_use]
    pub const fn micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Amount(micros) }
    }

    /// So many units.
    #[must_use]
    pub const fn units(units: u64) -> Self {
        Self::micros(units.saturating_mul(MICROS))
    }

    /// In millionths of a unit.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// What is left of it without `other`; not less than nothing.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Amount(self.0.saturating_sub(other.0))
    }

    /// So many times, divided by so many; rounded up, so that a sum of parts is never less than its whole.
    #[must_use]
    pub const fn mul_div_ceil(self, times: u64, parts: u64) -> Self {
        let parts = if parts == 0 { 1 } else { parts as u128 };
        let micros = (self.0 as u128 * times as u128).div_ceil(parts);
        if micros > Self::MAX.0 as u128 { Self::MAX } else { Amount(micros as u64) }
    }

    pub(super) const fn signed(self) -> i64 {
        // At most `i64::MAX` by construction.
        self.0.cast_signed()
    }
}

impl std::ops::Add for Amount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::micros(self.0.saturating_add(other.0))
    }
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Amount::ZERO, |sum, amount| sum + amount)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (units, micros) = (self.0 / MICROS, self.0 % MICROS);
        if micros == 0 {
            return write!(f, "{units}");
        }
        let digits = format!("{micros:06}");
        write!(f, "{units}.{}", digits.trim_end_matches('0'))
    }
}

/// A text that is no amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AmountError {
    /// Not a decimal number without a sign.
    NotANumber,
    /// It has more than six decimals.
    TooFine,
    /// It is more than [`Amount::MAX`].
    TooLarge,
}

impl fmt::Display for AmountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AmountError::NotANumber => "an amount is a decimal number without a sign, such as 0.15",
            AmountError::TooFine => "an amount has at most six decimals",
            AmountError::TooLarge => "the amount is too large",
        })
    }
}

impl Error for AmountError {}

impl FromStr for Amount {
    type Err = AmountError;

    /// A decimal number, exactly: `2`, `0.15`, `.000001`.
    fn from_str(text: &str) -> Result<Self, AmountError> {
        let (units, decimals) = text.split_once('.').unwrap_or((text, ""));
        let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_digits(units) || !is_digits(decimals) || units.is_empty() && decimals.is_empty() {
            return Err(AmountError::NotANumber);
        }
        let decimals = decimals.trim_end_matches('0');
        if decimals.len() > 6 {
            return Err(AmountError::TooFine);
        }
        let number = |digits: &str| match digits {
            "" => Ok(0),
            digits => digits.parse::<u64>().map_err(|_| AmountError::TooLarge),
        };
        let micros = number(&format!("{decimals:0<6}"))?;
        let micros = number(units)?.checked_mul(MICROS).and_then(|units| units.checked_add(micros));
        match micros {
            Some(micros) if micros <= Self::MAX.0 => Ok(Amount(micros)),
            _ => Err(AmountError::TooLarge),
        }
    }
}

#[cfg(feature = "serde")]
mod serde_impl {
    use super::Amount;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
    use std::fmt;

    /// As text, since that is exact in every format.
    impl Serialize for Amount {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_str(self)
        }
    }

    /// From text (`"0.15"`) or a number. A number with decimals is read as the shortest decimal that it
    /// stands for.
    impl<'de> Deserialize<'de> for Amount {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_any(Visitor)
        }
    }

    struct Visitor;

    impl de::Visitor<'_> for Visitor {
        type Value = Amount;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an amount, such as 0.15")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Amount, E> {
            text.parse().map_err(E::custom)
        }
        fn visit_u64<E: de::Error>(self, units: u64) -> Result<Amount, E> {
            self.visit_str(&units.to_string())
        }
        fn visit_i64<E: de::Error>(self, units: i64) -> Result<Amount, E> {
            self.visit_str(&units.to_string())
        }
        fn visit_f64<E: de::Error>(self, units: f64) -> Result<Amount, E> {
            self.visit_str(&units.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts_are_read_exactly() {
        for (text, micros) in [
            ("0", Ok(0)),
            ("2", Ok(2_000_000)),
            ("0.15", Ok(150_000)),
            (".000001", Ok(1)),
            ("1.", Ok(1_000_000)),
            ("0.1500000000", Ok(150_000)),
            ("9223372036854.775807", Ok(i64::MAX as u64)),
            ("9223372036854.775808", Err(AmountError::TooLarge)),
            ("99999999999999999999999", Err(AmountError::TooLarge)),
            ("0.0000001", Err(AmountError::TooFine)),
            ("", Err(AmountError::NotANumber)),
            (".", Err(AmountError::NotANumber)),
            ("-1", Err(AmountError::NotANumber)),
            ("+1", Err(AmountError::NotANumber)),
            ("1e3", Err(AmountError::NotANumber)),
            ("NaN", Err(AmountError::NotANumber)),
            ("1.2.3", Err(AmountError::NotANumber)),
            ("0.-1", Err(AmountError::NotANumber)),
        ] {
            assert_eq!(text.parse().map(Amount::as_micros), micros, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_again(micros in 0..=Amount::MAX.as_micros()) {
            let amount = Amount::micros(micros);
            prop_assert_eq!(amount.to_string().parse(), Ok(amount));
        }

        #[test]
        fn any_text_is_read_or_refused(text: String) {
            text.parse::<Amount>().ok();
        }

        #[test]
        fn parts_cover_the_whole(micros: u64, times: u64, parts: u64) {
            let amount = Amount::micros(micros);
            let part = amount.mul_div_ceil(times, parts);
            let exact = u128::from(amount.as_micros()) * u128::from(times);
            let covered = u128::from(part.as_micros()) * u128::from(parts.max(1));
            prop_assert!(part == Amount::MAX || covered >= exact);
            prop_assert!(part == Amount::ZERO || covered - u128::from(parts.max(1)) < exact);
        }
    }

    #[test]
    fn sums_saturate() {
        assert_eq!(Amount::MAX + Amount::MAX, Amount::MAX);
        assert_eq!(Amount::micros(u64::MAX), Amount::MAX);
        assert_eq!(Amount::units(u64::MAX), Amount::MAX);
        assert_eq!(
            [Amount::units(1), Amount::micros(5)].into_iter().sum::<Amount>(),
            Amount::micros(1_000_005)
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn from_files() {
        let read = |json: &str| serde_json::from_str::<Amount>(json).map(Amount::as_micros).ok();
        for (json, micros) in [
            ("\"0.15\"", Some(150_000)),
            ("0.15", Some(150_000)),
            ("3", Some(3_000_000)),
            ("0.000001", Some(1)),
            ("-3", None),
            ("-0.5", None),
            ("1e30", None),
            ("0.0000001", None),
            ("\"a lot\"", None),
            ("null", None),
        ] {
            assert_eq!(read(json), micros, "{json}");
        }
        let text = serde_json::to_string(&Amount::micros(150_000)).unwrap();
        assert_eq!(text, "\"0.15\"");
    }
}
