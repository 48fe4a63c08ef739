//! Errors keep their type, and what a layer says is found in the chain's error.

mod common;

use common::{chain, server, with};
use std::{error::Error, io, sync::Arc, time::Duration};
use tower::{Service, ServiceBuilder, ServiceExt, timeout::TimeoutLayer, util::MapErrLayer};
use tower_herd::{BoxError, Refusal, RefusalKind};
use tower_herd_reqwest::{HttpService, TowerMiddleware, error::LayerError};

/// The links below an error, itself first.
fn links<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}
fn is_io(kind: io::ErrorKind) -> impl Fn(&(dyn Error + 'static)) -> bool {
    move |error| error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == kind)
}
fn is_hyper_connect(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref().is_some_and(hyper_util::client::legacy::Error::is_connect)
}

/// A layer that always says no.
#[derive(Clone)]
struct Refusing;
impl<S> tower::Layer<S> for Refusing {
    type Service = Refusing;
    fn layer(&self, _: S) -> Refusing {
        Refusing
    }
}
impl Service<http::Request<reqwest::Body>> for Refusing {
    type Response = http::Response<reqwest::Body>;
    type Error = BoxError;
    type Future = std::future::Ready<Result<Self::Response, BoxError>>;
    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
        std::task::Poll::Ready(Ok(()))
    }
    fn call(&mut self, _: http::Request<reqwest::Body>) -> Self::Future {
        let refusal = Refusal::new(RefusalKind::Paused, "it asked for a pause", "llm".into(), None);
        std::future::ready(Err(refusal.into()))
    }
}

#[tokio::test]
async fn a_refusal_is_found_through_any_number_of_stacks() {
    let plain = || TowerMiddleware::new(tower::layer::util::Identity::new());
    for outer in 0..3 {
        let mut middlewares: Vec<Arc<dyn reqwest_middleware::Middleware>> = vec![];
        middlewares.extend((0..outer).map(|_| Arc::new(plain()) as _));
        middlewares.push(Arc::new(TowerMiddleware::new(Refusing)));
        let error = chain(middlewares).get("http://placeholder.invalid").send().await.unwrap_err();
        assert!(error.is_middleware());
        assert_eq!(Refusal::find(&error).map(|r| r.kind), Some(RefusalKind::Paused), "{outer}: {error:?}");
        assert_eq!(error.to_string(), "not sent to llm: it asked for a pause; trying again will not help");
    }
    // And outside the client, with a stack around the chain.
    let mut service = HttpService::new(with(TowerMiddleware::new(Refusing)));
    let request = http::Request::get("http://placeholder.invalid").body(reqwest::Body::default()).unwrap();
    let error = service.ready().await.unwrap().call(request).await.unwrap_err();
    assert!(Refusal::find(&error).is_some());
}

#[tokio::test]
async fn a_layers_own_error_is_a_middleware_error_that_holds_it() {
    let server = server().await;
    let client = with(TowerMiddleware::new(TimeoutLayer::new(Duration::from_millis(30))));
    let error = client.get(server.at("/slow")).send().await.unwrap_err();
    assert!(error.is_middleware() && !error.is_timeout(), "only reqwest's own timeouts are told so");
    assert!(links(&error).any(<dyn Error>::is::<tower::timeout::error::Elapsed>), "{error:?}");
    let reqwest_middleware::Error::Middleware(held) = error else { panic!("{error:?}") };
    let held = held.downcast::<LayerError>().unwrap().into_inner();
    assert!(held.is::<tower::timeout::error::Elapsed>());
}

#[tokio::test]
async fn errors_of_reqwest_come_out_as_such() {
    let redirects = reqwest::Client::builder().redirect(reqwest::redirect::Policy::custom(|a| a.error("no")));
    let layers = ServiceBuilder::new().layer(TimeoutLayer::new(Duration::from_secs(5))).into_inner();
    let client = reqwest_middleware::ClientBuilder::new(redirects.build().unwrap())
        .with(TowerMiddleware::new(layers))
        .build();
    let server = server().await;
    let url = server.at("/redirect/302");
    let error = client.get(&url).send().await.unwrap_err();
    assert!(error.is_redirect() && error.url().is_some_and(|u| u.as_str() == url), "{error:?}");
    let error = client.get("ftp://placeholder.invalid").send().await.unwrap_err();
    assert!(error.is_builder(), "{error:?}");
    let error = client.get(server.at("/slow")).timeout(Duration::from_millis(30)).send().await.unwrap_err();
    assert!(error.is_timeout() && error.is_request() && !error.is_connect(), "{error:?}");
}

// What a classifier can find of a connect error without knowing reqwest: `mark_connect_error`.
#[tokio::test]
async fn a_refused_connection_tells_so_in_the_chain_of_sources() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let inside: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let log = inside.clone();
    let look = MapErrLayer::new(move |error: BoxError| {
        assert!(error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect));
        assert!(links(&*error).any(is_hyper_connect));
        assert!(links(&*error).any(is_io(io::ErrorKind::ConnectionRefused)));
        log.lock().unwrap().extend(links(&*error).map(|e| format!("{e}")));
        error
    });
    let error = with(TowerMiddleware::new(look)).get(format!("http://{free}/")).send().await.unwrap_err();
    assert!(error.is_connect(), "{error:?}");
    assert!(links(&error).any(is_hyper_connect), "through the transparent error of the chain too");
    assert!(links(&error).any(is_io(io::ErrorKind::ConnectionRefused)));
    println!("{:#?}", inside.lock().unwrap());
    assert_eq!(inside.lock().unwrap().len(), 4);

    // A name that does not resolve proves as much, and only hyper-util's error tells it.
    let error = with(TowerMiddleware::new(tower::layer::util::Identity::new()))
        .get("http://placeholder.invalid/")
        .send()
        .await
        .unwrap_err();
    assert!(error.is_connect() && links(&error).any(is_hyper_connect), "{error:?}");
    assert!(!links(&error).any(is_io(io::ErrorKind::ConnectionRefused)));
}
