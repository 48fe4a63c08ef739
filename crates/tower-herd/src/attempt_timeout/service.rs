use super::future::{Deadline, ReplyFuture};
use crate::{BoxError, HasTask, Task, classify::Replies};
use std::{
    fmt,
    marker::PhantomData,
    task::{Context, Poll},
    time::Duration,
};
use tower_service::Service;

/// The service of [`AttemptTimeoutLayer`](crate::AttemptTimeoutLayer).
pub struct Timed<S, M> {
    inner: S,
    headers: Duration,
    idle: Duration,
    mode: PhantomData<fn() -> M>,
}

impl<S, M> Timed<S, M> {
    pub(crate) fn new(inner: S, headers: Duration, idle: Duration) -> Self {
        Timed { inner, headers, idle, mode: PhantomData }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    fn deadline<Req: HasTask>(&self, request: &Req) -> Deadline {
        Deadline::new(self.headers, request.task().and_then(Task::deadline_at))
    }
}

impl<S: Clone, M> Clone for Timed<S, M> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.headers, self.idle)
    }
}

impl<S: fmt::Debug, M> fmt::Debug for Timed<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timed")
            .field("inner", &self.inner)
            .field("headers", &self.headers)
            .field("idle", &self.idle)
            .finish()
    }
}

impl<S, Req> Service<Req> for Timed<S, Replies>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    Req: HasTask,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ReplyFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let deadline = self.deadline(&request);
        ReplyFuture::new(self.inner.call(request), deadline)
    }
}

#[cfg(feature = "http")]
impl<S, Req, B> Service<Req> for Timed<S, crate::classify::Bodies>
where
    S: Service<Req, Response = http::Response<B>>,
    S::Error: Into<BoxError>,
    Req: HasTask,
{
    type Response = http::Response<super::TimedBody<B>>;
    type Error = BoxError;
    type Future = super::future::ResponseFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let deadline = self.deadline(&request);
        super::future::ResponseFuture::new(self.inner.call(request), deadline, self.idle)
    }
}
