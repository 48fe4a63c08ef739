//! Runs one policy through one scenario under a paused clock.

use std::fmt;
use std::time::Duration;

use tokio::task::LocalSet;
use tokio::time::Instant;

use super::drive;
use super::log::{Noted, What};
use super::settings::{LimitKind, Scenario, Settings, SettingsError};
use crate::BoxError;
use crate::policy::{Oracle, Policy, World};
use crate::provider::{CallRecord, Stats};
use crate::report::Row;
use crate::store::{ScriptedStore, StoreStats};

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
    /// What went to and from the store, if there was one.
    pub store: Option<StoreStats>,
    /// What the policy itself told: trips, ramps, alerts.
    pub events: Vec<Noted>,
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

    /// Things of one kind that the policy told.
    pub fn told(&self, what: impl Fn(&What) -> bool) -> u64 {
        self.events.iter().filter(|e| what(&e.what)).count() as u64
    }

    /// The longest time from the start of a task to its good end.
    pub fn longest_wait(&self) -> Option<Duration> {
        let done = self.tasks.iter().filter(|t| t.lost.is_none());
        done.map(|t| t.ended.saturating_sub(t.started)).max()
    }

    /// The longest time from a start of all jobs to the end of the last of them.
    pub fn drain(&self) -> Option<Duration> {
        let every = self.settings.every?;
        let since = |t: &TaskResult| {
            let period = t.id / u64::from(self.settings.agents.max(1));
            t.ended.saturating_sub(every.saturating_mul(u32::try_from(period).unwrap_or(u32::MAX)))
        };
        self.tasks.iter().map(since).max()
    }

    /// The longest time that an agent waited for the end of its first task, beside a greedy one.
    pub fn first_wait(&self) -> Option<Duration> {
        if self.settings.greedy == 0 {
            return None;
        }
        let mut first = std::collections::BTreeMap::new();
        for t in self.tasks.iter().filter(|t| t.agent > 0) {
            let ended = first.entry(t.agent).or_insert(t.ended);
            *ended = t.ended.min(*ended);
        }
        first.into_values().max()
    }

    /// The row of the table, beside the oracle's run of the same settings and seed.
    pub fn row_beside(&self, oracle: &Run) -> Row {
        let mut row = self.row(Some(oracle.elapsed.as_secs_f64()));
        let round = |d: Duration| Row::round(d.as_secs_f64());
        row.oracle_longest_wait = oracle.longest_wait().map(round);
        row.oracle_drain = oracle.drain().map(round);
        row.recovery = self.recovery(oracle);
        row.fleet = (self.settings.scenario == Scenario::Fleet).then(|| self.fleet(oracle)).flatten();
        row
    }

    /// The row of the table.
    pub fn row(&self, oracle_seconds: Option<f64>) -> Row {
        let s = self.stats();
        let by_rung =
            |f: fn(&Stats) -> u64| self.rungs.iter().map(|r| (r.name.clone(), f(&r.stats))).collect();
        let round = |d: Duration| Row::round(d.as_secs_f64());
        let done = self.done();
        Row {
            scenario: self.settings.scenario.name().into(),
            policy: self.policy.into(),
            tasks: self.settings.tasks,
            done,
            lost: self.settings.tasks - done,
            wire_calls: Some(s.wire_calls),
            called: Some(s.tasks),
            amplification: Row::ratio(s.wire_calls, s.tasks),
            throttled: Some(s.throttled),
            seconds: Row::round(self.elapsed.as_secs_f64()),
            oracle_seconds: oracle_seconds.map(Row::round),
            early_calls: Some(s.early_calls),
            duplicates: Some(s.duplicates),
            alerts: self.told(|w| *w == What::Alert),
            peak_100ms: Some(by_rung(|s| s.peak_100ms)),
            in_flight_peak: Some(by_rung(|s| s.in_flight_peak)),
            longest_wait: self.longest_wait().map(round),
            oracle_longest_wait: None,
            first_wait: self.first_wait().map(round),
            drain: self.drain().map(round),
            oracle_drain: None,
            trips: self.told(|w| *w == What::Opened),
            recovery: None,
            fleet: None,
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
    LocalSet::new().block_on(&runtime, play(settings, policy, seed))
}

async fn play(settings: &Settings, policy: &dyn Policy, seed: u64) -> Result<Run, RunError> {
    let started = Instant::now();
    let world = World::new(settings.clone(), seed);
    let broken = |source| RunError::Policy { name: policy.name(), source };
    let mut clients = Vec::new();
    for level in 0..settings.stacks {
        let world = if level == 0 { world.clone() } else { world.above(level, clients) };
        clients = policy.clients(&world).map_err(broken)?;
        if clients.len() != settings.processes as usize {
            let why = format!("made {} clients for {} processes", clients.len(), settings.processes);
            return Err(broken(why.into()));
        }
    }
    let mut tasks = drive::tasks(settings, seed, started, &clients).await;
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
        settings: Settings { tasks: tasks.len() as u64, ..settings.clone() },
        policy: policy.name(),
        about: policy.describe(settings),
        seed,
        elapsed,
        tasks,
        rungs: rungs.collect(),
        store: world.store.as_ref().map(ScriptedStore::stats),
        events: world.log.taken(),
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
