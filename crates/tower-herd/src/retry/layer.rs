use super::{
    backoff::Backoff,
    config::{InvalidRetryConfig, RetryConfig},
    resend::CloneRequest,
    service::JitteredRetry,
};
use crate::{
    HasTask, Mode, Switch,
    budget::{Budget, RatioBudget},
    classify::DefaultClassify,
    observe::{Event, Observe, Trace},
    random::Seeds,
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tower_layer::Layer;

/// Sends requests again: after the server's own wait, at a random instant, as often as the task, the
/// budget and the safety of the request allow. See the [module](super).
///
/// Clones, and all services made from them, share the budget, the bound on sleepers and the seeds. A
/// setter starts these afresh, except the budget.
pub struct JitteredRetryLayer<C = DefaultClassify, R = CloneRequest> {
    core: Arc<Core>,
    classify: C,
    resend: R,
}

/// What all services of one layer share.
pub(crate) struct Core {
    /// Exchanged whole, so that a reply is decided on by one of them.
    config: Mutex<Arc<RetryConfig>>,
    pub(super) seeds: Seeds,
    pub(super) budget: Arc<dyn Budget>,
    pub(super) budget_id: usize,
    /// Whether the budget wants to hear what becomes of calls.
    pub(super) listens: bool,
    pub(super) switch: Switch,
    observer: Arc<dyn Observe>,
    sleeping: AtomicUsize,
}

/// One place among those that sleep; given back when dropped.
pub(super) struct Bed(Arc<Core>);

impl Core {
    #[inline]
    pub(super) fn observe<'a>(&self, event: impl FnOnce() -> Event<'a>) {
        if self.observer.enabled() {
            self.observer.observe(&event());
        }
    }

    /// The part of the budget that is kept for this provider, or the whole.
    pub(super) fn part(&self, provider: Option<&str>) -> Arc<dyn Budget> {
        provider.and_then(|name| self.budget.of(name)).unwrap_or_else(|| self.budget.clone())
    }

    pub(super) fn config(&self) -> Arc<RetryConfig> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_config(&self, config: RetryConfig) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }

    pub(super) fn bed(self: &Arc<Self>) -> Option<Bed> {
        let most = self.config().max_sleepers;
        let free = |sleeping: usize| (sleeping < most).then(|| sleeping + 1);
        self.sleeping.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free).ok()?;
        Some(Bed(self.clone()))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.0.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}

impl JitteredRetryLayer {
    /// Full jitter from 500 ms (1 s after a 429) up to 30 s, 3 attempts, the default [`RatioBudget`].
    #[must_use]
    pub fn new() -> Self {
        let budget: Arc<dyn Budget> = Arc::new(RatioBudget::default());
        let core = Core {
            config: Mutex::default(),
            seeds: Seeds::from_entropy(),
            budget_id: budget.id(),
            listens: budget.listens(),
            budget,
            switch: Switch::default(),
            observer: Arc::new(Trace),
            sleeping: AtomicUsize::new(0),
        };
        JitteredRetryLayer {
            core: Arc::new(core),
            classify: DefaultClassify::default(),
            resend: CloneRequest,
        }
    }

    /// A layer with these settings, and for the rest as [`new`](JitteredRetryLayer::new) makes it.
    ///
    /// # Errors
    ///
    /// Says which setting cannot be meant.
    pub fn from_config(config: RetryConfig) -> Result<Self, InvalidRetryConfig> {
        config.validate()?;
        Ok(Self::new().set(|old| *old = config))
    }
}

impl Default for JitteredRetryLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<C, R> JitteredRetryLayer<C, R> {
    fn change(self, change: impl FnOnce(&mut Core)) -> Self {
        let old = &self.core;
        let mut core = Core {
            config: Mutex::new(old.config()),
            // Drawn from the old ones, so that a fixed seed stays fixed.
            seeds: Seeds::from_seed(old.seeds.session().bits()),
            budget: old.budget.clone(),
            budget_id: old.budget_id,
            listens: old.listens,
            switch: old.switch.clone(),
            observer: old.observer.clone(),
            sleeping: AtomicUsize::new(0),
        };
        change(&mut core);
        JitteredRetryLayer { core: Arc::new(core), ..self }
    }

    fn set(self, change: impl FnOnce(&mut RetryConfig)) -> Self {
        self.change(|core| {
            let mut config = (*core.config()).clone();
            change(&mut config);
            core.set_config(config);
        })
    }

    /// Goes by other settings from now on, in all services made from this layer: for the replies that come
    /// from here on. What sleeps, sleeps on.
    ///
    /// # Errors
    ///
    /// Says which setting cannot be meant; then nothing has changed.
    pub fn reconfigure(&self, config: RetryConfig) -> Result<(), InvalidRetryConfig> {
        config.validate()?;
        self.core.set_config(config);
        Ok(())
    }

    /// Wire calls that may fail, the first one included; at least 1, default 3. The task's own allowance
    /// counts too: the smaller of both binds, over all layers and rungs. Re-deliveries after a 429 are apart
    /// ([`redeliveries`](Self::redeliveries)).
    #[must_use]
    pub fn attempts(self, attempts: u32) -> Self {
        self.set(|config| config.attempts = attempts.max(1))
    }

    /// The bound of the first wait (it doubles from there); at least 1 ms, default 500 ms.
    #[must_use]
    pub fn base(self, base: Duration) -> Self {
        self.set(|config| config.base = base.max(Duration::from_millis(1)))
    }

    /// The same after a 429 that names no wait. Default 1 s.
    #[must_use]
    pub fn throttled_base(self, base: Duration) -> Self {
        self.set(|config| config.throttled_base = base.max(Duration::from_millis(1)))
    }

    /// Where the bound stops growing. A server's own wait is never cut. Default 30 s.
    #[must_use]
    pub fn cap(self, cap: Duration) -> Self {
        self.set(|config| config.cap = cap)
    }

    /// The shape of the jitter. Default [`Backoff::Full`].
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        self.set(|config| config.backoff = backoff)
    }

    /// How often a request is delivered again after a 429, or asked for again while its idempotency key is
    /// in flight ([`Signal::in_progress`](crate::Signal::in_progress)); 0: such a reply is returned.
    /// Default 10.
    #[must_use]
    pub fn redeliveries(self, redeliveries: u32) -> Self {
        self.set(|config| config.redeliveries = redeliveries)
    }

    /// How many requests may sleep at one time; more than that are answered with the reply at hand.
    /// Default 10 000.
    #[must_use]
    pub fn max_sleepers(self, sleepers: usize) -> Self {
        self.set(|config| config.max_sleepers = sleepers)
    }

    /// How long a request may take in all where its task names no deadline. Default 60 s.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set(|config| config.deadline = deadline)
    }

    /// Says whether a repetition meets the same idempotency domain as the call before it: `false`
    /// above a ladder that does not keep [`Keyed`](crate::Safety::Keyed) writes on their rung. Default
    /// `true`.
    #[must_use]
    pub fn same_domain(self, same: bool) -> Self {
        self.set(|config| config.same_domain = same)
    }

    /// The budget that repetitions draw on. Give the same one to every layer, and to foreign retry
    /// code, that calls the same provider.
    #[must_use]
    pub fn budget(self, budget: impl Budget) -> Self {
        self.change(|core| {
            (core.budget_id, core.listens) = (budget.id(), budget.listens());
            core.budget = Arc::new(budget);
        })
    }

    /// Draws the waits from a fixed seed, for runs that repeat.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        self.change(|core| core.seeds = Seeds::from_seed(seed))
    }

    /// Who is told of repetitions and of giving up; [`Trace`] if nobody is named.
    #[must_use]
    pub fn observer(self, observer: impl Observe) -> Self {
        self.change(|core| core.observer = Arc::new(observer))
    }

    /// Whether it sends again, only counts what it would have sent again, or stands aside. See
    /// [`switch`](crate::switch).
    #[must_use]
    pub fn switch(self, switch: &Switch) -> Self {
        self.change(|core| core.switch = switch.clone())
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.core.switch
    }

    /// How replies are understood.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> JitteredRetryLayer<D, R> {
        JitteredRetryLayer { core: self.core, classify, resend: self.resend }
    }

    /// How requests are kept for another attempt. Default [`CloneRequest`]; for bodies that cannot be cloned,
    /// `replay`.
    #[must_use]
    pub fn resend<D>(self, resend: D) -> JitteredRetryLayer<C, D> {
        JitteredRetryLayer { core: self.core, classify: self.classify, resend }
    }

    /// Its settings.
    #[must_use]
    pub fn config(&self) -> RetryConfig {
        (*self.core.config()).clone()
    }

    /// How many requests sleep at this moment.
    #[must_use]
    pub fn sleeping(&self) -> usize {
        self.core.sleeping.load(Ordering::Relaxed)
    }
}

impl<C: Clone, R: Clone> Clone for JitteredRetryLayer<C, R> {
    fn clone(&self) -> Self {
        JitteredRetryLayer {
            core: self.core.clone(),
            classify: self.classify.clone(),
            resend: self.resend.clone(),
        }
    }
}

impl<C, R> fmt::Debug for JitteredRetryLayer<C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JitteredRetryLayer")
            .field("config", &self.core.config())
            .field("sleeping", &self.sleeping())
            .finish_non_exhaustive()
    }
}

impl<S: Clone, C: Clone, R: Clone> Layer<S> for JitteredRetryLayer<C, R> {
    type Service = JitteredRetry<S, C, R>;
    fn layer(&self, inner: S) -> Self::Service {
        JitteredRetry::new(
            Shared {
                core: self.core.clone(),
                classify: self.classify.clone(),
                resend: self.resend.clone(),
                again: Mutex::new(inner.clone()),
            },
            inner,
        )
    }
}

/// What one service, its clones and its calls share: one handle to clone a call.
pub(crate) struct Shared<S, C, R> {
    pub(super) core: Arc<Core>,
    pub(crate) classify: C,
    pub(crate) resend: R,
    /// Never called itself: later attempts are made on clones of it, so that a call whose first attempt
    /// is well does not clone the stack below. A lock, since `S` need not be `Sync`; held for a clone.
    pub(super) again: Mutex<S>,
}

impl<S, C, R> Shared<S, C, R> {
    /// A request comes that may be an original one: it is counted once a task and budget; a request
    /// without a task unless it is a repetition. Whether it was counted.
    #[inline]
    pub(crate) fn deposit<Req: HasTask>(&self, request: &Req) -> bool {
        let core = &self.core;
        let is_original = match request.task() {
            Some(task) => {
                // Of an earlier call: it says nothing about this one.
                task.set_given_up(false);
                task.first_deposit(core.budget_id)
            }
            None => request.resent().is_none(),
        };
        if is_original {
            core.budget.deposit();
        }
        is_original
    }

    /// Looks at the service that further attempts are made on clones of.
    #[cfg(feature = "herd")]
    pub(crate) fn with_service<T>(&self, look: impl FnOnce(&S) -> T) -> T {
        look(&self.again.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the layer does with calls.
    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        self.core.switch.mode()
    }

    /// Whether the budget wants to hear what becomes of calls.
    #[inline]
    pub(crate) fn listens(&self) -> bool {
        self.core.listens
    }
}
