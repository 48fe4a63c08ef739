use super::{ResponseFuture, error::refusal};
use crate::{
    BoxError, HasTask, Key, Mode, Provider, RefusalKind, Switch, Time,
    provider::{WaitFor, handover},
    random::mix,
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`RampedReadmissionLayer`](super::RampedReadmissionLayer).
#[derive(Clone)]
pub struct RampedReadmission<S> {
    pub(super) inner: S,
    pub(super) provider: Provider,
    pub(super) switch: Switch,
    /// Calls so far that belong to no task.
    pub(super) untasked: Arc<AtomicU64>,
}

impl<S> RampedReadmission<S> {
    /// Until when a call with this task has to stay out.
    #[cold]
    #[inline(never)]
    fn bars<Req: HasTask>(&self, request: &Req) -> Option<Time> {
        let mode = self.switch.mode();
        if mode == Mode::Off {
            return None;
        }
        let offered = handover::offered(self.provider.core());
        let key: Key = match request.task() {
            Some(task) => task.affinity_key(),
            // A ladder has drawn for it already, and was let in.
            None if offered.is_some() => return None,
            // Without a task each goes its own way.
            None => mix(self.untasked.fetch_add(1, Ordering::Relaxed)).into(),
        };
        let now = self.provider.clock().now();
        let until = self.provider.readmits_at(key, now)?;
        // A probe has to get through to end the pause.
        if offered == Some(true) {
            return None;
        }
        // Who has the time to wait for the end of a long pause has it for the next probe, and may be the
        // only one to make it.
        let end = WaitFor::of(request, None, self.provider.core(), now).end;
        let until = match self.provider.probe_at(now) {
            Some(probe) if until <= end => until.min(probe),
            _ => until,
        };
        if mode == Mode::Observe {
            self.provider.would_refuse(&self.switch, RefusalKind::NotReadmitted);
            return None;
        }
        Some(until)
    }
}

impl<S, Req> Service<Req> for RampedReadmission<S>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    Req: HasTask,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        if self.provider.is_ramping()
            && let Some(until) = self.bars(&request)
        {
            return ResponseFuture::refused(refusal(&self.provider, until));
        }
        ResponseFuture::calling(self.inner.call(request))
    }
}

impl<S: fmt::Debug> fmt::Debug for RampedReadmission<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RampedReadmission")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}
