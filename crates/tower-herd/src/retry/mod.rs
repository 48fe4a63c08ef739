//! Sends a request again: not too early, not at the same instant as everyone, not too often, and not
//! where a second time does harm.
//!
//! # Why
//!
//! `retry(3)` is how one 429 becomes an outage. A hundred clients that failed together and wait the
//! same time come back together; each of three nested layers repeats what the layer below has repeated
//! (4 * 4 * 4 = 64 calls); a server's "not before 30 s" is read by the parser and never reaches the
//! loop; and a charge whose reply was lost is made twice. [`JitteredRetryLayer`] is one loop that knows
//! all of this:
//!
//! - **When.** A server's own wait is the floor, a random wait comes on top
//!   ([`backoff`]): `hint + U(0, max(hint/2, b(n)))`, and without a hint `U(0, b(n))`,
//!   `b(n) = min(cap, base * 2^n)`. Each request draws from its own generator.
//! - **How often.** What fails is charged to the task's allowance (3) and to the shared [`budget`] (10
//!   percent of the requests), which is asked before the wait. What was throttled is *delivered* again:
//!   that costs neither, and is bounded by the deadline and by 10; so is the question after a keyed
//!   request that is [in progress](crate::Signal::in_progress). A refusal of our own
//!   ([`Refusal`](crate::Refusal)) cost the provider nothing: it is waited for, free of charge, if its
//!   `retry_at` fits the deadline.
//! - **Whether.** The request's [`Safety`](crate::Safety) and the evidence of the reply decide: an
//!   unkeyed write goes out again only on proof that it was not executed.
//! - **Until when.** No wait outlives the task's deadline (60 s where it names none). One that does not
//!   fit is not begun: the caller gets the last real reply at once, marked
//!   [`Exhausted`](crate::Exhausted) with the instant from which asking again may help.
//!
//! # Where it stands
//!
//! Inside [`TaskLayer`](crate::TaskLayer), outside everything else: around the ladder if there is one,
//! so that repeating comes after falling over, and around pause, limit and sensor, so that it holds no
//! slot while it sleeps. *Inside* the limit, a sleeping request keeps its slot, and a few slow failures
//! stop the fleet. *Inside* the sensor, what it repeats is never seen: neither pause nor ceiling learn.
//! *Twice* in a stack, the inner one's mark stops the outer one from multiplying: it stands on the reply,
//! and on the task, for errors and for replies that bear no marks.
//! Left out, callers write the loop themselves. Switch off the retries of the clients and SDKs below.
//!
//! # What it costs
//!
//! A call that succeeds at once pays for the kept copy of its request, one `Arc` clone and one atomic
//! addition: no allocation and no clock. The stack below is cloned only for a second attempt, and that
//! clone is polled ready before it is called.
//!
//! The first attempt is not checked against the deadline: `AttemptTimeoutLayer` bounds each attempt by
//! what is left. This layer bounds its own waits, for the timer and for readiness.
//!
//! # Switched
//!
//! With a [`Switch`](crate::Switch) that observes, what would be sent again is counted and told (as
//! [`Event::GaveUp`](crate::observe::Event::GaveUp)), and returned as it came, unmarked; nothing is charged
//! to the budget or the task. So it counts requests, not repetitions: of a request whose second attempt would
//! have failed too, the third is not known. Turned off, the call passes: no copy of the request is kept.
//!
//! # Drops
//!
//! Dropping the future while it sleeps gives back what was taken from the budget and its place among
//! the sleepers. Dropping it during an attempt drops that attempt; whether it was sent nobody knows, so
//! the budget keeps its charge.
//!
//! # Examples
//!
//! ```
//! use std::{error::Error, time::Duration};
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_herd::{JitteredRetryLayer, Kind, RatioBudget, Signal, classify_fn};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), tower_herd::BoxError> {
//! // A client of your own: numbers in, text out.
//! let understood = classify_fn(|outcome: Result<&String, &(dyn Error + 'static)>| match outcome {
//!     Ok(_) => Signal::new(Kind::Success),
//!     Err(_) => Signal::new(Kind::Failed).with_executed(tower_herd::Executed::No), // nothing was done
//! });
//! let budget = RatioBudget::default(); // share it with every layer that calls this provider
//! let layer = JitteredRetryLayer::new().attempts(4).base(Duration::from_millis(200)).budget(budget).classify(understood);
//!
//! let tries = std::sync::atomic::AtomicU32::new(0);
//! let flaky = tower::service_fn(|n: u64| {
//!     let failed = tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2;
//!     async move { if failed { Err("down") } else { Ok(n.to_string()) } }
//! });
//! let mut client = ServiceBuilder::new().layer(layer).service(flaky);
//! assert_eq!(client.ready().await?.call(7).await?, "7");
//! # Ok(())
//! # }
//! ```
//!
//! Erased bodies are recorded while they are sent, up to a cap, and wrapped back:
//!
//! ```
//! use tower_herd::{JitteredRetryLayer, replay};
//! # struct Body; impl Body { fn new(_: tower_herd::retry::ReplayBody<Body>) -> Self { Body } }
//! // `replay(64 << 10, tonic::body::Body::new)`, `replay(64 << 10, reqwest::Body::wrap)`
//! let layer = JitteredRetryLayer::new().resend(replay(64 << 10, Body::new));
//! # let _ = layer;
//! ```

pub mod backoff;
mod charge;
mod config;
pub mod future;
mod layer;
#[cfg(feature = "http")]
mod replay;
mod resend;
mod service;
pub mod state;

pub use crate::budget::{self, Budget, RatioBudget, Unlimited};
pub use backoff::Backoff;
pub use charge::Resent;
pub use config::{InvalidRetryConfig, RetryConfig};
pub use layer::JitteredRetryLayer;
#[cfg(feature = "herd")]
pub(crate) use layer::Shared;
pub use resend::{CloneRequest, Never, Resend};
#[cfg(feature = "http")]
pub use resend::{KeptReplay, Replay, ReplayBody, Superseded, replay};
pub use service::JitteredRetry;
