//! The stack of this project, whole and in parts.

use std::time::Duration;

use http_body_util::Full;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::observe::{Event, Observe};
use tower_herd::refusal::error_reply;
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, BreakerLayer, BudgetLayer, ClassifyLayer, Fleet, FleetLimitLayer,
    HasTask, HashedFailover, IncomingAttemptsLayer, JitteredRetryLayer, Mode, Provider, ProviderSettings,
    RampedReadmissionLayer, RatioBudget, RetryAfterLayer, Safety, Switch, Task, TaskLayer,
    breaker::BreakerSettings, failover::Rung, store::FleetSettings,
};

use super::{Client, Policy, SimRequest, SimResponse, TaskInfo, World, erase, hop::Upstream};
use crate::BoxError;
use crate::scenario::{Log, Scenario, Settings, What};

/// Retry, a ladder, and per rung ramp, breaker, throttle, pause, fleet limit, attempts, sensor and attempt
/// timeout, all as they come. Nothing about the providers is configured unless the settings say so.
#[derive(Clone, Copy, Debug, Default)]
pub struct TowerHerd;

impl Policy for TowerHerd {
    fn name(&self) -> &'static str {
        "tower-herd"
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        world
            .processes()
            .map(|process| client(world, process, BreakerSettings::new(), Mode::Enforce))
            .collect()
    }
}

/// The same with the breaker's strict settings: five failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct StrictBreaker;

impl Policy for StrictBreaker {
    fn name(&self) -> &'static str {
        "tower-herd-strict"
    }

    fn plays(&self, settings: &Settings) -> bool {
        matches!(settings.scenario, Scenario::Brownout | Scenario::Recovery)
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some("tower-herd with BreakerLayer's strict settings: it opens after 5 failures in a row".into())
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        world
            .processes()
            .map(|process| client(world, process, BreakerSettings::strict(), Mode::Enforce))
            .collect()
    }
}

/// The same with its breaker switched off: retries, budget, throttle, pause and limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBreaker;

impl Policy for NoBreaker {
    fn name(&self) -> &'static str {
        "tower-herd-no-breaker"
    }

    fn plays(&self, settings: &Settings) -> bool {
        matches!(settings.scenario, Scenario::Amplification | Scenario::Brownout)
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some("tower-herd with BreakerLayer switched off".into())
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        world.processes().map(|process| client(world, process, BreakerSettings::new(), Mode::Off)).collect()
    }
}

/// Adaptive throttling alone, over the sensor: no retries, no breaker, no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThrottleOnly;

impl Policy for ThrottleOnly {
    fn name(&self) -> &'static str {
        "throttle-only"
    }

    fn plays(&self, settings: &Settings) -> bool {
        settings.scenario == Scenario::Recovery && settings.ceilings.len() == 1
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some("tower-herd's BudgetLayer over its sensor, at the first rung; nothing is sent again".into())
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        let client = |process| {
            let (fleet, _) = fleet(world, process)?;
            let provider = fleet.provider(&rung_name(0));
            let throttle = ServiceBuilder::new()
                .layer(BudgetLayer::new(&provider))
                .layer(ClassifyLayer::new(&provider))
                .layer(AttemptTimeoutLayer::new(timeout(&world.settings)))
                .service(world.rungs(process).remove(0));
            Ok(Client::new(move |request: SimRequest, task: TaskInfo| {
                let call = throttle.clone().oneshot(tasked(request, task, 1));
                async move { call.await.map(erase) }
            }))
        };
        world.processes().map(client).collect()
    }
}

/// The stack of one process: processes share nothing but the providers themselves, and the store if there is
/// one.
fn client(world: &World, process: u32, breaker: BreakerSettings, mode: Mode) -> Result<Client, BoxError> {
    let (fleet, seed) = fleet(world, process)?;
    let settings = &world.settings;
    let attempts = settings.attempts;
    let mut rungs = Vec::new();
    for (i, service) in world.rungs(process).into_iter().enumerate() {
        let mut known = ProviderSettings::new().aborts(settings.aborts);
        if settings.configured && !world.is_above() {
            known = known.ceiling(settings.ceilings[i]);
        }
        let provider = fleet.configure(&rung_name(i), known)?;
        let log = world.log.clone();
        let breaker = BreakerLayer::new(&provider)
            .settings(breaker)?
            .switch(&Switch::new(mode))
            .on_alert(move |_| log.note(process, i, What::Alert));
        // Of a service of one's own one knows that it hears of deadlines.
        let stack = stack(&provider, breaker, service, timeout(settings), world.is_above());
        rungs.push(Rung::new(&provider, stack).tier(i as u32));
    }
    let budget = RatioBudget::default();
    let ladder = HashedFailover::new(rungs)?.budget(&budget);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().seed(seed))
        .layer(JitteredRetryLayer::new().attempts(attempts).budget(budget).seed(seed))
        .service(ladder);
    if settings.stacks > 1 {
        return Ok(served(service, attempts, settings.deadline, seed));
    }
    Ok(Client::new(move |request: SimRequest, task: TaskInfo| {
        let call = service.clone().oneshot(tasked(request, task, attempts));
        async move { call.await.map(erase) }
    }))
}

/// The layers of one rung, outermost first.
fn stack(
    provider: &Provider,
    breaker: BreakerLayer,
    service: Upstream,
    timeout: Duration,
    own: bool,
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
        .layer(RampedReadmissionLayer::new(provider))
        .layer(breaker)
        .layer(BudgetLayer::new(provider))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(AttemptsLayer::new(provider).tell_first(own))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::new(timeout))
        .service(service)
}

/// A service that answers others by this stack: it takes in what a request says of its attempts, and marks
/// what was given up.
fn served<S, B>(stack: S, attempts: u32, deadline: Duration, seed: u64) -> Client
where
    S: Service<SimRequest, Response = http::Response<B>, Error = BoxError, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    B: http_body::Body<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let incoming = IncomingAttemptsLayer::new().allowance(attempts).deadline(deadline).seed(seed);
    let handler = service_fn(move |request: SimRequest| {
        let call = stack.clone().oneshot(request);
        async move {
            let reply: SimResponse = match call.await {
                Ok(reply) => erase(reply),
                Err(e) => erase(error_reply::<Full<bytes::Bytes>>(&*e)),
            };
            Ok::<_, BoxError>(reply)
        }
    });
    let server = ServiceBuilder::new().layer(incoming).service(handler);
    Client::new(move |request: SimRequest, task: TaskInfo| {
        let call = server.clone().oneshot(tasked(request, task, attempts));
        async move { call.await.map(erase) }
    })
}

/// The fleet that a process is in, with all who share its store or alone, and its seed.
fn fleet(world: &World, process: u32) -> Result<(Fleet, u64), BoxError> {
    let seed = world.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(process);
    let fleet = match &world.store {
        Some(store) => {
            let settings = &world.settings;
            let mut sharing = FleetSettings::new()
                .on_this_runtime()
                .weight(settings.weight(process))
                .outage(settings.outage_policy);
            if let Some(longest) = settings.longest_call {
                sharing = sharing.strict(longest);
            }
            Fleet::shared(store.process(process), sharing)?
        }
        None => Fleet::local(),
    };
    Ok((fleet.observer(Diary { log: world.log.clone(), process }).seed(seed), seed))
}

/// As one would choose it who knows how long calls take: 30 s, or more for slow models.
fn timeout(settings: &Settings) -> Duration {
    Duration::from_secs(30).max(settings.latency * 4)
}

fn tasked(mut request: SimRequest, task: TaskInfo, attempts: u32) -> SimRequest {
    // One agent lives in one process, and queues are fair between agents.
    let started = Task::new(task.id).caller(u64::from(task.agent)).deadline(task.deadline);
    request.set_task(started.allowance(attempts));
    request.extensions_mut().insert(Safety::Costly);
    request
}

const RUNG: &str = "rung-";

fn rung_name(rung: usize) -> String {
    format!("{RUNG}{}", rung + 1)
}

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
