//! The future of [`Spend`](super::Spend).

use super::{Amount, charge::Charge};
use crate::{
    BoxError, Classify, Refusal,
    provider::handover,
    usage::{Meter, settle_error, settle_reply},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};
use tower_service::Service;

pin_project! {
    /// The future of [`Spend`](super::Spend).
    ///
    /// Dropped while the call waits in a queue further in, it gives back what it reserved; after the call was
    /// sent, that stays charged.
    pub struct ResponseFuture<F, M, C> {
        #[pin]
        state: State<F>,
        charge: Option<Charge>,
        meter: M,
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

// The inner future is made where it will stay, in the result: it may be large, and to move it costs.
#[inline]
pub(super) fn call<S: Service<Req>, Req, M, C>(
    inner: &mut S,
    request: Req,
    charge: Option<Charge>,
    meter: M,
    classify: C,
) -> ResponseFuture<S::Future, M, C> {
    handover::mark_sent();
    let mut call =
        ResponseFuture { state: State::Calling { future: inner.call(request) }, charge, meter, classify };
    if let Some(charge) = &mut call.charge {
        charge.called();
    }
    call
}

#[cold]
pub(super) fn refused<F, M, C>(refusal: Refusal, meter: M, classify: C) -> ResponseFuture<F, M, C> {
    ResponseFuture { state: State::Refused { error: Some(refusal.into()) }, charge: None, meter, classify }
}

impl<F, Res, Error, M, C> Future for ResponseFuture<F, M, C>
where
    F: Future<Output = Result<Res, Error>>,
    Error: Into<BoxError>,
    M: Meter<Res, Unit = Amount>,
    C: Classify<Res>,
{
    type Output = Result<M::Metered<Charge>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        let future = match me.state.project() {
            StateProj::Calling { future } => future,
            StateProj::Refused { error } => {
                return Poll::Ready(Err(error.take().expect("polled after completion")));
            }
        };
        let polled = match me.charge {
            Some(charge) if !charge.sent => {
                charge.polling();
                let polled = future.poll(cx);
                charge.called();
                polled
            }
            _ => future.poll(cx),
        };
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(reply)) => {
                if let Some(charge) = me.charge {
                    charge.sent = true;
                }
                Poll::Ready(Ok(settle_reply(reply, me.charge.take(), me.meter, me.classify)))
            }
            Poll::Ready(Err(error)) => {
                Poll::Ready(Err(settle_error(error.into(), me.charge.take(), me.classify)))
            }
        }
    }
}

impl<F, M, C> fmt::Debug for ResponseFuture<F, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("charge", &self.charge).finish_non_exhaustive()
    }
}
