//! A scripted provider, and a classifier for its replies.
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    collections::VecDeque,
    error::Error,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_herd::{
    BoxError, Classify, Executed, Exhausted, HasTask, JitteredRetryLayer, Kind, Pushback, Refusal,
    RefusalKind, Resend, ResendAdvice, Signal, Task, retry::Resent,
};

pub type Request = http::Request<String>;
pub type Response = http::Response<String>;

pub const MS: fn(u64) -> Duration = Duration::from_millis;
pub const S: fn(u64) -> Duration = Duration::from_secs;

/// Which provider answered, as a ladder says it.
#[derive(Clone)]
pub struct Answered(pub &'static str);

/// Status codes, `retry-after` in seconds, and two errors: "refused" proves that nothing was executed.
#[derive(Clone, Copy)]
pub struct Understand;

impl Classify<Response> for Understand {
    fn classify(&self, outcome: Result<&Response, &(dyn Error + 'static)>) -> Signal {
        let reply = match outcome {
            Ok(reply) => reply,
            Err(error) if error.to_string() == "refused" => {
                return Signal::new(Kind::Failed).with_executed(Executed::No);
            }
            Err(_) => return Signal::new(Kind::Failed),
        };
        let hint = reply.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok());
        let pushback = hint.map_or(Pushback::None, |s| Pushback::After(Duration::from_secs(s)));
        let signal = match reply.status().as_u16() {
            204 => Signal::new(Kind::Empty),
            200..=399 => Signal::new(Kind::Success),
            402 => Signal::new(Kind::Depleted),
            401 | 403 => Signal::new(Kind::Misconfigured),
            425 => Signal::new(Kind::Rejected).with_resend(ResendAdvice::Allowed).with_executed(Executed::No),
            429 => Signal::new(Kind::Throttled),
            404 => Signal::new(Kind::Rejected),
            501 | 505 => Signal::new(Kind::Failed).with_resend(ResendAdvice::Never),
            503 if hint.is_some() => Signal::new(Kind::Overloaded),
            _ => Signal::new(Kind::Failed),
        };
        signal.with_pushback(pushback)
    }
    fn stamp_exhausted(&self, reply: &mut Response, exhausted: Exhausted) {
        reply.extensions_mut().insert(exhausted);
    }
    fn exhausted(&self, reply: &Response) -> bool {
        reply.extensions().get::<Exhausted>().is_some()
    }
    fn provider(&self, outcome: Result<&Response, &(dyn Error + 'static)>) -> Option<Arc<str>> {
        outcome.ok()?.extensions().get::<Answered>().map(|a| a.0.into())
    }
}

#[derive(Clone, Debug)]
pub enum Step {
    Status(u16),
    /// Status and `retry-after`.
    Hint(u16, u64),
    /// An error after this time.
    Error(&'static str, Duration),
    /// A refusal of one of our own layers, and how long it lasts.
    Refuse(RefusalKind, Option<Duration>),
    /// The status after this time.
    Slow(u16, Duration),
    /// A reply of this provider.
    From(&'static str, u16),
    /// A client that connects when it is asked for readiness, and fails: the readiness of the *next*
    /// instance fails.
    NotReady,
}
pub use Step::*;

/// Plays a script, and the last step for ever. Notes every call; panics when called unready.
pub struct Provider {
    shared: Arc<Shared>,
    ready: bool,
}

/// When it came, of which task, and whether it is a repetition.
pub type Call = (Instant, Option<Task>, Option<Resent>);

pub struct Shared {
    script: Mutex<VecDeque<Step>>,
    pub calls: Mutex<Vec<Call>>,
    pub in_flight: AtomicUsize,
    pub clones: AtomicUsize,
    start: Instant,
    never_ready: bool,
}

impl Clone for Provider {
    fn clone(&self) -> Self {
        self.shared.clones.fetch_add(1, Ordering::Relaxed);
        Provider { shared: self.shared.clone(), ready: false }
    }
}

pub fn provider(script: impl IntoIterator<Item = Step>) -> (Provider, Arc<Shared>) {
    with(script, false)
}
/// Its first instance is ready, no later one ever is.
pub fn never_ready_again(script: impl IntoIterator<Item = Step>) -> (Provider, Arc<Shared>) {
    with(script, true)
}
fn with(script: impl IntoIterator<Item = Step>, never_ready: bool) -> (Provider, Arc<Shared>) {
    let shared = Arc::new(Shared {
        script: Mutex::new(script.into_iter().collect()),
        calls: Mutex::default(),
        in_flight: AtomicUsize::new(0),
        clones: AtomicUsize::new(0),
        start: Instant::now(),
        never_ready,
    });
    (Provider { shared: shared.clone(), ready: false }, shared)
}

impl Shared {
    pub fn count(&self) -> usize {
        self.calls.lock().unwrap().len()
    }
    /// When the calls came, since the start.
    pub fn at(&self) -> Vec<Duration> {
        self.calls.lock().unwrap().iter().map(|c| c.0 - self.start).collect()
    }
    /// The pauses between them.
    pub fn gaps(&self) -> Vec<Duration> {
        self.at().windows(2).map(|w| w[1].saturating_sub(w[0])).collect()
    }
    fn next(&self) -> Step {
        let mut script = self.script.lock().unwrap();
        if script.len() > 1 { script.pop_front().unwrap() } else { script[0].clone() }
    }
}

struct InFlight(Arc<Shared>);
impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<Req: HasTask> Service<Req> for Provider {
    type Response = Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.shared.never_ready && self.shared.count() > 0 {
            let _ = cx;
            return Poll::Pending;
        }
        let fails = matches!(self.shared.script.lock().unwrap()[0], NotReady);
        if fails {
            self.shared.next();
            return Poll::Ready(Err("refused".into()));
        }
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without readiness");
        let noted = (Instant::now(), request.task().cloned(), request.resent().cloned());
        self.shared.calls.lock().unwrap().push(noted);
        self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        let guard = InFlight(self.shared.clone());
        let step = self.shared.next();
        Box::pin(async move {
            let _guard = guard;
            let mut reply = Response::new(String::new());
            match step {
                Status(status) => *reply.status_mut() = status.try_into()?,
                Hint(status, hint) => {
                    *reply.status_mut() = status.try_into()?;
                    reply.headers_mut().insert("retry-after", hint.into());
                }
                Error(text, after) => {
                    tokio::time::sleep(after).await;
                    return Err(text.into());
                }
                Refuse(kind, wait) => {
                    let at = wait.map(|wait| Instant::now() + wait);
                    return Err(Refusal::new(kind, "a test", "gate".into(), at).into());
                }
                Slow(status, after) => {
                    tokio::time::sleep(after).await;
                    *reply.status_mut() = status.try_into()?;
                }
                From(name, status) => {
                    *reply.status_mut() = status.try_into()?;
                    reply.extensions_mut().insert(Answered(name));
                }
                NotReady => return Err("refused".into()),
            }
            Ok(reply)
        })
    }
}

/// The layer most tests start from: no budget, a fixed seed.
pub fn retry() -> JitteredRetryLayer<Understand> {
    JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).seed(1).classify(Understand)
}

pub fn get() -> Request {
    Request::new(String::new())
}
pub fn post() -> Request {
    http::Request::post("/").body("charge".into()).unwrap()
}
pub fn of(task: &Task, mut request: Request) -> Request {
    request.set_task(task.clone());
    request
}

pub async fn send<R>(
    layer: &JitteredRetryLayer<Understand, R>,
    provider: &Provider,
    request: Request,
) -> Result<Response, BoxError>
where
    R: Resend<Request> + Clone,
{
    layer.layer(provider.clone()).oneshot(request).await
}

/// Sends a request to a provider with this script: the reply, and what the provider saw.
pub async fn run(
    layer: JitteredRetryLayer<Understand>,
    request: Request,
    script: impl IntoIterator<Item = Step>,
) -> (Result<Response, BoxError>, Arc<Shared>) {
    let (service, seen) = provider(script);
    (send(&layer, &service, request).await, seen)
}

pub fn status(reply: &Result<Response, BoxError>) -> u16 {
    reply.as_ref().map_or(0, |r| r.status().as_u16())
}
pub fn stamp(reply: &Result<Response, BoxError>) -> Option<Exhausted> {
    reply.as_ref().ok().and_then(|r| r.extensions().get().copied())
}
