//! The tower service in front of a provider's state.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use tokio::time::Instant;
use tower_service::Service;

use super::body::ScriptedBody;
use super::dialect;
use super::quota::Quota;
use super::recorder::{CallRecord, Outcome, Stats};
use super::script::{Cost, Script};
use super::state::{Decision, State};

/// Who makes a call: put it into the request's extensions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Caller {
    /// The task the call belongs to.
    pub task: Option<u64>,
    /// The process it comes from: what one process was told does not bind another.
    pub process: Option<u32>,
    /// What it costs, in tokens.
    pub cost: Option<f64>,
}

/// Why a call got no reply.
#[derive(Debug)]
pub struct CallError {
    source: io::Error,
}

impl CallError {
    fn refused() -> Self {
        Self { source: io::Error::new(io::ErrorKind::ConnectionRefused, "connection refused by script") }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no connection to the scripted provider")
    }
}

impl std::error::Error for CallError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

pub(crate) struct Shared {
    started: Instant,
    wall: SystemTime,
    state: Mutex<State>,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The provider's own time.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// A provider that follows a [`Script`]. Clones share everything.
#[derive(Clone)]
pub struct ScriptedProvider {
    shared: Arc<Shared>,
}

impl fmt::Debug for ScriptedProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedProvider").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl ScriptedProvider {
    /// Starts the provider now, on tokio's clock: build it inside the runtime that will call it.
    pub fn new(script: Script) -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "only dates in headers show the wall clock; everything else follows tokio's"
        )]
        let wall = script.wall_start.unwrap_or_else(SystemTime::now);
        let shared = Shared { started: Instant::now(), wall, state: Mutex::new(State::new(script)) };
        Self { shared: Arc::new(shared) }
    }

    /// The name in the script.
    pub fn name(&self) -> String {
        self.shared.lock().script.name.clone()
    }

    /// A client of this provider.
    pub fn service(&self) -> ProviderService {
        self.service_for(0)
    }

    /// A client whose calls come from this process unless they say otherwise.
    pub fn service_for(&self, process: u32) -> ProviderService {
        ProviderService { shared: self.shared.clone(), process }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.shared.now()
    }

    /// When it started.
    pub fn started(&self) -> Instant {
        self.shared.started
    }

    /// The quota in force now, unannounced changes included.
    pub fn quota(&self) -> Quota {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        state.quota()
    }

    /// The quota the script says is in force at an instant.
    pub fn quota_at(&self, at: Duration) -> Quota {
        self.shared.lock().script.quota_at(at)
    }

    /// Calls in service now.
    pub fn in_flight(&self) -> usize {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        state.in_flight()
    }

    /// A copy of the meter: levels and quota as they are now.
    pub(crate) fn meter(&self) -> super::quota::Meter {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        state.meter.clone()
    }

    /// The figures so far.
    pub fn stats(&self) -> Stats {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        let ends = state.pause_ends();
        Stats::of(&state.records, state.in_flight_peak as u64, &ends, state.first_pause_end())
    }

    /// Every call so far, in order of arrival.
    pub fn records(&self) -> Vec<CallRecord> {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        state.records.clone()
    }

    /// The instants at which announced pauses ended.
    pub fn pause_ends(&self) -> Vec<Duration> {
        self.shared.lock().pause_ends()
    }

    /// The latest instant announced by a refusal that was delivered.
    pub fn announced_until(&self) -> Option<Duration> {
        self.shared.lock().announced_until()
    }

    /// The end of the outage or closed window that is running now, if one is.
    pub fn fault_until(&self) -> Option<Duration> {
        self.shared.lock().fault_until(self.shared.now())
    }

    /// Calls in service over time, as (instant, number from then on), sorted.
    pub fn in_flight_series(&self) -> Vec<(Duration, u64)> {
        let mut state = self.shared.lock();
        state.advance(self.shared.now());
        let mut flights = state.flights.clone();
        flights.sort_by_key(|(at, by)| (*at, *by));
        let mut level = 0i64;
        flights
            .into_iter()
            .map(|(at, by)| {
                level += i64::from(by);
                (at, u64::try_from(level).unwrap_or(0))
            })
            .collect()
    }
}

/// A tower service that calls a [`ScriptedProvider`]; always ready.
#[derive(Clone)]
pub struct ProviderService {
    shared: Arc<Shared>,
    process: u32,
}

impl fmt::Debug for ProviderService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderService").field("process", &self.process).finish_non_exhaustive()
    }
}

/// The future of a call. The call is on the wire from its first poll.
#[must_use = "futures do nothing unless polled"]
pub struct ProviderFuture {
    inner: Pin<Box<dyn Future<Output = Result<Response<ScriptedBody>, CallError>> + Send>>,
}

impl fmt::Debug for ProviderFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderFuture").finish_non_exhaustive()
    }
}

impl Future for ProviderFuture {
    type Output = Result<Response<ScriptedBody>, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}

impl<B> Service<Request<B>> for ProviderService {
    type Response = Response<ScriptedBody>;
    type Error = CallError;
    type Future = ProviderFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> ProviderFuture {
        let (parts, _body) = request.into_parts();
        let caller = identify(&parts, &self.shared.lock().script.cost);
        let process = caller.process.unwrap_or(self.process);
        let (task, cost) = (caller.task, caller.cost.unwrap_or(1.0));
        ProviderFuture { inner: Box::pin(run(self.shared.clone(), task, process, cost)) }
    }
}

fn identify(parts: &Parts, cost: &Cost) -> Caller {
    fn number<T: std::str::FromStr>(headers: &HeaderMap, name: &str) -> Option<T> {
        headers.get(name)?.to_str().ok()?.trim().parse().ok()
    }
    let given = parts.extensions.get::<Caller>().copied().unwrap_or_default();
    let cost = match cost {
        Cost::Header => given.cost.or_else(|| number(&parts.headers, "x-cost")),
        Cost::By(by) => Some(by(parts)),
    };
    Caller {
        task: given.task.or_else(|| number(&parts.headers, "x-task-id")),
        process: given.process.or_else(|| number(&parts.headers, "x-process-id")),
        cost: cost.filter(|c| c.is_finite() && *c >= 0.0),
    }
}

/// A call on the wire; dropping it before it is settled means that the caller hung up.
pub(crate) struct OnWire {
    shared: Arc<Shared>,
    id: usize,
    /// Its natural end, if it holds a place.
    place: Option<Duration>,
    settled: bool,
}

impl OnWire {
    /// The reply was delivered to its end.
    pub(crate) fn settle(mut self) {
        self.settled = true;
        self.shared.lock().advance(self.shared.now());
    }
}

impl Drop for OnWire {
    fn drop(&mut self) {
        if !self.settled {
            self.shared.lock().hung_up(self.shared.now(), self.id, self.place);
        }
    }
}

async fn run(
    shared: Arc<Shared>,
    task: Option<u64>,
    process: u32,
    cost: f64,
) -> Result<Response<ScriptedBody>, CallError> {
    let arrival = shared.now();
    let (refusal_latency, id, decision) = {
        let mut state = shared.lock();
        let (id, decision) = state.arrive(arrival, task, process, cost);
        (state.script.refusal_latency, id, decision)
    };
    let mut call = OnWire { shared: shared.clone(), id, place: None, settled: false };
    let at = |after: Duration| shared.started + arrival + after;
    match decision {
        Decision::Serve { head, end, fails } => {
            call.place = Some(arrival + end);
            tokio::time::sleep_until(at(head)).await;
            if fails {
                call.settle();
                return Ok(reply(&shared, StatusCode::INTERNAL_SERVER_ERROR, "{\"error\":\"brown-out\"}"));
            }
            let (bytes, chunks, time) = {
                let mut state = shared.lock();
                state.succeeded(id);
                (state.script.body.clone(), state.script.body_chunks, state.script.body_time)
            };
            let body = if time.is_zero() {
                call.settle();
                ScriptedBody::full(bytes)
            } else {
                ScriptedBody::streaming(bytes, chunks, at(head), time, call)
            };
            Ok(reply(&shared, StatusCode::OK, body))
        }
        Decision::Unreachable => {
            tokio::time::sleep_until(at(refusal_latency)).await;
            refuse(&shared, call, Outcome::Unreachable);
            Err(CallError::refused())
        }
        Decision::Unavailable => {
            tokio::time::sleep_until(at(refusal_latency)).await;
            refuse(&shared, call, Outcome::Failed);
            Ok(reply(&shared, StatusCode::SERVICE_UNAVAILABLE, "{\"error\":\"unavailable\"}"))
        }
        Decision::Throttle => {
            tokio::time::sleep_until(at(refusal_latency)).await;
            refuse(&shared, call, Outcome::Throttled);
            let mut reply = reply(
                &shared,
                StatusCode::TOO_MANY_REQUESTS,
                "{\"error\":{\"type\":\"rate_limit_exceeded\",\"message\":\"Too many requests\"}}",
            );
            let now = shared.now();
            let mut state = shared.lock();
            if let Some(wait) = state.script.hint {
                let (form, wall) = (state.script.hint_form, shared.wall + now);
                let told = dialect::write_hint(reply.headers_mut(), form, wait, wall);
                state.tell(now, id, told);
            }
            drop(state);
            Ok(reply)
        }
    }
}

fn refuse(shared: &Shared, mut call: OnWire, outcome: Outcome) {
    call.settled = true;
    shared.lock().delivered(shared.now(), call.id, outcome);
}

fn reply(shared: &Shared, status: StatusCode, body: impl Into<ScriptedBody>) -> Response<ScriptedBody> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let now = shared.now();
    let mut state = shared.lock();
    state.advance(now);
    let family = state.script.headers;
    dialect::write_limits(headers, family, &mut state.meter, now, shared.wall + now);
    response
}

impl From<&'static str> for ScriptedBody {
    fn from(text: &'static str) -> Self {
        ScriptedBody::full(Bytes::from_static(text.as_bytes()))
    }
}
