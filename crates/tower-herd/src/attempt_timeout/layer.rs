use super::service::Timed;
use crate::{
    Switch,
    classify::{DefaultMode, Replies},
};
use std::{fmt, marker::PhantomData, time::Duration};
use tower_layer::Layer;

/// Ends a call whose provider is silent for too long. See the [module](super).
#[derive(Clone)]
pub struct AttemptTimeoutLayer<M = DefaultMode> {
    headers: Duration,
    idle: Duration,
    switch: Switch,
    mode: PhantomData<fn() -> M>,
}

impl AttemptTimeoutLayer {
    /// `headers` to the head of the reply, 60 s between pieces of its body.
    #[must_use]
    pub fn new(headers: Duration) -> Self {
        let (idle, switch) = (Duration::from_secs(60), Switch::default());
        AttemptTimeoutLayer { headers, idle, switch, mode: PhantomData }
    }
}

impl Default for AttemptTimeoutLayer {
    /// 30 s to the head of the reply, 60 s between pieces of its body.
    fn default() -> Self {
        Self::new(Duration::from_secs(30))
    }
}

impl<M> AttemptTimeoutLayer<M> {
    /// For replies of any type, which end when they are there: the response passes unchanged.
    #[must_use]
    pub fn replies(self) -> AttemptTimeoutLayer<Replies> {
        AttemptTimeoutLayer { headers: self.headers, idle: self.idle, switch: self.switch, mode: PhantomData }
    }

    /// Whether it ends calls, only counts those that outlive it, or stands aside. See
    /// [`switch`](crate::switch).
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

#[cfg(feature = "http")]
impl AttemptTimeoutLayer<crate::classify::Bodies> {
    /// How long a body may stand still while somebody waits for it.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = idle;
        self
    }
}

impl<S, M> Layer<S> for AttemptTimeoutLayer<M> {
    type Service = Timed<S, M>;
    fn layer(&self, inner: S) -> Self::Service {
        Timed::new(inner, self.headers, self.idle, self.switch.clone())
    }
}

impl<M> fmt::Debug for AttemptTimeoutLayer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttemptTimeoutLayer")
            .field("headers", &self.headers)
            .field("idle", &self.idle)
            .field("switch", &self.switch)
            .finish()
    }
}
