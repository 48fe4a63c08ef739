//! Retry tokens: a job that failed is not retried early by anyone.
//!
//! # Why
//!
//! A job queue retries a job after 2, 4, 8 seconds, and means well. But a job has more than one way back: three agents
//! are triggered for it by one clock, a reaper hands out what a dead worker held, an operator presses a button, a second
//! code path forgets the back-off and runs it five times in a quarter of an hour (qf-studio/pilot#4394). Each way
//! knows its own waits and none those of the others, so what the job depends on gets all of them at once, while it is
//! down.
//!
//! A retry token is what they have in common: one row for each job, `{ not_before, streak, holder }`, in a store that all
//! processes share. Whoever wants to run the job claims its key. One is granted, and the key is closed for the next
//! wait; all others are told for how long, and put the job back without an attempt. A success forgets the key.
//!
//! # What it does, and what not
//!
//! Three agents are triggered for one job, and what it depends on is down for 130 s. The queue waits 2^n s before
//! retry n (the simulator's scenario `cron`, seed 1, the real layers over one store):
//!
//! | fix | calls | most in 60 s | retries in 60 s | most in 1 s | put back | alerts | 12 jobs: retries in 60 s |
//! |---|---|---|---|---|---|---|---|
//! | none | 21 | 15 | 12 | 3 | 0 | 0 | 48 |
//! | jitter | 18 | 17 | 14 | 3 | 0 | 0 | 58 |
//! | token | 7 | 5 | 4 | 1 | 14 | 0 | 48 |
//! | jitter+token | 6 | 5 | 4 | 1 | 12 | 0 | 53 |
//! | breaker | 6 | 6 | 3 | 3 | 3 | 1 | 0 |
//! | all | 5 | 5 | 4 | 1 | 11 | 1 | 0 |
//!
//! - The fall from 12 retries a minute to 4 is the token's.
//! - **Jitter alone does not help here.** It spreads calls inside a second, and there are as many of them.
//! - **It delays, it does not deduplicate.** Three jobs under one key all run, one after the other, once the first has
//!   succeeded: a success forgets the key. Unique jobs are the queue's affair.
//! - **A token does nothing for many distinct jobs**, of which each has its own: 48 retries a minute with it and without.
//!   What protects a dependency from many jobs is its [breaker], or a limit on its calls
//!   ([`FleetLimitLayer`](crate::fleet_limit)).
//!
//! `cargo run --release -p tower-herd-sim -- cron` prints it; over 40 seeds and an outage of half an hour the
//! simulator's tests hold it to 12, to 4, and for all three together to one call a second and one alert.
//!
//! # Where it stands
//!
//! In front of the service that runs a job, outside its concurrency limit: while the store is asked, the instance that
//! was polled ready is held, and a place in a limit with it. *Inside* [`JobBreakerLayer`]: a job that the breaker
//! keeps back must not use up a grant, nor let its streak grow. Left out, every way to a job has a back-off of its own.
//!
//! | outer | inner | swapped |
//! |---|---|---|
//! | [`JobBreakerLayer`] | [`RetryTokenLayer`] | each job that an open breaker refuses has claimed its token: its streak grows, and it comes back late |
//! | [`RetryTokenLayer`] | a concurrency limit | who is refused, or waits for the store, holds a place |
//! | [`RetryTokenLayer`] | [`JitteredRetryLayer`](crate::JitteredRetryLayer), for the calls of the job | each resend of a call is a run of the job, and refused |
//!
//! # What is counted
//!
//! The **streak**: grants since the last success of this key. It is not the attempt of the queue, which snoozes and
//! reapers change (oban-bg/oban#245: near attempt 1,200 the next retry was days away). A refusal changes nothing. A grant
//! closes the key for [`Schedule::delay`] of its streak, whatever becomes of the run:
//!
//! | the run | its token |
//! |---|---|
//! | succeeds | is removed, if no other run has been granted since |
//! | fails | stays; a `retry_after` of the [outcome](Outcome) prolongs its wait, and never shortens it |
//! | is refused by a layer further in, or [neutral](Outcome::Neutral) | stays |
//! | is dropped, panics, dies with its process | stays: the next run is granted when the wait is over |
//!
//! So a failure costs the store nothing, and a success one statement. What an older holder does to the token of a
//! newer one is nothing: each grant has a [`HolderId`], which fences.
//!
//! A run that takes longer than its wait may see another one granted beside it. Either the queue's own lock keeps
//! the job from being handed out (the default: most do), or [`Schedule::hold`] closes the key while the run goes on.
//!
//! # Refusals
//!
//! Who is refused gets a [`Refusal`](crate::Refusal) of kind [`NotBefore`](crate::RefusalKind::NotBefore), which
//! [`Refusal::find`](crate::Refusal::find) finds in any chain of errors. Its `scope` is the key, and its
//! [`not_before`](crate::Refusal::not_before) what the token said: wait, streak and cause. It is no failure, costs no
//! attempt, and is logged at the level DEBUG. Its `retry_at` is later than the token opens, at
//! `max(wait, min_wait) + U(0, min_wait)`: those who were refused together do not come back together.
//!
//! What a queue makes of an error is its own affair: most strand the job, spin, or count an attempt. So the layer is
//! given an adapter, [`Defer`], that puts the job back; it is asked for refusals, and for failures too, so that a job is
//! not handed out before its key opens.
//!
//! # The store
//!
//! [`RetryTokens`] is the store: [`LocalTokens`] in the memory of one process, PostgreSQL in `tower-herd-postgres`, Redis
//! in `tower-herd-redis`, or your own (`tower_herd_sim::tokens` tests it). [`Tokens`] is the handle that layers over one
//! store share. It asks for 250 ms at most. While the store cannot be asked, [`OnOutage`] decides; one alert is raised
//! an outage, and one caller at a time asks again after a jittered back-off, so that a dead store does not cost
//! each job its timeout.
//!
//! First attempts run whenever nobody can be asked who knows: there is no herd yet that they could join. While the store
//! answers they claim like all others, since the first attempts of three triggers are three runs.
//!
//! # Errors and cancellation
//!
//! The error of the service, or a [`Refusal`](crate::Refusal). Errors of the store are never the job's. A call that is
//! dropped while the store is asked may have claimed the key; one that is dropped while the job runs has. Both cost
//! one wait. After the run, its clearing and its [`Defer`] are awaited before the caller has its result: 250 ms at most for
//! the store, and what the adapter takes.
//!
//! # Examples
//!
//! A queue of one process:
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_herd::{Refusal, retry_token::{LocalTokens, RetryTokenLayer, Tokens}};
//!
//! #[derive(Clone)]
//! struct Job { kind: &'static str, invoice: u32, attempt: u32 }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let tokens = Tokens::new("jobs", LocalTokens::new());
//! let mut runner = ServiceBuilder::new()
//!     .layer(RetryTokenLayer::new(
//!         &tokens,
//!         |job: &Job| Some(format!("{}:{}", job.kind, job.invoice)),
//!         |job: &Job| job.attempt,
//!     ))
//!     .service_fn(|_: Job| async { Err::<(), _>(std::io::Error::other("the mail server is down")) });
//!
//! let job = Job { kind: "invoice-mail", invoice: 7, attempt: 1 };
//! assert!(runner.ready().await.unwrap().call(job.clone()).await.unwrap_err().is::<std::io::Error>());
//! // Whoever comes with it now, by whatever way:
//! let error = runner.ready().await.unwrap().call(Job { attempt: 2, ..job }).await.unwrap_err();
//! let refusal = Refusal::find(&*error).unwrap();
//! assert_eq!(refusal.not_before().unwrap().streak, 1);
//! assert!(refusal.wait().unwrap() > refusal.not_before().unwrap().wait);
//! # }
//! ```
//!
//! With an adapter, an outcome of one's own, and the breaker of what the jobs depend on:
//!
//! ```
//! use std::{error::Error, time::Duration};
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{BoxError, retry_token::{
//!     Defer, Deferral, JobBreakerLayer, LocalTokens, Outcome, RetryTokenLayer, Schedule, Tokens,
//! }};
//!
//! struct Job { id: i64, tenant: u32, attempt: u32 }
//!
//! #[derive(Clone)]
//! struct Queue;
//! impl Defer<Job> for Queue {
//!     type Handle = i64;
//!     type Error = BoxError;
//!     fn handle(&self, job: &Job) -> i64 { job.id }
//!     async fn defer(&self, id: i64, deferral: Deferral) -> Result<(), BoxError> {
//!         // UPDATE jobs SET run_at = now() + deferral.wait, and if deferral.why.is_refusal(): no attempt counted.
//! #       let _ = (id, deferral);
//!         Ok(())
//!     }
//! }
//!
//! let tokens = Tokens::new("jobs", LocalTokens::new());
//! let outcome = |result: Result<&(), &(dyn Error + 'static)>| match result {
//!     Ok(()) => Outcome::Success,
//!     Err(_) => Outcome::Failure { retry_after: Some(Duration::from_secs(30)) },
//! };
//! let runner = ServiceBuilder::new()
//!     .layer(JobBreakerLayer::new(&tokens, |_: &Job| Some("crm")).defer(Queue))
//!     .layer(
//!         RetryTokenLayer::new(&tokens, |job: &Job| Some(format!("sync:{}", job.tenant)), |job: &Job| job.attempt)
//!             .schedule(Schedule::new().hold(Some(Duration::from_secs(60)))?)
//!             .outcome(outcome)
//!             .defer(Queue),
//!     )
//!     .service(service_fn(|_: Job| async { Ok::<(), std::io::Error>(()) }));
//! # let _ = runner;
//! # Ok::<(), tower_herd::retry_token::ScheduleError>(())
//! ```

pub mod breaker;
mod defer;
pub mod future;
mod layer;
mod local;
mod outage;
mod outcome;
mod permit;
mod schedule;
mod service;
mod store;
mod tokens;

pub use breaker::{JobBreaker, JobBreakerHandle, JobBreakerLayer, JobBreakerSettings};
pub use defer::{Defer, Deferral, DeferredBy, NoDefer};
pub use future::ResponseFuture;
pub use layer::RetryTokenLayer;
pub use local::LocalTokens;
pub use outage::{OnOutage, StoreAlert};
pub use outcome::{ErrorsFail, Judge, Outcome};
pub use schedule::{Schedule, ScheduleError};
pub use service::RetryToken;
pub use store::{Claim, Grant, HolderId, RetryTokens, Token, Wait, WaitCause};
pub use tokens::{TokenCounts, TokenSettings, Tokens};
