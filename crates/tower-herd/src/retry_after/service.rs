use super::{ResponseFuture, future};
use crate::{
    BoxError, Classify, HasTask, Mode, Provider, Switch,
    provider::{Sensing, Slot, handover},
};
use std::{
    fmt,
    task::{Context, Poll},
    time::Duration,
};
use tower_service::Service;

/// The service of [`RetryAfterLayer`](super::RetryAfterLayer).
#[derive(Clone)]
pub struct RetryAfter<S, C> {
    pub(super) inner: S,
    pub(super) provider: Provider,
    pub(super) patience: Option<Duration>,
    pub(super) switch: Switch,
    pub(super) classify: C,
}

impl<S: fmt::Debug, C> fmt::Debug for RetryAfter<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryAfter")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("patience", &self.patience)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, Req, C> Service<Req> for RetryAfter<S, C>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    C: Classify<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let mode = self.switch.mode();
        if mode == Mode::Off {
            return future::pass(&mut self.inner, request, self.classify.clone());
        }
        if self.provider.is_open() {
            return future::call(&mut self.inner, request, &self.provider, self.classify.clone());
        }
        future::stopped(self, request, mode)
    }
}

/// Calls `inner` with the slot that was waited for on offer; the sensing is ours if nobody below does
/// it.
pub(super) fn send<S: Service<Req>, Req>(
    inner: &mut S,
    request: Req,
    slot: Slot,
    provider: &Provider,
) -> (S::Future, Option<Sensing>) {
    handover::unwatched();
    let future = handover::offering(slot, || inner.call(request));
    (future, provider.begin_unwatched())
}
