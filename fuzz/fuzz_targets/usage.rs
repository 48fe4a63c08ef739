//! Any body, read for its usage: whole, and in two pieces, which must say the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_herd::usage::{Form, Reader};

fuzz_target!(|input: &[u8]| {
    let Some((&at, body)) = input.split_first() else { return };
    let (head, tail) = body.split_at(usize::from(at).min(body.len()));
    for form in [Form::Json, Form::Events] {
        let (mut whole, mut pieces) = (Reader::new(form), Reader::new(form));
        whole.feed(body);
        pieces.feed(head);
        pieces.feed(tail);
        assert_eq!((whole.usage(), whole.is_final()), (pieces.usage(), pieces.is_final()));
    }
});
