use super::service::Timed;
use crate::classify::{DefaultMode, Replies};
use std::{fmt, marker::PhantomData, time::Duration};
use tower_layer::Layer;

/// Ends a call whose provider is silent for too long. See the [module](super).
#[derive(Clone, Copy)]
pub struct AttemptTimeoutLayer<M = DefaultMode> {
    headers: Duration,
    idle: Duration,
    mode: PhantomData<fn() -> M>,
}

impl AttemptTimeoutLayer {
    /// `headers` to the head of the reply, 60 s between pieces of its body.
    #[must_use]
    pub fn new(headers: Duration) -> Self {
        AttemptTimeoutLayer { headers, idle: Duration::from_secs(60), mode: PhantomData }
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
        AttemptTimeoutLayer { headers: self.headers, idle: self.idle, mode: PhantomData }
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
        Timed::new(inner, self.headers, self.idle)
    }
}

impl<M> fmt::Debug for AttemptTimeoutLayer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttemptTimeoutLayer")
            .field("headers", &self.headers)
            .field("idle", &self.idle)
            .finish()
    }
}
