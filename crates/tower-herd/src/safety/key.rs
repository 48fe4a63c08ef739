//! One name for one intended call, however often and in whatever spelling it is asked for.

use crate::Key;
use serde_json::Value;
use std::{fmt, str::FromStr};
use xxhash_rust::xxh3::Xxh3;

/// 128 bits that name one intended call of a tool. See [`idempotency_key`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(u128);

/// The idempotency key of a call of `tool` with these `arguments` (JSON, as the model wrote them), made for
/// `token`.
///
/// A model that calls again after a lost reply mints a new call id each time, so that id is no key
/// (openai/openai-agents-python#4254). What stays the same is what is called with what, and on whose
/// account: `token` is the caller's own name for the step (a task id, an order number, the user's message).
/// **Two calls with the same three are one call**: whoever wants the same thing twice gives two tokens.
///
/// The arguments are taken by their meaning: order of members, spacing, escapes, and `1.0` for `1` make no
/// difference; the order of a list does, and so does `null` for a missing member. Of a member given twice
/// the last counts, and a fraction is a double, as for most readers of JSON. What is no JSON, nests deeper
/// than 128, or has a number that a double cannot tell from its neighbours (from 2^53 on, with a fraction,
/// an exponent or more than 64 bits) is taken byte by byte: at worst, two spellings of one call get two
/// keys, and never two calls one.
///
/// The hash is XXH3 with 128 bits over length-prefixed parts, the same on every machine and in every
/// version of this crate. By accident, a billion keys collide with a probability of 10^-21. It does not
/// withstand an adversary who composes both argument lists; a server that compares the payload with the
/// one it has stored (422 in the IETF's draft of the header) notices. Where neither will do, hash the parts
/// with SHA-256 and hand over the first half: `IdempotencyKey::from(u128)`.
///
/// ```
/// use tower_herd::safety::idempotency_key;
///
/// let key = idempotency_key("charge", r#"{"order":7,"cents":1200}"#, "task-4711");
/// assert_eq!(key, idempotency_key("charge", r#"{ "cents": 1200.0, "order": 7 }"#, "task-4711"));
/// assert_ne!(key, idempotency_key("charge", r#"{"order":7,"cents":1200}"#, "task-4712"));
/// let header = ("idempotency-key", key.to_string());
/// # assert_eq!(header.1.len(), 32);
/// ```
#[must_use]
pub fn idempotency_key(tool: &str, arguments: &str, token: &str) -> IdempotencyKey {
    let mut canonical = Vec::with_capacity(arguments.len());
    let parsed = serde_json::from_str(arguments).ok();
    let is_canonical = parsed.is_some_and(|value| write(&value, &mut canonical).is_some());
    let (form, arguments) = if is_canonical { (b'j', &*canonical) } else { (b't', arguments.as_bytes()) };
    let mut hash = Xxh3::new();
    for part in [tool.as_bytes(), token.as_bytes(), &[form], arguments] {
        // Prefixed by its length, or ("ab", "c") and ("a", "bc") were one.
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    IdempotencyKey(hash.digest128())
}

/// Writes `value` so that equal values are equal bytes; none if that cannot be promised.
fn write(value: &Value, out: &mut Vec<u8>) -> Option<()> {
    match value {
        Value::Null | Value::Bool(_) | Value::String(_) => serde_json::to_writer(out, value).ok()?,
        Value::Number(number) => write_number(number, out)?,
        Value::Array(items) => {
            out.push(b'[');
            for item in items {
                write(item, out)?;
                out.push(b',');
            }
            out.push(b']');
        }
        Value::Object(members) => {
            // Sorted here: whether the map is depends on features that any crate may turn on.
            let mut members: Vec<_> = members.iter().collect();
            members.sort_unstable_by_key(|(name, _)| name.as_str());
            out.push(b'{');
            for (name, value) in members {
                serde_json::to_writer(&mut *out, name).ok()?;
                out.push(b':');
                write(value, out)?;
                out.push(b',');
            }
            out.push(b'}');
        }
    }
    Some(())
}

fn write_number(number: &serde_json::Number, out: &mut Vec<u8>) -> Option<()> {
    /// Below this, each integer has a floating-point number of its own.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let text = if number.is_u64() || number.is_i64() {
        number.to_string()
    } else {
        let float = number.as_f64().filter(|float| float.abs() < EXACT)?;
        // Also -0.0, which is 0.
        if float == float.trunc() { (float as i64).to_string() } else { float.to_string() }
    };
    out.extend_from_slice(text.as_bytes());
    Some(())
}

impl IdempotencyKey {
    /// The number behind the key.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }
}
impl From<u128> for IdempotencyKey {
    fn from(key: u128) -> Self {
        IdempotencyKey(key)
    }
}
/// For hashing only: 64 bits do not name a call.
impl From<IdempotencyKey> for Key {
    fn from(key: IdempotencyKey) -> Self {
        Key::from(key.0 as u64)
    }
}
/// 32 hexadecimal digits, fit for a header.
impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl FromStr for IdempotencyKey {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(IdempotencyKey)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(arguments: &str) -> IdempotencyKey {
        idempotency_key("tool", arguments, "token")
    }

    // Frozen: a key that changes with the version of this crate is no key for a call made before.
    #[test]
    fn stable_across_versions() {
        let key = idempotency_key("charge", r#"{"order":7,"cents":1200}"#, "task-4711");
        assert_eq!(key.to_string(), FROZEN);
        assert_eq!(FROZEN.parse::<IdempotencyKey>().unwrap(), key);
        assert_eq!(IdempotencyKey::from(key.get()), key);
        assert_eq!(Key::from(key).get(), key.get() as u64);
    }
    const FROZEN: &str = "e5fc227b5a31cbdaa25e29780ceb65b0";

    #[test]
    fn spelling_does_not_matter() {
        for (one, other) in [
            (r#"{"a":1,"b":[true,null]}"#, " { \"b\" : [ true , null ] , \"a\" : 1 } "),
            (r#"{"a":{"y":1,"x":2}}"#, r#"{"a":{"x":2,"y":1}}"#),
            (r#"{"a":"A\n"}"#, r#"{"a":"\u0041\u000a"}"#),
            ("[1, 100, 0]", "[1.0, 1e2, -0.0]"),
            ("0.5", "5e-1"),
            (r#"{"a":2}"#, r#"{"a":1,"a":2}"#),
        ] {
            assert_eq!(of(one), of(other), "{one} {other}");
        }
    }

    #[test]
    fn meaning_does() {
        let calls = [
            "{}",
            "[]",
            "null",
            "",
            "not JSON",
            r#"{"a":null}"#,
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":true}"#,
            r#"{"a":-1}"#,
            r#"{"a":1.5}"#,
            r#"{"A":1}"#,
            r#"{"a":[1,2]}"#,
            r#"{"a":[2,1]}"#,
            r#"{"a":[[1],2]}"#,
            r#"{"a":[1,[2]]}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a":1,"b":1}"#,
            "[18446744073709551615]",
            // Too large for a number of 64 bits: next to each other, and not one.
            "[18446744073709551616]",
            "[18446744073709551617]",
            "[9007199254740993.0]",
            "[9007199254740992.0]",
            "[9007199254740993]",
        ];
        for (i, one) in calls.iter().enumerate() {
            for other in &calls[i + 1..] {
                assert_ne!(of(one), of(other), "{one} {other}");
            }
        }
        assert_ne!(idempotency_key("ab", "1", "c"), idempotency_key("a", "1", "bc"));
        assert_ne!(idempotency_key("a", "1", "b"), idempotency_key("b", "1", "a"));
        // As text and as JSON: what is not read may not look like what is.
        assert_ne!(of("{,}"), of("{}"));
        let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
        assert_ne!(of(&deep), of(&deep.replace('1', "2")), "by its bytes");
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1000..1000_i32).prop_map(|n| Value::from(f64::from(n) / 8.0)),
            "[a-z\"\\\\é ]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"é]{0,2}", inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    /// The same value in another spelling: members backwards, spaces, floats.
    fn respell(value: &Value) -> String {
        match value {
            Value::Object(members) => {
                let mut members: Vec<_> = members
                    .iter()
                    .map(|(k, v)| format!("{} : {}", Value::from(k.as_str()), respell(v)))
                    .collect();
                members.reverse();
                format!("{{ {} }}", members.join(" , "))
            }
            Value::Array(items) => {
                format!("[ {} ]", items.iter().map(respell).collect::<Vec<_>>().join(" ,"))
            }
            Value::Number(n) if n.as_i64().is_some_and(|n| n.abs() < 1 << 50) => format!("{n}.0"),
            other => other.to_string(),
        }
    }

    /// Equal in meaning: 1.0 is 1.
    fn same(one: &Value, other: &Value) -> bool {
        match (one, other) {
            (Value::Number(one), Value::Number(other)) => match (one.as_i64(), other.as_i64()) {
                (Some(one), Some(other)) => one == other,
                _ => one.as_f64() == other.as_f64(),
            },
            (Value::Array(one), Value::Array(other)) => {
                one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
            }
            (Value::Object(one), Value::Object(other)) => {
                one.len() == other.len()
                    && one.iter().all(|(k, v)| other.get(k).is_some_and(|other| same(v, other)))
            }
            (one, other) => one == other,
        }
    }

    proptest! {
        #[test]
        fn a_key_is_that_of_the_meaning(one in json(), other in json()) {
            prop_assert_eq!(of(&one.to_string()), of(&respell(&one)));
            prop_assert_eq!(of(&one.to_string()) == of(&other.to_string()), same(&one, &other));
        }

        #[test]
        fn any_text_has_a_key(text in ".{0,60}", tool in ".{0,9}", token in ".{0,9}") {
            let key = idempotency_key(&tool, &text, &token);
            prop_assert_eq!(key.to_string().parse::<IdempotencyKey>().unwrap(), key);
        }
    }
}
