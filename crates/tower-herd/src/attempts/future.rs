//! The futures of [`AttemptsLayer`](super::AttemptsLayer) and
//! [`IncomingAttemptsLayer`](super::IncomingAttemptsLayer).

use super::{incoming, layer::Shared, told};
use crate::Task;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

pin_project! {
    /// The future of [`Attempts`](super::Attempts).
    pub struct ResponseFuture<F> {
        #[pin]
        inner: F,
        // Nobody to tell: switched off.
        attempt: Option<(Arc<Shared>, u32)>,
    }
}

impl<F> ResponseFuture<F> {
    #[inline]
    pub(super) fn new(inner: F, attempt: Option<(Arc<Shared>, u32)>) -> Self {
        ResponseFuture { inner, attempt }
    }
}

impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<http::Response<B>, E>>,
{
    type Output = F::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        let mut outcome = ready!(me.inner.poll(cx));
        if let (Ok(reply), Some((shared, attempt))) = (&mut outcome, me.attempt)
            && let Some(calls) = told::calls_told(reply.version(), reply.headers())
        {
            shared.told_back(*attempt, calls, reply.headers_mut());
        }
        Poll::Ready(outcome)
    }
}

impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

pin_project! {
    /// The future of [`IncomingAttempts`](super::IncomingAttempts).
    pub struct IncomingFuture<F> {
        #[pin]
        inner: F,
        // None: switched off.
        marks: Option<incoming::Marks>,
        task: Option<Task>,
    }
}

impl<F> IncomingFuture<F> {
    pub(super) fn new(inner: F, marks: Option<incoming::Marks>, task: Option<Task>) -> Self {
        IncomingFuture { inner, marks, task }
    }
}

impl<F, B, E> Future for IncomingFuture<F>
where
    F: Future<Output = Result<http::Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        let mut outcome = ready!(me.inner.poll(cx));
        if let (Ok(reply), Some(marks)) = (&mut outcome, me.marks) {
            marks.leave(reply, me.task.as_ref());
        }
        Poll::Ready(outcome)
    }
}

impl<F> fmt::Debug for IncomingFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingFuture").finish_non_exhaustive()
    }
}
