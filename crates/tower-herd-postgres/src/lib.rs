//! Retry tokens on PostgreSQL: a job that failed is not retried early by anyone, whatever process, worker or agent
//! takes it up next.
//!
//! Two forms, for two kinds of queue:
//!
//! | | [`PostgresTokens`] | [`queue`] |
//! |---|---|---|
//! | for | any queue, through [`RetryTokenLayer`](tower_herd::retry_token) | a queue whose SQL is yours |
//! | where the token is | a table of its own | three columns of the job's row |
//! | costs a job | two statements and commits, claim and clear | none: its columns go with the statements that the queue has |
//! | throughput of empty jobs, of the plain queue's | 0.3 to 0.6 | 0.95 (0.87 to 1.01); where only failures write, 1.0 |
//! | WAL a job | 370 bytes | 280 bytes; where only failures write, 50 |
//!
//! Medians of paired rounds, and their range over five runs, on two cores that had other work to do (PostgreSQL 15):
//! `cargo bench -p tower-herd-postgres --bench tokens` measures them anew, with their quartiles. WAL and statements
//! are exact. An empty job takes a millisecond or two, so for jobs that call anybody neither is much. A statement of
//! its own for the token, on the job's row, takes the queue to 0.6.
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
//! - **One statement decides.** The winner among those who come together is found by `INSERT ... ON CONFLICT DO
//!   UPDATE WHERE`, whose condition PostgreSQL evaluates on the newest version of the row, under its lock. A
//!   `SELECT` and then a write lets all through who read before the first wrote: 50 callers got 79 grants in a
//!   second in which 5 were possible (`looking_and_then_writing_fails_both_races`, the control of the tests).
//! - **Its clock decides.** Waits are compared and computed with the database's clock, and travel as durations. A
//!   worker whose clock is an hour off is neither early nor starved.
//! - **The holder fences.** Each grant has its own number; what an older one says about the token changes no row.
//!
//! # Through PgBouncer
//!
//! In transaction mode two messages of one client may reach two servers. So an operation is one message: no `SET`,
//! no session lock, no `LISTEN`, no prepared statement, named or not. The last is why no parameter is bound: sqlx
//! prepares in one message and binds in the next, even what it is told not to keep (`persistent(false)`), and in
//! between the pooler may give the server away: with PgBouncer 1.18 and 20 clients on 2 connections, 937 of 1000
//! such queries failed or had another's answer (`a_bound_parameter_gets_lost`). Keys therefore stand in the
//! statement as hexadecimal digits, which no key can leave, and numbers as numbers. One startup parameter of sqlx
//! must be allowed, or left out: see [`PostgresTokens::new`].
//!
//! # The driver
//!
//! sqlx, for the sake of one pool: the job queues of Rust that live in PostgreSQL are built on it (apalis,
//! graphile_worker, sqlxmq, underway, pgmq), so the pool is there. tokio-postgres binds without preparing, which
//! would spare the digits, but brings a second pool to nearly everybody. It is sqlx 0.9, as apalis-postgres 1.0
//! has it, which needs Rust 1.94. No TLS is chosen here: turn on one of sqlx's `tls-` features in your own
//! manifest.
//!
//! # Errors, cancellation, cost
//!
//! Errors say whether asking again can help ([`Error::is_transient`]); a lost race and a serialization failure are
//! none. A dropped operation did all or nothing. A claim takes one round trip on a connection of the pool (two
//! with its liveness check, which `test_before_acquire(false)` turns off), and writes one row if it is granted; a
//! refused one writes nothing and locks nothing.
//!
//! The table is updated in place (no index but that of the key, and a fill factor of 70), and is empty when all is
//! well: success deletes its token. What is left behind by jobs that were abandoned goes with
//! [`PostgresTokens::sweep_all`].
//!
//! # Features
//!
//! `apalis`: the adapter for [apalis](https://docs.rs/apalis)' workers on apalis-postgres. It is a feature and no
//! crate of its own, since it works on the same pool, of the same version of the same driver; it brings in
//! apalis-core only.
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
