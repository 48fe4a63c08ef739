//! The breaker of job queues: one for each dependency, and for all processes.
//!
//! # Why
//!
//! Retry tokens hold back one job. When what a thousand jobs depend on is down, each of them has a token of its own, and
//! the dependency gets a thousand calls for each step of the back-off. A breaker in each process is no cure: three
//! agents let three times as many calls through before they open, and probe together.
//!
//! So this one lives in the store of tokens, under the key `breaker:<dependency>`. Its streak counts failures in a row,
//! of all processes; a success clears it. At the fifth the key is closed for 10 min, give or take a tenth, and every job
//! of that dependency is put back without an attempt. When that time is over, one claim is granted, which is the probe:
//! one for the fleet, and not one an agent.
//!
//! It is not [`BreakerLayer`](crate::breaker), which looks at the last calls of one provider, opens at a share of
//! failures, and is asked thousands of times a second. Here a call is a job: rare, long, and worth a question to the store.
//!
//! # What is counted
//!
//! | outcome | closed | as the probe |
//! |---|---|---|
//! | success | clears the failures that were known when it began | closes |
//! | failure | one more; the fifth opens | opens again: the same incident, no second alert |
//! | [neutral](crate::retry_token::Outcome::Neutral), or a refusal from further in | nothing | nothing: another probes after `probe_timeout` |
//! | dropped | nothing | the same |
//! | began before it opened | nothing | - |
//!
//! The alert is raised by the process whose failure was the fifth, once an incident: from the opening to the probe
//! that succeeds. It is an [`Alert`](crate::Alert) of kind `Broken`, as other breakers raise it; how many jobs this
//! process has deferred since, [`JobBreakerHandle`] says, and an event at its end. Failures of one instant are counted
//! one after the other, a millisecond apart.
//!
//! # What it costs
//!
//! A run asks the store once more, with a read ([`RetryTokens::peek`](crate::retry_token::RetryTokens::peek)). A failure costs
//! two or three statements, a success none, unless there were failures before it.
//!
//! # Where it stands
//!
//! Outside [`RetryTokenLayer`](crate::retry_token::RetryTokenLayer), so that a job which is kept back claims nothing. Readiness is
//! the inner service's: an open breaker hides in no `poll_ready`, but answers each call at once, with its instant. It
//! need not be woken, since its time runs in the store.
//!
//! While the store cannot be asked, each process has the breaker that it last saw, and counts alone
//! ([`OnOutage::Local`](crate::retry_token::OnOutage::Local)), or none.

mod config;
mod layer;
mod permit;
mod service;
pub mod state;

pub use config::JobBreakerSettings;
pub use layer::{JobBreakerHandle, JobBreakerLayer};
pub use permit::BreakerPermit;
pub use service::JobBreaker;
