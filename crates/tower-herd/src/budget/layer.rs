use super::{AdaptiveThrottle, BudgetSettings};
use crate::{Provider, SettingsError, Switch, classify::DefaultClassify};
use tower_layer::Layer;

/// Refuses a share of the calls to a provider that accepts too few of them. See the [module](super).
///
/// What was counted and the settings belong to the provider, or the scope, it is made for: all layers of
/// it are one throttle.
#[derive(Clone, Debug)]
pub struct BudgetLayer<C = DefaultClassify> {
    provider: Provider,
    switch: Switch,
    classify: C,
}

impl BudgetLayer {
    /// For HTTP and gRPC, with the settings that the provider has, or the defaults of
    /// [`BudgetSettings`].
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Self::with(provider, DefaultClassify::default())
    }

    /// The same with these settings.
    ///
    /// # Errors
    ///
    /// If they cannot be meant, or if the provider (or the scope) was given others before.
    pub fn configured(provider: &Provider, settings: BudgetSettings) -> Result<Self, SettingsError> {
        Self::new(provider).settings(settings)
    }
}

impl<C> BudgetLayer<C> {
    /// With a classifier of your own.
    #[must_use]
    pub fn with(provider: &Provider, classify: C) -> Self {
        // From now on it counts.
        provider.throttle();
        BudgetLayer { provider: provider.clone(), switch: Switch::default(), classify }
    }

    /// Gives the provider (or the scope) its settings. The same may be given again, by another stack.
    ///
    /// # Errors
    ///
    /// If they cannot be meant, or if it was given others before: both cannot be true.
    pub fn settings(self, settings: BudgetSettings) -> Result<Self, SettingsError> {
        let wrong = |field, why| SettingsError { provider: self.provider.name().to_string(), field, why };
        if let Some((field, why)) = settings.fault() {
            return Err(wrong(field, why));
        }
        if !self.provider.throttle().configure(settings) {
            let why = "differs from the one it already has; give each provider its settings in one place";
            return Err(wrong("budget", why));
        }
        Ok(self)
    }

    /// Enforces, observes or stands aside as this switch says; default: one of its own, that enforces. The
    /// sensor counts in every mode, so that whoever turns it on goes by what is.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = switch.clone();
        self
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> BudgetLayer<D> {
        BudgetLayer { provider: self.provider, switch: self.switch, classify }
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.switch
    }

    /// The share of calls that is refused at this moment, 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.provider.throttle().share(self.provider.clock().now())
    }

    /// The settings in force.
    #[must_use]
    pub fn in_force(&self) -> BudgetSettings {
        self.provider.throttle().settings()
    }
}

impl<S, C: Clone> Layer<S> for BudgetLayer<C> {
    type Service = AdaptiveThrottle<S, C>;
    fn layer(&self, inner: S) -> Self::Service {
        AdaptiveThrottle {
            inner,
            throttle: self.provider.throttle().clone(),
            provider: self.provider.clone(),
            switch: self.switch.clone(),
            classify: self.classify.clone(),
        }
    }
}
