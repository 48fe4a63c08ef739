use super::{JobBreakerLayer, permit::BreakerPermit};
use crate::{
    BoxError, Mode,
    retry_token::{
        Defer, Judge, RetryTokens,
        future::{ResponseFuture, Ways},
        permit::Verdict,
    },
};
use std::{
    fmt, mem,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`JobBreakerLayer`].
#[derive(Clone)]
pub struct JobBreaker<S, T, K, D, J> {
    pub(super) inner: S,
    pub(super) layer: JobBreakerLayer<T, K, D, J>,
}

impl<S: fmt::Debug, T, K, D, J> fmt::Debug for JobBreaker<S, T, K, D, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobBreaker")
            .field("inner", &self.inner)
            .field("shared", &self.layer.shared)
            .finish_non_exhaustive()
    }
}

impl<S, Req, T, K, N, D, J> Service<Req> for JobBreaker<S, T, K, D, J>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    T: RetryTokens,
    K: Fn(&Req) -> Option<N>,
    N: AsRef<str>,
    D: Defer<Req> + Send + 'static,
    D::Handle: Send + 'static,
    J: Judge<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, T, BreakerPermit<T>, D, J>;

    /// Only hands on. An open breaker does not hide in it: it answers each call, at once.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let JobBreakerLayer { shared, dependency, switch, defer, judge } = &self.layer;
        let tokens = shared.tokens();
        let ways = |about| {
            let (tokens, switch) = (tokens.clone(), switch.clone());
            Ways { tokens, about, switch, defer: defer.clone(), judge: judge.clone() }
        };
        let Some(dependency) = (switch.mode() != Mode::Off).then(|| dependency(&request)).flatten() else {
            let nothing = tokens.shared_name();
            return ResponseFuture::decided(Verdict::Run(None), &mut self.inner, request, ways(nothing));
        };
        let (dependency, key) = shared.names(dependency.as_ref());
        let ways = ways(dependency.clone());
        // Well, and known here: nothing is awaited.
        if let Some(permit) = shared.admit_now(&dependency, &key) {
            return ResponseFuture::decided(Verdict::Run(Some(permit)), &mut self.inner, request, ways);
        }
        let shared = shared.clone();
        let ask = Box::pin(async move { shared.admit(&dependency, &key).await });
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        ResponseFuture::asking(ask, ready, request, ways)
    }
}
