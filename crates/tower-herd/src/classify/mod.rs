//! Classifiers, and the sensor that feeds what they see to the provider.

mod error;
mod traits;

pub use error::{NotExecuted, signal_of_error};
pub use traits::{Classify, ClassifyFn, Exhausted, classify_fn};
