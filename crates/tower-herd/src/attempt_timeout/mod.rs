//! The attempt timeout: how long one call on the wire may take to answer, and a body to go on.
//!
//! An attempt without a timeout of its own is bounded only by its task: one dead connection then
//! eats the time of all the retries that would have worked. And an attempt that gets a *fresh*
//! timeout each time outlives the task that it serves (`timeout=30, max_retries=2` cost 91 s on a
//! dead upstream, openai/openai-python#3828). So the timeout of an attempt is its own, or what is
//! left of the task, whichever is less.
//!
//! **Where it stands**: innermost, below [`ClassifyLayer`](crate::ClassifyLayer). The sensor then
//! sees a typed [`AttemptTimeout`], a failure of the provider; a timeout further out shows it only a
//! call that somebody dropped, which proves nothing, and a dead provider looks healthy. Around a stack that
//! waits out a pause, or for a slot, it cuts that wait: the call is told as timed out though nothing was sent.
//!
//! Two timeouts, for two silences:
//!
//! - to the **head** of the reply (30 s): from the first poll of the call;
//! - between two pieces of the **body** (60 s): counted only while somebody waits for the next piece,
//!   so that a slow reader is not taken for a silent provider. The task's deadline does not cut a
//!   body that moves.
//!
//! After either nobody knows whether the request took effect: it is sent again only if that is safe.
//!
//! With a [`Switch`](crate::Switch) that observes, a call that outlives one of the two is counted, once, and
//! goes on; turned off, neither is measured, and the task's deadline does not bind the call.
//!
//! ```
//! use std::time::Duration;
//! use tower::ServiceBuilder;
//! use tower_herd::{AttemptTimeoutLayer, ClassifyLayer, Fleet};
//!
//! # type Body = http_body_util::Full<bytes::Bytes>;
//! let provider = Fleet::local().provider("llm");
//! let service = ServiceBuilder::new()
//!     .layer(ClassifyLayer::new(&provider))
//!     .layer(AttemptTimeoutLayer::new(Duration::from_secs(10)).idle(Duration::from_secs(20)))
//!     .service_fn(|_: http::Request<()>| async { Ok::<_, std::io::Error>(http::Response::new(Body::default())) });
//! # let _ = service;
//! ```
//!
//! Requests and replies of any type:
//!
//! ```
//! use std::time::Duration;
//! use tower::{ServiceBuilder, ServiceExt};
//! use tower_herd::{AttemptTimeout, AttemptTimeoutLayer};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! let service = ServiceBuilder::new()
//!     .layer(AttemptTimeoutLayer::new(Duration::from_secs(10)).replies())
//!     .service_fn(|_: u64| std::future::pending::<Result<u64, std::io::Error>>());
//! let error = service.oneshot(7).await.unwrap_err();
//! assert!(error.is::<AttemptTimeout>());
//! # }
//! ```

#[cfg(feature = "http")]
mod body;
mod error;
pub mod future;
mod layer;
mod service;

#[cfg(feature = "http")]
pub use body::TimedBody;
pub use error::{AttemptTimeout, Phase};
pub use layer::AttemptTimeoutLayer;
pub use service::Timed;

#[cfg(test)]
mod tests;
