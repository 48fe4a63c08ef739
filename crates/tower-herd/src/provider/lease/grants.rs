//! What a provider tells the store of itself, and what it does with the answer.

use super::{Core, Known, Link, Shared, lock};
#[cfg(feature = "breaker")]
use crate::store::Opened;
use crate::{
    PauseReason, Time,
    observe::Event,
    provider::Scope,
    store::{Epoch, Grant, Lease, Limits, Load, News, RateLimit, Report, ScopeGrant, StoreError},
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// A probe that nobody here has sent after this time may be another process's.
const LEAVE: Duration = Duration::from_secs(3);

impl Core {
    /// Binds the gate to what will be told, and tells it.
    pub(super) fn report(&self, link: &Link, offer: Epoch) -> Report {
        link.rung.store(false, Ordering::Release);
        let now = self.clock().now();
        self.tell_ramps(link);
        self.return_leaves(link, now);
        let leave = link.has_leave(now);
        let load = self.bind(link, |lease, at, load, paused| Some(lease.bind(at, load, paused, leave)));
        let served = self.control(|control, _, _| control.take_served());
        let mut report = lock(&link.lease).report(link.clock.now(), load, offer);
        report.served = served;
        report.limits = self.limits();
        report.rates = self.rate_reports(link, now);
        report
    }

    /// The report of a process that leaves: it admits nobody any more.
    pub(super) fn last_report(&self, link: &Link, offer: Epoch) -> Report {
        let load = self.bind(link, |lease, _, _, _| Some(lease.leave()));
        let mut report = lock(&link.lease).report(link.clock.now(), load, offer);
        report.limits = self.limits();
        report.rates = self.rate_reports(link, self.clock().now());
        report
    }

    fn limits(&self) -> Limits {
        let known = lock(&self.settings).clone().unwrap_or_default();
        let rate = |per_minute: Option<u32>, burst: Option<u32>| {
            per_minute.map(|per_minute| RateLimit {
                per_minute: per_minute.into(),
                burst: burst.unwrap_or(per_minute).into(),
            })
        };
        // Providers enforce their minute by the second or so (OpenAI): two seconds' worth at once.
        let requests = known.requests_per_minute.map(|n| (n / 30).max(1));
        Limits {
            generation: known.generation,
            floor: known.floor,
            start: known.start,
            ceiling: known.ceiling,
            requests: rate(known.requests_per_minute, requests),
            tokens: rate(known.tokens_per_minute, known.token_burst),
        }
    }

    /// The answer came.
    pub(super) fn granted(&self, link: &Link, grant: &Grant) {
        let mut takes = false;
        let load = self.bind(link, |lease: &mut Lease, at, load: Load, _| {
            let (bond, rest) = lease.granted(at, load, grant);
            takes = rest;
            bond
        });
        if !takes {
            return;
        }
        // More good replies are told of only where they make the ceiling grow.
        let counts = load.busy.saturating_add(load.waiting) >= load.cap;
        let share = lock(&link.lease).share(grant.ceiling.into());
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.control(|control, _, _| {
            control.follow(grant.generation, counts, grant.ceiling, share);
            control.queued(grant.queued);
        });
        let now = self.clock().now();
        let (from, disagrees) = {
            let mut shared = lock(&link.shared);
            shared.lost = false;
            let disagrees = grant.disagree && !shared.disagrees;
            shared.disagrees = grant.disagree;
            (std::mem::replace(&mut shared.ceiling, grant.ceiling), disagrees)
        };
        if from != grant.ceiling {
            self.observe(|| Event::Ceiling { provider: &self.name, from, to: grant.ceiling });
        }
        if disagrees {
            self.observe(|| Event::Inconsistent {
                provider: &self.name,
                what: "members of the fleet give this provider different limits: the lowest count",
            });
        }
        self.meet(link, grant, now);
        for told in &grant.scopes {
            self.follow_scope(link, told, now);
        }
        #[cfg(feature = "breaker")]
        self.raise_alone(link);
        self.keep_rates(link, grant, now);
    }

    /// No answer came, or none that is one.
    pub(super) fn failed(&self, link: &Link, error: &StoreError) {
        let begins = {
            let mut lease = lock(&link.lease);
            lease.failed(link.clock.now());
            lease.outage(error.kind())
        };
        self.observe(|| Event::Lease { provider: &self.name, error: Some(error), begins });
        self.check_lease();
        // One that was never held is lost, too: the policy says what goes on without.
        let is_lost = lock(&link.lease).is_lapsed();
        if is_lost {
            self.lapse(link);
        }
    }

    /// The store is lost: what it decided, this process now decides for itself.
    #[cold]
    pub(super) fn lost(&self, link: &Link) {
        let begins = {
            let mut shared = lock(&link.shared);
            !std::mem::replace(&mut shared.lost, true)
        };
        // (Where none was ever held, none is lost.)
        if begins && lock(&link.lease).was_held() {
            self.observe(|| Event::Lease { provider: &self.name, error: None, begins: false });
        }
        self.fend(link);
        #[cfg(feature = "breaker")]
        let alerts = std::mem::take(&mut lock(&link.shared).alerts);
        #[cfg(feature = "breaker")]
        for (scope, alert) in alerts {
            // Better twice than never.
            self.with_scope(scope.as_deref(), |core, on| core.raise(on, &alert));
        }
    }

    /// A scope by name; none: the provider itself.
    fn with_scope<R>(&self, scope: Option<&str>, with: impl FnOnce(&Core, Option<&Scope>) -> R) -> R {
        match scope {
            None => with(self, None),
            Some(name) => {
                let scope = lock(&self.scopes).get(name, || self.clock().now());
                with(self, Some(&scope))
            }
        }
    }

    /// What the book has. One that has begun anew may have lost what this process knows: it is told again, or it
    /// would hold only those who saw it, and be ended for them by the next thing that is told of its scope.
    fn meet(&self, link: &Link, grant: &Grant, now: Time) {
        let told = |name: Option<&str>| {
            let mut scopes = grant.scopes.iter();
            scopes.find(|told| told.scope.as_deref() == name).map_or(0, |told| told.generation)
        };
        {
            let mut shared = lock(&link.shared);
            shared.in_book = grant.scopes.iter().map(|told| told.scope.clone()).collect();
            let before = shared.epoch.replace(grant.epoch);
            if before.is_none_or(|before| before == grant.epoch) {
                return;
            }
        }
        let named = lock(&self.scopes).all();
        let named = named.iter().map(|(_, scope)| Some(&**scope));
        for on in std::iter::once(None).chain(named) {
            let told = told(on.and_then(|on| on.name.as_deref()));
            if told < link.generation(on) || told == 0 {
                self.tell_again(link, on, now);
            }
        }
        lock(&link.shared).scopes.iter_mut().for_each(|(name, known)| {
            if told(name.as_deref()) < known.generation {
                // It counts from the beginning.
                known.generation = 0;
            }
        });
    }

    fn tell_again(&self, link: &Link, on: Option<&Scope>, now: Time) {
        let scope = on.unwrap_or(&self.root);
        if let Some((until, reason)) = scope.change(|pause| pause.own(now)) {
            self.tell_pause(on, until.saturating_since(now), reason);
        }
        #[cfg(feature = "breaker")]
        {
            // (What an operator has opened is his, and only here.)
            let open = scope.change(|pause| {
                let broken = pause.broken().filter(|broken| !broken.is_forced())?;
                Some((broken.until().saturating_since(now), broken.probes()))
            });
            if let Some((left, probes)) = open {
                link.tell(super::opened(on, left, probes));
            }
        }
        #[cfg(not(feature = "breaker"))]
        let _ = link;
    }

    /// Alerts of breakers for which the book has no room: nobody else raises them.
    #[cfg(feature = "breaker")]
    fn raise_alone(&self, link: &Link) {
        let alone: Vec<_> = {
            let mut shared = lock(&link.shared);
            let alerts = std::mem::take(&mut shared.alerts);
            let lease = lock(&link.lease);
            let (fleets, alone) = alerts.into_iter().partition(|(name, _)| {
                let is_it = |news: &News| matches!(news, News::Opened { scope, .. } if scope.as_deref() == name.as_deref());
                shared.has(name.as_deref()) || lease.knows_of(is_it)
            });
            shared.alerts = fleets;
            alone
        };
        for (scope, alert) in alone {
            self.with_scope(scope.as_deref(), |core, on| core.raise(on, &alert));
        }
    }

    fn follow_scope(&self, link: &Link, told: &ScopeGrant, now: Time) {
        self.with_scope(told.scope.as_deref(), |core, on| {
            let key = on.and_then(|on| on.name.clone());
            let (news, others) = {
                let mut shared = lock(&link.shared);
                let known = shared.known(key);
                let news = told.generation > known.generation;
                known.generation = known.generation.max(told.generation);
                (news, known.others((told.calls, told.throttled)))
            };
            let scope = on.unwrap_or(&core.root);
            scope.watch.tally.add(others.0, others.1);
            if let Some(leave) = &told.leave {
                let until = now.saturating_add(Duration::from_millis(leave.within).min(LEAVE));
                scope.give_leave(until);
                link.give_leave(until);
            }
            if news {
                core.follow_pause(link, on, told, now);
            }
            #[cfg(feature = "breaker")]
            core.follow_breaker(link, on, told.open.as_ref(), news, now);
        });
    }

    /// The fleet's pause is this one's.
    fn follow_pause(&self, link: &Link, on: Option<&Scope>, told: &ScopeGrant, now: Time) {
        match told.pause {
            Some(pause) => {
                let wait = Duration::from_millis(pause.wait);
                let before = on.unwrap_or(&self.root).paused(now).map_or(now, |(until, _)| until);
                let held = match on {
                    Some(scope) => scope.change(|own| own.set(now, wait, pause.reason)),
                    None => self.control(|control, _, _| self.pause_all(control, now, wait, pause.reason)),
                };
                if now.saturating_add(held) > before {
                    self.say_paused(on, held, pause.reason);
                }
            }
            // One that the fleet does not know of yet stays.
            None if lock(&link.lease).knows_of(|news| {
                matches!(news, News::Paused { scope, .. } if scope.as_deref() == on.and_then(|on| on.name.as_deref()))
            }) => {}
            None => self.clear(on, now),
        }
    }

    #[cfg(feature = "breaker")]
    fn follow_breaker(&self, link: &Link, on: Option<&Scope>, open: Option<&Opened>, news: bool, now: Time) {
        let scope = on.unwrap_or(&self.root);
        let key = on.and_then(|on| on.name.clone());
        let unsaid = lock(&link.lease).knows_of(
            |news| matches!(news, News::Opened { scope, .. } if scope.as_deref() == key.as_deref()),
        );
        match open {
            Some(open) => {
                if !scope.is_broken() {
                    self.open_too(on, open, now);
                }
                if !unsaid {
                    // It was decided whose the alert is.
                    let alerts = lock(&link.shared).take_alerts(&key);
                    if open.yours {
                        alerts.iter().for_each(|alert| self.raise(on, alert));
                    }
                }
            }
            None if news && !unsaid && scope.is_broken() => self.close_too(on, now),
            None => {}
        }
    }

    /// Gives leave for probes back that nobody here has used in time.
    fn return_leaves(&self, link: &Link, now: Time) {
        let scopes = lock(&self.scopes).all();
        for scope in scopes.iter().map(|(_, scope)| &**scope).chain([&self.root]) {
            let until = scope.leave();
            if until > Time::ZERO && until <= now {
                scope.give_leave(Time::ZERO);
                let scope = scope.name.as_deref().map(str::to_owned);
                lock(&link.lease).tell(link.clock.now(), News::Probed { scope, failed: false });
            }
        }
    }

    /// Calls and throttles of ramps since they were last told.
    fn tell_ramps(&self, link: &Link) {
        let mut told = Vec::new();
        let scopes = lock(&self.scopes).all();
        {
            let mut shared = lock(&link.shared);
            let mut tell = |name: Option<Arc<str>>, scope: &Scope| {
                if let Some((calls, throttled)) = scope.watch.tally.own() {
                    let known = shared.known(name.clone());
                    let news = (calls.saturating_sub(known.told.0), throttled.saturating_sub(known.told.1));
                    if news.0 > 0 {
                        known.told = (calls, throttled);
                        known.fresh = (known.fresh.0 + news.0, known.fresh.1 + news.1);
                        told.push((name, news));
                    }
                }
            };
            tell(None, &self.root);
            for (name, scope) in scopes {
                tell(Some(name), &scope);
            }
        }
        let now = link.clock.now();
        let mut lease = lock(&link.lease);
        for (name, (calls, throttled)) in told {
            let scope = name.as_deref().map(str::to_owned);
            lease.tell(now, News::Ramped { scope, calls, throttled });
        }
    }
}

impl Known {
    /// What other processes have counted since the last grant.
    fn others(&mut self, fleet: (u64, u64)) -> (u64, u64) {
        // A store that has lost its data counts anew; one that was never heard of has a past of no interest.
        let since = |now: u64, before: u64| if now >= before { now - before } else { now };
        let before = self.fleet.replace(fleet).unwrap_or(fleet);
        let fresh = std::mem::take(&mut self.fresh);
        (since(fleet.0, before.0).saturating_sub(fresh.0), since(fleet.1, before.1).saturating_sub(fresh.1))
    }
}

impl Shared {
    /// Whether the book has something of this scope.
    pub(super) fn has(&self, scope: Option<&str>) -> bool {
        self.in_book.iter().any(|name| name.as_deref() == scope)
    }

    fn known(&mut self, scope: Option<Arc<str>>) -> &mut Known {
        /// As many as a store keeps, and some: more are forgotten.
        const MANY: usize = 256;
        if self.scopes.len() >= MANY && !self.scopes.contains_key(&scope) {
            self.scopes.clear();
        }
        self.scopes.entry(scope).or_default()
    }

    #[cfg(feature = "breaker")]
    fn take_alerts(&mut self, scope: &Option<Arc<str>>) -> Vec<crate::breaker::Alert> {
        let (mine, rest) = std::mem::take(&mut self.alerts).into_iter().partition(|(name, _)| name == scope);
        self.alerts = rest;
        let mine: Vec<(Option<Arc<str>>, crate::breaker::Alert)> = mine;
        mine.into_iter().map(|(_, alert)| alert).collect()
    }
}

/// The reason is that of a grant; kept apart from [`Provider::say_paused`], which tells the store as well.
impl Core {
    fn say_paused(&self, on: Option<&Scope>, held: Duration, reason: PauseReason) {
        if !held.is_zero() {
            self.observe(|| Event::Paused {
                provider: &self.name,
                scope: on.and_then(|scope| scope.name.as_deref()),
                reason: reason.as_str(),
                wait: held,
            });
        }
    }
}
