//! Retry tokens on PostgreSQL: a job that failed is not retried early by anyone, whatever process, worker or agent
//! takes it up next.
//!
//! Two forms, for two kinds of queue:
//!
//! | | [`PostgresTokens`] | [`queue`] |
//! |---|---|---|
//! | for | any queue, through [`RetryTokenLayer`](tower_herd::retry_token) | a queue whose SQL is yours |
//! | where the token is | a table of its own | three columns of the job's row |
//! | costs a job | one statement and commit, about a third of the throughput of an empty job; nothing measurable from about 10 ms of work a job on | no statement, no commit |
//!
//! ```no_run
//! # async fn example() -> Result<(), tower_herd_postgres::Error> {
//! use tower_herd_postgres::PostgresTokens;
//!
//! // A pool that is there already does as well: `PostgresTokens::new(pool)`.
//! let tokens = PostgresTokens::connect_lazy("postgres://localhost/app")?;
//! tokens.migrate().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Why it holds
//!
//! - **One statement decides.** The winner among those who come together is found by `INSERT ... ON CONFLICT DO UPDATE
//!   WHERE`, whose condition PostgreSQL evaluates on the newest version of the row, under its lock. A `SELECT` and then
//!   a write lets all through who read before the first wrote: 100 callers had 1,697 grants where 21 were possible.
//! - **Its clock decides.** Waits are compared and computed with the database's clock, and travel as durations. A
//!   worker whose clock is an hour off is neither early nor starved.
//! - **The holder fences.** Each grant has its own number; what an older one says about the token changes no row.
//!
//! # Through PgBouncer
//!
//! In transaction mode two messages of one client may reach two servers. So an operation is one message: no `SET`, no
//! session lock, no `LISTEN`, no prepared statement, named or not. The last is why no parameter is bound: sqlx prepares in one
//! message and binds in the next, even what it is told not to keep, and in between the pooler may give the server away
//! (before PgBouncer 1.21 always, later by its settings). Keys therefore stand in the statement as hexadecimal digits, which no
//! key can leave, and numbers as numbers. One startup parameter of sqlx must be allowed, or left out:
//! see [`PostgresTokens::new`].
//!
//! # The driver
//!
//! sqlx, for the sake of one pool: the job queues of Rust that live in PostgreSQL are built on it (apalis, graphile_worker,
//! sqlxmq, underway, pgmq), so the pool is there. tokio-postgres binds without preparing, which would spare the digits, but
//! brings a second pool to nearly everybody. It is sqlx 0.9, as apalis-postgres 1.0 has it, which needs Rust 1.94. No TLS is chosen here: turn on
//! one of sqlx's `tls-` features in your own manifest.
//!
//! # Errors, cancellation, cost
//!
//! Errors say whether asking again can help ([`Error::is_transient`]); a lost race and a serialization failure are none. A dropped
//! operation did all or nothing. A claim takes one round trip on a connection of the pool (two with its liveness check, which
//! `test_before_acquire(false)` turns off), and writes one row if it is granted; a refused one writes
//! nothing and locks nothing.
//!
//! The table is updated in place (no index but that of the key, and a fill factor of 70), and is empty when all is well: success
//! deletes its token. What is left behind by jobs that were abandoned goes with [`PostgresTokens::sweep_all`].
//!
//! # Features
//!
//! `apalis`: the adapter for [apalis](https://docs.rs/apalis)' workers on apalis-postgres. It is a feature and no crate of
//! its own, since it works on the same pool, of the same version of the same driver; it brings in apalis-core only.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

#[cfg(feature = "apalis")]
pub mod apalis;
mod delay;
mod error;
mod migrate;
mod name;
pub mod queue;
mod statement;
mod store;

pub use error::Error;
pub use migrate::{Migration, migrate, migrations};
pub use name::InvalidName;
pub use sqlx::PgPool;
pub use store::{PostgresTokens, SCHEMA};
