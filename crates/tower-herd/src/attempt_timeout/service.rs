use super::future::{Deadline, ReplyFuture};
use crate::{BoxError, HasTask, Mode, Switch, Task, classify::Replies};
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
    switch: Switch,
    mode: PhantomData<fn() -> M>,
}

impl<S, M> Timed<S, M> {
    pub(crate) fn new(inner: S, headers: Duration, idle: Duration, switch: Switch) -> Self {
        Timed { inner, headers, idle, switch, mode: PhantomData }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    fn deadline<Req: HasTask>(&self, request: &Req) -> Deadline {
        let counts = match self.switch.mode() {
            Mode::Enforce => None,
            Mode::Observe => Some(self.switch.clone()),
            Mode::Off => return Deadline::none(),
        };
        Deadline::new(self.headers, request.task().and_then(Task::deadline_at), counts)
    }
}

impl<S: Clone, M> Clone for Timed<S, M> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.headers, self.idle, self.switch.clone())
    }
}

impl<S: fmt::Debug, M> fmt::Debug for Timed<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timed")
            .field("inner", &self.inner)
            .field("headers", &self.headers)
            .field("idle", &self.idle)
            .field("switch", &self.switch)
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
