//! The layers of one provider in one service.
//!
//! Seven layers, each with a future and a body of its own, move a reply seven times. On the path that
//! most calls take none of them has anything to say: no pause, a free slot, a plain success. That path is
//! written out here as one step. Whatever is not on it goes through the layers themselves, so there is
//! one meaning of each rule, and the fast path only has to know when it may be taken.

use super::{
    HerdClassify,
    body::{HerdBody, Nest},
    layers::{Layers, Stack, Terms},
    wire::OnWire,
};
use crate::{
    BoxError, HasTask, Kind, Task,
    attempt_timeout::{
        TimedBody,
        future::{Deadline, ReplyFuture},
    },
    attempts, classify,
    fleet_limit::{self, UntilBodyEnd},
    provider::{Place, handover},
};
use http_body::Body;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::{Future, Ready, ready},
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

/// All layers of one rung around `S`.
#[derive(Clone)]
pub struct Guarded<S> {
    pub(super) inner: S,
    pub(super) layers: Layers,
}

impl<S> Guarded<S> {
    pub(super) fn new(inner: S, layers: Layers) -> Self {
        Guarded { inner, layers }
    }
}

impl<S: fmt::Debug> fmt::Debug for Guarded<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded")
            .field("inner", &self.inner)
            .field("provider", &self.layers.provider)
            .finish_non_exhaustive()
    }
}

impl<S, A, B> Service<http::Request<A>> for Guarded<S>
where
    S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
    S::Error: Into<BoxError>,
    A: Body,
    B: Body,
    B::Error: Into<BoxError>,
{
    type Response = http::Response<HerdBody<B>>;
    type Error = BoxError;
    type Future = FutureOf<S, A, B>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: http::Request<A>) -> Self::Future {
        let layers = &self.layers;
        let provider = &layers.provider;
        let wire = match handover::offered(provider.core()) {
            None if layers.are_clear(&request) && provider.try_bare_slot() => {
                OnWire::bare(provider, &request)
            }
            Some(false) if layers.are_clear(&request) => match handover::take(provider.core()) {
                Some(slot) => OnWire::granted(provider, &request, slot),
                None => return self.slow(request),
            },
            _ => return self.slow(request),
        };
        let terms = layers.terms();
        let deadline = Deadline::new(terms.headers, request.task().and_then(Task::deadline_at), None);
        ResponseFuture {
            state: State::Direct {
                call: ReplyFuture::new(self.inner.call(request), deadline),
                wire: Some(wire),
                classify: layers.classify.clone(),
                terms,
            },
        }
    }
}

/// The future of a rung around `S`, for requests with bodies `A` and replies with bodies `B`.
type FutureOf<S, A, B> = ResponseFuture<
    <S as Service<http::Request<A>>>::Future,
    B,
    <Stack<S> as Service<http::Request<A>>>::Future,
>;

impl<S> Guarded<S> {
    /// Through the layers themselves.
    #[cold]
    #[inline(never)]
    fn slow<A, B>(&mut self, request: http::Request<A>) -> FutureOf<S, A, B>
    where
        S: Service<http::Request<A>, Response = http::Response<B>> + Clone,
        S::Error: Into<BoxError>,
        A: Body,
        B: Body,
        B::Error: Into<BoxError>,
    {
        // The instance that was polled ready makes the call; a fresh one takes its place.
        let fresh = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, fresh);
        let future = Box::pin(self.layers.stack(ready).call(request));
        ResponseFuture { state: State::Layers { future } }
    }
}

pin_project! {
    /// The future of a [`Guarded`] service: `F` is that of the service inside, `L` that of all layers
    /// around it.
    pub struct ResponseFuture<F, B, L>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        #[pin]
        state: State<F, B, L>,
    }
}

/// The reply of a call that was made directly, on its way through the sensor.
type Sensed<B> = classify::future::ResponseFuture<
    Ready<Result<http::Response<TimedBody<B>>, BoxError>>,
    TimedBody<B>,
    HerdClassify,
>;

pin_project! {
    #[project = StateProj]
    enum State<F, B, L>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        // Nothing stood in the way.
        Direct {
            #[pin]
            call: ReplyFuture<F>,
            wire: Option<OnWire>,
            classify: HerdClassify,
            terms: Terms,
        },
        // Its reply is no plain success: the sensor looks into it. Boxed, like what follows: only those
        // pay for it.
        Looking { future: Pin<Box<Sensed<B>>>, place: Option<Place>, classify: HerdClassify },
        // Something stands in the way.
        Layers { future: Pin<Box<L>> },
    }
}

impl<F, B, L> ResponseFuture<F, B, L>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    /// Goes on from the outcome of a call that was made directly, and is no plain success.
    #[cold]
    pub(super) fn look(
        outcome: Result<http::Response<B>, BoxError>,
        wire: OnWire,
        classify: &HerdClassify,
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

impl<F, B, L, E> Future for ResponseFuture<F, B, L>
where
    F: Future<Output = Result<http::Response<B>, E>>,
    E: Into<BoxError>,
    B: Body,
    B::Error: Into<BoxError>,
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
                                reply.map(|body| HerdBody::direct(body, wire.take(), terms.idle, None))
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
                            Ok(held.map(HerdBody::held))
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

/// Whether a reply, which is looked at here first, is a plain success: then it is settled but for its body.
#[inline]
pub(super) fn is_plain<B: Body>(
    reply: &http::Response<B>,
    wire: &mut Option<OnWire>,
    classify: &HerdClassify,
    terms: &Terms,
) -> bool {
    let report = wire.as_mut().expect("polled after completion").report();
    attempts::replied_to_first(report.provider(), reply);
    let signal = report.read(classify, reply);
    if signal.kind != Kind::Success || terms.options.most(&signal) > 0 {
        return false;
    }
    report.head(&signal);
    // Retries further in repeat themselves: a sample of the calls finds them.
    if let Some(provider) = report.sample() {
        attempts::notice(provider, reply.version(), reply.headers());
    }
    if reply.body().is_end_stream()
        && let Some(open) = wire
    {
        open.end(None);
        *wire = None;
    }
    true
}

impl<F, B: Body, L> fmt::Debug for ResponseFuture<F, B, L>
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
