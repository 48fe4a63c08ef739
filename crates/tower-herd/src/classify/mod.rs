//! Classifiers, and the sensor that feeds what they see to the provider.

mod error;
mod traits;

pub(crate) use error::is_timeout;
pub use error::{NotExecuted, signal_of_error};
pub use traits::{Classify, ClassifyFn, Exhausted, classify_fn};

/// The classifier of a layer that was given none: HTTP and gRPC.
#[cfg(feature = "http")]
pub type DefaultClassifier = crate::http::HttpClassify;

/// The classifier of a layer that was given none: without the feature `http` there is none, and one
/// must be given.
#[cfg(not(feature = "http"))]
pub type DefaultClassifier = Unclassified;

/// Stands where a classifier is still missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unclassified;
