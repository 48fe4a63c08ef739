use crate::{
    BoxError, Classify, Provider, Refusal,
    provider::{Sensing, handover},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The future of [`AdaptiveThrottle`](super::AdaptiveThrottle).
    pub struct ResponseFuture<F, C> {
        #[pin]
        state: State<F>,
        // Of the call, if nobody below does it.
        sensing: Option<Sensing>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F },
        Refused { error: Option<BoxError> },
    }
}

impl<F, C> ResponseFuture<F, C> {
    pub(super) fn refused(refusal: Refusal, classify: C) -> Self {
        ResponseFuture { state: State::Refused { error: Some(refusal.into()) }, sensing: None, classify }
    }

    // The inner future is made where it will stay, in the result: it may be large, and to move it costs.
    #[inline]
    pub(super) fn call<S, Req>(inner: &mut S, request: Req, provider: &Provider, classify: C) -> Self
    where
        S: Service<Req, Future = F>,
    {
        handover::unwatched();
        ResponseFuture {
            state: State::Calling { future: inner.call(request) },
            sensing: provider.begin_unwatched(),
            classify,
        }
    }
}

impl<F, C, Res, E> Future for ResponseFuture<F, C>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
    C: Classify<Res>,
{
    type Output = Result<Res, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        let outcome = match me.state.project() {
            StateProj::Calling { future } => ready!(future.poll(cx)).map_err(Into::into),
            StateProj::Refused { error } => {
                return Poll::Ready(Err(error.take().expect("polled after completion")));
            }
        };
        // With a sensor below there is nothing to do here.
        if let Some(mut sensing) = me.sensing.take() {
            sensing.ended(&*me.classify, &outcome);
        }
        Poll::Ready(outcome)
    }
}

impl<F, C> fmt::Debug for ResponseFuture<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused = matches!(self.state, State::Refused { .. });
        f.debug_struct("ResponseFuture").field("refused", &refused).finish_non_exhaustive()
    }
}
