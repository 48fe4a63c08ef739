//! Whole stacks inside a chain and around a client, over real sockets.

mod common;

use common::{Again, chain, server, with};
use reqwest::Body;
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware};
use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering::SeqCst},
    task::{Context, Poll},
    time::Duration,
};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt, layer::util::Identity, limit::GlobalConcurrencyLimitLayer,
    retry::RetryLayer, timeout::TimeoutLayer, util::MapResponseLayer,
};
use tower_herd::BoxError;
use tower_herd_reqwest::{
    ChainFuture, ClientFuture, HttpService, IntoReqwest, NextFuture, NextService, TowerMiddleware,
    clone_request,
};

type HttpRequest = http::Request<Body>;

#[tokio::test]
async fn twelve_in_parallel_stay_at_the_limit_of_two() {
    let server = server().await;
    // The layer is applied to each request; the semaphore lives in the layer.
    let stack = ServiceBuilder::new()
        .layer(RetryLayer::new(Again(1)))
        .layer(GlobalConcurrencyLimitLayer::new(2))
        .into_inner();
    let client = with(TowerMiddleware::new(stack));
    let calls = (0..12).map(|_| {
        let request = client.get(server.at("/work"));
        tokio::spawn(async move { request.send().await.unwrap().status() })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap(), 200);
    }
    assert_eq!((server.counts.wire(), server.counts.peak.load(SeqCst)), (12, 2));
}

/// A ladder in small: the first of two rungs, over two clones of the one inner service, that succeeds.
#[derive(Clone)]
struct Ladder<L>([L; 2], [http::Uri; 2]);
impl<S: Clone, L: Layer<S>> Layer<S> for Ladder<L> {
    type Service = Rungs<L::Service>;
    fn layer(&self, inner: S) -> Self::Service {
        Rungs(self.0.each_ref().map(|layer| layer.layer(inner.clone())), self.1.clone())
    }
}
struct Rungs<S>([S; 2], [http::Uri; 2]);
impl<S> Service<HttpRequest> for Rungs<S>
where
    S: Service<HttpRequest, Response = http::Response<Body>, Error = BoxError> + Clone,
{
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = Walk<S>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, mut request: HttpRequest) -> Walk<S> {
        let [first, second] = self.1.clone();
        let mut again = clone_request(&mut request).expect("the test sends bytes");
        (*request.uri_mut(), *again.uri_mut()) = (first, second);
        Walk {
            first: Box::pin(self.0[0].clone().oneshot(request)),
            second: Some((self.0[1].clone(), again)),
            walk: None,
        }
    }
}
type Shot<S> = Pin<Box<tower::util::Oneshot<S, HttpRequest>>>;
struct Walk<S: Service<HttpRequest>> {
    first: Shot<S>,
    second: Option<(S, HttpRequest)>,
    walk: Option<Shot<S>>,
}
impl<S: Service<HttpRequest>> Unpin for Walk<S> {}
impl<S> Future for Walk<S>
where
    S: Service<HttpRequest, Response = http::Response<Body>, Error = BoxError>,
{
    type Output = Result<http::Response<Body>, BoxError>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.walk.is_none() {
            match std::task::ready!(self.first.as_mut().poll(cx)) {
                Ok(response) if response.status().is_success() => return Poll::Ready(Ok(response)),
                _ => (),
            }
            let (service, request) = self.second.take().expect("polled after it was done");
            self.walk = Some(Box::pin(service.oneshot(request)));
        }
        self.walk.as_mut().expect("set above").as_mut().poll(cx)
    }
}

#[tokio::test]
async fn a_ladder_of_stacks_over_clones_of_the_one_inner_service() {
    let (busy, free) = (server().await, server().await);
    let rung = ServiceBuilder::new()
        .layer(GlobalConcurrencyLimitLayer::new(1))
        .layer(TimeoutLayer::new(Duration::from_secs(5)))
        .into_inner();
    let urls = [busy.at("/throttled"), free.at("/redirect/307")].map(|url| url.parse().unwrap());
    let client = with(TowerMiddleware::new(Ladder([rung.clone(), rung], urls)));
    let response = client.post("http://placeholder.invalid").body("task").send().await.unwrap();
    assert_eq!(response.url().as_str(), free.at("/there"), "a cloned body still follows a 307");
    assert_eq!(response.text().await.unwrap(), "task");
    let wire: Vec<_> = busy.counts.take().into_iter().chain(free.counts.take()).map(|s| s.path).collect();
    assert_eq!(wire, ["/throttled", "/redirect/307", "/there"]);
}

#[tokio::test]
async fn a_response_body_may_be_of_any_type_and_holds_its_guard_until_it_ends() {
    /// Holds something until the body is dropped, as a slot is held.
    struct Held(Body, #[expect(dead_code, reason = "held, and counted by its drop")] Arc<()>);
    impl http_body::Body for Held {
        type Data = bytes::Bytes;
        type Error = reqwest::Error;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, reqwest::Error>>> {
            Pin::new(&mut self.0).poll_frame(cx)
        }
    }
    let server = server().await;
    let slot = Arc::new(());
    let held = slot.clone();
    let hold = MapResponseLayer::new(move |r: http::Response<Body>| r.map(|body| Held(body, held.clone())));
    let client = with(TowerMiddleware::new(hold));
    let free = Arc::strong_count(&slot);
    let response = client.post(server.at("/echo")).body("streamed").send().await.unwrap();
    assert_eq!(Arc::strong_count(&slot), free + 1);
    assert_eq!(response.text().await.unwrap(), "streamed");
    assert_eq!(Arc::strong_count(&slot), free);
    // A body that is given up gives its guard back too.
    drop(client.get(server.at("/stall")).send().await.unwrap());
    assert_eq!(Arc::strong_count(&slot), free);
}

#[tokio::test]
async fn both_clients_as_services() {
    async fn go<T>(service: T, url: String) -> reqwest::Response
    where
        T: Service<HttpRequest, Response = http::Response<Body>, Error: Into<BoxError>> + Clone,
    {
        let retry = RetryLayer::new(Again(2));
        let service = ServiceBuilder::new().layer(retry).map_err(|e: T::Error| e.into()).service(service);
        let request = http::Request::post(url).body("sent".into()).unwrap();
        service.oneshot(request).await.unwrap().into_reqwest()
    }
    let server = server().await;
    for chained in [false, true] {
        server.counts.flaky.store(2, SeqCst);
        let url = server.at("/flaky");
        let response = match chained {
            false => go(HttpService::new(reqwest::Client::new()), url.clone()).await,
            true => go(HttpService::new(chain(vec![])), url.clone()).await,
        };
        assert_eq!((response.status().as_u16(), response.url().as_str()), (200, url.as_str()));
        assert_eq!(response.text().await.unwrap(), "sent");
        assert_eq!(server.counts.take().len(), 3);
    }
}

#[tokio::test]
async fn requests_that_reqwest_cannot_take_are_its_own_errors() {
    let request = || http::Request::get("/no/host").body(Body::default()).unwrap();
    let error = HttpService::new(reqwest::Client::new()).oneshot(request()).await.unwrap_err();
    assert!(error.is_builder(), "{error:?}");
    let error = HttpService::new(chain(vec![])).oneshot(request()).await.unwrap_err();
    assert!(error.is_builder(), "{error:?}");
    let cut = tower::util::MapRequestLayer::new(move |_: HttpRequest| request());
    let error = with(TowerMiddleware::new(cut)).get("http://a.invalid").send().await.unwrap_err();
    assert!(error.is_builder(), "{error:?}");
}

#[test]
fn what_is_send_and_sync() {
    fn send<T: Send>() {}
    fn shared<T: Send + Sync + Clone + 'static>() {}
    fn sent<T: Send>(_: T) {}
    shared::<HttpService<reqwest::Client>>();
    shared::<HttpService<ClientWithMiddleware>>();
    shared::<TowerMiddleware<Identity>>();
    shared::<NextService<'static>>();
    send::<(ClientFuture, ChainFuture, NextFuture<'static>)>();

    let client = || ClientBuilder::new(reqwest::Client::new());
    let stack = || {
        let retry = RetryLayer::new(Again(1));
        ServiceBuilder::new().layer(retry).layer(GlobalConcurrencyLimitLayer::new(1)).into_inner()
    };
    sent(client().with(TowerMiddleware::new(stack())).build().get("http://a.invalid").send());
    // A builder is a layer too.
    sent(client().with(TowerMiddleware::new(ServiceBuilder::new().layer(stack()))).build());
    let boxed: Arc<dyn Middleware> = Arc::new(TowerMiddleware::new(stack()));
    sent(client().with_arc(boxed).build().get("http://a.invalid").send());
}
