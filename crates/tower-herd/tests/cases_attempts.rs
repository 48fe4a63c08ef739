//! Public reports of attempts that multiplied between layers, SDKs and services, each with what is right here.
//! Services that call each other over sockets: `tests/attempts.rs` at the root.

mod attempts_support;

use attempts_support::*;
use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Service, ServiceBuilder, ServiceExt, util::BoxCloneSyncService};
use tower_herd::{
    AttemptsLayer, BoxError, ClassifyLayer, Fleet, HasTask, IncomingAttemptsLayer, JitteredRetryLayer, Kind,
    ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Task, attempts::Told, refusal::error_reply,
    refusal::grpc_error_reply, retry::Unlimited,
};

type Stack = BoxCloneSyncService<Request, Response, BoxError>;

/// A wire: what stands in extensions does not pass it, in either direction.
#[derive(Clone)]
struct Cut(Stack);

impl Service<Request> for Cut {
    type Response = Response;
    type Error = BoxError;
    type Future = futures_util::future::BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        request.extensions_mut().clear();
        let reply = self.0.call(request);
        Box::pin(async move {
            let mut reply = reply.await?;
            reply.extensions_mut().clear();
            Ok(reply)
        })
    }
}

/// A service that asks `next` with a whole stack of `attempts`, and makes its own reply of what it hears.
fn service(next: Stack, attempts: u32, listens: bool) -> Stack {
    let provider = Fleet::local().provider("next");
    let client = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().attempts(attempts).redeliveries(attempts - 1).budget(Unlimited))
        .layer(AttemptsLayer::new(&provider))
        .service(Cut(next));
    let handler = tower::service_fn(move |request: Request| {
        let client = client.clone();
        let task = request.task().cloned().unwrap_or_else(|| Task::new(1).allowance(attempts));
        async move {
            let answer = client.oneshot(of(&task, get())).await;
            let answer = answer.unwrap_or_else(|error| error_reply(&*error));
            let mut own = reply(answer.status().as_u16(), &[]);
            if let Some(wait) = answer.headers().get("retry-after") {
                own.headers_mut().insert("retry-after", wait.clone());
            }
            Ok::<_, BoxError>(own)
        }
    });
    if listens {
        BoxCloneSyncService::new(
            ServiceBuilder::new().layer(IncomingAttemptsLayer::new().allowance(attempts)).service(handler),
        )
    } else {
        BoxCloneSyncService::new(handler)
    }
}

/// Calls that a provider gets which always answers so, from nested services of so many attempts.
async fn calls(status: u16, attempts: &[u32], listens: bool) -> usize {
    let wire = Wire::new(move |_, _| reply(status, &[]));
    let provider = ServiceBuilder::new().map_err(BoxError::from).service(wire.service());
    let stack = attempts
        .iter()
        .fold(BoxCloneSyncService::new(provider), |next, attempts| service(next, *attempts, listens));
    stack.oneshot(get()).await.unwrap();
    wire.headers().len()
}

#[tokio::test(start_paused = true)]
async fn litellm_7130_7262_12358_25285_an_inner_stack_beyond_the_wire_does_not_multiply() {
    for status in [500, 429] {
        assert_eq!(calls(status, &[2, 3], false).await, 6, "the report");
        assert_eq!(calls(status, &[2, 3], true).await, 2, "what the inner one may");
    }
}

#[tokio::test(start_paused = true)]
async fn nanobot_2759_code_puppy_317_agents_5335_qwen_agent_594_nested_services_share_their_attempts() {
    for (attempts, alone) in [(&[4, 3][..], 12), (&[5, 3, 3], 45), (&[3, 3], 9), (&[4, 4, 4], 64)] {
        assert_eq!(calls(503, attempts, false).await, alone, "the report");
        assert_eq!(calls(503, attempts, true).await, attempts[0] as usize);
    }
}

/// As the SDKs of OpenAI and Anthropic do: obeys `x-should-retry`, else repeats by the status.
async fn foreign_sdk(stack: Stack, retries: usize) -> usize {
    for n in 1..=retries + 1 {
        let reply = stack.clone().oneshot(get()).await.unwrap();
        let told = reply.headers().get("x-should-retry").map(|told| told.as_bytes().to_owned());
        let again = match told.as_deref() {
            Some(b"false") => false,
            Some(b"true") => true,
            _ => matches!(reply.status().as_u16(), 408 | 409 | 429 | 500..),
        };
        if !again {
            return n;
        }
    }
    retries + 1
}

#[tokio::test(start_paused = true)]
async fn litellm_docs_734_a_foreign_client_that_calls_us_sees_the_mark_and_stops() {
    for (listens, expected) in [(false, (3, 9)), (true, (1, 3))] {
        let wire = Wire::new(|_, _| reply(503, &[]));
        let provider = ServiceBuilder::new().map_err(BoxError::from).service(wire.service());
        let gateway = service(BoxCloneSyncService::new(provider), 3, listens);
        assert_eq!((foreign_sdk(gateway, 2).await, wire.headers().len()), expected);
    }
}

// The retries of an SDK below were hidden: they are named.
#[tokio::test(start_paused = true)]
async fn opencode_30510_retries_that_were_hidden_below_are_named() {
    let seen = InnerRetries::default();
    let provider = Fleet::local().observer(seen.clone()).provider("llm");
    // Something in between tries three times, and only the server behind it sees that.
    let server = ServiceBuilder::new()
        .layer(IncomingAttemptsLayer::new())
        .service(Wire::new(|_, _| reply(200, &[])).service());
    let sdk = tower::service_fn(move |_: Request| {
        let server = server.clone();
        async move {
            let mut last = None;
            for n in 1..=3 {
                let mut request = get();
                request.headers_mut().insert("x-envoy-attempt-count", n.into());
                last = Some(server.clone().oneshot(request).await?);
            }
            Ok::<_, std::convert::Infallible>(last.unwrap())
        }
    });
    let client = ServiceBuilder::new().layer(AttemptsLayer::new(&provider)).service(sdk);
    client.oneshot(get()).await.unwrap();
    assert_eq!(seen.all(), [("llm".to_owned(), 3)]);
}

// A throttle further in became a 500, and nobody waited.
#[tokio::test(start_paused = true)]
async fn bedrock_access_gateway_88_a_throttle_is_handed_on_with_its_wait() {
    let throttled = Fleet::local().provider("bedrock");
    let wire = Wire::new(|_, _| reply(429, &[("retry-after", "120")]));
    let inner = ServiceBuilder::new()
        .map_result(|outcome: Result<_, BoxError>| {
            Ok::<_, BoxError>(outcome.unwrap_or_else(|e| error_reply(&*e)))
        })
        .layer(RetryAfterLayer::new(&throttled))
        .layer(ClassifyLayer::new(&throttled).replies())
        .map_err(BoxError::from)
        .service(wire.service());
    // The reply itself, then our refusals: each says not before when.
    for waited in [0, 0, 30, 20] {
        tokio::time::sleep(S(waited)).await;
        let reply = inner.clone().oneshot(get()).await.unwrap();
        assert_eq!(reply.status(), 429);
        let wait: u64 = reply.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        let (until, _) = throttled.paused_until().unwrap();
        assert!(Instant::now() + S(wait) >= until, "never early");
        assert!(!reply.headers().contains_key("x-should-retry"), "it may be asked again, then");
    }
    assert_eq!(wire.headers().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn redis_cell_58_what_is_told_is_rounded_against_the_caller() {
    for nanos in [1, 999_999, 1_000_000, 1_000_001, 999_999_999, 59_000_000_001_u64] {
        let wait = Duration::from_nanos(nanos);
        let refusal = Refusal::new(RefusalKind::Paused, "", Arc::from("p"), Some(Instant::now() + wait));
        let number = |reply: &Response, name: &str| -> u64 {
            reply.headers()[name].to_str().unwrap().parse().unwrap()
        };
        assert!(S(number(&error_reply(&refusal), "retry-after")) >= wait, "{nanos}");
        assert!(MS(number(&grpc_error_reply(&refusal), "grpc-retry-pushback-ms")) >= wait, "{nanos}");
        // What is left is rounded the other way: nobody is told of time that is not there.
        let task = Task::new(1).deadline_in(wait);
        let told = Told::next(Some(&task), 1, Instant::now()).to_string();
        let millis: u64 = told.rsplit_once("ms=").unwrap().1.parse().unwrap();
        assert!(MS(millis) <= wait, "{told}");
    }
}

// A budget of our own that is used up looked like a provider's 429, and was retried.
#[tokio::test(start_paused = true)]
async fn cognee_4321_a_budget_of_our_own_is_no_throttle_and_is_not_asked_again() {
    for kind in [RefusalKind::Spend, RefusalKind::Budget, RefusalKind::Exhausted] {
        let spent = move |_: Request| async move {
            let refusal = Refusal::new(kind, "used up", Arc::from("llm"), None);
            Ok::<_, BoxError>(error_reply::<String>(&refusal))
        };
        let wire = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = wire.clone();
        let provider = Fleet::local().configure("gateway", ProviderSettings::new()).expect("valid settings");
        let stack = ServiceBuilder::new()
            .layer(JitteredRetryLayer::new())
            .layer(ClassifyLayer::new(&provider).replies())
            .map_request(move |request: Request| {
                counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                request
            })
            .service_fn(spent);
        let reply = stack.oneshot(get()).await.unwrap();
        assert_eq!((reply.status().as_u16(), wire.load(std::sync::atomic::Ordering::SeqCst)), (503, 1));
        let signal = tower_herd::Classify::classify(&tower_herd::HttpClassify, Ok(&reply));
        assert_ne!(signal.kind, Kind::Throttled);
        assert_eq!((provider.paused_until(), provider.throttled()), (None, 0));
    }
}
