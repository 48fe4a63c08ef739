//! What a request and a response keep on their way through the layers.

mod common;

use common::{Again, Inspect, chain, server, stream, with};
use reqwest::Version;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::Instant;
use tower::{
    ServiceBuilder,
    layer::util::Identity,
    retry::RetryLayer,
    util::{MapRequestLayer, MapResponseLayer},
};
use tower_herd_reqwest::TowerMiddleware;

type HttpRequest = http::Request<reqwest::Body>;

#[tokio::test]
async fn the_url_after_redirects_and_the_text() {
    let server = server().await;
    let client = with(TowerMiddleware::new(Identity::new()));
    let response = client.get(server.at("/redirect/302")).send().await.unwrap();
    assert_eq!(response.url().as_str(), server.at("/there"));
    let response = client.post(server.at("/echo?a=b%20c")).body("text").send().await.unwrap();
    assert_eq!(response.url().as_str(), server.at("/echo?a=b%20c"));
    assert_eq!(response.text().await.unwrap(), "text");
}

#[tokio::test]
async fn the_fragment_of_a_url_for_the_middlewares_inside() {
    let server = server().await;
    let seen = Arc::new(Mutex::new(vec![]));
    let log = seen.clone();
    let look = Arc::new(Inspect(move |r: &mut reqwest::Request, _: &mut _| {
        log.lock().unwrap().push(r.url().fragment().map(str::to_owned));
    }));
    let client = chain(vec![Arc::new(TowerMiddleware::new(Identity::new())), look]);
    let response = client.get(server.at("/echo?q#part")).send().await.unwrap();
    assert_eq!(response.url().as_str(), server.at("/echo?q"), "as reqwest does without layers");
    assert_eq!(*seen.lock().unwrap(), [Some("part".to_owned())]);
}

#[tokio::test]
async fn a_mapped_url_is_where_it_goes_and_what_the_response_says() {
    let server = server().await;
    let target: http::Uri = server.at("/echo").parse().unwrap();
    let map = MapRequestLayer::new(move |mut request: HttpRequest| {
        *request.uri_mut() = target.clone();
        request
    });
    let client = with(TowerMiddleware::new(map));
    let response = client.get("http://placeholder.invalid/#gone").send().await.unwrap();
    assert_eq!(response.url().as_str(), server.at("/echo"));
}

#[tokio::test]
async fn a_response_that_a_layer_made_up_gets_the_url_asked_for() {
    let server = server().await;
    let made_up = MapResponseLayer::new(|_| http::Response::new(reqwest::Body::from("made up")));
    let client = with(TowerMiddleware::new(made_up));
    let response = client.get(server.at("/echo")).send().await.unwrap();
    assert_eq!(response.url().as_str(), server.at("/echo"));
    assert_eq!(response.text().await.unwrap(), "made up");
}

#[tokio::test]
async fn version_headers_and_the_lack_of_a_body() {
    let seen = Arc::new(Mutex::new(vec![]));
    let log = seen.clone();
    let look = Arc::new(Inspect(move |r: &mut reqwest::Request, _: &mut _| {
        log.lock().unwrap().push((r.version(), r.headers().len(), r.body().is_some()));
        *r.version_mut() = Version::HTTP_11;
    }));
    let server = server().await;
    let client = chain(vec![Arc::new(TowerMiddleware::new(Identity::new())), look]);
    let url = server.at("/echo");
    client.get(&url).version(Version::HTTP_10).header("a", "1").header("a", "2").send().await.unwrap();
    client.post(&url).body("x").send().await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [(Version::HTTP_10, 2, false), (Version::HTTP_11, 0, true)]);
    assert_eq!(server.counts.take()[1].length.as_deref(), Some("1"), "still of known length");
}

#[tokio::test]
async fn the_timeout_of_the_request_for_each_attempt() {
    let server = server().await;
    let client = with(TowerMiddleware::new(Identity::new()));
    let limit = Duration::from_millis(60);
    let error = client.get(server.at("/slow")).timeout(limit).send().await.unwrap_err();
    assert!(error.is_timeout(), "{error:?}");

    server.counts.take();
    let client = with(TowerMiddleware::new(RetryLayer::new(Again(2))));
    let start = Instant::now();
    let error = client.get(server.at("/slow")).timeout(limit).send().await.unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(server.counts.wire(), 3);
    assert!(start.elapsed() >= limit * 3, "a fresh timeout for each attempt: {:?}", start.elapsed());
}

#[tokio::test]
async fn the_timeout_of_the_request_while_the_body_is_read() {
    let server = server().await;
    let client = with(TowerMiddleware::new(Identity::new()));
    let response = client.get(server.at("/stall")).timeout(Duration::from_millis(60)).send().await.unwrap();
    let error = response.bytes().await.unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
}

#[tokio::test]
async fn redirects_that_send_the_body_again() {
    let server = server().await;
    for (layer, body) in [(false, false), (true, false), (true, true)] {
        for status in [307, 308] {
            let client = match layer {
                false => chain(vec![]),
                true => with(TowerMiddleware::new(ServiceBuilder::new().retry(Again(1)).into_inner())),
            };
            let request = client.post(server.at(&format!("/redirect/{status}")));
            let streamed = if body { stream(&["pay", "load"]) } else { "payload".into() };
            let response = request.body(streamed).send().await.unwrap();
            // A stream cannot be sent twice, with or without layers: the redirect itself comes back.
            assert_eq!(response.status(), if body { status } else { 200 }, "{status} {layer} {body}");
            assert!(server.counts.take().iter().all(|seen| seen.body == "payload"));
        }
    }
}

#[tokio::test]
async fn a_body_that_is_wrapped_is_a_stream_and_loses_307() {
    let server = server().await;
    let wrap = MapRequestLayer::new(|request: HttpRequest| request.map(reqwest::Body::wrap));
    let client = with(TowerMiddleware::new(wrap));
    let response = client.post(server.at("/redirect/307")).body("payload").send().await.unwrap();
    assert_eq!(response.status(), 307);
    let response = client.post(server.at("/echo")).body("payload").send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "payload");
    assert_eq!(server.counts.take()[1].length.as_deref(), Some("7"), "an exact size hint goes through");
}

#[tokio::test]
async fn a_stream_is_sent_once_and_passed_on_as_it_comes() {
    let server = server().await;
    server.counts.flaky.store(1, std::sync::atomic::Ordering::SeqCst);
    let client = with(TowerMiddleware::new(RetryLayer::new(Again(3))));
    let response = client.post(server.at("/flaky")).body(stream(&["on", "ce"])).send().await.unwrap();
    assert_eq!(response.status(), 503, "the real reply, not an error about the body");
    let seen = server.counts.take();
    assert_eq!((seen.len(), &seen[0].body[..]), (1, &b"once"[..]));

    server.counts.flaky.store(2, std::sync::atomic::Ordering::SeqCst);
    let response = client.post(server.at("/flaky")).body("often").send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "often");
    assert_eq!(server.counts.take().len(), 3);
}
