//! Amazon's event stream (`application/vnd.amazon.eventstream`), as far as a classifier needs it: is the first
//! message an error?
//!
//! Bedrock, Transcribe, Kinesis and others answer 200, and say what went wrong in a message of the stream. Who
//! looks at the status only sees a success, and never retries (maximhq/bifrost#2480).
//!
//! A message is: its length (32 bits, big-endian), the length of its headers, a checksum of both; the headers;
//! the payload; a checksum of all. A header is a name with a length of 8 bits, a type, and a value. The header
//! `:message-type` says `event`, `exception` (its kind stands in `:exception-type`) or `error`
//! (`:error-code`). Checksums are left to whoever reads the stream: a wrong guess here would at worst repeat a
//! request that may be repeated.

use super::body::{Found, Says, of_error, says_code};

/// More than the formats allow (16 MiB of payload, 128 KiB of headers): no message, so nothing is said of it.
const LONGEST: usize = 24 << 20;
/// Prelude and last checksum.
const AROUND: usize = 16;
/// An exception whose payload is longer is judged by its headers.
const PAYLOAD: usize = 64 << 10;

/// What one message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message<'a> {
    /// A part of the answer: its type, and what there is of its payload so far.
    Event(&'a [u8], &'a [u8]),
    /// The call failed: its kind (`throttlingException`), and its payload, empty where that is long.
    Exception(&'a [u8], &'a [u8]),
}

/// What stands at the start of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parsed<'a> {
    /// Too little to say: a message is not complete, or not far enough.
    Incomplete,
    /// This message, and how many bytes it has in all, more perhaps than are there.
    Message(Message<'a>, usize),
    /// No message of an event stream.
    Garbage,
}

/// Reads the first message of `stream`. An event is known by its headers alone; of an exception the payload is
/// waited for, up to 64 KiB.
#[must_use]
pub fn parse(stream: &[u8]) -> Parsed<'_> {
    let Some((prelude, rest)) = stream.split_first_chunk::<12>() else { return Parsed::Incomplete };
    let number = |at: usize| {
        u32::from_be_bytes([prelude[at], prelude[at + 1], prelude[at + 2], prelude[at + 3]]) as usize
    };
    let (total, headers) = (number(0), number(4));
    if !(AROUND..=LONGEST).contains(&total) || headers > total - AROUND {
        return Parsed::Garbage;
    }
    let Some((headers, payload)) = rest.split_at_checked(headers) else { return Parsed::Incomplete };
    let length = total - AROUND - headers.len();
    let Some(headers) = Headers::read(headers) else { return Parsed::Garbage };
    let message = match headers.message_type {
        b"exception" | b"error" => {
            let kind =
                if headers.message_type == b"error" { headers.error_code } else { headers.exception_type };
            match payload.get(..length) {
                Some(payload) if length <= PAYLOAD => Message::Exception(kind, payload),
                None if length <= PAYLOAD => return Parsed::Incomplete,
                _ => Message::Exception(kind, b""),
            }
        }
        _ => Message::Event(headers.event_type, &payload[..payload.len().min(length)]),
    };
    Parsed::Message(message, total)
}

/// The headers that matter.
#[derive(Default)]
struct Headers<'a> {
    message_type: &'a [u8],
    event_type: &'a [u8],
    exception_type: &'a [u8],
    error_code: &'a [u8],
}

impl<'a> Headers<'a> {
    fn read(mut rest: &'a [u8]) -> Option<Self> {
        let mut headers = Headers::default();
        while !rest.is_empty() {
            let name = take(&mut rest, 1)?[0].into();
            let name = take(&mut rest, name)?;
            let value = match take(&mut rest, 1)?[0] {
                0 | 1 => b"",
                2 => take(&mut rest, 1)?,
                3 => take(&mut rest, 2)?,
                4 => take(&mut rest, 4)?,
                5 | 8 => take(&mut rest, 8)?,
                6 | 7 => {
                    let length = take(&mut rest, 2)?;
                    take(&mut rest, u16::from_be_bytes([length[0], length[1]]).into())?
                }
                9 => take(&mut rest, 16)?,
                _ => return None,
            };
            match name {
                b":message-type" => headers.message_type = value,
                b":event-type" => headers.event_type = value,
                b":exception-type" => headers.exception_type = value,
                b":error-code" => headers.error_code = value,
                _ => {}
            }
        }
        Some(headers)
    }
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(count)?;
    *rest = left;
    Some(taken)
}

/// What an exception says.
pub(crate) fn found(kind: &[u8], payload: &[u8]) -> Found {
    let mut found = of_error(payload);
    // In a stream its name begins with a small letter, in a body with a capital one.
    let mut kind = String::from_utf8_lossy(kind).into_owned();
    if let Some(first) = kind.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    match &*kind {
        "ValidationException" | "BadRequestException" => found.say(Says::Rejected),
        "AccessDeniedException" | "UnrecognizedClientException" | "ExpiredTokenException" => {
            found.say(Says::Misconfigured);
        }
        "ModelTimeoutException" => found.status = Some(408),
        "ServiceUnavailableException" => found.status = Some(503),
        kind => says_code(kind, &mut found),
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A message with these headers (strings) and this payload; its checksums are zero.
    pub(crate) fn message(headers: &[(&str, &str)], payload: &[u8]) -> Vec<u8> {
        let mut all = vec![];
        for (name, value) in headers {
            all.push(name.len() as u8);
            all.extend(name.bytes());
            all.push(7);
            all.extend((value.len() as u16).to_be_bytes());
            all.extend(value.bytes());
        }
        let total = (AROUND + all.len() + payload.len()) as u32;
        let mut message = total.to_be_bytes().to_vec();
        message.extend((all.len() as u32).to_be_bytes());
        message.extend([0; 4]);
        message.extend(all);
        message.extend(payload);
        message.extend([0; 4]);
        message
    }

    fn exception(kind: &str, payload: &[u8]) -> Vec<u8> {
        message(&[(":message-type", "exception"), (":exception-type", kind)], payload)
    }

    #[test]
    fn events_and_exceptions() {
        let event = message(&[(":event-type", "messageStart"), (":message-type", "event")], b"{}");
        assert_eq!(parse(&event), Parsed::Message(Message::Event(b"messageStart", b"{}"), event.len()));
        let thrown = exception("throttlingException", b"{\"message\":\"x\"}");
        assert_eq!(
            parse(&thrown),
            Parsed::Message(Message::Exception(b"throttlingException", b"{\"message\":\"x\"}"), thrown.len())
        );
        let error = message(&[(":message-type", "error"), (":error-code", "InternalError")], b"");
        assert_eq!(parse(&error), Parsed::Message(Message::Exception(b"InternalError", b""), error.len()));
        // A frame of 1 MiB is not waited for.
        let long = exception("throttlingException", &[b' '; 1 << 20]);
        assert!(matches!(
            parse(&long[..200]),
            Parsed::Message(Message::Exception(b"throttlingException", b""), _)
        ));
    }

    #[test]
    fn kinds_of_headers_are_passed_over() {
        let mut headers = vec![];
        for (kind, value) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (8, 8), (9, 16)] {
            headers.extend([1, b'x', kind]);
            headers.extend(vec![0xff; value]);
        }
        headers.extend([1, b'x', 6, 0, 2, 0xff, 0xff]);
        let mut rest = headers.clone();
        rest.extend([13]);
        rest.extend(b":message-type");
        rest.extend([7, 0, 9]);
        rest.extend(b"exception");
        assert_eq!(Headers::read(&rest).unwrap().message_type, b"exception");
        headers.extend([1, b'x', 10]);
        assert!(Headers::read(&headers).is_none(), "an unknown type has an unknown length");
        for cut in 1..rest.len() {
            // Cut anywhere: none, or (between two headers) without the last.
            assert!(Headers::read(&rest[..cut]).is_none_or(|headers| headers.message_type.is_empty()));
        }
    }

    #[test]
    fn what_exceptions_say() {
        for (kind, says, status) in [
            ("throttlingException", Some(Says::Throttled), None),
            ("ThrottlingException", Some(Says::Throttled), None),
            ("SlowDown", Some(Says::Throttled), None),
            ("validationException", Some(Says::Rejected), None),
            ("accessDeniedException", Some(Says::Misconfigured), None),
            ("modelTimeoutException", None, Some(408)),
            ("serviceUnavailableException", None, Some(503)),
            ("internalServerException", None, None),
            ("", None, None),
            ("é", None, None),
        ] {
            let found = found(kind.as_bytes(), b"{\"message\":\"no\"}");
            assert_eq!((found.says, found.status), (says, status), "{kind}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            std::hint::black_box(parse(&bytes));
        }

        #[test]
        fn a_broken_message_is_none_or_says_less(
            kind in "[a-zA-Z]{0,20}", payload in prop::collection::vec(any::<u8>(), 0..100),
            at: prop::sample::Index, byte: u8,
        ) {
            let whole = exception(&kind, &payload);
            for cut in 0..whole.len() {
                // The last checksum alone may be missing.
                let short = matches!(parse(&whole[..cut]), Parsed::Incomplete);
                prop_assert_eq!(short, cut < whole.len() - 4);
            }
            let mut broken = whole;
            let at = at.index(broken.len());
            broken[at] = byte;
            std::hint::black_box(parse(&broken));
        }
    }
}
