//! The breaker: nobody calls what is broken, and somebody is told once.

mod alert;
mod cell;
mod config;
mod future;
mod handle;
mod layer;
mod service;
mod state;
#[cfg(test)]
mod tests;

pub use alert::{Alert, AlertKind, Sample};
pub use config::BreakerSettings;
pub use future::ResponseFuture;
pub use handle::{BreakerHandle, BreakerState};
pub use layer::BreakerLayer;
pub use service::Breaker;

pub(crate) use alert::{Facts, Trouble};
pub(crate) use cell::{About, Cell};
