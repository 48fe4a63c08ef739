use super::RetryAfter;
use crate::{Provider, Switch, classify::DefaultClassify};
use std::time::Duration;
use tower_layer::Layer;

/// Keeps every call back until the provider's pause is over. See the [module](super).
#[derive(Clone, Debug)]
pub struct RetryAfterLayer<C = DefaultClassify> {
    provider: Provider,
    patience: Option<Duration>,
    switch: Switch,
    classify: C,
}

impl RetryAfterLayer {
    /// For HTTP and gRPC; waits as long as the task's deadline allows.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Self::with(provider, DefaultClassify::default())
    }
}

impl<C> RetryAfterLayer<C> {
    /// With a classifier of your own.
    #[must_use]
    pub fn with(provider: &Provider, classify: C) -> Self {
        RetryAfterLayer { provider: provider.clone(), patience: None, switch: Switch::default(), classify }
    }

    /// The longest wait; a longer one is refused at once. Default: as long as the task's deadline
    /// allows (60 s where it names none). Zero never waits.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Whether it waits and refuses, only counts, or stands aside. See [`switch`](crate::switch).
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = switch.clone();
        self
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.switch
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> RetryAfterLayer<D> {
        RetryAfterLayer { provider: self.provider, patience: self.patience, switch: self.switch, classify }
    }
}

impl<S, C: Clone> Layer<S> for RetryAfterLayer<C> {
    type Service = RetryAfter<S, C>;
    fn layer(&self, inner: S) -> Self::Service {
        RetryAfter {
            inner,
            provider: self.provider.clone(),
            patience: self.patience,
            switch: self.switch.clone(),
            classify: self.classify.clone(),
        }
    }
}
