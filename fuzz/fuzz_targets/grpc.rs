//! gRPC's values: the status, its pushback and its details.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_herd::http::grpc;

fuzz_target!(|value: &[u8]| {
    assert!(grpc::code(value) <= 16);
    let _ = grpc::pushback(value);
    let _ = grpc::retry_info(value);
});
