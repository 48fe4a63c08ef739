//! The server's plain word: `Retry-After` and the millisecond headers that refine it.

use super::{dialect::Now, value::When};
use http::{HeaderMap, header::RETRY_AFTER};
use std::time::Duration;

/// Headers that give the wait in milliseconds: OpenAI, Azure, AWS.
const MILLISECONDS: [&str; 3] = ["retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after"];

/// The value of a `Retry-After`: seconds (decimals too), an HTTP date; also what servers send instead
/// of these, a Go duration, an RFC 3339 date or an epoch.
#[must_use]
pub fn retry_after(value: &[u8]) -> Option<When> {
    When::parse(value)
}

/// The value of a header that tells milliseconds; over 10^12 it is an epoch.
#[must_use]
pub fn retry_after_ms(value: &[u8]) -> Option<When> {
    let span = super::value::millis(value)?;
    Some(if span.as_millis() > 1_000_000_000_000 { When::Epoch(span) } else { When::Span(span) })
}

/// What the headers say outright: milliseconds before `Retry-After`; what cannot be read falls
/// through to the next. Of several values (a proxy's and the origin's) the longest holds.
pub(crate) fn told(headers: &HeaderMap, now: Now<'_>) -> Option<Duration> {
    let longest = |name: http::HeaderName, parse: fn(&[u8]) -> Option<When>| {
        let values = headers.get_all(name).iter();
        values.filter_map(|value| Some(parse(value.as_bytes())?.wait(|| now.get()))).max()
    };
    MILLISECONDS
        .iter()
        .find_map(|name| longest(http::HeaderName::from_static(name), retry_after_ms))
        .or_else(|| longest(RETRY_AFTER, retry_after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pairs: &[(&'static str, &str)]) -> Option<u64> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        let wall = || std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        super::told(&headers, Now { headers: &headers, wall }).map(|wait| wait.as_millis() as u64)
    }

    #[test]
    fn the_finer_header_wins_and_the_unreadable_falls_through() {
        for (pairs, expected) in [
            (&[("retry-after", "2")][..], Some(2000)),
            (&[("retry-after", "2"), ("retry-after-ms", "1500")], Some(1500)),
            (&[("retry-after", "2"), ("x-ms-retry-after-ms", "1500")], Some(1500)),
            (&[("retry-after", "2"), ("x-amz-retry-after", "1500")], Some(1500)),
            (&[("retry-after", "2"), ("retry-after-ms", "-1")], Some(2000)),
            (&[("retry-after-ms", "1700000005000")], Some(5000)),
            (&[("retry-after", "5"), ("retry-after", "9")], Some(9000)),
            (&[("retry-after", "5"), ("retry-after", "x")], Some(5000)),
            (&[("retry-after", "-1")], None),
            (&[], None),
        ] {
            assert_eq!(told(pairs), expected, "{pairs:?}");
        }
    }
}
