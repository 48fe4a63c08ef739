//! The service at the bottom, which sees everything.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use tokio::time::Sleep;
use tower_service::Service;

/// How one call to the probe ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// 200; for plain types, the request comes back.
    Good,
    /// A status, with a Retry-After in seconds if given; for plain types, an error.
    Status(u16, Option<u32>),
    /// An error after the call was sent.
    Error,
    /// A refused connection.
    Refused,
}

/// What the probe does. The default is ready at once, answers at once, and well.
#[derive(Clone, Debug, Default)]
pub struct ProbeScript {
    /// `poll_ready` is pending so many times before each call.
    pub pending: u32,
    /// `poll_ready` fails, always.
    pub ready_fails: bool,
    /// How long a call takes.
    pub delay: Duration,
    /// How the calls end, in order; the last holds for all others. Empty: good.
    pub outcomes: Vec<ProbeOutcome>,
    /// The body comes in two frames with this much time before each; zero for at once.
    pub body_delay: Duration,
}

/// A breach that the probe saw itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// `call` on an instance that was never ready.
    CalledUnready {
        /// Whether that instance is a clone of one that was ready then: readiness is not cloned.
        clone_of_ready: bool,
    },
    /// `call` twice on one readiness.
    ReadinessReused,
    /// `call` after `poll_ready` had failed.
    CalledAfterError,
    /// A future polled again after its end.
    PolledAfterEnd,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CalledUnready { clone_of_ready: true } => {
                "called a clone of a ready service that was not made ready itself"
            }
            Self::CalledUnready { clone_of_ready: false } => "called an instance that was never ready",
            Self::ReadinessReused => "called twice on one readiness",
            Self::CalledAfterError => "called although poll_ready had failed",
            Self::PolledAfterEnd => "polled a future after its end",
        })
    }
}

/// The error of the probe.
#[derive(Debug)]
pub struct ProbeError {
    refused: Option<std::io::Error>,
    text: &'static str,
}

impl ProbeError {
    fn new(text: &'static str) -> Self {
        Self { refused: None, text }
    }

    fn refused() -> Self {
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        Self { refused: Some(io), text: "probe: no connection" }
    }
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)
    }
}

impl std::error::Error for ProbeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.refused.as_ref().map(|e| e as _)
    }
}

#[derive(Default)]
struct State {
    calls: usize,
    futures: usize,
    bodies: usize,
    violations: Vec<Violation>,
}

#[derive(Default)]
struct Shared {
    script: ProbeScript,
    state: Mutex<State>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readiness {
    Fresh { clone_of_ready: bool },
    Ready,
    Used,
    Failed,
}

/// A service with scripted readiness, delays and outcomes that notices breaches of the contract.
///
/// It serves `http::Request<B>` for any body, and `u64` as a plain type. Clones share the account
/// but not the readiness.
pub struct ProbeService {
    shared: Arc<Shared>,
    readiness: Readiness,
    pending: u32,
}

impl fmt::Debug for ProbeService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeService").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

impl Clone for ProbeService {
    fn clone(&self) -> Self {
        let clone_of_ready = self.readiness == Readiness::Ready;
        Self {
            shared: self.shared.clone(),
            readiness: Readiness::Fresh { clone_of_ready },
            pending: self.shared.script.pending,
        }
    }
}

impl ProbeService {
    /// A probe with this script.
    pub fn new(script: ProbeScript) -> Self {
        let pending = script.pending;
        let shared = Arc::new(Shared { script, state: Mutex::default() });
        Self { shared, readiness: Readiness::Fresh { clone_of_ready: false }, pending }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.shared.lock().calls
    }

    /// Futures that are alive.
    pub fn live_futures(&self) -> usize {
        self.shared.lock().futures
    }

    /// Reply bodies that are alive and not read to their end.
    pub fn live_bodies(&self) -> usize {
        self.shared.lock().bodies
    }

    /// Breaches seen so far.
    pub fn violations(&self) -> Vec<Violation> {
        self.shared.lock().violations.clone()
    }

    fn ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProbeError>> {
        if self.shared.script.ready_fails {
            self.readiness = Readiness::Failed;
            return Poll::Ready(Err(ProbeError::new("probe: not ready, ever")));
        }
        if self.pending > 0 && self.readiness != Readiness::Ready {
            self.pending -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.readiness = Readiness::Ready;
        Poll::Ready(Ok(()))
    }

    fn begin(&mut self) -> (ProbeOutcome, Counted) {
        let violation = match self.readiness {
            Readiness::Ready => None,
            Readiness::Fresh { clone_of_ready } => Some(Violation::CalledUnready { clone_of_ready }),
            Readiness::Used => Some(Violation::ReadinessReused),
            Readiness::Failed => Some(Violation::CalledAfterError),
        };
        self.readiness = Readiness::Used;
        self.pending = self.shared.script.pending;
        let mut state = self.shared.lock();
        state.violations.extend(violation);
        let outcomes = &self.shared.script.outcomes;
        let outcome = outcomes.get(state.calls).or(outcomes.last()).copied().unwrap_or(ProbeOutcome::Good);
        state.calls += 1;
        state.futures += 1;
        drop(state);
        (outcome, Counted { shared: self.shared.clone(), body: false })
    }

    fn future<T>(
        &mut self,
        finish: impl FnOnce(ProbeOutcome, &Arc<Shared>) -> Result<T, ProbeError> + Send + 'static,
    ) -> ProbeFuture<T> {
        let (outcome, counted) = self.begin();
        let delay = self.shared.script.delay;
        let sleep = (!delay.is_zero()).then(|| Box::pin(tokio::time::sleep(delay)));
        ProbeFuture { sleep, finish: Some(Box::new(move |shared| finish(outcome, shared))), counted }
    }
}

/// Takes itself off the account when dropped.
struct Counted {
    shared: Arc<Shared>,
    body: bool,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if self.body { state.bodies -= 1 } else { state.futures -= 1 }
    }
}

type Finish<T> = Box<dyn FnOnce(&Arc<Shared>) -> Result<T, ProbeError> + Send>;

/// The future of a call to the probe.
#[must_use = "futures do nothing unless polled"]
pub struct ProbeFuture<T> {
    sleep: Option<Pin<Box<Sleep>>>,
    finish: Option<Finish<T>>,
    counted: Counted,
}

impl<T> fmt::Debug for ProbeFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeFuture").finish_non_exhaustive()
    }
}

impl<T> Future for ProbeFuture<T> {
    type Output = Result<T, ProbeError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = &mut *self;
        if me.finish.is_none() {
            me.counted.shared.lock().violations.push(Violation::PolledAfterEnd);
            return Poll::Pending;
        }
        if let Some(sleep) = &mut me.sleep
            && sleep.as_mut().poll(cx).is_pending()
        {
            return Poll::Pending;
        }
        me.sleep = None;
        match me.finish.take() {
            Some(finish) => Poll::Ready(finish(&me.counted.shared)),
            None => Poll::Pending,
        }
    }
}

impl<B> Service<Request<B>> for ProbeService {
    type Response = Response<ProbeBody>;
    type Error = ProbeError;
    type Future = ProbeFuture<Response<ProbeBody>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProbeError>> {
        self.ready(cx)
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        self.future(|outcome, shared| {
            let (status, wait) = match outcome {
                ProbeOutcome::Good => (StatusCode::OK, None),
                ProbeOutcome::Status(code, wait) => {
                    (StatusCode::from_u16(code).unwrap_or(StatusCode::OK), wait)
                }
                ProbeOutcome::Error => return Err(ProbeError::new("probe: scripted error")),
                ProbeOutcome::Refused => return Err(ProbeError::refused()),
            };
            let mut response = Response::new(ProbeBody::new(shared.clone()));
            *response.status_mut() = status;
            if let Some(wait) = wait {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait));
            }
            Ok(response)
        })
    }
}

impl Service<u64> for ProbeService {
    type Response = u64;
    type Error = ProbeError;
    type Future = ProbeFuture<u64>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProbeError>> {
        self.ready(cx)
    }

    fn call(&mut self, request: u64) -> Self::Future {
        self.future(move |outcome, _| match outcome {
            ProbeOutcome::Good => Ok(request),
            ProbeOutcome::Status(..) | ProbeOutcome::Error => Err(ProbeError::new("probe: scripted error")),
            ProbeOutcome::Refused => Err(ProbeError::refused()),
        })
    }
}

/// The body of a probe's reply: two frames, then the end.
pub struct ProbeBody {
    left: u8,
    sleep: Option<Pin<Box<Sleep>>>,
    delay: Duration,
    counted: Option<Counted>,
}

impl fmt::Debug for ProbeBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeBody").field("left", &self.left).finish_non_exhaustive()
    }
}

impl ProbeBody {
    fn new(shared: Arc<Shared>) -> Self {
        shared.lock().bodies += 1;
        let delay = shared.script.body_delay;
        let sleep = (!delay.is_zero()).then(|| Box::pin(tokio::time::sleep(delay)));
        Self { left: 2, sleep, delay, counted: Some(Counted { shared, body: true }) }
    }
}

impl Body for ProbeBody {
    type Data = Bytes;
    type Error = ProbeError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ProbeError>>> {
        let me = &mut *self;
        if me.left == 0 {
            me.counted = None;
            return Poll::Ready(None);
        }
        if let Some(sleep) = &mut me.sleep {
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let next = sleep.deadline() + me.delay;
            sleep.as_mut().reset(next);
        }
        me.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"probe ")))))
    }
}
