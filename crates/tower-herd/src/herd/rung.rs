//! The layers of one provider in one service.
//!
//! Seven layers, each with a future and a body of its own, move a reply seven times. On the path that
//! most calls take none of them has anything to say: no pause, a free slot, a plain success. That path is
//! written out here as one step. Whatever is not on it goes through the layers themselves, so there is
//! one meaning of each rule, and the fast path only has to know when it may be taken.

use super::{
    body::{HerdBody, Nest},
    wire::OnWire,
};
use crate::{
    AttemptTimeoutLayer, BoxError, Classify, ClassifyLayer, FleetLimitLayer, HasTask, Kind, Provider,
    RetryAfterLayer, Task,
    attempt_timeout::{
        Timed, TimedBody,
        future::{Deadline, ReplyFuture},
    },
    classify::{self, Bodies, Classified, Options, SensedBody},
    fleet_limit::{self, FleetLimit, UntilBodyEnd},
    provider::{Place, handover},
    retry_after::RetryAfter,
};
use http_body::Body;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::{Future, Ready, ready},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tower_layer::Layer;
use tower_service::Service;

/// The layers of one rung, in order.
#[derive(Clone)]
pub(super) struct Layers<C> {
    pub(super) provider: Provider,
    pub(super) classify: C,
    pub(super) pause: RetryAfterLayer<C>,
    pub(super) limit: FleetLimitLayer<UntilBodyEnd, C>,
    pub(super) sensor: ClassifyLayer<C, Bodies>,
    pub(super) timeout: AttemptTimeoutLayer<Bodies>,
    pub(super) terms: Terms,
}

/// What a call on the wire goes by.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) options: Options,
    pub(super) headers: Duration,
    pub(super) idle: Duration,
}

/// What they make of a service.
type Stack<S, C> = RetryAfter<FleetLimit<Classified<Timed<S, Bodies>, C, Bodies>, UntilBodyEnd, C>, C>;

impl<C: Clone> Layers<C> {
    fn stack<S>(&self, service: S) -> Stack<S, C> {
        self.pause.layer(self.limit.layer(self.sensor.layer(self.timeout.layer(service))))
    }

    /// Whether no layer has anything to say to a call right now but for its slot.
    #[inline]
    pub(super) fn are_clear(&self) -> bool {
        self.provider.is_open()
    }
}

/// All layers of one rung around `S`.
#[derive(Clone)]
pub struct Guarded<S, C> {
    pub(super) inner: S,
    pub(super) layers: Layers<C>,
}

impl<S, C> Guarded<S, C> {
    pub(super) fn new(inner: S, layers: Layers<C>) -> Self {
        Guarded { inner, layers }
    }
}

impl<S: fmt::Debug, C> fmt::Debug for Guarded<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded")
            .field("inner", &self.inner)
            .field("provider", &self.layers.provider)
            .finish_non_exhaustive()
    }
}

impl<S, Req, B, C> Service<Req> for Guarded<S, C>
where
    S: Service<Req, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    B: Body,
    B::Error: Into<BoxError>,
    C: Classify<http::Response<B>> + OfAll<B> + Clone,
{
    type Response = http::Response<HerdBody<B>>;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future, B, C, <Stack<S, C> as Service<Req>>::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let layers = &self.layers;
        let provider = &layers.provider;
        let wire = match handover::offered(provider.core()) {
            None if layers.are_clear() && provider.try_bare_slot() => OnWire::bare(provider, &request),
            Some(false) if layers.are_clear() => match handover::take(provider.core()) {
                Some(slot) => OnWire::granted(provider, &request, slot),
                None => return self.slow(request),
            },
            _ => return self.slow(request),
        };
        let deadline = Deadline::new(layers.terms.headers, request.task().and_then(Task::deadline_at), None);
        ResponseFuture {
            state: State::Direct {
                call: ReplyFuture::new(self.inner.call(request), deadline),
                wire: Some(wire),
                classify: layers.classify.clone(),
                terms: layers.terms,
            },
        }
    }
}

impl<S, C: Clone> Guarded<S, C> {
    /// Through the layers themselves.
    #[cold]
    #[inline(never)]
    fn slow<Req, B>(&mut self, request: Req) -> SlowOf<S, Req, B, C>
    where
        S: Service<Req, Response = http::Response<B>> + Clone,
        S::Error: Into<BoxError>,
        Req: HasTask,
        B: Body,
        B::Error: Into<BoxError>,
        C: OfAll<B>,
    {
        // The instance that was polled ready makes the call; a fresh one takes its place.
        let fresh = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, fresh);
        let future = Box::pin(self.layers.stack(ready).call(request));
        ResponseFuture { state: State::Layers { future } }
    }
}

type SlowOf<S, Req, B, C> =
    ResponseFuture<<S as Service<Req>>::Future, B, C, <Stack<S, C> as Service<Req>>::Future>;

/// A classifier for the replies of all layers of a rung: each wraps the body once more.
pub trait OfAll<B: Body>:
    Classify<http::Response<TimedBody<B>>>
    + Classify<http::Response<SensedBody<TimedBody<B>>>>
    + Classify<http::Response<Nest<B>>>
where
    B::Error: Into<BoxError>,
{
}
impl<C, B: Body> OfAll<B> for C
where
    B::Error: Into<BoxError>,
    C: Classify<http::Response<TimedBody<B>>>
        + Classify<http::Response<SensedBody<TimedBody<B>>>>
        + Classify<http::Response<Nest<B>>>,
{
}

pin_project! {
    /// The future of a [`Guarded`] service: `F` is that of the service inside, `L` that of all layers
    /// around it.
    pub struct ResponseFuture<F, B, C, L>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        #[pin]
        state: State<F, B, C, L>,
    }
}

/// The reply of a call that was made directly, on its way through the sensor.
type Sensed<B, C> =
    classify::future::ResponseFuture<Ready<Result<http::Response<TimedBody<B>>, BoxError>>, TimedBody<B>, C>;

pin_project! {
    #[project = StateProj]
    enum State<F, B, C, L>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        // Nothing stood in the way.
        Direct {
            #[pin]
            call: ReplyFuture<F>,
            wire: Option<OnWire>,
            classify: C,
            terms: Terms,
        },
        // Its reply is no plain success: the sensor looks into it. Boxed, like what follows: only those
        // pay for it.
        Looking { future: Pin<Box<Sensed<B, C>>>, place: Option<Place>, classify: C },
        // Something stands in the way.
        Layers { future: Pin<Box<L>> },
    }
}

impl<F, B, C, L> ResponseFuture<F, B, C, L>
where
    B: Body,
    B::Error: Into<BoxError>,
    C: Clone,
{
    /// Goes on from the outcome of a call that was made directly, and is no plain success.
    #[cold]
    pub(super) fn look(
        outcome: Result<http::Response<B>, BoxError>,
        wire: OnWire,
        classify: &C,
        terms: &Terms,
    ) -> Self {
        let outcome = outcome.map(|reply| reply.map(|body| TimedBody::new(body, Some(terms.idle), None)));
        let (report, place) = wire.into_parts();
        let future = Sensed::resume(ready(outcome), Some(report), classify.clone(), terms.options);
        ResponseFuture {
            state: State::Looking {
                future: Box::pin(future),
                place: Some(place),
                classify: classify.clone(),
            },
        }
    }
}

impl<F, B, C, L, E> Future for ResponseFuture<F, B, C, L>
where
    F: Future<Output = Result<http::Response<B>, E>>,
    E: Into<BoxError>,
    B: Body,
    B::Error: Into<BoxError>,
    C: Classify<http::Response<B>> + OfAll<B> + Clone,
    L: Future<Output = Result<http::Response<Nest<B>>, BoxError>>,
{
    type Output = Result<http::Response<HerdBody<B>>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Direct { call, wire, classify, terms } => {
                    let outcome = ready!(call.poll(cx));
                    let is_plain =
                        outcome.as_ref().is_ok_and(|reply| is_plain(reply, wire, &*classify, terms));
                    let outcome = match outcome {
                        // One way in and one out: a reply is large, and each move costs.
                        Ok(reply) if is_plain => {
                            return Poll::Ready(Ok(
                                reply.map(|body| HerdBody::direct(body, wire.take(), terms.idle))
                            ));
                        }
                        other => other,
                    };
                    let wire = wire.take().expect("polled after completion");
                    let next = ResponseFuture::look(outcome, wire, classify, terms);
                    // Before anything is waited for the attempt goes, and with it what it holds.
                    me.state.set(next.state);
                }
                StateProj::Looking { future, place, classify } => {
                    let outcome = ready!(future.as_mut().poll(cx));
                    return Poll::Ready(match outcome {
                        Ok(reply) => {
                            let held =
                                fleet_limit::replied(reply, &mut None, place, &UntilBodyEnd, &*classify);
                            Ok(held.map(HerdBody::nest))
                        }
                        Err(error) => Err(fleet_limit::failed::<http::Response<B>, _>(
                            error, &mut None, place, &*classify,
                        )),
                    });
                }
                StateProj::Layers { future } => {
                    let reply = ready!(future.as_mut().poll(cx))?;
                    return Poll::Ready(Ok(reply.map(HerdBody::nest)));
                }
            }
        }
    }
}

/// Whether a reply is a plain success: then it is settled but for its body.
#[inline]
pub(super) fn is_plain<B, C>(
    reply: &http::Response<B>,
    wire: &mut Option<OnWire>,
    classify: &C,
    terms: &Terms,
) -> bool
where
    B: Body,
    C: Classify<http::Response<B>>,
{
    let report = wire.as_mut().expect("polled after completion").report();
    let signal = report.read(classify, reply);
    if signal.kind != Kind::Success || terms.options.most(&signal) > 0 {
        return false;
    }
    report.head(&signal);
    if reply.body().is_end_stream()
        && let Some(wire) = wire.take()
    {
        wire.end(None);
    }
    true
}

impl<F, B: Body, C, L> fmt::Debug for ResponseFuture<F, B, C, L>
where
    B::Error: Into<BoxError>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Direct { .. } => "direct",
            State::Looking { .. } => "looking",
            State::Layers { .. } => "layers",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

/// TEMP
#[doc(hidden)]
pub fn bench_rung<S>(provider: &Provider, s: S) -> Guarded<S, crate::HttpClassify> {
    let c = crate::HttpClassify::default();
    let layers = Layers {
        provider: provider.clone(),
        classify: c,
        pause: RetryAfterLayer::new(provider),
        limit: FleetLimitLayer::new(provider),
        sensor: ClassifyLayer::new(provider),
        timeout: AttemptTimeoutLayer::default(),
        terms: Terms {
            options: Options { error_bytes: 65536, error_millis: 1000, success_bytes: 0, hold_millis: 0 },
            headers: Duration::from_secs(30),
            idle: Duration::from_secs(60),
        },
    };
    Guarded::new(s, layers)
}
