//! What policies tell of themselves: the only figures that are not counted at the providers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Something that happened inside a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noted {
    /// When.
    pub at: Duration,
    /// In which process.
    pub process: u32,
    /// About which rung, from 0.
    pub rung: usize,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum What {
    /// A breaker opened.
    Opened,
    /// A breaker closed.
    Closed,
    /// So large a share of the tasks goes to the rung now.
    Ramp(f64),
    /// Somebody was told that the rung is down.
    Alert,
}

/// Where policies note it. Clones are the same log.
#[derive(Clone, Debug)]
pub struct Log {
    started: Instant,
    noted: Arc<Mutex<Vec<Noted>>>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), noted: Arc::default() }
    }

    /// Notes something that happens now.
    pub fn note(&self, process: u32, rung: usize, what: What) {
        let noted = Noted { at: self.started.elapsed(), process, rung, what };
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).push(noted);
    }

    pub(crate) fn taken(&self) -> Vec<Noted> {
        std::mem::take(&mut *self.noted.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
