//! tower-resilience 0.13.0: retry over a chain of rungs, each breaker over bulkhead.
//!
//! The bulkhead of 20 is a fixed ceiling that happens to be what the stampede leaves of rung one, so
//! on that scenario this peer is never refused; it cannot use more than that either. Its wait is the
//! shortest of those tried that loses no task there: 0.5 s is quicker (1.15 times the oracle's time)
//! and loses 50, the documentation's 5 s never overflows to the other rungs and takes 150 s.

use std::fmt;
use std::time::Duration;

use http::StatusCode;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_resilience::bulkhead::{BulkheadLayer, BulkheadServiceError};
use tower_resilience::circuitbreaker::{CircuitBreakerError, CircuitBreakerLayer};
use tower_resilience::retry::{ExponentialRandomBackoff, RetryLayer};

use super::super::{Client, Policy, SimRequest, SimResponse, Upstream, World};
use crate::BoxError;
use crate::scenario::Settings;

/// The crate's layers in its documented order, at the settings its documentation shows.
#[derive(Clone, Copy, Debug)]
pub struct TowerResilience;

const BULKHEAD: usize = 20;
const WAIT: Duration = Duration::from_millis(1500);
const ATTEMPTS: usize = 3;
const BACKOFF: Duration = Duration::from_millis(100);
const OPEN: Duration = Duration::from_secs(30);

type Reply = SimResponse;
type RungError = CircuitBreakerError<BulkheadServiceError<Wire>>;
type Rung = BoxCloneSyncService<SimRequest, Reply, RungError>;

/// No reply, as an error with a name: the crate asks for one.
#[derive(Debug)]
struct Wire(BoxError);

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Wire {}

/// No rung answered well.
#[derive(Clone, Copy, Debug)]
struct ChainError {
    last: Option<StatusCode>,
    /// Whether a rung was called, or its bulkhead full: an open circuit alone is not worth a retry.
    retry: bool,
}

impl fmt::Display for ChainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no rung served (last status {:?})", self.last)
    }
}

impl std::error::Error for ChainError {}

impl Policy for TowerResilience {
    fn name(&self) -> &'static str {
        "tower-resilience"
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some(format!(
            "tower-resilience 0.13.0, retry({ATTEMPTS} attempts, exponential random {} ms, open circuits not \
             retried) over a chain of breaker(50 % of 100, 5xx and errors, open {} s) over bulkhead({BULKHEAD}, \
             waits {} ms, then the next rung)",
            BACKOFF.as_millis(),
            OPEN.as_secs(),
            WAIT.as_millis()
        ))
    }

    fn real_time(&self, settings: &Settings) -> bool {
        // Its breaker reads the machine's clock: under a paused one it would stay open for ever.
        settings.outage.is_some() || settings.failure > 0.0
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        world.processes().map(|process| client(world.rungs(process))).collect()
    }
}

fn client(rungs: Vec<Upstream>) -> Result<Client, BoxError> {
    let rungs = rungs.into_iter().map(rung).collect::<Result<Vec<Rung>, BoxError>>()?;
    let chain = service_fn(move |request: SimRequest| walk(rungs.clone(), request));
    let retry = RetryLayer::<SimRequest, Reply, ChainError>::builder()
        .max_attempts(ATTEMPTS)
        .backoff(ExponentialRandomBackoff::new(BACKOFF, 0.5)?)
        .retry_on(|e: &ChainError| e.retry)
        .build();
    Ok(Client::from_service(retry.layer(chain)))
}

fn rung(service: Upstream) -> Result<Rung, BoxError> {
    let bulkhead = BulkheadLayer::builder().max_concurrent_calls(BULKHEAD).max_wait_duration(WAIT).build()?;
    let breaker = CircuitBreakerLayer::builder()
        .failure_rate_threshold(0.5)
        .sliding_window_size(100)
        .wait_duration_in_open(OPEN)
        .failure_classifier(|result: &Result<Reply, BulkheadServiceError<Wire>>| match result {
            Ok(reply) => reply.status().is_server_error(),
            Err(e) => e.is_inner(),
        })
        .build()?;
    Ok(BoxCloneSyncService::new(breaker.layer(bulkhead.layer(service.map_err(Wire)))))
}

async fn walk(rungs: Vec<Rung>, request: SimRequest) -> Result<Reply, ChainError> {
    let mut error = ChainError { last: None, retry: false };
    for mut rung in rungs {
        let Ok(ready) = rung.ready().await else { continue };
        match ready.call(request.clone()).await {
            Ok(reply) if reply.status().is_success() => return Ok(reply),
            Ok(reply) => error = ChainError { last: Some(reply.status()), retry: true },
            Err(CircuitBreakerError::Inner(BulkheadServiceError::Inner(_))) => error.retry = true,
            Err(_) => {}
        }
    }
    Err(error)
}
