//! The future of [`TokenLimit`](super::TokenLimit).

use crate::{
    BoxError, Classify, Refusal,
    provider::{Booked, TokenWait, handover},
    usage::{Bill, Meter, sealed, settle_error, settle_reply},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

/// The tokens that were taken for a call, until its reply tells how many it has used.
pub struct TokenReserve(Booked);

impl fmt::Debug for TokenReserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TokenReserve").field(&self.0.cost()).finish()
    }
}

impl sealed::Sealed for TokenReserve {}

impl Bill<u64> for TokenReserve {
    fn settle(self, used: u64) {
        self.0.settle(used);
    }
    fn at_least(self, used: u64) {
        let used = used.max(self.0.cost());
        self.0.settle(used);
    }
    fn refund(self) {
        self.0.settle(0);
    }
}

pin_project! {
    /// The future of [`TokenLimit`](super::TokenLimit).
    ///
    /// Dropped while it waits, it leaves the line and takes nothing. Dropped while the call waits in a queue
    /// further in, it gives its tokens back; after the call was sent, they stay taken.
    pub struct ResponseFuture<S: Service<Req>, Req, M, C> {
        #[pin]
        state: State<S, Req>,
        reserve: Option<TokenReserve>,
        meter: M,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S: Service<Req>, Req> {
        Calling { #[pin] future: S::Future },
        Waiting { wait: Box<TokenWait<S, Req>> },
        Refused { error: Option<BoxError> },
    }
}

// The inner future is made where it will stay, in the result: it may be large, and to move it costs.
#[inline]
pub(super) fn call<S: Service<Req>, Req, M, C>(
    inner: &mut S,
    request: Req,
    booked: Option<Booked>,
    meter: M,
    classify: C,
) -> ResponseFuture<S, Req, M, C> {
    handover::mark_sent();
    let mut call = ResponseFuture {
        state: State::Calling { future: inner.call(request) },
        reserve: booked.map(TokenReserve),
        meter,
        classify,
    };
    if let Some(TokenReserve(booked)) = &mut call.reserve {
        booked.called();
    }
    call
}

#[cold]
pub(super) fn waiting<S: Service<Req>, Req, M, C>(
    wait: Box<TokenWait<S, Req>>,
    meter: M,
    classify: C,
) -> ResponseFuture<S, Req, M, C> {
    ResponseFuture { state: State::Waiting { wait }, reserve: None, meter, classify }
}

#[cold]
pub(super) fn refused<S: Service<Req>, Req, M, C>(
    refusal: Refusal,
    meter: M,
    classify: C,
) -> ResponseFuture<S, Req, M, C> {
    ResponseFuture { state: State::Refused { error: Some(refusal.into()) }, reserve: None, meter, classify }
}

impl<S, Req, M, C> Future for ResponseFuture<S, Req, M, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    M: Meter<S::Response, Unit = u64>,
    C: Classify<S::Response>,
{
    type Output = Result<M::Metered<TokenReserve>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Calling { future } => {
                    let polled = match me.reserve {
                        Some(TokenReserve(booked)) if !booked.sent => {
                            booked.polling();
                            let polled = future.poll(cx);
                            booked.called();
                            polled
                        }
                        _ => future.poll(cx),
                    };
                    return match polled {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Ok(reply)) => {
                            if let Some(TokenReserve(booked)) = me.reserve {
                                booked.sent = true;
                            }
                            Poll::Ready(Ok(settle_reply(reply, me.reserve.take(), me.meter, me.classify)))
                        }
                        Poll::Ready(Err(error)) => {
                            Poll::Ready(Err(settle_error(error.into(), me.reserve.take(), me.classify)))
                        }
                    };
                }
                StateProj::Waiting { wait } => {
                    let (request, mut booked) = ready!(wait.poll(cx))?;
                    handover::mark_sent();
                    let future = wait.service.call(request);
                    booked.called();
                    me.state.set(State::Calling { future });
                    *me.reserve = Some(TokenReserve(booked));
                }
                StateProj::Refused { error } => {
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            }
        }
    }
}

impl<S: Service<Req>, Req, M, C> fmt::Debug for ResponseFuture<S, Req, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Calling { .. } => "calling",
            State::Waiting { .. } => "waiting",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
