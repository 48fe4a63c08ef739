//! The rule of thumb: five failures in a row, and the provider is left alone for ten minutes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tower::ServiceExt;

use super::{Client, Policy, SimRequest, SimResponse, World, hop::Upstream};
use crate::BoxError;
use crate::scenario::{Log, Scenario, Settings, What};

const FAILURES: u32 = 5;
const OPEN: Duration = Duration::from_secs(600);

/// A breaker on each rung that opens after five consecutive failures, for ten minutes flat and without
/// an early probe, and closes afterwards; no retries. At 20 percent errors five in a row come every
/// 40 s at 100 calls a second: it turns a brown-out into an outage.
#[derive(Clone, Copy, Debug)]
pub struct Consecutive;

#[derive(Clone)]
struct Rung {
    service: Upstream,
    breaker: Arc<Mutex<Breaker>>,
}

#[derive(Default)]
struct Breaker {
    failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    fn is_open(&mut self, now: Instant) -> bool {
        if self.open_until.is_some_and(|until| until <= now) {
            *self = Self::default();
        }
        self.open_until.is_some()
    }

    /// Takes one outcome; whether it trips.
    fn settle(&mut self, good: bool, now: Instant) -> bool {
        if self.open_until.is_some() {
            return false;
        }
        self.failures = if good { 0 } else { self.failures + 1 };
        let trips = self.failures >= FAILURES;
        if trips {
            self.open_until = Some(now + OPEN);
        }
        trips
    }
}

impl Policy for Consecutive {
    fn name(&self) -> &'static str {
        "consecutive-5"
    }

    fn plays(&self, settings: &Settings) -> bool {
        matches!(settings.scenario, Scenario::Brownout | Scenario::Recovery)
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some(format!(
            "a breaker that opens for {} s after {FAILURES} failures in a row; no retries",
            OPEN.as_secs()
        ))
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        let client = |process| {
            let rung = |service| Rung { service, breaker: Arc::default() };
            let rungs: Vec<Rung> = world.rungs(process).into_iter().map(rung).collect();
            let log = world.log.clone();
            Client::new(move |request, _| walk(rungs.clone(), log.clone(), process, request))
        };
        Ok(world.processes().map(client).collect())
    }
}

async fn walk(
    rungs: Vec<Rung>,
    log: Log,
    process: u32,
    request: SimRequest,
) -> Result<SimResponse, BoxError> {
    let lock = |rung: &Rung, f: &mut dyn FnMut(&mut Breaker) -> bool| {
        f(&mut rung.breaker.lock().unwrap_or_else(PoisonError::into_inner))
    };
    let mut last: Result<SimResponse, BoxError> = Err("every breaker is open".into());
    for (i, rung) in rungs.iter().enumerate() {
        if lock(rung, &mut |b| b.is_open(Instant::now())) {
            continue;
        }
        last = rung.service.clone().oneshot(request.clone()).await;
        let good = matches!(&last, Ok(reply) if reply.status().is_success());
        if lock(rung, &mut |b| b.settle(good, Instant::now())) {
            log.note(process, i, What::Opened);
            log.note(process, i, What::Alert);
        }
        if good {
            return last;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn five_in_a_row_and_ten_minutes() {
        let (mut b, now) = (Breaker::default(), Instant::now());
        for good in [false, false, false, false, true, false, false, false, false] {
            assert!(!b.settle(good, now));
        }
        assert!(!b.is_open(now) && b.settle(false, now) && b.is_open(now));
        // Calls that were under way change nothing.
        assert!(!b.settle(true, now) && !b.settle(false, now));
        assert!(b.is_open(now + OPEN - Duration::from_millis(1)));
        assert!(!b.is_open(now + OPEN) && !b.settle(false, now + OPEN));
    }
}
