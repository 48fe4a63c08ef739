//! A fleet of agents in a closed loop: each takes the next task when its last one is over.

use std::{
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, header::CONTENT_TYPE};
use http_body_util::Full;
use tokio::{task::JoinSet, time::Instant};
use tower_herd::{HasTask, Provider, Safety, Task};
use tower_herd_sim::{
    provider::{CallRecord, Outcome, ScriptedProvider, Stats, peak},
    report::Row,
    scenario::{Run, RungRun, Settings, TaskResult},
};

use crate::{
    crossing,
    options::Target,
    policies::{self, Call},
    providers::Providers,
    wire::{Book, Completion, Of, Page, Wire},
};

/// Which policy runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Naive,
    TowerHerd,
}

impl Policy {
    /// The name, the same as in the simulator.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Naive => "naive",
            Policy::TowerHerd => "tower-herd",
        }
    }
}

/// Where the calls go.
pub enum Field<'a> {
    /// To our own servers, which count.
    Ours(&'a Providers),
    /// To somebody else's, of which only our side is known.
    Theirs(&'a [Target]),
}

/// What a watcher of a run sees.
pub struct Live {
    pub policy: Policy,
    pub tasks: u64,
    pub done: AtomicU64,
    pub lost: AtomicU64,
    pub book: Arc<Book>,
    /// The handles of the stack; none where the policy has no idea of its providers.
    pub providers: Vec<Provider>,
    ended: Mutex<Vec<TaskResult>>,
    next: AtomicU64,
    started: Instant,
}

/// A run that is over, or was stopped.
pub struct Finished {
    pub run: Run,
    pub row: Row,
    pub stopped: bool,
}

/// Runs one policy until all tasks are over, or until `stop`.
pub async fn drive(
    settings: &Settings,
    seed: u64,
    policy: Policy,
    field: &Field<'_>,
    watch: impl FnOnce(Arc<Live>),
    stop: impl Future<Output = ()>,
) -> Result<Finished, String> {
    let (targets, counting) = match field {
        Field::Ours(providers) => (providers.targets(settings), Some(providers.restart(settings, seed))),
        Field::Theirs(targets) => (targets.to_vec(), None),
    };
    let book = Book::new(targets.len());
    let wire = Wire::new(book.clone());
    let (call, providers) = match policy {
        Policy::Naive => (policies::naive(wire, targets), Vec::new()),
        Policy::TowerHerd => policies::tower_herd(wire, &targets, seed).map_err(|e| e.to_string())?,
    };
    let live = Arc::new(Live {
        policy,
        tasks: settings.tasks,
        done: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        book,
        providers,
        ended: Mutex::default(),
        next: AtomicU64::new(0),
        started: Instant::now(),
    });
    watch(live.clone());

    let mut agents = JoinSet::new();
    for agent in 0..settings.agents {
        agents.spawn(work(live.clone(), call.clone(), agent, settings.deadline));
    }
    let stopped = tokio::select! {
        () = async { while agents.join_next().await.is_some() {} } => false,
        () = stop => true,
    };
    agents.shutdown().await;
    if let (Some(counting), false) = (&counting, stopped) {
        settle(counting, settings.latency * 2).await;
    }
    Ok(finish(settings, seed, &live, counting.as_deref(), stopped))
}

/// The life of an agent.
async fn work(live: Arc<Live>, call: Call, agent: u32, deadline: Duration) {
    loop {
        let id = live.next.fetch_add(1, Ordering::Relaxed);
        if id >= live.tasks {
            return;
        }
        let began = Instant::now();
        let request = completion(id, agent, began + deadline);
        let lost = match tokio::time::timeout_at(began + deadline, call(request)).await {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e.to_string()),
            Err(_) => Some("deadline".into()),
        };
        let count = if lost.is_none() { &live.done } else { &live.lost };
        count.fetch_add(1, Ordering::Relaxed);
        let (started, ended) = (began - live.started, live.started.elapsed());
        let result = TaskResult { id, agent, started, ended, lost };
        live.ended.lock().unwrap_or_else(PoisonError::into_inner).push(result);
    }
}

/// A JSON POST that may be repeated, though that costs money, and says which task and agent it belongs to.
fn completion(id: u64, agent: u32, deadline: Instant) -> Completion {
    let body = format!(r#"{{"model":"any","messages":[{{"role":"user","content":"task {id}"}}]}}"#);
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = Method::POST;
    request.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    request.headers_mut().insert("x-task-id", id.into());
    request.extensions_mut().insert(Of(id));
    request.extensions_mut().insert(Safety::Costly);
    request.set_task(Task::new(id).caller(u64::from(agent)).deadline(deadline));
    request
}

/// Calls that were given up still run at the providers, and count there.
async fn settle(providers: &[ScriptedProvider], longest: Duration) {
    let until = Instant::now() + longest;
    while providers.iter().any(|p| p.in_flight() > 0) && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn finish(
    settings: &Settings,
    seed: u64,
    live: &Live,
    counting: Option<&[ScriptedProvider]>,
    stopped: bool,
) -> Finished {
    let mut tasks = live.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
    tasks.sort_by_key(|t| (t.ended, t.id));
    let mut settings = settings.clone();
    if stopped {
        // What was never begun is not lost.
        settings.tasks = tasks.len() as u64;
    }
    let rungs = match counting {
        Some(providers) => {
            let sent = live.book.pages().iter().map(Page::calls);
            providers
                .iter()
                .zip(sent)
                .enumerate()
                .map(|(i, (p, sent))| counted(&settings, i, p, &sent))
                .collect()
        }
        None => live.book.pages().iter().enumerate().map(|(i, page)| sent(i, page.calls())).collect(),
    };
    let elapsed = tasks.last().map_or(live.started.elapsed(), |t| t.ended);
    let policy = live.policy.name();
    let run =
        Run { settings, policy, about: None, seed, elapsed, tasks, rungs, events: Vec::new(), store: None };
    let mut row = run.row(None);
    if counting.is_none() {
        (row.early_calls, row.duplicates, row.peak_100ms, row.in_flight_peak) = (None, None, None, None);
    }
    Finished { run, row, stopped }
}

/// A rung as it counted itself.
fn counted(settings: &Settings, at: usize, provider: &ScriptedProvider, sent: &[CallRecord]) -> RungRun {
    let mut ceiling = vec![(Duration::ZERO, settings.ceilings[at])];
    if let Some(cut) = settings.cut_at.filter(|_| at + 1 == settings.cut_rung) {
        ceiling.push((settings.scaled(cut), settings.cut_to));
    }
    let (mut stats, mut records) = (provider.stats(), provider.records());
    crossing::forgive(&mut records, sent, settings.hint.unwrap_or_default());
    stats.early_calls = records.iter().filter(|r| r.early).count() as u64;
    let in_flight = provider.in_flight_series();
    RungRun { name: (at + 1).to_string(), stats, records, in_flight, ceiling }
}

/// A rung as we saw it from our side.
fn sent(at: usize, records: Vec<CallRecord>) -> RungRun {
    let count = |outcome| records.iter().filter(|r| r.outcome == outcome).count() as u64;
    let times: Vec<Duration> = records.iter().map(|r| r.arrival).collect();
    let mut steps: Vec<(Duration, i64)> = records.iter().map(|r| (r.arrival, 1)).collect();
    steps.extend(records.iter().filter_map(|r| Some((r.ended?, -1))));
    steps.sort_unstable();
    let mut level = 0i64;
    let series = steps.into_iter().map(|(at, by)| {
        level += by;
        (at, level.unsigned_abs())
    });
    let in_flight: Vec<(Duration, u64)> = series.collect();
    let stats = Stats {
        wire_calls: records.len() as u64,
        served: count(Outcome::Served),
        throttled: count(Outcome::Throttled),
        failed: count(Outcome::Failed),
        unreachable: count(Outcome::Unreachable),
        aborted: count(Outcome::Aborted),
        peak_100ms: peak(&times, Duration::from_millis(100)),
        peak_1s: peak(&times, Duration::from_secs(1)),
        in_flight_peak: in_flight.iter().map(|(_, n)| *n).max().unwrap_or(0),
        ..Stats::default()
    };
    RungRun { name: (at + 1).to_string(), stats, records, in_flight, ceiling: Vec::new() }
}
