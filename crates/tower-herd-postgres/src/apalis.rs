//! The adapter for [apalis](https://docs.rs/apalis)' workers on apalis-postgres 1.0.
//!
//! In apalis a layer that answers by itself, a refusal or a timeout, leaves the job where no worker looks for it;
//! and a job that fails is fetched again at once. [`Requeue`] puts jobs back into the table as they should be:
//!
//! | what comes out of the worker | apalis alone | with [`Requeue`] |
//! |---|---|---|
//! | a refusal of a layer | stays `Queued` until its worker is declared dead | comes back after its wait, no attempt counted |
//! | a timeout by a layer further in | stays `Running` until its worker is declared dead | `Failed`, one attempt, comes back when its key opens |
//! | an error | fetched again at once, until its attempts are used up | comes back when its key opens |
//! | `RetryAfterError` | fetched again at once, without end: `max_attempts` and the wait are not looked at | both hold |
//!
//! While it is compiled, apalis-postgres checks its queries against the database that `DATABASE_URL` names, if that is
//! set. Where that is one without its tables yet, compile with `SQLX_OFFLINE=true`.
//!
//! ```
//! use apalis_core::task::Task;
//! use tower_herd::retry_token::{RetryTokenLayer, Tokens};
//! use tower_herd_postgres::{PostgresTokens, apalis};
//!
//! struct SyncAccount { id: u64 }
//!
//! # fn example(pool: sqlx::PgPool) -> impl Clone {
//! let tokens = Tokens::new("jobs", PostgresTokens::new(pool.clone()));
//! let layer = RetryTokenLayer::new(
//!     &tokens,
//!     |task: &Task<SyncAccount>| Some(format!("sync:{}", task.args.id)),
//!     apalis::attempt::<SyncAccount>,
//! )
//! .outcome(apalis::outcome::<()>)
//! .defer(apalis::Requeue::new(pool));
//! # layer
//! # }
//! // WorkerBuilder::new("worker-1").backend(storage).layer(layer)...
//! ```
//!
//! # Where it stands
//!
//! **First.** The layer that is added first to a `WorkerBuilder` is the outermost (its documentation says the
//! opposite): the token must see what timeouts and `catch_panic` make of a run. `JobBreakerLayer`, with the same
//! `outcome` and `defer`, stands around it.
//!
//! apalis' own `.retry(..)` repeats a job inside one claim, as often as it likes: leave it out.
//!
//! # What it needs
//!
//! The right to update `apalis.jobs`, `persist_results(true)` (apalis-postgres' default), and names of workers
//! that are unique: it changes only jobs that are still its worker's. apalis-postgres looks for jobs that have
//! come due with each heartbeat only (30 s), unless it is told otherwise:
//! `storage.poll_with_interval(Duration::from_secs(1))`.

use crate::{Error, delay::seconds, name::text, statement};
use apalis_core::{
    error::RetryAfterError,
    task::{ExecutionContext, Task, status::Status},
};
use sqlx::PgPool;
use std::{error, fmt, sync::Arc};
use tower_herd::{
    Refusal,
    retry_token::{Defer, Deferral, Outcome},
};

/// Which attempt this run of a task would be, from 1. To be given to
/// [`RetryTokenLayer::new`](tower_herd::retry_token::RetryTokenLayer::new).
pub fn attempt<Args>(task: &Task<Args>) -> u32 {
    // apalis counts when the handler is first polled, so here it is the number of those before.
    u32::try_from(task.ctx().attempt()).unwrap_or(u32::MAX).saturating_add(1)
}

/// What came of a run: an error is a failure, with the wait of apalis' [`RetryAfterError`] if it is one, and a
/// refusal of ours is neither. To be given to
/// [`RetryTokenLayer::outcome`](tower_herd::retry_token::RetryTokenLayer::outcome).
pub fn outcome<Res>(result: Result<&Res, &(dyn error::Error + 'static)>) -> Outcome {
    match result {
        Ok(_) => Outcome::Success,
        Err(error) if Refusal::find(error).is_some() => Outcome::Neutral,
        Err(error) => {
            let hint = std::iter::successors(Some(error), |error| error.source())
                .find_map(|error| error.downcast_ref::<RetryAfterError>());
            Outcome::Failure { retry_after: hint.map(RetryAfterError::get_duration) }
        }
    }
}

/// Puts jobs of apalis-postgres back: sets their `run_at`, to the microsecond, and the status with which apalis
/// acknowledges them.
///
/// # Errors
///
/// [`Error`]: the table could not be updated. The job then comes back as soon as apalis itself can reach it, which
/// may be too early; its token still refuses it.
#[derive(Clone)]
pub struct Requeue {
    pool: PgPool,
}

impl Requeue {
    /// Over the pool of the storage.
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Requeue { pool }
    }
}

impl fmt::Debug for Requeue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requeue").finish_non_exhaustive()
    }
}

impl<Args> Defer<Task<Args>> for Requeue {
    type Handle = Arc<ExecutionContext>;
    type Error = Error;

    fn handle(&self, task: &Task<Args>) -> Self::Handle {
        task.ctx().clone()
    }

    async fn defer(&self, job: Self::Handle, deferral: Deferral) -> Result<(), Error> {
        if let Some(status) = acknowledged(&job, deferral.why.is_refusal()) {
            job.raw_status().store(status);
        }
        let (Some(id), Some(worker)) = (job.task_id(), job.lock_by()) else {
            // Of another storage, whose rows are elsewhere.
            return Ok(());
        };
        // Before apalis acknowledges: otherwise the job could be fetched in between.
        let sql = format!(
            "UPDATE apalis.jobs SET run_at = clock_timestamp() + make_interval(secs => {}) WHERE id = {} AND lock_by = {}",
            seconds(deferral.wait),
            text(&id.to_string()),
            text(worker),
        );
        statement::run(&self.pool, sql).await?;
        Ok(())
    }
}

/// With which status apalis should acknowledge the job, where it would choose one that nobody fetches, or that is
/// fetched for ever.
fn acknowledged(job: &ExecutionContext, refused: bool) -> Option<Status> {
    if refused {
        // Otherwise what it was fetched with: `Queued`, and nobody fetches those.
        return Some(Status::Pending);
    }
    match job.status() {
        // The run was dropped before it could say how it ended: a timeout.
        Status::Queued | Status::Running => Some(Status::Failed),
        // A `RetryAfterError`. Jobs that are pending are fetched whatever their attempts.
        Status::Pending => Some(Status::Failed),
        // Failed for good by its own word, done, or failed as is.
        _ => None,
    }
}
