use super::{Criticality, DEFAULT_ALLOWANCE, DEFAULT_DEADLINE, HasTask, Key, Task, far, fresh_id};
use crate::random::Seeds;
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tower_layer::Layer;
use tower_service::Service;

/// Starts a [`Task`] for each request that belongs to none. Outermost in the stack.
///
/// Left out, nothing breaks but much is lost: every layer then assumes a deadline of its own, two
/// nested retry layers do not know of each other's attempts, queues cannot be fair between callers,
/// and a ladder hashes all requests alike.
///
/// A request that brings its task keeps it. Starting one allocates: the handle, and the request's
/// extensions if it had none.
///
/// ```
/// use std::time::Duration;
/// use tower::ServiceBuilder;
/// use tower_herd::{Key, TaskLayer};
///
/// let layer = TaskLayer::new()
///     .deadline(Duration::from_secs(20))
///     .caller(|request: &http::Request<()>| request.headers().get("x-agent").map(|v| Key::from(v.as_bytes())));
/// let service = ServiceBuilder::new().layer(layer).service(tower::service_fn(|_: http::Request<()>| async {
///     Ok::<_, std::convert::Infallible>(http::Response::new(()))
/// }));
/// # let _ = service;
/// ```
pub struct TaskLayer<C = NoCaller> {
    shared: Arc<Shared>,
    caller: C,
}

#[derive(Clone, Debug)]
struct Defaults {
    deadline: Duration,
    allowance: u32,
    criticality: Criticality,
}

#[derive(Debug)]
struct Shared {
    defaults: Defaults,
    seeds: Seeds,
}

/// No caller is named: all tasks share one place in the queues' round.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCaller;

/// How the caller of a request is found: a closure, or [`NoCaller`].
pub trait CallerOf<Req> {
    /// The agent that the request comes from.
    fn caller_of(&self, request: &Req) -> Option<Key>;
}
impl<Req> CallerOf<Req> for NoCaller {
    fn caller_of(&self, _: &Req) -> Option<Key> {
        None
    }
}
impl<Req, F: Fn(&Req) -> Option<Key>> CallerOf<Req> for F {
    fn caller_of(&self, request: &Req) -> Option<Key> {
        self(request)
    }
}

impl TaskLayer {
    /// Deadline 60 s, allowance 3, interactive, ids drawn at random.
    #[must_use]
    pub fn new() -> Self {
        let defaults = Defaults {
            deadline: DEFAULT_DEADLINE,
            allowance: DEFAULT_ALLOWANCE,
            criticality: Criticality::default(),
        };
        TaskLayer { shared: Arc::new(Shared { defaults, seeds: Seeds::from_entropy() }), caller: NoCaller }
    }
}

impl Default for TaskLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<C> TaskLayer<C> {
    fn change(self, change: impl FnOnce(&mut Defaults)) -> Self {
        let mut defaults = self.shared.defaults.clone();
        change(&mut defaults);
        TaskLayer { shared: Arc::new(Shared { defaults, seeds: Seeds::from_entropy() }), caller: self.caller }
    }

    /// How long a task may take in all.
    #[must_use]
    pub fn deadline(self, time: Duration) -> Self {
        self.change(|d| d.deadline = time)
    }

    /// How many wire calls of a task may fail; at least 1.
    #[must_use]
    pub fn allowance(self, attempts: u32) -> Self {
        self.change(|d| d.allowance = attempts)
    }

    /// Whom the tasks make wait.
    #[must_use]
    pub fn criticality(self, criticality: Criticality) -> Self {
        self.change(|d| d.criticality = criticality)
    }

    /// Draws ids from a fixed seed, for runs that repeat.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        let shared = Shared { defaults: self.shared.defaults.clone(), seeds: Seeds::from_seed(seed) };
        TaskLayer { shared: Arc::new(shared), caller: self.caller }
    }

    /// Finds out which agent a request comes from.
    #[must_use]
    pub fn caller<D>(self, caller: D) -> TaskLayer<D> {
        TaskLayer { shared: self.shared, caller }
    }
}

impl<C: Clone> Clone for TaskLayer<C> {
    fn clone(&self) -> Self {
        TaskLayer { shared: self.shared.clone(), caller: self.caller.clone() }
    }
}

impl<C> fmt::Debug for TaskLayer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskLayer").field("defaults", &self.shared.defaults).finish_non_exhaustive()
    }
}

impl<S, C: Clone> Layer<S> for TaskLayer<C> {
    type Service = StartTask<S, C>;
    fn layer(&self, inner: S) -> Self::Service {
        StartTask { inner, shared: self.shared.clone(), caller: self.caller.clone() }
    }
}

/// The service of [`TaskLayer`].
#[derive(Clone)]
pub struct StartTask<S, C = NoCaller> {
    inner: S,
    shared: Arc<Shared>,
    caller: C,
}

impl<S: fmt::Debug, C> fmt::Debug for StartTask<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartTask").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, C, Req> Service<Req> for StartTask<S, C>
where
    S: Service<Req>,
    Req: HasTask,
    C: CallerOf<Req>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Req) -> S::Future {
        if request.task().is_none() {
            let defaults = &self.shared.defaults;
            let mut task = Task::new(fresh_id(&self.shared.seeds).get())
                .deadline(far(defaults.deadline))
                .allowance(defaults.allowance)
                .criticality(defaults.criticality);
            if let Some(caller) = self.caller.caller_of(&request) {
                task = task.caller(caller.get());
            }
            request.set_task(task);
        }
        self.inner.call(request)
    }
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use tower::{ServiceExt, service_fn};

    type Request = http::Request<()>;

    async fn seen<C: CallerOf<Request> + Clone>(layer: TaskLayer<C>, request: Request) -> Task {
        let echo = service_fn(|r: Request| async move { Ok::<_, Infallible>(r.task().cloned().unwrap()) });
        layer.layer(echo).oneshot(request).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn starts_a_task_where_none_is_and_keeps_the_callers_own() {
        let now = tokio::time::Instant::now();
        let task = seen(TaskLayer::new(), Request::default()).await;
        assert_eq!(task.deadline_at(), Some(now + Duration::from_secs(60)));
        assert_eq!((task.allowance_total(), task.caller_key()), (3, None));
        let own = Task::new("own").allowance(9);
        let mut request = Request::default();
        request.set_task(own.clone());
        assert!(seen(TaskLayer::new(), request).await.is(&own));
    }

    #[tokio::test(start_paused = true)]
    async fn every_option_changes_the_task() {
        let now = tokio::time::Instant::now();
        let layer = TaskLayer::new()
            .deadline(Duration::from_secs(5))
            .allowance(7)
            .criticality(Criticality::Batch)
            .caller(|r: &Request| r.headers().get("x-agent").map(|v| Key::from(v.as_bytes())));
        let request = http::Request::builder().header("x-agent", "a").body(()).unwrap();
        let task = seen(layer, request).await;
        assert_eq!(task.deadline_at(), Some(now + Duration::from_secs(5)));
        assert_eq!((task.allowance_total(), task.criticality_class()), (7, Criticality::Batch));
        assert_eq!(task.caller_key(), Some("a".into()));
    }

    #[tokio::test]
    async fn ids_differ_and_a_seed_repeats_them() {
        let layer = TaskLayer::new().seed(3);
        let first = seen(layer.clone(), Request::default()).await.id();
        let second = seen(layer, Request::default()).await.id();
        assert_ne!(first, second);
        assert_eq!(seen(TaskLayer::new().seed(3), Request::default()).await.id(), first);
    }
}
