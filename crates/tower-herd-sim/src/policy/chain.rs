//! Chains that take every failure for a reason to go on: the usual list of fallbacks, three ways.
//!
//! As many calls a rung as a task has attempts (three, unless the settings say otherwise): over three
//! rungs nine calls a task, and in three stacks of four attempts each 64.

use std::time::Duration;

use tower::ServiceExt;

use super::{Client, Policy, SimRequest, SimResponse, TaskInfo, World, hop::Upstream};
use crate::BoxError;

const BASE: Duration = Duration::from_secs(2);
const CAP: Duration = Duration::from_secs(30);

/// What a chain does between two walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: it starts again at once.
    None,
    /// Exponential backoff, the same for everybody.
    Exponential,
    /// Exponential backoff under full jitter.
    FullJitter,
}

/// Each task walks the ladder up to three times (`attempts`), one call a rung; a 429 counts as a rung that is
/// down. Hints are not read. Between two walks it waits 2 s, then 4 s, if it waits at all.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    name: &'static str,
    wait: Wait,
}

impl Chain {
    /// Without any wait.
    pub fn naive() -> Self {
        Self { name: "naive", wait: Wait::None }
    }

    /// With exponential backoff and no jitter.
    pub fn backoff() -> Self {
        Self { name: "backoff", wait: Wait::Exponential }
    }

    /// With full jitter.
    pub fn jitter() -> Self {
        Self { name: "jitter", wait: Wait::FullJitter }
    }
}

impl Wait {
    /// The wait before walk `n`, where the first walk is 0.
    fn before(self, n: u32, rng: &mut fastrand::Rng) -> Duration {
        let full = BASE.saturating_mul(1 << (n - 1).min(16)).min(CAP);
        match self {
            Self::None => Duration::ZERO,
            Self::Exponential => full,
            Self::FullJitter => crate::scale(full, rng.f64()),
        }
    }
}

impl Policy for Chain {
    fn name(&self) -> &'static str {
        self.name
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        let (wait, seed, walks) = (self.wait, world.seed, world.settings.attempts);
        let client = |process| {
            let rungs = world.rungs(process);
            Client::new(move |request, task| walk(rungs.clone(), walks, wait, seed, request, task))
        };
        Ok(world.processes().map(client).collect())
    }
}

async fn walk(
    rungs: Vec<Upstream>,
    walks: u32,
    wait: Wait,
    seed: u64,
    request: SimRequest,
    task: TaskInfo,
) -> Result<SimResponse, BoxError> {
    let mut rng = fastrand::Rng::with_seed(seed ^ task.id.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut last: Result<SimResponse, BoxError> = Err("no rung".into());
    for attempt in 0..walks {
        if attempt > 0 && wait != Wait::None {
            tokio::time::sleep(wait.before(attempt, &mut rng)).await;
        }
        for rung in &rungs {
            last = rung.clone().oneshot(request.clone()).await;
            if matches!(&last, Ok(reply) if reply.status().is_success()) {
                return last;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_jitter_stays_below() {
        let mut rng = fastrand::Rng::with_seed(3);
        assert_eq!(Wait::Exponential.before(1, &mut rng), BASE);
        assert_eq!(Wait::Exponential.before(2, &mut rng), BASE * 2);
        assert_eq!(Wait::Exponential.before(40, &mut rng), CAP);
        let (a, b) = (Wait::FullJitter.before(2, &mut rng), Wait::FullJitter.before(2, &mut rng));
        assert!(a != b && a < BASE * 2 && b < BASE * 2);
    }
}
