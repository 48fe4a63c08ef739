use super::{
    Defer, Judge, RetryTokenLayer, RetryTokens,
    future::{ResponseFuture, RunPermit, Ways},
    permit::{Verdict, verdict},
    tokens::Source,
};
use crate::{BoxError, Mode};
use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`RetryTokenLayer`].
#[derive(Clone)]
pub struct RetryToken<S, T, K, A, D, J> {
    pub(super) inner: S,
    pub(super) layer: RetryTokenLayer<T, K, A, D, J>,
}

impl<S: fmt::Debug, T, K, A, D, J> fmt::Debug for RetryToken<S, T, K, A, D, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryToken")
            .field("inner", &self.inner)
            .field("tokens", &self.layer.tokens)
            .field("schedule", &self.layer.schedule)
            .finish_non_exhaustive()
    }
}

impl<S, Req, T, K, N, A, D, J> Service<Req> for RetryToken<S, T, K, A, D, J>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    T: RetryTokens,
    K: Fn(&Req) -> Option<N>,
    N: Into<Arc<str>>,
    A: Fn(&Req) -> u32,
    D: Defer<Req> + Send + 'static,
    D::Handle: Send + 'static,
    J: Judge<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, T, RunPermit<T>, D, J>;

    /// Only hands on: the key is known when the job is.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let RetryTokenLayer { tokens, key, attempt, schedule, switch, defer, judge } = &self.layer;
        let ways = |about| {
            let (tokens, switch) = (tokens.clone(), switch.clone());
            Ways { tokens, about, switch, defer: defer.clone(), judge: judge.clone() }
        };
        let Some(key) = (switch.mode() != Mode::Off).then(|| key(&request)).flatten() else {
            let nothing = tokens.shared_name();
            return ResponseFuture::decided(Verdict::Run(None), &mut self.inner, request, ways(nothing));
        };
        let (key, attempt, schedule): (Arc<str>, _, _) = (key.into(), attempt(&request), *schedule);
        if let Some(local) = tokens.store().local() {
            let answer = Some((local.claim_now(&key, &schedule), Source::Store));
            let verdict = verdict(tokens, &key, &schedule, attempt, answer);
            return ResponseFuture::decided(verdict, &mut self.inner, request, ways(key));
        }
        let ways = ways(key.clone());
        let tokens = tokens.clone();
        let ask = Box::pin(async move {
            let answer = tokens.claim(&key, &schedule).await;
            verdict(&tokens, &key, &schedule, attempt, answer)
        });
        // The instance that was polled ready is the one that is called, when the store has answered.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        ResponseFuture::asking(ask, ready, request, ways)
    }
}
