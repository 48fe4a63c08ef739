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
//! the opposite of HTTP's rule.

use crate::{Executed, Kind, Pushback, ResendAdvice, Signal};
use http::{HeaderMap, HeaderValue};
use std::time::Duration;

pub(crate) const STATUS: &str = "grpc-status";
pub(crate) const MESSAGE: &str = "grpc-message";
pub(crate) const PUSHBACK: &str = "grpc-retry-pushback-ms";
pub(crate) const CONTENT_TYPE: &[u8] = b"application/grpc";

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
    match headers.get(PUSHBACK).map(|value| pushback(value.as_bytes())) {
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
    }
}
