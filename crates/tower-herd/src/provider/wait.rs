use super::{Core, Left, PauseReason, Provider, Slot, scope::Rest};
use crate::{
    Criticality, HasTask, Refusal, RefusalKind, Switch, Task, Time,
    gate::{Claimed, Class, Entry, Waiter},
    observe::Event,
    task::DEFAULT_DEADLINE,
};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};
use tokio::time::Sleep;

/// Why nobody calls whose breaker is open.
pub(crate) const BROKEN: &str = "its breaker is open";

/// Who waits, and how long at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitFor {
    pub(crate) agent: Option<u64>,
    pub(crate) class: Class,
    /// No wait goes beyond this.
    pub(crate) until: Time,
    /// The bound is the task's deadline, and not the patience of a layer.
    pub(crate) deadline: bool,
    /// The task's deadline.
    pub(crate) end: Time,
    /// When the call is cut: the deadline that the task names. [`Time::MAX`] if it names none.
    pub(crate) cut: Time,
    /// When it began to wait.
    pub(crate) since: Time,
}

impl WaitFor {
    /// The wait of a request's task: until its deadline (60 s from now if it names none), and no
    /// longer than `patience`.
    pub(crate) fn of<Req: HasTask>(
        request: &Req,
        patience: Option<Duration>,
        core: &Core,
        now: Time,
    ) -> Self {
        Self::of_task(request.task(), patience, core, now)
    }

    pub(crate) fn of_task(task: Option<&Task>, patience: Option<Duration>, core: &Core, now: Time) -> Self {
        let cut = task.and_then(Task::deadline_at).map_or(Time::MAX, |at| core.clock().time(at));
        let deadline = if cut == Time::MAX { now.saturating_add(DEFAULT_DEADLINE) } else { cut };
        let patient = patience.map_or(Time::MAX, |patience| now.saturating_add(patience));
        WaitFor {
            agent: task.and_then(Task::caller_key).map(crate::Key::get),
            class: match task.map_or(Criticality::default(), Task::criticality_class) {
                Criticality::Interactive => Class::Interactive,
                Criticality::Batch => Class::Batch,
            },
            until: deadline.min(patient),
            deadline: deadline <= patient,
            end: deadline,
            cut,
            since: now,
        }
    }

    /// The time that a call has which starts now.
    pub(crate) fn left(&self, now: Time) -> Left {
        Left { time: self.cut.saturating_since(now), waited: now.saturating_since(self.since) }
    }
}

/// A wait for a slot of one provider: first for the end of its scope's pause, then in the queue.
pub(crate) struct Admission {
    provider: Provider,
    wait: WaitFor,
    place: Option<Entry<Arc<Core>>>,
    rest: Option<Rest>,
    sleep: Pin<Box<Sleep>>,
}

impl Admission {
    /// Begins to wait; refused at once where the estimate does not fit, or the queue is full.
    pub(crate) fn begin(provider: &Provider, wait: WaitFor, now: Time) -> Result<Self, Refusal> {
        provider.fits(now, &wait)?;
        let sleep = Box::pin(tokio::time::sleep_until(provider.core.clock().instant(wait.until)));
        Ok(Admission { provider: provider.clone(), wait, place: None, rest: None, sleep })
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Slot, Refusal>> {
        let core = self.provider.core.clone();
        loop {
            let now = core.clock().now();
            // A long pause is probed by who waits for its end, too: there may be nobody else.
            if let Some(probe) = self.provider.try_long_probe(now, self.wait.left(now)) {
                (self.place, self.rest) = (None, None);
                return Poll::Ready(Ok(probe));
            }
            if self.provider.is_paused_beyond(self.wait.until, now) {
                return Poll::Ready(Err(self.provider.refusal(now, &self.wait)));
            }
            // A slot would be wasted on it.
            if !self.provider.has_time(self.wait.left(now).time) {
                return Poll::Ready(Err(self.provider.refusal(now, &self.wait)));
            }
            let again_at = match self.provider.rest(now, self.wait.until, &mut self.rest, cx.waker()) {
                Some(until) => {
                    self.place = None;
                    Some(until)
                }
                None => {
                    let place = match &mut self.place {
                        Some(place) => place,
                        none => match self.provider.join(&self.wait, now) {
                            Ok(place) => none.insert(place),
                            Err(refusal) => return Poll::Ready(Err(refusal)),
                        },
                    };
                    core.check_lease();
                    match place.poll_claim(now, cx) {
                        Claimed::Got((core, admitted)) => {
                            self.place = None;
                            return Poll::Ready(Ok(Slot::new(core, Some(admitted))));
                        }
                        Claimed::Wait { again_at } => again_at,
                    }
                }
            };
            if now >= self.wait.until {
                return Poll::Ready(Err(self.provider.refusal(now, &self.wait)));
            }
            // The timer is polled after each reset: one that is due already would not wake us.
            let instants = [again_at, self.provider.probe_at(now)];
            let at = instants.into_iter().flatten().fold(self.wait.until, Time::min);
            self.sleep.as_mut().reset(core.clock().instant(at));
            match self.sleep.as_mut().poll(cx) {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// For who has its slot, and waits for its service to get ready: not beyond the deadline.
    pub(crate) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Refusal> {
        self.sleep.as_mut().reset(self.provider.core.clock().instant(self.wait.end));
        ready!(self.sleep.as_mut().poll(cx));
        Poll::Ready(self.provider.not_ready())
    }
}

impl Provider {
    /// Until when who can wait until `end` has to wait for the scope of this handle, the whole provider
    /// aside: for the end of its pause, and its turn after it. The waker is kept in `rest`, to be woken
    /// if that pause ends before.
    pub(crate) fn rest(&self, now: Time, end: Time, rest: &mut Option<Rest>, waker: &Waker) -> Option<Time> {
        self.scope.as_ref().and_then(|scope| scope.rest(now, end, rest, waker))
    }

    /// Whether a call that has this time left will more likely than not have its reply by then, as far as one
    /// can tell.
    pub(crate) fn has_time(&self, left: Duration) -> bool {
        self.core.usually().is_none_or(|usually| usually <= left)
    }

    /// Whether who can wait until `end` waits in vain: it is paused for longer.
    pub(crate) fn is_paused_beyond(&self, end: Time, now: Time) -> bool {
        self.paused_at(now).is_some_and(|(until, _)| until > end)
    }

    /// Joins the queue of this provider.
    pub(crate) fn join(&self, wait: &WaitFor, now: Time) -> Result<Entry<Arc<Core>>, Refusal> {
        let waiter = Waiter { agent: wait.agent, class: wait.class, now };
        let joined = Entry::enqueue(self.core.clone(), waiter);
        self.core.demand();
        joined.map_err(|_full| {
            let at = now.saturating_add(self.estimate(now));
            self.refuse(RefusalKind::NoSlot, "its queue is full", Some(at))
        })
    }

    /// Refuses at entry what cannot fit, as far as one can tell.
    pub(crate) fn fits(&self, now: Time, wait: &WaitFor) -> Result<(), Refusal> {
        if now.saturating_add(self.least(now)) <= wait.until { Ok(()) } else { Err(self.refusal(now, wait)) }
    }

    /// The refusal of somebody who cannot wait any longer.
    #[cold]
    pub(crate) fn refusal(&self, now: Time, wait: &WaitFor) -> Refusal {
        match self.paused_at(now) {
            Some((until, reason)) => self.paused_refusal(until, reason),
            None => {
                let at = now.saturating_add(self.estimate(now));
                let why = match wait.deadline {
                    true => "no slot in time for the task's deadline",
                    false => "no slot within the patience of the layer",
                };
                self.refuse(RefusalKind::NoSlot, self.core.no_lease().unwrap_or(why), Some(at))
            }
        }
    }

    /// The refusal of somebody whose service did not get ready before the deadline.
    #[cold]
    pub(crate) fn not_ready(&self) -> Refusal {
        self.refuse(RefusalKind::Deadline, "its service did not get ready before the task's deadline", None)
    }

    #[cold]
    pub(crate) fn paused_refusal(&self, until: Time, reason: PauseReason) -> Refusal {
        let why = match reason {
            PauseReason::Hint => "it asked for a pause",
            PauseReason::Bare => "it said 429 and named no wait",
            PauseReason::Quota => "its quota is used up for now",
            PauseReason::Depleted => "its account has nothing left",
            PauseReason::Misconfigured => "it rejects our key or configuration",
            PauseReason::Operator => "an operator paused it",
            PauseReason::Broken => BROKEN,
        };
        let kind = match reason {
            PauseReason::Broken => RefusalKind::Open,
            _ => RefusalKind::Paused,
        };
        self.refuse(kind, why, Some(until))
    }

    /// A layer that only observes would have refused this call, or held it back.
    #[cold]
    pub(crate) fn would_refuse(&self, switch: &Switch, kind: RefusalKind) {
        switch.count();
        self.observe(|| Event::WouldRefuse {
            provider: self.name(),
            scope: self.scope_name().map(|name| &**name),
            kind,
        });
    }

    /// A refusal about this provider, told to the observer.
    #[cold]
    pub(crate) fn refuse(&self, kind: RefusalKind, why: &'static str, at: Option<Time>) -> Refusal {
        self.observe(|| Event::Refused {
            provider: self.name(),
            scope: self.scope_name().map(|name| &**name),
            kind,
        });
        let at = at.map(|at| self.core.clock().instant(at));
        Refusal::new(kind, why, self.name().clone(), at).with_scope(self.scope_name().cloned())
    }
}
