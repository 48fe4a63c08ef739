//! Herd control for [tower](https://docs.rs/tower).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(feature = "http")]
pub mod body;
mod chain;
pub mod classify;
pub mod clock;
#[cfg(feature = "hashed-failover")]
pub mod failover;
#[cfg(feature = "fleet-limit")]
pub mod fleet_limit;
mod gate;
#[cfg(feature = "http")]
pub mod http;
pub mod observe;
pub mod provider;
pub mod random;
pub mod refusal;
#[cfg(feature = "jittered-retry")]
pub mod retry;
#[cfg(feature = "retry-after")]
pub mod retry_after;
pub mod safety;
pub mod signal;
pub mod task;

#[cfg(feature = "http")]
pub use crate::http::{Head, HttpClassify, classify_body, classify_head};
pub use classify::{Classify, ClassifyFn, ClassifyLayer, Exhausted, NotExecuted, classify_fn};
pub use clock::{Clock, Time};
#[cfg(feature = "hashed-failover")]
pub use failover::{HashedFailover, HashedFailoverLayer};
#[cfg(feature = "fleet-limit")]
pub use fleet_limit::FleetLimitLayer;
pub use provider::{Fleet, PauseReason, Provider, ProviderSettings, SettingsError};
pub use refusal::{Refusal, RefusalKind};
#[cfg(feature = "jittered-retry")]
pub use retry::{Backoff, Budget, CloneRequest, JitteredRetryLayer, RatioBudget, Resend};
#[cfg(all(feature = "http", feature = "jittered-retry"))]
pub use retry::{Replay, replay};
#[cfg(feature = "retry-after")]
pub use retry_after::RetryAfterLayer;
pub use safety::Safety;
pub use signal::{Executed, Kind, Origin, Pushback, Quota, Reach, ResendAdvice, Signal};
pub use task::{Criticality, HasTask, Key, Task, TaskLayer};

/// The error of every layer that classifies or refuses.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
