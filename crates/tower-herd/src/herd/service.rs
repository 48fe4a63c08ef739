//! One provider's whole stack as one service.

use super::{
    body::HerdBody,
    rung::{self, Guarded, OfAll, Terms, is_plain},
    wire::OnWire,
};
use crate::{
    BoxError, Classify, HasTask, Mode, Resend, Task,
    attempt_timeout::{AttemptTimeout, Phase},
    retry::{self, JitteredRetry, Shared},
    task::far,
};
use http_body::Body;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::{Instant, Sleep, sleep_until};
use tower_service::Service;

/// The service of a [`Herd`](super::Herd) around one provider.
pub struct HerdService<S, C, R> {
    retry: JitteredRetry<Guarded<S, C>, C, R>,
}

impl<S, C, R> HerdService<S, C, R> {
    pub fn new(retry: JitteredRetry<Guarded<S, C>, C, R>) -> Self {
        HerdService { retry }
    }
}

impl<S: Clone, C: Clone, R> Clone for HerdService<S, C, R> {
    fn clone(&self) -> Self {
        HerdService { retry: self.retry.clone() }
    }
}

impl<S: fmt::Debug, C, R> fmt::Debug for HerdService<S, C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HerdService").field("retry", &self.retry).finish()
    }
}

impl<S, Req, B, C, R> Service<Req> for HerdService<S, C, R>
where
    S: Service<Req, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    B: Body,
    B::Error: Into<BoxError>,
    C: Classify<http::Response<B>> + Classify<http::Response<HerdBody<B>>> + OfAll<B> + Clone,
    R: Resend<Req>,
{
    type Response = http::Response<HerdBody<B>>;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future, R::Kept, Guarded<S, C>, Req, C, R>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.retry.poll_ready(cx)
    }

    #[inline]
    fn call(&mut self, mut request: Req) -> Self::Future {
        let (guarded, shared) = self.retry.parts();
        let provider = &guarded.layers.provider;
        if shared.listens()
            || shared.mode() != Mode::Enforce
            || !guarded.layers.are_clear()
            || !provider.try_bare_slot()
        {
            return ResponseFuture { state: State::Layers { future: Box::pin(self.retry.call(request)) } };
        }
        let deposited = shared.deposit(&request);
        let kept = shared.resend.keep(&mut request);
        let wire = Some(OnWire::bare(provider, &request));
        let task_end = if kept.is_none() { request.task().and_then(Task::deadline_at) } else { None };
        ResponseFuture {
            state: State::Direct {
                call: guarded.inner.call(request),
                wire,
                kept,
                timer: None,
                task_end,
                deposited,
                terms: guarded.layers.terms,
                shared: Some(shared.clone()),
            },
        }
    }
}

pin_project! {
    /// The future of a [`HerdService`].
    pub struct ResponseFuture<F, K, G, Req, C, R>
    where
        G: Service<Req>,
        R: Resend<Req>,
    {
        #[pin]
        state: State<F, K, G, Req, C, R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, K, G, Req, C, R>
    where
        G: Service<Req>,
        R: Resend<Req>,
    {
        // The first attempt, with nothing in its way.
        Direct {
            #[pin]
            call: F,
            wire: Option<OnWire>,
            kept: Option<K>,
            timer: Option<Box<Timer>>,
            task_end: Option<Instant>,
            deposited: bool,
            terms: Terms,
            shared: Option<Arc<Shared<G, C, R>>>,
        },
        // All that is not on that path.
        Layers { future: Pin<Box<retry::future::ResponseFuture<G, Req, C, R>>> },
    }
}

/// Of a first attempt that is not ready at once.
struct Timer {
    sleep: Pin<Box<Sleep>>,
    began: Instant,
    /// Of the task, as the retry layer has it.
    deadline: Option<Instant>,
}

impl<F, K, S, B, E, Req, C, R> Future for ResponseFuture<F, K, Guarded<S, C>, Req, C, R>
where
    F: Future<Output = Result<http::Response<B>, E>>,
    E: Into<BoxError>,
    S: Service<Req, Response = http::Response<B>, Future = F> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    B: Body,
    B::Error: Into<BoxError>,
    C: Classify<http::Response<B>> + Classify<http::Response<HerdBody<B>>> + OfAll<B> + Clone,
    R: Resend<Req, Kept = K>,
    K: HasTask,
{
    type Output = Result<http::Response<HerdBody<B>>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Direct { call, wire, kept, timer, task_end, deposited, terms, shared } => {
                    let classify = &shared.as_ref().expect("polled after completion").classify;
                    let polled = call.poll(cx);
                    if let Poll::Ready(Ok(reply)) = &polled
                        && is_plain(reply, wire, classify, terms)
                    {
                        // One way in and one out: a reply is large, and each move costs.
                        return polled
                            .map_ok(|reply| reply.map(|body| HerdBody::direct(body, wire.take(), terms.idle)))
                            .map_err(Into::into);
                    }
                    let outcome = match polled {
                        Poll::Ready(Ok(reply)) => Ok(reply),
                        Poll::Ready(Err(error)) => Err(error.into()),
                        Poll::Pending => {
                            let timer = timer.get_or_insert_with(|| {
                                let began = Instant::now();
                                let task = kept.as_ref().and_then(HasTask::task).and_then(Task::deadline_at);
                                let deadline = task.or(*task_end);
                                let own = far(terms.headers);
                                let at = deadline.map_or(own, |task| own.min(task));
                                Box::new(Timer { sleep: Box::pin(sleep_until(at)), began, deadline })
                            });
                            if timer.sleep.as_mut().poll(cx).is_pending() {
                                return Poll::Pending;
                            }
                            let after = timer.sleep.deadline().saturating_duration_since(timer.began);
                            Err(AttemptTimeout { phase: Phase::Headers, after }.into())
                        }
                    };
                    let wire = wire.take().expect("not settled yet");
                    let future = rung::ResponseFuture::look(outcome, wire, classify, terms);
                    let deadline = timer.as_ref().and_then(|timer| timer.deadline);
                    let shared = shared.take().expect("looked at above");
                    let future = retry::future::ResponseFuture::resume(
                        future,
                        kept.take(),
                        shared,
                        deadline,
                        *deposited,
                    );
                    me.state.set(State::Layers { future: Box::pin(future) });
                }
                StateProj::Layers { future } => return future.as_mut().poll(cx),
            }
        }
    }
}

impl<F, K, G: Service<Req>, Req, C, R: Resend<Req>> fmt::Debug for ResponseFuture<F, K, G, Req, C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_direct = matches!(&self.state, State::Direct { .. });
        f.debug_struct("ResponseFuture").field("direct", &is_direct).finish_non_exhaustive()
    }
}

/// TEMP
#[doc(hidden)]
pub fn bench_herd<S: Clone>(
    provider: &crate::Provider,
    s: S,
) -> HerdService<S, crate::HttpClassify, crate::CloneRequest> {
    use tower_layer::Layer;
    HerdService::new(crate::JitteredRetryLayer::new().layer(rung::bench_rung(provider, s)))
}
