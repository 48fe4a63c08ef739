use super::{JobBreaker, JobBreakerSettings, permit::Shared};
use crate::{
    Alert, SettingsError, Switch,
    retry_token::{ErrorsFail, NoDefer, RetryTokens, Tokens},
};
use std::sync::Arc;
use tower_layer::Layer;

/// Keeps jobs back while what they depend on is broken. See the [module](super).
#[derive(Clone, Debug)]
pub struct JobBreakerLayer<T, K, D = NoDefer, J = ErrorsFail> {
    pub(super) shared: Arc<Shared<T>>,
    pub(super) dependency: K,
    pub(super) switch: Switch,
    pub(super) defer: D,
    pub(super) judge: J,
}

impl<T: RetryTokens, K> JobBreakerLayer<T, K> {
    /// Over this store, for the dependencies that `dependency` reads off a job: a name of a fixed list, the same in all
    /// processes. None: the job passes untouched. 5 failures in a row, 10 min.
    #[must_use]
    pub fn new(tokens: &Tokens<T>, dependency: K) -> Self {
        Self::build(tokens, dependency, JobBreakerSettings::default())
    }

    /// With settings of one's own: the same in all processes.
    ///
    /// # Errors
    ///
    /// If they cannot be meant.
    pub fn with(
        tokens: &Tokens<T>,
        dependency: K,
        settings: JobBreakerSettings,
    ) -> Result<Self, SettingsError> {
        settings.check(tokens.name())?;
        Ok(Self::build(tokens, dependency, settings))
    }

    fn build(tokens: &Tokens<T>, dependency: K, settings: JobBreakerSettings) -> Self {
        JobBreakerLayer {
            shared: Arc::new(Shared::new(tokens.clone(), settings)),
            dependency,
            switch: Switch::default(),
            defer: NoDefer,
            judge: ErrorsFail,
        }
    }
}

impl<T, K, D, J> JobBreakerLayer<T, K, D, J> {
    /// Puts jobs back. Default: nobody does; who gets the error must.
    #[must_use]
    pub fn defer<E>(self, defer: E) -> JobBreakerLayer<T, K, E, J> {
        let JobBreakerLayer { shared, dependency, switch, defer: _, judge } = self;
        JobBreakerLayer { shared, dependency, switch, defer, judge }
    }

    /// Says what came of a run. Default: a reply is a success, an error a failure, a refusal of ours neither.
    #[must_use]
    pub fn outcome<I>(self, judge: I) -> JobBreakerLayer<T, K, D, I> {
        let JobBreakerLayer { shared, dependency, switch, defer, judge: _ } = self;
        JobBreakerLayer { shared, dependency, switch, defer, judge }
    }

    /// Turned by this switch. Observed: failures are counted and it opens as it would; who comes then is counted, and
    /// runs. Off: all run, and nothing is counted.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = switch.clone();
        self
    }

    /// Hears of each incident, in the one process that saw the last failure. The first listener that is given is the
    /// one. It runs on the path of that job: hand the alert on, and do not block. `tracing` tells in any case (`WARN`,
    /// message `alert`).
    #[must_use]
    pub fn on_alert(self, listener: impl Fn(&Alert) + Send + Sync + 'static) -> Self {
        self.shared.listen(Box::new(listener));
        self
    }

    /// Reads this process's side of it from outside.
    #[must_use]
    pub fn handle(&self) -> JobBreakerHandle<T> {
        JobBreakerHandle(self.shared.clone())
    }
}

/// What this process knows of the breakers of its dependencies.
#[derive(Clone, Debug)]
pub struct JobBreakerHandle<T>(Arc<Shared<T>>);

impl<T> JobBreakerHandle<T> {
    /// The incident that goes on, as an alert about it would say now, with the jobs that this process has deferred for
    /// it; only in the process that raised its alert.
    #[must_use]
    pub fn incident(&self, dependency: &str) -> Option<Alert> {
        self.0.incident(dependency)
    }

    /// The jobs that this process has deferred since it last saw a run of this dependency succeed after failures.
    #[must_use]
    pub fn deferred(&self, dependency: &str) -> u64 {
        self.0.deferred(dependency)
    }
}

impl<S, T, K: Clone, D: Clone, J: Clone> Layer<S> for JobBreakerLayer<T, K, D, J> {
    type Service = JobBreaker<S, T, K, D, J>;
    fn layer(&self, inner: S) -> Self::Service {
        let JobBreakerLayer { shared, dependency, switch, defer, judge } = self;
        let layer = JobBreakerLayer {
            shared: shared.clone(),
            dependency: dependency.clone(),
            switch: switch.clone(),
            defer: defer.clone(),
            judge: judge.clone(),
        };
        JobBreaker { inner, layer }
    }
}
