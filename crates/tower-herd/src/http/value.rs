//! Numbers, durations and instants as headers write them: pure, exact, saturating, never a panic.
//!
//! Everything rounds up, to the nanosecond: a wait that is too short is the one mistake that these
//! parsers may not make.

use std::time::Duration;

const SECOND: u64 = 1_000_000_000;

/// An instant or a span, as a header tells it. [`wait`](When::wait) makes a wait of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// A plain number, taken for seconds: nothing but the name of its header tells the unit.
    Number(Duration),
    /// A span with its unit (`6m0s`).
    Span(Duration),
    /// A number too large for a span: time since the Unix epoch.
    Epoch(Duration),
    /// A calendar date: time since the Unix epoch.
    Date(Duration),
}

impl When {
    /// The time from `now` (since the Unix epoch; asked for only where it matters) until then; zero
    /// for an instant in the past.
    #[must_use]
    pub fn wait(self, now: impl FnOnce() -> Duration) -> Duration {
        match self {
            When::Number(span) | When::Span(span) => span,
            When::Epoch(at) | When::Date(at) => at.saturating_sub(now()),
        }
    }

    /// A number (seconds, or an epoch in s, ms or us by its size), a Go duration, an HTTP date or an
    /// RFC 3339 date, whichever `text` is. Negative numbers, `NaN` and all else are nothing.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = text.trim_ascii();
        match Decimal::split(text) {
            Some((number, b"")) => Some(Self::of_number(number)),
            Some((number, b"s")) => Some(When::Span(number.times(SECOND))),
            Some((number, b"ms")) => Some(When::Span(number.times(SECOND / 1000))),
            Some(_) => go_duration(text).map(When::Span).or_else(|| rfc3339(text).map(When::Date)),
            None => http_date(text).map(When::Date),
        }
    }

    /// A number over 10^14 is an epoch in microseconds, over 10^12 in milliseconds, over 10^9 in
    /// seconds; a smaller one a span in seconds.
    #[must_use]
    pub fn number(text: &[u8]) -> Option<Self> {
        Decimal::parse(text.trim_ascii()).map(Self::of_number)
    }

    fn of_number(number: Decimal) -> Self {
        if number.exceeds(100_000_000_000_000) {
            When::Epoch(number.times(SECOND / 1_000_000))
        } else if number.exceeds(1_000_000_000_000) {
            When::Epoch(number.times(SECOND / 1000))
        } else if number.exceeds(1_000_000_000) {
            When::Epoch(number.times(SECOND))
        } else {
            When::Number(number.times(SECOND))
        }
    }
}

/// A decimal number that is not negative.
#[derive(Clone, Copy)]
struct Decimal {
    whole: u64,
    /// In units of 10^-9, rounded up.
    fraction: u64,
}

impl Decimal {
    #[inline]
    fn parse(text: &[u8]) -> Option<Self> {
        let (number, rest) = Self::split(text)?;
        rest.is_empty().then_some(number)
    }

    /// The number that `text` starts with, and what follows it.
    #[inline]
    fn split(text: &[u8]) -> Option<(Self, &[u8])> {
        let digit = |byte: &u8| Some(byte.wrapping_sub(b'0')).filter(|digit| *digit < 10).map(u64::from);
        let mut whole = 0_u64;
        let mut at = 0;
        while let Some(digit) = text.get(at).and_then(digit) {
            whole = whole.saturating_mul(10).saturating_add(digit);
            at += 1;
        }
        let mut digits = at;
        let mut fraction = 0;
        if text.get(at) == Some(&b'.') {
            at += 1;
            let mut place = SECOND / 10;
            let mut sticky = 0;
            while let Some(digit) = text.get(at).and_then(digit) {
                fraction += place * digit;
                sticky |= u64::from(place == 0 && digit != 0);
                place /= 10;
                at += 1;
                digits += 1;
            }
            fraction += sticky;
        }
        (digits > 0).then(|| (Decimal { whole, fraction }, &text[at..]))
    }

    fn exceeds(self, bound: u64) -> bool {
        self.whole > bound || (self.whole == bound && self.fraction > 0)
    }

    /// This many units of so many nanoseconds.
    #[inline]
    fn times(self, unit: u64) -> Duration {
        let exact = self
            .fraction
            .checked_mul(unit)
            .and_then(|fraction| self.whole.checked_mul(unit)?.checked_add(fraction.div_ceil(SECOND)));
        match exact {
            Some(nanos) => Duration::from_nanos(nanos),
            None => self.times_wide(unit),
        }
    }

    #[cold]
    fn times_wide(self, unit: u64) -> Duration {
        const WIDE: u128 = SECOND as u128;
        let fraction = (u128::from(self.fraction) * u128::from(unit)).div_ceil(WIDE);
        let nanos = u128::from(self.whole) * u128::from(unit) + fraction;
        match u64::try_from(nanos / WIDE) {
            Ok(seconds) => Duration::new(seconds, (nanos % WIDE) as u32),
            Err(_) => Duration::MAX,
        }
    }
}

/// Decimal seconds: `120`, `2.0`.
#[must_use]
pub fn seconds(text: &[u8]) -> Option<Duration> {
    Decimal::parse(text.trim_ascii()).map(|number| number.times(SECOND))
}

/// Decimal milliseconds.
#[must_use]
pub fn millis(text: &[u8]) -> Option<Duration> {
    Decimal::parse(text.trim_ascii()).map(|number| number.times(SECOND / 1000))
}

/// A count that may carry a fraction or parameters (`99.0`, `100;w=60`, `100, 100;w=60`): its whole
/// part, saturated; and whether all of it is zero.
#[inline]
pub(crate) fn count(text: &[u8]) -> Option<(u32, bool)> {
    if text.len() < 10 && !text.is_empty() && text.iter().all(u8::is_ascii_digit) {
        let number = text.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
        return Some((number, number == 0));
    }
    let (number, rest) = Decimal::split(text.trim_ascii())?;
    matches!(rest.first(), None | Some(b';' | b',' | b' '))
        .then(|| (u32::try_from(number.whole).unwrap_or(u32::MAX), number.whole == 0 && number.fraction == 0))
}

/// A duration as Go writes it: `1h2m3.5s`, `20ms`. Days (`d`) are taken too.
#[must_use]
pub fn go_duration(text: &[u8]) -> Option<Duration> {
    let mut rest = text.trim_ascii();
    if rest.is_empty() {
        return None;
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, tail) = Decimal::split(rest)?;
        let length =
            tail.iter().position(|byte| byte.is_ascii_digit() || *byte == b'.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(length);
        total = total.saturating_add(number.times(go_unit(unit)?));
        rest = tail;
    }
    Some(total)
}

fn go_unit(unit: &[u8]) -> Option<u64> {
    Some(match unit {
        b"ns" => 1,
        b"us" | b"\xc2\xb5s" | b"\xce\xbcs" => 1000,
        b"ms" => SECOND / 1000,
        b"s" => SECOND,
        b"m" => 60 * SECOND,
        b"h" => 3600 * SECOND,
        b"d" => 24 * 3600 * SECOND,
        _ => return None,
    })
}

/// The span that a sentence goes on with: `20s`, `6m0s`, `1.5 seconds`, `a few minutes` (nothing).
pub(crate) fn leading_span(text: &str) -> Option<Duration> {
    let text = text.trim_ascii_start().as_bytes();
    let end =
        text.iter().position(|byte| !(byte.is_ascii_alphanumeric() || *byte == b'.')).unwrap_or(text.len());
    let word = text[..end].strip_suffix(b".").unwrap_or(&text[..end]);
    if let Some(span) = go_duration(word) {
        return Some(span);
    }
    let (number, rest) = Decimal::split(text)?;
    let unit = rest.trim_ascii_start();
    let length = unit.iter().position(|byte| !byte.is_ascii_alphabetic()).unwrap_or(unit.len());
    let unit = match &unit[..length] {
        b"ms" | b"millisecond" | b"milliseconds" => SECOND / 1000,
        b"s" | b"sec" | b"secs" | b"second" | b"seconds" => SECOND,
        b"m" | b"min" | b"mins" | b"minute" | b"minutes" => 60 * SECOND,
        b"h" | b"hour" | b"hours" => 3600 * SECOND,
        b"day" | b"days" => 24 * 3600 * SECOND,
        _ => return None,
    };
    Some(number.times(unit))
}

/// An HTTP date, as time since the Unix epoch.
#[must_use]
pub fn http_date(text: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(text).ok()?;
    let date = httpdate::parse_http_date(text).ok()?;
    date.duration_since(std::time::UNIX_EPOCH).ok()
}

/// A date of RFC 3339, as time since the Unix epoch (zero if before it). Seconds may be missing, as
/// Jira writes it (`2023-11-14T22:14Z`).
#[must_use]
pub fn rfc3339(text: &[u8]) -> Option<Duration> {
    let digits = |range: std::ops::Range<usize>| {
        text.get(range)?.iter().try_fold(0_u64, |number, byte| {
            byte.is_ascii_digit().then(|| number * 10 + u64::from(byte - b'0'))
        })
    };
    let is = |at: usize, any: &[u8]| text.get(at).is_some_and(|byte| any.contains(byte));
    let (year, month, day) = (digits(0..4)?, digits(5..7)?, digits(8..10)?);
    let (hour, minute) = (digits(11..13)?, digits(14..16)?);
    let marks = is(4, b"-") && is(7, b"-") && is(10, b"Tt ") && is(13, b":");
    let (second, mut at) = if is(16, b":") { (digits(17..19)?, 19) } else { (0, 16) };
    let mut nanos = 0;
    if at == 19 && is(19, b".") {
        let (number, rest) = Decimal::split(&text[19..])?;
        nanos = number.fraction;
        at = text.len() - rest.len();
    }
    if !marks
        || !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || hour > 24
        || minute > 59
        || second > 60
    {
        return None;
    }
    let offset = match text.get(at..)? {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (digits(at + 1..at + 3)?, digits(at + 4..at + 6)?);
            let east = i64::try_from(hours * 3600 + minutes * 60).ok()?;
            if *sign == b'+' { east } else { -east }
        }
        _ => return None,
    };
    let days = days_since_epoch(year, month, day);
    let clock = i64::try_from(hour * 3600 + minute * 60 + second).ok()?;
    let seconds = u64::try_from(days * 86_400 + clock - offset).unwrap_or(0);
    Some(Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos)))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar (Hinnant, "chrono-compatible low-level
/// date algorithms").
fn days_since_epoch(year: u64, month: u64, day: u64) -> i64 {
    let (year, month, day) = (year.cast_signed(), month.cast_signed(), day.cast_signed());
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn wait(text: &str) -> Option<f64> {
        When::parse(text.as_bytes()).map(|when| when.wait(|| NOW).as_secs_f64())
    }

    #[test]
    fn whatever_form_it_takes() {
        for (text, expected) in [
            ("120", Some(120.0)),
            (" 120 ", Some(120.0)),
            ("2.0", Some(2.0)),
            ("0", Some(0.0)),
            ("1700000030", Some(30.0)),
            ("1700000030.5", Some(30.5)),
            ("1700000030000", Some(30.0)),
            ("1700000030000000", Some(30.0)),
            ("1699999999", Some(0.0)),
            ("1000000000", Some(1e9)),
            ("1h2m3.5s", Some(3723.5)),
            ("20ms", Some(0.02)),
            ("250\u{b5}s", Some(0.000_25)),
            ("2023-11-14T22:14Z", Some(40.0)),
            ("2023-11-14T22:13:50.25Z", Some(30.25)),
            ("2023-11-15T00:13:50+02:00", Some(30.0)),
            ("2023-11-14T20:13:50-02:00", Some(30.0)),
            ("1969-12-31T23:59:59Z", Some(0.0)),
            ("Tue, 14 Nov 2023 22:13:50 GMT", Some(30.0)),
            ("Tuesday, 14-Nov-23 22:13:50 GMT", Some(30.0)),
            ("Tue Nov 14 22:13:50 2023", Some(30.0)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("NaN", None),
            ("inf", None),
            ("1e3", None),
            (".", None),
            ("1h2", None),
            ("3 s", None),
            ("2023-13-14T22:14Z", None),
            ("2023-11-14", None),
            ("²", None),
        ] {
            assert_eq!(wait(text), expected, "{text}");
        }
    }

    #[test]
    fn rounds_up_and_saturates() {
        assert_eq!(seconds(b"0.0000000001"), Some(Duration::from_nanos(1)));
        assert_eq!(millis(b"0.5"), Some(Duration::from_micros(500)));
        assert_eq!(millis(b"99999999999999999999"), Some(Duration::from_millis(u64::MAX)));
        assert_eq!(seconds(b"18446744073709551616"), Some(Duration::from_secs(u64::MAX)));
        assert_eq!(go_duration(b"99999999999999999999h1s"), Some(Duration::MAX));
        assert_eq!(count(b"99.0"), Some((99, false)));
        assert_eq!(count(b"100;w=60"), Some((100, false)));
        assert_eq!(count(b"0.0"), Some((0, true)));
        assert_eq!(count(b"-1"), None);
        assert_eq!(count(b"5000000000"), Some((u32::MAX, false)));
    }

    #[test]
    fn spans_in_sentences() {
        for (text, expected) in [
            ("20s. Contact us", Some(20.0)),
            ("6m0s. Visit", Some(360.0)),
            ("7.66s.", Some(7.66)),
            ("34.07456s.", Some(34.074_56)),
            ("6 seconds.", Some(6.0)),
            ("1 minute", Some(60.0)),
            ("a few minutes", None),
            ("6", None),
            ("", None),
        ] {
            assert_eq!(leading_span(text).map(|span| span.as_secs_f64()), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = (When::parse(&text), count(&text), seconds(&text), millis(&text));
            let _ = leading_span(&String::from_utf8_lossy(&text));
        }

        #[test]
        fn near_misses_do_not_panic(text in "[0-9.:TZhmsnuµ+ -]{0,30}") {
            let _ = (When::parse(text.as_bytes()), count(text.as_bytes()), leading_span(&text));
        }

        #[test]
        fn whole_seconds_are_exact(seconds in 0_u64..=1_000_000_000) {
            prop_assert_eq!(When::parse(seconds.to_string().as_bytes()), Some(When::Number(Duration::from_secs(seconds))));
        }

        #[test]
        fn an_instant_is_found_again_in_every_form(ahead in 1_u64..4_000_000_000) {
            let at = 1_000_000_000 + ahead;
            let epoch = Duration::from_secs(at);
            let date = httpdate::fmt_http_date(std::time::UNIX_EPOCH + epoch);
            prop_assert_eq!(When::parse(date.as_bytes()), Some(When::Date(epoch)));
            for digits in ["", "000", "000000"] {
                prop_assert_eq!(When::parse(format!("{at}{digits}").as_bytes()), Some(When::Epoch(epoch)));
            }
        }

        #[test]
        fn past_instants_are_zero(ago in 0_u64..600_000_000) {
            let at = 1_700_000_000 - ago;
            prop_assert_eq!(When::parse(at.to_string().as_bytes()).map(|when| when.wait(|| NOW)), Some(Duration::ZERO));
        }

        #[test]
        fn go_durations_add_up(h in 0_u64..1000, m in 0_u64..100, s in 0_u64..100, ms in 0_u64..1000) {
            let text = format!("{h}h{m}m{s}s{ms}ms");
            let expected = Duration::from_millis(((h * 60 + m) * 60 + s) * 1000 + ms);
            prop_assert_eq!(go_duration(text.as_bytes()), Some(expected));
        }
    }
}
