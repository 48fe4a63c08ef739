//! A ladder of providers: the cheapest that has room, and the herd splits instead of jumping.
//!
//! # Why
//!
//! A chain "try A, else B" moves everybody to B at the instant A says 429, and B was sized for a
//! trickle; then the next falls (KarpelesLab/teamclaude#84 to #309). Pure waiting is no cure either: it
//! stalls while a sibling idles. So here a task that meets a 429 waits where it is when the wait is
//! short, and goes on only when it is long, and only into a slot that is free; nobody is pushed onto a
//! rung that has no room.
//!
//! # How a task walks
//!
//! Tiers go from cheap to dear. Within a tier the rungs are ordered by a weighted rendezvous hash of the
//! task's affinity key, so that a conversation stays where its prompt cache is, shares follow weights,
//! and when a rung leaves only its tasks move. The first rung with a free slot is called. If no rung of
//! the tier has room, the task queues at all of them, for its slot patience (500 ms; 2 s where the wait
//! is for a pause); when that is over, or when it is plain that it will be, it queues at the next tier
//! too. Whichever rung frees first serves it. Nobody waits inside a rung, and no slot is held while
//! waiting.
//!
//! A rung that recovers gets its tasks back by a [ramp](crate::readmission). Who is not back there yet takes
//! no slot of it and no place in its queue: the task goes on as if the rung were paused until then, into
//! what is free on the next rungs, and joins the queue of its own when the ramp has reached it.
//!
//! | reply of a rung | goes on to the next? |
//! |---|---|
//! | success, rejected | no |
//! | empty | free rung: yes, at no charge; paid rung: the chain ends |
//! | overloaded or failed, to a keyed write that may have taken effect | to rungs of the same [`domain`](Rung::domain), if it belongs to a task; there it stays |
//! | throttled | if its wait is longer than the hint patience (2 s), into a free slot; else the reply goes out, to the retry layer |
//! | overloaded, failed | if the request may suffer it, within the task's allowance, into a free slot |
//! | account empty, misconfigured | yes |
//! | refused by a layer of the rung, until some instant | yes |
//! | refused by a layer of the rung for good (no money left, draining) | no: the caller gets the reply before it, marked as the last one, or the refusal if there was none |
//!
//! One call of the ladder is one walk; a rung that was called in it is not called again. If no rung
//! could be called before the task's deadline, the answer is a [`Refusal`](crate::Refusal) of kind
//! `NoRung`; if one gave a real reply, that reply.
//!
//! # Where it stands
//!
//! Inside the retry layer, which sends again what came back; around the stacks of its rungs. Each rung
//! brings its own [`RetryAfterLayer`](crate::RetryAfterLayer), [`FleetLimitLayer`](crate::FleetLimitLayer)
//! and [`ClassifyLayer`](crate::classify::ClassifyLayer) of the same provider. A rung without a fleet limit is
//! called without a ceiling.
//!
//! # Two forms
//!
//! [`HashedFailoverLayer`] puts a stack a rung around clones of one client. [`HashedFailover::new`]
//! takes services that were built already; where their types differ, box them
//! ([`tower::util::BoxCloneSyncService`](https://docs.rs/tower/latest/tower/util/struct.BoxCloneSyncService.html)),
//! which costs an allocation a call.
//!
//! # Switched
//!
//! With a [`Switch`](crate::Switch) that observes, or is off, nobody walks: each call goes to the first rung
//! of its order, whether that has room or not, as by a client without a ladder; the rung's mapping and its
//! layers apply. Observing, it counts (as `NoRung`) who would not have stayed there: because there was no
//! slot, or because of what the rung replied; whether another rung would have had room is not looked at. Two
//! things stay on in any mode, since they belong to the request: a keyed write that may have been executed
//! is sent to no other provider, and the retry layer further out learns who replied.
//!
//! # Errors and cancellation
//!
//! [`LadderError`] where the rungs cannot make a ladder, at construction. A refusal as above; errors of the
//! rung that was called last as they are, boxed. Dropping the future leaves all queues, or drops the call
//! in flight.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{
//!     ClassifyLayer, Fleet, FleetLimitLayer, HashedFailoverLayer, Provider, RetryAfterLayer, failover::Rung,
//! };
//!
//! let rung = |provider: &Provider, url: &'static str| {
//!     let url = http::Uri::from_static(url);
//!     let layers = ServiceBuilder::new()
//!         .layer(RetryAfterLayer::new(provider))
//!         .layer(FleetLimitLayer::new(provider))
//!         .layer(ClassifyLayer::new(provider))
//!         .into_inner();
//!     Rung::new(provider, layers).map(move |mut request: http::Request<String>| {
//!         *request.uri_mut() = url.clone();
//!         request
//!     })
//! };
//! let fleet = Fleet::local();
//! let ladder = HashedFailoverLayer::new([
//!     rung(&fleet.provider("own-gpu"), "http://gpu.internal/v1/chat"),
//!     rung(&fleet.provider("vendor"), "http://vendor.example/v1/chat").tier(1).paid(),
//! ])?;
//! let client = service_fn(|_: http::Request<String>| async {
//!     Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//! });
//! let service = ServiceBuilder::new().layer(ladder).service(client);
//! # let _ = tower::ServiceExt::oneshot(service, http::Request::new(String::new()));
//! # Ok::<(), tower_herd::failover::LadderError>(())
//! ```

mod error;
mod future;
mod hash;
mod layer;
mod patience;
mod rung;
mod service;
mod wait;

pub use error::LadderError;
pub use future::ResponseFuture;
pub use layer::HashedFailoverLayer;
pub use rung::{MapRequest, Rung};
pub use service::HashedFailover;
