//! reqwest as a service of http types.

use crate::{convert::into_http, next::give};
use reqwest::Body;
use reqwest_middleware::ClientWithMiddleware;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};
use tower_service::Service;

/// `reqwest::Client`, or `ClientWithMiddleware`, as a service of http types: what tower layers stand
/// around when they stand outside of the client.
///
/// Responses keep their URL; [`IntoReqwest`](crate::IntoReqwest) is the way back to a
/// `reqwest::Response`.
///
/// With a `ClientWithMiddleware` the request's extensions become the chain's, so its middlewares see
/// the task and whatever else the caller put there; what they leave is on the response. If the call
/// fails there is no response, and it is lost. Initialisers (`with_init`) act on the request builder,
/// which is not used here.
///
/// ```no_run
/// use tower::{Service, ServiceBuilder, ServiceExt, timeout::TimeoutLayer};
/// use tower_herd_reqwest::{HttpService, IntoReqwest};
///
/// # async fn run() -> Result<(), tower_herd::BoxError> {
/// let mut service = ServiceBuilder::new()
///     .layer(TimeoutLayer::new(std::time::Duration::from_secs(30)))
///     .service(HttpService::new(reqwest::Client::new()));
///
/// let request = http::Request::get("https://llm.example/v1/models").body(reqwest::Body::default())?;
/// let response: reqwest::Response = service.ready().await?.call(request).await?.into_reqwest();
/// println!("{}: {}", response.url().clone(), response.text().await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct HttpService<T>(T);

impl<T: HttpClient> HttpService<T> {
    /// The client as a service.
    #[must_use]
    pub fn new(client: T) -> Self {
        HttpService(client)
    }
}

impl<T> HttpService<T> {
    /// The client.
    pub fn get_ref(&self) -> &T {
        &self.0
    }

    /// The client, owned.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T: HttpClient> Service<http::Request<Body>> for HttpService<T> {
    type Response = http::Response<Body>;
    type Error = T::Error;
    type Future = T::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.0.ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> T::Future {
        self.0.send(request)
    }
}

/// The two clients that [`HttpService`] takes. Sealed.
pub trait HttpClient: sealed::Sealed {
    /// What a call fails with: the client's own error.
    type Error;
    /// A call.
    type Future: Future<Output = Result<http::Response<Body>, Self::Error>>;
    #[doc(hidden)]
    fn ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>>;
    #[doc(hidden)]
    fn send(&mut self, request: http::Request<Body>) -> Self::Future;
}

mod sealed {
    #[allow(unnameable_types, reason = "so that nobody else can implement `HttpClient`")]
    pub trait Sealed {}
    impl Sealed for reqwest::Client {}
    impl Sealed for reqwest_middleware::ClientWithMiddleware {}
}

impl HttpClient for reqwest::Client {
    type Error = reqwest::Error;
    type Future = ClientFuture;

    fn ready(&mut self, cx: &mut Context<'_>) -> Poll<reqwest::Result<()>> {
        Service::<reqwest::Request>::poll_ready(self, cx)
    }

    fn send(&mut self, request: http::Request<Body>) -> ClientFuture {
        ClientFuture(match reqwest::Request::try_from(request) {
            Ok(request) => Ok(Service::call(self, request)),
            Err(error) => Err(Some(error)),
        })
    }
}

/// A call of a `reqwest::Client`.
#[must_use = "futures do nothing unless polled"]
pub struct ClientFuture(Result<Pending, Option<reqwest::Error>>);

type Pending = <reqwest::Client as Service<reqwest::Request>>::Future;

impl Future for ClientFuture {
    type Output = reqwest::Result<http::Response<Body>>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Ok(pending) => Pin::new(pending).poll(cx).map_ok(into_http),
            Err(error) => Poll::Ready(Err(error.take().expect("polled after it was done"))),
        }
    }
}

impl fmt::Debug for ClientFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientFuture")
    }
}

impl HttpClient for ClientWithMiddleware {
    type Error = reqwest_middleware::Error;
    type Future = ChainFuture;

    fn ready(&mut self, cx: &mut Context<'_>) -> Poll<reqwest_middleware::Result<()>> {
        Service::<reqwest::Request>::poll_ready(self, cx)
    }

    fn send(&mut self, request: http::Request<Body>) -> ChainFuture {
        let client = self.clone();
        // Boxed as the client's own service is, but with the extensions, which that one leaves empty.
        ChainFuture(Box::pin(async move {
            let mut extensions = request.extensions().clone();
            let request = reqwest::Request::try_from(request)?;
            let response = client.execute_with_extensions(request, &mut extensions).await?;
            let mut response = into_http(response);
            give(extensions, &mut response);
            Ok(response)
        }))
    }
}

/// A call of a `ClientWithMiddleware`.
#[must_use = "futures do nothing unless polled"]
pub struct ChainFuture(Pin<Box<dyn Future<Output = ChainResult> + Send>>);

type ChainResult = reqwest_middleware::Result<http::Response<Body>>;

impl Future for ChainFuture {
    type Output = ChainResult;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for ChainFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChainFuture")
    }
}
