use super::{
    HerdClassify, HerdConfig, HerdHandle, HerdService, OneRung, RungSettings, Rungs,
    handle::{Concern, Shared},
    layers::Layers,
};
use crate::{
    Criticality, Fleet, HashedFailoverLayer, Head, JitteredRetryLayer, Mode, Provider, RatioBudget, Safety,
    SettingsError, Signal,
    breaker::Alert,
    classify::Options,
    failover::{LadderError, Rung},
    observe::Observe,
    random::Seeds,
    retry::{Budget, CloneRequest, InvalidRetryConfig, RetryConfig},
};
use std::{error::Error, fmt, sync::Arc, time::Duration};
use tower_layer::Layer;

/// The whole stack from one builder: a [`Layer`] around the client of one provider, or of a ladder of them.
/// See the [module](super).
///
/// Clones are the same herd, and so are all services that are made from it: its handle steers them
/// all. Take the handle after the last setter.
pub struct Herd<T = One, R = CloneRequest> {
    pub(super) rungs: T,
    pub(super) parts: Parts,
    resend: R,
}

/// A [`Herd`] in front of one provider.
#[derive(Clone, Debug)]
pub struct One {
    provider: Provider,
    settings: RungSettings,
}

/// A [`Herd`] in front of a ladder.
pub struct Ladder<Req> {
    rungs: Arc<[Rung<RungSettings, Req>]>,
    slot_patience: Duration,
    hint_patience: Duration,
}

/// What is common to both.
#[derive(Clone)]
pub(super) struct Parts {
    pub(super) shared: Arc<Shared>,
    pub(super) retry: JitteredRetryLayer<HerdClassify, CloneRequest>,
    budget: Arc<dyn Budget>,
    classify: HerdClassify,
    options: Options,
}

impl Parts {
    fn new(name: Arc<str>, seeds: &Seeds, providers: Vec<Provider>) -> Self {
        let budget = RatioBudget::default();
        #[cfg(feature = "store")]
        let budget = budget.for_fleet(&providers);
        let budget: Arc<dyn Budget> = Arc::new(budget);
        let classify = HerdClassify::default();
        let seeds = Seeds::from_seed(seeds.session().bits());
        let shared = Arc::new(Shared::new(name, seeds, providers));
        let retry = JitteredRetryLayer::new()
            .seed(shared.seeds.session().bits())
            .budget(budget.clone())
            .switch(&shared.switches.retry)
            .classify(classify.clone());
        let options =
            Options { error_bytes: 64 * 1024, error_millis: 1000, success_bytes: 0, hold_millis: 0 };
        Parts { shared, retry, budget, classify, options }
    }

    fn layers(&self, provider: &Provider, settings: &RungSettings, in_ladder: bool) -> Layers {
        let Parts { shared, classify, options, .. } = self;
        Layers::new(provider, settings.prices, classify, shared, *options, in_ladder)
    }

    fn classified(mut self, classify: HerdClassify) -> Self {
        self.retry = self.retry.classify(classify.clone());
        self.classify = classify;
        self
    }
}

impl Herd {
    /// In front of this provider, with the defaults of every layer.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Herd {
            parts: Parts::new(provider.name().clone(), provider.seeds(), vec![provider.clone()]),
            rungs: One { provider: provider.clone(), settings: RungSettings::default() },
            resend: CloneRequest,
        }
    }

    /// In front of a ladder of these rungs.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http_body_util::Full;
    /// use tower::ServiceBuilder;
    /// use tower_herd::{BoxError, Fleet, Herd, failover::Rung, herd::RungSettings};
    ///
    /// type Request = http::Request<Full<Bytes>>;
    /// let to = |url: &'static str| move |mut request: Request| {
    ///     *request.uri_mut() = http::Uri::from_static(url);
    ///     request
    /// };
    /// let fleet = Fleet::local();
    /// let gpu = Rung::new(&fleet.provider("own-gpu"), RungSettings::new()).map(to("http://gpu.internal/v1/chat"));
    /// let vendor = Rung::new(&fleet.provider("vendor"), RungSettings::new());
    /// let vendor = vendor.tier(1).paid().map(to("http://vendor.example/v1/chat"));
    /// let herd = Herd::ladder([gpu, vendor])?.llm();
    /// # let client = tower::service_fn(|_: Request| async { Ok::<_, std::io::Error>(http::Response::new(Full::<Bytes>::default())) });
    /// let service = ServiceBuilder::new().layer(herd).service(client);
    /// # let _ = tower::ServiceExt::oneshot(service, Request::default());
    /// # Ok::<(), BoxError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A ladder that cannot be, or settings that differ from those a provider has already.
    pub fn ladder<Req>(
        rungs: impl IntoIterator<Item = Rung<RungSettings, Req>>,
    ) -> Result<Herd<Ladder<Req>>, HerdError> {
        let rungs: Arc<[_]> = rungs.into_iter().collect();
        // It looks at the rungs, and nothing else.
        HashedFailoverLayer::new(rungs.iter().map(|rung| rung.clone().map_with(drop)))?;
        for rung in rungs.iter() {
            rung.with.apply(&rung.provider)?;
        }
        let providers = rungs.iter().map(|rung| rung.provider.clone()).collect();
        let parts = Parts::new("ladder".into(), rungs[0].provider.seeds(), providers);
        let (slot_patience, hint_patience) = (Duration::from_millis(500), Duration::from_secs(2));
        Ok(Herd { parts, rungs: Ladder { rungs, slot_patience, hint_patience }, resend: CloneRequest })
    }
}

impl<R> Herd<One, R> {
    /// What its provider goes by, beside its [`ProviderSettings`](crate::ProviderSettings).
    ///
    /// # Errors
    ///
    /// Settings that cannot be, or that differ from those the provider has already.
    pub fn settings(mut self, settings: RungSettings) -> Result<Self, SettingsError> {
        settings.apply(&self.rungs.provider)?;
        self.rungs.settings = settings;
        Ok(self)
    }
}

impl<Req, R> Herd<Ladder<Req>, R> {
    /// How long a task waits for a slot in one tier before it also queues at the next. Default 500 ms.
    #[must_use]
    pub fn slot_patience(mut self, patience: Duration) -> Self {
        self.rungs.slot_patience = patience;
        self
    }

    /// Up to which wait a pause is sat out instead of left for the next tier. Default 2 s.
    #[must_use]
    pub fn hint_patience(mut self, patience: Duration) -> Self {
        self.rungs.hint_patience = patience;
        self
    }
}

impl<T, R> Herd<T, R> {
    fn change(mut self, change: impl FnOnce(&mut Parts)) -> Self {
        change(&mut self.parts);
        self
    }

    fn retry(self, change: impl FnOnce(&mut RetryConfig)) -> Self {
        self.change(|parts| {
            let mut config = parts.retry.config();
            change(&mut config);
            // Setters keep what can be meant: nothing here is refused.
            parts.retry.reconfigure(config).ok();
        })
    }

    /// For completions: a request that does not say what it may suffer may be repeated at its price
    /// ([`Safety::Costly`]); a task has five minutes, an attempt two to its first byte; and a success is
    /// looked into, up to 16 KiB, for an error inside a 200 or at the beginning of a stream
    /// ([`ClassifyLayer::read_success`](crate::ClassifyLayer::read_success)).
    #[must_use]
    pub fn llm(self) -> Self {
        let (idle, headers) = (Duration::from_secs(60), Duration::from_secs(120));
        self.default_safety(Safety::Costly)
            .deadline(Duration::from_secs(300))
            .attempt_timeout(headers, idle)
            .read_success(16 * 1024)
    }

    /// What a request may suffer that says nothing about it, belongs to no task yet and would count as
    /// [`Safety::Once`]. Default: that.
    #[must_use]
    pub fn default_safety(self, safety: Safety) -> Self {
        self.parts.shared.set_safety(Some(safety));
        self
    }

    /// How long a task may take in all that this herd starts. Default 60 s.
    #[must_use]
    pub fn deadline(self, time: Duration) -> Self {
        let allowance = self.parts.shared.allowance();
        self.parts.shared.set_task(time, allowance);
        self.retry(|config| config.deadline = time)
    }

    /// How many wire calls of a task may fail; at least 1, default 3.
    #[must_use]
    pub fn attempts(self, attempts: u32) -> Self {
        let deadline = self.parts.shared.deadline();
        self.parts.shared.set_task(deadline, attempts);
        self.retry(|config| config.attempts = attempts.max(1))
    }

    /// Whom the tasks make wait that this herd starts. Default interactive.
    #[must_use]
    pub fn criticality(self, criticality: Criticality) -> Self {
        self.parts.shared.set_criticality(criticality);
        self
    }

    /// All numbers of its retries at once.
    ///
    /// # Errors
    ///
    /// Says which of them cannot be meant.
    pub fn retries(self, config: RetryConfig) -> Result<Self, InvalidRetryConfig> {
        self.parts.retry.reconfigure(config)?;
        Ok(self)
    }

    /// The budget that its repetitions draw on. Give the same one to everything that calls these providers.
    /// Default: its own [`RatioBudget`].
    #[must_use]
    pub fn retry_budget(self, budget: impl Budget) -> Self {
        self.change(|parts| {
            parts.budget = Arc::new(budget);
            parts.retry = parts.retry.clone().budget(parts.budget.clone());
        })
    }

    /// How long an attempt may take to the head of its reply (default 30 s), and stand still in its body
    /// (60 s).
    #[must_use]
    pub fn attempt_timeout(self, headers: Duration, idle: Duration) -> Self {
        self.parts.shared.set_times(headers, idle);
        self
    }

    /// Looks into successes too, up to so many bytes; 0, the default: not at all. See
    /// [`ClassifyLayer::read_success`](crate::ClassifyLayer::read_success).
    #[must_use]
    pub fn read_success(self, bytes: usize) -> Self {
        self.change(|parts| parts.options.success_bytes = u32::try_from(bytes).unwrap_or(u32::MAX))
    }

    /// What only you know of your providers, by the head of a reply; where it says nothing, the classifier for
    /// HTTP and gRPC does. As [`classify_head`](crate::classify_head).
    #[must_use]
    pub fn classify_head(
        mut self,
        classify: impl Fn(Head<'_>) -> Option<Signal> + Send + Sync + 'static,
    ) -> Self {
        self.parts = self.parts.classified(HerdClassify::head(classify));
        self
    }

    /// The same by its body, where that has been read. As [`classify_body`](crate::classify_body).
    #[must_use]
    pub fn classify_body(
        mut self,
        classify: impl Fn(Head<'_>, &[u8]) -> Option<Signal> + Send + Sync + 'static,
    ) -> Self {
        self.parts = self.parts.classified(HerdClassify::body(classify));
        self
    }

    /// How a request is kept for another attempt. Default: it is cloned. For bodies that cannot be,
    /// [`replay`](crate::replay).
    #[must_use]
    pub fn resend<R2>(self, resend: R2) -> Herd<T, R2> {
        Herd { rungs: self.rungs, parts: self.parts, resend }
    }

    /// Hears of each incident of a provider, once. It replaces the listener before, also one that another stack gave
    /// to these providers' breakers; and it runs on the path of a call, so hand the alert on and do not block. See
    /// [`BreakerLayer`](crate::BreakerLayer::on_alert).
    #[must_use]
    pub fn on_alert(self, listener: impl Fn(&Alert) + Send + Sync + 'static) -> Self {
        self.parts.shared.listen(Arc::new(listener));
        self
    }

    /// Draws the waits of its retries from a fixed seed, for runs that repeat: the last setter to call.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        self.change(|parts| parts.retry = parts.retry.clone().seed(seed))
    }

    /// Who is told of repetitions; the providers tell the observer of their fleet.
    #[must_use]
    pub fn observer(self, observer: impl Observe) -> Self {
        self.change(|parts| parts.retry = parts.retry.clone().observer(observer))
    }

    /// Switches one concern from the start; later by the [handle](Self::handle).
    #[must_use]
    pub fn mode(self, concern: Concern, mode: Mode) -> Self {
        self.parts.shared.set(concern, mode);
        self
    }

    /// It was built of this.
    pub(super) fn known_as(self, fleet: &Fleet, config: &HerdConfig) -> Self {
        let handle = self.handle();
        Concern::ALL.into_iter().for_each(|concern| handle.set(concern, config.modes.of(concern)));
        *handle.built_of() = Some((fleet.clone(), config.clone()));
        self
    }

    /// Reads and steers it from outside.
    #[must_use]
    pub fn handle(&self) -> HerdHandle {
        HerdHandle::new(self.parts.clone())
    }
}

impl<S: Clone, R: Clone> Layer<S> for Herd<One, R> {
    type Service = HerdService<OneRung<S, R>>;

    fn layer(&self, inner: S) -> Self::Service {
        let layers = self.parts.layers(&self.rungs.provider, &self.rungs.settings, false);
        let retry = self.parts.retry.clone().resend(self.resend.clone());
        HerdService::new(OneRung::new(retry.layer(layers.layer(inner))), self.parts.shared.clone())
    }
}

impl<S: Clone, Req, R: Clone> Layer<S> for Herd<Ladder<Req>, R> {
    type Service = HerdService<Rungs<S, Req, R>>;

    fn layer(&self, inner: S) -> Self::Service {
        let parts = &self.parts;
        let rungs = self.rungs.rungs.iter().map(|rung| {
            let layers = parts.layers(&rung.provider, &rung.with, true);
            rung.clone().map_with(|_| layers)
        });
        let ladder = HashedFailoverLayer::new(rungs)
            .expect("checked when the herd was made")
            .slot_patience(self.rungs.slot_patience)
            .hint_patience(self.rungs.hint_patience)
            .budget(&parts.budget)
            .switch(&parts.shared.switches.failover)
            .resend(self.resend.clone())
            .classify(parts.classify.clone());
        let retry = parts.retry.clone().resend(self.resend.clone());
        HerdService::new(Rungs::new(retry.layer(ladder.layer(inner))), parts.shared.clone())
    }
}

impl<T: Clone, R: Clone> Clone for Herd<T, R> {
    fn clone(&self) -> Self {
        Herd { rungs: self.rungs.clone(), parts: self.parts.clone(), resend: self.resend.clone() }
    }
}

impl<Req> Clone for Ladder<Req> {
    fn clone(&self) -> Self {
        Ladder { rungs: self.rungs.clone(), ..*self }
    }
}

impl<T: fmt::Debug, R> fmt::Debug for Herd<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Herd")
            .field("rungs", &self.rungs)
            .field("handle", &self.handle())
            .finish_non_exhaustive()
    }
}

impl<Req> fmt::Debug for Ladder<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.rungs.iter()).finish()
    }
}

/// A [`Herd`] that cannot be built.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum HerdError {
    /// Its ladder.
    Ladder(LadderError),
    /// What a provider goes by.
    Settings(SettingsError),
    /// Its retries.
    Retry(InvalidRetryConfig),
    /// A field of its configuration.
    Field {
        /// Which one, from the top: `rungs[1].weight`.
        field: String,
        /// What is wrong with it.
        why: String,
    },
}

impl fmt::Display for HerdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HerdError::Ladder(error) => error.fmt(f),
            HerdError::Settings(error) => error.fmt(f),
            HerdError::Retry(error) => error.fmt(f),
            HerdError::Field { field, why } => write!(f, "configuration of the herd: {field} {why}"),
        }
    }
}

impl Error for HerdError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            HerdError::Ladder(error) => Some(error),
            HerdError::Settings(error) => Some(error),
            HerdError::Retry(error) => Some(error),
            HerdError::Field { .. } => None,
        }
    }
}

impl From<LadderError> for HerdError {
    fn from(error: LadderError) -> Self {
        HerdError::Ladder(error)
    }
}
impl From<SettingsError> for HerdError {
    fn from(error: SettingsError) -> Self {
        HerdError::Settings(error)
    }
}
impl From<InvalidRetryConfig> for HerdError {
    fn from(error: InvalidRetryConfig) -> Self {
        HerdError::Retry(error)
    }
}
