use super::{
    future::IncomingFuture,
    told::{self, Told},
};
use crate::{
    Exhausted, HasTask, Mode, Switch, Task,
    http::grpc,
    random::Seeds,
    task::{DEFAULT_ALLOWANCE, DEFAULT_DEADLINE, fresh_id},
};
use http::HeaderValue;
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

/// The server's side of the amplification guard: takes in what a request says of its attempts, and marks the
/// replies of tasks that were given up. See the [module](super).
///
/// Each request gets a [`Task`], or keeps the one that [`TaskLayer`](crate::TaskLayer) has started,
/// narrowed to what its headers say: fewer attempts, less time. The handler gives that task to the calls that
/// it makes for the request, as an extension.
///
/// A reply that failed (status 400 and up, or a gRPC status) is marked when it bears [`Exhausted`] or when a
/// layer has given up on a call of the task: `x-should-retry: false`, whatever stood there, and for gRPC
/// `grpc-retry-pushback-ms: -1`. Errors pass unchanged (axum has none); turn those of a stack into replies
/// with [`error_reply`](crate::refusal::error_reply).
///
/// Where the request says that something between its sender and us has sent it more than once
/// (`x-envoy-attempt-count`), the reply says so too, and the sender's [`AttemptsLayer`](super::AttemptsLayer)
/// reports it.
#[derive(Clone)]
pub struct IncomingAttemptsLayer {
    allowance: u32,
    deadline: Duration,
    switch: Switch,
    seeds: Arc<Seeds>,
}

impl IncomingAttemptsLayer {
    /// At most 3 failed calls and 60 s for a request.
    #[must_use]
    pub fn new() -> Self {
        IncomingAttemptsLayer {
            allowance: DEFAULT_ALLOWANCE,
            deadline: DEFAULT_DEADLINE,
            switch: Switch::default(),
            seeds: Arc::new(Seeds::from_entropy()),
        }
    }

    /// How many wire calls made for one request may fail, whatever it says itself; at least 1, default 3.
    #[must_use]
    pub fn allowance(mut self, attempts: u32) -> Self {
        self.allowance = attempts.max(1);
        self
    }

    /// How long a request may take, whatever it says itself. Default 60 s.
    #[must_use]
    pub fn deadline(mut self, time: Duration) -> Self {
        self.deadline = time;
        self
    }

    /// Draws the ids of tasks from a fixed seed, for runs that repeat.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seeds = Arc::new(Seeds::from_seed(seed));
        self
    }

    /// What it is switched by. In [`Mode::Observe`](crate::Mode::Observe) requests and replies pass unchanged, and
    /// replies that would have been marked are counted.
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

    /// The task of a request with these headers.
    fn task(&self, own: Option<Task>, told: &Told) -> Task {
        let now = Instant::now();
        let task = own
            .unwrap_or_else(|| Task::new(fresh_id(&self.seeds).get()).allowance(self.allowance))
            .narrowed(Some(self.allowance), now.checked_add(self.deadline), None);
        told.narrow(task, now)
    }
}

impl Default for IncomingAttemptsLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<S> Layer<S> for IncomingAttemptsLayer {
    type Service = IncomingAttempts<S>;
    fn layer(&self, inner: S) -> IncomingAttempts<S> {
        IncomingAttempts { inner, layer: self.clone() }
    }
}

impl fmt::Debug for IncomingAttemptsLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingAttemptsLayer")
            .field("allowance", &self.allowance)
            .field("deadline", &self.deadline)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

/// The service of [`IncomingAttemptsLayer`].
#[derive(Clone)]
pub struct IncomingAttempts<S> {
    inner: S,
    layer: IncomingAttemptsLayer,
}

impl<S: fmt::Debug> fmt::Debug for IncomingAttempts<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingAttempts").field("inner", &self.inner).field("layer", &self.layer).finish()
    }
}

impl<S, B, R> Service<http::Request<B>> for IncomingAttempts<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = IncomingFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let layer = &self.layer;
        let mode = layer.switch.mode();
        if mode == Mode::Off {
            return IncomingFuture::new(self.inner.call(request), None, None);
        }
        let calls = told::envoy_count(request.headers()).filter(|calls| *calls > 1);
        let marks =
            Marks { is_grpc: told::is_grpc(request.headers()), calls, switch: layer.switch.clone(), mode };
        let task = if mode == Mode::Enforce {
            let own = request.extensions_mut().remove::<Task>();
            let task = layer.task(own, &Told::of(request.headers()));
            request.set_task(task.clone());
            Some(task)
        } else {
            request.task().cloned()
        };
        IncomingFuture::new(self.inner.call(request), Some(marks), task)
    }
}

/// What the reply to one request is to say.
pub(super) struct Marks {
    is_grpc: bool,
    /// Something between its sender and us made so many calls of one.
    calls: Option<u32>,
    switch: Switch,
    mode: Mode,
}

impl Marks {
    pub(super) fn leave<B>(&self, reply: &mut http::Response<B>, task: Option<&Task>) {
        let failed = reply.status().as_u16() >= 400
            || reply.headers().get(grpc::STATUS).is_some_and(|status| grpc::code(status.as_bytes()) != 0);
        let given_up = failed
            && (reply.extensions().get::<Exhausted>().is_some() || task.is_some_and(Task::is_exhausted));
        if self.mode != Mode::Enforce {
            if given_up {
                self.switch.count();
            }
            return;
        }
        if given_up {
            self.mark(reply);
        }
        if let Some(calls) = self.calls {
            told::tell_back(reply.headers_mut(), calls);
        }
    }

    #[cold]
    fn mark<B>(&self, reply: &mut http::Response<B>) {
        let headers = reply.headers_mut();
        if self.is_grpc || headers.contains_key(grpc::STATUS) {
            headers.insert(grpc::PUSHBACK, HeaderValue::from_static("-1"));
        }
        headers.insert("x-should-retry", HeaderValue::from_static("false"));
    }
}
