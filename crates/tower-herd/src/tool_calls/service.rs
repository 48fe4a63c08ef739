use super::{
    future::{Begun, ResponseFuture},
    state::{Call, Limits},
};
use crate::{BoxError, Classify, HasTask, Mode, Provider, Refusal, RefusalKind, Switch};
use std::{
    fmt,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`ToolCallsLayer`](super::ToolCallsLayer).
#[derive(Clone)]
pub struct ToolCalls<S, F, C> {
    pub(super) inner: S,
    pub(super) provider: Provider,
    pub(super) call: F,
    pub(super) classify: C,
    pub(super) limits: Limits,
    pub(super) switch: Switch,
}

impl<S: fmt::Debug, F, C> fmt::Debug for ToolCalls<S, F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolCalls")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl<S, F, C> ToolCalls<S, F, C> {
    /// Notes the call in its task's memory; none: nothing is known of it.
    fn begin<Req: HasTask>(&self, request: &Req) -> Result<Option<Begun>, Refusal>
    where
        F: Fn(&Req) -> Option<Call>,
    {
        let mode = self.switch.mode();
        let (Some(task), false) = (request.task(), mode == Mode::Off) else { return Ok(None) };
        let Some(call) = (self.call)(request) else { return Ok(None) };
        let safety = request.safety();
        let answer = task.tool_calls().begin(&self.limits, call, safety);
        match answer {
            Ok(()) => Ok(Some(Begun { task: task.clone(), call, safety })),
            Err(_) if mode == Mode::Observe => {
                self.provider.would_refuse(&self.switch, RefusalKind::Exhausted);
                Ok(None)
            }
            Err(no) => Err(self.provider.refuse(RefusalKind::Exhausted, no.why(), None)),
        }
    }
}

impl<S, Req, F, C> Service<Req> for ToolCalls<S, F, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    Req: HasTask,
    F: Fn(&Req) -> Option<Call>,
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
        match self.begin(&request) {
            Ok(begun) => ResponseFuture::calling(self.inner.call(request), begun, self.classify.clone()),
            Err(refusal) => ResponseFuture::refused(refusal, self.classify.clone()),
        }
    }
}
