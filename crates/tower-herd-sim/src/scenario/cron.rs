//! The other half of the scenario `cron`: jobs that fail, and what retries them.
//!
//! Three agents are triggered by one clock, and what their jobs depend on is down. The first half asks what the provider
//! sees of a thousand jobs that start at one instant; this one what it sees of the **retries** of a few. It runs the real
//! layers, [`RetryTokenLayer`] and [`JobBreakerLayer`], over one store of tokens, as job runners would: a queue that
//! waits 2^n seconds before retry n and counts attempts, agents that put back what is refused.
//!
//! | fix | what it is |
//! |---|---|
//! | `none` | the queue's own back-off: 2, 4, 8 s and so on, up to 10 min |
//! | `jitter` | the same, plus or minus 30 % |
//! | `token` | retry tokens, with waits like those |
//! | `jitter+token` | retry tokens with their default jitter |
//! | `breaker` | the back-off, and one breaker for all agents: 5 failures in a row, 10 min |
//! | `all` | retry tokens with jitter, inside the breaker |

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::util::{BoxCloneService, ServiceExt};
use tower::{Layer, Service};
use tower_herd::random::{Random, Seeds};
use tower_herd::retry_token::{
    Defer, Deferral, DeferredBy, JobBreakerLayer, LocalTokens, RetryTokenLayer, Schedule, TokenSettings,
    Tokens,
};
use tower_herd::{BoxError, Refusal};

/// What is done about the retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fix {
    /// The queue's own back-off.
    None,
    /// The same, with jitter.
    Jitter,
    /// Retry tokens without jitter.
    Token,
    /// Retry tokens as they are by default.
    JitterToken,
    /// The back-off, and the breaker that all agents share.
    Breaker,
    /// Tokens with jitter inside the breaker.
    All,
}

impl Fix {
    /// All of them, in the order of the table.
    pub const ALL: [Fix; 6] =
        [Self::None, Self::Jitter, Self::Token, Self::JitterToken, Self::Breaker, Self::All];

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Jitter => "jitter",
            Self::Token => "token",
            Self::JitterToken => "jitter+token",
            Self::Breaker => "breaker",
            Self::All => "all",
        }
    }

    fn jitter(self) -> f64 {
        if matches!(self, Self::Jitter | Self::JitterToken | Self::All) { 0.3 } else { 0.0 }
    }

    fn token(self) -> bool {
        matches!(self, Self::Token | Self::JitterToken | Self::All)
    }

    fn breaker(self) -> bool {
        matches!(self, Self::Breaker | Self::All)
    }
}

/// Who is triggered, and how long nothing works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jobs {
    /// Agents. Each has its own trigger.
    pub agents: usize,
    /// Distinct jobs. One: all agents are triggered for it. More: each is one agent's.
    pub jobs: usize,
    /// How long what they depend on is down, from the trigger on.
    pub outage: Duration,
    /// How long a call of it takes.
    pub latency: Duration,
}

impl Default for Jobs {
    /// Three agents, one job, 130 s, 50 ms.
    fn default() -> Self {
        Jobs { agents: 3, jobs: 1, outage: Duration::from_secs(130), latency: Duration::from_millis(50) }
    }
}

/// What the dependency saw while it was down, and how it ended.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Figures {
    /// Calls while it was down.
    pub calls: usize,
    /// The most of them in any 60 s.
    pub peak_minute: usize,
    /// The most in any 60 s that were not a trigger's first.
    pub retries_minute: usize,
    /// The most in any second.
    pub peak_second: usize,
    /// Jobs that were refused and put back while it was down.
    pub requeues: usize,
    /// People told.
    pub alerts: usize,
    /// Seconds from its return until the last job was done.
    pub drained: f64,
}

/// A job, as the queue hands it out.
#[derive(Clone)]
struct Job {
    key: Arc<str>,
    attempt: u32,
    put_back: PutBack,
    first: bool,
}

/// When the queue is to hand it out again.
#[derive(Clone, Default)]
struct PutBack(Arc<Mutex<Option<Deferral>>>);

impl PutBack {
    fn set(&self, deferral: Option<Deferral>) -> Option<Deferral> {
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), deferral)
    }
}

/// The adapter to this queue.
#[derive(Clone)]
struct Queue;

impl Defer<Job> for Queue {
    type Handle = PutBack;
    type Error = BoxError;
    fn handle(&self, job: &Job) -> PutBack {
        job.put_back.clone()
    }
    async fn defer(&self, handle: PutBack, deferral: Deferral) -> Result<(), BoxError> {
        handle.set(Some(deferral));
        Ok(())
    }
}

#[derive(Debug)]
struct Down;

impl fmt::Display for Down {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("503")
    }
}

impl std::error::Error for Down {}

/// What the jobs depend on.
#[derive(Clone)]
struct Dependency {
    start: Instant,
    jobs: Jobs,
    calls: Arc<Mutex<Vec<(Duration, bool)>>>,
}

impl Service<Job> for Dependency {
    type Response = ();
    type Error = Down;
    type Future = Pin<Box<dyn Future<Output = Result<(), Down>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Down>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, job: Job) -> Self::Future {
        let (at, latency) = (self.start.elapsed(), self.jobs.latency);
        let down = at < self.jobs.outage;
        if down {
            self.calls.lock().unwrap_or_else(PoisonError::into_inner).push((at, job.first));
        }
        Box::pin(async move {
            sleep(latency).await;
            if down { Err(Down) } else { Ok(()) }
        })
    }
}

type Agent = BoxCloneService<Job, (), BoxError>;

/// Runs one fix with one seed.
///
/// # Panics
///
/// If there is no clock to be had for a runtime of one thread.
pub fn play(fix: Fix, jobs: &Jobs, seed: u64) -> Figures {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => runtime.block_on(played(fix, jobs, seed)),
        // Without a clock there is no simulation, and no figure to be had.
        Err(error) => panic!("no runtime: {error}"),
    }
}

async fn played(fix: Fix, jobs: &Jobs, seed: u64) -> Figures {
    let start = Instant::now();
    let dependency = Dependency { start, jobs: *jobs, calls: Arc::default() };
    let (requeues, alerts) = (Arc::new(Mutex::new(0)), Arc::new(Mutex::new(0)));
    // One store; each agent is a process of its own beside it.
    let store = LocalTokens::seeded(1024, seed);
    let seeds = Seeds::from_seed(seed ^ 0xc4_07);
    let agents: Vec<Agent> = (0..jobs.agents.max(1))
        .map(|_| {
            let settings = TokenSettings::new().seed(seeds.session().bits());
            let tokens = Tokens::with("jobs", store.clone(), settings).expect("the default settings");
            agent(fix, &tokens, &dependency, &alerts)
        })
        .collect();
    let copies: Vec<(usize, usize)> = match jobs.jobs {
        0 | 1 => (0..agents.len()).map(|agent| (agent, 0)).collect(),
        n => (0..n).map(|job| (job % agents.len(), job)).collect(),
    };
    let mut tasks = JoinSet::new();
    for (agent, job) in copies {
        let (agent, random) = (agents[agent].clone(), seeds.session());
        let worker =
            work(fix, agent, format!("job {job}").into(), random, requeues.clone(), start + jobs.outage);
        tasks.spawn(worker);
    }
    // Nobody waits longer than the longest wait twice over.
    let rest = jobs.outage + Duration::from_secs(4 * 3600);
    timeout(rest, async { while tasks.join_next().await.is_some() {} }).await.ok();
    let drained = start.elapsed().saturating_sub(jobs.outage).as_secs_f64();
    let calls = dependency.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let all: Vec<Duration> = calls.iter().map(|(at, _)| *at).collect();
    let retries: Vec<Duration> = calls.iter().filter(|(_, first)| !first).map(|(at, _)| *at).collect();
    let minute = Duration::from_secs(60);
    let number = |count: &Mutex<usize>| *count.lock().unwrap_or_else(PoisonError::into_inner);
    Figures {
        calls: all.len(),
        peak_minute: most_within(&all, minute),
        retries_minute: most_within(&retries, minute),
        peak_second: most_within(&all, Duration::from_secs(1)),
        requeues: number(&requeues),
        alerts: number(&alerts),
        drained,
    }
}

/// The stack of one agent.
fn agent(
    fix: Fix,
    tokens: &Tokens<LocalTokens>,
    dependency: &Dependency,
    alerts: &Arc<Mutex<usize>>,
) -> Agent {
    let service = dependency.clone().map_err(BoxError::from);
    let schedule = Schedule::new().jitter(fix.jitter()).expect("0 or 0.3");
    let key = |job: &Job| Some(job.key.clone());
    let service: Agent = if fix.token() {
        let layer =
            RetryTokenLayer::new(tokens, key, |job: &Job| job.attempt).schedule(schedule).defer(Queue);
        BoxCloneService::new(layer.layer(service))
    } else {
        BoxCloneService::new(service)
    };
    if !fix.breaker() {
        return service;
    }
    let alerts = alerts.clone();
    let breaker = JobBreakerLayer::new(tokens, |_: &Job| Some("dependency"))
        .defer(Queue)
        .on_alert(move |_| *alerts.lock().unwrap_or_else(PoisonError::into_inner) += 1);
    BoxCloneService::new(breaker.layer(service))
}

/// A queue with one job: hands it out until it is done.
async fn work(
    fix: Fix,
    agent: Agent,
    key: Arc<str>,
    mut random: Random,
    requeues: Arc<Mutex<usize>>,
    back: Instant,
) {
    let queue = Schedule::new().jitter(fix.jitter()).expect("0 or 0.3");
    let mut job = Job { key, attempt: 1, put_back: PutBack::default(), first: true };
    loop {
        let result = agent.clone().oneshot(job.clone()).await;
        let put_back = job.put_back.set(None);
        job.first = false;
        let wait = match (result, put_back) {
            (Ok(()), _) => return,
            (Err(_), Some(Deferral { wait, why: DeferredBy::Refusal(_), .. })) => {
                // Not run: the queue counts no attempt.
                if Instant::now() < back {
                    *requeues.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                }
                wait
            }
            (Err(error), put_back) => {
                debug_assert!(Refusal::find(&*error).is_none(), "each refusal is put back");
                let wait = queue.delay(job.attempt, random.unit());
                job.attempt += 1;
                put_back.map_or(wait, |deferral| deferral.wait)
            }
        };
        sleep(wait).await;
    }
}

/// The most instants in any stretch of this length.
fn most_within(sorted: &[Duration], length: Duration) -> usize {
    let mut sorted = sorted.to_vec();
    sorted.sort_unstable();
    let within = |i: usize| sorted[i..].iter().take_while(|at| **at < sorted[i] + length).count();
    (0..sorted.len()).map(within).max().unwrap_or(0)
}

/// The table of all fixes, as Markdown: one job of three agents, then twelve distinct ones.
pub fn table(seed: u64) -> String {
    let mut out = String::from(
        "| fix | calls | most in 60 s | retries in 60 s | most in 1 s | put back | alerts | 12 jobs: retries in 60 s |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for fix in Fix::ALL {
        let one = play(fix, &Jobs::default(), seed);
        let many = play(fix, &Jobs { jobs: 12, ..Jobs::default() }, seed);
        out.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |\n",
            fix.name(),
            one.calls,
            one.peak_minute,
            one.retries_minute,
            one.peak_second,
            one.requeues,
            one.alerts,
            many.retries_minute,
        ));
    }
    out
}

/// The same as lines of JSON.
pub fn json(seed: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for jobs in [1, 12] {
        for fix in Fix::ALL {
            let figures = play(fix, &Jobs { jobs, ..Jobs::default() }, seed);
            let line = serde_json::json!({
                "scenario": "cron", "part": "retries", "fix": fix.name(), "jobs": jobs, "seed": seed,
                "figures": figures,
            });
            lines.push(line.to_string());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_within_any_stretch() {
        let at = |ms: &[u64]| ms.iter().copied().map(Duration::from_millis).collect::<Vec<_>>();
        let second = Duration::from_secs(1);
        assert_eq!(most_within(&at(&[]), second), 0);
        assert_eq!(most_within(&at(&[0, 1000, 2000]), second), 1);
        assert_eq!(most_within(&at(&[2000, 0, 999, 1500]), second), 2);
        assert_eq!(most_within(&at(&[0, 500, 999, 1499]), second), 3);
    }
}
