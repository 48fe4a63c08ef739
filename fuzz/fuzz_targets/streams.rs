//! The begin of a stream in both formats, and the parsers below: a verdict on a prefix is that on the whole.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_herd::{
    Classify, Head, HttpClassify, Kind,
    http::event_stream::{Parsed, parse},
};

fuzz_target!(|stream: &[u8]| {
    if let Parsed::Message(_, length) = parse(stream) {
        assert!(length >= 16, "a reader of messages moves on");
    }
    for format in ["text/event-stream", "application/vnd.amazon.eventstream"] {
        let reply = http::Response::builder().header("content-type", format).body(()).unwrap();
        let signal = HttpClassify.classify(Ok(&reply));
        let says = |bytes: &[u8]| {
            Classify::<http::Response<()>>::refine(&HttpClassify, Head::of(&reply), bytes, signal).kind
        };
        let whole = says(stream);
        let prefix = says(&stream[..stream.len() / 2]);
        assert!(prefix == Kind::Success || prefix == whole);
    }
});
