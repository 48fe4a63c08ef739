//! Herd control for [tower](https://docs.rs/tower): layers that keep a fleet of clients from stampeding
//! the providers it calls.
//!
//! A hundred clients with the same fallback chain and the same `retry(3)` are an outage generator. One
//! provider says 429; all fail over at once, all retry at the same instants, and every layer above
//! multiplies the retries. The cure is not one trick but a stack, each concern its own layer, usable
//! alone or together.
//!
//! ```
//! use std::time::Duration;
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{
//!     AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, RetryAfterLayer, TaskLayer,
//! };
//!
//! # let client = service_fn(|_: http::Request<String>| async {
//! #     Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//! # });
//! let search = Fleet::local().provider("search");
//! let service = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(JitteredRetryLayer::new())
//!     .layer(RetryAfterLayer::new(&search))
//!     .layer(FleetLimitLayer::new(&search))
//!     .layer(ClassifyLayer::new(&search))
//!     .layer(AttemptTimeoutLayer::new(Duration::from_secs(30)))
//!     .service(client);
//! # let _ = service;
//! ```
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | [`Provider`] | something with a quota: its pause, its ceiling, its queue, shared by all who hold the handle; below it, [scopes](Provider::scope) |
//! | [`Signal`] | what one reply or error says |
//! | [`Task`] | one piece of work; its calls, retries and failovers draw on one deadline and one allowance |
//! | [`Safety`] | what a request may suffer: whether it may be sent twice |
//! | [`Refusal`] | a "no" of our own, with the instant from which it no longer holds |
//! | slot, ceiling | one call in flight; the most there may be |
//! | pause | the instant before which nobody calls |
//! | ladder, tier, rung | ordered tiers of providers, cheapest first |
//!
//! # The order, and what breaks when two are swapped
//!
//! In short; [the guide](guide::order) says why, builds the whole of it by hand, and for several accounts.
//!
//! | outer | inner | swapped |
//! |---|---|---|
//! | [`TaskLayer`] | [`ToolCallsLayer`] | calls that bring no task of their own are remembered by nobody |
//! | [`ToolCallsLayer`] | [`JitteredRetryLayer`] | a repetition counts as a call of the model, and a failed write's own repetition is refused |
//! | [`JitteredRetryLayer`] | [`HashedFailoverLayer`] | each rung is retried before the next is asked; a walk costs attempts times rungs |
//! | [`HashedFailoverLayer`] | [`RampedReadmissionLayer`] | one ramp in front of the whole ladder: who is not back at one rung is kept from all |
//! | [`RampedReadmissionLayer`] | [`SpendLayer`] | money is reserved for calls that are turned away, and another call of the task is refused for good for want of it |
//! | [`SpendLayer`] | [`BreakerLayer`] | a task without money is told to come back when the breaker closes, and is told then |
//! | [`BreakerLayer`] | [`BudgetLayer`] | draws are counted for calls that an open breaker refuses anyway, and most callers are told a second or two instead of its end |
//! | [`BudgetLayer`] | [`RetryAfterLayer`] | a call waits for the end of a pause, and is thrown away then |
//! | [`RetryAfterLayer`] | [`TokenLimitLayer`] | the tokens of a paused provider are taken by calls that cannot be made |
//! | [`TokenLimitLayer`] | [`FleetLimitLayer`] | who waits for tokens holds a slot meanwhile |
//! | [`FleetLimitLayer`] | [`AttemptsLayer`] | what is told of the time that is left is what was left before the queue |
//! | [`AttemptsLayer`] | [`ClassifyLayer`] | nothing: only headers pass between them |
//! | [`ClassifyLayer`] | [`AttemptTimeoutLayer`] | a timeout drops the sensor, which sees a call that was given up, and no failure |
//!
//! A stack leaves out what it does not need. Then these meet:
//!
//! | outer | inner | swapped |
//! |---|---|---|
//! | [`TaskLayer`] | [`JitteredRetryLayer`] | each attempt is a task of its own, with a fresh deadline and allowance |
//! | [`JitteredRetryLayer`] | [`FleetLimitLayer`] | who sleeps between two attempts holds a slot meanwhile |
//! | [`HashedFailoverLayer`] | [`RetryAfterLayer`] | one pause in front of the whole ladder: a paused provider stops its healthy siblings |
//! | [`RampedReadmissionLayer`] | [`RetryAfterLayer`] | callers wait for a pause, and learn after it that they are not back yet |
//! | [`SpendLayer`] | [`RetryAfterLayer`] | who may not spend any more waits for the end of a pause to be told |
//! | [`BreakerLayer`] | [`RetryAfterLayer`] | callers sit out the open time in front of a breaker that would refuse them at once |
//! | [`RetryAfterLayer`] | [`FleetLimitLayer`] | who waits for the end of a scope's pause holds a slot of the provider meanwhile |
//! | [`FleetLimitLayer`] | [`ClassifyLayer`] | the time in our own queue counts as the provider's, which looks slow |
//! | [`RetryAfterLayer`] | [`AttemptTimeoutLayer`] | the timeout runs while a pause is waited out, and cuts that wait: the hint is kept from who would send again |
//!
//! Around what runs the jobs of a queue stands [`RetryTokenLayer`], inside its own breaker: see [`retry_token`].
//! On a server, [`IncomingAttemptsLayer`] stands around the handlers, inside [`TaskLayer`]: see [`attempts`].
//!
//! # What the layers promise
//!
//! - **Never early.** No call starts before the latest pause known; jitter only adds. A wait that does
//!   not fit the task's deadline is answered at once, with its instant.
//! - **Never above the ceiling** in force when the call was admitted; the slot of a call that was dropped
//!   after it was sent lingers, since it may still run at the provider.
//! - **No second side effect.** An unkeyed write is sent again only on proof that it was not executed.
//! - **A 429 is flow control**, not a failure: it pauses the narrowest scope and cuts the ceiling once an
//!   event.
//! - **Every admission is a guard**, settled exactly once on success, error, panic and drop.
//! - **No wait outlives the deadline**, and no slot is held while waiting.
//!
//! # Time, randomness and tests
//!
//! Time is tokio's: `#[tokio::test(start_paused = true)]` moves every wait of these layers. Randomness is
//! seeded a session; [`Fleet::seed`], [`TaskLayer::seed`] and [`JitteredRetryLayer::seed`] fix it.
//! `tower-herd-sim` has scripted providers and a contract probe for tests of your own.
//!
//! # When a stack does not compile
//!
//! `service.oneshot(request)` and `service.ready()` only say that "trait bounds were not satisfied", and
//! not which. Ask for the trait itself, and rustc names the cause: write
//! `tower::ServiceExt::oneshot(service, request)`.
//!
//! | the error says | what to do |
//! |---|---|
//! | the request "does not say which task it belongs to" | `impl HasTask for MyRequest {}` ([`HasTask`]) |
//! | "cannot classify replies of type ..." | give each layer the classifier: `.classify(classify)` ([`classify_fn`]) |
//! | "expected `Result<Response<_>, _>`", found another reply | [`ClassifyLayer::replies`], `AttemptTimeoutLayer::replies` |
//! | "cannot be held until the end of a body" | `FleetLimitLayer::until_reply` |
//! | `Clone` is not implemented for the request or its body, "required for `CloneRequest`" | `.resend(replay(cap, Body::new))` on the layer ([`retry`]) |
//! | `Clone` is not implemented for the client | a retry and a ladder call it again: give it in a handle that is `Clone`, such as tower's `Buffer` |
//!
//! # The guide
//!
//! [Why the order is what it is](guide::order), [which numbers to choose](guide::numbers), [how to try the stack in
//! production first](guide::observe_first); and since SDKs, HTTP clients, meshes and frameworks repeat calls too, and
//! none of them sees what these layers know: [which, and how to switch them off](guide::retries).
//!
//! # Features
//!
//! `full` (default) turns on all layers and `http`. [`TaskLayer`] and [`ClassifyLayer`] are always there; the
//! others each have a feature:
//!
//! | feature | brings |
//! |---|---|
//! | `attempt-timeout` | [`AttemptTimeoutLayer`] |
//! | `attempts` | [`AttemptsLayer`], [`IncomingAttemptsLayer`]; turns on `http` and `jittered-retry` |
//! | `breaker` | [`BreakerLayer`] |
//! | `budget` | [`BudgetLayer`], and the budgets of retries |
//! | `fleet-limit` | [`FleetLimitLayer`], [`TokenLimitLayer`] |
//! | `hashed-failover` | [`HashedFailoverLayer`]; turns on `jittered-retry` |
//! | `herd` | [`Herd`], the whole stack from one builder; turns on all of these but `retry-token` and `tool-calls` |
//! | `http` | the HTTP and gRPC classifier, bodies that hold guards; without it every layer needs a classifier of its own ([`classify_fn`]) |
//! | `jittered-retry` | [`JitteredRetryLayer`]; turns on `budget` |
//! | `ramped-readmission` | [`RampedReadmissionLayer`] |
//! | `retry-after` | [`RetryAfterLayer`] |
//! | `retry-token` | [`RetryTokenLayer`] and the breaker of job queues; turns on `breaker` |
//! | `spend` | [`SpendLayer`] |
//! | `store` | [`store`]: several processes as one fleet |
//! | `tool-calls` | [`ToolCallsLayer`] |
//!
//! Off by default: `hyper-util` knows the connect errors and refused streams of hyper-util's client, which
//! prove that nothing was executed, so that even an unkeyed POST may be sent again (without it only a
//! refused connection proves so much, not a name that does not resolve, nor a failed TLS handshake);
//! `metrics` counts; `serde` loads settings.
//!
//! # Choices of dependencies
//!
//! `base64` and `serde_json` read what providers hide in headers and bodies, `httpdate` their dates.
//! `xxhash-rust` hashes keys, since the choice of a rung must be the same in every process and version,
//! which the standard library's hasher does not promise. `fastrand` draws jitter: small, seedable,
//! without global state as it is used here. No limiter or breaker crate is used:
//! their ceilings cannot be lowered below what is out, or their state belongs to one service.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "attempt-timeout")]
pub mod attempt_timeout;
#[cfg(feature = "attempts")]
pub mod attempts;
#[cfg(feature = "http")]
pub mod body;
#[cfg(feature = "breaker")]
pub mod breaker;
#[cfg(feature = "budget")]
pub mod budget;
mod chain;
pub mod classify;
pub mod clock;
#[cfg(feature = "hashed-failover")]
pub mod failover;
#[cfg(feature = "fleet-limit")]
pub mod fleet_limit;
mod gate;
pub mod guide;
#[cfg(feature = "herd")]
pub mod herd;
#[cfg(feature = "http")]
pub mod http;
pub mod observe;
pub mod provider;
pub mod random;
#[cfg(feature = "ramped-readmission")]
pub mod readmission;
#[cfg(not(feature = "ramped-readmission"))]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "the policy, which the provider keeps")]
mod readmission;
pub mod refusal;
#[cfg(feature = "jittered-retry")]
pub mod retry;
#[cfg(feature = "retry-after")]
pub mod retry_after;
#[cfg(feature = "retry-token")]
pub mod retry_token;
pub mod safety;
pub mod signal;
#[cfg(feature = "spend")]
pub mod spend;
#[cfg(feature = "store")]
pub mod store;
pub mod switch;
pub mod task;
#[cfg(feature = "fleet-limit")]
pub mod token_limit;
#[cfg(feature = "tool-calls")]
pub mod tool_calls;
#[cfg(any(feature = "fleet-limit", feature = "spend"))]
pub mod usage;

// The words: what a reply says, what a request may suffer, whom it belongs to.
#[cfg(feature = "http")]
pub use crate::http::{Head, HttpClassify, classify_body, classify_head};
pub use classify::{Classify, ClassifyFn, Exhausted, NotExecuted, classify_fn};
pub use clock::{Clock, Time};
pub use provider::{Fleet, PauseReason, Provider, ProviderSettings, SettingsError};
pub use refusal::{Refusal, RefusalKind};
pub use safety::{IdempotencyKey, Safety, ToolHints, Trust, idempotency_key};
pub use signal::{Executed, Kind, Origin, Pushback, Quota, Reach, ResendAdvice, Signal};
pub use switch::{Mode, Switch};
pub use task::{Criticality, HasTask, Key, Task};

// The stack from one builder.
#[cfg(feature = "herd")]
pub use herd::Herd;

// The layers around all providers.
#[cfg(feature = "attempts")]
pub use attempts::IncomingAttemptsLayer;
#[cfg(feature = "hashed-failover")]
pub use failover::{HashedFailover, HashedFailoverLayer};
#[cfg(feature = "jittered-retry")]
pub use retry::{Backoff, CloneRequest, JitteredRetryLayer, Resend};
#[cfg(all(feature = "http", feature = "jittered-retry"))]
pub use retry::{Replay, replay};
pub use task::TaskLayer;
#[cfg(feature = "tool-calls")]
pub use tool_calls::ToolCallsLayer;

// The layers of one provider.
#[cfg(feature = "attempt-timeout")]
pub use attempt_timeout::{AttemptTimeout, AttemptTimeoutLayer};
#[cfg(feature = "attempts")]
pub use attempts::AttemptsLayer;
#[cfg(feature = "breaker")]
pub use breaker::{Alert, BreakerLayer, BreakerSettings};
#[cfg(feature = "budget")]
pub use budget::{Budget, BudgetLayer, RatioBudget, TokenBucketBudget};
pub use classify::ClassifyLayer;
#[cfg(feature = "fleet-limit")]
pub use fleet_limit::FleetLimitLayer;
#[cfg(feature = "ramped-readmission")]
pub use readmission::{RampedReadmission, RampedReadmissionLayer};
#[cfg(feature = "retry-after")]
pub use retry_after::RetryAfterLayer;
#[cfg(feature = "spend")]
pub use spend::SpendLayer;
// The layers of a job queue.
#[cfg(feature = "retry-token")]
pub use retry_token::{JobBreakerLayer, RetryTokenLayer, RetryTokens};
#[cfg(feature = "fleet-limit")]
pub use token_limit::TokenLimitLayer;

/// The error of every layer that classifies or refuses.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
