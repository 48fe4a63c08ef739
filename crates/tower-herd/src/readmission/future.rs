use crate::BoxError;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

pin_project! {
    /// The future of [`RampedReadmission`](super::RampedReadmission). It holds nothing of its own, so a
    /// drop is the inner future's.
    pub struct ResponseFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F },
        Refused { error: Option<BoxError> },
    }
}

impl<F> ResponseFuture<F> {
    #[inline]
    pub(super) fn calling(future: F) -> Self {
        ResponseFuture { state: State::Calling { future } }
    }

    #[cold]
    pub(super) fn refused(error: BoxError) -> Self {
        ResponseFuture { state: State::Refused { error: Some(error) } }
    }
}

impl<F, Res, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Res, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Calling { future } => future.poll(cx).map_err(Into::into),
            StateProj::Refused { error } => Poll::Ready(Err(error.take().expect("polled after completion"))),
        }
    }
}

impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Calling { .. } => "calling",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
