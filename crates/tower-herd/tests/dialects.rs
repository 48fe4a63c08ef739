//! The shared vectors: an HTTP reply, and the signal it carries.
#![cfg(feature = "http")]

// Unknown fields are errors here: an expectation that nobody checks must not pass.

use serde::Deserialize;
use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tower_herd::{Classify, Head, HttpClassify, Kind, Pushback, ResendAdvice, Signal};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vectors {
    #[serde(rename = "about")]
    _about: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    status: u16,
    headers: BTreeMap<String, String>,
    now_unix_s: u64,
    expect: Expect,
    body: Option<String>,
    needs: String,
    #[serde(rename = "why")]
    _why: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    kind: String,
    #[serde(default)]
    retry_after_ms: Option<u64>,
    retry_after_ms_min: Option<u64>,
    retry_after_ms_max: Option<u64>,
    resend: Option<String>,
}

fn wall() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

fn reply(case: &Case) -> http::Response<()> {
    let mut builder = http::Response::builder().status(case.status);
    if case.headers.get("content-type").is_some_and(|kind| kind.starts_with("application/grpc")) {
        builder = builder.version(http::Version::HTTP_2);
    }
    for (name, value) in &case.headers {
        builder = builder.header(name, http::HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    builder.body(()).unwrap()
}

fn check(case: &Case, signal: Signal) {
    let name = &case.name;
    assert_eq!(signal.kind.as_str(), case.expect.kind, "{name}: {signal:?}");
    let wait = signal.pushback.wait().map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    match (case.expect.retry_after_ms_min, case.expect.retry_after_ms_max) {
        (None, None) => {
            assert_eq!(wait, case.expect.retry_after_ms, "{name}: {signal:?}");
            assert_eq!(signal.pushback.wait().map_or(0, |wait| wait.subsec_nanos() % 1_000_000), 0, "{name}");
        }
        (least, most) => {
            let wait = wait.unwrap_or_else(|| panic!("{name}: no hint"));
            assert!(least.is_none_or(|least| wait >= least), "{name}: {wait}");
            assert!(most.is_none_or(|most| wait <= most), "{name}: {wait}");
        }
    }
    match case.expect.resend.as_deref() {
        Some("never") => assert_eq!(signal.resend, ResendAdvice::Never, "{name}"),
        Some("in progress") => assert_eq!(signal.resend, ResendAdvice::InProgress, "{name}"),
        Some("allowed") => assert_eq!(signal.resend, ResendAdvice::Allowed, "{name}"),
        Some(other) => panic!("{name}: unknown resend {other:?}"),
        None => {}
    }
}

#[test]
fn every_vector() {
    let vectors: Vectors = serde_json::from_str(include_str!("vectors/dialects.json")).unwrap();
    assert!(vectors.cases.len() > 60);
    for case in &vectors.cases {
        assert_eq!(case.now_unix_s, 1_700_000_000, "{}: the clock of this test", case.name);
        let reply = reply(case);
        let classifier = HttpClassify::with_wall_clock(wall);
        let head = classifier.classify(Ok(&reply));
        assert_eq!(classifier.kind(Ok(&reply)), head.kind, "{}: a glance sees the same", case.name);
        match case.needs.as_str() {
            "head" => check(case, head),
            "body" | "success_body" => {
                let body = case.body.as_deref().unwrap().as_bytes();
                check(
                    case,
                    Classify::<http::Response<()>>::refine(&classifier, Head::of(&reply), body, head),
                );
            }
            other => panic!("{}: unknown need {other:?}", case.name),
        }
    }
}

/// The crate carries a copy of the workspace's vectors, so that its package can be tested alone.
#[test]
fn the_copies_agree() {
    let shared = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/dialects.json");
    if let Ok(shared) = std::fs::read_to_string(shared) {
        assert!(shared == include_str!("vectors/dialects.json"), "copy tests/vectors/dialects.json");
    }
}

#[test]
fn a_stamp_is_preferred() {
    let stamp = Signal::new(Kind::Throttled).with_pushback(Pushback::After(Duration::from_secs(9)));
    for status in [200, 500] {
        let mut reply = http::Response::builder().status(status).body(()).unwrap();
        HttpClassify.stamp(&mut reply, stamp);
        assert_eq!(HttpClassify.classify(Ok(&reply)), stamp);
        assert_eq!(HttpClassify.kind(Ok(&reply)), Kind::Throttled);
    }
}
