//! The future of the breaker.

use super::Breaker;
use crate::{
    BoxError, Classify, HasTask, Mode, Provider, RefusalKind, Task,
    provider::{Caller, Place, Sensing, Slot, WatchedProbe, handover},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The future of [`Breaker`](super::Breaker). Dropped while it probes, it gives the probe back, which
    /// is no verdict.
    pub struct ResponseFuture<F, C> {
        #[pin]
        state: State<F>,
        // Of the call, if nobody below does it. Before the probe: what the call taught is known when the
        // next may go.
        sensing: Option<Sensing>,
        // Of a probe that no gate below has taken over.
        probe: Option<Box<Probe>>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F },
        Refused { error: Option<BoxError> },
    }
}

/// What is given back when the call is over.
enum Probe {
    Sent(Place),
    Watched(WatchedProbe),
}

/// Calls `inner`: it is closed.
// The inner future is made where it will stay, in the result: it may be large, and to move it costs.
#[inline]
pub(super) fn call<S: Service<Req>, Req, C>(
    inner: &mut S,
    request: Req,
    provider: &Provider,
    caller: Caller,
    classify: C,
) -> ResponseFuture<S::Future, C> {
    handover::unwatched();
    ResponseFuture {
        state: State::Calling { future: inner.call(request) },
        sensing: provider.begin_unwatched_of(caller),
        probe: None,
        classify,
    }
}

/// It is open.
#[cold]
#[inline(never)]
pub(super) fn broken<S, Req, C>(
    service: &mut Breaker<S, C>,
    request: Req,
    caller: Caller,
) -> ResponseFuture<S::Future, C>
where
    S: Service<Req>,
    Req: HasTask,
    C: Clone,
{
    let Breaker { inner, provider, classify } = service;
    let (provider, classify) = (&*provider, classify.clone());
    let now = provider.clock().now();
    match provider.breaker().mode() {
        Mode::Off => {
            // What it knows gets old while nobody counts.
            provider.reset_breaker();
            call(inner, request, provider, caller, classify)
        }
        Mode::Observe => {
            let probe = provider.try_watched_probe(now);
            if probe.is_none() {
                provider.would_refuse(&provider.breaker().switch(), RefusalKind::Open);
            }
            let mut future = call(inner, request, provider, caller, classify);
            future.probe = probe.map(|probe| Box::new(Probe::Watched(probe)));
            future
        }
        Mode::Enforce => {
            let probing = match handover::offered(provider.core()) {
                // A ladder further out has taken the probe for this call.
                Some(true) => handover::take(provider.core()),
                _ => provider.try_breaker_probe(now, request.task().and_then(Task::deadline_at)),
            };
            match probing {
                Some(slot) => probe(inner, request, slot, provider, caller, classify),
                None => {
                    let error = Some(provider.broken_refusal(now).into());
                    // Whoever asks may rely on it: nothing was sent.
                    handover::mark_sensed(provider.core());
                    ResponseFuture { state: State::Refused { error }, sensing: None, probe: None, classify }
                }
            }
        }
    }
}

/// Sends the probe that is due.
fn probe<S: Service<Req>, Req, C>(
    inner: &mut S,
    request: Req,
    slot: Slot,
    provider: &Provider,
    caller: Caller,
    classify: C,
) -> ResponseFuture<S::Future, C> {
    handover::unwatched();
    let (future, left) = handover::lending(slot, || inner.call(request));
    let probe = left.map(|slot| {
        let mut place = slot.sent();
        // Nobody further in was seen. If the call only waits to get there (a buffer), a gate will ask for
        // the probe that we hold.
        if !handover::is_watched(provider.core()) {
            place.lend();
        }
        Box::new(Probe::Sent(place))
    });
    let sensing = provider.begin_unwatched_of(caller);
    ResponseFuture { state: State::Calling { future }, sensing, probe, classify }
}

impl<F, C, Res, E> Future for ResponseFuture<F, C>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
    C: Classify<Res>,
{
    type Output = Result<Res, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        match me.state.project() {
            StateProj::Calling { future } => {
                let outcome = ready!(future.poll(cx)).map_err(Into::into);
                // With a sensor below there is nothing to do here.
                if let Some(sensing) = me.sensing {
                    sensing.ended(&*me.classify, &outcome);
                    *me.sensing = None;
                }
                if let Some(probe) = me.probe.take() {
                    end(*probe);
                }
                Poll::Ready(outcome)
            }
            StateProj::Refused { error } => Poll::Ready(Err(error.take().expect("polled after completion"))),
        }
    }
}

/// The reply is there: what was held for it is given back.
#[cold]
fn end(probe: Probe) {
    match probe {
        Probe::Sent(place) => place.end(),
        Probe::Watched(probe) => drop(probe),
    }
}

impl<F, C> fmt::Debug for ResponseFuture<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Calling { .. } => "calling",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
