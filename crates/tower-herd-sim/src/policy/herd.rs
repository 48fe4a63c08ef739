//! The stack of this project.

use super::{Client, Policy, SimRequest, TaskInfo, World, erase};
use crate::{BoxError, provider::ProviderService};
use std::time::Duration;
use tower::{Service, ServiceBuilder, ServiceExt};
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
    let fleet = Fleet::local().seed(seed);
    let settings = &world.settings;
    // As one would choose it who knows how long calls take: 30 s, or more for slow models.
    let timeout = Duration::from_secs(30).max(settings.latency * 4);
    let mut rungs = Vec::new();
    for (i, service) in world.rungs(process).into_iter().enumerate() {
        let mut known = ProviderSettings::new().aborts(settings.aborts);
        if settings.configured {
            known = known.ceiling(settings.ceilings[i]);
        }
        let provider = fleet.configure(&format!("rung-{}", i + 1), known)?;
        rungs.push(Rung::new(&provider, stack(&provider, service, timeout)).tier(i as u32));
    }
    let budget = RatioBudget::default();
    let ladder = HashedFailover::new(rungs)?.budget(&budget);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().seed(seed))
        .layer(JitteredRetryLayer::new().budget(budget).seed(seed))
        .service(ladder);
    Ok(Client::new(move |mut request: SimRequest, task: TaskInfo| {
        let service = service.clone();
        // One agent lives in one process, and queues are fair between agents.
        request.set_task(Task::new(task.id).caller(u64::from(task.agent)).deadline(task.deadline));
        request.extensions_mut().insert(Safety::Costly);
        async move { service.oneshot(request).await.map(erase) }
    }))
}

fn stack(
    provider: &Provider,
    service: ProviderService,
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
