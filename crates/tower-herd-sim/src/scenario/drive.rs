//! Who starts which task when: a closed loop, an open one, or jobs on the minute.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::happens::{Happens, Trouble};
use super::run::TaskResult;
use super::settings::{LimitKind, MEAN_COST, Scenario, Settings};
use crate::BoxError;
use crate::policy::{Client, SimRequest, TaskInfo};
use crate::provider::Caller;

/// What all tasks of a run share.
struct Stage {
    settings: Settings,
    seed: u64,
    started: Instant,
    clients: Vec<Client>,
    /// The next task of a closed loop.
    next: Cell<u64>,
    results: RefCell<Vec<TaskResult>>,
}

/// Plays all tasks to their end.
pub(super) async fn tasks(
    settings: &Settings,
    seed: u64,
    started: Instant,
    clients: &[Client],
) -> Vec<TaskResult> {
    let stage = Rc::new(Stage {
        settings: settings.clone(),
        seed,
        started,
        clients: clients.to_vec(),
        next: Cell::new(u64::from(settings.greedy)),
        results: RefCell::default(),
    });
    let mut playing = JoinSet::new();
    match (settings.rate, settings.every) {
        (Some(rate), _) => open(&stage, rate, &mut playing).await,
        (None, Some(every)) => by_the_clock(&stage, every, &mut playing).await,
        (None, None) => {
            let mut rng = fastrand::Rng::with_seed(seed ^ 0x5EED);
            // The greedy one is there first, with all it has, and comes for no more.
            for id in 0..u64::from(settings.greedy) {
                playing.spawn_local(one(stage.clone(), id, 0));
            }
            for agent in u32::from(settings.greedy > 0)..settings.agents {
                let start = started + crate::scale(settings.start_within, rng.f64());
                playing.spawn_local(live(stage.clone(), agent, start));
            }
        }
    }
    while let Some(over) = playing.join_next().await {
        unwrapped(over);
    }
    stage.results.take()
}

fn unwrapped(over: Result<(), tokio::task::JoinError>) {
    if let Err(e) = over {
        std::panic::resume_unwind(e.into_panic());
    }
}

/// Tasks arrive at a rate, whatever becomes of those before them.
async fn open(stage: &Rc<Stage>, rate: f64, playing: &mut JoinSet<()>) {
    let settings = &stage.settings;
    let mut rng = fastrand::Rng::with_seed(stage.seed ^ 0x0A22_1FA1);
    let mut at = Duration::ZERO;
    for id in 0u64.. {
        let gaps = if settings.even { 1.0 } else { -(1.0 - rng.f64()).ln() };
        at += crate::seconds(gaps / rate);
        if at >= settings.duration {
            return;
        }
        tokio::time::sleep_until(stage.started + at).await;
        let agent = (id % u64::from(settings.agents)) as u32;
        playing.spawn_local(one(stage.clone(), id, agent));
        while let Some(over) = playing.try_join_next() {
            unwrapped(over);
        }
    }
}

/// Every agent has a job that starts once a period, all at the same instant unless their clocks differ.
async fn by_the_clock(stage: &Rc<Stage>, every: Duration, playing: &mut JoinSet<()>) {
    let settings = &stage.settings;
    let mut rng = fastrand::Rng::with_seed(stage.seed ^ 0x5EED);
    let late: Vec<Duration> =
        (0..settings.agents).map(|_| crate::scale(settings.start_within, rng.f64())).collect();
    let mut at = Duration::ZERO;
    let mut id = 0;
    while at < settings.duration {
        for (agent, late) in (0u32..).zip(&late) {
            let (stage, start) = (stage.clone(), stage.started + at + *late);
            playing.spawn_local(async move {
                tokio::time::sleep_until(start).await;
                one(stage, id, agent).await;
            });
            id += 1;
        }
        at += every;
        tokio::time::sleep_until(stage.started + at).await;
    }
}

/// The life of an agent in a closed loop: one task after the other until none is left.
async fn live(stage: Rc<Stage>, agent: u32, start: Instant) {
    tokio::time::sleep_until(start).await;
    if stage.settings.scenario == Scenario::EqualHint {
        // Every client has one task, its own.
        return one(stage, u64::from(agent), agent).await;
    }
    loop {
        let id = stage.next.replace(stage.next.get() + 1);
        let over = match stage.settings.scenario {
            Scenario::Fleet => stage.started.elapsed() >= stage.settings.duration,
            _ => id >= stage.settings.tasks,
        };
        if over || stage.is_dead(stage.settings.home(agent)) {
            return;
        }
        one(stage.clone(), id, agent).await;
    }
}

/// One task, from its start to its result.
async fn one(stage: Rc<Stage>, id: u64, agent: u32) {
    let began = Instant::now();
    let process = stage.settings.home(agent);
    let deadline = began + stage.settings.deadline;
    let task = TaskInfo { id, agent, process, deadline, cost: cost(&stage, id) };
    let client = stage.clients[process as usize].clone();
    let work = async {
        let reply = client.call(request(task), task).await?;
        let status = reply.status();
        reply.into_body().collect().await?;
        if status.is_success() { Ok(()) } else { Err(BoxError::from(format!("answered {status}"))) }
    };
    let work = Lived { work: Box::pin(work), stage: &stage, process, still: None };
    let lost = match tokio::time::timeout_at(deadline, work).await {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e.to_string()),
        Err(_) => Some("deadline".into()),
    };
    let (started, ended) = (began - stage.started, stage.started.elapsed());
    stage.results.borrow_mut().push(TaskResult { id, agent, started, ended, lost });
}

/// The work of a process that may be stopped, and killed, meanwhile. Who is stopped is not polled.
struct Lived<'a, F> {
    work: std::pin::Pin<Box<F>>,
    stage: &'a Stage,
    process: u32,
    still: Option<std::pin::Pin<Box<tokio::time::Sleep>>>,
}

impl<T, F: Future<Output = Result<T, BoxError>>> Future for Lived<'_, F> {
    type Output = F::Output;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Lived { work, stage, process, still } = &mut *self;
        loop {
            if stage.is_dead(*process) {
                return Poll::Ready(Err("killed".into()));
            }
            let (stopped, next) = stage.trouble(*process);
            if stopped.is_none()
                && let Poll::Ready(done) = work.as_mut().poll(cx)
            {
                return Poll::Ready(done);
            }
            let Some(at) = stopped.or(next) else { return Poll::Pending };
            let timer = still.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
            timer.as_mut().reset(at);
            ready!(timer.as_mut().poll(cx));
        }
    }
}

impl Stage {
    fn of(&self, process: u32, what: Trouble) -> impl Iterator<Item = &Happens> {
        self.settings.happens.iter().filter(move |h| h.what == what && h.process == process)
    }

    fn is_dead(&self, process: u32) -> bool {
        let now = self.started.elapsed();
        self.of(process, Trouble::Kill).any(|kill| kill.at <= now)
    }

    /// Until when a process is stopped, and when it is killed next.
    fn trouble(&self, process: u32) -> (Option<Instant>, Option<Instant>) {
        let now = self.started.elapsed();
        let stopped = self.of(process, Trouble::Stop).filter(|stop| (stop.at..stop.to).contains(&now));
        let stopped = stopped.map(|stop| self.started + stop.to).max();
        let kill = self.of(process, Trouble::Kill).filter(|kill| kill.at > now);
        (stopped, kill.map(|kill| self.started + kill.at).min())
    }
}

fn cost(stage: &Stage, id: u64) -> f64 {
    match stage.settings.limit {
        LimitKind::Tokens => {
            let mut rng = fastrand::Rng::with_seed(stage.seed.rotate_left(17) ^ id);
            (MEAN_COST * (0.5 + rng.f64())).round()
        }
        _ => 1.0,
    }
}

fn request(task: TaskInfo) -> SimRequest {
    let body = format!("{{\"model\":\"any\",\"task\":{},\"messages\":[]}}", task.id);
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("http://rung-1/v1/chat/completions");
    let headers = request.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    headers.insert("x-safety", http::HeaderValue::from_static("costly"));
    headers.insert("x-task-id", task.id.into());
    let caller = Caller { task: Some(task.id), process: Some(task.process), cost: Some(task.cost) };
    request.extensions_mut().insert(caller);
    request.extensions_mut().insert(task);
    request
}
