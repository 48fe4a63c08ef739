//! The provider: one place for all that is shared about something with a quota.
//!
//! A limit that lives in a service is made anew each time a layer is applied, and then 12 calls pass
//! a limit of 2 (tokio-rs/axum#2582). Here all state belongs to the [`Provider`]: what is paused, how
//! many calls are in flight, what ceiling was learned. Layers hold a handle to it; two layers, two
//! stacks or two clients made from one handle share it, and a fresh state needs a fresh provider.
//!
//! ```
//! use tower_herd::{Fleet, ProviderSettings};
//!
//! let fleet = Fleet::local();
//! // Nothing is known: the ceiling is learned from 429s.
//! let search = fleet.provider("search");
//! // Its plan allows 20 calls at a time.
//! let llm = fleet.configure("llm", ProviderSettings::new().ceiling(20))?;
//! // A part of it with limits of its own: pauses of one model do not stop the others.
//! let large = llm.scope("large-model");
//! assert_eq!(large.name(), llm.name());
//! # let _ = search;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```
//!
//! # What is shared, and how far
//!
//! The ceiling and its slots are the provider's: all scopes draw on them. A pause belongs to the
//! narrowest scope that the reply speaks of. A 429 met through a scope pauses that scope; when two
//! scopes were paused by 429s without a hint within a minute, the whole provider is.
#![cfg_attr(
    not(all(
        feature = "retry-after",
        feature = "fleet-limit",
        feature = "hashed-failover",
        feature = "breaker"
    )),
    allow(dead_code, unused_imports, reason = "each layer uses a part of it")
)]

#[cfg(feature = "breaker")]
mod breaking;
mod broken;
#[allow(dead_code, reason = "the fleet's lease and reports drive what is left")]
#[allow(clippy::collapsible_if, reason = "two steps of a rule read better as two")]
#[allow(
    clippy::unchecked_time_subtraction,
    reason = "a window less a part of itself; and `expect` would name a panic that cannot be"
)]
mod control;
mod durations;
mod fleet;
pub(crate) mod handover;
#[cfg(test)]
mod laws;
#[cfg(not(feature = "store"))]
#[path = "alone.rs"]
mod lease;
#[cfg(feature = "store")]
mod lease;
mod pause;
mod ramp;
mod reopening;
mod scope;
mod sensing;
mod settings;
mod slot;
mod tokens;
mod wait;
mod waiting;
#[allow(dead_code, reason = "a fleet's store fills it")]
mod wallet;
mod watch;

pub use fleet::Fleet;
#[cfg(feature = "store")]
pub use lease::LeaseStatus;
pub use pause::PauseReason;
pub use settings::{ProviderSettings, SettingsError};

#[cfg(feature = "breaker")]
pub(crate) use breaking::WatchedProbe;
pub(crate) use scope::Rest;
pub(crate) use sensing::{Caller, Sensing};
pub(crate) use slot::{Denied, Left, Place, Slot};
pub(crate) use tokens::{Booked, TokenWait, Unbooked};
pub(crate) use wait::{Admission, BROKEN, WaitFor};
pub(crate) use waiting::Waiting;
#[cfg(feature = "breaker")]
pub(crate) use watch::Effect;
#[cfg(any(feature = "breaker", feature = "budget"))]
pub(crate) use watch::Verdict;

use crate::{
    Clock, Time,
    gate::{Gate, Handle, QueueConfig},
    observe::Event,
    random::Seeds,
};
use control::Control;
use durations::Durations;
use scope::{Scope, Scopes};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Something with a quota that the fleet calls, or a scope of it. A handle: clones share everything.
///
/// See the [module](self).
#[derive(Clone)]
pub struct Provider {
    core: Arc<Core>,
    /// None: the provider itself.
    scope: Option<Arc<Scope>>,
}

/// What the handles of one provider share.
pub(crate) struct Core {
    name: Arc<str>,
    fleet: Arc<fleet::Shared>,
    settings: Mutex<Option<ProviderSettings>>,
    gate: Gate<Control>,
    tokens: tokens::Tokens,
    /// The pause of the whole provider.
    root: Scope,
    scopes: Mutex<Scopes>,
    /// Of its ramps; there once a layer was built for them.
    ramp: OnceLock<Mutex<ramp::Terms>>,
    /// Successes of calls admitted as the n-th in flight, n at least this, change the control.
    interest: AtomicU32,
    /// Congestion events so far: which calls were sent before the last one.
    stamp: AtomicU64,
    /// Which calls are measured: those whose number has none of these bits.
    sampling: AtomicU64,
    /// The quota of every success is looked for, not only that of a sample.
    follows_quota: AtomicBool,
    throttled: AtomicU64,
    /// When retries further in were last reported, in nanoseconds; 0: never.
    inner_retries: AtomicU64,
    /// The number of the next probe.
    probes: AtomicU32,
    /// The queue is held for an open breaker.
    held: AtomicBool,
    durations: Apart<Mutex<Durations>>,
    /// Until the head of a good reply, which is what a deadline cuts.
    heads: Apart<Mutex<Durations>>,
    aborts: AtomicBool,
    /// To the fleet's store, where there is one.
    link: Option<lease::Tie>,
    /// A sensor watches calls of it.
    sensor: AtomicBool,
    last_bare: Mutex<Option<(Arc<str>, Time)>>,
}

/// In cache lines of its own (processors fetch them in pairs), so that writing it does not slow down
/// those who read its neighbours on every call.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

/// What somebody who joins a provider's queue has to expect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outlook {
    /// What is left of its pause.
    pub(crate) pause: Duration,
    /// Until its turn, the pause aside.
    pub(crate) queue: Duration,
    /// How long a call takes there, once that is known.
    pub(crate) latency: Option<Duration>,
}

impl Handle for Arc<Core> {
    type Pacer = Control;
    fn gate(&self) -> &Gate<Control> {
        &self.gate
    }
}

/// Poison means that a panic passed by; every state here is whole at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    fn new(name: Arc<str>, fleet: Arc<fleet::Shared>, settings: Option<ProviderSettings>) -> Self {
        let known = settings.clone().unwrap_or_default();
        let mut queue = QueueConfig::default();
        queue.bound = known.queue;
        queue.age = known.batch_age;
        let link = lease::tie(&fleet);
        let led = link.is_some();
        let control = Control::new(control::Settings { led, ..(&known).into() });
        let gate = Gate::new(control.clone(), queue);
        if led {
            // Nothing is held until the store says so.
            gate.set_cap(0);
        }
        Core {
            name,
            fleet,
            interest: AtomicU32::new(control.interest()),
            gate,
            tokens: tokens::Tokens::new(&known, led),
            link,
            settings: Mutex::new(settings),
            root: Scope::default(),
            scopes: Mutex::default(),
            ramp: OnceLock::new(),
            stamp: AtomicU64::new(0),
            sampling: AtomicU64::new(sensing::SELDOM),
            follows_quota: AtomicBool::new(false),
            throttled: AtomicU64::new(0),
            inner_retries: AtomicU64::new(0),
            probes: AtomicU32::new(0),
            held: AtomicBool::new(false),
            durations: Apart(Mutex::default()),
            heads: Apart(Mutex::default()),
            aborts: known.aborts.into(),
            sensor: AtomicBool::new(false),
            last_bare: Mutex::default(),
        }
    }

    pub(crate) fn clock(&self) -> Clock {
        self.fleet.clock
    }

    fn observe<'a>(&'a self, event: impl FnOnce() -> Event<'a>) {
        let observer = &*self.fleet.observer;
        if observer.enabled() {
            observer.observe(&event());
        }
    }

    /// Changes the control under the gate's lock and publishes what the fast paths go by.
    fn control<R>(&self, change: impl FnOnce(&mut Control, u32, usize) -> R) -> R {
        let (result, from, to) = self.gate.change(|control, load| {
            let from = control.ceiling();
            let result = change(control, load.busy, load.waiting);
            self.interest.store(control.interest(), Ordering::Relaxed);
            self.stamp.store(control.stamp(), Ordering::Relaxed);
            (result, from, control.ceiling())
        });
        if from != to {
            self.observe(|| Event::Ceiling { provider: &self.name, from, to });
        }
        result
    }

    /// Takes over all settings but those of the control, which it gives back.
    fn adopt(&self, settings: &ProviderSettings) -> control::Settings {
        self.aborts.store(settings.aborts, Ordering::Relaxed);
        self.gate.configure(settings.queue, settings.batch_age);
        self.tokens.configure(settings);
        control::Settings { led: self.link.is_some(), ..settings.into() }
    }

    /// Pauses the whole provider; the wait in force after the merge.
    ///
    /// Two places hold this pause: `root` says when and why, to who asks; the control keeps its queue
    /// and the release after it. Both change under the gate's lock, the second by what the first says,
    /// and are never seen to differ by who holds it.
    fn pause_all(&self, control: &mut Control, now: Time, wait: Duration, reason: PauseReason) -> Duration {
        let held = self.root.change(|pause| pause.set(now, wait, reason));
        // (One that is held for a breaker learns of this one when that closes.)
        control.pause(now, now.saturating_add(held));
        held
    }

    /// Ends the pause of a scope or (none) of all of it, its breaker aside.
    fn clear(&self, on: Option<&Scope>, now: Time) {
        match on {
            Some(scope) => scope.change(|pause| pause.clear(now)),
            None => self.control(|control, _, _| {
                self.root.change(|pause| pause.clear(now));
                control.pause_clear(now);
            }),
        }
    }

    /// What a call usually takes to the head of its reply: as long as every other one, or less. Who gives it
    /// less time than that will more likely lose it than not. None: too little is known.
    pub(crate) fn usually(&self) -> Option<Duration> {
        self.heads_within(0.5)
    }

    /// What nearly every call takes.
    fn nearly_always(&self) -> Option<Duration> {
        self.heads_within(0.95)
    }

    fn heads_within(&self, share: f64) -> Option<Duration> {
        /// So many calls, or it is hearsay.
        const LEAST: u32 = 8;
        let heads = lock(&self.heads.0);
        if heads.total() >= LEAST { heads.percentile(share) } else { None }
    }

    /// How long the slot of a dropped call stays taken.
    fn linger(&self) -> Duration {
        const LONGEST: Duration = Duration::from_secs(10);
        if self.aborts.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        lock(&self.durations.0).percentile(0.95).map_or(LONGEST, |p95| p95.min(LONGEST))
    }
}

impl Provider {
    fn of(core: Arc<Core>) -> Self {
        Provider { core, scope: None }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.core.name
    }

    /// The name of the scope, if this handle is one of a scope.
    #[must_use]
    pub fn scope_name(&self) -> Option<&Arc<str>> {
        self.scope.as_deref().and_then(|scope| scope.name.as_ref())
    }

    /// A scope of this provider (model, route, account key): the same one each time it is asked for.
    /// A scope of a scope is a scope of the provider.
    #[must_use]
    pub fn scope(&self, name: &str) -> Provider {
        let scope = lock(&self.core.scopes).get(name, || self.core.clock().now());
        Provider { core: self.core.clone(), scope: Some(scope) }
    }

    /// The fleet's clock.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.core.clock()
    }

    /// The fleet's seeds.
    #[must_use]
    pub fn seeds(&self) -> &Seeds {
        &self.core.fleet.seeds
    }

    /// Tells the fleet's observer; the event is built only if it listens.
    #[inline]
    pub fn observe<'a>(&'a self, event: impl FnOnce() -> Event<'a>) {
        self.core.observe(event);
    }

    /// Gives the provider its settings. The same settings may be given again, by another stack;
    /// others are an error, since both cannot be true.
    pub fn configure(&self, settings: ProviderSettings) -> Result<(), SettingsError> {
        settings.check(&self.core.name)?;
        let mut known = lock(&self.core.settings);
        if let Some(known) = &*known {
            if *known == settings {
                return Ok(());
            }
            return Err(SettingsError {
                provider: self.core.name.to_string(),
                field: "all",
                why: "differ from those it already has; give each provider its settings in one place",
            });
        }
        let new = self.core.adopt(&settings);
        *known = Some(settings);
        // Before the observer hears of the new ceiling: it may ask for anything.
        drop(known);
        self.core.control(|control, _, _| control.configure(new));
        self.core.tell_limits();
        Ok(())
    }

    /// Gives the provider other settings while it runs, as an operator: calls in flight, queue, pause and
    /// breaker stay, and so does the learned ceiling unless another ceiling or rate is given. A ceiling below
    /// what is in flight cuts nobody off; it admits nobody until enough calls have ended.
    ///
    /// # Errors
    ///
    /// Says which field cannot be; then nothing has changed.
    pub fn reconfigure(&self, settings: ProviderSettings) -> Result<(), SettingsError> {
        settings.check(&self.core.name)?;
        let mut known = lock(&self.core.settings);
        let new = self.core.adopt(&settings);
        *known = Some(settings);
        drop(known);
        self.core.control(|control, _, _| control.reconfigure(new));
        self.core.tell_limits();
        Ok(())
    }

    /// Pauses this scope (or all of the provider) for this long, as an operator.
    pub fn pause_for(&self, wait: Duration) {
        self.pause(self.core.clock().now(), wait, PauseReason::Operator, self.scope.as_deref());
    }

    /// Ends its pause now, whatever the reason; an open breaker closes.
    pub fn clear_pause(&self) {
        let now = self.core.clock().now();
        let on = self.scope.as_deref();
        #[cfg(feature = "breaker")]
        self.core.close_breaker(on, now, |_, _| true);
        self.core.clear(on, now);
        self.core.tell_cleared(on);
    }

    /// Until when nobody calls this scope, and why; none if it is open.
    #[must_use]
    pub fn paused_until(&self) -> Option<(Instant, PauseReason)> {
        self.paused().map(|(until, reason)| (self.core.clock().instant(until), reason))
    }

    /// The ceiling in force: calls in flight that are admitted at most.
    #[must_use]
    pub fn ceiling(&self) -> u32 {
        self.core.gate.cap()
    }

    /// Slots that are taken: calls in flight, and dropped calls that may still run there.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.core.gate.busy_at(|| self.core.clock().now())
    }

    /// Calls that wait for a slot.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.core.gate.waiting()
    }

    /// Replies so far that said "not at this rate", over all scopes.
    #[must_use]
    pub fn throttled(&self) -> u64 {
        self.core.throttled.load(Ordering::Relaxed)
    }

    /// What decides which calls of this scope (or all of the provider) are not sent.
    #[cfg(feature = "budget")]
    pub(crate) fn throttle(&self) -> &Arc<crate::budget::Throttle> {
        self.scope.as_deref().unwrap_or(&self.core.root).watch.throttle(&self.core.fleet.seeds)
    }

    /// Whether retries further in are to be reported now: once a minute.
    #[cfg(feature = "attempts")]
    pub(crate) fn notes_inner_retries(&self) -> bool {
        const MINUTE: u64 = 60_000_000_000;
        let now = self.core.clock().now().as_nanos().saturating_add(1);
        let is_due = |last| (last == 0 || now.saturating_sub(last) >= MINUTE).then_some(now);
        self.core.inner_retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok()
    }

    /// Tells what is called through this handle from other providers and other scopes: no other rung has
    /// this number.
    pub(crate) fn number(&self) -> usize {
        self.scope.as_ref().map_or_else(|| handover::address(&self.core), |scope| Arc::as_ptr(scope).addr())
    }

    /// A sensor was built for it.
    pub(crate) fn has_sensor(&self) {
        self.core.sensor.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The later of the scope's and the provider's pause. No clock is read when there is none.
    pub(crate) fn paused(&self) -> Option<(Time, PauseReason)> {
        let none = self.core.root.is_open() && self.scope.as_ref().is_none_or(|scope| scope.is_open());
        if none { None } else { self.paused_at(self.core.clock().now()) }
    }

    #[cold]
    fn paused_at(&self, now: Time) -> Option<(Time, PauseReason)> {
        let root = self.core.root.paused(now);
        if root.is_none_or(|(_, reason)| reason != PauseReason::Broken) {
            // It was switched off while it was open.
            #[cfg(feature = "breaker")]
            self.core.let_go(now);
        }
        let scope = self.scope.as_ref().and_then(|scope| scope.paused(now));
        root.into_iter().chain(scope).max_by_key(|(until, _)| *until)
    }

    /// Sets a pause of `on` (none: the whole provider), and says so.
    pub(crate) fn pause(&self, now: Time, wait: Duration, reason: PauseReason, on: Option<&Scope>) {
        let held = match on {
            Some(scope) => scope.change(|pause| pause.set(now, wait, reason)),
            None => self.core.control(|control, _, _| self.core.pause_all(control, now, wait, reason)),
        };
        self.say_paused(held, reason, on);
    }

    fn say_paused(&self, held: Duration, reason: PauseReason, on: Option<&Scope>) {
        if !held.is_zero() {
            self.core.tell_pause(on, held, reason);
            self.core.observe(|| Event::Paused {
                provider: &self.core.name,
                scope: on.and_then(|scope| scope.name.as_deref()),
                reason: reason.as_str(),
                wait: held,
            });
        }
    }

    /// How long a call that joins the queue now would wait, as far as one can tell.
    pub(crate) fn estimate(&self, now: Time) -> Duration {
        let outlook = self.outlook(now);
        outlook.pause.saturating_add(outlook.queue)
    }

    /// How long a call that joins the queue now waits at least.
    pub(crate) fn least(&self, now: Time) -> Duration {
        let pause = self.paused_at(now).map_or(Duration::ZERO, |(until, _)| until.saturating_since(now));
        let after = now.saturating_add(pause);
        pause.saturating_add(
            self.core.gate.look(|control, load| control.least_wait(after, load.waiting, load.busy)),
        )
    }

    /// Whether others' processes stand in the same line.
    pub(crate) fn is_led(&self) -> bool {
        self.core.link.is_some()
    }

    /// What a call that joins the queue now has before it.
    pub(crate) fn outlook(&self, now: Time) -> Outlook {
        self.outlook_behind(now, |waiting| waiting)
    }

    /// The same for a call that is in the queue already, at its end.
    pub(crate) fn outlook_of_last(&self, now: Time) -> Outlook {
        self.outlook_behind(now, |waiting| waiting.saturating_sub(1))
    }

    fn outlook_behind(&self, now: Time, before: fn(usize) -> usize) -> Outlook {
        let pause = self.paused_at(now).map_or(Duration::ZERO, |(until, _)| until.saturating_since(now));
        self.core.gate.look(|control, load| {
            let wait = control.estimate_wait(now, before(load.waiting), load.busy);
            let own = control.paused_until(now).map_or(Duration::ZERO, |until| until.saturating_since(now));
            Outlook { pause, queue: wait.saturating_sub(own), latency: control.latency() }
        })
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider")
            .field("name", &self.core.name)
            .field("scope", &self.scope_name())
            .field("ceiling", &self.ceiling())
            .field("in_flight", &self.in_flight())
            .field("paused_until", &self.paused_until())
            .finish_non_exhaustive()
    }
}
