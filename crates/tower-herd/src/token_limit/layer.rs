use super::{ByBytes, TokenLimit};
use crate::{
    Provider, Switch,
    classify::DefaultClassify,
    usage::{OfBody, Total, llm},
};
use std::{fmt, time::Duration};
use tower_layer::Layer;

/// Keeps the tokens of a minute under the provider's limit. See the [module](super).
#[derive(Clone)]
pub struct TokenLimitLayer<E = ByBytes, M = OfBody<Total>, C = DefaultClassify> {
    pub(super) provider: Provider,
    pub(super) patience: Option<Duration>,
    pub(super) switch: Switch,
    pub(super) estimate: E,
    pub(super) meter: M,
    pub(super) classify: C,
}

impl TokenLimitLayer {
    /// For completions over HTTP: estimates [by bytes](ByBytes), and counts all tokens that the reply tells.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        Self::with(provider, ByBytes::default(), llm(Total))
    }
}

impl<E, M> TokenLimitLayer<E, M> {
    /// With an estimate and a meter of your own.
    #[must_use]
    pub fn with(provider: &Provider, estimate: E, meter: M) -> Self {
        TokenLimitLayer {
            provider: provider.clone(),
            patience: None,
            switch: Switch::default(),
            estimate,
            meter,
            classify: DefaultClassify::default(),
        }
    }
}

impl<E, M, C> TokenLimitLayer<E, M, C> {
    /// The longest wait for tokens; a longer one is refused at once. Default: as long as the task's deadline
    /// allows (60 s where it names none); as a rung of a ladder, none.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Another estimate: a closure that counts the tokens of a request, and the most that may come out.
    #[must_use]
    pub fn estimate<F>(self, estimate: F) -> TokenLimitLayer<F, M, C> {
        let TokenLimitLayer { provider, patience, switch, meter, classify, .. } = self;
        TokenLimitLayer { provider, patience, switch, estimate, meter, classify }
    }

    /// Another meter: [`llm`] with a closure where not all tokens count alike, or
    /// [`of_reply`](crate::usage::of_reply).
    #[must_use]
    pub fn meter<N>(self, meter: N) -> TokenLimitLayer<E, N, C> {
        let TokenLimitLayer { provider, patience, switch, estimate, classify, .. } = self;
        TokenLimitLayer { provider, patience, switch, estimate, meter, classify }
    }

    /// With another classifier, which tells the calls that were not executed.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> TokenLimitLayer<E, M, D> {
        let TokenLimitLayer { provider, patience, switch, estimate, meter, .. } = self;
        TokenLimitLayer { provider, patience, switch, estimate, meter, classify }
    }

    /// Enforces, observes or stands aside as this switch says; default: one of its own, that enforces. While it
    /// observes, tokens are taken as always, and a call for which there are none passes; while it is off, none are
    /// taken.
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
}

impl<E, M, C> fmt::Debug for TokenLimitLayer<E, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenLimitLayer")
            .field("provider", &self.provider)
            .field("patience", &self.patience)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, E: Clone, M: Clone, C: Clone> Layer<S> for TokenLimitLayer<E, M, C> {
    type Service = TokenLimit<S, E, M, C>;
    fn layer(&self, inner: S) -> Self::Service {
        TokenLimit { inner, rules: self.clone() }
    }
}
