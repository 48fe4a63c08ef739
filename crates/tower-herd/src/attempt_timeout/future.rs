//! The futures of [`AttemptTimeoutLayer`](crate::AttemptTimeoutLayer).

use super::{AttemptTimeout, Phase};
use crate::{BoxError, Switch, task::far};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long a call may take: of its own, and by its task.
pub(crate) struct Deadline {
    /// None: as long as it likes.
    own: Option<Duration>,
    task: Option<Instant>,
    /// A call that outlives it is not ended, but counted here.
    counts: Option<Switch>,
}

impl Deadline {
    pub(crate) fn new(own: Duration, task: Option<Instant>, counts: Option<Switch>) -> Self {
        Deadline { own: Some(own), task, counts }
    }

    pub(crate) fn none() -> Self {
        Deadline { own: None, task: None, counts: None }
    }
}

pin_project! {
    /// The future of a [`Timed`](super::Timed) service for replies of any type.
    ///
    /// The timer is made when the inner future is first found pending: a reply that is there at once
    /// costs neither a timer nor a look at the clock.
    pub struct ReplyFuture<F> {
        #[pin]
        inner: F,
        // Boxed: only who waits pays for it, and the future is moved less.
        sleep: Option<Pin<Box<Sleep>>>,
        deadline: Deadline,
        after: Duration,
    }
}

impl<F> ReplyFuture<F> {
    pub(crate) fn new(inner: F, deadline: Deadline) -> Self {
        ReplyFuture { inner, sleep: None, deadline, after: Duration::ZERO }
    }
}

impl<F, Res, E> Future for ReplyFuture<F>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Res, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        if let Poll::Ready(outcome) = me.inner.poll(cx) {
            return Poll::Ready(outcome.map_err(Into::into));
        }
        let Some(limit) = me.deadline.own else { return Poll::Pending };
        if me.sleep.is_none() {
            let own = far(limit);
            let at = me.deadline.task.map_or(own, |task| own.min(task));
            *me.after = limit.saturating_sub(own.saturating_duration_since(at));
            *me.sleep = Some(Box::pin(sleep_until(at)));
        }
        if let Some(sleep) = me.sleep {
            ready!(sleep.as_mut().poll(cx));
        }
        if let Some(switch) = me.deadline.counts.take() {
            switch.count();
            me.deadline.own = None;
            *me.sleep = None;
            return Poll::Pending;
        }
        Poll::Ready(Err(AttemptTimeout { phase: Phase::Headers, after: *me.after }.into()))
    }
}

impl<F> fmt::Debug for ReplyFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyFuture").finish_non_exhaustive()
    }
}

#[cfg(feature = "http")]
pin_project! {
    /// The future of a [`Timed`](super::Timed) service for HTTP replies.
    pub struct ResponseFuture<F> {
        #[pin]
        inner: ReplyFuture<F>,
        idle: Duration,
    }
}

#[cfg(feature = "http")]
impl<F> ResponseFuture<F> {
    pub(crate) fn new(inner: F, deadline: Deadline, idle: Duration) -> Self {
        ResponseFuture { inner: ReplyFuture::new(inner, deadline), idle }
    }
}

#[cfg(feature = "http")]
impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<http::Response<B>, E>>,
    E: Into<BoxError>,
{
    type Output = Result<http::Response<super::TimedBody<B>>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        let reply = ready!(me.inner.as_mut().poll(cx))?;
        let deadline = me.inner.project().deadline;
        // Off, or counted already: once a call is enough.
        let idle = deadline.own.map(|_| *me.idle);
        let counts = deadline.counts.take();
        Poll::Ready(Ok(reply.map(|body| super::TimedBody::new(body, idle, counts))))
    }
}

#[cfg(feature = "http")]
impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
