use super::{Allowance, Amount, Spend};
use crate::{Provider, Switch, classify::DefaultClassify};
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};
use tower_layer::Layer;

/// Keeps what a task spends under its allowance. See the [module](super).
#[derive(Clone)]
pub struct SpendLayer<E, M, C = DefaultClassify> {
    pub(super) provider: Provider,
    pub(super) per_task: Option<PerTask>,
    pub(super) within: Option<Allowance>,
    pub(super) switch: Switch,
    pub(super) estimate: E,
    pub(super) meter: M,
    pub(super) classify: C,
}

/// What a task may spend here.
#[derive(Clone, Copy, Debug)]
pub(super) struct PerTask {
    /// By which a task knows this layer, and its clones.
    pub(super) layer: u64,
    pub(super) limit: Amount,
}

impl<E, M> SpendLayer<E, M> {
    /// For calls of this provider: what each is taken to cost before it is sent, and how its reply tells what
    /// it did ([`llm`](crate::usage::llm) or [`of_reply`](crate::usage::of_reply)).
    ///
    /// Calls whose task has no [spend allowance](crate::Task::spend) pass, unless the layer sets a limit.
    #[must_use]
    pub fn new(provider: &Provider, estimate: E, meter: M) -> Self {
        SpendLayer {
            provider: provider.clone(),
            per_task: None,
            within: None,
            switch: Switch::default(),
            estimate,
            meter,
            classify: DefaultClassify::default(),
        }
    }
}

impl<E, M, C> SpendLayer<E, M, C> {
    /// The most that one task, with its children, may spend here, beside what it may spend in all: the limit of
    /// one tool. Calls that belong to no task are not limited by it. Default: no such limit.
    #[must_use]
    pub fn per_task(mut self, limit: Amount) -> Self {
        static LAYERS: AtomicU64 = AtomicU64::new(0);
        self.per_task = Some(PerTask { layer: LAYERS.fetch_add(1, Ordering::Relaxed), limit });
        self
    }

    /// The most that all calls together may spend here: out of this allowance, which its owner may share with
    /// other layers, and [top up](Allowance::top_up). Default: no such limit.
    #[must_use]
    pub fn within(mut self, allowance: &Allowance) -> Self {
        self.within = Some(allowance.clone());
        self
    }

    /// With another classifier, which tells the calls that were not executed.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> SpendLayer<E, M, D> {
        let SpendLayer { provider, per_task, within, switch, estimate, meter, .. } = self;
        SpendLayer { provider, per_task, within, switch, estimate, meter, classify }
    }

    /// Enforces, observes or stands aside as this switch says; default: one of its own, that enforces. While it
    /// observes, a call that finds no room passes and is charged nothing; while it is off, nobody is charged.
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

impl<E, M, C> fmt::Debug for SpendLayer<E, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpendLayer")
            .field("provider", &self.provider)
            .field("per_task", &self.per_task.map(|per_task| per_task.limit))
            .field("within", &self.within)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, E: Clone, M: Clone, C: Clone> Layer<S> for SpendLayer<E, M, C> {
    type Service = Spend<S, E, M, C>;
    fn layer(&self, inner: S) -> Self::Service {
        Spend { inner, rules: self.clone() }
    }
}
