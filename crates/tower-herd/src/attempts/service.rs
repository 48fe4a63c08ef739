use super::{future::ResponseFuture, layer::Shared};
use crate::{HasTask, Mode, Task};
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`AttemptsLayer`](super::AttemptsLayer).
#[derive(Clone)]
pub struct Attempts<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> Attempts<S> {
    pub(super) fn new(inner: S, shared: Arc<Shared>) -> Self {
        Attempts { inner, shared }
    }
}

impl<S: fmt::Debug> fmt::Debug for Attempts<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempts")
            .field("inner", &self.inner)
            .field("provider", &self.shared.provider)
            .finish_non_exhaustive()
    }
}

impl<S, B, R> Service<http::Request<B>> for Attempts<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    #[inline]
    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let shared = &self.shared;
        let mode = shared.switch.mode();
        if mode == Mode::Off {
            return ResponseFuture::new(self.inner.call(request), None);
        }
        let attempt = request.resent().map_or(1, crate::retry::Resent::attempt);
        // Once told, told on: whoever stands further in hears what is left, too.
        let is_told = || request.task().and_then(Task::calls_before).is_some();
        if attempt > 1 || shared.tell_first || is_told() {
            match mode {
                Mode::Enforce => shared.write(&mut request, attempt),
                _ => shared.switch.count(),
            }
        }
        ResponseFuture::new(self.inner.call(request), Some((shared.clone(), attempt)))
    }
}
