//! The layers of tower-herd inside a chain, over real sockets.

mod common;

use common::{server, stream, with};
use reqwest::Body;
use std::{sync::atomic::Ordering::SeqCst, time::Duration};
use tokio::time::Instant;
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailoverLayer, HttpClassify,
    JitteredRetryLayer, Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Safety, Task,
    TaskLayer, failover::Rung, replay,
};
use tower_herd_reqwest::{HttpService, IntoReqwest, NextService, Reusable, TowerMiddleware};

type HttpRequest = http::Request<Body>;

/// What stands in one rung. A macro: the type of the stack has a different inner service in each use.
macro_rules! gates {
    ($provider:expr) => {
        ServiceBuilder::new()
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::default())
            .into_inner()
    };
}
fn retry() -> JitteredRetryLayer<HttpClassify, Reusable> {
    JitteredRetryLayer::new().base(Duration::from_millis(20)).resend(Reusable::new(64 << 10))
}
fn provider(name: &str, ceiling: u32) -> Provider {
    Fleet::local().configure(name, ProviderSettings::new().ceiling(ceiling)).unwrap()
}
fn to(url: &str) -> impl Fn(HttpRequest) -> HttpRequest + Clone + Send + Sync + use<> {
    let uri: http::Uri = url.parse().unwrap();
    move |mut request| {
        *request.uri_mut() = uri.clone();
        request
    }
}

#[tokio::test]
async fn retry_in_the_chain_sends_a_costly_post_again_with_its_body() {
    let server = server().await;
    server.counts.flaky.store(2, SeqCst);
    let p = provider("llm", 2);
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(gates!(&p)).into_inner();
    let client = with(TowerMiddleware::new(stack));
    let response =
        client.post(server.at("/flaky")).with_extension(Safety::Costly).body("mw").send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "mw");
    assert_eq!(server.counts.take().iter().filter(|seen| seen.body == "mw").count(), 3);
    assert_eq!(p.in_flight(), 0);
}

#[tokio::test]
async fn a_reusable_body_under_the_retry_layer_still_follows_307() {
    let server = server().await;
    let client = with(TowerMiddleware::new(retry()));
    let response = client.post(server.at("/redirect/307")).body("payload").send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "payload");
    // With the plain replay it is a stream, and the redirect comes back.
    let client = with(TowerMiddleware::new(JitteredRetryLayer::new().resend(replay(64 << 10, Body::wrap))));
    assert_eq!(client.post(server.at("/redirect/307")).body("payload").send().await.unwrap().status(), 307);
}

#[tokio::test]
async fn a_stream_is_replayed_up_to_the_cap_and_sent_once_beyond() {
    let server = server().await;
    for (cap, wire) in [(64 << 10, 2), (3, 1)] {
        server.counts.flaky.store(1, SeqCst);
        let client = with(TowerMiddleware::new(JitteredRetryLayer::new().resend(Reusable::new(cap))));
        let request = client.post(server.at("/flaky")).with_extension(Safety::Costly);
        let response = request.body(stream(&["str", "eam"])).send().await.unwrap();
        assert_eq!(response.status(), if wire == 2 { 200 } else { 503 });
        let seen = server.counts.take();
        assert!(seen.len() == wire && seen.iter().all(|seen| seen.body == "stream"), "{seen:?}");
    }
}

#[tokio::test]
async fn a_pause_refuses_the_next_call_and_the_refusal_is_found() {
    let server = server().await;
    let p = provider("llm", 2);
    let client = with(TowerMiddleware::new(gates!(&p)));
    assert_eq!(client.get(server.at("/throttled")).send().await.unwrap().status(), 429);
    let start = Instant::now();
    let error = client.get(server.at("/echo")).send().await.unwrap_err();
    let refusal = Refusal::find(&error).unwrap();
    assert_eq!((refusal.kind, &*refusal.provider), (RefusalKind::Paused, "llm"));
    assert!(refusal.wait().unwrap() > Duration::from_secs(590) && start.elapsed() < Duration::from_secs(5));
    assert_eq!(server.counts.wire(), 1, "nothing was sent");
}

#[tokio::test]
async fn failover_in_the_chain() {
    let (busy, free) = (server().await, server().await);
    let (a, b) = (provider("a", 4), provider("b", 4));
    let ladder = HashedFailoverLayer::new([
        Rung::new(&a, gates!(&a)).map(to(&busy.at("/throttled"))),
        Rung::new(&b, gates!(&b)).tier(1).map(to(&free.at("/echo"))),
    ])
    .unwrap()
    .resend(Reusable::new(64 << 10));
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(ladder).into_inner();
    let client = with(TowerMiddleware::new(stack));
    for round in 0..2 {
        let response = client.post("http://placeholder.invalid").body("task").send().await.unwrap();
        assert_eq!(response.url().as_str(), free.at("/echo"));
        assert_eq!(response.text().await.unwrap(), "task");
        assert_eq!(busy.counts.wire(), 1, "round {round}: a rung that is paused is not asked again");
    }
}

#[tokio::test]
async fn twelve_in_parallel_stay_at_the_limit_of_two_until_their_bodies_end() {
    let server = server().await;
    let p = provider("llm", 2);
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(gates!(&p)).into_inner();
    let client = with(TowerMiddleware::new(stack));
    let calls = (0..12).map(|i| {
        let (request, p) =
            (client.post(server.at("/work")).with_extension(Task::new(i)).body("x"), p.clone());
        tokio::spawn(async move {
            let response = request.send().await.unwrap();
            assert!(p.in_flight() >= 1, "the body is not read: the slot is held");
            tokio::time::sleep(Duration::from_millis(5)).await;
            response.bytes().await.unwrap();
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    assert_eq!((server.counts.wire(), server.counts.peak.load(SeqCst), p.in_flight()), (12, 2, 0));
}

#[tokio::test]
async fn a_body_that_stalls_keeps_its_slot_and_gives_it_back_when_dropped() {
    let server = server().await;
    let p = provider("llm", 1);
    let client = with(TowerMiddleware::new(gates!(&p)));
    let response = client.get(server.at("/stall")).send().await.unwrap();
    assert_eq!(p.in_flight(), 1);
    drop(response);
    // Law 2: it may still run there; the slot lingers for the learned p95, 10 s at most.
    tokio::time::timeout(Duration::from_secs(11), async {
        while p.in_flight() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_refused_connection_proves_not_executed_so_a_plain_post_moves_on() {
    let free = server().await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (a, b) = (provider("a", 4), provider("b", 4));
    let ladder = HashedFailoverLayer::new([
        Rung::new(&a, gates!(&a)).map(to(&format!("http://{closed}/"))),
        Rung::new(&b, gates!(&b)).tier(1).map(to(&free.at("/echo"))),
    ])
    .unwrap()
    .resend(Reusable::new(64 << 10));
    let client = with(TowerMiddleware::new(ladder));
    let response = client.post("http://placeholder.invalid").body("Once").send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "Once");
}

#[tokio::test]
async fn the_stack_around_the_client() {
    let server = server().await;
    server.counts.flaky.store(1, SeqCst);
    let p = provider("llm", 2);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(gates!(&p))
        .service(HttpService::new(reqwest::Client::new()));
    let request = http::Request::put(server.at("/flaky")).body(Body::from("sent")).unwrap();
    let response = service.oneshot(request).await.unwrap().into_reqwest();
    assert_eq!(response.url().as_str(), server.at("/flaky"));
    assert_eq!(response.text().await.unwrap(), "sent");
}

#[test]
fn every_layer_fits_over_a_borrowed_chain() {
    fn fits<L: for<'a> Layer<NextService<'a>>>(_: &L) {}
    let p = provider("llm", 2);
    fits(&retry());
    fits(&gates!(&p));
    fits(&TaskLayer::new());
}
