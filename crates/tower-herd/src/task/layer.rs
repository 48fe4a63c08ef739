use super::{Criticality, DEFAULT_ALLOWANCE, DEFAULT_DEADLINE, HasTask, Task, far, fresh_id};
use crate::{Mode, Switch, random::Seeds};
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
/// use tower_herd::{Criticality, TaskLayer};
///
/// let layer = TaskLayer::new()
///     .deadline(Duration::from_secs(20))
///     .with(|request: &http::Request<()>, task| match request.headers().get("x-agent") {
///         Some(agent) => task.caller(agent.as_bytes()),
///         None => task.criticality(Criticality::Batch), // nobody waits for it
///     });
/// let service = ServiceBuilder::new().layer(layer).service(tower::service_fn(|_: http::Request<()>| async {
///     Ok::<_, std::convert::Infallible>(http::Response::new(()))
/// }));
/// # let _ = service;
/// ```
pub struct TaskLayer<D = Alike> {
    shared: Arc<Shared>,
    switch: Switch,
    describe: D,
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

/// All tasks of a layer are alike: the default of [`TaskLayer`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Alike;

/// What a request says of its task: a closure, or [`Alike`].
pub trait Describe<Req> {
    /// `task`, with what the request says of it.
    fn describe(&self, request: &Req, task: Task) -> Task;
}
impl<Req> Describe<Req> for Alike {
    fn describe(&self, _: &Req, task: Task) -> Task {
        task
    }
}
impl<Req, F: Fn(&Req, Task) -> Task> Describe<Req> for F {
    fn describe(&self, request: &Req, task: Task) -> Task {
        self(request, task)
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
        let shared = Arc::new(Shared { defaults, seeds: Seeds::from_entropy() });
        TaskLayer { shared, switch: Switch::default(), describe: Alike }
    }
}

impl Default for TaskLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<D> TaskLayer<D> {
    fn change(self, change: impl FnOnce(&mut Defaults)) -> Self {
        let mut defaults = self.shared.defaults.clone();
        change(&mut defaults);
        TaskLayer {
            // Drawn from the old ones, so that a fixed seed stays fixed.
            shared: Arc::new(Shared {
                defaults,
                seeds: Seeds::from_seed(self.shared.seeds.session().bits()),
            }),
            switch: self.switch,
            describe: self.describe,
        }
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
        TaskLayer { shared: Arc::new(shared), switch: self.switch, describe: self.describe }
    }

    /// What each request says of its task: `describe(&request, task)` is given a task with a fresh id
    /// and the settings of this layer, and returns it with its id, caller, affinity, deadline, allowance
    /// or criticality changed.
    #[must_use]
    pub fn with<Req, E: Fn(&Req, Task) -> Task>(self, describe: E) -> TaskLayer<E> {
        TaskLayer { shared: self.shared, switch: self.switch, describe }
    }

    /// Whether it starts tasks, or stands aside ([`Mode::Off`]): the layers below then assume what they
    /// assume without it. It holds nothing back, so [`Mode::Observe`] is the same as to enforce.
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

impl<D: Clone> Clone for TaskLayer<D> {
    fn clone(&self) -> Self {
        TaskLayer {
            shared: self.shared.clone(),
            switch: self.switch.clone(),
            describe: self.describe.clone(),
        }
    }
}

impl<D> fmt::Debug for TaskLayer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskLayer")
            .field("defaults", &self.shared.defaults)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, D: Clone> Layer<S> for TaskLayer<D> {
    type Service = StartTask<S, D>;
    fn layer(&self, inner: S) -> Self::Service {
        StartTask {
            inner,
            shared: self.shared.clone(),
            switch: self.switch.clone(),
            describe: self.describe.clone(),
        }
    }
}

/// The service of [`TaskLayer`].
#[derive(Clone)]
pub struct StartTask<S, D = Alike> {
    inner: S,
    shared: Arc<Shared>,
    switch: Switch,
    describe: D,
}

impl<S: fmt::Debug, D> fmt::Debug for StartTask<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartTask").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, D, Req> Service<Req> for StartTask<S, D>
where
    S: Service<Req>,
    Req: HasTask,
    D: Describe<Req>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Req) -> S::Future {
        if request.task().is_none() && self.switch.mode() != Mode::Off {
            let defaults = &self.shared.defaults;
            let task = Task::new(fresh_id(&self.shared.seeds).get())
                .deadline(far(defaults.deadline))
                .allowance(defaults.allowance)
                .criticality(defaults.criticality);
            let task = self.describe.describe(&request, task);
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

    async fn seen<D: Describe<Request> + Clone>(layer: TaskLayer<D>, request: Request) -> Task {
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
            .with(|r: &Request, task| task.with_id(9).affinity(4).caller(r.headers()["x-agent"].as_bytes()));
        let request = http::Request::builder().header("x-agent", "a").body(()).unwrap();
        let task = seen(layer, request).await;
        assert_eq!(task.deadline_at(), Some(now + Duration::from_secs(5)));
        assert_eq!((task.allowance_total(), task.criticality_class()), (7, Criticality::Batch));
        assert_eq!((task.id().get(), task.affinity_key().get()), (9, 4));
        assert_eq!(task.caller_key(), Some("a".into()));
    }

    #[tokio::test]
    async fn ids_differ_and_a_seed_repeats_them() {
        let layer = TaskLayer::new().seed(3);
        let first = seen(layer.clone(), Request::default()).await.id();
        let second = seen(layer, Request::default()).await.id();
        assert_ne!(first, second);
        assert_eq!(seen(TaskLayer::new().seed(3), Request::default()).await.id(), first);
        let later = || TaskLayer::new().seed(3).allowance(2);
        let ids =
            (seen(later(), Request::default()).await.id(), seen(later(), Request::default()).await.id());
        assert_eq!(ids.0, ids.1, "whatever is set after it");
    }
}
