//! What all layers over one store share.

use super::{
    Claim, Deferral, DeferredBy, Grant, HolderId, LocalTokens, OnOutage, RetryTokens, Schedule, StoreAlert,
    Token, Wait, WaitCause, outage::Outage,
};
use crate::{
    Clock, Refusal, RefusalKind, SettingsError, Switch,
    observe::{Event, Observe, Trace},
    random::{Random, Seeds},
};
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Work of a store that is awaited.
pub(super) type Work<A> = Pin<Box<dyn Future<Output = A> + Send>>;

/// How a store is asked, and what is done while it cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct TokenSettings {
    /// The longest that one question to the store may take. Default 250 ms.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub timeout: Duration,
    /// What is done with retries while the store cannot be asked. Default [`OnOutage::Local`].
    pub on_outage: OnOutage,
    /// A job that was refused comes back after `max(wait, this) + U(0, this)`: so that those who were refused
    /// together do not come back together, and not at once either. Default 1 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub min_wait: Duration,
    /// A store that could not be asked is asked again, by one caller, after half to all of this; each failure doubles
    /// it. Default 1 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub first_ask: Duration,
    /// The longest time between two such questions. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub last_ask: Duration,
    /// Fixes what is drawn, for tests. None (the default): the operating system's randomness.
    pub seed: Option<u64>,
}

impl Default for TokenSettings {
    fn default() -> Self {
        TokenSettings {
            timeout: Duration::from_millis(250),
            on_outage: OnOutage::Local,
            min_wait: Duration::from_secs(1),
            first_ask: Duration::from_secs(1),
            last_ask: Duration::from_secs(30),
            seed: None,
        }
    }
}

impl TokenSettings {
    /// 250 ms for a question; without a store, the tokens of this process.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// The longest that one question to the store may take.
    #[must_use]
    pub fn timeout(mut self, time: Duration) -> Self {
        self.timeout = time;
        self
    }
    /// What is done while the store cannot be asked.
    #[must_use]
    pub fn on_outage(mut self, policy: OnOutage) -> Self {
        self.on_outage = policy;
        self
    }
    /// The least wait of a job that was refused, and the width of its spread.
    #[must_use]
    pub fn min_wait(mut self, wait: Duration) -> Self {
        self.min_wait = wait;
        self
    }
    /// When a store that could not be asked is asked again: the first time, and at most.
    #[must_use]
    pub fn asks(mut self, first: Duration, last: Duration) -> Self {
        (self.first_ask, self.last_ask) = (first, last);
        self
    }
    /// Fixes what is drawn, for tests.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    fn check(&self, name: &str) -> Result<(), SettingsError> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let wrong = |field, why| Err(SettingsError { provider: name.into(), field, why });
        if self.timeout.is_zero() || self.timeout > DAY {
            return wrong("timeout", "must be above zero, and 24 h at most");
        }
        if self.min_wait < Duration::from_millis(1) || self.min_wait > DAY {
            return wrong("min_wait", "must be 1 ms to 24 h, or refused jobs would come back at once");
        }
        if self.first_ask < Duration::from_millis(1) {
            return wrong(
                "first_ask",
                "must be at least 1 ms, or a dead store would cost each job its timeout",
            );
        }
        if self.last_ask < self.first_ask || self.last_ask > DAY {
            return wrong("last_ask", "must not be below the first, and 24 h at most");
        }
        Ok(())
    }
}

/// A store and what its layers share: its name, whether it can be asked, and the tokens of this process that stand in
/// for it. A handle: clones are the same. See the [module](super).
pub struct Tokens<T>(Arc<Inner<T>>);

type Listener = Box<dyn Fn(&StoreAlert) + Send + Sync>;

struct Inner<T> {
    name: Arc<str>,
    store: T,
    settings: TokenSettings,
    clock: Clock,
    outage: Mutex<Outage>,
    // What stands in for the store.
    warm: LocalTokens,
    random: Mutex<Random>,
    listener: OnceLock<Listener>,
    observer: OnceLock<Box<dyn Observe>>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    granted: AtomicU64,
    deferred: AtomicU64,
    running: AtomicU64,
    dropped: AtomicU64,
    stranger: AtomicBool,
}

/// Counts of one process, since its start. Refusals and failures are counted apart (sidekiq/sidekiq#6010).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenCounts {
    /// Runs that were granted.
    pub granted: u64,
    /// Jobs that were refused, and run later.
    pub deferred: u64,
    /// Granted runs that go on.
    pub running: u64,
    /// Granted runs whose caller dropped them, or that panicked.
    pub dropped: u64,
}

impl<T> Clone for Tokens<T> {
    fn clone(&self) -> Self {
        Tokens(self.0.clone())
    }
}

impl<T: RetryTokens> Tokens<T> {
    /// A store under a name, which is that of its refusals, events and alerts.
    #[must_use]
    pub fn new(name: &str, store: T) -> Self {
        Self::build(name, store, TokenSettings::default())
    }

    /// With settings of one's own.
    ///
    /// # Errors
    ///
    /// If they cannot be meant.
    pub fn with(name: &str, store: T, settings: TokenSettings) -> Result<Self, SettingsError> {
        settings.check(name)?;
        Ok(Self::build(name, store, settings))
    }

    fn build(name: &str, store: T, settings: TokenSettings) -> Self {
        let seeds = settings.seed.map_or_else(Seeds::from_entropy, Seeds::from_seed);
        // As many tokens as a store of one process has; it is empty where the store is such a one.
        let warm = LocalTokens::seeded(65_536, seeds.session().bits());
        Tokens(Arc::new(Inner {
            name: name.into(),
            store,
            settings,
            clock: Clock::new(),
            outage: Mutex::default(),
            warm,
            random: Mutex::new(seeds.session()),
            listener: OnceLock::new(),
            observer: OnceLock::new(),
            counts: Counts::default(),
        }))
    }

    /// Hears of each outage of the store, once. The first listener that is given is the one. It runs on the path of a
    /// job: hand the alert on, and do not block. Without one, `tracing` tells (`WARN`, message `alert`).
    #[must_use]
    pub fn on_alert(self, listener: impl Fn(&StoreAlert) + Send + Sync + 'static) -> Self {
        self.0.listener.get_or_init(|| Box::new(listener));
        self
    }

    /// Hears of each event. The first observer that is given is the one; default [`Trace`].
    #[must_use]
    pub fn observe(self, observer: impl Observe) -> Self {
        self.0.observer.get_or_init(|| Box::new(observer));
        self
    }
}

impl<T> Tokens<T> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &T {
        &self.0.store
    }

    /// Whether the store could not be asked the last time.
    #[must_use]
    pub fn is_down(&self) -> bool {
        lock(&self.0.outage).is_down()
    }

    /// What has happened so far in this process.
    #[must_use]
    pub fn counts(&self) -> TokenCounts {
        let counts = &self.0.counts;
        TokenCounts {
            granted: counts.granted.load(Relaxed),
            deferred: counts.deferred.load(Relaxed),
            running: counts.running.load(Relaxed),
            dropped: counts.dropped.load(Relaxed),
        }
    }

    pub(super) fn shared_name(&self) -> Arc<str> {
        self.0.name.clone()
    }

    pub(super) fn clock(&self) -> Clock {
        self.0.clock
    }

    pub(super) fn policy(&self) -> OnOutage {
        self.0.settings.on_outage
    }

    fn tell(&self, event: &Event<'_>) {
        let observer: &dyn Observe = self.0.observer.get().map_or(&Trace, |observer| &**observer);
        if observer.enabled() {
            observer.observe(event);
        }
    }

    pub(super) fn told_breaker(&self, dependency: &str, to: &'static str, wait: Option<Duration>) {
        self.tell(&Event::Breaker { provider: dependency, scope: None, to, wait });
    }

    pub(super) fn would_refuse(&self, switch: &Switch) {
        switch.count();
        let kind = RefusalKind::NotBefore;
        self.tell(&Event::WouldRefuse { provider: self.name(), scope: None, kind });
    }

    /// Uniform in `[0, 1)`.
    pub(super) fn unit(&self) -> f64 {
        lock(&self.0.random).unit()
    }

    pub(super) fn bits(&self) -> u64 {
        lock(&self.0.random).bits()
    }

    /// The refusal of a job whose key is closed, and when the job is to come back.
    pub(super) fn refuse(&self, why: &'static str, about: Arc<str>, wait: Wait) -> (Refusal, Deferral) {
        self.0.counts.deferred.fetch_add(1, Relaxed);
        let kind = RefusalKind::NotBefore;
        // Of a job's key there are too many for a label.
        self.tell(&Event::Refused { provider: self.name(), scope: None, kind });
        let least = self.0.settings.min_wait;
        let spread = lock(&self.0.random).up_to(least);
        let come_back = wait.wait.max(least).saturating_add(spread);
        let clock = self.clock();
        let at = clock.instant(clock.now().saturating_add(come_back));
        let refusal = Refusal::new(kind, why, self.0.name.clone(), Some(at)).with_scope(Some(about));
        let deferral =
            Deferral { wait: come_back, streak: wait.streak, why: DeferredBy::Refusal(wait.cause) };
        (refusal.with_not_before(wait), deferral)
    }

    pub(super) fn started(&self) {
        self.0.counts.granted.fetch_add(1, Relaxed);
        self.0.counts.running.fetch_add(1, Relaxed);
    }

    pub(super) fn ended(&self, settled: bool) {
        self.0.counts.running.fetch_sub(1, Relaxed);
        self.0.counts.dropped.fetch_add(u64::from(!settled), Relaxed);
    }

    /// A retry of a key that tokens in memory do not know.
    #[cold]
    pub(super) fn stranger(&self, attempt: u32) {
        if !self.0.counts.stranger.swap(true, Relaxed) {
            tracing::warn!(
                target: "tower_herd",
                store = self.name(),
                attempt,
                "a retry of a job that this process does not know: its tokens are in memory, and where several \
                 processes share a queue they need a store in common (or this one was started anew)"
            );
        }
    }
}

impl<T: RetryTokens> Tokens<T> {
    /// Asks the store, if it can be asked; none if not. A local store is not asked this way.
    pub(super) async fn ask<A>(&self, work: impl Future<Output = Result<A, T::Error>>) -> Option<A> {
        let Inner { settings, clock, outage, .. } = &*self.0;
        if !lock(outage).may_ask(clock.now(), settings.timeout.saturating_mul(2)) {
            return None;
        }
        match tokio::time::timeout(settings.timeout, work).await {
            Ok(Ok(answer)) => {
                if lock(outage).answered() {
                    tracing::info!(target: "tower_herd", store = self.name(), "the token store answers again");
                    self.tell(&Event::Store { store: self.name(), down: false });
                }
                Some(answer)
            }
            Ok(Err(error)) => {
                self.failed(&error);
                None
            }
            Err(_) => {
                self.failed(&NoAnswer(settings.timeout));
                None
            }
        }
    }

    #[cold]
    fn failed(&self, error: &(dyn Error + 'static)) {
        let Inner { settings, clock, outage, .. } = &*self.0;
        let u = self.unit();
        if !lock(outage).failed(clock.now(), settings.first_ask, settings.last_ask, u) {
            return;
        }
        self.tell(&Event::Store { store: self.name(), down: true });
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        let alert = StoreAlert { store: self.name().into(), error: text, policy: settings.on_outage };
        tracing::warn!(
            target: "tower_herd",
            kind = "store_down",
            store = alert.store,
            error = alert.error,
            policy = alert.policy.as_str(),
            "alert"
        );
        if let Some(listener) = self.0.listener.get() {
            listener(&alert);
        }
    }

    /// How long the store is not asked.
    pub(super) fn outage_wait(&self) -> Duration {
        // Some caller may be asking now.
        let least = self.0.settings.timeout.max(Duration::from_millis(1));
        lock(&self.0.outage).wait(self.0.clock.now()).max(least)
    }

    /// Keeps the tokens of this process as they were told.
    fn note(&self, key: &str, holder: Option<HolderId>, wait: Duration, streak: u32) {
        if self.policy() == OnOutage::Local {
            self.0.warm.note(key, holder, wait, streak);
        }
    }

    /// A claim, by the store or by what stands in for it.
    pub(super) async fn claim(&self, key: &str, schedule: &Schedule) -> Option<(Claim, Source)> {
        if let Some(local) = self.0.store.local() {
            return Some((local.claim_now(key, schedule), Source::Store));
        }
        match self.ask(self.0.store.claim(key, schedule)).await {
            Some(claim) => {
                match claim {
                    Claim::Granted(Grant { holder, next_in, streak }) => {
                        self.note(key, Some(holder), next_in, streak);
                    }
                    Claim::NotBefore(Wait { wait, streak, .. }) => self.note(key, None, wait, streak),
                }
                Some((claim, Source::Store))
            }
            None if self.policy() == OnOutage::Local => {
                Some((self.0.warm.claim_now(key, schedule), Source::Warm))
            }
            None => None,
        }
    }

    /// An extension, where the grant came from.
    pub(super) async fn extend(
        &self,
        key: &str,
        holder: HolderId,
        at_least: Duration,
        source: Source,
    ) -> Option<bool> {
        if let Some(local) = self.0.store.local() {
            return Some(local.extend_now(key, holder, at_least));
        }
        let warm = self.0.warm.extend_now(key, holder, at_least);
        match source {
            Source::Store => self.ask(self.0.store.extend(key, holder, at_least)).await,
            Source::Warm => Some(warm),
        }
    }

    /// The key is forgotten, where the grant came from.
    pub(super) async fn clear(&self, key: &str, holder: HolderId, source: Source) -> Option<bool> {
        if let Some(local) = self.0.store.local() {
            return Some(local.clear_now(key, holder));
        }
        let warm = self.0.warm.clear_now(key, holder);
        match source {
            Source::Store => self.ask(self.0.store.clear(key, holder)).await,
            Source::Warm => Some(warm),
        }
    }

    /// What is known of a key.
    pub(super) async fn peek(&self, key: &str) -> (Option<Token>, Source) {
        if let Some(local) = self.0.store.local() {
            return (local.peek_now(key), Source::Store);
        }
        match self.ask(self.0.store.peek(key)).await {
            Some(Some(token)) => {
                self.note(key, Some(token.holder), token.wait, token.streak);
                (Some(token), Source::Store)
            }
            Some(None) => {
                self.0.warm.forget(key);
                (None, Source::Store)
            }
            None => (self.0.warm.peek_now(key), Source::Warm),
        }
    }
}

/// Who gave an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The store.
    Store,
    /// The tokens of this process that stand in for it.
    Warm,
}

#[derive(Debug)]
struct NoAnswer(Duration);

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no answer within {:?}", self.0)
    }
}

impl Error for NoAnswer {}

pub(super) fn lock<A>(mutex: &Mutex<A>) -> MutexGuard<'_, A> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In words for a log.
pub(super) const fn why(cause: WaitCause) -> &'static str {
    match cause {
        WaitCause::Token => "somebody runs this job, or has, and it is not to be tried again yet",
        WaitCause::Breaker => "what this job depends on is broken",
        WaitCause::StoreDown => "the store of retry tokens cannot be asked",
        WaitCause::Full => "the store of retry tokens is full",
    }
}

impl<T> fmt::Debug for Tokens<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens")
            .field("name", &self.name())
            .field("settings", &self.0.settings)
            .field("is_down", &self.is_down())
            .finish_non_exhaustive()
    }
}
