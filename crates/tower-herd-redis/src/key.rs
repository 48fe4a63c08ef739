//! Names in Redis.

use std::fmt::Write as _;

/// The one key of a provider.
///
/// The name is the hash tag, so that the key and its channel lie in one slot of a cluster. Redis takes the
/// first `{...}` of a key for the tag, and hashes the whole key if that is empty: so braces in names are escaped,
/// and the empty name is a lone `%`, which no other name becomes.
pub(crate) fn key(prefix: &str, provider: &str) -> String {
    let mut key = String::with_capacity(prefix.len() + provider.len() + 6);
    key.push_str(prefix);
    key.push_str(":v1:{");
    for sign in provider.chars() {
        match sign {
            '{' | '}' | '%' => {
                write!(key, "%{:02X}", u32::from(sign)).expect("a string takes all");
            }
            sign => key.push(sign),
        }
    }
    if provider.is_empty() {
        key.push('%');
    }
    key.push('}');
    key
}

/// The channel on which its holders are woken.
pub(crate) fn channel(key: &str) -> String {
    format!("{key}:w")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_its_own_key_and_the_name_is_the_hash_tag() {
        assert_eq!(key("herd", "llm"), "herd:v1:{llm}");
        assert_eq!(key("herd", "a{b}c%"), "herd:v1:{a%7Bb%7Dc%25}");
        assert_eq!(key("herd", ""), "herd:v1:{%}");
        assert_eq!(key("herd", "%"), "herd:v1:{%25}");
        assert_eq!(key("herd", "größe 🐎"), "herd:v1:{größe 🐎}");
        assert_eq!(channel("herd:v1:{llm}"), "herd:v1:{llm}:w");
        let names = ["", "%", "%25", "{", "}", "{}", "%7B", "a", "a}", "a%7D"];
        let mut keys: Vec<_> = names.iter().map(|name| key("herd", name)).collect();
        for key in &keys {
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
            assert!(!key.contains("{}"), "{key}");
        }
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), names.len());
    }
}
