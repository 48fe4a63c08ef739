//! A scripted server on loopback, and layers and middlewares that the tests share.
#![allow(dead_code, reason = "each test binary uses a part")]

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::BoxBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use reqwest::{Body, Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tower_herd::BoxError;

/// What the server saw of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub method: http::Method,
    pub path: String,
    pub length: Option<String>,
    pub body: Bytes,
}

#[derive(Default)]
pub struct Counts {
    pub seen: Mutex<Vec<Seen>>,
    pub in_flight: AtomicUsize,
    pub peak: AtomicUsize,
    /// How many requests to `/flaky` fail before one succeeds.
    pub flaky: AtomicUsize,
}

impl Counts {
    pub fn wire(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

pub struct Server {
    pub url: String,
    pub counts: Arc<Counts>,
}

impl Server {
    pub fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }
}

type Reply = http::Response<BoxBody<Bytes, Infallible>>;

/// `/echo`, `/slow` (200 ms), `/work` (20 ms), `/stall` (a head, then no body), `/redirect/307` and so
/// on, `/flaky` (503, see [`Counts::flaky`]), `/throttled` (429, `retry-after: 600`).
pub async fn server() -> Server {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let counts = Arc::new(Counts::default());
    let shared = counts.clone();
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let counts = shared.clone();
            tokio::spawn(async move {
                let service = hyper::service::service_fn(move |request| answer(counts.clone(), request));
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                builder.serve_connection(TokioIo::new(socket), service).await.ok();
            });
        }
    });
    Server { url, counts }
}

async fn answer(
    counts: Arc<Counts>,
    request: http::Request<hyper::body::Incoming>,
) -> Result<Reply, Infallible> {
    counts.peak.fetch_max(counts.in_flight.fetch_add(1, SeqCst) + 1, SeqCst);
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let path = head.uri.path().to_owned();
    let length = head.headers.get("content-length").map(|v| v.to_str().unwrap().to_owned());
    counts.seen.lock().unwrap().push(Seen {
        method: head.method,
        path: path.clone(),
        length,
        body: body.clone(),
    });
    match path.as_str() {
        "/slow" => tokio::time::sleep(Duration::from_millis(200)).await,
        "/work" => tokio::time::sleep(Duration::from_millis(20)).await,
        _ => (),
    }
    let reply = http::Response::builder();
    let reply = match path.as_str() {
        "/stall" => reply.body(StreamBody::new(futures_util::stream::pending()).boxed()),
        "/throttled" => reply.status(429).header("retry-after", "600").body(Empty::new().boxed()),
        "/flaky" if counts.flaky.load(SeqCst) > 0 => {
            counts.flaky.fetch_sub(1, SeqCst);
            reply.status(503).body(Full::from("not yet").boxed())
        }
        path => match path.strip_prefix("/redirect/") {
            Some(status) => reply.status(status).header("location", "/there").body(Empty::new().boxed()),
            None => reply.body(Full::from(body).boxed()),
        },
    };
    counts.in_flight.fetch_sub(1, SeqCst);
    Ok(reply.unwrap())
}

/// A chain of these middlewares, outermost first.
pub fn chain(middlewares: Vec<Arc<dyn Middleware>>) -> ClientWithMiddleware {
    ClientWithMiddleware::new(reqwest::Client::new(), middlewares)
}

/// A chain with one middleware.
pub fn with(middleware: impl Middleware) -> ClientWithMiddleware {
    ClientBuilder::new(reqwest::Client::new()).with(middleware).build()
}

/// A body that can be read once only.
pub fn stream(chunks: &'static [&'static str]) -> Body {
    Body::wrap_stream(futures_util::stream::iter(chunks.iter().map(|c| Ok::<_, Infallible>(*c))))
}

/// Sends again, at once, up to this many times, whatever is no success, if the body is reusable.
#[derive(Clone)]
pub struct Again(pub usize);

impl<B> tower::retry::Policy<http::Request<Body>, http::Response<B>, BoxError> for Again {
    type Future = std::future::Ready<()>;
    fn retry(
        &mut self,
        _: &mut http::Request<Body>,
        result: &mut Result<http::Response<B>, BoxError>,
    ) -> Option<Self::Future> {
        if self.0 == 0 || result.as_ref().is_ok_and(|r| r.status().is_success()) {
            return None;
        }
        self.0 -= 1;
        Some(std::future::ready(()))
    }
    fn clone_request(&mut self, request: &http::Request<Body>) -> Option<http::Request<Body>> {
        let body = Bytes::copy_from_slice(request.body().as_bytes()?);
        let mut copy = http::Request::new(Body::from(body));
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.version_mut() = request.version();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        Some(copy)
    }
}

/// A middleware from a function.
pub struct Inspect<F>(pub F);

#[async_trait::async_trait]
impl<F> Middleware for Inspect<F>
where
    F: Fn(&mut Request, &mut http::Extensions) + Send + Sync + 'static,
{
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut http::Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        (self.0)(&mut request, extensions);
        next.run(request, extensions).await
    }
}
