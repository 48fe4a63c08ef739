//! Classifiers, and the sensor that feeds what they see to the provider.

mod traits;

pub use traits::{Classify, ClassifyFn, Exhausted, classify_fn};
