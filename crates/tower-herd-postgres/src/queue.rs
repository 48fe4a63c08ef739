//! The token inside a queue of your own: pieces of SQL for the statements that the queue has anyway.
//!
//! A token in a table of its own is one more statement and one more commit a claim, which costs a queue of empty
//! jobs a third of its throughput. The same three columns on the job's own row cost neither: the statement that
//! claims the job reads and writes them too.
//!
//! | column | by default | holds |
//! |---|---|---|
//! | `not_before` | `retry_not_before timestamptz NOT NULL DEFAULT 'epoch'` | the instant before which nobody runs this job |
//! | `streak` | `retry_streak integer NOT NULL DEFAULT 0` | runs since the last success |
//! | `holder` | `retry_holder bigint` | who runs it, for fencing |
//!
//! A queue that has a due time already, `run_at` or `scheduled_at`, uses that as its `not_before`
//! ([`QueueTokens::not_before`]): the index that finds due jobs then finds the retries too.
//!
//! # Two ways
//!
//! | | claim | success | failure | reaper of dead workers | a worker that dies |
//! |---|---|---|---|---|---|
//! | **folded** | filters with [`due`](QueueTokens::due), sets [`granted`](QueueTokens::granted) | sets [`cleared`](QueueTokens::cleared), or deletes the row | only makes the job claimable again | the same | leaves its token: nobody runs the job before its time, whatever the reaper does |
//! | **filter only** | filters with [`due`](QueueTokens::due) | nothing (or [`cleared`](QueueTokens::cleared), where a row lives on) | sets [`failed`](QueueTokens::failed) | sets [`failed`](QueueTokens::failed) | leaves none: each statement that makes a job claimable again must set it |
//!
//! The second is the cheapest: a job that succeeds writes nothing for it, but its longer row. The first holds even where a path
//! that makes jobs claimable again was forgotten (qf-studio/pilot#4394).
//!
//! ```
//! use std::time::Duration;
//! use tower_herd_postgres::queue::QueueTokens;
//! # use tower_herd::retry_token::Schedule;
//!
//! let tokens = QueueTokens::new();
//! let schedule = Schedule::default();
//! let claim = format!(
//!     "WITH next AS (
//!        SELECT id FROM app.jobs AS j WHERE j.state = 'ready' AND {due}
//!        ORDER BY j.retry_not_before, j.id LIMIT $1 FOR UPDATE SKIP LOCKED)
//!      UPDATE app.jobs AS j SET state = 'running', {granted}
//!      FROM next WHERE j.id = next.id RETURNING j.id, j.payload, j.retry_streak",
//!     due = tokens.due("j"),
//!     granted = tokens.granted("j", &schedule, "$2"),
//! );
//! # assert!(claim.contains("statement_timestamp()"));
//! ```
//!
//! `examples/queue_sql.rs` is a whole queue of this kind.
//!
//! # Rules, and who learned them
//!
//! - **The filter compares with `statement_timestamp()`**, the value written comes from `clock_timestamp()`. The
//!   first is constant within the statement, so an index can be searched with it; it is right in a long
//!   transaction, where `now()` stands still (que-rb/que#409). With `clock_timestamp()` in the filter an idle poll
//!   reads every job that waits for its time.
//! - **`LIMIT` stands in a `WITH`**, not in `IN (SELECT ... LIMIT)`, which the planner may run more than once and
//!   so claim more than was asked for (saurabhnanda/odd-jobs#115, QueueClassic/queue_classic#320).
//! - **Success, failure and heartbeat name the holder** ([`held`](QueueTokens::held)): a worker that was believed
//!   dead changes no row when it comes back.
//! - **The streak is no attempt counter.** A job that is put off has not run; count attempts where the job runs.

use crate::{
    delay::{seconds, window},
    name::{InvalidName, quote},
};
use std::time::Duration;
use tower_herd::retry_token::Schedule;

/// Which columns of a queue's table hold the token, and the pieces of SQL over them.
///
/// `alias` is what the statement calls the table, `holder` and `wait` are SQL: a placeholder such as `$2`. They go
/// into the text as they are; never build them from data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueTokens {
    not_before: String,
    streak: String,
    holder: String,
}

impl Default for QueueTokens {
    fn default() -> Self {
        Self::new()
    }
}

impl QueueTokens {
    /// The columns `retry_not_before`, `retry_streak` and `retry_holder`.
    #[must_use]
    pub fn new() -> Self {
        QueueTokens {
            not_before: "\"retry_not_before\"".into(),
            streak: "\"retry_streak\"".into(),
            holder: "\"retry_holder\"".into(),
        }
    }

    /// Another column for the instant: the queue's own due time, for instance. It must not be null.
    ///
    /// # Errors
    /// A name that PostgreSQL would refuse or cut.
    pub fn not_before(mut self, column: &str) -> Result<Self, InvalidName> {
        self.not_before = quote(column)?;
        Ok(self)
    }

    /// Another column for the streak.
    ///
    /// # Errors
    /// A name that PostgreSQL would refuse or cut.
    pub fn streak(mut self, column: &str) -> Result<Self, InvalidName> {
        self.streak = quote(column)?;
        Ok(self)
    }

    /// Another column for the holder.
    ///
    /// # Errors
    /// A name that PostgreSQL would refuse or cut.
    pub fn holder(mut self, column: &str) -> Result<Self, InvalidName> {
        self.holder = quote(column)?;
        Ok(self)
    }

    /// DDL that adds those of the three columns that are missing. It does not rewrite the table: the defaults are
    /// constants. (A job that was never run has the instant 1970-01-01: every driver can read it, and dashboards
    /// can subtract it, which is not so for `-infinity`.) Give it an index that starts with what the claim orders
    /// by, over the jobs that can be claimed: `CREATE INDEX ON jobs (retry_not_before, id) WHERE state = 'ready'`.
    ///
    /// # Errors
    /// A name that PostgreSQL would refuse or cut.
    pub fn add_columns(&self, schema: &str, table: &str) -> Result<String, InvalidName> {
        Ok(format!(
            "ALTER TABLE {}.{} ADD COLUMN IF NOT EXISTS {} timestamptz NOT NULL DEFAULT 'epoch', \
             ADD COLUMN IF NOT EXISTS {} integer NOT NULL DEFAULT 0, ADD COLUMN IF NOT EXISTS {} bigint",
            quote(schema)?,
            quote(table)?,
            self.not_before,
            self.streak,
            self.holder
        ))
    }

    /// For the claim's `WHERE`: the job may run.
    #[must_use]
    pub fn due(&self, alias: &str) -> String {
        format!("{alias}.{} <= statement_timestamp()", self.not_before)
    }

    /// For the claim's `SET`: the next window begins, the streak grows by one, and the holder is noted.
    #[must_use]
    pub fn granted(&self, alias: &str, schedule: &Schedule, holder: &str) -> String {
        format!("{}, {} = {holder}", self.failed(alias, schedule), self.holder)
    }

    /// For the `SET` of a failure, and of whatever makes jobs of dead workers claimable again, where the claim
    /// only filters: the next window begins now, and the streak grows by one.
    #[must_use]
    pub fn failed(&self, alias: &str, schedule: &Schedule) -> String {
        let (not_before, streak) = (&self.not_before, &self.streak);
        let delay = window(schedule, &format!("{alias}.{streak}"), "random()");
        format!(
            "{not_before} = clock_timestamp() + {delay}, {streak} = least({alias}.{streak}, 2147483646) + 1"
        )
    }

    /// For the `SET` of a failure whose error said how long to wait (`wait` is SQL that gives seconds), where the
    /// claim was [`granted`](Self::granted). It never shortens the window.
    #[must_use]
    pub fn extended(&self, alias: &str, wait: &str) -> String {
        format!(
            "{0} = greatest({alias}.{0}, clock_timestamp() + make_interval(secs => {wait}))",
            self.not_before
        )
    }

    /// For the `SET` of a heartbeat, and of a refusal by somebody else's rule: not before this time from now,
    /// without a run counted.
    #[must_use]
    pub fn put_off(&self, alias: &str, wait: Duration) -> String {
        self.extended(alias, &seconds(wait))
    }

    /// For the `SET` of a success, where the row lives on: it may run again at once.
    #[must_use]
    pub fn cleared(&self) -> String {
        format!("{} = 'epoch', {}", self.not_before, self.reset())
    }

    /// As [`cleared`](Self::cleared), without the instant: for a queue whose own due time it is, and which says
    /// itself when the row is due next.
    #[must_use]
    pub fn reset(&self) -> String {
        format!("{} = 0, {} = NULL", self.streak, self.holder)
    }

    /// For the `WHERE` of all that a worker says about its job: it still holds it.
    #[must_use]
    pub fn held(&self, alias: &str, holder: &str) -> String {
        format!("{alias}.{} = {holder}", self.holder)
    }
}
