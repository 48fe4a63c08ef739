//! Whatever a provider sends, the classifier does not panic, and never makes a wait of the past.
#![cfg(feature = "http")]

use http::{HeaderMap, HeaderName, HeaderValue, Response};
use proptest::prelude::*;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tower_herd::{Classify, Executed, Head, HttpClassify, Kind, Pushback, ResendAdvice, Safety, Signal};

const NOW: u64 = 1_700_000_000;

fn wall() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn reply(status: u16, headers: HeaderMap, version: http::Version) -> Response<()> {
    let mut reply = Response::new(());
    *reply.status_mut() = http::StatusCode::from_u16(status).unwrap();
    *reply.headers_mut() = headers;
    *reply.version_mut() = version;
    reply
}

/// What is said of the head, and after the body was read.
fn signals(reply: &Response<()>, body: &[u8]) -> [Signal; 2] {
    let classifier = HttpClassify::with_wall_clock(wall);
    let head = classifier.classify(Ok(reply));
    [head, Classify::<Response<()>>::refine(&classifier, Head::of(reply), body, head)]
}

fn one(status: u16, name: &str, value: &str) -> Signal {
    let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
    signals(&reply(status, headers, http::Version::HTTP_11), b"")[0]
}

fn name() -> impl Strategy<Value = HeaderName> {
    let known = prop::sample::select(vec![
        "retry-after",
        "retry-after-ms",
        "x-ms-retry-after-ms",
        "date",
        "x-should-retry",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "x-ratelimit-reset-after",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
        "x-rate-limit-reset-tokens",
        "x-ratelimit-remaining-requests-day",
        "x-ratelimit-reset-requests-day",
        "anthropic-ratelimit-requests-limit",
        "anthropic-ratelimit-requests-remaining",
        "anthropic-ratelimit-requests-reset",
        "grpc-status",
        "grpc-message",
        "grpc-retry-pushback-ms",
        "grpc-status-details-bin",
        "content-type",
        "x-ratelimit-global",
    ])
    .prop_map(HeaderName::from_static);
    let near = "(x-ratelimit|x-rate-limit|ratelimit|anthropic-ratelimit|grpc)[-a-z]{0,20}"
        .prop_map(|name| name.parse().unwrap());
    prop_oneof![3 => known, 1 => near]
}

fn value() -> impl Strategy<Value = HeaderValue> {
    let near =
        "[-+0-9.:,;=TZGMhmsuqrt\" a-z]{0,40}".prop_map(|text| HeaderValue::from_str(text.trim()).unwrap());
    let bytes = prop::collection::vec(any::<u8>(), 0..60)
        .prop_filter_map("a legal value", |bytes| HeaderValue::from_bytes(&bytes).ok());
    let number =
        prop_oneof![any::<i64>().prop_map(|n| n.to_string()), (0_u64..100).prop_map(|n| n.to_string())]
            .prop_map(|text: String| HeaderValue::from_str(&text).unwrap());
    prop_oneof![near, bytes, number]
}

fn headers() -> impl Strategy<Value = HeaderMap> {
    prop::collection::vec((name(), value()), 0..14).prop_map(|pairs| {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    })
}

/// A past instant in one of the forms in which headers tell instants.
fn past() -> impl Strategy<Value = String> {
    (1_000_000_001..=NOW, 0..5_u8).prop_map(|(at, form)| match form {
        0 => at.to_string(),
        1 => format!("{at}000"),
        2 => format!("{at}000000"),
        3 => httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(at)),
        _ => "2023-11-14T22:13Z".to_owned(),
    })
}

const NAMES_OF_INSTANTS: [&str; 6] = [
    "retry-after",
    "x-ratelimit-reset",
    "x-rate-limit-reset",
    "x-ratelimit-reset-requests",
    "anthropic-ratelimit-requests-reset",
    "ratelimit-reset",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn nothing_panics_and_the_rules_hold(
        status in 100_u16..700, headers in headers(), body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let http1 = reply(status, headers.clone(), http::Version::HTTP_11);
        let http2 = reply(status, headers, http::Version::HTTP_2);
        let classifier = HttpClassify::with_wall_clock(wall);
        let _ = (classifier.kind(Ok(&http1)), classifier.kind(Ok(&http2)));
        for signal in signals(&http1, &body) {
            // A hint is given with these kinds only (and by gRPC with failures, and while a key is in flight).
            let may_hint = matches!(signal.kind, Kind::Throttled | Kind::Overloaded | Kind::Depleted)
                || signal.resend == ResendAdvice::InProgress
                || http1.headers().contains_key("grpc-status");
            prop_assert!(may_hint || signal.pushback == Pushback::None, "{signal:?}");
            prop_assert!(signal.quota.is_none_or(|quota| quota.limit > 0 && signal.kind == Kind::Success));
            // The fault of the request never makes anyone wait, and terminal kinds stay terminal.
            if matches!(signal.kind, Kind::Depleted | Kind::Misconfigured) {
                prop_assert_eq!(signal.resend, ResendAdvice::Never);
            }
            if signal.executed == Executed::Maybe {
                prop_assert!(!Safety::Once.allows(&signal, false));
            }
        }
    }

    #[test]
    fn a_past_instant_is_no_wait(
        status in prop::sample::select(vec![429_u16, 503, 529, 403]),
        name in prop::sample::select(NAMES_OF_INSTANTS.to_vec()),
        value in past(), remaining in any::<bool>(),
    ) {
        let mut headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
        if remaining {
            headers.insert("x-ratelimit-remaining", HeaderValue::from_static("0"));
        }
        let signal = signals(&reply(status, headers, http::Version::HTTP_11), b"")[0];
        prop_assert!(signal.pushback.wait().is_none_or(|wait| wait.is_zero()), "{signal:?}");
    }

    #[test]
    fn a_hint_is_parsed_whole(seconds in 0_u64..1_000_000_000, millis in 0_u64..1_000_000_000_000) {
        let seconds_told = one(429, "retry-after", &seconds.to_string());
        prop_assert_eq!(seconds_told.pushback, Pushback::After(Duration::from_secs(seconds)));
        let millis_told = one(429, "retry-after-ms", &millis.to_string());
        prop_assert_eq!(millis_told.pushback, Pushback::After(Duration::from_millis(millis)));
        let date = httpdate::fmt_http_date(wall() + Duration::from_secs(seconds));
        let date_told = one(429, "retry-after", &date);
        prop_assert_eq!(date_told.pushback, Pushback::After(Duration::from_secs(seconds)));
    }

    #[test]
    fn only_the_servers_clocks_are_compared(skew in 0_u64..100_000_000, seconds in 0_u64..100_000) {
        let at = |seconds| {
            let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds));
            HeaderValue::from_str(&date).unwrap()
        };
        let headers = HeaderMap::from_iter([
            (http::header::DATE, at(NOW + skew)),
            (http::header::RETRY_AFTER, at(NOW + skew + seconds)),
        ]);
        let signal = signals(&reply(429, headers, http::Version::HTTP_11), b"")[0];
        prop_assert_eq!(signal.pushback, Pushback::After(Duration::from_secs(seconds)));
    }

    #[test]
    fn numbers_without_a_unit_end_at_an_hour(seconds in 1_u64..1_000_000_000) {
        let expected = if seconds <= 3600 { Pushback::After(Duration::from_secs(seconds)) } else { Pushback::None };
        prop_assert_eq!(one(429, "x-ratelimit-reset", &seconds.to_string()).pushback, expected);
    }
}
