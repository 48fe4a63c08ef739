//! The stack of this project.

use super::{Client, Policy, SimRequest, TaskInfo, World, erase, hop::Upstream};
use crate::BoxError;
use crate::scenario::{Log, What};
use std::time::Duration;
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_herd::observe::{Event, Observe};
use tower_herd::{
    AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, HasTask, HashedFailover, JitteredRetryLayer,
    Provider, ProviderSettings, RatioBudget, RetryAfterLayer, Safety, Task, TaskLayer, failover::Rung,
};

/// Retry, a ladder, and per rung pause, fleet limit, sensor and attempt timeout. Nothing about the
/// providers is configured unless the settings say so.
#[derive(Clone, Copy, Debug, Default)]
pub struct TowerHerd;

impl Policy for TowerHerd {
    fn name(&self) -> &'static str {
        "tower-herd"
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        world.processes().map(|process| client(world, process)).collect()
    }
}

/// The stack of one process: processes share nothing but the providers themselves.
fn client(world: &World, process: u32) -> Result<Client, BoxError> {
    let seed = world.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(process);
    let fleet = Fleet::local().observer(Diary { log: world.log.clone(), process }).seed(seed);
    let settings = &world.settings;
    // As one would choose it who knows how long calls take: 30 s, or more for slow models.
    let timeout = Duration::from_secs(30).max(settings.latency * 4);
    let attempts = settings.attempts;
    let mut rungs = Vec::new();
    for (i, service) in world.rungs(process).into_iter().enumerate() {
        let mut known = ProviderSettings::new().aborts(settings.aborts);
        if settings.configured && settings.stacks == 1 {
            known = known.ceiling(settings.ceilings[i]);
        }
        let provider = fleet.configure(&format!("{RUNG}{}", i + 1), known)?;
        rungs.push(Rung::new(&provider, stack(&provider, service, timeout)).tier(i as u32));
    }
    let budget = RatioBudget::default();
    let ladder = HashedFailover::new(rungs)?.budget(&budget);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().seed(seed))
        .layer(JitteredRetryLayer::new().attempts(attempts).budget(budget).seed(seed))
        .service(ladder);
    Ok(Client::new(move |mut request: SimRequest, task: TaskInfo| {
        let service = service.clone();
        // One agent lives in one process, and queues are fair between agents.
        let started = Task::new(task.id).caller(u64::from(task.agent)).deadline(task.deadline);
        request.set_task(started.allowance(attempts));
        request.extensions_mut().insert(Safety::Costly);
        async move { service.oneshot(request).await.map(erase) }
    }))
}

const RUNG: &str = "rung-";

/// Writes down what only the stack itself knows.
struct Diary {
    log: Log,
    process: u32,
}

impl Observe for Diary {
    fn observe(&self, event: &Event<'_>) {
        let (provider, what) = match *event {
            Event::Breaker { provider, to: "open", .. } => (provider, What::Opened),
            Event::Breaker { provider, .. } => (provider, What::Closed),
            Event::Ramp { provider, share, .. } => (provider, What::Ramp(share)),
            _ => return,
        };
        let rung = provider.strip_prefix(RUNG).and_then(|n| n.parse::<usize>().ok()).unwrap_or(1);
        self.log.note(self.process, rung.saturating_sub(1), what);
    }
}

/// The layers of one rung, outermost first.
fn stack(
    provider: &Provider,
    service: Upstream,
    timeout: Duration,
) -> impl Service<
    SimRequest,
    Response = http::Response<
        impl http_body::Body<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
    >,
    Error = BoxError,
    Future: Send,
> + Clone
+ Send
+ Sync
+ 'static {
    ServiceBuilder::new()
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::new(timeout))
        .service(service)
}
