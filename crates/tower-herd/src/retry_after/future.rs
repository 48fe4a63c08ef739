use super::{RetryAfter, service::send};
use crate::{
    BoxError, Classify, HasTask, Mode, Provider, RefusalKind, Task,
    provider::{Admission, Sensing, WaitFor, Waiting, handover},
};
use pin_project_lite::pin_project;
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The future of [`RetryAfter`](super::RetryAfter). Dropped while it waits, it leaves the queue.
    pub struct ResponseFuture<S: Service<Req>, Req, C> {
        #[pin]
        state: State<S, Req>,
        // Of the call, if nobody below does it.
        sensing: Option<Sensing>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S: Service<Req>, Req> {
        Calling { #[pin] future: S::Future },
        Waiting { wait: Box<Waiting<S, Req>> },
        Refused { error: Option<BoxError> },
    }
}

/// Calls `inner`: nothing stands in the way.
// The inner future is made where it will stay, in the result: it may be large, and to move it costs.
#[inline]
pub(super) fn call<S: Service<Req>, Req, C>(
    inner: &mut S,
    request: Req,
    provider: &Provider,
    classify: C,
) -> ResponseFuture<S, Req, C> {
    handover::unwatched();
    ResponseFuture {
        state: State::Calling { future: inner.call(request) },
        sensing: provider.begin_unwatched(),
        classify,
    }
}

/// Calls `inner` as if this layer were not there.
#[cold]
#[inline(never)]
pub(super) fn pass<S: Service<Req>, Req, C>(
    inner: &mut S,
    request: Req,
    classify: C,
) -> ResponseFuture<S, Req, C> {
    ResponseFuture { state: State::Calling { future: inner.call(request) }, sensing: None, classify }
}

/// A pause, or the end of one, stands in the way.
#[cold]
#[inline(never)]
pub(super) fn stopped<S, Req, C>(
    service: &mut RetryAfter<S, C>,
    request: Req,
    mode: Mode,
) -> ResponseFuture<S, Req, C>
where
    S: Service<Req> + Clone,
    Req: HasTask,
    C: Clone,
{
    let provider = &service.provider;
    let classify = service.classify.clone();
    let paused = provider.paused();
    // A slot on offer was granted under this very pause state, further out: there is nothing to wait
    // for, unless a pause began since.
    if let Some(probe) = handover::offered(provider.core()) {
        if let Some((until, reason)) = paused.filter(|_| !probe && mode == Mode::Enforce) {
            let error = Some(provider.paused_refusal(until, reason).into());
            return ResponseFuture { state: State::Refused { error }, sensing: None, classify };
        }
        if paused.is_some() && !probe {
            provider.would_refuse(&service.switch, RefusalKind::Paused);
        }
        return call(&mut service.inner, request, provider, classify);
    }
    handover::mark_sensed(provider.core());
    if paused.is_some()
        && let Ok(probe) = provider.try_gate_slot(|| request.task().and_then(Task::deadline_at))
    {
        let (future, sensing) = send(&mut service.inner, request, probe, provider);
        return ResponseFuture { state: State::Calling { future }, sensing, classify };
    }
    if mode != Mode::Enforce {
        // Whether the ramp after a pause would have held it back only its queue could tell.
        if paused.is_some() {
            provider.would_refuse(&service.switch, RefusalKind::Paused);
        }
        return call(&mut service.inner, request, provider, classify);
    }
    let now = provider.clock().now();
    let wait = WaitFor::of(&request, service.patience, provider.core(), now);
    let admission = match paused {
        Some((until, reason)) if until > wait.until => Err(provider.paused_refusal(until, reason)),
        _ => Admission::begin(provider, wait, now),
    };
    let state = match admission {
        Err(refusal) => State::Refused { error: Some(refusal.into()) },
        Ok(admission) => State::Waiting { wait: Waiting::new(provider, admission, &service.inner, request) },
    };
    ResponseFuture { state, sensing: None, classify }
}

impl<S, Req, C> Future for ResponseFuture<S, Req, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    C: Classify<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Calling { future } => {
                    // With a sensor below there is nothing to do here.
                    let Some(watch) = me.sensing else {
                        return future.poll(cx).map_err(Into::into);
                    };
                    return match future.poll(cx) {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Ok(reply)) => {
                            watch.outcome(&watch.read(&*me.classify, &reply));
                            *me.sensing = None;
                            Poll::Ready(Ok(reply))
                        }
                        Poll::Ready(Err(error)) => {
                            let error = error.into();
                            watch.outcome(&me.classify.classify(Err(&*error as &(dyn Error + 'static))));
                            *me.sensing = None;
                            Poll::Ready(Err(error))
                        }
                    };
                }
                StateProj::Waiting { wait } => {
                    let (request, slot) = ready!(wait.poll(cx))?;
                    let (future, sensing) = send(&mut wait.service, request, slot, &wait.provider);
                    me.state.set(State::Calling { future });
                    *me.sensing = sensing;
                }
                StateProj::Refused { error } => {
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            }
        }
    }
}

impl<S: Service<Req>, Req, C> fmt::Debug for ResponseFuture<S, Req, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Calling { .. } => "calling",
            State::Waiting { .. } => "waiting",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
