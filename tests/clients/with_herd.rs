//! One builder on every client.

use crate::{
    gaps,
    grpc::{self, Text, fails, pushing_back, says},
    provider, secs,
    server::{Answer, Server, answer},
    settled,
};
use bytes::Bytes;
use http::uri::PathAndQuery;
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use reqwest_middleware::ClientBuilder;
use tonic::{Code, Request, Status, body::Body};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    Fleet, Herd, Refusal, RefusalKind, Safety, Task, failover::Rung, herd::RungSettings, replay,
};
use tower_herd_reqwest::{HttpService, Reusable, TowerMiddleware};

/// Tells the first call to wait a second, and fails the second one.
fn troubled(n: usize, _: &http::request::Parts) -> Answer {
    match n {
        0 => answer(429).header("retry-after", 1),
        1 => answer(503),
        _ => answer(200),
    }
}

fn assert_waited(server: &Server) {
    let gaps = gaps(&server.counts.times());
    assert_eq!(gaps.len(), 2);
    assert!(gaps.iter().all(|gap| *gap >= secs(1)), "{gaps:?}");
}

#[tokio::test]
async fn around_hyper() {
    let server = Server::start(troubled).await;
    let p = provider("p", 4);
    let herd = Herd::new(&p).llm();
    let handle = herd.handle();
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let service = ServiceBuilder::new().layer(herd).service(client);
    let request = http::Request::post(&server.url).body(Full::from("{}")).unwrap();
    let reply = service.clone().oneshot(request).await.unwrap();
    assert_eq!((reply.status().as_u16(), p.in_flight(), handle.under_way()), (200, 1, 1));
    reply.into_body().collect().await.unwrap();
    assert_waited(&server);
    settled(&p).await;
    assert_eq!(handle.drain(secs(1)).await, 0);
    let request = http::Request::post(&server.url).body(Full::from("{}")).unwrap();
    let error = service.oneshot(request).await.unwrap_err();
    assert_eq!(Refusal::find(&*error).map(|refusal| refusal.kind), Some(RefusalKind::Draining));
}

#[tokio::test]
async fn around_reqwest_and_inside_its_chain() {
    let server = Server::start(troubled).await;
    let p = provider("p", 4);
    let herd = Herd::new(&p).resend(Reusable::new(64 << 10));
    let service = ServiceBuilder::new().layer(herd).service(HttpService::new(reqwest::Client::new()));
    let request = http::Request::get(&server.url).body(reqwest::Body::from("")).unwrap();
    let reply = service.oneshot(request).await.unwrap();
    assert_eq!(reply.status(), 200);
    drop(reply.into_body().collect().await.unwrap());
    assert_waited(&server);

    let server = Server::start(troubled).await;
    let p = provider("q", 4);
    let herd = Herd::new(&p).resend(Reusable::new(64 << 10));
    let chain = ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(herd)).build();
    let reply = chain.get(&server.url).send().await.unwrap();
    assert_eq!(reply.status(), 200);
    drop(reply.bytes().await.unwrap());
    assert_waited(&server);
    settled(&p).await;
    // The refusal is found in what the chain makes of it.
    p.pause_for(secs(60));
    let request = chain.get(&server.url).with_extension(Task::new(1).deadline_in(secs(2)));
    let error = request.send().await.unwrap_err();
    assert_eq!(Refusal::find(&error).map(|refusal| refusal.kind), Some(RefusalKind::Paused));
}

#[tokio::test]
async fn a_ladder_inside_a_chain() {
    let (cheap, dear) = (
        Server::start(|_, _| answer(429).header("retry-after", 60)).await,
        Server::start(|_, _| answer(200)).await,
    );
    let fleet = Fleet::local();
    let to = |url: &str| {
        let url: http::Uri = url.parse().unwrap();
        move |mut request: http::Request<reqwest::Body>| {
            *request.uri_mut() = url.clone();
            request
        }
    };
    let herd = Herd::ladder([
        Rung::new(&fleet.provider("cheap"), RungSettings::new()).map(to(&cheap.url)),
        Rung::new(&fleet.provider("dear"), RungSettings::new()).tier(1).map(to(&dear.url)),
    ]);
    let herd = herd.unwrap().resend(Reusable::new(64 << 10));
    let chain = ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(herd)).build();
    for _ in 0..5 {
        let reply =
            chain.post("http://ladder/").body("{}").with_extension(Safety::Costly).send().await.unwrap();
        assert_eq!(reply.status(), 200);
        drop(reply.bytes().await.unwrap());
    }
    assert_eq!((cheap.counts.times().len(), dear.counts.times().len()), (1, 5), "the cheap one said when");
}

#[tokio::test]
async fn around_a_channel() {
    let server = grpc::Server::start(|n| match n {
        0 => fails(pushing_back(Status::unavailable("not yet"), "1000")),
        1 => fails(Status::unavailable("nor now")),
        _ => says(&["hello"]),
    })
    .await;
    let p = provider("p", 4);
    let herd = Herd::new(&p).resend(replay(64 << 10, Body::new));
    let channel = ServiceBuilder::new().layer(herd).service(server.channel());
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let mut request = Request::new("hi".to_owned());
    request.extensions_mut().insert(Safety::Costly);
    let path = || PathAndQuery::from_static("/test.Test/Say");
    assert_eq!(client.unary(request, path(), Text).await.unwrap().into_inner(), "hello");
    let times: Vec<_> = server.calls().iter().map(|call| call.at).collect();
    assert!(gaps(&times)[0] >= secs(1) && times.len() == 3);
    settled(&p).await;
    // An unkeyed write that failed is not sent again; and what comes in trailers is told to the provider.
    let server = grpc::Server::start(|_| fails(Status::unavailable("gone"))).await;
    let channel = ServiceBuilder::new()
        .layer(Herd::new(&provider("r", 4)).resend(replay(64 << 10, Body::new)))
        .service(server.channel());
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let status = client.unary(Request::new("hi".to_owned()), path(), Text).await.unwrap_err();
    assert_eq!((status.code(), server.calls().len()), (Code::Unavailable, 1));
}
