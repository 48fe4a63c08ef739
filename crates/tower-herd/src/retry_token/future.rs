//! The future of a run.

pub use super::{
    breaker::BreakerPermit,
    permit::{Permit, RunPermit},
};

use super::{
    Defer, Deferral, Judge, Tokens, Wait,
    permit::Verdict,
    tokens::{Work, why},
};
use crate::{BoxError, Mode, Switch};
use pin_project_lite::pin_project;
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The future of [`RetryToken`](super::RetryToken) and of [`JobBreaker`](super::JobBreaker). Dropped while the
    /// store is asked, it may have claimed the key or not; dropped while the job runs, the token stays, and the next run
    /// is granted when its wait is over. Nothing is to be given back in either case.
    pub struct ResponseFuture<S, Req, T, P, D, J>
    where
        S: Service<Req>,
        D: Defer<Req>,
    {
        #[pin]
        state: State<S::Future, Held<S, Req, P>, P, D::Handle, Result<S::Response, BoxError>>,
        ways: Ways<T, D, J>,
    }
}

/// What it takes to refuse and to judge.
pub(super) struct Ways<T, D, J> {
    pub(super) tokens: Tokens<T>,
    pub(super) about: Arc<str>,
    pub(super) switch: Switch,
    pub(super) defer: D,
    pub(super) judge: J,
}

/// A call that has not been made yet.
pub(super) struct Held<S, Req, P> {
    ask: Work<Verdict<P>>,
    // Both, until the store has answered.
    call: Option<(S, Req)>,
}

pin_project! {
    #[project = StateProj]
    enum State<F, H, P, I, O> {
        Asking { held: H },
        Running { #[pin] future: F, permit: Option<P>, handle: Option<I> },
        // What is still to be done before the caller gets it.
        Ending { work: Option<Work<()>>, outcome: Option<O> },
    }
}

impl<S, Req, T, P, D, J> ResponseFuture<S, Req, T, P, D, J>
where
    S: Service<Req>,
    D: Defer<Req> + Send + 'static,
    D::Handle: Send + 'static,
{
    /// The store is asked first.
    pub(super) fn asking(ask: Work<Verdict<P>>, service: S, request: Req, ways: Ways<T, D, J>) -> Self {
        let held = Held { ask, call: Some((service, request)) };
        ResponseFuture { state: State::Asking { held }, ways }
    }

    /// It is decided.
    pub(super) fn decided(verdict: Verdict<P>, service: &mut S, request: Req, ways: Ways<T, D, J>) -> Self {
        ResponseFuture { state: ways.decided(verdict, service, request), ways }
    }
}

type StateOf<S, Req, P, D> = State<
    <S as Service<Req>>::Future,
    Held<S, Req, P>,
    P,
    <D as Defer<Req>>::Handle,
    Result<<S as Service<Req>>::Response, BoxError>,
>;

impl<T, D, J> Ways<T, D, J> {
    fn decided<S, Req, P>(&self, verdict: Verdict<P>, service: &mut S, request: Req) -> StateOf<S, Req, P, D>
    where
        S: Service<Req>,
        D: Defer<Req> + Send + 'static,
        D::Handle: Send + 'static,
    {
        let permit = match verdict {
            Verdict::Run(permit) => permit,
            Verdict::Refuse(_) if self.switch.mode() != Mode::Enforce => {
                self.tokens.would_refuse(&self.switch);
                None
            }
            Verdict::Refuse(wait) => return self.refused::<S, Req, P>(wait, &request),
        };
        let handle = permit.is_some().then(|| self.defer.handle(&request));
        State::Running { future: service.call(request), permit, handle }
    }

    #[cold]
    fn refused<S, Req, P>(&self, wait: Wait, request: &Req) -> StateOf<S, Req, P, D>
    where
        S: Service<Req>,
        D: Defer<Req> + Send + 'static,
        D::Handle: Send + 'static,
    {
        let (refusal, deferral) = self.tokens.refuse(why(wait.cause), self.about.clone(), wait);
        let work = deferring(self.defer.clone(), self.defer.handle(request), deferral, None);
        State::Ending { work: Some(work), outcome: Some(Err(refusal.into())) }
    }
}

/// Tells the store, then puts the job back.
fn deferring<Req, D>(defer: D, handle: D::Handle, deferral: Deferral, work: Option<Work<()>>) -> Work<()>
where
    D: Defer<Req> + Send + 'static,
    D::Handle: Send + 'static,
{
    Box::pin(async move {
        if let Some(work) = work {
            work.await;
        }
        // Its error need not be `Send`, so it does not live over an await.
        let done = defer.defer(handle, deferral).await;
        if let Err(error) = done {
            let error: BoxError = error.into();
            tracing::warn!(
                target: "tower_herd",
                error = &*error as &(dyn Error + 'static),
                wait_ms = u64::try_from(deferral.wait.as_millis()).unwrap_or(u64::MAX),
                "a job could not be put back"
            );
        }
    })
}

impl<S, Req, T, P, D, J> Future for ResponseFuture<S, Req, T, P, D, J>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    P: Permit,
    D: Defer<Req> + Send + 'static,
    D::Handle: Send + 'static,
    J: Judge<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            let next = match me.state.as_mut().project() {
                StateProj::Asking { held } => {
                    let verdict = ready!(held.ask.as_mut().poll(cx));
                    let (mut service, request) = held.call.take().expect("polled after completion");
                    me.ways.decided(verdict, &mut service, request)
                }
                StateProj::Running { future, permit, handle } => {
                    if let Some(permit) = permit {
                        permit.poll_beat(cx);
                    }
                    let result = ready!(future.poll(cx)).map_err(Into::into);
                    let Some(permit) = permit.take() else { return Poll::Ready(result) };
                    let outcome = me
                        .ways
                        .judge
                        .judge(result.as_ref().map_err(|error| &**error as &(dyn Error + 'static)));
                    let settled = permit.settle(outcome);
                    let work = match (settled.deferral, handle.take()) {
                        (Some(deferral), Some(handle)) => {
                            Some(deferring(me.ways.defer.clone(), handle, deferral, settled.work))
                        }
                        _ => settled.work,
                    };
                    if work.is_none() {
                        return Poll::Ready(result);
                    }
                    State::Ending { work, outcome: Some(result) }
                }
                StateProj::Ending { work, outcome } => {
                    if let Some(work) = work {
                        ready!(work.as_mut().poll(cx));
                    }
                    *work = None;
                    return Poll::Ready(outcome.take().expect("polled after completion"));
                }
            };
            me.state.set(next);
        }
    }
}

impl<S, Req, T, P, D, J> fmt::Debug for ResponseFuture<S, Req, T, P, D, J>
where
    S: Service<Req>,
    D: Defer<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Asking { .. } => "asking",
            State::Running { .. } => "running",
            State::Ending { .. } => "ending",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
