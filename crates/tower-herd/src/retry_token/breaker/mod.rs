//! The breaker of job queues: one for a dependency and for all processes.

mod config;
mod layer;
mod permit;
mod service;
pub mod state;

pub use config::JobBreakerSettings;
pub use layer::{JobBreakerHandle, JobBreakerLayer};
pub use permit::BreakerPermit;
pub use service::JobBreaker;
