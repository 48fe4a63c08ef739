//! Any body, behind an error, a success and the head of an event stream.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_herd::{Classify, Head, HttpClassify};

fuzz_target!(|body: &[u8]| {
    for (status, content_type) in [
        (429, "application/json"),
        (403, "application/json"),
        (500, "text/plain"),
        (200, "application/json"),
        (200, "text/event-stream"),
        (409, "application/problem+json"),
    ] {
        let reply =
            http::Response::builder().status(status).header("content-type", content_type).body(()).unwrap();
        let signal = HttpClassify.classify(Ok(&reply));
        let _ = Classify::<http::Response<()>>::refine(&HttpClassify, Head::of(&reply), body, signal);
    }
});
