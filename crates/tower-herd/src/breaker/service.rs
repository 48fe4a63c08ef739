use super::{ResponseFuture, future};
use crate::{BoxError, Classify, HasTask, Provider, provider::Caller};
use std::{
    fmt,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`BreakerLayer`](super::BreakerLayer).
#[derive(Clone)]
pub struct Breaker<S, C> {
    pub(super) inner: S,
    pub(super) provider: Provider,
    pub(super) classify: C,
}

impl<S: fmt::Debug, C> fmt::Debug for Breaker<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

impl<S, Req, C> Service<Req> for Breaker<S, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    Req: HasTask,
    C: Classify<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let caller = self.provider.caller(|| Caller::of(request.task()));
        if !self.provider.is_broken() {
            return future::call(&mut self.inner, request, &self.provider, caller, self.classify.clone());
        }
        future::broken(self, request, caller)
    }
}
