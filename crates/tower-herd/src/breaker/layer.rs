use super::{Alert, Breaker, BreakerHandle, BreakerSettings};
use crate::{Provider, SettingsError, Switch, classify::DefaultClassify};
use std::sync::Arc;
use tower_layer::Layer;

/// Keeps every call back from a provider that is broken, but for one probe at a time. See the
/// [module](super).
#[derive(Clone, Debug)]
pub struct BreakerLayer<C = DefaultClassify> {
    provider: Provider,
    classify: C,
}

impl BreakerLayer {
    /// For HTTP and gRPC, by the settings that this provider's breaker has already: the default ones if
    /// none were given.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Self::with(provider, DefaultClassify::default())
    }
}

impl<C> BreakerLayer<C> {
    /// With a classifier of your own. (It is asked only where no [`ClassifyLayer`](crate::ClassifyLayer) of
    /// this provider stands further in.)
    #[must_use]
    pub fn with(provider: &Provider, classify: C) -> Self {
        BreakerLayer { provider: provider.clone(), classify }
    }

    /// Gives this provider's breaker its settings. It is one breaker, however many layers there are for it.
    ///
    /// # Errors
    ///
    /// If they cannot be meant, or if it was given others before.
    pub fn settings(self, settings: BreakerSettings) -> Result<Self, SettingsError> {
        self.provider.breaker().configure(settings, self.provider.name())?;
        Ok(self)
    }

    /// Opens after 5 failures in a row: [`BreakerSettings::strict`].
    ///
    /// # Errors
    ///
    /// If it was given others before.
    pub fn strict(self) -> Result<Self, SettingsError> {
        self.settings(BreakerSettings::strict())
    }

    /// Turned by this switch. One breaker has one: the one that was given last, to any layer for it; default: one
    /// of its own, that enforces.
    #[must_use]
    pub fn switch(self, switch: &Switch) -> Self {
        self.provider.breaker().set_switch(switch);
        self
    }

    /// Hears of each incident, once. One breaker has one listener: the one that was given last. It runs
    /// where the last failure was seen, on the path of that call: hand the alert on, and do not block. A
    /// breaker of a scope without a listener tells that of its provider.
    #[must_use]
    pub fn on_alert(self, listener: impl Fn(&Alert) + Send + Sync + 'static) -> Self {
        self.provider.breaker().listen(Arc::new(listener));
        self
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> BreakerLayer<D> {
        BreakerLayer { provider: self.provider, classify }
    }

    /// Reads and steers this breaker from outside.
    #[must_use]
    pub fn handle(&self) -> BreakerHandle {
        BreakerHandle::new(&self.provider)
    }
}

impl<S, C: Clone> Layer<S> for BreakerLayer<C> {
    type Service = Breaker<S, C>;
    fn layer(&self, inner: S) -> Self::Service {
        self.provider.arm_breaker();
        Breaker { inner, provider: self.provider.clone(), classify: self.classify.clone() }
    }
}
