//! Parsing of `KEY=VALUE` values.

use std::time::Duration;

use super::settings::SettingsError;

pub(super) fn bad(key: &str, value: &str, expected: &'static str) -> SettingsError {
    SettingsError::BadValue { key: key.into(), value: value.into(), expected }
}

pub(super) fn whole(key: &str, value: &str, min: u64, max: u64) -> Result<u64, SettingsError> {
    let n: u64 = value.trim().parse().map_err(|_| bad(key, value, "a whole number"))?;
    if n < min {
        return Err(SettingsError::OutOfRange {
            key: key.into(),
            value: value.into(),
            range: format!("at least {min}"),
        });
    }
    if n > max {
        return Err(SettingsError::OutOfRange {
            key: key.into(),
            value: value.into(),
            range: format!("at most {max}"),
        });
    }
    Ok(n)
}

pub(super) fn real(key: &str, value: &str, min: f64, max: f64) -> Result<f64, SettingsError> {
    let x: f64 = value.trim().parse().map_err(|_| bad(key, value, "a number"))?;
    if !x.is_finite() || x < min || x > max {
        let range = format!("between {min} and {max}");
        return Err(SettingsError::OutOfRange { key: key.into(), value: value.into(), range });
    }
    Ok(x)
}

/// Seconds, with an optional unit `s` or `ms`.
pub(super) fn seconds(key: &str, value: &str, min: f64, max: f64) -> Result<Duration, SettingsError> {
    let text = value.trim();
    let (number, scale) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(n), _) => (n, 0.001),
        (None, Some(n)) => (n, 1.0),
        (None, None) => (text, 1.0),
    };
    let x: f64 = number.trim().parse().map_err(|_| bad(key, value, "seconds (or 5ms)"))?;
    let s = real(key, &(x * scale).to_string(), min, max)?;
    Ok(crate::seconds(s))
}

pub(super) fn flag(key: &str, value: &str) -> Result<bool, SettingsError> {
    match value.trim() {
        "true" | "yes" | "1" => Ok(true),
        "false" | "no" | "0" => Ok(false),
        _ => Err(bad(key, value, "true or false")),
    }
}

/// `none`, or whole numbers of at least 1.
pub(super) fn list(key: &str, value: &str, max: u64) -> Result<Vec<u32>, SettingsError> {
    let all = |text: &str| text.split(',').map(|n| Ok(whole(key, n, 1, max)? as u32)).collect();
    Ok(optional(value, all)?.unwrap_or_default())
}

/// `none` or something else.
pub(super) fn optional<T>(
    value: &str,
    parse: impl FnOnce(&str) -> Result<T, SettingsError>,
) -> Result<Option<T>, SettingsError> {
    if value.trim() == "none" { Ok(None) } else { parse(value).map(Some) }
}

pub(super) fn choice<T: Copy>(
    key: &str,
    value: &str,
    expected: &'static str,
    options: &[(&str, T)],
) -> Result<T, SettingsError> {
    options
        .iter()
        .find(|(name, _)| *name == value.trim())
        .map(|(_, v)| *v)
        .ok_or_else(|| bad(key, value, expected))
}
