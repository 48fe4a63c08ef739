//! Classifiers, and the sensor that feeds what they see to the provider.
//!
//! One place decides what a reply means, and one place reports it. A [`Classify`] turns a reply, or
//! the error in its place, into a [`Signal`](crate::Signal); [`ClassifyLayer`] does so once for each
//! call and hands it to the [`Provider`](crate::Provider), where pauses, ceilings and budgets learn.
//! Layers that classified each for themselves would count the same 429 several times, and differ on
//! what only the body tells.
//!
//! | reply | classifier |
//! |---|---|
//! | HTTP, gRPC | `HttpClassify`, the default |
//! | the same, and you know more about the head, or the body | `classify_head`, `classify_body` |
//! | anything else | [`classify_fn`], with [`ClassifyLayer::replies`] |

#[cfg(feature = "http")]
mod body;
mod error;
pub mod future;
mod layer;
mod report;
mod service;
mod traits;

#[cfg(feature = "http")]
pub use body::SensedBody;
#[cfg(any(feature = "fleet-limit", feature = "http"))]
pub(crate) use error::is_timeout;
pub use error::{NotExecuted, signal_of_error};
#[cfg(feature = "herd")]
pub(crate) use layer::Options;
pub use layer::{Bodies, ClassifyLayer, Replies};
#[cfg(feature = "herd")]
pub(crate) use report::Report;
pub use service::Classified;
pub use traits::{Classify, ClassifyFn, Exhausted, FromProvider, classify_fn};

/// The classifier of a layer that was given none: HTTP and gRPC.
#[cfg(feature = "http")]
pub type DefaultClassify = crate::HttpClassify;
/// The classifier of a layer that was given none: without the feature `http` one must be given.
#[cfg(not(feature = "http"))]
pub type DefaultClassify = Unclassified;

/// What a layer makes of a reply when it was not told: HTTP bodies are watched to their end.
#[cfg(feature = "http")]
pub(crate) type DefaultMode = Bodies;
#[cfg(not(feature = "http"))]
pub(crate) type DefaultMode = Replies;

/// Stands where a classifier is still missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unclassified;

#[cfg(all(test, feature = "http"))]
mod tests;
