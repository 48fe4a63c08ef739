use super::{
    Hold,
    hold::{Held, HeldSlot},
    service::send,
};
use crate::{
    BoxError, Classify, HasTask, Provider,
    provider::{Admission, Denied, Sensing, Slot, WaitFor, handover},
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
        hold: H,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S: Service<Req>, Req> {
        Calling { #[pin] future: S::Future, call: Option<Call> },
        // Boxed: only who waits pays for it, and the future of everybody else stays small.
        Waiting { wait: Box<Waiting<S, Req>> },
        Refused { error: Option<BoxError> },
    }
}

struct Call {
    // Before the slot: what the call taught is known when its place becomes free.
    sensing: Option<Sensing>,
    slot: Slot,
}

struct Waiting<S, Req> {
    provider: Provider,
    admission: Admission,
    slot: Option<Slot>,
    service: S,
    request: Option<Req>,
}

#[inline]
pub(super) fn calling<S: Service<Req>, Req, H, C>(
    inner: &mut S,
    request: Req,
    slot: Slot,
    provider: &Provider,
    hold: H,
    classify: C,
) -> ResponseFuture<S, Req, H, C> {
    let (future, slot, sensing) = send(inner, request, slot, provider);
    let call = Some(Call { sensing, slot });
    ResponseFuture { state: State::Calling { future, call }, hold, classify }
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
        Ok(admission) => State::Waiting {
            wait: Box::new(Waiting {
                provider: provider.clone(),
                admission,
                slot: None,
                service: inner.clone(),
                request: Some(request),
            }),
        },
    };
    ResponseFuture { state, hold, classify }
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
                StateProj::Calling { future, call } => {
                    let outcome = ready!(future.poll(cx)).map_err(Into::into);
                    let call = call.take().expect("polled after completion");
                    return Poll::Ready(settle(outcome, call, me.hold, me.classify));
                }
                StateProj::Waiting { wait } => {
                    if wait.slot.is_none() {
                        match ready!(wait.admission.poll(cx)) {
                            Ok(slot) => wait.slot = Some(slot),
                            Err(refusal) => return Poll::Ready(Err(refusal.into())),
                        }
                    }
                    if let Err(error) = ready!(wait.service.poll_ready(cx)) {
                        return Poll::Ready(Err(error.into()));
                    }
                    if wait.provider.paused_since(&wait.slot) {
                        // A pause began while the service got ready: back to the queue.
                        wait.slot = None;
                        continue;
                    }
                    let slot = wait.slot.take().expect("just granted");
                    let request = wait.request.take().expect("polled after completion");
                    let (future, slot, sensing) = send(&mut wait.service, request, slot, &wait.provider);
                    me.state.set(State::Calling { future, call: Some(Call { sensing, slot }) });
                }
                StateProj::Refused { error } => {
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            }
        }
    }
}

#[inline]
fn settle<Res, H: Hold<Res>, C: Classify<Res>>(
    mut outcome: Result<Res, BoxError>,
    call: Call,
    hold: &H,
    classify: &C,
) -> Result<H::Held, BoxError> {
    let Call { sensing, slot } = call;
    let seen = match &outcome {
        Ok(reply) => Ok(reply),
        Err(error) => Err(&**error as &(dyn Error + 'static)),
    };
    let kind = match sensing {
        None => classify.kind(seen),
        Some(mut sensing) => {
            let signal = classify.classify(seen);
            sensing.outcome(&signal);
            if !signal.kind.is_success()
                && let Ok(reply) = &mut outcome
            {
                // For a gate further out that cannot see that this one watches.
                classify.stamp(reply, signal.reported_by(sensing.number()));
            }
            signal.kind
        }
    };
    match outcome {
        // An error reply gives its slot back at its head: the retry layer may keep that reply while
        // it sleeps.
        Ok(reply) if !kind.is_success() => {
            slot.end();
            Ok(hold.hold(reply, HeldSlot(None)))
        }
        Ok(reply) => Ok(hold.hold(reply, HeldSlot(Some(Held(slot))))),
        Err(error) => {
            // A timeout may leave the call running there; other errors end it.
            if crate::classify::is_timeout(&*error) {
                drop(slot);
            } else {
                slot.end();
            }
            Err(error)
        }
    }
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
