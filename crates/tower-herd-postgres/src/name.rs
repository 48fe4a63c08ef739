//! Names of schemas, tables and columns, quoted so that each of them is a name and nothing else.

use std::{error::Error, fmt};

/// A name that PostgreSQL would refuse, or silently cut: empty, longer than 63 bytes, or with a NUL in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidName(String);

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no name for PostgreSQL: 1 to 63 bytes without NUL", self.0)
    }
}

impl Error for InvalidName {}

/// The name in double quotes, with its own doubled. Capitals stay capitals.
pub(crate) fn quote(name: &str) -> Result<String, InvalidName> {
    if name.is_empty() || name.len() > 63 || name.contains('\0') {
        return Err(InvalidName(name.to_owned()));
    }
    Ok(format!("\"{}\"", name.replace('"', "\"\"")))
}

/// Any text as an expression. In hexadecimal digits nothing can end the literal, whatever the text and the
/// server's settings for quotes and backslashes.
pub(crate) fn text(value: &str) -> String {
    use fmt::Write as _;
    let mut sql = String::with_capacity(2 * value.len() + 40);
    sql += "convert_from(decode('";
    for byte in value.bytes() {
        // Writing into a string does not fail.
        write!(sql, "{byte:02x}").ok();
    }
    sql += "', 'hex'), 'UTF8')";
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_one_name() {
        assert_eq!(quote("herd").unwrap(), "\"herd\"");
        assert_eq!(quote("My Herd").unwrap(), "\"My Herd\"");
        assert_eq!(quote("a\"; DROP TABLE b; --").unwrap(), "\"a\"\"; DROP TABLE b; --\"");
        for bad in ["", "a\0b", &"x".repeat(64)] {
            assert_eq!(quote(bad), Err(InvalidName(bad.to_owned())));
        }
        assert!(quote(&"x".repeat(63)).is_ok());
    }

    #[test]
    fn a_text_is_digits() {
        assert_eq!(text(""), "convert_from(decode('', 'hex'), 'UTF8')");
        assert_eq!(text("a'\u{e9}\\"), "convert_from(decode('6127c3a95c', 'hex'), 'UTF8')");
    }
}
