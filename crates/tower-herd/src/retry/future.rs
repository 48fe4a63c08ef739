//! The future of [`JitteredRetry`](super::JitteredRetry).

use super::{
    charge::{Resent, Withdrawal},
    layer::{Bed, Core, Shared},
    resend::{CloneRequest, Resend},
    state::{Cost, Decision, Reply, Session, Standing, Why, takes_token},
};
use crate::{
    BoxError, Classify, Executed, Exhausted, HasTask, Kind, Refusal, Safety, Signal, Task,
    classify::DefaultClassify, observe::Event, random::Random,
};
use pin_project_lite::pin_project;
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use tower_service::Service;

pin_project! {
    /// A request and its repetitions. See the [module](crate::retry) for what a drop does.
    pub struct ResponseFuture<S, Req, C = DefaultClassify, R = CloneRequest>
    where
        S: Service<Req>,
        R: Resend<Req>,
    {
        #[pin]
        state: State<S::Future>,
        kept: Option<R::Kept>,
        shared: Arc<Shared<S, C, R>>,
        // Paid into the budget for it.
        deposited: bool,
        // Noted when the first attempt is first pending: a call that is ready at once reads no clock.
        deadline: Option<Instant>,
        // What would be sent again is counted, and returned.
        observes: bool,
        slow: Option<Box<Slow<S, S::Response>>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F },
        // Nothing is sent again, whatever comes of it.
        Passing { #[pin] future: F },
        Sleeping,
        Readying,
    }
}

/// What only a request needs whose first attempt was no success.
struct Slow<S, Res> {
    session: Session,
    random: Random,
    deadline: Instant,
    sleep: Pin<Box<Sleep>>,
    /// Sleeps, while it is there.
    bed: Option<Bed>,
    /// Readying, while it is there.
    service: Option<S>,
    /// Whether `sleep` stands at the deadline by now.
    until_deadline: bool,
    held: Option<Held<Res>>,
    /// The last refusal, which the caller gets if there never was a reply.
    refusal: Option<BoxError>,
    withdrawal: Option<Withdrawal>,
    /// The evidence of all calls so far.
    executed: Executed,
}

/// The last outcome that was none of our own refusals.
struct Held<Res> {
    outcome: Result<Res, BoxError>,
    kind: Kind,
    provider: Option<Arc<str>>,
}

impl<S, Req, C, R> ResponseFuture<S, Req, C, R>
where
    S: Service<Req>,
    R: Resend<Req>,
{
    // The inner future is made where it will stay, in the result: it may be large, and to move it costs.
    #[inline]
    pub(super) fn call(
        service: &mut S,
        mut request: Req,
        shared: Arc<Shared<S, C, R>>,
        deposited: bool,
        observes: bool,
    ) -> Self {
        ResponseFuture {
            deposited,
            kept: shared.resend.keep(&mut request),
            state: State::Calling { future: service.call(request) },
            shared,
            deadline: None,
            observes,
            slow: None,
        }
    }

    /// Goes on from a first attempt that is under way already.
    #[cfg(feature = "herd")]
    pub(crate) fn resume(
        future: S::Future,
        kept: Option<R::Kept>,
        shared: Arc<Shared<S, C, R>>,
        deadline: Option<Instant>,
        deposited: bool,
    ) -> Self {
        ResponseFuture {
            state: State::Calling { future },
            kept,
            shared,
            deadline,
            slow: None,
            deposited,
            observes: false,
        }
    }

    /// Calls `service` as if this layer were not there.
    #[inline]
    pub(super) fn pass(service: &mut S, request: Req, shared: Arc<Shared<S, C, R>>) -> Self {
        let state = State::Passing { future: service.call(request) };
        ResponseFuture {
            kept: None,
            state,
            shared,
            deadline: None,
            deposited: false,
            observes: false,
            slow: None,
        }
    }
}

impl<S, Req, C, R> Future for ResponseFuture<S, Req, C, R>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    C: Classify<S::Response>,
    R: Resend<Req>,
{
    type Output = Result<S::Response, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut me = self.project();
        loop {
            match me.state.as_mut().project() {
                StateProj::Calling { future } => {
                    let outcome = match future.poll(cx) {
                        Poll::Ready(Ok(reply)) if me.shared.classify.kind(Ok(&reply)).is_success() => {
                            if *me.deposited && me.shared.listens() {
                                let provider = me.shared.classify.provider(Ok(&reply));
                                me.shared.core.part(provider.as_deref()).succeeded();
                            }
                            return Poll::Ready(Ok(reply));
                        }
                        Poll::Ready(outcome) => outcome,
                        Poll::Pending => {
                            if me.deadline.is_none() {
                                *me.deadline = Some(deadline(&me.shared.core, me.kept.as_ref()));
                            }
                            return Poll::Pending;
                        }
                    };
                    // The attempt goes before anything is waited for, and with it what it holds.
                    me.state.set(State::Sleeping);
                    let outcome = outcome.map_err(Into::into);
                    let kept = me.kept.as_ref();
                    let again = kept.is_some_and(|kept| me.shared.resend.resendable(kept));
                    if *me.observes {
                        observe(me.shared, kept, *me.deadline, again, &outcome);
                        return Poll::Ready(outcome);
                    }
                    let noted = (&mut *me.deposited, &mut *me.deadline);
                    if let Some(last) = settle(me.shared, kept, noted, me.slow, again, outcome) {
                        return Poll::Ready(last);
                    }
                }
                StateProj::Passing { future } => return future.poll(cx).map_err(Into::into),
                StateProj::Sleeping => {
                    let slow = me.slow.as_mut().expect("polled after completion");
                    ready!(slow.sleep.as_mut().poll(cx));
                    slow.bed = None;
                    let again = &me.shared.again;
                    slow.service = Some(again.lock().unwrap_or_else(PoisonError::into_inner).clone());
                    slow.until_deadline = false;
                    me.state.set(State::Readying);
                }
                StateProj::Readying => {
                    let slow = me.slow.as_mut().expect("polled after completion");
                    let service = slow.service.as_mut().expect("taken when the sleep ended");
                    match service.poll_ready(cx) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(error)) => {
                            // An attempt that failed before it was made: some clients connect here.
                            slow.service = None;
                            let error = Err(error.into());
                            let kept = me.kept.as_ref();
                            let noted = (&mut *me.deposited, &mut *me.deadline);
                            match settle(me.shared, kept, noted, me.slow, true, error) {
                                Some(last) => return Poll::Ready(last),
                                None => me.state.set(State::Sleeping),
                            }
                            continue;
                        }
                        Poll::Pending => {
                            if !slow.until_deadline {
                                slow.until_deadline = true;
                                slow.sleep.as_mut().reset(slow.deadline);
                            }
                            ready!(slow.sleep.as_mut().poll(cx));
                            let last = give_up(me.shared, me.kept.as_ref(), me.slow, Why::Deadline);
                            return Poll::Ready(last);
                        }
                    }
                    if Instant::now() >= slow.deadline {
                        return Poll::Ready(give_up(me.shared, me.kept.as_ref(), me.slow, Why::Deadline));
                    }
                    let copy = me.kept.as_mut().and_then(|kept| me.shared.resend.again(kept));
                    let Some(mut request) = copy else {
                        return Poll::Ready(give_up(me.shared, me.kept.as_ref(), me.slow, Why::Body));
                    };
                    let mut service = slow.service.take().expect("it is ready");
                    request.set_resent(slow.resent());
                    if let Some(withdrawal) = &mut slow.withdrawal {
                        withdrawal.sent = true;
                    }
                    let future = service.call(request);
                    me.state.set(State::Calling { future });
                }
            }
        }
    }
}

impl<S, Res> Slow<S, Res> {
    fn resent(&self) -> Resent {
        let provider = self.held.as_ref().and_then(|held| held.provider.clone());
        let attempt = self.session.calls().saturating_add(1);
        Resent::new(attempt, self.executed, provider, self.withdrawal.as_ref())
    }
}

fn deadline<K: HasTask>(core: &Core, kept: Option<&K>) -> Instant {
    let own = kept.and_then(HasTask::task).and_then(Task::deadline_at);
    own.unwrap_or_else(|| crate::task::far(core.config().deadline))
}

/// Takes note of an outcome that is no plain success. Gives what the caller gets, or none: then a wait
/// has been scheduled. `again`: there is a copy to send.
#[cold]
#[inline(never)]
fn settle<S, K, Res, C, R>(
    shared: &Shared<S, C, R>,
    kept: Option<&K>,
    (deposited, noted): (&mut bool, &mut Option<Instant>),
    slow: &mut Option<Box<Slow<S, Res>>>,
    again: bool,
    outcome: Result<Res, BoxError>,
) -> Option<Result<Res, BoxError>>
where
    K: HasTask,
    C: Classify<Res>,
{
    let core = &shared.core;
    let now = Instant::now();
    let mut reply = read(&shared.classify, &outcome, now);
    let deadline = *noted.get_or_insert_with(|| deadline(core, kept));
    let slow = slow.get_or_insert_with(|| {
        Box::new(Slow {
            session: Session::default(),
            random: core.seeds.session(),
            deadline,
            sleep: Box::pin(tokio::time::sleep_until(now)),
            bed: None,
            service: None,
            until_deadline: false,
            held: None,
            refusal: None,
            withdrawal: None,
            executed: Executed::No,
        })
    });
    let kind = reply.signal.kind;
    let provider = if kind == Kind::Refused {
        // Nothing was sent: what was taken out for it still stands, until it is sent or given up.
        if let Some(withdrawal) = &mut slow.withdrawal {
            withdrawal.sent = false;
        }
        None
    } else {
        slow.withdrawal = None;
        if reply.signal.executed != Executed::No {
            slow.executed = reply.signal.executed;
        }
        // An error in place of a reply bears no mark, but its task knows.
        let marked = shared.classify.provider(as_dyn(&outcome));
        marked.or_else(|| kept.and_then(HasTask::task).and_then(Task::last_provider))
    };
    let task = kept.and_then(HasTask::task);
    // A retry layer further in has had its last word on it.
    let counted = kind != Kind::Refused && task.is_some_and(Task::take_given_up);
    reply.exhausted |= counted;
    let bed = core.bed();
    // Law 3: what was given up further in pays for no repetition here.
    if reply.exhausted && std::mem::take(deposited) {
        core.budget.take_back();
    }
    let left = deadline.saturating_duration_since(now);
    let standing = standing(kept, again, left, bed.is_some());
    let config = core.config();
    if core.listens && takes_token(&config, &reply, counted, standing.safety) {
        core.part(provider.as_deref()).failed();
    }
    let mut withdrawal = None;
    let decision = slow.session.decide(&config, &reply, &standing, &mut slow.random, || {
        withdrawal = Withdrawal::try_new(core.part(provider.as_deref()));
        withdrawal.is_some()
    });
    // Calls of one task may run side by side: who counts past the limit does not go on.
    let decision = match (decision, task) {
        (Decision::Resend { wait, cost: Cost::Attempt }, Some(task))
            if task.charge() >= config.attempts.min(standing.allowance) =>
        {
            Decision::GiveUp { why: Why::Attempts, retry_in: Some(wait) }
        }
        (Decision::Resend { wait, cost: Cost::Redelivery }, Some(task))
            if task.redeliver() > config.redeliveries =>
        {
            Decision::GiveUp { why: Why::Redeliveries, retry_in: Some(wait) }
        }
        (decision, _) => decision,
    };
    let calls = slow.session.calls();
    if kind != Kind::Refused {
        slow.held = Some(Held { outcome, kind, provider });
    } else if slow.held.is_none() && !matches!(decision, Decision::Resend { .. }) {
        if reply.refused_for.is_none() {
            note_given_up(task);
        }
        return Some(outcome);
    } else {
        slow.refusal = outcome.err();
    }
    match decision {
        Decision::Resend { wait, cost } => {
            if cost == Cost::Attempt {
                slow.withdrawal = withdrawal;
            }
            slow.bed = bed;
            let until = now.checked_add(wait).unwrap_or(deadline);
            slow.sleep.as_mut().reset(until);
            core.observe(|| Event::Resend { kind, attempt: calls, wait });
            None
        }
        Decision::Done => {
            let held = slow.held.take()?;
            // The last of several: said so.
            let stamp = calls > 1 && !held.kind.is_success();
            if stamp || reply.exhausted {
                note_given_up(task);
            }
            Some(finish(&shared.classify, held, stamp.then_some(Exhausted::new(calls, None))))
        }
        Decision::GiveUp { why, retry_in } => {
            let held = slow.held.take()?;
            note_given_up(task);
            core.observe(|| Event::GaveUp { kind: held.kind, attempts: calls, why: why.as_str() });
            let retry_at = retry_in.and_then(|wait| now.checked_add(wait));
            Some(finish(&shared.classify, held, Some(Exhausted::new(calls, retry_at))))
        }
    }
}

/// For who answers the caller of the task: an error in place of a reply bears no mark.
fn note_given_up(task: Option<&Task>) {
    if let Some(task) = task {
        task.give_up();
    }
}

/// What a request stands at after an attempt.
fn standing<K: HasTask>(kept: Option<&K>, again: bool, left: Duration, room: bool) -> Standing {
    let task = kept.and_then(HasTask::task);
    Standing {
        safety: kept.map_or(Safety::Once, HasTask::safety),
        kept: again,
        spent: task.map_or(0, Task::spent),
        allowance: task.map_or(u32::MAX, Task::allowance_total),
        redelivered: task.map_or(0, Task::redelivered),
        left,
        room,
    }
}

/// Counts an outcome that would have been followed by another attempt. Nothing is charged: the budget is
/// asked, and gets back what it gave.
#[cold]
#[inline(never)]
fn observe<S, K, Res, C, R>(
    shared: &Shared<S, C, R>,
    kept: Option<&K>,
    noted: Option<Instant>,
    again: bool,
    outcome: &Result<Res, BoxError>,
) where
    K: HasTask,
    C: Classify<Res>,
{
    let core = &shared.core;
    let now = Instant::now();
    let reply = read(&shared.classify, outcome, now);
    let left = noted.unwrap_or_else(|| deadline(core, kept)).saturating_duration_since(now);
    let standing = standing(kept, again, left, core.bed().is_some());
    let mut session = Session::default();
    let task = kept.and_then(HasTask::task);
    let marked = shared.classify.provider(as_dyn(outcome));
    let provider = marked.or_else(|| task.and_then(Task::last_provider));
    let decision = session.decide(&core.config(), &reply, &standing, &mut core.seeds.session(), || {
        Withdrawal::try_new(core.part(provider.as_deref())).is_some()
    });
    if matches!(decision, Decision::Resend { .. }) {
        core.switch.count();
        let why = "the layer only observes";
        core.observe(|| Event::GaveUp { kind: reply.signal.kind, attempts: session.calls(), why });
    }
}

/// Ends a session whose next attempt cannot be made after all.
#[cold]
fn give_up<S, K, Res, C, R>(
    shared: &Shared<S, C, R>,
    kept: Option<&K>,
    slow: &mut Option<Box<Slow<S, Res>>>,
    why: Why,
) -> Result<Res, BoxError>
where
    K: HasTask,
    C: Classify<Res>,
{
    let mut slow = slow.take().expect("an attempt came before");
    let attempts = slow.session.calls();
    match slow.held.take() {
        Some(held) => {
            note_given_up(kept.and_then(HasTask::task));
            shared.core.observe(|| Event::GaveUp { kind: held.kind, attempts, why: why.as_str() });
            finish(&shared.classify, held, Some(Exhausted::new(attempts, None)))
        }
        None => Err(slow.refusal.take().expect("what was no reply was a refusal")),
    }
}

fn finish<Res, C: Classify<Res>>(
    classify: &C,
    held: Held<Res>,
    stamp: Option<Exhausted>,
) -> Result<Res, BoxError> {
    let mut outcome = held.outcome;
    if let (Ok(reply), Some(stamp)) = (&mut outcome, stamp) {
        classify.stamp_exhausted(reply, stamp);
    }
    outcome
}

fn as_dyn<Res>(outcome: &Result<Res, BoxError>) -> Result<&Res, &(dyn Error + 'static)> {
    outcome.as_ref().map_err(|error| &**error as &(dyn Error + 'static))
}

fn read<Res, C: Classify<Res>>(classify: &C, outcome: &Result<Res, BoxError>, now: Instant) -> Reply {
    let refusal = as_dyn(outcome).err().and_then(Refusal::find);
    let Some(refusal) = refusal else {
        let exhausted = outcome.as_ref().is_ok_and(|reply| classify.exhausted(reply));
        return Reply { signal: classify.classify(as_dyn(outcome)), exhausted, refused_for: None };
    };
    let at = refusal.retry_at.filter(|_| !refusal.kind.is_terminal());
    let refused_for = at.map(|at| at.saturating_duration_since(now));
    Reply { signal: Signal::new(Kind::Refused), exhausted: false, refused_for }
}

impl<S, Req, C, R> fmt::Debug for ResponseFuture<S, Req, C, R>
where
    S: Service<Req>,
    R: Resend<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("again", &self.slow.is_some()).finish_non_exhaustive()
    }
}
