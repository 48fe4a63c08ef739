use super::{
    future::ResponseFuture,
    layer::Shared,
    resend::{CloneRequest, Resend},
};
use crate::{BoxError, Classify, HasTask, Mode, classify::DefaultClassify};
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

/// The service of [`JitteredRetryLayer`](super::JitteredRetryLayer).
pub struct JitteredRetry<S, C = DefaultClassify, R = CloneRequest> {
    inner: S,
    shared: Arc<Shared<S, C, R>>,
}

impl<S, C, R> JitteredRetry<S, C, R> {
    pub(super) fn new(shared: Shared<S, C, R>, inner: S) -> Self {
        JitteredRetry { inner, shared: Arc::new(shared) }
    }
}

#[cfg(feature = "herd")]
impl<S, C, R> JitteredRetry<S, C, R> {
    /// The service that the next first attempt is made on, and what all share.
    #[inline]
    pub(crate) fn parts(&mut self) -> (&mut S, &Arc<Shared<S, C, R>>) {
        (&mut self.inner, &self.shared)
    }
}

impl<S: Clone, C, R> Clone for JitteredRetry<S, C, R> {
    fn clone(&self) -> Self {
        JitteredRetry { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<S: fmt::Debug, C, R> fmt::Debug for JitteredRetry<S, C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JitteredRetry")
            .field("inner", &self.inner)
            .field("config", &self.shared.core.config())
            .finish_non_exhaustive()
    }
}

impl<S, Req, C, R> tower_service::Service<Req> for JitteredRetry<S, C, R>
where
    S: tower_service::Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    C: Classify<S::Response>,
    R: Resend<Req>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, C, R>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let mode = self.shared.mode();
        if mode == Mode::Off {
            return ResponseFuture::pass(&mut self.inner, request, self.shared.clone());
        }
        let deposited = self.shared.deposit(&request);
        // The instance that was polled ready makes the first attempt.
        let observes = mode == Mode::Observe;
        ResponseFuture::call(&mut self.inner, request, self.shared.clone(), deposited, observes)
    }
}
