//! How a provider tells its wait and its limits: the headers of a reply.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, HeaderName, HeaderValue, RETRY_AFTER};

use super::quota::{Bucket, Meter};

/// The form in which a wait is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HintForm {
    /// `Retry-After: 7`, rounded up to whole seconds.
    #[default]
    Seconds,
    /// `retry-after-ms: 6500`.
    Millis,
    /// `Retry-After` with an HTTP date, rounded up to a whole second, beside a `Date` header.
    Date,
}

/// Which family of limit headers the replies carry, on success and on refusal.
///
/// They describe rates only: nobody publishes a concurrency ceiling this way, so a provider limited
/// by concurrency alone sends none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitHeaders {
    /// None.
    #[default]
    None,
    /// `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, the reset as a Go duration until full.
    OpenAi,
    /// `anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}`, the reset as RFC 3339.
    Anthropic,
    /// `RateLimit-Policy` and `RateLimit` structured fields.
    Ietf,
    /// `x-ratelimit-{limit,remaining,used,reset}`, the reset in epoch seconds.
    GitHub,
}

/// Writes a wait in its form and returns the wait that a reader will understand.
pub(crate) fn write_hint(
    headers: &mut HeaderMap,
    form: HintForm,
    wait: Duration,
    wall: SystemTime,
) -> Duration {
    match form {
        HintForm::Seconds => {
            let s = ceil_secs(wait);
            headers.insert(RETRY_AFTER, HeaderValue::from(s));
            Duration::from_secs(s)
        }
        HintForm::Millis => {
            let ms = u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            headers.insert(HeaderName::from_static("retry-after-ms"), HeaderValue::from(ms));
            Duration::from_millis(ms)
        }
        HintForm::Date => {
            let until = ceil_to_second(wall + wait);
            insert(headers, "retry-after", &httpdate::fmt_http_date(until));
            headers.insert(DATE, date(wall));
            until.duration_since(wall).unwrap_or_default()
        }
    }
}

/// Writes the limit headers of a family for the buckets of a meter.
pub(crate) fn write_limits(
    headers: &mut HeaderMap,
    family: LimitHeaders,
    meter: &mut Meter,
    now: Duration,
    wall: SystemTime,
) {
    if family == LimitHeaders::None {
        return;
    }
    if let Some(b) = meter.requests() {
        write_bucket(headers, family, "requests", b, now, wall);
    }
    if let Some(b) = meter.tokens() {
        write_bucket(headers, family, "tokens", b, now, wall);
    }
    headers.entry(DATE).or_insert_with(|| date(wall));
}

fn write_bucket(
    headers: &mut HeaderMap,
    family: LimitHeaders,
    unit: &str,
    bucket: &mut Bucket,
    now: Duration,
    wall: SystemTime,
) {
    let limit = bucket.rate().burst.floor() as u64;
    let remaining = bucket.remaining(now);
    let full = bucket.until_full(now);
    match family {
        LimitHeaders::None => {}
        LimitHeaders::OpenAi => {
            insert(headers, &format!("x-ratelimit-limit-{unit}"), &limit.to_string());
            insert(headers, &format!("x-ratelimit-remaining-{unit}"), &remaining.to_string());
            insert(headers, &format!("x-ratelimit-reset-{unit}"), &go_duration(full));
        }
        LimitHeaders::Anthropic => {
            let reset = rfc3339(ceil_to_second(wall + full));
            insert(headers, &format!("anthropic-ratelimit-{unit}-limit"), &limit.to_string());
            insert(headers, &format!("anthropic-ratelimit-{unit}-remaining"), &remaining.to_string());
            insert(headers, &format!("anthropic-ratelimit-{unit}-reset"), &reset);
        }
        LimitHeaders::Ietf => {
            let window = ceil_secs(crate::seconds(limit as f64 / bucket.rate().per_second)).max(1);
            append(headers, "ratelimit-policy", &format!("\"{unit}\";q={limit};w={window}"));
            append(headers, "ratelimit", &format!("\"{unit}\";r={remaining};t={}", ceil_secs(full)));
        }
        LimitHeaders::GitHub => {
            let reset =
                ceil_to_second(wall + full).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            insert(headers, "x-ratelimit-limit", &limit.to_string());
            insert(headers, "x-ratelimit-remaining", &remaining.to_string());
            insert(headers, "x-ratelimit-used", &limit.saturating_sub(remaining).to_string());
            insert(headers, "x-ratelimit-reset", &reset.as_secs().to_string());
        }
    }
}

fn insert(headers: &mut HeaderMap, name: &str, value: &str) {
    if let (Ok(n), Ok(v)) = (HeaderName::try_from(name), HeaderValue::from_str(value)) {
        headers.insert(n, v);
    }
}

fn append(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(v) = HeaderValue::from_str(value) {
        headers.append(HeaderName::from_static(name), v);
    }
}

fn date(wall: SystemTime) -> HeaderValue {
    HeaderValue::from_str(&httpdate::fmt_http_date(wall))
        .unwrap_or_else(|_| HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 GMT"))
}

fn ceil_secs(d: Duration) -> u64 {
    d.as_secs() + u64::from(d.subsec_nanos() > 0)
}

fn ceil_to_second(t: SystemTime) -> SystemTime {
    let since = t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(ceil_secs(since))
}

/// A duration as Go prints it, in whole milliseconds (rounded up): `20ms`, `7.66s`, `6m0s`, `1h2m3.5s`.
pub(crate) fn go_duration(d: Duration) -> String {
    let ms = u64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
    if ms == 0 {
        return "0s".into();
    }
    if ms < 1000 {
        return format!("{ms}ms");
    }
    let (hours, minutes) = (ms / 3_600_000, ms / 60_000 % 60);
    let (secs, frac) = (ms / 1000 % 60, ms % 1000);
    let secs = if frac == 0 {
        format!("{secs}s")
    } else {
        format!("{secs}.{}s", format!("{frac:03}").trim_end_matches('0'))
    };
    match (hours, minutes) {
        (0, 0) => secs,
        (0, m) => format!("{m}m{secs}"),
        (h, m) => format!("{h}h{m}m{secs}"),
    }
}

/// A whole second as RFC 3339 in UTC.
pub(crate) fn rfc3339(t: SystemTime) -> String {
    let s = t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (s / 86_400, s % 86_400);
    // Days since 0000-03-01, in 400-year eras: the leap day is the last day of such a year.
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let in_year = day - (365 * year + year / 4 - year / 100);
    let mp = (5 * in_year + 2) / 153;
    let dom = in_year - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{dom:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::super::quota::{Quota, Rate};
    use super::*;

    fn at(s: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(s)
    }

    #[test]
    fn go_durations_print_as_go_does() {
        for (ms, text) in [
            (0, "0s"),
            (20, "20ms"),
            (1000, "1s"),
            (7660, "7.66s"),
            (360_000, "6m0s"),
            (3_723_500, "1h2m3.5s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn dates_print_as_rfc_3339() {
        assert_eq!(rfc3339(at(0)), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(at(1_700_000_000)), "2023-11-14T22:13:20Z");
        assert_eq!(rfc3339(at(951_782_400)), "2000-02-29T00:00:00Z");
    }

    #[test]
    fn a_date_hint_is_never_shorter_than_the_wait() {
        let wall = at(1_700_000_000) + Duration::from_millis(700);
        let mut h = HeaderMap::new();
        let told = write_hint(&mut h, HintForm::Date, Duration::from_secs(1), wall);
        assert_eq!(told, Duration::from_millis(1300));
        assert_eq!(h["retry-after"], "Tue, 14 Nov 2023 22:13:22 GMT");
        assert_eq!(h["date"], "Tue, 14 Nov 2023 22:13:20 GMT");
    }

    #[test]
    fn millis_and_seconds_round_up() {
        let mut h = HeaderMap::new();
        write_hint(&mut h, HintForm::Millis, Duration::from_micros(1500), at(0));
        write_hint(&mut h, HintForm::Seconds, Duration::from_millis(1001), at(0));
        assert_eq!(h["retry-after-ms"], "2");
        assert_eq!(h["retry-after"], "2");
    }

    #[test]
    fn each_family_tells_the_same_bucket() {
        let mut meter = Meter::new(Quota::requests(Rate::per_second(20.0)), Duration::ZERO);
        for _ in 0..5 {
            meter.charge(Duration::ZERO, 1.0);
        }
        let mut write = |family| {
            let mut h = HeaderMap::new();
            write_limits(&mut h, family, &mut meter, Duration::ZERO, at(1_700_000_000));
            h
        };
        let openai = write(LimitHeaders::OpenAi);
        assert_eq!(openai["x-ratelimit-limit-requests"], "20");
        assert_eq!(openai["x-ratelimit-remaining-requests"], "15");
        assert_eq!(openai["x-ratelimit-reset-requests"], "250ms");
        assert_eq!(
            write(LimitHeaders::Anthropic)["anthropic-ratelimit-requests-reset"],
            "2023-11-14T22:13:21Z"
        );
        assert_eq!(write(LimitHeaders::Ietf)["ratelimit"], "\"requests\";r=15;t=1");
        assert_eq!(write(LimitHeaders::GitHub)["x-ratelimit-reset"], "1700000001");
        assert!(write(LimitHeaders::None).is_empty());
    }
}
