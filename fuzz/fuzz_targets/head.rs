//! Any head: `status`, then lines of `name: value`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::{Duration, UNIX_EPOCH};
use tower_herd::{Classify, HttpClassify};

fuzz_target!(|input: &[u8]| {
    let Some((&[high, low], lines)) = input.split_first_chunk() else { return };
    let mut reply = http::Response::new(());
    let status = 100 + u16::from_le_bytes([high, low]) % 600;
    *reply.status_mut() = http::StatusCode::from_u16(status).unwrap();
    for line in lines.split(|byte| *byte == b'\n') {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = http::HeaderName::from_bytes(&line[..at]);
        let value = http::HeaderValue::from_bytes(&line[at + 1..]);
        if let (Ok(name), Ok(value)) = (name, value) {
            reply.headers_mut().append(name, value);
        }
    }
    let classifier = HttpClassify::with_wall_clock(|| UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    let signal = classifier.classify(Ok(&reply));
    assert!(signal.quota.is_none_or(|quota| quota.limit > 0));
    *reply.version_mut() = http::Version::HTTP_2;
    let _ = classifier.kind(Ok(&reply));
});
