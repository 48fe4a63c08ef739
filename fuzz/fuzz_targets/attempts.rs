//! Any values of the headers that tell of attempts: a byte that names one, then a line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokio::time::Instant;
use tower_herd::{
    Task,
    attempts::{HEADER, MOST_CALLS, MOST_TIME, Told},
};

const NAMES: [&str; 5] = [
    "tower-herd-attempts",
    "grpc-previous-rpc-attempts",
    "grpc-timeout",
    "x-envoy-attempt-count",
    "x-envoy-expected-rq-timeout-ms",
];

fuzz_target!(|input: &[u8]| {
    let mut headers = http::HeaderMap::new();
    for line in input.split(|byte| *byte == b'\n') {
        let Some((which, value)) = line.split_first() else { continue };
        if let Ok(value) = http::HeaderValue::from_bytes(value) {
            headers.append(NAMES[usize::from(*which) % NAMES.len()], value);
        }
    }
    let told = Told::of(&headers);
    assert!(told.made.is_none_or(|calls| calls <= MOST_CALLS));
    assert!(told.left.is_none_or(|calls| calls <= MOST_CALLS));
    assert!(told.time.is_none_or(|time| time <= MOST_TIME));
    let now = Instant::now();
    let task = told.narrow(Task::new(1).allowance(3).deadline(now), now);
    assert!((1..=3).contains(&task.left()) && task.deadline_at() <= Some(now));
    // What is handed on can be read, and says no more.
    let mut next = http::HeaderMap::new();
    next.insert(HEADER, Told::next(Some(&task), 1, now).to_string().try_into().unwrap());
    let next = Told::of(&next);
    assert!(next.left <= Some(3) && next.made >= told.made);
});
