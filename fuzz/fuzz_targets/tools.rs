//! Arguments as models write them: any text has a key, and JSON written anew has the same one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_herd::idempotency_key;

fuzz_target!(|arguments: &str| {
    let key = idempotency_key("tool", arguments, "token");
    assert_eq!(key.to_string().parse(), Ok(key));
    assert_ne!(key, idempotency_key("tool", arguments, "other"));
    let spaced = format!(" {arguments}\n");
    if serde_json::from_str::<serde_json::Value>(arguments).is_ok_and(|json| json.is_string()) {
        assert_eq!(key, idempotency_key("tool", &spaced, "token"));
    }
});
