//! Response bodies that hold something until they end.
//!
//! Each layer that watches a reply wraps its body once; all of them forward the size hint, and are
//! `Sync` and `Default` where the body inside is.

mod held;

pub use held::{Guard, HeldBody};
