//! Two budgets: how large a share of the traffic may be repetitions, and how much of what fails anyway
//! is sent at all.
//!
//! Backoff spreads one client's calls and caps nothing. In an outage every client still sends every
//! attempt it has, three nested layers of four attempts send 64, and a provider that could serve a tenth
//! of its usual load is kept down by the ten times as much that arrives. Two limits are missing, and they
//! are not the same:
//!
//! | | retry budget: [`Budget`] | adaptive throttling: [`BudgetLayer`] |
//! |---|---|---|
//! | what it is | a handle, drawn on by whoever repeats calls | a layer in front of one provider or scope |
//! | what it limits | repetitions, to a share of the originals: 10 percent over 30 s, and a few for quiet times | all calls, first ones too, to about `k` = 2 times what the provider accepts |
//! | what it goes by | how many original requests there are | how many calls are accepted |
//! | when it acts | at the second call of a task | from the point where less than half is accepted |
//! | what it says | the reply at hand is the last one | a [`Refusal`](crate::Refusal) of kind `Shed`, for 1 to 2 s |
//! | left out | an outage multiplies the load by the attempts | a dead provider gets all first calls until the breaker opens, and all of them again when it closes |
//!
//! # The retry budget
//!
//! Each original request pays in a fraction of a call; each repetition takes out a whole one, before it
//! sleeps, and gives it back if it is not sent. So a provider in trouble sees `1 + ratio` times its usual
//! load and not `attempts` times, while a single unlucky call is repeated at once. Not charged: a
//! re-delivery after a 429 (nothing was executed, and the server's pause spaces it), and waiting for a
//! refusal of our own.
//!
//! [`RatioBudget`] is that plain rule, in the shape of Finagle's `RetryBudget`; [`TokenBucketBudget`] is
//! gRPC's (gRFC A6). Other policies implement [`Budget`]. Give one handle to every layer that calls the
//! provider, and to foreign retry code: the rules are at [`Budget`], and `examples/foreign_retry.rs` puts
//! tower's own retry on the same handle. A hard ceiling of repetitions a minute is
//! [`RatioBudget::per_minute`].
//!
//! # Adaptive throttling
//!
//! Of the calls that come to it the layer refuses the share
//!
//! `p = max(0, (requests - k * accepts) / (requests + 1))`, at most `cap` = 0.9,
//!
//! over a window of 30 s (Site Reliability Engineering, chapter 21, "client-side throttling"; see
//! [`refusal_share`]). Requests are the calls that were sent and those that were *refused here*: without
//! the latter the formula settles at the root of `k * demand * capacity` and not at `k * capacity`, which
//! is the usual mistake. A task that comes back after a refusal is not a new request: it counts once a
//! window. What other layers refuse, and calls that their caller dropped, are none.
//!
//! Accepted are `Success`, `Empty` and `Rejected` (the provider answered; the request was at fault); not
//! accepted are `Throttled`, `Overloaded`, `Failed`, `Depleted`, `Misconfigured`, and calls that outlived
//! the deadline of their task. Calls on their way count as accepted until they are known not to be, so that
//! the fast errors of a slow provider do not look like an outage. While nothing is refused the clock is
//! read for one success in eight: what was counted between two readings is dated by the later.
//!
//! From 50 percent of failures on (with `k` = 2) it sheds, more and more, until the breaker opens; with all
//! calls failing one in ten is still sent. When the provider is back, what it accepts doubles the share
//! that it gets every few seconds: with 100 calls a second it has 95 percent of them about a minute after
//! its return. With few requests in the window ([`least`](BudgetSettings::least), 5) it refuses nothing: after
//! one call that failed the formula gives a half, and a quiet client would be sent away again and again.
//!
//! # Where it stands
//!
//! Below the [breaker](crate::breaker), above the pause:
//! `BreakerLayer`, **`BudgetLayer`**, [`RetryAfterLayer`](crate::RetryAfterLayer),
//! [`FleetLimitLayer`](crate::FleetLimitLayer), [`ClassifyLayer`](crate::ClassifyLayer). The sensor
//! counts, and both need the same scope.
//!
//! | swapped with | then |
//! |---|---|
//! | the retry layer (throttle outside) | repetitions are never shed, only first calls |
//! | the breaker (throttle outside) | it draws for calls that an open breaker refuses anyway, and counts those draws |
//! | the pause or the limit (throttle inside) | a call waits, holds its slot, and is thrown away then |
//! | the sensor (throttle inside) | its refusals are told to the provider as calls |
//!
//! # Errors, cancellation, cost
//!
//! The refusal says when: now + U(1, 2) s, and the retry layer waits for that free of charge. A probe (of a
//! pause, of a breaker) always passes. A dropped call is neutral. A call that meets no trouble pays for one
//! look at a flag here, and two additions to one number in the sensor; nothing is allocated.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{BudgetLayer, ClassifyLayer, Fleet, JitteredRetryLayer, RatioBudget, TaskLayer};
//!
//! # let client = service_fn(|_: http::Request<String>| async {
//! #     Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//! # });
//! let search = Fleet::local().provider("search");
//! let retries = RatioBudget::default(); // clones go to all who repeat calls to it
//! let service = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(JitteredRetryLayer::new().budget(retries.clone()))
//!     .layer(BudgetLayer::new(&search))
//!     .layer(ClassifyLayer::new(&search))
//!     .service(client);
//! # let _ = service;
//! ```
//!
//! Its settings belong to the provider; a second stack may give the same ones, and no others:
//!
//! ```
//! use tower_herd::{BudgetLayer, Fleet, budget::BudgetSettings};
//!
//! let search = Fleet::local().provider("search");
//! let strict = BudgetLayer::configured(&search, BudgetSettings::new().k(1.5))?;
//! assert!(BudgetLayer::configured(&search, BudgetSettings::new().k(1.1)).is_err());
//! assert_eq!(BudgetLayer::new(&search).in_force().k, 1.5);
//! # let _ = strict;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```

mod config;
mod future;
mod layer;
mod policy;
mod ratio;
mod service;
mod state;
mod token_bucket;

pub use config::BudgetSettings;
pub use future::ResponseFuture;
pub use layer::BudgetLayer;
pub use policy::{Budget, Unlimited};
pub use ratio::RatioBudget;
pub use service::AdaptiveThrottle;
pub use state::refusal_share;
pub use token_bucket::TokenBucketBudget;

pub(crate) use state::{Shed, Throttle};
