//! How a breaker opens and closes: the count of its failures, the pause that follows, and who is told.

use super::{
    Core, Provider, Scope, Slot,
    broken::{Broken, Probes},
    control::Control,
    pause::{Pause, PauseReason},
    watch::Effect,
};
use crate::{
    Refusal, RefusalKind, Signal, Time,
    breaker::{About, Alert, AlertKind, BreakerState, Cell, Facts, Trouble},
    observe::Event,
};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::time::Instant;

/// `on` is a scope, or (none) the provider itself, in all that follows.
impl Core {
    fn at<'a>(&'a self, on: Option<&'a Scope>) -> &'a Scope {
        on.unwrap_or(&self.root)
    }

    /// Changes a pause whose breaker may open or close by it.
    fn change_broken<R>(&self, on: Option<&Scope>, now: Time, change: impl FnOnce(&mut Pause) -> R) -> R {
        match on {
            Some(scope) => scope.change(change),
            None => self.control(|control, _, _| {
                let result = self.root.change(change);
                self.hold(control, now);
                result
            }),
        }
    }

    /// The queue of the provider is held for as long as its breaker is open, and in force.
    fn hold(&self, control: &mut Control, now: Time) {
        let (open, until) = self.root.change(|pause| (pause.until() == Time::MAX, pause.own_until()));
        match (open, self.held.swap(open, Ordering::Relaxed)) {
            (true, false) => control.hold(now),
            (false, true) => control.let_go(now, until),
            _ => {}
        }
    }

    /// The breaker's switch may have been turned.
    pub(super) fn let_go(&self, now: Time) {
        if self.held.load(Ordering::Relaxed) {
            self.change_broken(None, now, |_| ());
        }
    }

    /// What follows from the outcome of a call.
    #[cold]
    #[inline(never)]
    pub(super) fn follow(&self, on: Option<&Scope>, effect: Effect) {
        match effect {
            Effect::ProbeFailed(now) => self.at(on).change(|pause| pause.probe_failed(now)),
            Effect::Tripped(now) => {
                let cell = &self.at(on).watch.breaker;
                let (settings, switch) = (cell.settings(), cell.switch());
                let probes = Probes {
                    first: settings.first_probe,
                    last: settings.last_probe,
                    timeout: settings.probe_timeout,
                };
                let mut random = self.fleet.seeds.session();
                let id = random.bits();
                let open = |generation| Broken::new(now, settings.open, probes, generation, random, switch);
                let until = self.change_broken(on, now, |pause| {
                    pause.open_breaker(open);
                    pause.broken().map_or(now, Broken::until)
                });
                self.at(on).abandon_ramp();
                self.say_breaker(on, "open", Some(until.saturating_since(now)));
                let alert = cell.opened(until, id, &self.about(on, now));
                if let Some(alert) = self.tell_opened(on, until.saturating_since(now), probes, alert) {
                    self.raise(on, &alert);
                }
            }
        }
    }

    fn say_breaker(&self, on: Option<&Scope>, to: &'static str, wait: Option<Duration>) {
        let scope = on.and_then(|scope| scope.name.as_deref());
        self.observe(|| Event::Breaker { provider: &self.name, scope, to, wait });
    }

    fn about<'a>(&'a self, on: Option<&'a Scope>, now: Time) -> About<'a> {
        let scope = on.and_then(|scope| scope.name.as_deref());
        About { provider: &self.name, scope, clock: self.clock(), now }
    }

    /// Tells the listener of this breaker, or else that of the provider's.
    pub(super) fn raise(&self, on: Option<&Scope>, alert: &Alert) {
        alert.tell();
        let listener = self.at(on).watch.breaker.listener().or_else(|| self.root.watch.breaker.listener());
        if let Some(listener) = listener {
            listener(alert);
        }
    }

    /// The account is empty, or the key wrong: an alert of its own, where there is a breaker to raise it.
    pub(super) fn raise_pause(&self, on: Option<&Scope>, now: Time, wait: Duration, signal: &Signal) {
        let kind = match signal.kind {
            crate::Kind::Depleted => AlertKind::Depleted,
            _ => AlertKind::Misconfigured,
        };
        if !(self.at(on).watch.is_active() || self.root.watch.is_active()) {
            return;
        }
        let mut trouble = Trouble::default();
        trouble.add(kind.as_str(), now);
        let incident = self.fleet.seeds.session().bits();
        let until = now.saturating_add(wait);
        let facts = Facts { kind, incident, failures: 1, calls: 1, until, refused: 0 };
        let scope = on.and_then(|scope| scope.name.as_deref());
        self.raise(on, &Alert::new(&self.name, scope, &trouble, facts, self.clock(), now));
    }

    /// Closes an open breaker, if `proof` (told whether a probe is under way) says so.
    pub(super) fn close_breaker(
        &self,
        on: Option<&Scope>,
        now: Time,
        proof: impl FnOnce(&Broken, bool) -> bool,
    ) -> bool {
        let closed = self.close_here(on, now, proof);
        if closed {
            self.tell_closed(on);
        }
        closed
    }

    /// Another process of the fleet has closed it.
    #[cfg(feature = "store")]
    pub(super) fn close_too(&self, on: Option<&Scope>, now: Time) {
        // (What an operator of this process has opened only he closes.)
        self.close_here(on, now, |broken, _| !broken.is_forced());
    }

    /// Another process of the fleet has opened it: its incident, and its alert.
    #[cfg(feature = "store")]
    pub(super) fn open_too(&self, on: Option<&Scope>, open: &crate::store::Opened, now: Time) {
        let millis = Duration::from_millis;
        let cell = &self.at(on).watch.breaker;
        if !self.at(on).watch.is_active() {
            // No breaker stands here: a pause says the same, and ends with it.
            return;
        }
        let (settings, switch) = (cell.settings(), cell.switch());
        let probes =
            Probes { first: millis(open.first), last: millis(open.last), timeout: settings.probe_timeout };
        let mut random = self.fleet.seeds.session();
        let id = random.bits();
        let (since, left) = (millis(open.since), millis(open.wait));
        let opens = |generation| Broken::joined(now, since, left, probes, generation, random, switch);
        self.change_broken(on, now, |pause| pause.open_breaker(opens));
        cell.opened_elsewhere(now.saturating_add(left), id);
        self.at(on).abandon_ramp();
        self.say_breaker(on, "open", Some(left));
    }

    fn close_here(&self, on: Option<&Scope>, now: Time, proof: impl FnOnce(&Broken, bool) -> bool) -> bool {
        if !self.at(on).is_broken() {
            return false;
        }
        let since = self.change_broken(on, now, |pause| pause.close_breaker(now, proof));
        let Some(since) = since else { return false };
        self.at(on).watch.breaker.closed();
        self.say_breaker(on, "closed", None);
        self.reopened(on, now, now.saturating_since(since));
        true
    }
}

/// What the breaker's layer and its handle ask.
impl Provider {
    pub(crate) fn breaker(&self) -> &Cell {
        &self.on().watch.breaker
    }

    fn on(&self) -> &Scope {
        self.core.at(self.scope.as_deref())
    }

    /// A layer was built: from here on calls are counted.
    pub(crate) fn arm_breaker(&self) {
        let _ = self.breaker().settings();
        self.on().watch.activate();
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.on().is_broken()
    }

    /// The probe of an open breaker, if one is due.
    pub(crate) fn try_breaker_probe(&self, now: Time, end: Option<Instant>) -> Option<Slot> {
        let on = self.scope.as_deref();
        if self.on().is_open() || (on.is_none() && !self.core.held.load(Ordering::Relaxed)) {
            // It was only observed when it opened.
            self.core.change_broken(on, now, |_| ());
        }
        self.try_long_probe(now, self.left(end, now))
    }

    /// The probe of an open breaker that is only observed: a call like any other.
    pub(crate) fn try_watched_probe(&self, now: Time) -> Option<WatchedProbe> {
        let number = self.core.probes.fetch_add(1, Ordering::Relaxed);
        let is_due = self.on().change(|pause| pause.take_watched_probe(now, number));
        is_due.then(|| WatchedProbe { provider: self.clone(), number })
    }

    /// The refusal of who comes while it is open.
    #[cold]
    pub(crate) fn broken_refusal(&self, now: Time) -> Refusal {
        let until = self.paused_at(now).map_or(now, |(until, _)| until);
        self.breaker().refused();
        self.refuse(RefusalKind::Open, super::BROKEN, Some(until))
    }

    pub(crate) fn breaker_state(&self) -> BreakerState {
        let now = self.core.clock().now();
        self.on().change(|pause| match pause.broken() {
            None => BreakerState::Closed,
            Some(broken) if broken.is_forced() => BreakerState::Forced,
            Some(broken) if now < broken.until() => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        })
    }

    /// The end of its open time.
    pub(crate) fn broken_until(&self) -> Option<Time> {
        self.on().change(|pause| pause.broken().filter(|broken| !broken.is_forced()).map(Broken::until))
    }

    pub(crate) fn open_breaker(&self) {
        let now = self.core.clock().now();
        let on = self.scope.as_deref();
        let (random, switch) = (self.core.fleet.seeds.session(), self.breaker().switch());
        self.breaker().forced();
        let open = |generation| Broken::forced(now, generation, random, switch);
        self.core.change_broken(on, now, |pause| pause.open_breaker(open));
        self.core.at(on).abandon_ramp();
        self.core.say_breaker(on, "open", None);
    }

    pub(crate) fn close_breaker(&self) {
        let now = self.core.clock().now();
        self.core.close_breaker(self.scope.as_deref(), now, |_, _| true);
    }

    pub(crate) fn reset_breaker(&self) {
        self.close_breaker();
        self.breaker().closed();
        self.on().incident_over(self.core.clock().now());
    }

    pub(crate) fn incident(&self) -> Option<Alert> {
        let about = self.core.about(self.scope.as_deref(), self.core.clock().now());
        self.breaker().incident(&about)
    }

    /// Whether a long pause for this reason begins now, and does not only go on.
    pub(super) fn begins(on: &Scope, now: Time, reason: PauseReason) -> bool {
        on.paused(now).is_none_or(|(_, known)| known != reason)
    }
}

/// A probe without a slot. Given back when dropped.
pub(crate) struct WatchedProbe {
    provider: Provider,
    number: u32,
}

impl Drop for WatchedProbe {
    fn drop(&mut self) {
        self.provider.on().change(|pause| {
            pause.probe_ended(self.number);
        });
    }
}
