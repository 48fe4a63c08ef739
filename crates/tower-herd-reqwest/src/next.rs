//! The rest of a chain, as a service.

use crate::{convert::into_http, error::into_layer_error};
use http::Extensions;
use reqwest::{Body, Url};
use reqwest_middleware::Next;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
};
use tower_herd::{BoxError, Safety, Task};
use tower_service::Service;

/// What one run through a [`TowerMiddleware`](crate::TowerMiddleware) shares between its attempts.
///
/// It belongs to the run, not to the request: a layer that clones, rebuilds or never sends the
/// request can then lose nothing, and an attempt that fails or is dropped leaves it whole.
pub(crate) struct Run {
    /// The extensions of the chain, as the last attempt that ended left them.
    chain: Mutex<Extensions>,
    /// The extensions inside the `reqwest::Request`, its timeout among them. They are reqwest's
    /// business: kept from the chain, lest the timeout of one request leak into the caller's
    /// extensions and from there into the next request.
    own: Extensions,
    /// The URL asked for, with the fragment that `http::Uri` has no place for.
    pub(crate) url: Url,
}

impl Run {
    /// Turns the request into http types and takes from it, and from the chain, what is to be kept.
    pub(crate) fn start(
        request: reqwest::Request,
        extensions: &mut Extensions,
    ) -> reqwest::Result<(Run, http::Request<Body>)> {
        let url = request.url().clone();
        let mut request: http::Request<Body> = request.try_into()?;
        let chain = std::mem::take(extensions);
        let own = std::mem::replace(request.extensions_mut(), chain.clone());
        // A stack around the whole chain puts its task into the request: the same task goes on here.
        adopt::<Task>(&own, request.extensions_mut());
        adopt::<Safety>(&own, request.extensions_mut());
        Ok((Run { chain: Mutex::new(chain), own, url }, request))
    }

    /// The extensions for whoever stands outside.
    pub(crate) fn finish(&mut self) -> Extensions {
        std::mem::take(self.chain.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// An attempt begins: what the rest of the chain gets.
    fn depart(&self, request: http::Request<Body>) -> reqwest::Result<(reqwest::Request, Extensions)> {
        let mut extensions = self.chain().clone();
        let (mut head, body) = request.into_parts();
        extensions.extend(std::mem::replace(&mut head.extensions, self.own.clone()));
        let asked = self.url.fragment().is_some() && head.uri == *self.url.as_str();
        let mut request = reqwest::Request::try_from(http::Request::from_parts(head, body))?;
        if asked {
            request.url_mut().clone_from(&self.url);
        }
        if request.body().and_then(Body::as_bytes).is_some_and(<[u8]>::is_empty) {
            *request.body_mut() = None;
        }
        Ok((request, extensions))
    }

    /// An attempt is over: what it leaves for the layers, for the next attempt and for the caller.
    fn arrive(&self, mut left: Extensions) -> Extensions {
        let mut chain = self.chain();
        // What the layers decided for this one request ends with it: a caller who uses his extensions
        // for another request must not find it under the deadline of this one.
        keep_old::<Task>(&chain, &mut left);
        keep_old::<Safety>(&chain, &mut left);
        chain.clone_from(&left);
        left
    }

    fn chain(&self) -> std::sync::MutexGuard<'_, Extensions> {
        // No code of others runs under the lock but clones of extensions.
        self.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn adopt<T: Clone + Send + Sync + 'static>(from: &Extensions, to: &mut Extensions) {
    if let (Some(value), None) = (from.get::<T>(), to.get::<T>()) {
        to.insert(value.clone());
    }
}

fn keep_old<T: Clone + Send + Sync + 'static>(old: &Extensions, new: &mut Extensions) {
    match old.get::<T>() {
        Some(value) => drop(new.insert(value.clone())),
        None => drop(new.remove::<T>()),
    }
}

/// The rest of a reqwest-middleware chain: the service that the layers of a
/// [`TowerMiddleware`](crate::TowerMiddleware) stand around.
///
/// It borrows the chain, hence the lifetime, and hence layers that ask for a `'static` service
/// (tower's `buffer`, anything that boxes) do not fit in here. It is cheap to clone, always ready, and
/// may be called as often as layers please: every call is one run of the middlewares further inside.
#[derive(Clone)]
pub struct NextService<'a> {
    next: Next<'a>,
    run: &'a Run,
}

impl<'a> NextService<'a> {
    pub(crate) fn new(next: Next<'a>, run: &'a Run) -> Self {
        NextService { next, run }
    }
}

impl fmt::Debug for NextService<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NextService").field("url", &self.run.url.as_str()).finish_non_exhaustive()
    }
}

impl<'a> Service<http::Request<Body>> for NextService<'a> {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = NextFuture<'a>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> NextFuture<'a> {
        let NextService { next, run } = self.clone();
        // Boxed: the call borrows the extensions that stand beside it. The chain boxes each
        // middleware's future anyway.
        NextFuture(Box::pin(async move {
            let (request, mut extensions) = run.depart(request)?;
            let result = next.run(request, &mut extensions).await;
            let left = run.arrive(extensions);
            let mut response = into_http(result.map_err(into_layer_error)?);
            give(left, &mut response);
            Ok(response)
        }))
    }
}

/// Puts what the middlewares left beside the response into it; the response's own entries win.
pub(crate) fn give(mut extensions: Extensions, response: &mut http::Response<Body>) {
    extensions.extend(std::mem::take(response.extensions_mut()));
    *response.extensions_mut() = extensions;
}

/// The future of [`NextService`].
#[must_use = "futures do nothing unless polled"]
pub struct NextFuture<'a>(Pin<Box<dyn Future<Output = Result<http::Response<Body>, BoxError>> + Send + 'a>>);

impl Future for NextFuture<'_> {
    type Output = Result<http::Response<Body>, BoxError>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for NextFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NextFuture")
    }
}
