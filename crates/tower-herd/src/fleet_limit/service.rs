use super::{Hold, ResponseFuture, future};
use crate::{BoxError, Classify, HasTask, Mode, Provider, Switch, Task, provider::handover};
use std::{
    fmt,
    task::{Context, Poll},
    time::Duration,
};
use tower_service::Service;

/// The service of [`FleetLimitLayer`](super::FleetLimitLayer).
#[derive(Clone)]
pub struct FleetLimit<S, H, C> {
    pub(super) inner: S,
    pub(super) provider: Provider,
    pub(super) patience: Option<Duration>,
    pub(super) switch: Switch,
    pub(super) hold: H,
    pub(super) classify: C,
}

impl<S: fmt::Debug, H, C> fmt::Debug for FleetLimit<S, H, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetLimit")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("patience", &self.patience)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, Req, H, C> Service<Req> for FleetLimit<S, H, C>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    H: Hold<S::Response> + Clone,
    C: Classify<S::Response> + Clone,
{
    type Response = H::Held;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, H, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let provider = &self.provider;
        let mode = self.switch.mode();
        if mode == Mode::Off {
            return future::pass(&mut self.inner, request, self.hold.clone(), self.classify.clone());
        }
        let slot = match handover::take(provider.core()) {
            Some(slot) => Ok(slot),
            None => provider.try_gate_slot(|| request.task().and_then(Task::deadline_at)),
        };
        let (hold, classify) = (self.hold.clone(), self.classify.clone());
        match slot {
            Ok(slot) => future::call(&mut self.inner, request, slot, provider, hold, classify),
            Err(denied) if mode == Mode::Observe => {
                provider.would_refuse(&self.switch, denied.kind());
                future::beyond(&mut self.inner, request, provider, hold, classify)
            }
            Err(denied) => {
                // The ready instance stays here; who waits readies a clone after its wait.
                future::waiting(denied, &self.inner, request, provider, self.patience, hold, classify)
            }
        }
    }
}
