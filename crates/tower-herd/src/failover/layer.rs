use super::{HashedFailover, LadderError, Rung, patience::Patience, rung::check};
use crate::{
    Switch,
    classify::DefaultClassify,
    retry::{Budget, CloneRequest},
};
use std::{fmt, sync::Arc, time::Duration};
use tower_layer::Layer;

/// A ladder around one client: each rung is a stack of layers over a clone of it. See the
/// [module](super).
pub struct HashedFailoverLayer<L, Req, R = CloneRequest, C = DefaultClassify> {
    rungs: Arc<[Rung<L, Req>]>,
    patience: Patience,
    switch: Switch,
    resend: R,
    classify: C,
}

impl<L, Req> HashedFailoverLayer<L, Req> {
    /// A ladder of these rungs, for HTTP requests that can be cloned.
    pub fn new(rungs: impl IntoIterator<Item = Rung<L, Req>>) -> Result<Self, LadderError> {
        let rungs: Arc<[_]> = rungs.into_iter().collect();
        check(&rungs)?;
        Ok(HashedFailoverLayer {
            rungs,
            patience: Patience::default(),
            switch: Switch::default(),
            resend: CloneRequest,
            classify: DefaultClassify::default(),
        })
    }
}

impl<L, Req, R, C> HashedFailoverLayer<L, Req, R, C> {
    /// How long a task waits for a slot in one tier before it also queues at the next. Default 500 ms.
    #[must_use]
    pub fn slot_patience(mut self, patience: Duration) -> Self {
        self.patience.slot = patience;
        self
    }

    /// Up to which wait a pause is sat out instead of left for the next tier. Default 2 s.
    #[must_use]
    pub fn hint_patience(mut self, patience: Duration) -> Self {
        self.patience.hint = patience;
        self
    }

    /// The retry budget of the layer above, so that it is kept by provider: a rung's first calls pay
    /// into its part, and a repetition that goes to another rung than the one it was charged to gets
    /// its charge back. Default: one pot for all, in which the retry layer counts by itself.
    #[must_use]
    pub fn budget(mut self, budget: &dyn Budget) -> Self
    where
        L: Clone,
    {
        let rungs = self.rungs.iter().map(|rung| {
            let mut copy = rung.clone();
            copy.pot = budget.open(rung.provider.name());
            copy
        });
        self.rungs = rungs.collect();
        self
    }

    /// Whether it walks, only counts who would have left the first rung, or stands aside. See the
    /// [module](super#switched).
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

    /// How a request is kept for the next rung.
    #[must_use]
    pub fn resend<R2>(self, resend: R2) -> HashedFailoverLayer<L, Req, R2, C> {
        HashedFailoverLayer {
            rungs: self.rungs,
            patience: self.patience,
            switch: self.switch,
            resend,
            classify: self.classify,
        }
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> HashedFailoverLayer<L, Req, R, D> {
        HashedFailoverLayer {
            rungs: self.rungs,
            patience: self.patience,
            switch: self.switch,
            resend: self.resend,
            classify,
        }
    }
}

impl<L, Req, R: Clone, C: Clone> Clone for HashedFailoverLayer<L, Req, R, C> {
    fn clone(&self) -> Self {
        HashedFailoverLayer {
            rungs: self.rungs.clone(),
            patience: self.patience,
            switch: self.switch.clone(),
            resend: self.resend.clone(),
            classify: self.classify.clone(),
        }
    }
}

impl<L, Req, R, C> fmt::Debug for HashedFailoverLayer<L, Req, R, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HashedFailoverLayer")
            .field("rungs", &self.rungs)
            .field("patience", &self.patience)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S: Clone, L: Layer<S>, Req, R: Clone, C: Clone> Layer<S> for HashedFailoverLayer<L, Req, R, C> {
    type Service = HashedFailover<L::Service, Req, R, C>;
    fn layer(&self, inner: S) -> Self::Service {
        let rungs = self.rungs.iter().map(|rung| rung.with(rung.with.layer(inner.clone())));
        let (resend, classify) = (self.resend.clone(), self.classify.clone());
        HashedFailover::build(rungs, self.patience, self.switch.clone(), resend, classify)
    }
}
