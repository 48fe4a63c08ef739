//! reqwest as a service, and the stack inside a reqwest-middleware chain.

use crate::{
    gaps, gates, ms, provider, refusing, secs,
    server::{Answer, Server, answer},
    settled,
};
use reqwest::Body;
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use tokio::time::{Instant, sleep};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    BoxError, HashedFailoverLayer, HttpClassify, JitteredRetryLayer, Provider, Refusal, RefusalKind, Safety,
    Task, TaskLayer, failover::Rung,
};
use tower_herd_reqwest::{HttpService, IntoReqwest, Reusable, TowerMiddleware};

fn retry() -> JitteredRetryLayer<HttpClassify, Reusable> {
    JitteredRetryLayer::new().base(ms(20)).resend(Reusable::new(64 << 10))
}

/// The whole stack inside the client.
fn chain(p: &Provider) -> ClientWithMiddleware {
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(gates!(p)).into_inner();
    ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(stack)).build()
}

fn to(url: &str) -> impl Fn(http::Request<Body>) -> http::Request<Body> + Clone + Send + Sync + use<> {
    let uri: http::Uri = url.parse().unwrap();
    move |mut request| {
        *request.uri_mut() = uri.clone();
        request
    }
}

/// A ladder of these two, inside the client.
fn ladder(a: (&Provider, &str), b: (&Provider, &str)) -> ClientWithMiddleware {
    let ladder = HashedFailoverLayer::new([
        Rung::new(a.0, gates!(a.0)).map(to(a.1)),
        Rung::new(b.0, gates!(b.0)).tier(1).map(to(b.1)),
    ]);
    let ladder = ladder.unwrap().resend(Reusable::new(64 << 10));
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(ladder).into_inner();
    ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(stack)).build()
}

/// Tells the first call to wait a second.
fn wait_first(n: usize, _: &http::request::Parts) -> Answer {
    if n == 0 { answer(429).header("retry-after", 1) } else { answer(200) }
}

fn assert_waited(server: &Server, calls: usize) {
    let gaps = gaps(&server.counts.times());
    assert_eq!(gaps.len(), calls);
    assert!(gaps.iter().all(|gap| (secs(1)..secs(4)).contains(gap)), "{gaps:?}");
}

#[tokio::test]
async fn a_chain_keeps_the_wait_of_its_server_for_all_its_callers() {
    let server = Server::start(wait_first).await;
    let p = provider("p", 8);
    let client = chain(&p);
    let call = |client: ClientWithMiddleware, url: String| async move {
        client.post(url).body("{}").send().await.unwrap().status()
    };
    let first = tokio::spawn(call(client.clone(), server.url.clone()));
    while p.throttled() == 0 {
        sleep(ms(1)).await;
    }
    let others = (0..5).map(|_| tokio::spawn(call(client.clone(), server.url.clone())));
    for call in others.chain([first]).collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap(), 200);
    }
    assert_waited(&server, 6);
}

#[tokio::test]
async fn so_does_a_stack_around_either_client() {
    let server = Server::start(wait_first).await;
    let p = provider("p", 8);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(gates!(&p))
        .service(HttpService::new(reqwest::Client::new()));
    let request = http::Request::post(&server.url).body(Body::from("{}")).unwrap();
    assert_eq!(service.oneshot(request).await.unwrap().into_reqwest().text().await.unwrap(), "ok");
    assert_waited(&server, 1);

    let server = Server::start(wait_first).await;
    let p = provider("p", 8);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(gates!(&p))
        .service(HttpService::new(ClientBuilder::new(reqwest::Client::new()).build()));
    let request = http::Request::post(&server.url).body(Body::from("{}")).unwrap();
    assert_eq!(service.oneshot(request).await.unwrap().into_reqwest().text().await.unwrap(), "ok");
    assert_waited(&server, 1);
}

// A body that a layer wraps is a stream to reqwest, and a stream does not follow these.
#[tokio::test]
async fn redirects_that_keep_the_body_keep_it_under_the_whole_stack() {
    for status in [307, 308] {
        let there = Server::start(|n, head| match n {
            0 => answer(503),
            _ => answer(200).body(head.headers["content-length"].to_str().unwrap()),
        })
        .await;
        let to = there.url.clone();
        let here = Server::start(move |_, _| answer(status).header("location", &to)).await;
        let p = provider("p", 8);
        let request = chain(&p).post(&here.url).with_extension(Safety::Costly).body("payload");
        let reply = request.send().await.unwrap();
        assert_eq!(reply.url().as_str().trim_end_matches('/'), there.url);
        assert_eq!(reply.text().await.unwrap(), "7", "{status}");
        // The repetition starts where the caller asked, and is redirected again.
        assert_eq!((here.counts.calls(), there.counts.calls()), (2, 2), "{status}");
        settled(&p).await;
    }
}

#[tokio::test]
async fn a_task_in_the_extensions_binds_the_chain() {
    let server = Server::start(|_, _| answer(503)).await;
    let p = provider("p", 8);
    let task = Task::new("mine").allowance(2);
    let request = chain(&p).get(&server.url).with_extension(task.clone());
    assert_eq!(request.send().await.unwrap().status(), 503, "the last real reply");
    assert_eq!((server.counts.calls(), task.spent()), (2, 1));
}

#[tokio::test]
async fn a_chain_falls_over_to_its_second_server() {
    let busy = Server::start(|_, _| answer(429).header("retry-after", 60)).await;
    let broken = Server::start(|_, _| answer(503)).await;
    for first in [&busy, &broken] {
        let free = Server::start(|_, _| answer(200).body("from b")).await;
        let (a, b) = (provider("a", 8), provider("b", 8));
        let client = ladder((&a, &first.url), (&b, &free.url));
        let request = client.post("http://ladder.invalid").with_extension(Safety::Costly).body("{}");
        assert_eq!(request.send().await.unwrap().text().await.unwrap(), "from b");
        assert_eq!((first.counts.calls(), free.counts.calls()), (1, 1));
        settled(&a).await;
        settled(&b).await;
    }
}

#[tokio::test]
async fn a_write_moves_on_from_a_refused_connection_and_stays_after_an_error() {
    let (_socket, closed) = refusing();
    let broken = Server::start(|_, _| answer(500)).await;
    for (first, status, calls) in [(&closed, 200, 1), (&broken.url, 500, 0)] {
        let free = Server::start(|_, _| answer(200)).await;
        let client = ladder((&provider("a", 8), first), (&provider("b", 8), &free.url));
        let reply = client.post("http://ladder.invalid").body("once").send().await.unwrap();
        assert_eq!((reply.status().as_u16(), free.counts.calls()), (status, calls));
    }
}

// A refusal keeps its instant through reqwest-middleware's own error, and through a stack around that.
#[tokio::test]
async fn a_refusal_is_found_in_the_error_of_a_chain_and_of_a_stack_around_it() {
    let server = Server::start(|_, _| answer(429).header("retry-after", 60)).await;
    let p = provider("p", 8);
    let stack =
        ServiceBuilder::new().layer(TaskLayer::new().deadline(secs(5))).layer(gates!(&p)).into_inner();
    let client = ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(stack)).build();
    assert_eq!(client.get(&server.url).send().await.unwrap().status(), 429);

    let is_refusal = |refusal: Option<&Refusal>| {
        let refusal = refusal.expect("found");
        assert_eq!((refusal.kind, &*refusal.provider), (RefusalKind::Paused, "p"));
        assert!(refusal.wait().unwrap() > secs(50));
    };
    let start = Instant::now();
    is_refusal(Refusal::find(&client.get(&server.url).send().await.unwrap_err()));
    // An outer stack, of another provider, whose task goes on inside: to it this is no failure.
    let outer = provider("outer", 8);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(secs(5)))
        .layer(gates!(&outer))
        .service(HttpService::new(client));
    let request = http::Request::get(&server.url).body(Body::default()).unwrap();
    let error: BoxError = service.oneshot(request).await.unwrap_err();
    is_refusal(Refusal::find(&*error));
    assert!(start.elapsed() < secs(5) && outer.paused_until().is_none());
    assert_eq!(server.counts.calls(), 1, "nothing was sent");
    assert_eq!((p.in_flight(), outer.in_flight()), (0, 0));
}
