//! Retry tokens: a job that failed is not retried early by anyone.

pub mod local;
pub mod schedule;
pub mod store;

pub use local::LocalTokens;
pub use schedule::{Schedule, ScheduleError};
pub use store::{Claim, Grant, HolderId, RetryTokens, Token, Wait, WaitCause};
