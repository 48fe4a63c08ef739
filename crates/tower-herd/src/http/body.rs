//! Error bodies: what they add to the head, in the forms that providers really send.
//!
//! The forms are listed in the [module above](super).
//!
//! Only fields that carry errors are looked at, and only exact codes decide: the word "quota" in a
//! text says nothing (it stands in per-minute throttles too, coder/coder#26200), and a message may
//! quote the caller's own prompt.

use super::value::{When, leading_span};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value};
use std::time::Duration;

/// How deep errors are searched inside errors (gateways wrap what they got, also as text).
const DEPTH: u8 = 6;
/// Longer texts are looked at so far only.
const TEXT: usize = 4096;
const HOUR: Duration = Duration::from_secs(3600);

/// What an error body says. Weaker statements come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Says {
    Rejected,
    Failed,
    InProgress,
    Overloaded,
    Throttled,
    Misconfigured,
    UnknownModel,
    DepletedToday,
    Depleted,
}

/// What was found in a body.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) says: Option<Says>,
    /// An HTTP status that the body gives as the error's code.
    pub(crate) status: Option<u16>,
    /// The wait, from a field that is made for it.
    pub(crate) wait: Option<When>,
    /// The wait, from a text for people.
    pub(crate) spoken: Option<Duration>,
    /// GitHub's secondary limit: no header tells how long it takes.
    pub(crate) secondary: bool,
    /// GitHub's text of its primary limit.
    pub(crate) primary: bool,
    /// The depleted quota is that of one model.
    pub(crate) one_model: bool,
    /// The limit is the account's (Discord).
    pub(crate) global: bool,
    /// The headers of the reply that a gateway got.
    pub(crate) headers: HeaderMap,
}

impl Found {
    pub(super) fn say(&mut self, says: Says) {
        self.says = self.says.max(Some(says));
    }
}

/// Reads the body of an error reply.
#[must_use]
pub(crate) fn of_error(body: &[u8]) -> Found {
    let mut found = Found::default();
    match serde_json::from_slice(body) {
        Ok(json) => walk(&json, DEPTH, &mut found),
        Err(_) => text(&String::from_utf8_lossy(&body[..body.len().min(TEXT)]), 0, &mut found),
    }
    found
}

/// Reads the body of a success, for an error that it carries: an `error` member that is not null, or
/// `errors` of which one has a known code (GraphQL).
#[must_use]
pub(crate) fn of_success(body: &[u8]) -> Option<Found> {
    // Most successes end here.
    if !contains(body, b"\"error") {
        return None;
    }
    let json: Value = serde_json::from_slice(body).ok()?;
    let json = match &json {
        Value::Array(items) => items.first()?,
        json => json,
    };
    let object = json.as_object()?;
    let mut found = Found::default();
    // OpenAI's streams end with the whole response, and the error inside it.
    let nested = || object.get("response")?.get("error");
    let is_error = match object.get("error").or_else(nested) {
        Some(error @ Value::Object(_)) => {
            walk(error, DEPTH, &mut found);
            true
        }
        // A word, as Slack sends it: an error of ours only if it is known.
        Some(Value::String(word)) => {
            says_code(word, &mut found);
            text(word, DEPTH, &mut found);
            found.says.is_some()
        }
        _ => match object.get("errors") {
            Some(errors @ Value::Array(_)) => {
                walk(errors, DEPTH, &mut found);
                found.says.is_some()
            }
            _ => false,
        },
    };
    is_error.then_some(found)
}

pub(super) fn contains(text: &[u8], part: &[u8]) -> bool {
    let Some((first, rest)) = part.split_first() else { return true };
    text.iter().enumerate().any(|(at, byte)| byte == first && text[at + 1..].starts_with(rest))
}

fn walk(json: &Value, depth: u8, found: &mut Found) {
    let Some(depth) = depth.checked_sub(1) else { return };
    match json {
        Value::Object(object) => {
            for (key, value) in object {
                member(key, value, depth, found);
            }
            retry_info(object, found);
        }
        Value::Array(items) => items.iter().take(32).for_each(|item| walk(item, depth, found)),
        Value::String(message) => text(message, depth, found),
        _ => {}
    }
}

fn member(key: &str, value: &Value, depth: u8, found: &mut Found) {
    match (key, value) {
        (
            "code" | "type" | "status" | "reason" | "__type" | "error_code" | "errorCode" | "Code",
            Value::String(code),
        ) => {
            says_code(code, found);
        }
        ("code" | "status" | "status_code" | "statusCode", Value::Number(number)) => {
            let status = number.as_u64().and_then(|number| u16::try_from(number).ok());
            found.status = found.status.or(status.filter(|status| (400..600).contains(status)));
        }
        ("headers", Value::Object(headers)) => {
            for (name, value) in headers.iter().take(64) {
                let value = match value {
                    Value::String(value) => HeaderValue::from_str(value).ok(),
                    Value::Number(value) => HeaderValue::from_str(&value.to_string()).ok(),
                    _ => None,
                };
                if let (Ok(name), Some(value)) = (HeaderName::from_bytes(name.as_bytes()), value) {
                    found.headers.insert(name, value);
                }
            }
        }
        ("quotaId" | "quota_limit" | "quotaLimit" | "quota_id", Value::String(quota))
            if quota.contains("PerDay") =>
        {
            found.one_model |= quota.contains("PerModel");
            found.say(Says::DepletedToday);
        }
        (
            "retry_after" | "retryAfter" | "retry_after_seconds" | "resets_in_seconds",
            Value::Number(_) | Value::String(_),
        ) => {
            let is_told = key.ends_with("seconds");
            // Seconds or milliseconds? Over an hour nobody can tell (twilight-rs/twilight#787).
            let when = When::parse(scalar(value).as_bytes())
                .filter(|when| is_told || !matches!(when, When::Number(span) if *span > HOUR));
            found.wait = found.wait.or(when);
        }
        ("retry_after_ms" | "retryAfterMs", Value::Number(_) | Value::String(_)) => {
            found.wait = super::retry_after::retry_after_ms(scalar(value).as_bytes()).or(found.wait);
        }
        ("resets_at", Value::Number(_) | Value::String(_)) => {
            let when = When::parse(scalar(value).as_bytes());
            found.wait = found.wait.or(when.filter(|when| matches!(when, When::Epoch(_) | When::Date(_))));
        }
        ("global", Value::Bool(true)) => found.global = true,
        ("documentation_url", Value::String(url)) => {
            found.secondary |= url.contains("secondary-rate-limits") || url.contains("abuse-rate-limits");
        }
        ("error", Value::String(word)) => {
            says_code(word, found);
            text(word, depth, found);
        }
        (
            "message" | "Message" | "title" | "detail" | "error_description" | "error_message" | "msg"
            | "raw",
            Value::String(message),
        ) => text(message, depth, found),
        (
            "error" | "errors" | "details" | "detail" | "metadata" | "violations" | "parameters"
            | "extensions" | "error_info" | "message" | "raw",
            Value::Object(_) | Value::Array(_),
        ) => walk(value, depth, found),
        _ => {}
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// `google.rpc.RetryInfo`: its delay as text, or as protobuf's two numbers.
fn retry_info(object: &Map<String, Value>, found: &mut Found) {
    let wait = match object.get("retryDelay").or_else(|| object.get("retry_delay")) {
        Some(Value::String(delay)) => match When::parse(delay.as_bytes()) {
            Some(when @ (When::Span(_) | When::Number(_))) => Some(when),
            _ => None,
        },
        Some(Value::Object(delay)) => {
            let part = |name| delay.get(name).and_then(Value::as_u64).unwrap_or(0);
            let nanos = Duration::from_nanos(part("nanos"));
            Some(When::Span(Duration::from_secs(part("seconds")).saturating_add(nanos)))
        }
        _ => None,
    };
    found.wait = wait.or(found.wait);
}

/// A code that stands in a field for codes.
pub(super) fn says_code(code: &str, found: &mut Found) {
    // AWS puts a namespace before and a URL behind: `com.amazon#ThrottlingException:http://..`.
    let code = code.rsplit_once('#').map_or(code, |(_, code)| code);
    let code = code.split_once(':').map_or(code, |(code, _)| code);
    if let Ok(status) = code.parse::<u16>() {
        found.status = found.status.or(Some(status).filter(|status| (400..600).contains(status)));
        return;
    }
    let says = match code {
        "insufficient_quota"
        | "billing_error"
        | "billing_hard_limit_reached"
        | "billing_not_active"
        | "insufficient_balance"
        | "insufficient_credits"
        | "insufficient_funds"
        | "credit_balance_too_low"
        | "exceeded_current_quota_error"
        | "usage_limit_reached" => Says::Depleted,
        "dailyLimitExceeded" => Says::DepletedToday,
        "model_not_found" | "DeploymentNotFound" => Says::UnknownModel,
        "invalid_api_key"
        | "API_KEY_INVALID"
        | "authentication_error"
        | "permission_error"
        | "UNAUTHENTICATED"
        | "PERMISSION_DENIED" => Says::Misconfigured,
        "rate_limit_exceeded"
        | "rate_limit_error"
        | "rate_limited"
        | "ratelimited"
        | "too_many_requests"
        | "RATE_LIMITED"
        | "RATELIMITED"
        | "THROTTLED"
        | "RESOURCE_EXHAUSTED"
        | "rateLimitExceeded"
        | "userRateLimitExceeded"
        | "ThrottlingException"
        | "Throttling"
        | "ThrottledException"
        | "TooManyRequestsException"
        | "RequestLimitExceeded"
        | "ProvisionedThroughputExceededException"
        | "RequestThrottled"
        | "RequestThrottledException"
        | "SlowDown" => Says::Throttled,
        "overloaded_error"
        | "overloaded"
        | "server_overloaded"
        | "server_is_overloaded"
        | "engine_overloaded_error"
        | "slow_down" => Says::Overloaded,
        "api_error"
        | "server_error"
        | "internal_server_error"
        | "internal_error"
        | "INTERNAL"
        | "UNAVAILABLE"
        | "timeout_error" => Says::Failed,
        "idempotency_key_in_use"
        | "IDEMPOTENCY_KEY_IN_USE"
        | "idempotency_concurrent_request"
        | "PREVIOUS_REQUEST_IN_PROGRESS"
        | "TransactionInProgressException" => Says::InProgress,
        "invalid_request_error" | "INVALID_ARGUMENT" | "content_filter" | "context_length_exceeded" => {
            Says::Rejected
        }
        _ => return,
    };
    found.say(says);
}

/// A text for people. It decides little: only phrases that mean one thing.
fn text(message: &str, depth: u8, found: &mut Found) {
    let trimmed = message.trim_ascii_start();
    if depth > 0
        && trimmed.starts_with(['{', '['])
        && let Ok(json) = serde_json::from_str::<Value>(trimmed)
    {
        return walk(&json, depth, found);
    }
    let mut end = message.len().min(TEXT);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let text = message.get(..end).unwrap_or_default().to_ascii_lowercase();
    let has = |words: &str| text.contains(words);
    if has("secondary rate limit") || has("abuse detection mechanism") {
        found.secondary = true;
    }
    if has("api rate limit exceeded") {
        found.primary = true;
    }
    if has("credit balance") && ["too low", "insufficient", "exhausted", "depleted"].into_iter().any(has) {
        found.say(Says::Depleted);
    }
    // What the AWS SDKs make of it, when a gateway forwards the words (aws-samples/bedrock-access-gateway#88).
    if has("(throttlingexception)") || has("(toomanyrequestsexception)") {
        found.say(Says::Throttled);
    }
    // The IETF's draft gives no code, but this title; servers vary the words, and name the header.
    let in_flight = ["outstanding", "in progress", "in-progress", "being processed", "being executed"];
    if has("idempoten") && has("key") && in_flight.into_iter().any(has) {
        found.say(Says::InProgress);
    }
    if text.starts_with("model:") && found.says.is_none() {
        found.say(Says::UnknownModel);
    }
    for words in ["try again in ", "retry in ", "retry after ", "try again after "] {
        if found.spoken.is_none() {
            found.spoken = text.split_once(words).and_then(|(_, rest)| leading_span(rest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(found: &Found) -> Option<f64> {
        let wait = found.wait.map(|when| when.wait(|| Duration::from_secs(1_700_000_000)));
        wait.or(found.spoken).map(|wait| wait.as_secs_f64())
    }

    #[test]
    fn what_error_bodies_say() {
        for (body, says, wait) in [
            (r#"{"error":{"type":"insufficient_quota"}}"#, Some(Says::Depleted), None),
            (r#"{"type":"error","error":{"type":"overloaded_error"}}"#, Some(Says::Overloaded), None),
            (
                r#"{"error":{"message":"Your credit balance is too low to access the API."}}"#,
                Some(Says::Depleted),
                None,
            ),
            (r#"{"error":{"message":"Invalid prompt: what is my credit balance?"}}"#, None, None),
            (
                r#"{"error":{"code":"rate_limit_exceeded","message":"Please try again in 6m0s."}}"#,
                Some(Says::Throttled),
                Some(360.0),
            ),
            (r#"{"error":{"message":"Please retry after 6 seconds."}}"#, None, Some(6.0)),
            (
                r#"{"message":"You are being rate limited.","retry_after":64.57,"global":false}"#,
                None,
                Some(64.57),
            ),
            (r#"{"retry_after":64570}"#, None, None),
            (r#"{"error":{"retry_after_ms":64570}}"#, None, Some(64.57)),
            (r#"{"ok":false,"parameters":{"retry_after":35}}"#, None, Some(35.0)),
            (r#"{"error":{"resets_at":1700000060}}"#, None, Some(60.0)),
            (
                r#"[{"error":{"status":"RESOURCE_EXHAUSTED","details":[{"retryDelay":{"seconds":3,"nanos":5}}]}}]"#,
                Some(Says::Throttled),
                Some(3.000_000_005),
            ),
            (r#"{"__type":"com.amazonaws#ThrottlingException"}"#, Some(Says::Throttled), None),
            (
                r#"{"detail":"An error occurred (ThrottlingException) when calling the InvokeModel operation"}"#,
                Some(Says::Throttled),
                None,
            ),
            (
                r#"{"error":{"message":"{\"error\":{\"code\":\"insufficient_quota\"}}"}}"#,
                Some(Says::Depleted),
                None,
            ),
            (
                r#"{"error":{"code":404,"metadata":{"raw":"{\"type\":\"not_found_error\",\"message\":\"model: x\"}"}}}"#,
                Some(Says::UnknownModel),
                None,
            ),
            (r#"{"error":{"errors":[{"reason":"dailyLimitExceeded"}]}}"#, Some(Says::DepletedToday), None),
            ("null", None, None),
            ("", None, None),
            ("<!DOCTYPE html>", None, None),
            ("slow down, try again in 20s", None, Some(20.0)),
        ] {
            let found = of_error(body.as_bytes());
            assert_eq!((found.says, seconds(&found)), (says, wait), "{body}");
        }
        assert!(of_error(b"You have exceeded a secondary rate limit").secondary);
        assert!(of_error(br#"{"message":"You have triggered an abuse detection mechanism."}"#).secondary);
        assert!(of_error(br#"{"global":true}"#).global);
    }

    #[test]
    fn what_successes_say() {
        assert!(of_success(br#"{"choices":[{"message":"error"}],"error":null}"#).is_none());
        assert!(of_success(br#"{"choices":[{"message":"an \"error\" occurred"}]}"#).is_none());
        assert!(of_success(br#"{"errors":[]}"#).is_none());
        assert!(of_success(br#"{"ok":false,"error":"channel_not_found"}"#).is_none());
        assert_eq!(
            of_success(br#"{"ok":false,"error":"ratelimited"}"#).and_then(|found| found.says),
            Some(Says::Throttled)
        );
        assert_eq!(of_success(br#"{"error":{"code":"429"}}"#).and_then(|found| found.status), Some(429));
        assert_eq!(
            of_success(br#"{"errors":[{"type":"RATE_LIMITED"}]}"#).and_then(|f| f.says),
            Some(Says::Throttled)
        );
    }

    #[test]
    fn depth_is_bounded() {
        let mut body = r#"{"code":"insufficient_quota"}"#.to_owned();
        for _ in 0..20 {
            body = format!(r#"{{"error":{body}}}"#);
        }
        assert_eq!(of_error(body.as_bytes()).says, None);
        let deep = "[".repeat(100_000);
        assert_eq!(of_error(deep.as_bytes()).says, None);
    }

    fn json() -> impl Strategy<Value = Value> {
        let key = prop::sample::select(vec![
            "error",
            "code",
            "type",
            "status",
            "message",
            "metadata",
            "headers",
            "retry_after",
            "retryDelay",
            "details",
            "X-RateLimit-Reset",
            "resets_at",
            "seconds",
            "quotaId",
            "raw",
            "errors",
            "global",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[-0-9smh.{\"é ]{0,12}".prop_map(Value::from),
            prop::sample::select(vec!["insufficient_quota", "429", "try again in 99999999999999999999h"])
                .prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 48, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((key.clone(), inner), 0..6).prop_map(|pairs| {
                    Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (of_error(&body), of_success(&body));
        }

        #[test]
        fn no_json_panics(json in json()) {
            let body = serde_json::to_vec(&json).unwrap();
            let found = of_error(&body);
            std::hint::black_box((found.wait.map(|when| when.wait(|| Duration::ZERO)), of_success(&body)));
        }
    }
}
