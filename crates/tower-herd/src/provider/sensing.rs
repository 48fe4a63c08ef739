use super::{
    Provider,
    control::Admitted,
    handover, lock,
    pause::{Pause, PauseReason},
    watch::{Verdict, Watch, Watched},
};
use crate::{BoxError, Classify, Kind, Pushback, Quota, Reach, Signal, Task, Time, observe::Event};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::time::Instant;

/// One call under observation: what it was sent under, and whether its end was told.
///
/// Dropped before an outcome it counts as a call that its caller gave up: neutral.
pub(crate) struct Sensing {
    provider: Provider,
    admitted: Admitted,
    /// When it was sent, if its duration is measured.
    began: Time,
    /// Generations of the pauses it was sent under: only a success sent after a pause was set ends it.
    root: u64,
    scope: u64,
    /// Whether its duration is measured.
    measured: bool,
    /// Whether the time to the head of its reply is, too.
    measured_head: bool,
    /// Whether it is one of those whose quota is always looked for.
    sampled: bool,
    /// A gate's, though the provider has a sensor: its stack has none, or a layer between them defers the
    /// call, so that the gate cannot see it.
    unsure: bool,
    /// When its task ends: who drops the call after that gave it up for a timeout.
    deadline: Option<Instant>,
    /// What it was sent under at its provider, and at its scope, if anybody counts there.
    watched: Option<[Watched; 2]>,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// A good head came; its body may still run.
    Replied,
    Settled,
}

/// The first calls are all measured, ...
const MEASURE_ALL: u64 = 64;
/// ... then one in eight, ...
pub(super) const SELDOM: u64 = 8 - 1;
/// ... or one in 64 where calls take less than a millisecond: there the two readings of the clock count,
/// and figures are plenty.
const RARELY: u64 = 64 - 1;
/// The time to the head: one call in 32 of those that take longer than that, in 64 of all others.
const HEADS: u64 = 32 - 1;
const SHORT: Duration = Duration::from_millis(1);
/// A fixed window with less left than this, or than a quarter of it, is followed call by call.
const LOW: u32 = 64;

/// What the task of a call says of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Caller {
    /// When the task ends.
    deadline: Option<Instant>,
    /// Where its request has failed before, if it has ([`Provider::number`]).
    failed_at: Option<usize>,
}

impl Caller {
    #[inline]
    pub(crate) fn of(task: Option<&Task>) -> Self {
        let Some(task) = task else { return Caller::default() };
        Caller { deadline: task.deadline_at(), failed_at: task.failed_at() }
    }
}

impl Provider {
    /// A call has started: the gate watches it itself if no sensor was seen to watch it.
    #[inline]
    pub(crate) fn begin_unwatched(&self) -> Option<Sensing> {
        self.begin_unwatched_of(Caller::default())
    }

    /// The same for who knows the task.
    #[inline]
    pub(crate) fn begin_unwatched_of(&self, caller: Caller) -> Option<Sensing> {
        if handover::is_watched(&self.core) {
            return None;
        }
        let mut sensing = self.begin(caller);
        sensing.unsure = self.core.sensor.load(Ordering::Relaxed);
        Some(sensing)
    }

    /// A call starts of which nothing is to be learned: not by a gate in its sensor's place either.
    #[cold]
    pub(crate) fn unlearned(&self) {
        handover::mark_sensed(&self.core);
    }

    /// What is to be known of a request's task before it is sent, if the call may have to be watched here.
    #[cfg(feature = "breaker")]
    #[inline]
    pub(crate) fn caller(&self, task: impl FnOnce() -> Caller) -> Caller {
        if self.core.sensor.load(Ordering::Relaxed) { Caller::default() } else { task() }
    }

    /// A call of this caller starts.
    #[inline]
    pub(crate) fn begin(&self, caller: Caller) -> Sensing {
        let core = &self.core;
        handover::mark_sensed(core);
        handover::mark_sent();
        let nth = core.gate.count();
        let measured = nth < MEASURE_ALL || nth & core.sampling.load(Ordering::Relaxed) == 0;
        let at = if measured { core.clock().now() } else { Time::ZERO };
        Sensing {
            admitted: handover::admitted(core).unwrap_or_else(|| Admitted {
                stamp: core.stamp.load(Ordering::Acquire),
                rank: core.gate.busy(),
                nth: 0,
                at,
                first: false,
            }),
            began: at,
            root: core.root.generation(),
            scope: self.scope.as_ref().map_or(0, |scope| scope.generation()),
            measured,
            measured_head: nth < MEASURE_ALL || nth & HEADS == 0,
            sampled: nth < MEASURE_ALL || nth & SELDOM == 0,
            unsure: false,
            deadline: caller.deadline,
            watched: self.watch(nth, caller),
            phase: Phase::Running,
            provider: self.clone(),
        }
    }

    #[inline]
    fn watch(&self, nth: u64, caller: Caller) -> Option<[Watched; 2]> {
        let root = &self.core.root.watch;
        let scope = self.scope.as_ref().map(|scope| &scope.watch);
        let active = root.is_active() || scope.is_some_and(Watch::is_active);
        active.then(|| {
            let own = |at| at == self.number() || at == handover::address(&self.core);
            let elsewhere = caller.failed_at.is_some_and(|at| !own(at));
            let scope = scope.map_or_else(Watched::default, |scope| scope.begin(nth, elsewhere));
            [root.begin(nth, elsewhere), scope]
        })
    }
}

impl Sensing {
    /// What a reply says. Of a success that can teach nothing but a quota, where one call in eight is enough to
    /// find one, no more than a glance is taken.
    #[inline]
    pub(crate) fn read<Res, C: Classify<Res>>(&self, classify: &C, reply: &Res) -> Signal {
        if !self.wants_quota() && classify.is_plain_success(reply) {
            return Signal::new(Kind::Success);
        }
        classify.classify(Ok(reply))
    }

    /// Whether the quota that a reply may tell is wanted: that of one call in eight, and of all calls
    /// while quotas are followed (see [`quota`](Self::quota)) or successes are learned from anyway.
    #[inline]
    fn wants_quota(&self) -> bool {
        let core = &self.provider.core;
        self.sampled || core.follows_quota.load(Ordering::Relaxed) || self.teaches()
    }

    /// The head of the reply, or the error in its place, is there: reads what it says, and notes it.
    #[inline]
    pub(crate) fn ended<Res, C: Classify<Res>>(&mut self, classify: &C, outcome: &Result<Res, BoxError>) {
        let signal = match outcome {
            Ok(reply) => self.read(classify, reply),
            Err(error) => classify.classify(Err(&**error)),
        };
        self.outcome(&signal);
    }

    /// The head of the reply, or the error in its place, says this.
    #[inline]
    pub(crate) fn outcome(&mut self, signal: &Signal) {
        if self.phase != Phase::Running {
            return;
        }
        match signal.kind {
            // It was told, by a sensor whose call was deferred.
            _ if signal.is_reported_by(self.number()) => self.is_none(),
            // It may have been told: a success lost teaches less than one counted twice.
            Kind::Success | Kind::Empty if self.unsure => self.is_none(),
            Kind::Success | Kind::Empty => {
                self.phase = Phase::Replied;
                if self.measured && self.measured_head {
                    self.head_took();
                }
                if signal.kind == Kind::Empty {
                    self.tell(signal);
                }
                if self.matters(signal) {
                    self.success(signal);
                }
            }
            // A refusal of a stack further in: this provider was not called.
            Kind::Refused => self.is_none(),
            // It came over the wire: an answer, and no verdict either.
            _ if signal.is_refused_elsewhere() => {
                self.phase = Phase::Settled;
                self.refused_elsewhere(signal);
                self.settled(Verdict::Dropped);
            }
            _ => {
                self.phase = Phase::Settled;
                self.trouble(signal);
                let cut = signal.timed_out_after().is_some_and(|given| self.was_cut(Some(given)));
                self.settled(if cut { Verdict::Dropped } else { Verdict::Reply(signal.kind) });
            }
        }
    }

    /// Whether the call, which ends without a reply, was cut by its task's deadline before most others would
    /// have had theirs: it says more about how long it waited for us than about the provider. `given`: the time
    /// it had, where that was told.
    fn was_cut(&self, given: Option<Duration>) -> bool {
        let core = &self.provider.core;
        let now = core.clock().now();
        let Some(deadline) = self.deadline.map(|at| core.clock().time(at)).filter(|at| *at <= now) else {
            return false;
        };
        // (Who waited for its slot was seen to start, measured or not.)
        let began = if self.measured { self.began } else { self.admitted.at };
        let given = given.or_else(|| (began > Time::ZERO).then(|| deadline.saturating_since(began)));
        given.zip(core.usually()).is_some_and(|(given, usually)| given < usually)
    }

    /// It was no call of this provider, or it is told by another sensing: no verdict.
    fn is_none(&mut self) {
        self.phase = Phase::Settled;
        self.settled(Verdict::Dropped);
    }

    /// Tells those who count outcomes what became of the call.
    #[inline]
    fn settled(&mut self, verdict: Verdict) {
        let Some([root, scope]) = self.watched.take() else { return };
        let core = &self.provider.core;
        let now = || core.clock().now();
        let effect = core.root.watch.settled(root, verdict, now);
        let on = self.provider.scope.as_deref();
        let below = on.and_then(|on| on.watch.settled(scope, verdict, now));
        #[cfg(feature = "breaker")]
        if let Some(effect) = effect {
            core.follow(None, effect);
        }
        #[cfg(feature = "breaker")]
        if let (Some(_), Some(effect)) = (on, below) {
            core.follow(on, effect);
        }
        #[cfg(not(feature = "breaker"))]
        let _ = (effect, below);
    }

    /// The body of a good reply has ended: well (none), or with this signal (trailers, a body error,
    /// an error event).
    #[inline]
    pub(crate) fn end(&mut self, signal: Option<&Signal>) {
        if self.phase != Phase::Replied {
            return;
        }
        self.phase = Phase::Settled;
        match signal.filter(|signal| !signal.kind.is_success()) {
            Some(signal) => {
                self.trouble(signal);
                self.settled(Verdict::Reply(signal.kind));
            }
            None => {
                self.measure();
                self.settled(Verdict::Reply(Kind::Success));
            }
        }
    }

    /// Whether this success changes anything; most do not.
    #[inline]
    fn matters(&self, signal: &Signal) -> bool {
        signal.quota.is_some() || self.teaches()
    }

    /// Whether that it is a success changes anything.
    #[inline]
    fn teaches(&self) -> bool {
        let core = &self.provider.core;
        self.admitted.rank.max(core.gate.busy()) >= core.interest.load(Ordering::Relaxed)
            || core.root.wants_success()
            || self.provider.scope.as_ref().is_some_and(|scope| scope.wants_success())
    }

    #[cold]
    #[inline(never)]
    fn success(&self, signal: &Signal) {
        let core = &self.provider.core;
        let now = core.clock().now();
        self.alive(now);
        if let Some(scope) = self.provider.scope.as_ref().filter(|scope| scope.wants_success())
            && scope.change(|pause| pause.succeeded(now, self.scope))
        {
            core.tell_cleared(Some(scope));
        }
        let mut cleared = false;
        let follows = core.control(|control, busy, waiting| {
            if core.root.wants_success() && core.root.change(|pause| pause.succeeded(now, self.root)) {
                control.pause_clear(now);
                cleared = true;
            }
            let refilling = signal.quota.filter(|quota| !quota.fixed_window);
            control.on_success(now, self.admitted, busy, waiting, None, refilling.map(Into::into));
            control.follows_headers()
        });
        if cleared {
            core.tell_cleared(None);
        }
        if let Some(quota) = signal.quota {
            self.window_used_up(now, &quota);
            self.quota(&quota, follows);
        }
    }

    /// The provider works: if this was sent after a breaker of it had opened, that closes.
    fn alive(&self, now: Time) {
        #[cfg(feature = "breaker")]
        for (on, sent) in [(None, self.root), (self.provider.scope.as_deref(), self.scope)] {
            // One that is only observed lets all calls pass: the one that stands for its probe proves.
            self.provider.core.close_breaker(on, now, |broken, probing| {
                broken.is_proof(sent) && (probing || broken.is_enforced())
            });
        }
        #[cfg(not(feature = "breaker"))]
        let _ = now;
    }

    /// Decides how closely the next quotas are followed. A bucket that the pace is reckoned from: call by
    /// call. A fixed window: call by call when little is left of it, so that its end is not missed; one
    /// call in eight while there is plenty.
    fn quota(&self, quota: &Quota, paces: bool) {
        let is_low = quota.fixed_window && quota.remaining < (quota.limit / 4).max(LOW);
        self.provider.core.follows_quota.store(paces || is_low, Ordering::Relaxed);
    }

    /// The last call that a fixed window allowed: nobody calls before its end. (A window that is over
    /// within the error of its told end is none to wait for.)
    fn window_used_up(&self, now: Time, quota: &Quota) {
        if quota.fixed_window && quota.remaining == 0 && quota.reset > quota.resolution {
            let scope = self.provider.scope.as_deref();
            self.provider.pause(now, quota.reset, PauseReason::Quota, scope);
        }
    }

    #[inline]
    fn measure(&self) {
        if self.measured {
            self.took();
        }
    }

    #[cold]
    #[inline(never)]
    fn head_took(&self) {
        let core = &self.provider.core;
        let took = core.clock().now().saturating_since(self.began);
        lock(&core.heads.0).add(took);
    }

    #[cold]
    #[inline(never)]
    fn took(&self) {
        let core = &self.provider.core;
        let took = core.clock().now().saturating_since(self.began);
        lock(&core.durations.0).add(took);
        let mean = core.control(|control, _, _| {
            control.on_duration(took);
            control.latency()
        });
        let sampling = if mean.is_some_and(|mean| mean < SHORT) { RARELY } else { SELDOM };
        core.sampling.store(sampling, Ordering::Relaxed);
    }

    /// The one place where the event is emitted: once for each call that is not a plain success.
    fn tell(&self, signal: &Signal) {
        let provider = &self.provider;
        provider.observe(|| Event::Signal {
            provider: provider.name(),
            scope: provider.scope_name().map(|name| &**name),
            kind: signal.kind,
            wait: signal.pushback.wait(),
        });
    }

    #[cold]
    #[inline(never)]
    fn trouble(&self, signal: &Signal) {
        let core = &self.provider.core;
        let now = core.clock().now();
        self.tell(signal);
        match signal.kind {
            Kind::Throttled => {
                core.throttled.fetch_add(1, Ordering::Relaxed);
                self.throttled(now, signal);
                self.alive(now);
            }
            Kind::Overloaded => self.overloaded(now, signal),
            Kind::Depleted => self.long_pause(now, signal, PauseReason::Depleted),
            Kind::Misconfigured => self.long_pause(now, signal, PauseReason::Misconfigured),
            _ => core.control(|control, busy, _| control.on_failed(now, self.admitted, busy)),
        }
    }

    #[cold]
    fn refused_elsewhere(&self, signal: &Signal) {
        self.tell(&signal.as_refusal());
        let core = &self.provider.core;
        let now = core.clock().now();
        core.control(|control, busy, _| control.on_failed(now, self.admitted, busy));
    }

    fn throttled(&self, now: Time, signal: &Signal) {
        let core = &self.provider.core;
        let scope = self.provider.scope.as_deref().filter(|_| signal.reach == Reach::Scope);
        let sent = if scope.is_some() { self.scope } else { self.root };
        let told = signal.pushback.wait();
        let reason = if told.is_some() { PauseReason::Hint } else { PauseReason::Bare };
        // The wait, and what is held of it: a wait of zero is no pause.
        let pause = |pause: &mut Pause| {
            let wait = told.unwrap_or_else(|| pause.bare(sent));
            (wait, if wait.is_zero() { wait } else { pause.set(now, wait, reason) })
        };
        let (wait, held) = match scope {
            Some(scope) => {
                let (wait, held) = scope.change(pause);
                core.control(|control, busy, _| {
                    control.on_throttled_in_part(now, self.admitted, busy, wait);
                });
                (wait, held)
            }
            None => core.control(|control, busy, _| {
                let (wait, held) = core.root.change(pause);
                control.on_throttled(now, self.admitted, busy, Some(wait));
                (wait, held)
            }),
        };
        core.tell_throttled(self.admitted.stamp, wait);
        self.provider.say_paused(held, reason, scope);
        if let (Some(scope), PauseReason::Bare) = (scope, reason) {
            self.second_scope(now, wait, scope);
        }
    }

    /// Overload without a hint does not say that the next call comes too early: it cuts only.
    fn overloaded(&self, now: Time, signal: &Signal) {
        let core = &self.provider.core;
        let scope = self.provider.scope.as_deref().filter(|_| signal.reach == Reach::Scope);
        let hint = signal.pushback.wait().filter(|wait| !wait.is_zero());
        let set = |pause: &mut Pause, wait| pause.set(now, wait, PauseReason::Hint);
        let held = core.control(|control, busy, _| {
            control.on_overloaded(now, self.admitted, busy, hint.filter(|_| scope.is_none()));
            hint.map(|wait| scope.unwrap_or(&core.root).change(|pause| set(pause, wait)))
        });
        core.tell_overloaded(self.admitted.stamp, hint.filter(|_| scope.is_none()));
        self.provider.say_paused(held.unwrap_or_default(), PauseReason::Hint, scope);
    }

    /// Bare 429s in two scopes within a minute are about the provider.
    fn second_scope(&self, now: Time, wait: Duration, scope: &super::Scope) {
        const TOGETHER: Duration = Duration::from_secs(60);
        let core = &self.provider.core;
        let Some(name) = &scope.name else { return };
        let other = {
            let mut last = lock(&core.last_bare);
            let other =
                last.as_ref().is_some_and(|(last, at)| last != name && now.saturating_since(*at) < TOGETHER);
            *last = Some((name.clone(), now));
            other
        };
        if other && !wait.is_zero() {
            self.provider.pause(now, wait, PauseReason::Bare, None);
        }
    }

    fn long_pause(&self, now: Time, signal: &Signal, reason: PauseReason) {
        let core = &self.provider.core;
        let scope = self.provider.scope.as_deref().filter(|_| signal.reach == Reach::Scope);
        let (pause, sent) = match scope {
            Some(scope) => (scope, self.scope),
            None => (&core.root, self.root),
        };
        let wait = match (signal.pushback, reason) {
            (Pushback::After(wait), _) => wait,
            (_, PauseReason::Depleted) => pause.change(|pause| pause.depleted(sent)),
            _ => pause.change(|pause| pause.misconfigured()),
        };
        core.control(|control, busy, _| control.on_failed(now, self.admitted, busy));
        #[cfg(feature = "breaker")]
        let begins = !wait.is_zero() && Provider::begins(pause, now, reason);
        self.provider.pause(now, wait, reason, scope);
        #[cfg(feature = "breaker")]
        if begins {
            core.raise_pause(scope, now, wait, signal);
        }
    }
}

impl Drop for Sensing {
    #[inline]
    fn drop(&mut self) {
        match self.phase {
            Phase::Settled => {}
            // The reply had no body, or its body was dropped before its end.
            Phase::Replied => {
                self.measure();
                self.settled(Verdict::Reply(Kind::Success));
            }
            Phase::Running => self.dropped(),
        }
    }
}

impl Sensing {
    /// The provider that is called, and whether this is one of the calls that are looked at closely.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn sample(&self) -> Option<&Provider> {
        self.sampled.then_some(&self.provider)
    }

    /// The provider that is called.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn provider(&self) -> &Provider {
        &self.provider
    }

    /// What is shared of it.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn core(&self) -> &std::sync::Arc<super::Core> {
        &self.provider.core
    }

    /// What the provider is known by in [`Signal::is_reported_by`].
    pub(crate) fn number(&self) -> usize {
        handover::address(&self.provider.core)
    }

    #[cold]
    #[inline(never)]
    fn dropped(&mut self) {
        let core = &self.provider.core;
        let now = core.clock().now();
        core.control(|control, busy, _| control.on_failed(now, self.admitted, busy));
        // Who waited until its task's end was not being impatient.
        let late = self.deadline.is_some_and(|at| core.clock().time(at) <= now);
        self.settled(if late && !self.was_cut(None) { Verdict::TimedOut } else { Verdict::Dropped });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fleet, ProviderSettings};

    fn window(remaining: u32) -> Signal {
        Signal::new(Kind::Success).with_quota(Some(Quota {
            limit: 5000,
            remaining,
            reset: Duration::from_secs(600),
            resolution: Duration::from_secs(1),
            fixed_window: true,
        }))
    }

    /// Which of the next calls look for a quota; each is told `signal` if it does, and a bare success if not.
    fn looks(provider: &Provider, calls: usize, signal: &Signal) -> usize {
        let look = |_| {
            let mut sensing = provider.begin(Caller::default());
            let wanted = sensing.wants_quota();
            sensing.outcome(if wanted { signal } else { &const { Signal::new(Kind::Success) } });
            sensing.end(None);
            wanted
        };
        (0..calls).map(look).filter(|wanted| *wanted).count()
    }

    #[tokio::test(start_paused = true)]
    async fn quotas_are_looked_for_as_closely_as_they_matter() {
        let provider =
            Fleet::local().configure("api", ProviderSettings::new().ceiling(20)).expect("valid settings");
        let bare = Signal::new(Kind::Success);
        assert_eq!(looks(&provider, 64, &bare), 64, "the first calls");
        assert_eq!(looks(&provider, 64, &bare), 8, "nobody tells a quota");
        assert_eq!(looks(&provider, 64, &window(4000)), 8, "plenty is left of the window");
        assert_eq!(looks(&provider, 8, &window(1300)), 1);
        assert_eq!(looks(&provider, 16, &window(900)), 16, "it nears its end");
        assert_eq!(looks(&provider, 1, &window(0)), 1);
        assert!(provider.paused_until().is_some(), "the last call of the window was seen");
        let bucket = Quota { fixed_window: false, ..window(3000).quota.expect("given") };
        let bucket = Signal::new(Kind::Success).with_quota(Some(bucket));
        assert_eq!(looks(&provider, 16, &bucket), 16, "the pace is reckoned from it");
    }
}
