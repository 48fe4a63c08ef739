//! Runs one policy through one scenario under a paused clock.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use tokio::task::LocalSet;
use tokio::time::Instant;

use super::settings::{LimitKind, MEAN_COST, Scenario, Settings, SettingsError};
use crate::BoxError;
use crate::policy::{Client, Oracle, Policy, SimRequest, TaskInfo, World};
use crate::provider::{CallRecord, Caller, Stats};
use crate::report::Row;

/// Why a run could not be made.
#[derive(Debug)]
pub enum RunError {
    /// The settings are not valid.
    Settings(SettingsError),
    /// The policy could not be built.
    Policy {
        /// Its name.
        name: &'static str,
        /// Why.
        source: BoxError,
    },
    /// The runtime could not be built.
    Runtime(std::io::Error),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settings(e) => e.fmt(f),
            Self::Policy { name, source } => write!(f, "policy {name}: {source}"),
            Self::Runtime(e) => write!(f, "no runtime: {e}"),
        }
    }
}

impl std::error::Error for RunError {}

impl From<SettingsError> for RunError {
    fn from(e: SettingsError) -> Self {
        Self::Settings(e)
    }
}

/// What became of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskResult {
    /// Its number.
    pub id: u64,
    /// Its agent.
    pub agent: u32,
    /// When it was started.
    pub started: Duration,
    /// When it was over.
    pub ended: Duration,
    /// Why it was lost, if it was.
    pub lost: Option<String>,
}

/// One rung after a run.
#[derive(Clone, Debug)]
pub struct RungRun {
    /// Its name.
    pub name: String,
    /// Its figures.
    pub stats: Stats,
    /// Its calls in order of arrival.
    pub records: Vec<CallRecord>,
    /// Calls in service over time.
    pub in_flight: Vec<(Duration, u64)>,
    /// The ceiling over time, where it is one of concurrency.
    pub ceiling: Vec<(Duration, u32)>,
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The settings.
    pub settings: Settings,
    /// The policy's name.
    pub policy: &'static str,
    /// The policy's description, if it has one.
    pub about: Option<String>,
    /// The seed.
    pub seed: u64,
    /// When the last task was over.
    pub elapsed: Duration,
    /// All tasks, in order of their end.
    pub tasks: Vec<TaskResult>,
    /// All rungs, cheapest first.
    pub rungs: Vec<RungRun>,
}

impl Run {
    /// Tasks done.
    pub fn done(&self) -> u64 {
        self.tasks.iter().filter(|t| t.lost.is_none()).count() as u64
    }

    /// The figures of all rungs together.
    pub fn stats(&self) -> Stats {
        Stats::of_all(self.rungs.iter().map(|r| (&r.stats, &r.records[..])))
    }

    /// The row of the table.
    pub fn row(&self, oracle_seconds: Option<f64>) -> Row {
        let s = self.stats();
        let by_rung =
            |f: fn(&Stats) -> u64| self.rungs.iter().map(|r| (r.name.clone(), f(&r.stats))).collect();
        let done = self.done();
        Row {
            scenario: self.settings.scenario.name().into(),
            policy: self.policy.into(),
            tasks: self.settings.tasks,
            done,
            lost: self.settings.tasks - done,
            wire_calls: Some(s.wire_calls),
            amplification: Row::ratio(s.wire_calls, s.tasks),
            throttled: Some(s.throttled),
            seconds: Row::round(self.elapsed.as_secs_f64()),
            oracle_seconds: oracle_seconds.map(Row::round),
            early_calls: Some(s.early_calls),
            duplicates: Some(s.duplicates),
            alerts: 0,
            peak_100ms: Some(by_rung(|s| s.peak_100ms)),
            in_flight_peak: Some(by_rung(|s| s.in_flight_peak)),
        }
    }

    /// A time by which this share of the tasks that were done was done.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let mut ends: Vec<Duration> =
            self.tasks.iter().filter(|t| t.lost.is_none()).map(|t| t.ended).collect();
        ends.sort_unstable();
        let last = ends.len().checked_sub(1)?;
        Some(ends[((last as f64) * share.clamp(0.0, 1.0)).round() as usize])
    }
}

/// A number that differs if anything about who called which rung when differs.
pub fn trace_hash(run: &Run) -> u64 {
    // FNV-1a: the same on every machine and with every compiler.
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    let mut eat = |n: u64| {
        for byte in n.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    };
    for rung in &run.rungs {
        for r in &rung.records {
            eat(r.arrival.as_nanos() as u64);
            eat(r.task.unwrap_or(u64::MAX));
            eat(u64::from(r.process));
            eat(r.outcome as u64);
        }
        eat(u64::MAX);
    }
    hash
}

/// The seconds the oracle takes with these settings.
pub fn oracle_seconds(settings: &Settings, seed: u64) -> Result<f64, RunError> {
    Ok(run(settings, &Oracle, seed)?.elapsed.as_secs_f64())
}

/// Runs a policy on a runtime of its own, whose clock is paused: takes milliseconds for minutes.
///
/// The same settings, policy and seed give the same trace. A policy that needs
/// [real time](Policy::real_time) gets it, and takes as long.
pub fn run(settings: &Settings, policy: &dyn Policy, seed: u64) -> Result<Run, RunError> {
    settings.validate()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(!policy.real_time(settings))
        .build()
        .map_err(RunError::Runtime)?;
    LocalSet::new().block_on(&runtime, drive(settings, policy, seed))
}

async fn drive(settings: &Settings, policy: &dyn Policy, seed: u64) -> Result<Run, RunError> {
    let started = Instant::now();
    let world = World::new(settings.clone(), seed);
    let broken = |source| RunError::Policy { name: policy.name(), source };
    let clients = policy.clients(&world).map_err(broken)?;
    if clients.len() != settings.processes as usize {
        let why = format!("made {} clients for {} processes", clients.len(), settings.processes);
        return Err(broken(why.into()));
    }
    let next = Rc::new(Cell::new(0u64));
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x5EED);
    let mut agents = Vec::new();
    for agent in 0..settings.agents {
        let process = agent % settings.processes;
        let client = clients[process as usize].clone();
        let start = started + crate::scale(settings.start_within, rng.f64());
        let plan = Plan { settings: settings.clone(), seed, started, start, agent, process };
        agents.push(tokio::task::spawn_local(live(plan, client, next.clone())));
    }
    let mut tasks = Vec::new();
    for agent in agents {
        match agent.await {
            Ok(mut results) => tasks.append(&mut results),
            Err(e) => std::panic::resume_unwind(e.into_panic()),
        }
    }
    let elapsed = tasks.iter().map(|t: &TaskResult| t.ended).max().unwrap_or_default();
    tasks.sort_by_key(|t| (t.ended, t.id));
    // What callers left behind still runs to its end at the providers, and counts.
    tokio::time::sleep(settings.latency * 2 + settings.body + settings.refusal_latency).await;
    let rungs = world.providers.iter().enumerate().map(|(i, p)| RungRun {
        name: format!("{}", i + 1),
        stats: p.stats(),
        records: p.records(),
        in_flight: p.in_flight_series(),
        ceiling: ceiling_steps(settings, i),
    });
    Ok(Run {
        settings: settings.clone(),
        policy: policy.name(),
        about: policy.describe(settings),
        seed,
        elapsed,
        tasks,
        rungs: rungs.collect(),
    })
}

fn ceiling_steps(settings: &Settings, rung: usize) -> Vec<(Duration, u32)> {
    if settings.limit != LimitKind::Concurrency {
        return Vec::new();
    }
    let ceiling = settings.ceilings[rung];
    let mut steps = vec![(Duration::ZERO, ceiling)];
    if rung + 1 == settings.cut_rung
        && let Some(cut) = settings.cut_at
    {
        steps.push((settings.scaled(cut), settings.cut_to));
        if let Some(back) = settings.returns {
            steps.push((settings.scaled(back), ceiling));
        }
    }
    steps
}

struct Plan {
    settings: Settings,
    seed: u64,
    started: Instant,
    start: Instant,
    agent: u32,
    process: u32,
}

/// The life of an agent: one task after the other until none is left.
async fn live(plan: Plan, client: Client, next: Rc<Cell<u64>>) -> Vec<TaskResult> {
    let mut results = Vec::new();
    tokio::time::sleep_until(plan.start).await;
    loop {
        let id = match plan.settings.scenario {
            // Every client has one task, its own.
            Scenario::EqualHint if results.is_empty() => u64::from(plan.agent),
            Scenario::EqualHint => return results,
            Scenario::Stampede => next.replace(next.get() + 1),
        };
        if id >= plan.settings.tasks {
            return results;
        }
        let began = Instant::now();
        let (request, task) = make(&plan, id, began + plan.settings.deadline);
        let work = async {
            let reply = client.call(request, task).await?;
            let status = reply.status();
            reply.into_body().collect().await?;
            if status.is_success() { Ok(()) } else { Err(BoxError::from(format!("answered {status}"))) }
        };
        let lost = match tokio::time::timeout_at(task.deadline, work).await {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e.to_string()),
            Err(_) => Some("deadline".into()),
        };
        let (started, ended) = (began - plan.started, plan.started.elapsed());
        results.push(TaskResult { id, agent: plan.agent, started, ended, lost });
    }
}

fn make(plan: &Plan, id: u64, deadline: Instant) -> (SimRequest, TaskInfo) {
    let cost = match plan.settings.limit {
        LimitKind::Tokens => {
            let mut rng = fastrand::Rng::with_seed(plan.seed.rotate_left(17) ^ id);
            (MEAN_COST * (0.5 + rng.f64())).round()
        }
        _ => 1.0,
    };
    let task = TaskInfo { id, agent: plan.agent, process: plan.process, deadline, cost };
    let body = format!("{{\"model\":\"any\",\"task\":{id},\"messages\":[]}}");
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("http://rung-1/v1/chat/completions");
    let headers = request.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    headers.insert("x-safety", http::HeaderValue::from_static("costly"));
    headers.insert("x-task-id", id.into());
    request.extensions_mut().insert(Caller { task: Some(id), process: Some(plan.process), cost: Some(cost) });
    request.extensions_mut().insert(task);
    (request, task)
}
