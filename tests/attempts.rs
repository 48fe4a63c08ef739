//! Retries over nested services, on real sockets: axum servers, each with a whole stack of four attempts.

#[path = "support/server.rs"]
mod server;

use axum::{Router, body::Body, extract::Request, response::Response};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use server::{Server, answer};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, Budget, ClassifyLayer, Fleet, FleetLimitLayer, HasTask,
    IncomingAttemptsLayer, JitteredRetryLayer, Mode, Provider, ProviderSettings, RatioBudget,
    RetryAfterLayer, Switch, Task,
    attempts::HEADER,
    observe::{Event, Observe},
    refusal::error_reply,
    retry::Unlimited,
};

/// What every service of a chain is made with.
#[derive(Clone)]
struct Settings {
    attempts: u32,
    budget: Option<RatioBudget>,
    switch: Switch,
    tell_first: bool,
}

fn settings() -> Settings {
    Settings { attempts: 4, budget: None, switch: Switch::default(), tell_first: false }
}

fn provider(name: &str) -> Provider {
    Fleet::local().configure(name, ProviderSettings::new().ceiling(100)).unwrap()
}

/// Asks `url` through a whole stack for `provider`.
#[derive(Clone)]
struct Caller {
    url: String,
    provider: Provider,
    settings: Settings,
    budget: Arc<dyn Budget>,
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Caller {
    fn new(url: &str, provider: &Provider, settings: &Settings) -> Self {
        let budget: Arc<dyn Budget> = match &settings.budget {
            // One of its own for each service, as processes have it.
            Some(_) => Arc::new(RatioBudget::default()),
            None => Arc::new(Unlimited),
        };
        Caller {
            url: url.to_owned(),
            provider: provider.clone(),
            settings: settings.clone(),
            budget,
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    async fn ask(&self, task: &Task) -> Response {
        let provider = &self.provider;
        let stack = ServiceBuilder::new()
            .layer(
                JitteredRetryLayer::new()
                    .attempts(self.settings.attempts)
                    .base(Duration::from_millis(1))
                    .budget(self.budget.clone()),
            )
            .layer(RetryAfterLayer::new(provider))
            .layer(FleetLimitLayer::new(provider))
            .layer(
                AttemptsLayer::new(provider)
                    .switch(&self.settings.switch)
                    .tell_first(self.settings.tell_first),
            )
            .layer(ClassifyLayer::new(provider))
            .layer(AttemptTimeoutLayer::default())
            .service(self.client.clone());
        let mut request = http::Request::get(&self.url).body(Empty::new()).unwrap();
        request.set_task(task.clone());
        match stack.oneshot(request).await {
            Ok(reply) => reply.map(Body::new),
            Err(error) => error_reply(&*error),
        }
    }
}

/// A service that asks the next one, and counts who asks it.
async fn serve(next: Caller, settings: &Settings) -> (String, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let handler = move |request: Request| {
        counted.fetch_add(1, SeqCst);
        let next = next.clone();
        // Without the layer there is no task: each service is alone.
        let task = request.task().cloned().unwrap_or_else(|| Task::new(1).allowance(next.settings.attempts));
        async move {
            let (head, body) = next.ask(&task).await.into_parts();
            // Its own reply, as handlers make them: no header and no extension of the inner one survives,
            // but for the wait.
            let mut reply = Response::new(Body::new(body));
            *reply.status_mut() = head.status;
            if let Some(wait) = head.headers.get("retry-after") {
                reply.headers_mut().insert("retry-after", wait.clone());
            }
            reply
        }
    };
    let incoming = IncomingAttemptsLayer::new().allowance(settings.attempts).switch(&settings.switch);
    let app = Router::new().fallback(handler).layer(incoming);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, app).into_future());
    (url, calls)
}

/// Client -> A -> B -> provider: so many requests, the calls at each, the last status.
async fn chain(settings: Settings, answers: server::Answer, requests: usize) -> ([usize; 3], u16) {
    let dead = Server::start(move |_, _| answers.clone()).await;
    let (b, at_b) = serve(Caller::new(&dead.url, &provider("dead"), &settings), &settings).await;
    let (a, at_a) = serve(Caller::new(&b, &provider("b"), &settings), &settings).await;
    let client = Caller::new(&a, &provider("a"), &settings);
    let mut status = 0;
    for n in 0..requests {
        let reply = client.ask(&Task::new(n as u64).allowance(settings.attempts)).await;
        status = reply.status().as_u16();
        reply.into_body().collect().await.unwrap();
    }
    ([at_a.load(SeqCst), at_b.load(SeqCst), dead.counts.calls()], status)
}

// BerriAI/litellm#7130, HKUDS/nanobot#2759 and many others: attempts that multiply.
#[tokio::test]
async fn three_services_of_four_attempts_send_a_dead_provider_four_calls_and_not_64() {
    let off = Settings { switch: Switch::new(Mode::Off), ..settings() };
    assert_eq!(chain(off, answer(500), 1).await, ([4, 16, 64], 500), "what the marks are for");
    assert_eq!(chain(settings(), answer(500), 1).await, ([1, 1, 4], 500));
}

#[tokio::test]
async fn with_budgets_nested_services_send_a_tenth_more_than_they_were_asked() {
    const N: usize = 100;
    let settings = Settings { budget: Some(RatioBudget::default()), ..settings() };
    let (calls, status) = chain(settings, answer(500), N).await;
    assert_eq!(status, 500);
    for calls in calls {
        assert!((N..=N + N / 10 + 3).contains(&calls), "{calls} calls for {N} requests");
    }
}

#[tokio::test]
async fn what_the_caller_has_left_is_what_everybody_has_further_in() {
    for left in 1..4 {
        let settings = Settings { tell_first: true, ..settings() };
        let dead = Server::start(|_, _| answer(500)).await;
        let (b, _) = serve(Caller::new(&dead.url, &provider("dead"), &settings), &settings).await;
        let (a, _) = serve(Caller::new(&b, &provider("b"), &settings), &settings).await;
        let client = Caller::new(&a, &provider("a"), &settings);
        client.ask(&Task::new(1).allowance(left)).await;
        assert_eq!(dead.counts.calls(), left as usize);
    }
}

#[tokio::test]
async fn the_deadline_of_the_caller_reaches_the_last_service() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = seen.clone();
    let last = Server::start(move |_, head| {
        heard.lock().unwrap().push(head.headers.get(HEADER).cloned());
        answer(200)
    })
    .await;
    let settings = Settings { tell_first: true, ..settings() };
    let (b, _) = serve(Caller::new(&last.url, &provider("last"), &settings), &settings).await;
    let client = Caller::new(&b, &provider("b"), &settings);
    client.ask(&Task::new(1).deadline_in(Duration::from_secs(7))).await;
    client.ask(&Task::new(1)).await;
    let told: Vec<_> = seen.lock().unwrap().iter().map(|value| value.clone().unwrap()).collect();
    let millis = |value: &http::HeaderValue| -> u64 {
        value.to_str().unwrap().rsplit_once("ms=").unwrap().1.parse().unwrap()
    };
    assert!((1..=7000).contains(&millis(&told[0])), "{told:?}");
    assert!((7001..=60_000).contains(&millis(&told[1])), "the server's own: {told:?}");
}

// aws-samples/bedrock-access-gateway#88: a throttle that became a 500.
#[tokio::test]
async fn a_throttle_further_in_is_a_429_with_its_wait_all_the_way_out() {
    let throttled = Server::start(|_, _| answer(429).header("retry-after", 120)).await;
    let (b, _) = serve(Caller::new(&throttled.url, &provider("t"), &settings()), &settings()).await;
    let (a, _) = serve(Caller::new(&b, &provider("b"), &settings()), &settings()).await;
    let client = Caller::new(&a, &provider("a"), &settings());
    // The first is the provider's own reply, the second a refusal of the pause that it set in the client.
    for _ in 0..2 {
        let reply = client.ask(&Task::new(1)).await;
        assert_eq!(reply.status(), 429);
        let wait: u32 = reply.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((100..=181).contains(&wait), "{wait}");
    }
    assert_eq!(throttled.counts.calls(), 1);
}

#[derive(Clone, Default)]
struct Reports(Arc<Mutex<Vec<(String, u32)>>>);

impl Observe for Reports {
    fn observe(&self, event: &Event<'_>) {
        if let Event::InnerRetries { provider, attempts, .. } = event {
            self.0.lock().unwrap().push(((*provider).to_owned(), *attempts));
        }
    }
}

#[tokio::test]
async fn a_foreign_service_that_retries_inside_is_named() {
    let reports = Reports::default();
    let fleet = Fleet::local().observer(reports.clone());
    let mesh = Server::start(|_, _| answer(200).header("x-envoy-attempt-count", 3)).await;
    let plain = Server::start(|_, _| answer(200).header("x-envoy-attempt-count", 1)).await;
    for (name, server) in [("mesh", &mesh), ("plain", &plain)] {
        let caller = Caller::new(&server.url, &fleet.provider(name), &settings());
        for _ in 0..5 {
            caller.ask(&Task::new(1)).await;
        }
    }
    assert_eq!(*reports.0.lock().unwrap(), [("mesh".to_owned(), 3)]);
}

/// gRPC over HTTP/2, trailers only: what each call of one request said, and what the replies were.
async fn grpc_calls(pushback: Option<&'static str>) -> (Vec<Option<String>>, http::HeaderMap) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = seen.clone();
    let server = Server::start(move |_, head| {
        let count = head.headers.get("grpc-previous-rpc-attempts");
        heard.lock().unwrap().push(count.map(|count| count.to_str().unwrap().to_owned()));
        let failed =
            answer(200).header("content-type", "application/grpc").header("grpc-status", 14).body("");
        match pushback {
            Some(pushback) => failed.header("grpc-retry-pushback-ms", pushback),
            None => failed,
        }
    })
    .await;
    let provider = provider("grpc");
    let client: Client<HttpConnector, Empty<Bytes>> =
        Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let stack = ServiceBuilder::new()
        .layer(IncomingAttemptsLayer::new())
        .layer(JitteredRetryLayer::new().base(Duration::from_millis(1)))
        .layer(FleetLimitLayer::new(&provider))
        .layer(AttemptsLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(client);
    let request = http::Request::post(&server.url)
        .header("content-type", "application/grpc")
        .extension(tower_herd::Safety::Costly)
        .body(Empty::new())
        .unwrap();
    let reply = stack.oneshot(request).await.unwrap();
    let seen = seen.lock().unwrap().clone();
    (seen, reply.headers().clone())
}

#[tokio::test]
async fn grpc_attempts_are_counted_and_a_pushback_of_minus_one_goes_in_and_out() {
    let some = |count: &str| Some(count.to_owned());
    let (calls, reply) = grpc_calls(None).await;
    assert_eq!(calls, [None, some("1"), some("2")]);
    assert_eq!(reply["grpc-retry-pushback-ms"], "-1", "given up, and said so");
    let (calls, reply) = grpc_calls(Some("-1")).await;
    assert_eq!((calls, &reply["grpc-retry-pushback-ms"]), (vec![None], &"-1".parse().unwrap()));
    let (calls, reply) = grpc_calls(Some("5")).await;
    assert_eq!((calls.len(), &reply["grpc-retry-pushback-ms"]), (3, &"-1".parse().unwrap()));
}
