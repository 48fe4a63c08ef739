use super::{ResponseFuture, state::Throttle};
use crate::{
    BoxError, Classify, HasTask, Mode, Provider, Refusal, RefusalKind, Switch, Task, provider::handover,
};
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`BudgetLayer`](super::BudgetLayer).
#[derive(Clone)]
pub struct AdaptiveThrottle<S, C> {
    pub(super) inner: S,
    pub(super) throttle: Arc<Throttle>,
    pub(super) provider: Provider,
    pub(super) switch: Switch,
    pub(super) classify: C,
}

impl<S, C> AdaptiveThrottle<S, C> {
    #[cold]
    #[inline(never)]
    fn refused(&self, task: Option<&Task>) -> Option<Refusal> {
        let provider = &self.provider;
        let mode = self.switch.mode();
        // A probe is what finds out whether the provider is back: nobody else is sent meanwhile.
        if mode == Mode::Off || handover::offered(provider.core()) == Some(true) {
            return None;
        }
        let now = provider.clock().now();
        let enforced = mode == Mode::Enforce;
        // What is only observed is sent, and counted then.
        let wait =
            self.throttle.draw(now, |shed| enforced && task.is_none_or(|task| task.first_shed(shed)))?;
        if !enforced {
            provider.would_refuse(&self.switch, RefusalKind::Shed);
            return None;
        }
        // Nobody further out has a call to watch.
        handover::mark_sensed(provider.core());
        let why = "so much of what is sent there fails that a share of it is not sent";
        Some(provider.refuse(RefusalKind::Shed, why, Some(now.saturating_add(wait))))
    }
}

impl<S: fmt::Debug, C> fmt::Debug for AdaptiveThrottle<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdaptiveThrottle")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, Req, C> Service<Req> for AdaptiveThrottle<S, C>
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
        if self.throttle.sheds()
            && let Some(refusal) = self.refused(request.task())
        {
            return ResponseFuture::refused(refusal, self.classify.clone());
        }
        ResponseFuture::call(&mut self.inner, request, &self.provider, self.classify.clone())
    }
}
