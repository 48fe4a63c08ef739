//! Tokens a minute of one provider: the state that all its token limits share.

mod flow;

use super::{Core, Provider, ProviderSettings, WaitFor, handover, lock};
use crate::{BoxError, Refusal, RefusalKind, Time, gate::Class};
use flow::{Bucket, Claim, Flow, Ticket};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};
use tokio::time::Sleep;
use tower_service::Service;

/// The tokens of a provider.
pub(super) struct Tokens {
    /// There is a limit; else calls pass with this one look.
    limited: AtomicBool,
    flow: Mutex<Flow>,
}

impl Tokens {
    /// `shared`: what there is comes from the fleet's store.
    pub(super) fn new(settings: &ProviderSettings, shared: bool) -> Self {
        let (rate, burst) = limits(settings);
        let bucket = if shared { Bucket::shared(rate, burst) } else { Bucket::new(rate, burst) };
        let flow = Flow::new(bucket, settings.queue, settings.batch_age);
        Tokens { limited: settings.tokens_per_minute.is_some().into(), flow: Mutex::new(flow) }
    }

    pub(super) fn configure(&self, settings: &ProviderSettings) {
        let (rate, burst) = limits(settings);
        let wakers = {
            let mut flow = lock(&self.flow);
            flow.configure(rate, burst, settings.queue, settings.batch_age);
            flow.wakers()
        };
        self.limited.store(settings.tokens_per_minute.is_some(), Ordering::Relaxed);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Changes the flow, serves whom that makes room for, and wakes them after the lock.
    pub(super) fn change<R>(&self, now: Time, change: impl FnOnce(&mut Flow) -> R) -> R {
        let (result, wakers) = {
            let mut flow = lock(&self.flow);
            let result = change(&mut flow);
            let wakers = if flow.waiting() == 0 { Vec::new() } else { flow.serve(now, true) };
            (result, wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
        result
    }
}

fn limits(settings: &ProviderSettings) -> (u64, u64) {
    let rate = settings.tokens_per_minute.unwrap_or(1);
    (rate.into(), settings.token_burst.unwrap_or(rate).into())
}

/// Tokens that were taken for one call. Dropped before the call was sent they are given back; after, they
/// stay taken: nobody can tell what the call has used.
#[must_use = "dropped, they are given back or stay taken"]
pub(crate) struct Booked {
    core: Arc<Core>,
    cost: u64,
    pub(crate) sent: bool,
}

impl Booked {
    fn new(core: &Arc<Core>, cost: u64) -> Self {
        Booked { core: core.clone(), cost, sent: false }
    }

    /// After the call was made, or polled while it waited further in.
    #[inline]
    pub(crate) fn called(&mut self) {
        self.sent = !handover::is_queued(handover::address(&self.core));
    }

    /// Before it is polled while it waits further in.
    #[inline]
    pub(crate) fn polling(&self) {
        handover::mark_queued(handover::address(&self.core));
    }

    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// The call has used so many.
    pub(crate) fn settle(mut self, used: u64) {
        self.sent = true;
        if used != self.cost {
            self.correct(used);
        }
    }

    fn correct(&self, used: u64) {
        let now = self.core.clock().now();
        self.core.tokens.change(now, |flow| flow.settle(now, self.cost, used));
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        if !self.sent {
            self.correct(0);
        }
    }
}

/// Why there are no tokens for a call at once.
pub(crate) enum Unbooked {
    /// It alone costs more than there ever are at once.
    TooLarge,
    /// There will be so many only later, or others wait.
    NotYet,
}

impl Provider {
    /// Whether its tokens are limited.
    #[inline]
    pub(crate) fn limits_tokens(&self) -> bool {
        self.core.tokens.limited.load(Ordering::Relaxed)
    }

    /// Takes so many tokens, if they are there and nobody waits for them. A guess is never more than the
    /// most there are at once.
    pub(crate) fn try_book(&self, cost: &mut u64, is_guess: bool) -> Result<Booked, Unbooked> {
        let now = self.core.clock().now();
        let mut flow = lock(&self.core.tokens.flow);
        let burst = flow.bucket.burst();
        if *cost > burst {
            if !is_guess {
                return Err(Unbooked::TooLarge);
            }
            *cost = burst;
        }
        if flow.try_take(now, *cost) { Ok(Booked::new(&self.core, *cost)) } else { Err(Unbooked::NotYet) }
    }

    /// What becomes of a call that would have to wait: whether its wait fits, or how it is refused. The
    /// second instant is the one to be told.
    fn token_outlook(&self, now: Time, cost: u64, class: Class) -> (Time, Time) {
        lock(&self.core.tokens.flow).outlook(now, class, cost)
    }

    /// For a layer that only observes: takes the tokens of a call that would have waited; none if it would
    /// have been refused.
    #[cold]
    pub(crate) fn book_anyway(&self, cost: u64, wait: &WaitFor, now: Time) -> Option<Booked> {
        let (least, _) = self.token_outlook(now, cost, wait.class);
        if least > wait.until {
            return None;
        }
        lock(&self.core.tokens.flow).take(now, cost);
        Some(Booked::new(&self.core, cost))
    }

    /// The refusal of a call for which there are no tokens in time.
    #[cold]
    pub(crate) fn no_tokens(&self, now: Time, cost: u64, wait: &WaitFor) -> Refusal {
        let (_, at) = self.token_outlook(now, cost, wait.class);
        let why = match wait.deadline {
            true => "no tokens in time for the task's deadline",
            false => "no tokens within the patience of the layer",
        };
        self.refuse(RefusalKind::Tokens, why, Some(at))
    }

    /// The refusal of a call that costs more than there ever are at once.
    #[cold]
    pub(crate) fn too_large(&self) -> Refusal {
        self.refuse(RefusalKind::TooLarge, "it costs more tokens than may be used at once", None)
    }

    /// Calls that wait for tokens.
    #[must_use]
    pub fn waiting_for_tokens(&self) -> usize {
        lock(&self.core.tokens.flow).waiting()
    }
}

/// A place in the line; left when dropped.
struct Place {
    core: Arc<Core>,
    ticket: Ticket,
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = self.core.clock().now();
        let waker = self.core.tokens.change(now, |flow| flow.leave(now, self.ticket));
        // After the lock: what a waker runs when dropped is not ours.
        drop(waker);
    }
}

/// A call that waits for its tokens, and then for a clone of the service to get ready.
pub(crate) struct TokenWait<S, Req> {
    pub(crate) service: S,
    provider: Provider,
    wait: WaitFor,
    cost: u64,
    /// None: it was served.
    place: Option<Place>,
    booked: Option<Booked>,
    request: Option<Req>,
    sleep: Pin<Box<Sleep>>,
}

impl<S: Clone, Req> TokenWait<S, Req> {
    /// Joins the line; refused at once where its turn cannot come in time. Boxed: only who waits pays for it.
    pub(crate) fn begin(
        provider: &Provider,
        wait: WaitFor,
        now: Time,
        cost: u64,
        service: &S,
        request: Req,
    ) -> Result<Box<Self>, Refusal> {
        let core = &provider.core;
        let ticket = {
            let mut flow = lock(&core.tokens.flow);
            let (least, _) = flow.outlook(now, wait.class, cost);
            if least <= wait.until { flow.join(now, wait.class, cost) } else { None }
        };
        // Full, or in vain.
        core.demand();
        let ticket = ticket.ok_or_else(|| provider.no_tokens(now, cost, &wait))?;
        handover::mark_queued(handover::address(core));
        Ok(Box::new(TokenWait {
            service: service.clone(),
            provider: provider.clone(),
            wait,
            cost,
            place: Some(Place { core: core.clone(), ticket }),
            booked: None,
            request: Some(request),
            sleep: Box::pin(tokio::time::sleep_until(core.clock().instant(wait.until))),
        }))
    }
}

impl<S, Req> TokenWait<S, Req>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
{
    /// The request, to be called on `service` now, and the tokens that it goes out on.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(Req, Booked), BoxError>> {
        if self.booked.is_none() {
            self.booked = Some(ready!(self.poll_tokens(cx))?);
        }
        match self.service.poll_ready(cx) {
            Poll::Ready(Ok(())) => {
                let booked = self.booked.take().expect("just taken");
                let request = self.request.take().expect("polled after completion");
                Poll::Ready(Ok((request, booked)))
            }
            Poll::Ready(Err(error)) => {
                self.booked = None;
                Poll::Ready(Err(error.into()))
            }
            Poll::Pending => {
                self.sleep.as_mut().reset(self.provider.core.clock().instant(self.wait.end));
                ready!(self.sleep.as_mut().poll(cx));
                self.booked = None;
                Poll::Ready(Err(self.provider.not_ready().into()))
            }
        }
    }

    fn poll_tokens(&mut self, cx: &mut Context<'_>) -> Poll<Result<Booked, Refusal>> {
        let core = self.provider.core.clone();
        loop {
            let now = core.clock().now();
            let ticket = self.place.as_ref().expect("polled after completion").ticket;
            let (claim, wakers) = lock(&core.tokens.flow).ask(ticket, now, cx.waker());
            wakers.into_iter().for_each(Waker::wake);
            let (again_at, at_least) = match claim {
                Claim::Got => {
                    // Its ticket is void: to leave is nothing.
                    self.place = None;
                    return Poll::Ready(Ok(Booked::new(&core, self.cost)));
                }
                Claim::Wait { again_at, at_least } => (again_at, at_least),
            };
            if now >= self.wait.until || at_least > self.wait.until {
                // Its own place is not in its way.
                self.place = None;
                return Poll::Ready(Err(self.provider.no_tokens(now, self.cost, &self.wait)));
            }
            // The timer is polled after each reset: one that is due already would not wake us.
            self.sleep.as_mut().reset(core.clock().instant(again_at.min(self.wait.until)));
            ready!(self.sleep.as_mut().poll(cx));
        }
    }
}
