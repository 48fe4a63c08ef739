//! A store that is not of this process, as far as the layer can tell, and can be lost; jobs, and what they leave behind.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::{
    convert::Infallible,
    error::Error,
    fmt,
    future::{Future, Ready, ready},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{BoxError, Service, ServiceExt};
use tower_herd::{
    Refusal,
    retry_token::{Claim, Defer, Deferral, HolderId, LocalTokens, RetryTokens, Schedule, Token},
};

pub const SECOND: Duration = Duration::from_secs(1);
pub const MS: fn(u64) -> Duration = Duration::from_millis;

/// How the store is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Health {
    /// An answer takes two milliseconds.
    #[default]
    Well,
    /// An error, after two milliseconds.
    Down,
    /// An answer takes ten seconds.
    Slow,
}

#[derive(Default)]
struct Counts {
    claims: AtomicU64,
    extends: AtomicU64,
    clears: AtomicU64,
    peeks: AtomicU64,
}

/// Tokens that several processes share.
#[derive(Clone, Default)]
pub struct Remote {
    pub tokens: LocalTokens,
    health: Arc<Mutex<Health>>,
    counts: Arc<Counts>,
}

#[derive(Debug)]
pub struct Lost;

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("connection refused")
    }
}

impl Error for Lost {}

impl Remote {
    pub fn new() -> Self {
        Remote { tokens: LocalTokens::seeded(4096, 7), ..Remote::default() }
    }

    pub fn set(&self, health: Health) {
        *self.health.lock().unwrap() = health;
    }

    /// Questions to it so far.
    pub fn asked(&self) -> u64 {
        self.claims() + self.extends() + self.clears() + self.counts.peeks.load(Relaxed)
    }
    pub fn claims(&self) -> u64 {
        self.counts.claims.load(Relaxed)
    }
    pub fn extends(&self) -> u64 {
        self.counts.extends.load(Relaxed)
    }
    pub fn clears(&self) -> u64 {
        self.counts.clears.load(Relaxed)
    }

    async fn answer<A>(
        &self,
        count: &AtomicU64,
        answer: impl Future<Output = Result<A, Infallible>>,
    ) -> Result<A, Lost> {
        count.fetch_add(1, Relaxed);
        let health = *self.health.lock().unwrap();
        sleep(if health == Health::Slow { 10 * SECOND } else { MS(2) }).await;
        match health {
            Health::Down => Err(Lost),
            _ => Ok(answer.await.unwrap_or_else(|never| match never {})),
        }
    }
}

impl RetryTokens for Remote {
    type Error = Lost;
    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Lost> {
        self.answer(&self.counts.claims, self.tokens.claim(key, schedule)).await
    }
    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, Lost> {
        self.answer(&self.counts.extends, self.tokens.extend(key, holder, at_least)).await
    }
    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, Lost> {
        self.answer(&self.counts.clears, self.tokens.clear(key, holder)).await
    }
    async fn peek(&self, key: &str) -> Result<Option<Token>, Lost> {
        self.answer(&self.counts.peeks, self.tokens.peek(key)).await
    }
    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, Lost> {
        self.answer(&self.counts.peeks, self.tokens.sweep(idle, limit)).await
    }
}

/// A job, as a queue hands it out.
#[derive(Clone, Debug)]
pub struct Job {
    pub key: Option<Arc<str>>,
    pub attempt: u32,
}

impl Job {
    pub fn new(key: &str, attempt: u32) -> Self {
        Job { key: Some(key.into()), attempt }
    }
}

pub fn key(job: &Job) -> Option<Arc<str>> {
    job.key.clone()
}

pub fn attempt(job: &Job) -> u32 {
    job.attempt
}

/// What the runs of a job come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Does {
    Succeed,
    Fail,
    Panic,
    /// Goes on for so long, and then does that.
    Take(Duration, bool),
}

#[derive(Debug)]
pub struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the job failed")
    }
}

impl Error for Failed {}

/// Runs jobs, and remembers when.
#[derive(Clone)]
pub struct Handler {
    does: Arc<Mutex<Does>>,
    pub runs: Arc<Mutex<Vec<Instant>>>,
    pub at_once: Arc<AtomicU32>,
    pub most_at_once: Arc<AtomicU32>,
}

impl Handler {
    pub fn new(does: Does) -> Self {
        Handler {
            does: Arc::new(Mutex::new(does)),
            runs: Arc::default(),
            at_once: Arc::default(),
            most_at_once: Arc::default(),
        }
    }
    pub fn set(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }
    pub fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }
    pub fn gaps(&self) -> Vec<Duration> {
        self.runs.lock().unwrap().windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

impl Service<Job> for Handler {
    type Response = ();
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<(), Failed>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, _: Job) -> Self::Future {
        struct Leave(Arc<AtomicU32>);
        impl Drop for Leave {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Relaxed);
            }
        }
        self.runs.lock().unwrap().push(Instant::now());
        let does = *self.does.lock().unwrap();
        let leave = Leave(self.at_once.clone());
        self.most_at_once.fetch_max(self.at_once.fetch_add(1, Relaxed) + 1, Relaxed);
        Box::pin(async move {
            let _leave = leave;
            match does {
                Does::Succeed => Ok(()),
                Does::Fail => Err(Failed),
                Does::Panic => panic!("a bug in the job"),
                Does::Take(time, good) => {
                    sleep(time).await;
                    if good { Ok(()) } else { Err(Failed) }
                }
            }
        })
    }
}

/// A handler that answers at once, without a box.
#[derive(Clone, Debug)]
pub struct AtOnce;

impl Service<Job> for AtOnce {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, _: Job) -> Self::Future {
        ready(Ok(()))
    }
}

/// Remembers what was put back.
#[derive(Clone, Default)]
pub struct PutBack(Arc<Mutex<Vec<Deferral>>>);

impl PutBack {
    pub fn all(&self) -> Vec<Deferral> {
        self.0.lock().unwrap().clone()
    }
}

impl Defer<Job> for PutBack {
    type Handle = Option<Arc<str>>;
    type Error = BoxError;
    fn handle(&self, job: &Job) -> Self::Handle {
        job.key.clone()
    }
    async fn defer(&self, handle: Self::Handle, deferral: Deferral) -> Result<(), BoxError> {
        assert!(handle.is_some(), "a job that passes untouched is not put back");
        self.0.lock().unwrap().push(deferral);
        Ok(())
    }
}

/// One call of the service.
pub async fn run<S>(service: &S, job: Job) -> Result<S::Response, BoxError>
where
    S: Service<Job, Error = BoxError> + Clone,
{
    ServiceExt::<Job>::oneshot(service.clone(), job).await
}

/// One call, whatever comes of it.
pub async fn try_run<S>(service: &S, job: Job)
where
    S: Service<Job, Error = BoxError> + Clone,
{
    run(service, job).await.ok();
}

/// The refusal in an error.
pub fn refusal<A: fmt::Debug>(result: &Result<A, BoxError>) -> &Refusal {
    let error = result.as_ref().expect_err("refused");
    Refusal::find(&**error).unwrap_or_else(|| panic!("not refused: {error}"))
}

/// Doubles from a second to a minute, without jitter.
pub fn plain() -> Schedule {
    Schedule::new().growth(SECOND, 2.0, 60 * SECOND).unwrap().jitter(0.0).unwrap()
}
