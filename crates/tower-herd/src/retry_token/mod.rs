//! Retry tokens: a job that failed is not retried early by anyone.

pub mod breaker;
mod defer;
pub mod future;
mod layer;
mod local;
mod outage;
mod outcome;
mod permit;
mod schedule;
mod service;
mod store;
mod tokens;

pub use breaker::{JobBreaker, JobBreakerHandle, JobBreakerLayer, JobBreakerSettings};
pub use defer::{Defer, Deferral, DeferredBy, NoDefer};
pub use future::ResponseFuture;
pub use layer::RetryTokenLayer;
pub use local::LocalTokens;
pub use outage::{OnOutage, StoreAlert};
pub use outcome::{ErrorsFail, Judge, Outcome};
pub use schedule::{Schedule, ScheduleError};
pub use service::RetryToken;
pub use store::{Claim, Grant, HolderId, RetryTokens, Token, Wait, WaitCause};
pub use tokens::{TokenCounts, TokenSettings, Tokens};
