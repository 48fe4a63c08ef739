//! Chains built from other people's crates, for comparison. They draw from their own generators, so
//! unlike everything else here their traces differ between runs of one seed.

mod reqwest_retry;
mod tower_resilience;

pub use self::reqwest_retry::ReqwestRetry;
pub use self::tower_resilience::TowerResilience;
