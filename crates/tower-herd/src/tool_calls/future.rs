//! The future of [`ToolCalls`](super::ToolCalls).

use super::state::Call;
use crate::{BoxError, Classify, Refusal, Safety, Task};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

/// A call that its task has noted. Dropped without an outcome, it stays noted: it may run on.
pub(super) struct Begun {
    pub(super) task: Task,
    pub(super) call: Call,
    pub(super) safety: Safety,
}

pin_project! {
    /// A call of a tool, or the refusal in its place.
    pub struct ResponseFuture<F, C> {
        #[pin]
        state: State<F>,
        begun: Option<Begun>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] inner: F },
        Refused { refusal: Option<Refusal> },
    }
}

impl<F, C> ResponseFuture<F, C> {
    pub(super) fn calling(inner: F, begun: Option<Begun>, classify: C) -> Self {
        ResponseFuture { state: State::Calling { inner }, begun, classify }
    }
    pub(super) fn refused(refusal: Refusal, classify: C) -> Self {
        ResponseFuture { state: State::Refused { refusal: Some(refusal) }, begun: None, classify }
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
            StateProj::Calling { inner } => ready!(inner.poll(cx)).map_err(Into::into),
            StateProj::Refused { refusal } => {
                return Poll::Ready(Err(refusal.take().expect("polled after completion").into()));
            }
        };
        if let Some(Begun { task, call, safety }) = me.begun.take() {
            let signal = match &outcome {
                Ok(reply) => me.classify.classify(Ok(reply)),
                Err(error) => me.classify.classify(Err(&**error)),
            };
            task.tool_calls().end(call, safety, &signal);
        }
        Poll::Ready(outcome)
    }
}

impl<F, C> fmt::Debug for ResponseFuture<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("noted", &self.begun.is_some()).finish_non_exhaustive()
    }
}
