//! Where the ramps of a provider run: beside the pause of each scope, and under its lock.
//!
//! A ramp begins when a breaker closes ([`Scope::begin_ramp`]), and after a pause of over five minutes. A
//! pause ends by itself, with nobody there to notice, so the ramp begins with the first who asks; where
//! the end was seen (a probe succeeded, an operator cleared it), it begins there. Who asks while
//! such a pause is still in force is told its instant after it already: a crowd that waited for the end
//! inside the gate would all be let in there.
//!
//! Nothing here runs by itself. The state moves on when somebody asks, and while nobody asks nobody is
//! let in either.

use super::{
    Core, Provider, SettingsError, lock,
    pause::Pause,
    scope::{Scope, State},
    watch::Verdict,
};
use crate::{
    Key, Kind, Mode, Switch, Time,
    observe::Event,
    readmission::{
        Profile, hash,
        state::{Counts, Ramp},
    },
};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// What all layers of a provider agree on. It is there once the first of them was built.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// None: the default.
    profile: Option<Profile>,
    switch: Switch,
}

/// The ramp of one scope.
#[derive(Debug, Default)]
pub(super) struct Ramping {
    run: Option<Ramp>,
    /// A breaker closed: when, and for how long it was open. The ramp begins with the first who asks, who
    /// knows the profile.
    due: Option<(Time, Duration)>,
    /// Somebody was told an instant after the pause in force: it holds.
    promised: bool,
    /// What its tasks are hashed with.
    place: Option<u64>,
}

/// Calls and throttles while a ramp runs.
#[derive(Debug, Default)]
pub(super) struct Tally {
    on: AtomicBool,
    calls: AtomicU64,
    throttled: AtomicU64,
    /// The same of the other processes of a fleet.
    others: (AtomicU64, AtomicU64),
}

impl Tally {
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn began(&self) {
        if self.is_on() {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn settled(&self, verdict: Verdict) {
        if verdict == Verdict::Reply(Kind::Throttled) && self.is_on() {
            self.throttled.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> Counts {
        // In this order: a throttle counted in between has its call counted too.
        let (calls, throttled) = &self.others;
        let throttled = self.throttled.load(Ordering::Relaxed) + throttled.load(Ordering::Relaxed);
        Counts { calls: self.calls.load(Ordering::Relaxed) + calls.load(Ordering::Relaxed), throttled }
    }

    /// What this process has counted; none while no ramp runs.
    #[cfg(feature = "store")]
    pub(super) fn own(&self) -> Option<(u64, u64)> {
        let throttled = self.throttled.load(Ordering::Relaxed);
        self.is_on().then(|| (self.calls.load(Ordering::Relaxed), throttled))
    }

    /// The others have counted so much more.
    #[cfg(feature = "store")]
    pub(super) fn add(&self, calls: u64, throttled: u64) {
        self.others.0.fetch_add(calls, Ordering::Relaxed);
        self.others.1.fetch_add(throttled, Ordering::Relaxed);
    }
}

/// What somebody who asks learns.
#[derive(Debug, Default)]
struct Look {
    /// Not readmitted before then.
    until: Option<Time>,
    /// The share to tell the observer: a step began or was taken back.
    step: Option<f64>,
    ended: bool,
}

impl Ramping {
    /// The pause beside it may have moved.
    pub(super) fn paused(&mut self, pause: &Pause, before: Time) {
        if pause.until() == before {
            return;
        }
        if let Some(run) = &mut self.run {
            run.pause(pause.moved(), pause.until());
        }
    }
}

impl Scope {
    /// It was closed for so long, and is open from `now` on: it gets its tasks back by and by.
    ///
    /// Call it only where [`Core::has_ramp`], since nobody else would ever end the ramp.
    #[cfg_attr(not(feature = "breaker"), allow(dead_code, reason = "only a breaker closes"))]
    pub(super) fn begin_ramp(&self, now: Time, closed_for: Duration) {
        let mut state = lock(&self.state);
        state.ramp.due = Some((now, closed_for));
        self.ramps.store(true, Ordering::Relaxed);
    }

    /// It is closed again: a ramp that runs is of no use any more, and would keep its probes out.
    #[cfg_attr(not(feature = "breaker"), allow(dead_code, reason = "only a breaker closes"))]
    pub(super) fn abandon_ramp(&self) {
        let mut state = lock(&self.state);
        (state.ramp.due, state.ramp.run) = (None, None);
        self.watch.tally.on.store(false, Ordering::Relaxed);
    }

    /// A ramp has reached its end, and with it the incident before it.
    fn ramp_ended(&self, now: Time) {
        self.incident_over(now);
    }

    #[inline]
    fn may_ramp(&self) -> bool {
        self.ramps.load(Ordering::Relaxed)
    }

    /// Somebody with this key asks. `probe`: a probe of the pause in force may go, for which nobody is kept
    /// out. `name`: of the scope, with its provider's.
    #[cold]
    fn ask(&self, now: Time, profile: Profile, probe: bool, key: Key, name: impl FnOnce() -> String) -> Look {
        let mut state = lock(&self.state);
        let State { pause, ramp, .. } = &mut *state;
        let unit = hash::unit(*ramp.place.get_or_insert_with(|| hash::place(&name())), key);
        if let Some(closure) = pause.closure(now) {
            // Closed again: what ran is over, and what will run begins after this.
            ramp.run = None;
            self.watch.tally.on.store(false, Ordering::Relaxed);
            let coming = Ramp::begin(profile, closure.until, closure.length, Counts::default());
            let until = Some(coming.admits_at(unit)).filter(|at| !probe && *at > closure.until);
            ramp.promised |= until.is_some();
            return Look { until, ..Look::default() };
        }
        let seen = self.watch.tally.counts();
        let begun = match (pause.take_closure(now), ramp.due.take()) {
            (Some(closure), _) => {
                let promised = Ramp::begin(profile, closure.until, closure.length, seen);
                Some(match closure.seen_open {
                    Some(open) => Ramp::begin(profile, open, closure.length, seen),
                    None if ramp.promised && !promised.is_over(now) => promised,
                    None => Ramp::begin(profile, now, closure.length, seen),
                })
            }
            (None, Some((open, closed_for))) => Some(Ramp::begin(profile, open, closed_for, seen)),
            (None, None) => None,
        };
        let mut look = Look::default();
        if let Some(mut begun) = begun {
            ramp.promised = false;
            // A short pause may have begun since.
            begun.pause(pause.moved().max(now), pause.until().max(now));
            look.step = Some(begun.share(now));
            ramp.run = Some(begun);
            self.watch.tally.on.store(true, Ordering::Relaxed);
        }
        match &mut ramp.run {
            Some(run) if !run.is_over(now) => {
                if run.hear(now, seen) {
                    look.step = Some(run.share(now));
                }
                look.until = Some(run.admits_at(unit)).filter(|at| *at > now);
            }
            run => {
                look.ended = run.take().is_some();
                look.step = look.ended.then_some(1.0);
                self.ramps.store(false, Ordering::Relaxed);
                self.watch.tally.on.store(false, Ordering::Relaxed);
            }
        }
        look
    }

    /// The share of tasks that it gets.
    fn readmitted(&self, now: Time, profile: Profile) -> f64 {
        let state = lock(&self.state);
        let ramp = &state.ramp;
        let begin = |at, closed_for| Ramp::begin(profile, at, closed_for, Counts::default()).share(now);
        match (&ramp.run, ramp.due) {
            _ if state.pause.is_long() => profile.share_at_first(),
            (_, Some((at, closed_for))) => begin(at, closed_for),
            (Some(run), None) => run.share(now),
            (None, None) => 1.0,
        }
    }
}

impl Core {
    /// Whether a ramp follows when it, or one of its scopes, was closed.
    #[cfg_attr(not(feature = "breaker"), allow(dead_code, reason = "only a breaker closes"))]
    pub(super) fn has_ramp(&self) -> bool {
        self.ramp.get().is_some_and(|terms| lock(terms).switch.mode() != Mode::Off)
    }
}

impl Provider {
    /// The share of tasks that this scope gets now, by its own ramp and its provider's: less than 1 while it
    /// recovers from an open breaker or from a pause of over five minutes, if it has a
    /// [`RampedReadmissionLayer`](crate::readmission).
    #[must_use]
    pub fn readmitted(&self) -> f64 {
        if !self.is_ramping() {
            return 1.0;
        }
        let (now, profile) = (self.core.clock().now(), self.ramp_profile());
        let scope = self.scope.as_ref().map_or(1.0, |scope| scope.readmitted(now, profile));
        scope * self.core.root.readmitted(now, profile)
    }

    /// A layer is built for it: the switch to go by, which is that of the layers before it.
    pub(crate) fn has_ramp(&self) -> Switch {
        lock(self.core.ramp.get_or_init(Mutex::default)).switch.clone()
    }

    /// The same switch for the layers, and for the ladders that ask on their behalf.
    pub(crate) fn switch_ramp(&self, switch: &Switch) {
        lock(self.core.ramp.get_or_init(Mutex::default)).switch = switch.clone();
    }

    /// All layers of a provider ramp alike.
    pub(crate) fn profile_ramp(&self, profile: Profile) -> Result<(), SettingsError> {
        profile.check(&self.core.name)?;
        let known = &mut lock(self.core.ramp.get_or_init(Mutex::default)).profile;
        match *known.get_or_insert(profile) {
            known if known == profile => Ok(()),
            _ => Err(SettingsError {
                provider: self.core.name.to_string(),
                field: "ramp",
                why: "differs from the one it already has; give each provider its profile in one place",
            }),
        }
    }

    fn ramp_profile(&self) -> Profile {
        self.core.ramp.get().and_then(|terms| lock(terms).profile).unwrap_or_default()
    }

    /// Whether anybody has to ask [`readmits_at`](Self::readmits_at): mostly nobody has, and pays one load (a
    /// second one for a scope).
    #[inline]
    pub(crate) fn is_ramping(&self) -> bool {
        let flagged = self.core.root.may_ramp() || self.scope.as_ref().is_some_and(|scope| scope.may_ramp());
        flagged && self.core.ramp.get().is_some()
    }

    /// For a ladder, before it takes a slot for this key: not before then.
    #[inline]
    pub(crate) fn bars_until(&self, key: Key) -> Option<Time> {
        if self.is_ramping() { self.bars_until_at(key) } else { None }
    }

    #[cold]
    fn bars_until_at(&self, key: Key) -> Option<Time> {
        let enforced = self.core.ramp.get().is_some_and(|terms| lock(terms).switch.mode() == Mode::Enforce);
        if enforced { self.readmits_at(key, self.core.clock().now()) } else { None }
    }

    /// When this key is readmitted, if that is not now.
    #[cold]
    pub(crate) fn readmits_at(&self, key: Key, now: Time) -> Option<Time> {
        let (profile, probe) = (self.ramp_profile(), self.probe_is_due(now));
        let ask = |on: &Scope| {
            if !on.may_ramp() {
                return None;
            }
            let name = || match &on.name {
                Some(scope) => format!("{}/{scope}", self.core.name),
                None => self.core.name.to_string(),
            };
            let look = on.ask(now, profile, probe, key, name);
            if let Some(share) = look.step {
                let scope = on.name.as_deref();
                self.core.observe(|| Event::Ramp { provider: &self.core.name, scope, share });
            }
            if look.ended {
                on.ramp_ended(now);
            }
            look.until
        };
        // Both are asked, whatever the first says: that is what moves them on.
        let (root, scope) = (ask(&self.core.root), self.scope.as_ref().and_then(|scope| ask(scope)));
        root.max(scope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fleet;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// How many of a thousand keys are let in.
    fn readmitted(provider: &Provider) -> usize {
        let asks = |key: &u64| provider.is_ramping() && provider.bars_until((*key).into()).is_some();
        1000 - (0..1000).filter(asks).count()
    }

    fn ramped() -> Provider {
        let provider = Fleet::local().provider("p");
        drop(provider.has_ramp());
        provider
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_that_closes_begins_one() {
        let (provider, scope) = (ramped(), ramped().scope("model"));
        for (provider, on) in [(&provider, &provider.core.root), (&scope, scope.scope.as_deref().unwrap())] {
            let start = provider.clock().now();
            on.begin_ramp(start, secs(600));
            // From then on, and not from the first who asks: the probe's success was seen.
            tokio::time::advance(secs(10)).await;
            assert!((150..250).contains(&readmitted(provider)));
            tokio::time::advance(secs(11)).await;
            assert!(readmitted(provider) < 1000 && provider.is_ramping());
            tokio::time::advance(secs(1)).await;
            assert_eq!(readmitted(provider), 1000);
            assert!(!provider.is_ramping(), "and it costs nothing any more");
            // Open for a short time: a short ramp.
            on.begin_ramp(provider.clock().now(), secs(5));
            assert!(readmitted(provider) < 80);
            tokio::time::advance(secs(5)).await;
            assert_eq!((readmitted(provider), provider.is_ramping()), (1000, false));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_that_opens_again_ends_it() {
        let provider = ramped();
        let root = &provider.core.root;
        for asked in [true, false] {
            root.begin_ramp(provider.clock().now(), secs(600));
            assert!(!asked || readmitted(&provider) < 80);
            root.abandon_ramp();
            assert_eq!((readmitted(&provider), root.watch.tally.is_on()), (1000, false));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_layer_nothing_ramps() {
        let provider = Fleet::local().provider("p");
        assert!(!provider.core.has_ramp());
        provider.pause_for(secs(600));
        tokio::time::advance(secs(600)).await;
        assert_eq!((readmitted(&provider), provider.readmitted()), (1000, 1.0));
        let switch = provider.has_ramp();
        assert!(provider.core.has_ramp());
        switch.set(Mode::Off);
        assert!(!provider.core.has_ramp() && readmitted(&provider) == 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_pause_holds_it_up() {
        let provider = ramped();
        provider.core.root.begin_ramp(provider.clock().now(), secs(600));
        readmitted(&provider);
        tokio::time::advance(secs(10)).await;
        let before = readmitted(&provider);
        provider.pause_for(secs(200));
        tokio::time::advance(secs(200)).await;
        assert_eq!(readmitted(&provider), before);
        provider.pause_for(secs(200));
        tokio::time::advance(secs(20)).await;
        provider.clear_pause();
        assert_eq!(readmitted(&provider), before);
        tokio::time::advance(secs(5)).await;
        assert!(readmitted(&provider) > before + 100);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_counted_while_it_runs() {
        let provider = ramped();
        let tally = &provider.core.root.watch.tally;
        let call = |kind| {
            let mut sensing = provider.begin(Default::default());
            sensing.outcome(&crate::Signal::new(kind));
            sensing.end(None);
        };
        call(Kind::Throttled);
        assert_eq!(tally.counts(), Counts::default());
        // By itself the pause of that is over after a second.
        tokio::time::advance(secs(1)).await;
        provider.core.root.begin_ramp(provider.clock().now(), secs(600));
        readmitted(&provider);
        [Kind::Success, Kind::Throttled, Kind::Failed, Kind::Throttled].into_iter().for_each(call);
        assert_eq!(tally.counts(), Counts { calls: 4, throttled: 2 });
        tokio::time::advance(secs(60)).await;
        assert_eq!(readmitted(&provider), 1000);
        call(Kind::Throttled);
        assert_eq!(tally.counts(), Counts { calls: 4, throttled: 2 });
    }
}
