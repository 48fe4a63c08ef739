//! How a job goes back to its queue.

use super::WaitCause;
use crate::BoxError;
use std::{convert::Infallible, future::Future, time::Duration};

/// The adapter to a job framework: puts a job back, to run later.
///
/// It is asked in two cases. A job that was refused must be put back without an attempt: most queues strand or spin a
/// job whose layer just returns an error. And a job that failed is best put back to when its key opens, not earlier:
/// an early one would only be refused, at the cost of a fetch.
///
/// Whatever `defer` does, the caller gets the error of the run, or the [`Refusal`](crate::Refusal). An error
/// of its own is logged (`WARN`): the queue's own means (a lock that expires, a reaper) must then bring the job back.
pub trait Defer<Req>: Clone {
    /// What is kept of a job while it runs: its ids.
    type Handle;
    /// What can go wrong.
    type Error: Into<BoxError>;

    /// What `defer` will need; taken before each run, so it should cost little.
    fn handle(&self, request: &Req) -> Self::Handle;

    /// Puts the job back. Dropped half-way if the caller drops the call.
    fn defer(
        &self,
        handle: Self::Handle,
        deferral: Deferral,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// When a job is to come back, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Deferral {
    /// How long from now. Above zero; for a refusal it is spread, so that those who were refused together do
    /// not come back together. Keep its fractions: in whole seconds the spread is gone.
    pub wait: Duration,
    /// Grants since the last success.
    pub streak: u32,
    /// Why.
    pub why: DeferredBy,
}

/// Why a job is put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeferredBy {
    /// It was not run. No attempt is to be counted.
    Refusal(WaitCause),
    /// It ran and failed. What the queue counts, it counts.
    Failure,
}

impl DeferredBy {
    /// Whether the job was not run, so that no attempt is to be counted.
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, DeferredBy::Refusal(_))
    }
}

/// Nothing is put back: whoever gets the error does it, by [`Refusal::retry_at`](crate::Refusal).
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDefer;

impl<Req> Defer<Req> for NoDefer {
    type Handle = ();
    type Error = Infallible;

    fn handle(&self, _: &Req) {}

    async fn defer(&self, (): (), _: Deferral) -> Result<(), Infallible> {
        Ok(())
    }
}
