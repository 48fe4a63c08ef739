use super::{
    service::ToolCalls,
    state::{Call, Limits},
};
use crate::{Provider, Switch, classify::DefaultClassify};
use std::fmt;
use tower_layer::Layer;

/// Remembers the tool calls of each task, and refuses what a model should not ask for again. See the
/// [module](super).
#[derive(Clone)]
pub struct ToolCallsLayer<F, C = DefaultClassify> {
    provider: Provider,
    call: F,
    classify: C,
    limits: Limits,
    switch: Switch,
}

impl<F> ToolCallsLayer<F> {
    /// For the tools of `provider`. `call` says which call a request is; none: it is no tool call, and passes.
    #[must_use]
    pub fn new<Req>(provider: &Provider, call: F) -> Self
    where
        F: Fn(&Req) -> Option<Call>,
    {
        ToolCallsLayer {
            provider: provider.clone(),
            call,
            classify: DefaultClassify::default(),
            limits: Limits::default(),
            switch: Switch::default(),
        }
    }
}

impl<F, C> ToolCallsLayer<F, C> {
    /// After how many failures in a row a tool is called no more in a task; at least 1, default 5.
    #[must_use]
    pub fn failures(mut self, failures: u32) -> Self {
        self.limits.failures = failures.max(1);
        self
    }

    /// How many tool calls a task may make; default 1000.
    #[must_use]
    pub fn calls(mut self, calls: u32) -> Self {
        self.limits.calls = calls;
        self
    }

    /// How replies are understood.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> ToolCallsLayer<F, D> {
        ToolCallsLayer {
            provider: self.provider,
            call: self.call,
            classify,
            limits: self.limits,
            switch: self.switch,
        }
    }

    /// Enforces, observes or stands aside as this switch says; default: one of its own, that enforces. While it
    /// observes, a call that would have been refused passes and is not noted; while it is off, none is.
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

impl<F, C> fmt::Debug for ToolCallsLayer<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolCallsLayer")
            .field("provider", &self.provider)
            .field("limits", &self.limits)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, F: Clone, C: Clone> Layer<S> for ToolCallsLayer<F, C> {
    type Service = ToolCalls<S, F, C>;
    fn layer(&self, inner: S) -> Self::Service {
        ToolCalls {
            inner,
            provider: self.provider.clone(),
            call: self.call.clone(),
            classify: self.classify.clone(),
            limits: self.limits,
            switch: self.switch.clone(),
        }
    }
}
