use super::{
    service::Attempts,
    told::{self, Dialects, Told},
};
use crate::{HasTask, Mode, Provider, Switch, observe::Event};
use http::HeaderMap;
use std::{fmt, sync::Arc};
use tokio::time::Instant;
use tower_layer::Layer;

/// The client's side of the amplification guard: tells the provider which attempt this is and what is left,
/// and reports when something in between repeats our calls. See the [module](super).
///
/// It needs the task, and the mark of a repetition, that [`TaskLayer`](crate::TaskLayer) and
/// [`JitteredRetryLayer`](crate::JitteredRetryLayer) leave on the request. It changes no errors, and of replies
/// only its own count where a server has sent it back. In a ladder the number is that of the walk: a first call
/// at another rung is no repetition there.
#[derive(Clone)]
pub struct AttemptsLayer {
    shared: Shared,
}

/// What all services of one layer share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) provider: Provider,
    pub(super) dialects: Dialects,
    pub(super) tell_first: bool,
    pub(super) switch: Switch,
}

impl AttemptsLayer {
    /// All dialects, on repetitions and where the task came with such headers itself.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        let dialects = Dialects { own: true, grpc: true, envoy: true };
        let provider = provider.clone();
        AttemptsLayer { shared: Shared { provider, dialects, tell_first: false, switch: Switch::default() } }
    }

    /// Whether a first call says too what is left of its task: for providers that are services of your own.
    /// Default no; then a first call costs nothing.
    #[must_use]
    pub fn tell_first(mut self, tells: bool) -> Self {
        self.shared.tell_first = tells;
        self
    }

    /// Whether our own header is written. Default yes.
    #[must_use]
    pub fn own(mut self, writes: bool) -> Self {
        self.shared.dialects.own = writes;
        self
    }

    /// Whether gRPC requests say `grpc-previous-rpc-attempts`. Default yes.
    #[must_use]
    pub fn grpc(mut self, writes: bool) -> Self {
        self.shared.dialects.grpc = writes;
        self
    }

    /// Whether `x-envoy-attempt-count` is written. Default yes.
    #[must_use]
    pub fn envoy(mut self, writes: bool) -> Self {
        self.shared.dialects.envoy = writes;
        self
    }

    /// What it is switched by. In [`Mode::Observe`](crate::Mode::Observe) nothing is written, the requests that
    /// would have been written to are counted, and inner retries are reported.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.shared.switch = switch.clone();
        self
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.shared.switch
    }
}

impl Shared {
    /// Tells the provider of the `attempt`-th call.
    #[cold]
    pub(super) fn write<B>(&self, request: &mut http::Request<B>, attempt: u32) {
        let told = Told::next(request.task(), attempt, Instant::now());
        self.dialects.write(request.headers_mut(), &told, attempt);
    }

    /// The reply to our `attempt`-th call says that so many were made.
    #[cold]
    pub(super) fn told_back(&self, attempt: u32, calls: u32, headers: &mut HeaderMap) {
        if calls > attempt {
            report(&self.provider, calls);
        } else if attempt > 1 && self.switch.mode() == Mode::Enforce {
            // Our own number, which whoever hands this reply on must not hand on as theirs.
            told::forget(headers);
        }
    }
}

fn report(provider: &Provider, calls: u32) {
    if provider.notes_inner_retries() {
        provider.observe(|| Event::InnerRetries { provider: provider.name(), attempts: calls });
    }
}

/// What the layer does with the reply to a first call that went out without it.
#[cfg(feature = "herd")]
#[inline]
pub(crate) fn replied_to_first<B>(provider: &Provider, reply: &http::Response<B>) {
    if let Some(calls) = told::calls_told(reply.version(), reply.headers())
        && calls > 1
    {
        report(provider, calls);
    }
}

impl<S> Layer<S> for AttemptsLayer {
    type Service = Attempts<S>;
    fn layer(&self, inner: S) -> Attempts<S> {
        Attempts::new(inner, Arc::new(self.shared.clone()))
    }
}

impl fmt::Debug for AttemptsLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttemptsLayer")
            .field("provider", &self.shared.provider)
            .field("dialects", &self.shared.dialects)
            .field("tell_first", &self.shared.tell_first)
            .field("switch", &self.shared.switch)
            .finish()
    }
}
