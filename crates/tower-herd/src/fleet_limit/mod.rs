//! A ceiling on the calls in flight at a provider.
//!
//! # Why
//!
//! A provider that holds 20 calls at a time answers the 21st with 429. A retry does not change that;
//! it only asks again. What helps is not to send the 21st: to let it wait here, in order, and briefly.
//! Two calls per agent are still 200 for a hundred agents, so the ceiling belongs to the [`Provider`],
//! and all layers, stacks and clients that share its handle share the ceiling.
//!
//! Where the limit is published, configure it ([`ProviderSettings::ceiling`](crate::ProviderSettings)).
//! Where it is not, it is learned: it grows while calls succeed and the ceiling is what limits them,
//! is cut once per event when the provider says 429, comes back quickly to just under the last good
//! value, stays there, and probes above it rarely.
//!
//! # Where it stands
//!
//! Inside the pause ([`RetryAfterLayer`](crate::RetryAfterLayer)), so that a call that may not be sent
//! yet does not hold a slot, and around the sensor ([`ClassifyLayer`](crate::classify::ClassifyLayer)).
//! Left out, every 429 costs a round trip, and after each pause all waiters leave at once.
//!
//! # What is counted
//!
//! A slot is taken from before the request is sent until the response body ends, or is dropped
//! ([`UntilBodyEnd`]); or until the reply is there ([`UntilReply`], for replies without a body). An
//! error reply gives its slot back at its head. A call that is dropped after it was sent may still
//! run at the provider: its slot stays taken for as long as calls usually take
//! ([`ProviderSettings::aborts`](crate::ProviderSettings) says that it need not).
//!
//! # Waiting
//!
//! Callers wait in the provider's own queue: interactive before batch (which is never starved),
//! in turns over callers, in order within one caller. Who cannot be served within its patience and
//! its task's deadline, as far as the queue can estimate, is refused at entry. Whose turn comes when its deadline
//! is nearer than the head of the median reply (once that is known) is refused then, and the slot goes to the next:
//! the call would more likely be cut than answered. Dropping the future gives the place in the queue, or the slot,
//! back at once.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, FleetLimitLayer, ProviderSettings};
//!
//! let llm = Fleet::local().configure("llm", ProviderSettings::new().ceiling(20))?;
//! let service = ServiceBuilder::new()
//!     .layer(FleetLimitLayer::new(&llm))
//!     .service(service_fn(|_: http::Request<String>| async { Ok::<_, std::io::Error>(http::Response::new(String::new())) }));
//! # let _ = service;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```
//!
//! For services that are not HTTP:
//!
//! ```
//! use std::error::Error;
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, FleetLimitLayer, Kind, Signal, classify_fn};
//!
//! let search = Fleet::local().provider("search");
//! let classify = classify_fn(|outcome: Result<&Vec<String>, &(dyn Error + 'static)>| {
//!     Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
//! });
//! let service = ServiceBuilder::new()
//!     .layer(FleetLimitLayer::with(&search, classify).until_reply())
//!     .service(service_fn(|query: String| async move { Ok::<_, std::io::Error>(vec![query]) }));
//! # let _ = service;
//! ```
//!
//! # Switched
//!
//! With a [`Switch`](crate::Switch) that observes, nobody waits: a call that finds no slot is counted, as
//! `NoSlot` or (in a pause) as `Paused`, and passes without one. So [`Provider::in_flight`](crate::Provider::in_flight) never shows more
//! than was admitted, and those who wait at the same provider by another layer that enforces are not passed
//! by in their queue. Turned off, no call takes a slot. What the sensor below learns goes on in both.
//!
//! # Errors
//!
//! [`Refusal`](crate::Refusal) of kind `NoSlot`, with the queue's estimate as `retry_at`, or `Paused`
//! with the exact end of the pause, when the wait does not fit; errors of the inner service as they
//! are, boxed.
//!
//! [`Provider`]: crate::Provider
//! [`Provider::in_flight`]: crate::Provider::in_flight

mod future;
mod hold;
mod layer;
mod service;

pub use future::ResponseFuture;
#[cfg(feature = "herd")]
pub(crate) use future::{failed, replied};
#[doc(hidden)]
pub use hold::HeldSlot;
pub use hold::{Held, Hold, UntilBodyEnd, UntilReply};
pub use layer::FleetLimitLayer;
pub use service::FleetLimit;
