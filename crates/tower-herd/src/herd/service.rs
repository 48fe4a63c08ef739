//! One provider's whole stack as one service.

use super::{
    HerdClassify,
    body::HerdBody,
    handle::{Flight, Shared},
    layers::Terms,
    rung::{self, Guarded, is_plain},
    wire::OnWire,
};
use crate::{
    BoxError, HasTask, HashedFailover, Mode, Resend, Safety, Task,
    attempt_timeout::{AttemptTimeout, Phase},
    retry::{self, JitteredRetry},
    task::{far, fresh_id},
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

/// The service of a [`Herd`](super::Herd): `I` is what stands inside its outermost part.
///
/// For one provider that is [`OneRung`], for a ladder [`Rungs`].
pub struct HerdService<I> {
    inner: I,
    shared: Arc<Shared>,
}

/// Inside a [`HerdService`] for one provider: its layers, around `S`.
pub struct OneRung<S, R>(JitteredRetry<Guarded<S>, HerdClassify, R>);

/// Inside a [`HerdService`] for a ladder: its rungs, each around `S`.
pub struct Rungs<S, Req, R>(JitteredRetry<HashedFailover<Guarded<S>, Req, R, HerdClassify>, HerdClassify, R>);

impl<I> HerdService<I> {
    pub(super) fn new(inner: I, shared: Arc<Shared>) -> Self {
        HerdService { inner, shared }
    }
}

impl<S, R> OneRung<S, R> {
    pub(super) fn new(retry: JitteredRetry<Guarded<S>, HerdClassify, R>) -> Self {
        OneRung(retry)
    }
}

impl<S, Req, R> Rungs<S, Req, R> {
    pub(super) fn new(
        retry: JitteredRetry<HashedFailover<Guarded<S>, Req, R, HerdClassify>, HerdClassify, R>,
    ) -> Self {
        Rungs(retry)
    }
}

impl<I: Clone> Clone for HerdService<I> {
    fn clone(&self) -> Self {
        HerdService { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<S: Clone, R> Clone for OneRung<S, R> {
    fn clone(&self) -> Self {
        OneRung(self.0.clone())
    }
}

impl<S, Req, R: Clone> Clone for Rungs<S, Req, R> {
    fn clone(&self) -> Self {
        Rungs(self.0.clone())
    }
}

impl<I> fmt::Debug for HerdService<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HerdService").finish_non_exhaustive()
    }
}

impl<S, R> fmt::Debug for OneRung<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OneRung")
    }
}

impl<S, Req, R> fmt::Debug for Rungs<S, Req, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rungs")
    }
}

impl<S, A, B, R> Service<http::Request<A>> for HerdService<OneRung<S, R>>
where
    S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    A: Body,
    B: Body,
    B::Error: Into<BoxError>,
    R: Resend<http::Request<A>>,
{
    type Response = http::Response<HerdBody<B>>;
    type Error = BoxError;
    type Future = DirectFuture<S::Future, Guarded<S>, http::Request<A>, R>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.0.poll_ready(cx)
    }

    #[inline]
    fn call(&mut self, mut request: http::Request<A>) -> Self::Future {
        let flight = self.shared.depart();
        if self.shared.has_default_safety() {
            self.shared.declare_safety(&mut request);
        }
        let (guarded, shared) = self.inner.0.parts();
        let layers = &guarded.layers;
        let is_short = flight.is_some()
            && !shared.listens()
            && shared.mode() == Mode::Enforce
            && layers.are_clear(&request)
            && layers.provider.try_bare_slot();
        if !is_short {
            return self.long(request, flight);
        }
        // The guard of the slot comes before what is not ours and may panic.
        let wire = Some(OnWire::bare(&layers.provider, &request));
        let deposited = shared.deposit(&request);
        let kept = shared.resend.keep(&mut request);
        let task_end = if kept.is_none() { request.task().and_then(Task::deadline_at) } else { None };
        DirectFuture {
            path: Path::Direct {
                call: guarded.inner.call(request),
                wire,
                kept,
                timer: None,
                task_end,
                deposited,
                terms: layers.terms(),
                shared: Some(shared.clone()),
            },
            flight,
        }
    }
}

impl<S, R> HerdService<OneRung<S, R>> {
    /// Through the layers themselves, or nowhere.
    #[cold]
    #[inline(never)]
    fn long<A, B>(
        &mut self,
        mut request: http::Request<A>,
        flight: Option<Flight>,
    ) -> DirectFuture<S::Future, Guarded<S>, http::Request<A>, R>
    where
        S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
        S::Error: Into<BoxError>,
        A: Body,
        B: Body,
        B::Error: Into<BoxError>,
        R: Resend<http::Request<A>>,
    {
        let path = if flight.is_none() {
            Path::Refused { error: Some(self.shared.draining()) }
        } else {
            self.shared.start_task(&mut request, Instant::now());
            Path::Layers { future: Box::pin(self.inner.0.call(request)) }
        };
        DirectFuture { path, flight }
    }
}

impl<S, A, B, R> Service<http::Request<A>> for HerdService<Rungs<S, http::Request<A>, R>>
where
    S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    A: Body,
    B: Body,
    B::Error: Into<BoxError>,
    R: Resend<http::Request<A>> + Clone,
{
    type Response = http::Response<HerdBody<B>>;
    type Error = BoxError;
    type Future = ResponseFuture<
        retry::future::ResponseFuture<
            HashedFailover<Guarded<S>, http::Request<A>, R, HerdClassify>,
            http::Request<A>,
            HerdClassify,
            R,
        >,
    >;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.0.poll_ready(cx)
    }

    #[inline]
    fn call(&mut self, mut request: http::Request<A>) -> Self::Future {
        let flight = self.shared.depart();
        if flight.is_none() {
            return ResponseFuture { state: State::Refused { error: Some(self.shared.draining()) }, flight };
        }
        if self.shared.has_default_safety() {
            self.shared.declare_safety(&mut request);
        }
        self.shared.start_task(&mut request, Instant::now());
        ResponseFuture { state: State::Calling { future: self.inner.0.call(request) }, flight }
    }
}

impl Shared {
    /// A request that belongs to no task is one of its own, from `now` on.
    #[cold]
    fn start_task<Req: HasTask>(&self, request: &mut Req, now: Instant) {
        if request.task().is_none() {
            let end = now.checked_add(self.deadline()).unwrap_or_else(|| far(self.deadline()));
            let task = Task::new(fresh_id(&self.seeds).get())
                .deadline(end)
                .allowance(self.allowance())
                .criticality(self.criticality());
            request.set_task(task);
        }
    }

    /// What a request does not say about its safety, its herd says.
    #[cold]
    fn declare_safety<A>(&self, request: &mut http::Request<A>) {
        if let Some(safety) = self.default_safety()
            && Safety::of_http(request) == Safety::Once
            && request.extensions().get::<Safety>().is_none()
        {
            request.extensions_mut().insert(safety);
        }
    }
}

pin_project! {
    /// The future of a [`HerdService`] for a ladder.
    pub struct ResponseFuture<F> {
        #[pin]
        state: State<F>,
        flight: Option<Flight>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F },
        Refused { error: Option<BoxError> },
    }
}

impl<F, B> Future for ResponseFuture<F>
where
    F: Future<Output = Result<http::Response<HerdBody<B>>, BoxError>>,
    B: Body,
    B::Error: Into<BoxError>,
{
    type Output = Result<http::Response<HerdBody<B>>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        match me.state.project() {
            StateProj::Calling { future } => {
                let mut polled = future.poll(cx);
                land(&mut polled, me.flight);
                polled
            }
            StateProj::Refused { error } => Poll::Ready(Err(error.take().expect("polled after completion"))),
        }
    }
}

impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("under_way", &self.flight.is_some()).finish_non_exhaustive()
    }
}

pin_project! {
    /// The future of a [`HerdService`] for one provider: the first attempt, if nothing stands in its way; all else goes through the
    /// layers.
    pub struct DirectFuture<F, G, Req, R>
    where
        G: Service<Req>,
        R: Resend<Req>,
    {
        #[pin]
        path: Path<F, G, Req, R>,
        flight: Option<Flight>,
    }
}

pin_project! {
    #[project = PathProj]
    enum Path<F, G, Req, R>
    where
        G: Service<Req>,
        R: Resend<Req>,
    {
        Direct {
            #[pin]
            call: F,
            wire: Option<OnWire>,
            kept: Option<R::Kept>,
            timer: Option<Pin<Box<Timer>>>,
            task_end: Option<Instant>,
            deposited: bool,
            terms: Terms,
            shared: Option<Arc<retry::Shared<G, HerdClassify, R>>>,
        },
        Layers { future: Pin<Box<retry::future::ResponseFuture<G, Req, HerdClassify, R>>> },
        Refused { error: Option<BoxError> },
    }
}

pin_project! {
    // Of a first attempt that is not ready at once.
    struct Timer {
        #[pin]
        sleep: Sleep,
        began: Instant,
    }
}

impl<S, A, B, R> Future for DirectFuture<S::Future, Guarded<S>, http::Request<A>, R>
where
    S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    A: Body,
    B: Body,
    B::Error: Into<BoxError>,
    R: Resend<http::Request<A>>,
{
    type Output = Result<http::Response<HerdBody<B>>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.path.as_mut().project() {
                PathProj::Direct { call, wire, kept, timer, task_end, deposited, terms, shared } => {
                    let classify = &shared.as_ref().expect("polled after completion").classify;
                    let polled = call.poll(cx);
                    if let Poll::Ready(Ok(reply)) = &polled
                        && is_plain(reply, wire, classify, terms)
                    {
                        // One way in and one out: a reply is large, and each move costs.
                        let flight = me.flight.take().filter(|_| wire.is_some());
                        return polled
                            .map_ok(|reply| {
                                reply.map(|body| HerdBody::direct(body, wire.take(), terms.idle, flight))
                            })
                            .map_err(Into::into);
                    }
                    let outcome = match polled {
                        Poll::Ready(outcome) => outcome.map_err(Into::into),
                        Poll::Pending => {
                            let timer = timer.get_or_insert_with(|| {
                                let kept = kept.as_ref().and_then(HasTask::task);
                                let task = kept.and_then(Task::deadline_at).or(*task_end);
                                let shared = shared.as_ref().expect("looked at above");
                                Timer::start(terms, task.unwrap_or_else(|| far(herd(shared).deadline())))
                            });
                            if timer.as_mut().project().sleep.poll(cx).is_pending() {
                                return Poll::Pending;
                            }
                            let after = timer.sleep.deadline().saturating_duration_since(timer.began);
                            Err(AttemptTimeout { phase: Phase::Headers, after }.into())
                        }
                    };
                    let wire = wire.take().expect("not settled yet");
                    let future = rung::ResponseFuture::look(outcome, wire, classify, terms);
                    let shared = shared.take().expect("looked at above");
                    let began = timer.as_ref().map_or_else(Instant::now, |timer| timer.began);
                    // A call that is well needs no task: it is started when there is more to do.
                    if let Some(kept) = kept.as_mut() {
                        herd(&shared).start_task(kept, began);
                    }
                    let deadline = kept.as_ref().and_then(HasTask::task).and_then(Task::deadline_at);
                    let deadline = deadline.or(*task_end);
                    let future = retry::future::ResponseFuture::resume(
                        future,
                        kept.take(),
                        shared,
                        deadline,
                        *deposited,
                    );
                    me.path.set(Path::Layers { future: Box::pin(future) });
                }
                PathProj::Layers { future } => {
                    let mut polled = future.as_mut().poll(cx);
                    land(&mut polled, me.flight);
                    return polled;
                }
                PathProj::Refused { error } => {
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            }
        }
    }
}

/// An error is the end of a call; a reply has a body to come.
#[inline]
fn land<B>(polled: &mut Poll<Result<http::Response<HerdBody<B>>, BoxError>>, flight: &mut Option<Flight>)
where
    B: Body,
    B::Error: Into<BoxError>,
{
    match polled {
        Poll::Ready(Ok(reply)) => reply.body_mut().keep(flight.take()),
        Poll::Ready(Err(_)) => *flight = None,
        Poll::Pending => {}
    }
}

/// The herd of a call that is under way.
fn herd<S, R>(shared: &retry::Shared<Guarded<S>, HerdClassify, R>) -> Arc<Shared> {
    shared.with_service(|guarded| guarded.layers.shared.clone())
}

impl Timer {
    #[cold]
    fn start(terms: &Terms, task: Instant) -> Pin<Box<Self>> {
        let at = far(terms.headers).min(task);
        Box::pin(Timer { sleep: sleep_until(at), began: Instant::now() })
    }
}

impl<F, G: Service<Req>, Req, R: Resend<Req>> fmt::Debug for DirectFuture<F, G, Req, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_direct = matches!(&self.path, Path::Direct { .. });
        f.debug_struct("DirectFuture").field("direct", &is_direct).finish_non_exhaustive()
    }
}
