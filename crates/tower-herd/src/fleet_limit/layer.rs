use super::{FleetLimit, UntilBodyEnd, UntilReply};
use crate::{Provider, Switch, classify::DefaultClassify};
use std::time::Duration;
use tower_layer::Layer;

/// Keeps the calls in flight at a provider under its ceiling. See the [module](super).
#[derive(Clone, Debug)]
pub struct FleetLimitLayer<H = UntilBodyEnd, C = DefaultClassify> {
    provider: Provider,
    patience: Option<Duration>,
    switch: Switch,
    hold: H,
    classify: C,
}

impl FleetLimitLayer {
    /// For HTTP: a slot is held until the response body ends; who finds none waits until its task's
    /// deadline.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Self::with(provider, DefaultClassify::default())
    }
}

impl<C> FleetLimitLayer<UntilBodyEnd, C> {
    /// With a classifier of your own.
    #[must_use]
    pub fn with(provider: &Provider, classify: C) -> Self {
        let switch = Switch::default();
        FleetLimitLayer { provider: provider.clone(), patience: None, switch, hold: UntilBodyEnd, classify }
    }
}

impl<H, C> FleetLimitLayer<H, C> {
    /// The longest wait for a slot. Default: as long as the task's deadline allows (60 s where it
    /// names none). Zero refuses at once who finds no slot.
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

    /// A slot is held until the reply is there, and no longer.
    #[must_use]
    pub fn until_reply(self) -> FleetLimitLayer<UntilReply, C> {
        FleetLimitLayer {
            provider: self.provider,
            patience: self.patience,
            switch: self.switch,
            hold: UntilReply,
            classify: self.classify,
        }
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> FleetLimitLayer<H, D> {
        FleetLimitLayer {
            provider: self.provider,
            patience: self.patience,
            switch: self.switch,
            hold: self.hold,
            classify,
        }
    }
}

impl<S, H: Clone, C: Clone> Layer<S> for FleetLimitLayer<H, C> {
    type Service = FleetLimit<S, H, C>;
    fn layer(&self, inner: S) -> Self::Service {
        FleetLimit {
            inner,
            provider: self.provider.clone(),
            patience: self.patience,
            switch: self.switch.clone(),
            hold: self.hold.clone(),
            classify: self.classify.clone(),
        }
    }
}
