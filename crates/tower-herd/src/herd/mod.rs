//! The whole stack from one builder: [`Herd`].
//!
//! # Why
//!
//! Thirteen layers in the right order, with one classifier, one budget, and each told of its provider, are
//! thirteen chances to get one wrong; and the swapped pair shows only in an outage (the
//! [guide](crate::guide::order) says what breaks then). A `Herd` is that stack as one layer. What it is
//! made of can still be used alone: a herd in front of one provider and a hand-made stack in front of the
//! same [`Provider`](crate::Provider) share its state.
//!
//! ```
//! use bytes::Bytes;
//! use http_body_util::Full;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_herd::{BoxError, Fleet, Herd};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), BoxError> {
//! # let client = service_fn(|_: http::Request<Full<Bytes>>| async {
//! #     Ok::<_, std::io::Error>(http::Response::new(Full::<Bytes>::from("{}")))
//! # });
//! let fleet = Fleet::local(); // one a process
//! let herd = Herd::new(&fleet.provider("llm")).llm();
//! let handle = herd.handle();
//! let service = ServiceBuilder::new().layer(herd).service(client);
//!
//! let request = http::Request::post("http://llm.example/v1/chat").body(Full::from("{}"))?;
//! let reply = service.clone().oneshot(request).await?;
//! assert_eq!((reply.status().as_u16(), handle.under_way()), (200, 1)); // until its body has been read
//! # Ok(())
//! # }
//! ```
//!
//! # What it is made of, outermost first
//!
//! | part | its default here |
//! |---|---|
//! | task | one for each request that belongs to none: 60 s, 3 attempts |
//! | [retry](crate::retry) | its own budget of a tenth; [`Herd::retry_budget`] shares one |
//! | [ladder](crate::failover) | with [`Herd::ladder`] |
//! | [readmission](crate::readmission) | 5 %, doubling every 5 s |
//! | [spend](crate::spend) | off until a task has an allowance and the rung [prices](RungSettings::prices) |
//! | [breaker](crate::breaker) | 18 failures of the last 20 calls |
//! | [adaptive throttling](crate::budget) | K = 2 over 30 s |
//! | [pause](crate::retry_after) | waits until the task's deadline; in a ladder not at all |
//! | [tokens a minute](crate::token_limit) | off until the provider [has a limit](crate::ProviderSettings::tokens_per_minute) |
//! | [limit](crate::fleet_limit) | learned, or the provider's [ceiling](crate::ProviderSettings::ceiling) |
//! | [attempts](crate::attempts) | written on repetitions |
//! | [sensor](crate::ClassifyLayer) | error bodies up to 64 KiB; [`Herd::read_success`] for more |
//! | [attempt timeout](crate::attempt_timeout) | 30 s to the head, 60 s of silence in the body |
//!
//! It is for requests and replies of the `http` crate, gRPC included. For others the layers are put together by
//! hand, each with [`replies`](crate::ClassifyLayer::replies) and a [classifier](crate::classify_fn).
//! [`ToolCallsLayer`](crate::ToolCallsLayer), which needs to know what a call is, goes around it.
//!
//! [`Herd::llm`] sets what completions need. A [`HerdConfig`] is all of it as plain data, and
//! [`HerdHandle::reload`] takes a changed one while it runs.
//!
//! Several keys or accounts behind one provider are a ladder of one tier: each key is a provider of its own
//! ("vendor/key-1", "vendor/key-2"), since each has its own limits and its own pause; tasks are split among
//! them by their affinity key.
//!
//! # Switched, watched, shut down
//!
//! [`HerdHandle`] switches each [`Concern`] while it runs: begin with
//! [`set_all(Mode::Observe)`](HerdHandle::set_all), see what it would have done, then let it decide.
//! [`HerdHandle::drain`] shuts down gracefully. [`Herd::on_alert`] hears of incidents.
//!
//! # What it costs
//!
//! The way that most calls take, on which no layer has anything to say, is written out as one step: no
//! allocation beyond the clone that keeps the request, and less time than the layers take one by one
//! (`docs/performance.md`). A call that leaves it goes through the layers themselves, which is where each
//! rule has its one meaning; that boxes a future.
//!
//! # Cancellation
//!
//! As its layers: dropped before it was sent a call costs nothing; after that its slot lingers and its
//! charge stays. Dropping a reply's body ends the call.

mod body;
mod builder;
mod classify;
mod config;
mod handle;
mod layers;
mod rung;
mod service;
mod wire;

pub use body::HerdBody;
pub use builder::{Herd, HerdError, Ladder, One};
pub use classify::HerdClassify;
pub use config::{AttemptTimes, HerdConfig, Modes, RetryBudget, RungConfig};
pub use handle::{Concern, HerdHandle};
pub use layers::{ByPrices, RungSettings};
pub use rung::Guarded;
pub use service::{HerdService, OneRung, Rungs};

/// The futures of a [`Herd`]'s services.
pub mod future {
    pub use super::{
        rung::ResponseFuture as GuardedFuture,
        service::{DirectFuture, ResponseFuture},
    };
}
