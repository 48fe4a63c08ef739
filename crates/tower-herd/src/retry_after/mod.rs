//! Waits as long as the server said: never less, shared by all, and not all back at the same instant.
//!
//! # Why
//!
//! A server that says "not before 30 seconds" knows something that no backoff can guess. Most
//! clients lose it on the way (the hint is parsed and never reaches the retry loop:
//! maximhq/bifrost#6971), shorten it (openai/openai-python#3555), or obey it one by one: each of a
//! hundred agents has to be refused once before it knows. Here the wait belongs to the [`Provider`]:
//! one reply pauses everybody who shares the handle, no call leaves before the latest instant that
//! is known, and when the pause ends the waiters leave spread out, since a hundred that were told
//! the same second are a herd again (NousResearch/hermes-agent#109234).
//!
//! # Where it stands
//!
//! Outside the [fleet limit](crate::fleet_limit), so that who waits holds no slot, and inside retry
//! and failover, which get a [`Refusal`](crate::Refusal) with the exact instant when the wait is too
//! long to sit out. Left out, the fleet limit still serves nobody while its provider is paused, but
//! callers cannot be given a patience, and a stack without a fleet limit obeys nothing.
//!
//! # What pauses, and for how long
//!
//! | reply | pause |
//! |---|---|
//! | throttled or overloaded, with a hint | the hint, whole, up to 24 h |
//! | throttled without a hint | 1 s, doubling to 30 s, until a success |
//! | account empty | its instant, else 15 min doubling to 6 h |
//! | key or configuration wrong | 15 min |
//!
//! Pauses merge by maximum and end early only by a success of a call that was sent after they began,
//! or by an operator ([`Provider::clear_pause`]). A pause over five minutes lets one probe through
//! every max(5 min, pause / 20).
//!
//! # The end of a pause
//!
//! Waiters leave in the order of the provider's queue, spread over max(1 s, hint / 2) as far as the
//! ceiling allows; who comes while they leave joins the queue.
//!
//! # Switched
//!
//! With a [`Switch`](crate::Switch) that observes, a call that comes during a pause is counted (as `Paused`)
//! and passes; who comes in the ramp after it just passes. Turned off, it lets all pass and senses none. A
//! [`FleetLimitLayer`](crate::FleetLimitLayer) below that still enforces keeps obeying the pause.
//!
//! # Errors and cancellation
//!
//! A wait beyond the patience or the task's deadline is answered at once with a refusal of kind
//! `Paused` that carries the end of the pause. Dropping the future leaves the queue; nothing else
//! is to be undone.
//!
//! ```
//! use std::time::Duration;
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, RetryAfterLayer};
//!
//! let search = Fleet::local().provider("search");
//! let service = ServiceBuilder::new()
//!     .layer(RetryAfterLayer::new(&search).patience(Duration::from_secs(5)))
//!     .service(service_fn(|_: http::Request<String>| async { Ok::<_, std::io::Error>(http::Response::new(String::new())) }));
//! # let _ = service;
//! ```
//!
//! [`Provider`]: crate::Provider
//! [`Provider::clear_pause`]: crate::Provider::clear_pause

mod future;
mod layer;
mod service;

pub use future::ResponseFuture;
pub use layer::RetryAfterLayer;
pub use service::RetryAfter;
