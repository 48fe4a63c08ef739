use super::{
    Hold,
    hold::{Held, HeldSlot},
};
use crate::{
    BoxError, Classify, HasTask, Provider,
    provider::{Admission, Denied, Place, Sensing, Slot, WaitFor, Waiting, handover},
};
use pin_project_lite::pin_project;
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tower_service::Service;

pin_project! {
    /// The future of [`FleetLimit`](super::FleetLimit).
    ///
    /// Dropped while it waits, it leaves the queue; dropped while the call runs, its slot lingers.
    pub struct ResponseFuture<S: Service<Req>, Req, H, C> {
        #[pin]
        state: State<S, Req>,
        // Of the call, if nobody below does it. Before the slot: what the call taught is known when its
        // place becomes free.
        sensing: Option<Sensing>,
        // Of the call, from when it is sent; none if it has none.
        place: Option<Place>,
        hold: H,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S: Service<Req>, Req> {
        Calling { #[pin] future: S::Future },
        Waiting { wait: Box<Waiting<S, Req>> },
        Refused { error: Option<BoxError> },
    }
}

/// Calls `inner`: a slot was free. The sensing is ours if nobody below does it.
// The inner future is made where it will stay, in the result: it may be large, and to move it costs.
#[inline]
pub(super) fn call<S: Service<Req>, Req, H, C>(
    inner: &mut S,
    request: Req,
    slot: Slot,
    provider: &Provider,
    hold: H,
    classify: C,
) -> ResponseFuture<S, Req, H, C> {
    let _admitting = handover::Admitting::new(provider.core(), slot.admitted());
    handover::unwatched();
    ResponseFuture {
        state: State::Calling { future: inner.call(request) },
        sensing: provider.begin_unwatched(),
        place: Some(slot.sent()),
        hold,
        classify,
    }
}

/// Calls `inner` though no slot was free: the layer only observes.
#[cold]
#[inline(never)]
pub(super) fn beyond<S: Service<Req>, Req, H, C>(
    inner: &mut S,
    request: Req,
    provider: &Provider,
    hold: H,
    classify: C,
) -> ResponseFuture<S, Req, H, C> {
    let _admitting = handover::Admitting::new(provider.core(), None);
    handover::unwatched();
    let future = inner.call(request);
    let sensing = provider.begin_unwatched();
    ResponseFuture { state: State::Calling { future }, sensing, place: None, hold, classify }
}

/// Calls `inner` as if this layer were not there.
#[cold]
#[inline(never)]
pub(super) fn pass<S: Service<Req>, Req, H, C>(
    inner: &mut S,
    request: Req,
    hold: H,
    classify: C,
) -> ResponseFuture<S, Req, H, C> {
    ResponseFuture {
        state: State::Calling { future: inner.call(request) },
        sensing: None,
        place: None,
        hold,
        classify,
    }
}

#[cold]
#[inline(never)]
pub(super) fn waiting<S: Service<Req> + Clone, Req: HasTask, H, C>(
    denied: Denied,
    inner: &S,
    request: Req,
    provider: &Provider,
    patience: Option<Duration>,
    hold: H,
    classify: C,
) -> ResponseFuture<S, Req, H, C> {
    // Once it is let through, this call will be watched below or here: whoever asks may rely on it.
    handover::mark_sensed(provider.core());
    let now = provider.clock().now();
    let wait = WaitFor::of(&request, patience, provider.core(), now);
    let admission = match denied {
        _ if wait.until <= now => Err(provider.refusal(now, &wait)),
        Denied::Paused(until, reason) if until > wait.until => Err(provider.paused_refusal(until, reason)),
        _ => Admission::begin(provider, wait, now),
    };
    let state = match admission {
        Err(refusal) => State::Refused { error: Some(refusal.into()) },
        Ok(admission) => State::Waiting { wait: Waiting::new(provider, admission, inner, request) },
    };
    ResponseFuture { state, sensing: None, place: None, hold, classify }
}

impl<S, Req, H, C> Future for ResponseFuture<S, Req, H, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    H: Hold<S::Response>,
    C: Classify<S::Response>,
{
    type Output = Result<H::Held, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Calling { future } => {
                    return match future.poll(cx) {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Ok(reply)) => {
                            Poll::Ready(Ok(replied(reply, me.sensing, me.place, me.hold, me.classify)))
                        }
                        Poll::Ready(Err(error)) => {
                            Poll::Ready(Err(failed(error.into(), me.sensing, me.place, me.classify)))
                        }
                    };
                }
                StateProj::Waiting { wait } => {
                    let (request, slot) = ready!(wait.poll(cx))?;
                    let (future, sensing, place) = send(&mut wait.service, request, slot, &wait.provider);
                    me.state.set(State::Calling { future });
                    (*me.sensing, *me.place) = (sensing, Some(place));
                }
                StateProj::Refused { error } => {
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            }
        }
    }
}

/// [`call`] after a wait.
fn send<S: Service<Req>, Req>(
    inner: &mut S,
    request: Req,
    slot: Slot,
    provider: &Provider,
) -> (S::Future, Option<Sensing>, Place) {
    let admitting = handover::Admitting::new(provider.core(), slot.admitted());
    handover::unwatched();
    let future = inner.call(request);
    let sensing = provider.begin_unwatched();
    drop(admitting);
    (future, sensing, slot.sent())
}

#[inline(always)]
pub(crate) fn replied<Res, H, C>(
    mut reply: Res,
    sensing: &mut Option<Sensing>,
    place: &mut Option<Place>,
    hold: &H,
    classify: &C,
) -> H::Held
where
    H: Hold<Res>,
    C: Classify<Res>,
{
    let kind = match sensing {
        None => classify.kind(Ok(&reply)),
        Some(watch) => {
            let signal = watch.read(classify, &reply);
            watch.outcome(&signal);
            if !signal.kind.is_success() {
                // For a gate further out that cannot see that this one watches.
                classify.stamp(&mut reply, signal.reported_by(watch.number()));
            }
            *sensing = None;
            signal.kind
        }
    };
    let Some(place) = place.take() else { return hold.hold(reply, HeldSlot(None)) };
    if kind.is_success() {
        return hold.hold(reply, HeldSlot(Some(Held(place))));
    }
    // An error reply gives its slot back at its head: the retry layer may keep that reply while it
    // sleeps.
    place.end();
    hold.hold(reply, HeldSlot(None))
}

#[cold]
#[inline(never)]
pub(crate) fn failed<Res, C: Classify<Res>>(
    error: BoxError,
    sensing: &mut Option<Sensing>,
    place: &mut Option<Place>,
    classify: &C,
) -> BoxError {
    let place = place.take();
    if let Some(mut sensing) = sensing.take() {
        sensing.outcome(&classify.classify(Err(&*error as &(dyn Error + 'static))));
    }
    // A timeout may leave the call running there; other errors end it.
    if crate::classify::is_timeout(&*error) {
        drop(place);
    } else if let Some(place) = place {
        place.end();
    }
    error
}

impl<S: Service<Req>, Req, H, C> fmt::Debug for ResponseFuture<S, Req, H, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Calling { .. } => "calling",
            State::Waiting { .. } => "waiting",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
