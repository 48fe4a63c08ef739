//! Tower layers as a middleware.

use crate::{IntoReqwest, NextService, error::into_chain_error, next::Run};
use http::Extensions;
use reqwest::Body;
use reqwest_middleware::{Middleware, Next};
use std::future::poll_fn;
use tower_herd::BoxError;
use tower_layer::Layer;
use tower_service::Service;

/// A tower layer, or a whole stack, as one middleware of a reqwest-middleware chain.
///
/// The layer is applied **once per request**, to the rest of the chain, because that is borrowed. So
/// whatever a layer shares between requests must live in the layer itself, or behind a handle in it,
/// and never in the service it makes: all layers of tower-herd are built so. Of tower's own,
/// `GlobalConcurrencyLimitLayer` works here and `ConcurrencyLimitLayer` limits nothing: each
/// request gets a fresh semaphore.
///
/// A layer fits if it applies to [`NextService`] of every lifetime (so it asks for no `'static`
/// service and boxes none), gives `Send` services and futures, and answers with an `http::Response`
/// whose body is `Send + Sync + 'static`.
///
/// Where it stands in the chain decides what it sees: middlewares added before it run once per
/// request, those after it once per attempt.
///
/// ```no_run
/// use reqwest_middleware::ClientBuilder;
/// use std::time::Duration;
/// use tower::{ServiceBuilder, timeout::TimeoutLayer};
/// use tower_herd::{Fleet, FleetLimitLayer};
/// use tower_herd_reqwest::TowerMiddleware;
///
/// let stack = ServiceBuilder::new()
///     .layer(TimeoutLayer::new(Duration::from_secs(30)))
///     .layer(FleetLimitLayer::new(&Fleet::local().provider("llm")))
///     .into_inner();
/// let client = ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(stack)).build();
/// # let _ = client;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct TowerMiddleware<L>(L);

impl<L> TowerMiddleware<L> {
    /// The layer as a middleware.
    ///
    /// The bound is here too, so that a layer that does not fit is reported on the line that made it.
    #[must_use]
    pub fn new(layer: L) -> Self
    where
        Self: Middleware,
    {
        TowerMiddleware(layer)
    }
}

#[async_trait::async_trait]
impl<L> Middleware for TowerMiddleware<L>
where
    L: Send + Sync + 'static,
    L: for<'a> Layer<NextService<'a>>,
    for<'a> <L as Layer<NextService<'a>>>::Service: Service<http::Request<Body>, Response: IntoReqwest + Send, Error: Into<BoxError> + Send, Future: Send>
        + Send,
{
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let (run, request) = Run::start(request, extensions)?;
        // Gives the extensions back on every way out; a caller who stops waiting gets them too.
        let lent = Lent { run, to: extensions };
        let result: Result<_, BoxError> = async {
            let mut service = self.0.layer(NextService::new(next, &lent.run));
            poll_fn(|cx| service.poll_ready(cx)).await.map_err(Into::into)?;
            service.call(request).await.map_err(Into::into)
        }
        .await;
        match result {
            Ok(response) => Ok(response.into_reqwest_from(&lent.run.url)),
            Err(error) => Err(into_chain_error(error)),
        }
    }
}

struct Lent<'e> {
    run: Run,
    to: &'e mut Extensions,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        *self.to = self.run.finish();
    }
}
