//! Public failure reports about other software, as cases: what came over the wire, and what it means.
#![cfg(feature = "http")]

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use std::{
    convert::Infallible,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_herd::{
    BoxError, Classify, ClassifyLayer, Executed, Fleet, HttpClassify, Kind, Pushback, Reach, Refusal,
    RefusalKind, ResendAdvice, Safety, Signal, classify_body,
};

fn wall() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

/// One reply of a provider.
#[derive(Clone, Default)]
struct Reply {
    status: u16,
    headers: Vec<(&'static str, &'static str)>,
    body: &'static str,
}

fn reply(status: u16) -> Reply {
    Reply { status, ..Reply::default() }
}

impl Reply {
    fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }
    fn body(mut self, body: &'static str) -> Self {
        self.body = body;
        self
    }
    fn http(&self) -> Response<Full<Bytes>> {
        let mut builder = Response::builder().status(self.status);
        for (name, value) in &self.headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Full::from(self.body)).unwrap()
    }

    /// What the layers outside of the sensor see; the body is whole behind it.
    async fn signal(&self) -> Signal {
        self.signal_by(HttpClassify::with_wall_clock(wall)).await
    }

    async fn signal_by(&self, classify: impl Classify<Response<Full<Bytes>>> + Clone) -> Signal {
        let provider = Fleet::local().provider("p");
        let sensor = ClassifyLayer::new(&provider).classify(classify).read_success(16 * 1024);
        let inner = service_fn(|()| async { Ok::<_, Infallible>(self.http()) });
        let sent = sensor.layer(inner).oneshot(()).await.unwrap();
        let signal = HttpClassify.classify(Ok(&sent));
        let body = sent.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, self.body, "the caller gets the body whole");
        signal
    }
}

const fn after(seconds: u64) -> Pushback {
    Pushback::After(Duration::from_secs(seconds))
}

#[tokio::test]
async fn kind_and_wait() {
    use Kind::{Depleted, Failed, Misconfigured, Overloaded, Rejected, Throttled};
    let table = [
        (
            "langchain-ai/langchainjs#1929: an empty account is not a throttle",
            reply(429).body(r#"{"error":{"type":"insufficient_quota","code":"insufficient_quota"}}"#),
            Depleted,
            Pushback::None,
        ),
        (
            "coder/coder#26200, dcdpr/jp#1081: the word quota does not make a throttle fatal",
            reply(429)
                .header("retry-after", "7")
                .body(r#"{"error":{"message":"Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"}}"#),
            Throttled,
            after(7),
        ),
        (
            "google-gemini/gemini-cli#10925: a daily quota is not back in 36 s",
            reply(429).body(
                r#"{"error":{"code":429,"status":"RESOURCE_EXHAUSTED","details":[
                    {"@type":"type.googleapis.com/google.rpc.ErrorInfo","metadata":{"quota_limit":"GenerateContentRequestsPerDayPerProject"}},
                    {"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"36s"}]}}"#,
            ),
            Depleted,
            Pushback::None,
        ),
        (
            "google-gemini/gemini-cli#10925, the quota as a violation",
            reply(429).body(
                r#"{"error":{"code":429,"details":[{"@type":"type.googleapis.com/google.rpc.QuotaFailure","violations":[
                    {"quotaId":"GenerateRequestsPerMinutePerProjectPerModel"},
                    {"quotaId":"GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}]}}"#,
            ),
            Depleted,
            Pushback::None,
        ),
        (
            "tashfeenahmed/freellmapi#158: a minute is a minute, however little of the day is left",
            reply(429)
                .header("x-ratelimit-remaining-requests-minute", "0")
                .header("x-ratelimit-reset-requests-minute", "20")
                .header("x-ratelimit-remaining-requests-day", "3")
                .header("x-ratelimit-reset-requests-day", "40000"),
            Throttled,
            after(20),
        ),
        (
            "the same, with the day used up",
            reply(429)
                .header("x-ratelimit-remaining-requests-minute", "17")
                .header("x-ratelimit-reset-requests-minute", "20")
                .header("x-ratelimit-remaining-requests-day", "0")
                .header("x-ratelimit-reset-requests-day", "40000"),
            Depleted,
            after(40_000),
        ),
        (
            "aws-samples/bedrock-access-gateway#88: a throttle that a gateway turned into a 500",
            reply(500).body(
                r#"{"detail":"An error occurred (ThrottlingException) when calling the Converse operation (reached max retries: 4): Too many requests"}"#,
            ),
            Throttled,
            Pushback::None,
        ),
        (
            "anthropics/anthropic-sdk-python#1258: overload as the first event of a 200",
            reply(200).header("content-type", "text/event-stream").body(
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n",
            ),
            Overloaded,
            Pushback::None,
        ),
        (
            "BerriAI/litellm#8448, songquanpeng/one-api#2148: a 200 that carries a 429, its reset in ms",
            reply(200).header("content-type", "application/json").body(
                r#"{"error":{"code":429,"message":"Rate limit exceeded: free-models-per-min","metadata":{"headers":
                    {"X-RateLimit-Limit":"20","X-RateLimit-Remaining":"0","X-RateLimit-Reset":"1700000012000"}}},"choices":null}"#,
            ),
            Throttled,
            after(12),
        ),
        (
            "octokit/plugin-throttling.js#566: GitHub's secondary limit, though much remains of the primary",
            reply(403)
                .header("x-ratelimit-remaining", "4800")
                .header("x-ratelimit-reset", "1700003500")
                .body(r#"{"message":"You have exceeded a secondary rate limit. Please wait a few minutes before you try again."}"#),
            Throttled,
            after(60),
        ),
        (
            "octokit/plugin-throttling.js#438: and in the words of before",
            reply(403).body(r#"{"message":"You have triggered an abuse detection mechanism. Please retry your request again later."}"#),
            Throttled,
            after(60),
        ),
        (
            "octokit/plugin-throttling.js#438: and by its link alone",
            reply(403).body(r#"{"message":"Slow down","documentation_url":"https://docs.github.com/rest/overview/rate-limits-for-the-rest-api#about-secondary-rate-limits"}"#),
            Throttled,
            after(60),
        ),
        (
            "hub4j/github-api#2009: no header at all",
            reply(403).body(r#"{"message":"You have exceeded a secondary rate limit and have been temporarily blocked from content creation."}"#),
            Throttled,
            after(60),
        ),
        (
            "hub4j/github-api#2009: a plain 403 stays one",
            reply(403).body(r#"{"message":"Resource not accessible by integration"}"#),
            Misconfigured,
            Pushback::None,
        ),
        (
            "alchemy-run/distilled#362: a 429 without JSON",
            reply(429).header("content-type", "text/html").body("<!DOCTYPE html><title>1015</title>"),
            Throttled,
            Pushback::None,
        ),
        (
            "async-openai: a 429 with null",
            reply(429).header("content-type", "application/json").body("null"),
            Throttled,
            Pushback::None,
        ),
        (
            "KarpelesLab/teamclaude#309: a 429 without any hint",
            reply(429).body(r#"{"type":"error","error":{"type":"rate_limit_error","message":"Error"}}"#),
            Throttled,
            Pushback::None,
        ),
        (
            "BerriAI/litellm#16092: a drained account answers 400",
            reply(400).body(
                r#"{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API."}}"#,
            ),
            Depleted,
            Pushback::None,
        ),
        (
            "openai/openai-python#937: only a reset header",
            reply(429).header("x-rate-limit-reset-tokens", "55"),
            Throttled,
            after(55),
        ),
        (
            "openai/openai-dotnet#838: sentinels say nothing",
            reply(429)
                .header("x-ratelimit-limit-tokens", "-1")
                .header("x-ratelimit-remaining-tokens", "-1")
                .header("x-ratelimit-reset-tokens", "0"),
            Throttled,
            Pushback::None,
        ),
        (
            "pnp/pnpjs#1112, Azure/azure-sdk-for-net#5268: seconds are seconds",
            reply(429).header("retry-after", "5"),
            Throttled,
            after(5),
        ),
        (
            "Azure/azure-sdk-for-net#5268: and milliseconds are milliseconds",
            reply(429).header("x-ms-retry-after-ms", "5000"),
            Throttled,
            after(5),
        ),
        (
            "twilight-rs/twilight#787, discord/discord-api-docs#4722: Discord's seconds",
            reply(429)
                .header("retry-after", "65")
                .header("x-ratelimit-global", "true")
                .body(r#"{"message":"You are being rate limited.","retry_after":64.57,"global":true}"#),
            Throttled,
            after(65),
        ),
        (
            "twilight-rs/twilight#787: a number that may as well be milliseconds is not slept",
            reply(429).body(r#"{"message":"You are being rate limited.","retry_after":64570,"global":true}"#),
            Throttled,
            Pushback::None,
        ),
        ("openai/openai-java#853: a negative wait is no hint", reply(429).header("retry-after", "-5"), Throttled, Pushback::None),
        (
            "curl/curl#15833: a date in the past is zero",
            reply(429).header("retry-after", "Tue, 14 Nov 2023 22:13:19 GMT"),
            Throttled,
            after(0),
        ),
        (
            "will-ockmore/httpx-retries#13: the server's own clock counts",
            reply(429)
                .header("date", "Tue, 14 Nov 2023 23:13:20 GMT")
                .header("retry-after", "Tue, 14 Nov 2023 23:13:30 GMT"),
            Throttled,
            after(10),
        ),
        (
            "block/goose#9161: a past epoch is zero, never a span",
            reply(429).header("x-ratelimit-remaining", "0").header("x-ratelimit-reset", "1699999990"),
            Throttled,
            after(0),
        ),
        (
            "urllib3/urllib3#3743: what overflows every timer is told whole, and slept by nobody",
            reply(429).header("retry-after", "9007199254740993"),
            Throttled,
            Pushback::After(Duration::from_micros(9_007_199_254_740_993).checked_sub(Duration::from_secs(1_700_000_000)).unwrap()),
        ),
        (
            "urllib3/urllib3#1338: an hour is an hour",
            reply(429).header("retry-after", "3600"),
            Throttled,
            after(3600),
        ),
        (
            "openai/openai-python#3555: more than a minute is not replaced by less",
            reply(429).header("retry-after", "61"),
            Throttled,
            after(61),
        ),
        (
            "apache/iggy#4168: a 503 with a hint is honoured too",
            reply(503).header("retry-after", "9"),
            Overloaded,
            after(9),
        ),
        (
            "BerriAI/litellm#5225: a filtered prompt is the request's fault",
            reply(400).body(r#"{"error":{"code":"content_filter","message":"The response was filtered"}}"#),
            Rejected,
            Pushback::None,
        ),
        (
            "an unknown model is this rung's fault, not the request's",
            reply(404).body(r#"{"error":{"code":"model_not_found","message":"The model `x` does not exist"}}"#),
            Misconfigured,
            Pushback::None,
        ),
        ("a route that does not exist is not", reply(404).body("404 page not found"), Rejected, Pushback::None),
        (
            "Google Drive says it with a 403",
            reply(403).body(r#"{"error":{"code":403,"errors":[{"domain":"usageLimits","reason":"userRateLimitExceeded"}]}}"#),
            Throttled,
            Pushback::None,
        ),
        (
            "DynamoDB says it with a 400",
            reply(400).body(r#"{"__type":"com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException"}"#),
            Throttled,
            Pushback::None,
        ),
        (
            "the words of a 500 do not make it a throttle",
            reply(500).body(r#"{"error":{"message":"rate limit service unreachable, retry in 5s"}}"#),
            Failed,
            Pushback::None,
        ),
        (
            "nor those of a 403",
            reply(403).body(r#"{"error":{"message":"Your account is locked, try again in 5 minutes"}}"#),
            Misconfigured,
            Pushback::None,
        ),
        (
            "nor does a prompt that speaks of money empty an account",
            reply(400).body(r#"{"error":{"message":"Invalid value: 'What is my credit balance?'"}}"#),
            Rejected,
            Pushback::None,
        ),
    ];
    for (report, reply, kind, pushback) in table {
        let signal = reply.signal().await;
        assert_eq!((signal.kind, signal.pushback), (kind, pushback), "{report}");
        let terminal = matches!(kind, Depleted | Misconfigured | Rejected);
        assert_eq!(signal.resend == ResendAdvice::Never, terminal, "{report}");
        if kind == Throttled {
            // A throttle proves that nothing happened, unless it was found behind a 5xx.
            let expected = if reply.status < 500 { Executed::No } else { Executed::Maybe };
            assert_eq!(signal.executed, expected, "{report}");
        }
    }
}

// KarpelesLab/teamclaude#309 (its #296, #307): a cap of one model benched the account.
#[tokio::test]
async fn a_pause_covers_what_the_reply_is_about() {
    for (what, reply, reach) in [
        ("without any hint", reply(429), Reach::Scope),
        (
            "a daily quota of one model",
            reply(429).body(
                r#"{"error":{"details":[{"violations":[{"quotaId":"RequestsPerDayPerProjectPerModel"}]}]}}"#,
            ),
            Reach::Scope,
        ),
        ("an unknown model", reply(404).body(r#"{"error":{"code":"model_not_found"}}"#), Reach::Scope),
        ("an empty account", reply(429).body(r#"{"error":{"code":"insufficient_quota"}}"#), Reach::Provider),
        ("a wrong key", reply(401), Reach::Provider),
        ("Discord's global limit", reply(429).header("x-ratelimit-global", "true"), Reach::Provider),
    ] {
        assert_eq!(reply.signal().await.reach, reach, "{what}");
    }
}

// mnfst/llm-gateway#2709, letta-ai/letta-code#1130: a 200 with neither content nor tool calls.
#[tokio::test]
async fn what_a_hollow_answer_means_is_for_the_caller_to_say() {
    let hollow =
        reply(200).header("content-type", "application/json").body(r#"{"choices":[{"message":{}}]}"#);
    assert_eq!(hollow.signal().await.kind, Kind::Success, "nobody said otherwise");
    let completion = classify_body(|head, body| {
        let is_hollow = head.status == 200 && !body.windows(9).any(|part| part == b"\"content\"");
        is_hollow.then(|| Signal::new(Kind::Failed))
    });
    assert_eq!(hollow.signal_by(completion).await.kind, Kind::Failed);
    let search = classify_body(|_, body| (body == b"[]").then(|| Signal::new(Kind::Empty)));
    assert_eq!(reply(200).body("[]").signal_by(search).await.kind, Kind::Empty);
}

// brandur/redis-cell#58: who obeys floored seconds is early.
// aws-samples/bedrock-access-gateway#88: a throttle goes on as a throttle, with its wait.
#[tokio::test(start_paused = true)]
async fn a_wait_that_is_handed_on_is_rounded_up() {
    let until = Instant::now() + Duration::from_millis(7200);
    let refusal = Refusal::new(RefusalKind::Paused, "it asked for a pause", "p".into(), Some(until));
    let outer = refusal.to_response::<String>();
    assert_eq!((outer.status().as_u16(), outer.headers()["retry-after"].as_bytes()), (429, &b"8"[..]));
    let signal = HttpClassify.classify(Ok(&outer));
    assert_eq!((signal.kind, signal.pushback), (Kind::Throttled, after(8)));
}

// topoteretes/cognee#4321: our own "no" is not the provider's 429.
#[test]
fn a_refusal_of_our_own_is_told_apart() {
    let refusal = Refusal::new(RefusalKind::Budget, "the budget is used up", "p".into(), None);
    let error: BoxError = std::io::Error::other(refusal).into();
    let signal = Classify::<Response<()>>::classify(&HttpClassify, Err(&*error));
    assert_eq!(signal.kind, Kind::Refused);
}

// kube-rs/kube#2082: the status alone does not say what may be repeated.
#[test]
fn only_proof_lets_a_write_be_repeated() {
    let of = |error: BoxError| Classify::<Response<()>>::classify(&HttpClassify, Err(&*error));
    let refused = of(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
    let reset = of(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
    assert!(Safety::Once.allows(&refused, false) && !Safety::Once.allows(&reset, true));
}
