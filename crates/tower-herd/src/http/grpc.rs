//! gRPC: the status of a reply, in its head (trailers only) or in its trailers.
//!
//! | code | kind |
//! |---|---|
//! | 0 | success |
//! | 1 cancelled, 3 invalid argument, 5 not found, 6 already exists, 9 failed precondition, 11 out of range, 12 unimplemented | rejected |
//! | 7 permission denied, 16 unauthenticated | misconfigured |
//! | 8 resource exhausted | throttled; rejected if it is about the size of a message |
//! | 2 unknown, 4 deadline exceeded, 13 internal, 14 unavailable, 15 data loss | failed |
//! | 10 aborted | failed, and may be sent again |
//!
//! `grpc-retry-pushback-ms` follows gRFC A6: what is negative or unreadable there means "not again",
//! the opposite of HTTP's rule. Where it is absent, the `google.rpc.RetryInfo` in `grpc-status-details-bin`
//! says how long to wait ([`retry_info`]); there a negative or unreadable delay says nothing.

use crate::{Executed, Kind, Pushback, ResendAdvice, Signal};
use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{HeaderMap, HeaderValue};
use std::time::Duration;

pub(crate) const STATUS: &str = "grpc-status";
pub(crate) const MESSAGE: &str = "grpc-message";
pub(crate) const PUSHBACK: &str = "grpc-retry-pushback-ms";
pub(crate) const CONTENT_TYPE: &[u8] = b"application/grpc";
const DETAILS: &str = "grpc-status-details-bin";
/// Longer details are not looked at: gRPC allows 8 KiB of metadata by default.
const LONGEST: usize = 16 << 10;
/// Nor are further ones.
const MOST: usize = 32;

/// The number in a `grpc-status`; what cannot be read is 2, unknown.
#[must_use]
pub fn code(value: &[u8]) -> u8 {
    match value.trim_ascii() {
        [ones @ b'0'..=b'9'] => ones - b'0',
        [b'1', ones @ b'0'..=b'6'] => 10 + ones - b'0',
        _ => 2,
    }
}

/// What a status code says, on its own.
#[must_use]
pub fn signal_of_code(code: u8) -> Signal {
    match code {
        0 => Signal::new(Kind::Success),
        // Without a pushback nobody knows whether the handler had begun.
        8 => Signal::new(Kind::Throttled).with_executed(Executed::Maybe),
        7 | 16 => Signal::new(Kind::Misconfigured),
        1 | 3 | 5 | 6 | 9 | 11 | 12 => Signal::new(Kind::Rejected),
        10 => Signal::new(Kind::Failed).with_resend(ResendAdvice::Allowed),
        _ => Signal::new(Kind::Failed),
    }
}

/// The value of a `grpc-retry-pushback-ms`.
#[must_use]
pub fn pushback(value: &[u8]) -> Pushback {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Pushback::Never;
    }
    let millis = digits
        .iter()
        .fold(0_u64, |millis, digit| millis.saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    Pushback::After(Duration::from_millis(millis))
}

/// Whether the pushback says "not again".
pub(crate) fn is_told_never(headers: &HeaderMap) -> bool {
    headers.get(PUSHBACK).is_some_and(|value| pushback(value.as_bytes()) == Pushback::Never)
}

/// The delay of the `google.rpc.RetryInfo` in a `grpc-status-details-bin`: base64, padded or not, of a
/// `google.rpc.Status`.
///
/// ```
/// use std::time::Duration;
/// use tower_herd::http::grpc::retry_info;
///
/// let details = b"CAgaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIHhCAyrXuAQ";
/// assert_eq!(retry_info(details), Some(Duration::from_millis(30_500)));
/// ```
#[must_use]
pub fn retry_info(value: &[u8]) -> Option<Duration> {
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    // Several values may have been joined; one is enough.
    let first = value.split(|byte| *byte == b',').next()?.trim_ascii();
    if first.len() > LONGEST {
        return None;
    }
    let status = BASE64.decode(first).ok()?;
    details(&status).take(MOST).find_map(|detail| {
        let kind = Fields(detail).find_map(|field| field.bytes(1))?;
        // By its last part: who runs a type server of its own has another host before it.
        if !kind.ends_with(b"/google.rpc.RetryInfo") {
            return None;
        }
        let info = Fields(detail).find_map(|field| field.bytes(2))?;
        let delay = Fields(info).find_map(|field| field.bytes(1))?;
        let number = |of| Fields(delay).find_map(|field| field.number(of)).unwrap_or(0);
        // Both are signed and written in two's complement.
        let seconds = u64::try_from(number(1).cast_signed()).ok()?;
        let nanos = u32::try_from(number(2).cast_signed()).ok().filter(|nanos| *nanos < 1_000_000_000)?;
        Some(Duration::new(seconds, nanos))
    })
}

/// The details of a `google.rpc.Status`, each a `google.protobuf.Any`.
fn details(status: &[u8]) -> impl Iterator<Item = &[u8]> {
    Fields(status).filter_map(|field| field.bytes(3))
}

/// The fields of a message in protobuf's encoding, up to the first that cannot be read.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64, u64),
    Bytes(u64, &'a [u8]),
    Other,
}

impl<'a> Field<'a> {
    fn bytes(&self, field: u64) -> Option<&'a [u8]> {
        match *self {
            Field::Bytes(at, bytes) if at == field => Some(bytes),
            _ => None,
        }
    }
    fn number(&self, field: u64) -> Option<u64> {
        match *self {
            Field::Number(at, number) if at == field => Some(number),
            _ => None,
        }
    }
}

impl<'a> Fields<'a> {
    /// Seven bits a byte, the lowest first; ten bytes at most.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..70).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f).wrapping_shl(shift);
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Field<'a>> {
        let mut read = || {
            let tag = self.varint()?;
            Some(match tag & 7 {
                0 => Field::Number(tag >> 3, self.varint()?),
                1 => self.take(8).map(|_| Field::Other)?,
                2 => {
                    let length = self.varint()?;
                    Field::Bytes(tag >> 3, self.take(length)?)
                }
                5 => self.take(4).map(|_| Field::Other)?,
                // Groups have been out of use for long.
                _ => return None,
            })
        };
        let field = read();
        if field.is_none() {
            self.0 = b"";
        }
        field
    }
}

/// What the head of a trailers-only reply, or the trailers of another, say.
#[cold]
pub(crate) fn signal(status: &HeaderValue, headers: &HeaderMap) -> Signal {
    let mut signal = signal_of_code(code(status.as_bytes()));
    if signal.kind == Kind::Throttled
        && headers.get(MESSAGE).is_some_and(|text| is_about_size(text.as_bytes()))
    {
        signal = Signal::new(Kind::Rejected);
    }
    if !matches!(signal.kind, Kind::Throttled | Kind::Failed) {
        return signal;
    }
    if signal.kind == Kind::Failed && headers.contains_key(crate::refusal::REFUSED) {
        let told = headers.get(PUSHBACK).map_or(Pushback::None, |value| pushback(value.as_bytes()));
        return Signal::refused_elsewhere(told);
    }
    let told = headers.get(PUSHBACK).map(|value| pushback(value.as_bytes()));
    let info = || headers.get(DETAILS).and_then(|details| retry_info(details.as_bytes()));
    match told.or_else(|| info().map(Pushback::After)) {
        Some(Pushback::Never) => signal.with_pushback(Pushback::Never).with_resend(ResendAdvice::Never),
        Some(pushback) if signal.kind == Kind::Throttled => {
            signal.with_pushback(pushback).with_executed(Executed::No)
        }
        Some(pushback) => signal.with_pushback(pushback),
        None => signal,
    }
}

/// The trailers of a reply, if they say that it failed after all.
pub(crate) fn trailers(trailers: &HeaderMap) -> Option<Signal> {
    let signal = signal(trailers.get(STATUS)?, trailers);
    (signal.kind != Kind::Success).then_some(signal)
}

/// Whether code 8 is about a message that is too large, which no wait makes smaller. The words of
/// grpc-go, grpc-java, grpc-core, .NET and tonic.
fn is_about_size(message: &[u8]) -> bool {
    let message = String::from_utf8_lossy(message).to_ascii_lowercase();
    message.contains("message")
        && ["larger than max", "exceeds maximum size", "exceeds the maximum", "too large", "length too large"]
            .iter()
            .any(|words| message.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(pairs: &[(&'static str, &str)]) -> Signal {
        let headers: HeaderMap =
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        signal(&headers[STATUS], &headers)
    }

    #[test]
    fn every_code() {
        use Kind::{Failed, Misconfigured, Rejected, Success, Throttled};
        let kinds = [
            Success,
            Rejected,
            Failed,
            Rejected,
            Failed,
            Rejected,
            Rejected,
            Misconfigured,
            Throttled,
            Rejected,
            Failed,
            Rejected,
            Rejected,
            Failed,
            Failed,
            Failed,
            Misconfigured,
        ];
        for (code, kind) in kinds.into_iter().enumerate() {
            assert_eq!(of(&[(STATUS, &code.to_string())]).kind, kind, "code {code}");
        }
        for strange in ["", "17", "-1", "x", "008", "99999999999"] {
            assert_eq!(of(&[(STATUS, strange)]).kind, Failed, "{strange}");
        }
        assert_eq!(of(&[(STATUS, "10")]).resend, ResendAdvice::Allowed);
    }

    #[test]
    fn pushback_is_evidence_or_a_no() {
        let bare = of(&[(STATUS, "8")]);
        assert_eq!((bare.pushback, bare.executed), (Pushback::None, Executed::Maybe));
        let told = of(&[(STATUS, "8"), (PUSHBACK, "100")]);
        assert_eq!(
            (told.pushback, told.executed),
            (Pushback::After(Duration::from_millis(100)), Executed::No)
        );
        for no in ["-1", "abc", "", "1.5"] {
            let signal = of(&[(STATUS, "14"), (PUSHBACK, no)]);
            assert_eq!((signal.pushback, signal.resend), (Pushback::Never, ResendAdvice::Never), "{no}");
        }
    }

    /// A field of protobuf: its number, and bytes or a number.
    fn bytes(field: u8, bytes: &[u8]) -> Vec<u8> {
        [&[field << 3 | 2], &*varint(bytes.len() as u64), bytes].concat()
    }
    fn number(field: u8, number: i64) -> Vec<u8> {
        [&[field << 3], &*varint(number as u64)].concat()
    }
    fn varint(mut number: u64) -> Vec<u8> {
        let mut all = vec![];
        while number > 0x7f {
            all.push(number as u8 | 0x80);
            number >>= 7;
        }
        all.push(number as u8);
        all
    }
    fn packed(kind: &str, value: &[u8]) -> Vec<u8> {
        bytes(3, &[bytes(1, format!("type.googleapis.com/{kind}").as_bytes()), bytes(2, value)].concat())
    }
    fn retry(seconds: i64, nanos: i64) -> Vec<u8> {
        packed("google.rpc.RetryInfo", &bytes(1, &[number(1, seconds), number(2, nanos)].concat()))
    }
    fn status(details: &[Vec<u8>]) -> Vec<u8> {
        [number(1, 8), bytes(2, b"slow down"), details.concat()].concat()
    }
    fn base64(bytes: &[u8], padded: bool) -> String {
        let text = base64::prelude::BASE64_STANDARD.encode(bytes);
        if padded { text } else { text.trim_end_matches('=').to_owned() }
    }

    #[test]
    fn the_delay_of_a_retry_info() {
        let other = || packed("google.rpc.ErrorInfo", b"\x0a\x05QUOTA");
        // Fields that nobody knows, of each wire type.
        let strange = [vec![0x7d, 1, 2, 3, 4], vec![0x79, 1, 2, 3, 4, 5, 6, 7, 8], number(15, -1)].concat();
        let whole = |seconds, nanos| Some(Duration::new(seconds, nanos));
        for (details, expected) in [
            (status(&[retry(30, 500)]), whole(30, 500)),
            (status(&[other(), strange, retry(0, 250_000_000), retry(9, 0)]), whole(0, 250_000_000)),
            (status(&[retry(0, 0)]), whole(0, 0)),
            (status(&[retry(i64::MAX, 0)]), whole(i64::MAX as u64, 0)),
            (status(&[packed("google.rpc.RetryInfo", &bytes(1, b""))]), whole(0, 0)),
            (status(&[packed("google.rpc.RetryInfo", b"")]), None),
            (status(&[retry(-1, 0)]), None),
            (status(&[retry(0, -1)]), None),
            (status(&[retry(0, 1_000_000_000)]), None),
            (status(&[other()]), None),
            (vec![], None),
            (vec![other(); MOST + 1].concat(), None),
        ] {
            for padded in [false, true] {
                let text = base64(&details, padded);
                assert_eq!(retry_info(text.as_bytes()), expected, "{text}");
                assert_eq!(retry_info(format!(" {text} ,CAg").as_bytes()), expected, "{text}");
            }
        }
        let late = [vec![other(); MOST], vec![retry(1, 0)]].concat();
        assert_eq!(retry_info(base64(&status(&late), true).as_bytes()), None, "bounded");
        assert_eq!(
            retry_info(base64(&[status(&[retry(1, 0)]), vec![0; LONGEST]].concat(), true).as_bytes()),
            None
        );
        assert_eq!(retry_info(b"not base64!"), None);
    }

    #[test]
    fn a_retry_info_is_a_pushback_where_none_is_given() {
        let info = base64(&status(&[retry(3, 0)]), false);
        for (code, kind, executed) in
            [("8", Kind::Throttled, Executed::No), ("14", Kind::Failed, Executed::Maybe)]
        {
            let signal = of(&[(STATUS, code), (DETAILS, &info)]);
            assert_eq!((signal.kind, signal.executed), (kind, executed));
            assert_eq!(signal.pushback, Pushback::After(Duration::from_secs(3)));
            let told = of(&[(STATUS, code), (DETAILS, &info), (PUSHBACK, "100")]);
            assert_eq!(told.pushback, Pushback::After(Duration::from_millis(100)), "the header goes first");
            assert_eq!(of(&[(STATUS, code), (DETAILS, &info), (PUSHBACK, "-1")]).pushback, Pushback::Never);
        }
        // The fault of the request makes nobody wait.
        assert_eq!(of(&[(STATUS, "3"), (DETAILS, &info)]).pushback, Pushback::None);
        let trailers = [(STATUS, "8"), (DETAILS, &*info)];
        let trailers: HeaderMap =
            trailers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let signal = super::trailers(&trailers).unwrap();
        assert_eq!(signal.pushback, Pushback::After(Duration::from_secs(3)), "in trailers too");
    }

    #[test]
    fn too_large_is_not_too_often() {
        for message in [
            "grpc: received message larger than max (5242880 vs. 4194304)",
            "trying to send message larger than max (5 vs. 4)",
            "gRPC message exceeds maximum size 4194304: 5242880",
            "Received message exceeds the maximum configured message size.",
        ] {
            assert_eq!(of(&[(STATUS, "8"), (MESSAGE, message)]).kind, Kind::Rejected, "{message}");
        }
        assert_eq!(of(&[(STATUS, "8"), (MESSAGE, "too many messages")]).kind, Kind::Throttled);
    }

    proptest! {
        #[test]
        fn nothing_panics(value in proptest::collection::vec(any::<u8>(), 0..30)) {
            let _ = (code(&value), pushback(&value), is_about_size(&value));
        }

        #[test]
        fn no_details_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60), text in ".{0,40}") {
            let _ = (retry_info(&bytes), retry_info(text.as_bytes()), retry_info(base64(&bytes, false).as_bytes()));
        }

        #[test]
        fn any_delay_is_read_whole(
            seconds in 0..i64::MAX, nanos in 0..1_000_000_000_i64, padded: bool, cut: prop::sample::Index,
        ) {
            let details = status(&[retry(seconds, nanos)]);
            let expected = Duration::new(seconds as u64, nanos as u32);
            prop_assert_eq!(retry_info(base64(&details, padded).as_bytes()), Some(expected));
            // Cut off anywhere it says nothing.
            let cut = cut.index(details.len());
            prop_assert_eq!(retry_info(base64(&details[..cut], padded).as_bytes()), None);
        }
    }
}
