use super::{service::Ladder, wait::Waiting};
use crate::{
    BoxError, Classify, Executed, Exhausted, HasTask, Kind, Mode, Refusal, RefusalKind, Safety, Signal, Task,
    observe::Event,
    provider::{Slot, WaitFor, handover},
    retry::Resend,
};
use pin_project_lite::pin_project;
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::time::{Instant, Sleep, sleep_until};
use tower_service::Service;

pin_project! {
    /// The future of [`HashedFailover`](super::HashedFailover): one walk down the ladder.
    pub struct ResponseFuture<S: Service<Req>, Req, R: Resend<Req>, C> {
        #[pin]
        state: State<S, Req>,
        walk: Walk<S, Req, R, C>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S: Service<Req>, Req> {
        /// The rung's service gets ready; the slot is its.
        Readying { service: Option<S>, request: Option<Req>, slot: Option<Slot>, end: Option<Pin<Box<Sleep>>> },
        Calling { #[pin] future: S::Future },
        // Boxed: only who waits pays for it.
        Waiting { wait: Option<Box<Waiting>>, request: Option<Req> },
        Refused { error: Option<BoxError> },
        Done,
    }
}

struct Walk<S: Service<Req>, Req, R: Resend<Req>, C> {
    ladder: Arc<Ladder<S, Req>>,
    resend: R,
    classify: C,
    mode: Mode,
    kept: Option<R::Kept>,
    task: Option<Task>,
    safety: Safety,
    key: crate::Key,
    wait: Option<WaitFor>,
    /// The rung that is being called.
    at: usize,
    /// That call paid into the rung's retry budget.
    deposited: bool,
    /// Rungs that were called in this walk, one bit each.
    tried: u64,
    /// The queues of this walk, kept while a rung of them is called that may refuse.
    waiting: Option<Box<Waiting>>,
    /// The last real reply of a rung, while the walk goes on.
    held: Option<Box<Held<S::Response>>>,
    /// The last refusal of a rung, likewise.
    refused: Option<Box<Result<S::Response, BoxError>>>,
}

struct Held<Res> {
    outcome: Result<Res, BoxError>,
    kind: Kind,
    /// Calls of this walk, up to this reply.
    calls: u32,
}

/// What follows from the outcome of a call.
enum Next<Res> {
    Return(Result<Res, BoxError>),
    /// Go on with this request; wait for a slot if none is free.
    Queue,
    Call(usize, Slot),
}

/// When its task ends.
fn deadline_of(task: Option<&Task>) -> Option<Instant> {
    task.and_then(Task::deadline_at)
}

pub(super) fn walk<S, Req, R, C>(
    ladder: &Arc<Ladder<S, Req>>,
    mut request: Req,
    resend: R,
    classify: C,
    mode: Mode,
) -> ResponseFuture<S, Req, R, C>
where
    S: Service<Req> + Clone,
    Req: HasTask,
    R: Resend<Req>,
{
    let safety = request.safety();
    let task = request.task().cloned();
    let key = ladder.key(task.as_ref());
    // A keyed write that may have been executed at one provider is repeated nowhere else.
    let keyed = safety == Safety::Keyed;
    let resent = request.resent().filter(|resent| keyed && resent.executed() != Executed::No);
    let home = match (resent.and_then(|resent| resent.provider()), &task) {
        (Some(provider), _) => Some(provider.clone()),
        (None, Some(task)) if keyed => task.home(),
        _ => None,
    };
    // Executed perhaps, and nobody can tell where: an error of a request that belongs to no task.
    let lost = resent.is_some() && home.is_none() && ladder.is_of_several();
    let barred = home.map_or(0, |home| ladder.all_but(&home));
    let lost = lost.then(|| ladder.lost());
    let walks = mode == Mode::Enforce;
    let found = match &lost {
        Some(_) => Err(0),
        None if walks => ladder.try_tier(key, barred, deadline_of(task.as_ref())),
        None => Err(0),
    };
    // Only now, so that the wait counts from the entry, and only if there is one.
    let wait = (walks && found.is_err()).then(|| {
        let provider = &ladder.rungs[0].provider;
        WaitFor::of(&request, None, provider.core(), provider.clock().now())
    });
    let keeps = mode != Mode::Off && ladder.rungs.len() > 1;
    let kept = if keeps { resend.keep(&mut request) } else { None };
    let mut walk = Walk {
        ladder: ladder.clone(),
        resend,
        classify,
        mode,
        kept,
        task,
        safety,
        key,
        wait,
        at: 0,
        deposited: false,
        tried: barred,
        waiting: None,
        held: None,
        refused: None,
    };
    let state = match (found, lost) {
        (_, Some(refusal)) => State::Refused { error: Some(refusal.into()) },
        (Ok((rung, slot)), None) => walk.ready(rung, Some(slot), request),
        (Err(_), None) if walks => walk.queue(request),
        (Err(_), None) => walk.stay(request),
    };
    ResponseFuture { state, walk }
}

impl<S, Req, R, C> Walk<S, Req, R, C>
where
    S: Service<Req> + Clone,
    R: Resend<Req>,
{
    fn ready(&mut self, rung: usize, slot: Option<Slot>, request: Req) -> State<S, Req> {
        self.at = rung;
        let service = Some(self.ladder.service(rung));
        State::Readying { service, request: Some(request), slot, end: None }
    }

    /// To the first rung of its order, room or not: there it meets what it would meet without a ladder.
    #[cold]
    fn stay(&mut self, request: Req) -> State<S, Req> {
        let rung = self.ladder.next(self.key, self.tried).expect("not all rungs are barred");
        let mut slot = None;
        if self.mode == Mode::Observe {
            slot = self.ladder.rungs[rung].provider.try_slot(|| deadline_of(self.task.as_ref())).ok();
            if slot.is_none() {
                self.would_leave(rung);
            }
        }
        self.ready(rung, slot, request)
    }

    /// Counts a call that would not have stayed at its first rung: once.
    fn would_leave(&mut self, rung: usize) {
        // What is counted is not looked at again.
        self.kept = None;
        self.ladder.rungs[rung].provider.would_refuse(&self.ladder.switch, RefusalKind::NoRung);
    }

    fn queue(&mut self, request: Req) -> State<S, Req> {
        let wait = self.waiting.take().unwrap_or_else(|| {
            let wait = self.wait_for();
            Box::new(Waiting::begin(&self.ladder, self.key, self.tried, wait))
        });
        State::Waiting { wait: Some(wait), request: Some(request) }
    }

    /// The request once more; none if it cannot be repeated.
    fn again(&mut self) -> Option<Req> {
        self.kept.as_mut().and_then(|kept| self.resend.again(kept))
    }

    /// What the caller gets when the walk cannot go on.
    fn give_up(&mut self) -> Result<S::Response, BoxError> {
        match self.held.take() {
            Some(held) => held.outcome,
            None => *self.refused.take().expect("the walk went on from an outcome"),
        }
    }

    /// The rung's service did not get ready before the deadline.
    fn not_ready(&mut self) -> Result<S::Response, BoxError> {
        match self.held.take() {
            Some(held) => held.outcome,
            None => Err(self.ladder.rungs[self.at].provider.not_ready().into()),
        }
    }

    /// The task's deadline.
    fn end(&mut self) -> Instant {
        let end = self.wait_for().end;
        self.ladder.rungs[0].provider.clock().instant(end)
    }

    fn wait_for(&mut self) -> WaitFor {
        let provider = &self.ladder.rungs[0].provider;
        *self.wait.get_or_insert_with(|| {
            WaitFor::of_task(self.task.as_ref(), None, provider.core(), provider.clock().now())
        })
    }
}

impl<S, Req, R, C> Walk<S, Req, R, C>
where
    S: Service<Req> + Clone,
    R: Resend<Req>,
    C: Classify<S::Response>,
{
    fn judge(&mut self, mut outcome: Result<S::Response, BoxError>) -> Next<S::Response> {
        let signal = self.classify.classify(match &outcome {
            Ok(reply) => Ok(reply),
            Err(error) => Err(&**error as &(dyn Error + 'static)),
        });
        match signal.kind {
            Kind::Success => {
                self.ladder.rungs[self.at].succeeded();
                if let Some(task) = &self.task {
                    task.note_success();
                }
                Next::Return(outcome)
            }
            _ if self.mode != Mode::Enforce => self.stayed(outcome, &signal),
            Kind::Refused => self.refused(outcome),
            _ => {
                self.note(&mut outcome, &signal);
                self.replied(outcome, &signal)
            }
        }
    }

    /// The reply of the one rung that is called where nobody walks.
    #[cold]
    fn stayed(&mut self, mut outcome: Result<S::Response, BoxError>, signal: &Signal) -> Next<S::Response> {
        let goes_on = if signal.kind == Kind::Refused {
            let refusal = outcome.as_ref().err().and_then(|error| Refusal::find(&**error));
            refusal.is_some_and(|refusal| !refusal.kind.is_terminal())
        } else {
            // The layers further out, and a later walk of this task, rely on it.
            self.note(&mut outcome, signal);
            self.allows(signal, self.safety.allows(signal, false))
        };
        self.tried |= 1 << self.at;
        if goes_on && self.kept.is_some() && self.ladder.next(self.key, self.tried).is_some() {
            self.would_leave(self.at);
        }
        Next::Return(outcome)
    }

    /// A layer of the rung said no: nothing was sent, and the rung may be asked again later.
    fn refused(&mut self, outcome: Result<S::Response, BoxError>) -> Next<S::Response> {
        // The ladder's, by which its waits are kept.
        let clock = self.ladder.rungs[0].provider.clock();
        let refusal = outcome.as_ref().err().and_then(|error| Refusal::find(&**error));
        let Some(refusal) = refusal else { return Next::Return(outcome) };
        let (kind, at) = (refusal.kind, refusal.retry_at);
        let here = &self.ladder.rungs[self.at].provider;
        // What is said of the whole provider is said of its scopes.
        let scope = refusal.scope.as_ref();
        let own = refusal.provider == *here.name() && (scope.is_none() || scope == here.scope_name());
        if kind.is_terminal() {
            return Next::Return(self.last().unwrap_or(outcome));
        }
        if self.kept.is_none() {
            return Next::Return(self.held.take().map_or(outcome, |held| held.outcome));
        }
        let wait = self.wait_for();
        let mut waiting = self
            .waiting
            .take()
            .unwrap_or_else(|| Box::new(Waiting::begin(&self.ladder, self.key, self.tried, wait)));
        match at {
            // A race for the slot, or a pause that began: its queue knows when.
            Some(_)
                if own && matches!(kind, RefusalKind::NoSlot | RefusalKind::Paused | RefusalKind::Open) =>
            {
                waiting.hold_off(self.at, None);
            }
            // A layer about something else: a scope that the ladder does not know, another provider.
            Some(at) => waiting.hold_off(self.at, Some(clock.time(at))),
            None => {
                self.tried |= 1 << self.at;
                waiting.exclude(self.at);
            }
        }
        let held_off = waiting.held_off();
        self.waiting = Some(waiting);
        self.refused = Some(Box::new(outcome));
        match self.ladder.try_all(self.key, self.tried | held_off, deadline_of(self.task.as_ref())) {
            Some((rung, slot)) => Next::Call(rung, slot),
            None => Next::Queue,
        }
    }

    /// The last real reply, when no other call can help the task any more: marked, so that it is not sent
    /// again further out either.
    fn last(&mut self) -> Option<Result<S::Response, BoxError>> {
        let Held { mut outcome, kind, calls } = *self.held.take()?;
        if !kind.is_success() {
            if let Ok(reply) = &mut outcome {
                self.classify.stamp_exhausted(reply, Exhausted::new(calls, None));
            }
            if let Some(task) = &self.task {
                task.give_up();
            }
        }
        Some(outcome)
    }

    fn hold(&mut self, outcome: Result<S::Response, BoxError>, kind: Kind) {
        let calls = self.held.take().map_or(0, |held| held.calls).saturating_add(1);
        self.held = Some(Box::new(Held { outcome, kind, calls }));
    }

    /// Tells the layers further out, and the task, where this came from.
    fn note(&self, outcome: &mut Result<S::Response, BoxError>, signal: &Signal) {
        let name = self.ladder.rungs[self.at].provider.name();
        if let Ok(reply) = outcome {
            self.classify.stamp_provider(reply, name);
        }
        if let Some(task) = &self.task {
            task.note_provider(name, signal.executed != Executed::No);
            if matches!(signal.kind, Kind::Failed | Kind::Overloaded) {
                task.note_failed(self.ladder.rungs[self.at].provider.number());
            }
        }
    }

    /// A real reply that is not a success.
    fn replied(&mut self, outcome: Result<S::Response, BoxError>, signal: &Signal) -> Next<S::Response> {
        self.tried |= 1 << self.at;
        if let Some(waiting) = &mut self.waiting {
            waiting.exclude(self.at);
        }
        let safe = self.may_move(signal);
        let here = &self.ladder.rungs[self.at];
        if let (true, Some(pot), Ok(reply)) = (self.deposited, &here.pot, &outcome)
            && self.classify.exhausted(reply)
        {
            pot.take_back();
        }
        let more = self.ladder.next(self.key, self.tried).is_some();
        if !more || !self.allows(signal, safe) || self.kept.is_none() {
            return Next::Return(outcome);
        }
        // An empty answer, and a rung that cannot work at all, are not sent again by anybody else:
        // these wait for the next rung. What the retry layer would send again goes on only into a
        // free slot.
        let waits = matches!(signal.kind, Kind::Empty | Kind::Depleted | Kind::Misconfigured);
        let held_off = self.waiting.as_ref().map_or(0, |waiting| waiting.held_off());
        match self.ladder.try_all(self.key, self.tried | held_off, deadline_of(self.task.as_ref())) {
            Some((rung, slot)) => {
                self.charge(signal.kind);
                self.overflow(rung, signal.kind);
                self.hold(outcome, signal.kind);
                Next::Call(rung, slot)
            }
            None if waits => {
                self.charge(signal.kind);
                self.hold(outcome, signal.kind);
                Next::Queue
            }
            None => Next::Return(outcome),
        }
    }

    /// Whether the next rung may be asked after this reply; `safe`: the request may suffer it.
    fn allows(&self, signal: &Signal, safe: bool) -> bool {
        let here = &self.ladder.rungs[self.at];
        match signal.kind {
            Kind::Rejected => false,
            Kind::Empty => !here.paid,
            Kind::Throttled => {
                let clock = here.provider.clock();
                let paused = here.provider.paused().map(|(until, _)| until.saturating_since(clock.now()));
                let wait = paused.max(signal.pushback.wait()).unwrap_or_default();
                wait > self.ladder.patience.hint && safe
            }
            _ => safe && self.affords(),
        }
    }

    /// Whether the request may be sent to another rung after this reply. A keyed write that may have taken
    /// effect goes on inside its idempotency domain only, from here on.
    fn may_move(&mut self, signal: &Signal) -> bool {
        if self.safety.allows(signal, false) {
            return true;
        }
        // Only a task remembers, for the layers further out, that an earlier rung may have executed it.
        if self.task.is_none() || !self.safety.allows(signal, true) {
            return false;
        }
        let barred = self.ladder.outside(self.at);
        self.tried |= barred;
        if let Some(waiting) = &mut self.waiting {
            waiting.bar(barred);
        }
        true
    }

    /// Whether the task may make another call after the failed one.
    fn affords(&self) -> bool {
        self.task.as_ref().is_none_or(|task| task.spent() + 1 < task.allowance_total())
    }

    /// Charges the failed call to the task: only where the walk goes on. What it returns is charged by
    /// the retry layer.
    fn charge(&self, kind: Kind) {
        if matches!(kind, Kind::Failed | Kind::Overloaded) {
            self.ladder.rungs[self.at].failed();
        }
        if let Some(task) = self.task.as_ref().filter(|_| !matches!(kind, Kind::Empty | Kind::Throttled)) {
            task.charge();
        }
    }

    fn overflow(&self, to: usize, kind: Kind) {
        let from = &self.ladder.rungs[self.at].provider;
        let to = &self.ladder.rungs[to].provider;
        from.observe(|| Event::Overflow { from: from.name(), to: to.name(), kind });
    }
}

impl<S, Req, R, C> Future for ResponseFuture<S, Req, R, C>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    R: Resend<Req>,
    C: Classify<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            let next = match me.state.as_mut().project() {
                StateProj::Readying { service: ready, request, slot, end } => {
                    match ready.as_mut().expect("taken when it is called").poll_ready(cx) {
                        Poll::Pending if me.walk.mode != Mode::Enforce => return Poll::Pending,
                        Poll::Pending => {
                            let end = end.get_or_insert_with(|| Box::pin(sleep_until(me.walk.end())));
                            ready!(end.as_mut().poll(cx));
                            *slot = None;
                            Next::Return(me.walk.not_ready())
                        }
                        // It goes with its state: what failed to get ready is not called again.
                        Poll::Ready(Err(error)) => {
                            *slot = None;
                            me.walk.judge(Err(error.into()))
                        }
                        Poll::Ready(Ok(())) => {
                            let rung = &me.walk.ladder.rungs[me.walk.at];
                            let request = request.take().expect("polled after completion");
                            if me.walk.mode == Mode::Enforce && rung.provider.paused_since(slot) {
                                *slot = None;
                                let state = me.walk.queue(request);
                                me.state.set(state);
                                continue;
                            }
                            let request = match &rung.map {
                                Some(map) => map(request),
                                None => request,
                            };
                            me.walk.deposited = rung.sends(me.walk.task.as_ref(), &request);
                            let mut service = ready.take().expect("just polled");
                            let future = handover::impatient(|| match slot.take() {
                                Some(slot) => handover::offering(slot, || service.call(request)),
                                None => service.call(request),
                            });
                            me.walk.ladder.keep(me.walk.at, service);
                            me.state.set(State::Calling { future });
                            continue;
                        }
                    }
                }
                StateProj::Calling { future } => {
                    let outcome = ready!(future.poll(cx)).map_err(Into::into);
                    me.walk.judge(outcome)
                }
                StateProj::Waiting { wait, request } => {
                    match ready!(wait.as_mut().expect("polled after completion").poll(&me.walk.ladder, cx)) {
                        Ok((rung, slot)) => {
                            let request = request.take().expect("polled after completion");
                            me.walk.waiting = wait.take();
                            let state = me.walk.ready(rung, Some(slot), request);
                            me.state.set(state);
                            continue;
                        }
                        Err(refusal) => Next::Return(match me.walk.held.take() {
                            Some(held) => held.outcome,
                            None => Err(refusal.into()),
                        }),
                    }
                }
                StateProj::Refused { error } => {
                    Next::Return(Err(error.take().expect("polled after completion")))
                }
                StateProj::Done => panic!("polled after completion"),
            };
            let state = match next {
                Next::Return(outcome) => {
                    me.state.set(State::Done);
                    return Poll::Ready(outcome);
                }
                Next::Call(rung, slot) => match me.walk.again() {
                    Some(request) => me.walk.ready(rung, Some(slot), request),
                    None => {
                        me.state.set(State::Done);
                        return Poll::Ready(me.walk.give_up());
                    }
                },
                Next::Queue => match me.walk.again() {
                    Some(request) => me.walk.queue(request),
                    None => {
                        me.state.set(State::Done);
                        return Poll::Ready(me.walk.give_up());
                    }
                },
            };
            me.state.set(state);
        }
    }
}

impl<S: Service<Req>, Req, R: Resend<Req>, C> fmt::Debug for ResponseFuture<S, Req, R, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Readying { .. } => "readying",
            State::Calling { .. } => "calling",
            State::Waiting { .. } => "waiting",
            State::Refused { .. } => "refused",
            State::Done => "done",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &state)
            .field("rung", &self.walk.at)
            .finish_non_exhaustive()
    }
}
