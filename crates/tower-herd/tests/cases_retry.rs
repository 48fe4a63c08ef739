//! Public reports of other people's failures, each with what is right here.

mod retry_support;

use bytes::Bytes;
use retry_support::*;
use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_herd::{
    BoxError, Budget, HasTask, JitteredRetryLayer, RatioBudget, Safety, Task, TaskLayer, replay,
    retry::Unlimited,
};

#[tokio::test(start_paused = true)]
async fn roocode_5050_repeated_429_is_never_reported_as_success() {
    let (reply, _) = run(retry(), get(), [Hint(429, 1)]).await;
    assert_eq!(status(&reply), 429, "the last real reply");
    assert!(stamp(&reply).is_some(), "marked as exhausted");
}

#[tokio::test(start_paused = true)]
async fn bifrost_6971_openhuman_6504_vercel_ai_5018_the_hint_reaches_the_loop() {
    let task = Task::new(1).deadline_in(S(300));
    let (reply, seen) = run(retry(), of(&task, get()), [Hint(429, 60), Status(200)]).await;
    assert_eq!(status(&reply), 200);
    assert!(seen.gaps()[0] >= S(60));
}

#[tokio::test(start_paused = true)]
async fn hermes_agent_109234_equal_hints_do_not_wake_all_at_once() {
    let hint = std::iter::repeat_n(Hint(429, 600), 30).chain([Status(200)]);
    let (service, seen) = provider(hint);
    let layer = retry().deadline(S(1000));
    let agents = (0..30).map(|_| send(&layer, &service, get()));
    futures_util::future::join_all(agents).await;
    let mut again = seen.at().split_off(30);
    again.sort();
    assert!(again[0] >= S(600) && again[29] <= S(900) + MS(1));
    assert!(again[29] > again[0] + S(150), "spread over half of the hint");
    assert!(again.windows(5).all(|five| five[4] > five[0] + S(1)), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn opencode_30510_the_index_starts_at_zero_and_attempts_end() {
    let mut longest = [Duration::ZERO; 4];
    for seed in 0..100 {
        let task = Task::new(1).allowance(9);
        let layer = retry().seed(seed).attempts(5);
        let (_, seen) = run(layer, of(&task, get()), [Status(500)]).await;
        assert_eq!(seen.count(), 5, "a hard stop");
        for (most, gap) in longest.iter_mut().zip(seen.gaps()) {
            *most = gap.max(*most);
        }
    }
    for (most, bound) in longest.iter().zip([500, 1000, 2000, 4000]) {
        assert!(*most <= MS(bound + 1) && *most > MS(bound * 3 / 4), "{most:?} of {bound} ms");
    }
}

/// A client whose attempts time out after 30 s, or when the task ends.
#[derive(Clone, Default)]
struct Dead(Arc<Mutex<u32>>);
impl tower::Service<Request> for Dead {
    type Response = Response;
    type Error = BoxError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response, BoxError>> + Send>>;
    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
        std::task::Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: Request) -> Self::Future {
        *self.0.lock().unwrap() += 1;
        let deadline = request.task().unwrap().deadline_at().unwrap();
        Box::pin(async move {
            tokio::time::sleep_until(deadline.min(Instant::now() + S(30))).await;
            Err("timed out".into())
        })
    }
}

#[tokio::test(start_paused = true)]
async fn openai_python_3828_patina_124_autogpt_14357_one_deadline_over_all_attempts() {
    let start = Instant::now();
    let client = Dead::default();
    let stack = TaskLayer::new().deadline(S(45)).layer(retry().layer(client.clone()));
    stack.oneshot(get()).await.unwrap_err();
    assert!(start.elapsed() <= S(45), "{:?} on a dead upstream", start.elapsed());
    assert_eq!(*client.0.lock().unwrap(), 2, "the second attempt got what was left");
}

#[tokio::test(start_paused = true)]
async fn evener_342_a_storm_of_429_is_bounded_by_time_and_not_by_attempts() {
    let task = Task::new(1).allowance(3).deadline_in(S(4 * 3600));
    let script = std::iter::repeat_n(Hint(429, 600), 8).chain([Status(500), Status(200)]);
    let (reply, seen) = run(retry(), of(&task, get()), script).await;
    assert_eq!((status(&reply), seen.count(), task.spent()), (200, 10, 1));
}

async fn nested(attempts: &[u32], script: impl IntoIterator<Item = Step>) -> (u16, usize) {
    let (service, seen) = provider(script);
    let mut stack = tower::util::BoxCloneService::new(service);
    for attempts in attempts {
        let layer = retry().attempts(*attempts);
        stack = tower::util::BoxCloneService::new(layer.layer(stack));
    }
    let reply = TaskLayer::new().deadline(S(600)).layer(stack).oneshot(get()).await;
    (status(&reply), seen.count())
}

#[tokio::test(start_paused = true)]
async fn litellm_7130_7262_12358_25285_two_layers_do_not_multiply() {
    assert_eq!(nested(&[2, 3], [Status(500)]).await, (500, 2), "the inner one's mark stops the outer one");
    assert_eq!(nested(&[3, 2], [Status(500)]).await, (500, 3));
    assert_eq!(nested(&[2, 3], [Hint(429, 1)]).await, (429, 11), "10 re-deliveries, not 10 * 10");
    let errors = nested(&[2, 3], [Error("timed out", S(1))]).await;
    assert_eq!(errors, (0, 2), "an error bears no mark, but its task does");
}

#[tokio::test(start_paused = true)]
async fn nanobot_2759_code_puppy_317_agents_5335_qwen_agent_594_three_stacks_share_one_allowance() {
    assert_eq!(nested(&[4, 4, 4], [Status(500)]).await, (500, 3));
    assert_eq!(nested(&[4, 4, 4], [Error("timed out", S(1))]).await, (0, 3));
}

#[test]
fn tower_857_a_ratio_of_0_6_grants_0_6() {
    for (ratio, granted) in [(0.6, 6), (0.3, 3), (0.7, 7)] {
        let budget = RatioBudget::new(ratio).reserve(0, S(10));
        (0..10).for_each(|_| budget.deposit());
        assert_eq!((0..10).filter(|_| budget.try_withdraw()).count(), granted, "{ratio}");
    }
}

#[tokio::test(start_paused = true)]
async fn finagle_956_stacked_layers_deposit_once() {
    let budget = RatioBudget::new(0.1).reserve(0, S(10));
    let layer = retry().budget(budget.clone());
    let (service, _) = provider([Status(200)]);
    let stack = TaskLayer::new().layer(layer.layer(layer.layer(service)));
    for _ in 0..10 {
        stack.clone().oneshot(get()).await.unwrap();
    }
    assert_eq!(budget.balance(), 1.0);
    // Nor is the repetition of an outer layer an original request of the inner one.
    for with_task in [true, false] {
        let inner = RatioBudget::new(0.1).reserve(0, S(10));
        let (service, seen) = provider([Error("timed out", S(0)), Status(200)]);
        // The inner one leaves it to the outer one, and marks nothing.
        let stack = retry().layer(retry().same_domain(false).budget(inner.clone()).layer(service));
        let mut request = if with_task { of(&Task::new(1), get()) } else { get() };
        request.extensions_mut().insert(Safety::Keyed);
        stack.oneshot(request).await.unwrap();
        assert_eq!((seen.count(), inner.balance()), (2, 0.1));
    }
}

#[tokio::test(start_paused = true)]
async fn praisonai_4256_what_is_not_idempotent_runs_once() {
    let mut tool = post();
    tool.extensions_mut().insert(Safety::Once);
    let (_, seen) = run(retry(), tool, [Error("connection reset", MS(10)), Status(200)]).await;
    assert_eq!(seen.count(), 1);
}

// tower-resilience#362: retries without poll_ready. The scripted provider panics when called unready.
#[tokio::test(start_paused = true)]
async fn tower_resilience_362_each_attempt_is_polled_ready() {
    let (reply, seen) = run(retry(), get(), [Status(500), Status(500), Status(200)]).await;
    assert_eq!((status(&reply), seen.count()), (200, 3));
    assert!(seen.clones.load(Ordering::Relaxed) >= 2, "on clones made ready");
}

/// An erased body that ends when its source does.
#[derive(Default)]
struct Erased(Option<http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>>);
impl Erased {
    fn new<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Erased(Some(http_body_util::BodyExt::boxed_unsync(http_body_util::BodyExt::map_err(
            body,
            Into::into,
        ))))
    }
}
impl http_body::Body for Erased {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Some(body) => std::pin::Pin::new(body).poll_frame(cx),
            None => std::task::Poll::Ready(None),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn reqwest_middleware_44_what_cannot_be_replayed_is_sent_once() {
    for (cap, sent) in [(100, 2), (5, 1)] {
        let start = Instant::now();
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let seen = bodies.clone();
        let service = tower::service_fn(move |request: http::Request<Erased>| {
            let seen = seen.clone();
            async move {
                let body = http_body_util::BodyExt::collect(request.into_body()).await?.to_bytes();
                let mut seen = seen.lock().unwrap();
                seen.push(body);
                let mut reply = Response::new(String::new());
                *reply.status_mut() = if seen.len() == 1 { 500.try_into()? } else { 200.try_into()? };
                Ok::<_, BoxError>(reply)
            }
        });
        // Its length is not told beforehand.
        let chunks = ["abc", "def"].map(|c| Ok::<_, BoxError>(http_body::Frame::data(Bytes::from(c))));
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(chunks));
        let request = http::Request::get("/").body(Erased::new(body)).unwrap();
        let layer =
            JitteredRetryLayer::new().budget(Unlimited).classify(Understand).resend(replay(cap, Erased::new));
        let reply = layer.layer(service).oneshot(request).await.unwrap();
        assert_eq!(*bodies.lock().unwrap(), vec![Bytes::from("abcdef"); sent]);
        assert_eq!(reply.status(), if sent == 2 { 200 } else { 500 });
        assert_eq!(start.elapsed().is_zero(), sent == 1, "nobody waits in vain");
    }
}

// llm-exe/llm-exe#797: the client's timeout does not stop the generation, and to send again bills twice.
#[tokio::test(start_paused = true)]
async fn llm_exe_797_a_timeout_after_the_send_may_have_been_billed() {
    use tower_herd::AttemptTimeoutLayer;
    for (safety, calls) in [(Safety::Once, 1), (Safety::Keyed, 2), (Safety::Costly, 2), (Safety::Safe, 2)] {
        let (service, seen) = provider([Slow(200, S(100)), Status(200)]);
        let layer = JitteredRetryLayer::new().budget(Unlimited).seed(1);
        let inner = AttemptTimeoutLayer::default().layer(service);
        let mut request = of(&Task::new(1).deadline_in(S(300)), post());
        request.extensions_mut().insert(safety);
        let reply = layer.layer(inner).oneshot(request).await;
        assert_eq!((seen.count(), reply.is_ok()), (calls, calls == 2), "{safety:?}");
    }
}

// Growth-Circle/cadis#412, BerriAI/litellm#32835, zirkelc/ai-retry#51: a part of one answer, and then another answer
// behind it. (What may be said again before the first content belongs to the streams.)
#[tokio::test(start_paused = true)]
async fn cadis_412_litellm_32835_ai_retry_51_nothing_is_sent_again_once_the_reply_is_out() {
    use http_body_util::{BodyExt as _, StreamBody};
    let calls = Arc::new(Mutex::new(0));
    let counted = calls.clone();
    let service = tower::service_fn(move |_: Request| {
        *counted.lock().unwrap() += 1;
        let frames: [Result<http_body::Frame<Bytes>, BoxError>; 2] =
            [Ok(http_body::Frame::data(Bytes::from("half an ans"))), Err("connection reset".into())];
        async { Ok::<_, BoxError>(http::Response::new(StreamBody::new(futures_util::stream::iter(frames)))) }
    });
    let layer = JitteredRetryLayer::new().budget(Unlimited);
    let mut body = layer.layer(service).oneshot(get()).await.unwrap().into_body();
    assert!(body.frame().await.unwrap().is_ok());
    assert!(body.frame().await.unwrap().is_err(), "it is the caller's to see");
    assert!(body.frame().await.is_none());
    assert_eq!(*calls.lock().unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn amplification_of_the_vectors() {
    let vectors: serde_json::Value = serde_json::from_str(include_str!("vectors/budget.json")).unwrap();
    let cases = vectors["amplification"]["cases"].as_array().unwrap();
    for case in cases {
        let number = |key: &str| u32::try_from(case[key].as_u64().unwrap()).unwrap();
        let (attempts, layers) = (number("attempts"), number("layers"));
        assert_eq!(u64::from(attempts.pow(layers)), case["unbounded"].as_u64().unwrap());
        let nest = vec![attempts; layers as usize];
        for failure in [Status(500), Error("timed out", S(0))] {
            let (_, calls) = nested(&nest, [failure.clone()]).await;
            assert!(calls <= attempts as usize, "{case}: {calls} with {failure:?}");
        }
    }
    for case in vectors["amplification"]["with_budget"].as_array().unwrap() {
        const N: usize = 3000;
        let (ratio, layers) = (case["ratio"].as_f64().unwrap(), case["layers"].as_u64().unwrap());
        let (service, seen) = provider([Error("timed out", S(0))]);
        let mut stack = tower::util::BoxCloneService::new(service);
        for _ in 0..layers {
            let budget = RatioBudget::new(ratio).reserve(0, S(10));
            stack = tower::util::BoxCloneService::new(retry().attempts(4).budget(budget).layer(stack));
        }
        let stack = TaskLayer::new().layer(stack);
        for _ in 0..N {
            stack.clone().oneshot(get()).await.unwrap_err();
            tokio::time::advance(MS(5)).await;
        }
        let factor = seen.count() as f64 / N as f64;
        assert!(factor <= case["at_most"].as_f64().unwrap() && factor > 1.05, "{case}: {factor}");
    }
}

/// A new part of a vector file is not passed over in silence: whoever copies it here says what checks it.
#[test]
fn every_part_of_the_vectors_is_checked_or_belongs_elsewhere() {
    let parts = |text: &str| -> Vec<String> {
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        value.as_object().unwrap().keys().cloned().collect()
    };
    let known = |names: &[&str]| -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(ToString::to_string).collect();
        names.sort();
        names
    };
    let mut backoff = parts(include_str!("vectors/backoff.json"));
    backoff.sort();
    // The bounds and the spread beside `Backoff`; the herd in retry.rs and in the simulator's scenario
    // `equal-hint`; the contention in backoff_contention.rs.
    let expected =
        ["source", "full_jitter_upper_bounds", "plus_minus", "herd_after_equal_hint", "occ_contention"];
    assert_eq!(backoff, known(&expected));
    let mut budget = parts(include_str!("vectors/budget.json"));
    budget.sort();
    // Deposits, adaptive throttling and the token bucket of gRPC in `budget`; amplification above.
    let expected = [
        "adaptive_throttling",
        "adaptive_throttling_steady_state",
        "token_bucket_throttle",
        "deposit_budget",
        "amplification",
    ];
    assert_eq!(budget, known(&expected));
    let mut ramp = parts(include_str!("vectors/ramp_and_breaker.json"));
    ramp.sort();
    // The ramp in `readmission`, the trips in `breaker`; the share of a fleet comes with the store.
    assert_eq!(ramp, known(&["slow_start", "capacity_share", "consecutive_trip"]));
}
