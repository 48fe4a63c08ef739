//! Judge, sparring partner and inspector for tower stacks that call rate-limited providers.
//!
//! The crate holds four tools that share one idea: *time is tokio's clock*, so whatever runs in
//! minutes against a real server runs in milliseconds here, and the same seed gives the same trace.
//!
//! * [`provider`]: scripted providers. Each is a tower service with a quota (concurrency, requests
//!   or tokens a second), a dialect of 429, a latency, outages and brown-outs, and an exact account
//!   of what it saw. Use them in your own tests, under a paused clock or behind a real socket.
//! * [`probe`]: the contract probe. It drives any tower layer through the corners of the `Service`
//!   contract (readiness, clones, drops at each await point) and says what it broke.
//! * [`tokens`]: the test of a store of retry tokens.
//! * [`scenario`], [`policy`], [`report`]: the herd simulator, also the binary `tower-herd-sim`.
//!   It runs a fleet of agents under one of several policies against the same seeded providers and
//!   judges from the providers' side: calls on the wire, refusals, bursts, early calls, duplicates,
//!   and the time against an oracle that knows every limit. Seven scenarios: a quota that is cut
//!   (`stampede`), equal waits (`equal-hint`), failing calls (`brownout`), an outage and its end
//!   (`recovery`), retries over retries (`amplification`), many processes under one ceiling (`fleet`), and jobs on the minute (`cron`).
//! * [`store`]: a scripted store of a fleet, with every fault that a network and a server have.
//!
//! ```
//! use std::time::Duration;
//! use http_body_util::BodyExt;
//! use tower::ServiceExt;
//! use tower_herd_sim::provider::{Quota, Script, ScriptedProvider};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
//! # .block_on(async {
//! let provider = ScriptedProvider::new(
//!     Script::new(Quota::concurrency(1)).hint_seconds(7.0).latency(Duration::from_millis(200)),
//! );
//! let call = |id: u64| {
//!     let request = http::Request::post("http://one/").header("x-task-id", id).body(()).unwrap();
//!     provider.service().oneshot(request)
//! };
//! let (first, second) = tokio::join!(call(1), call(2));
//! assert_eq!(first.unwrap().status(), 200);
//! let second = second.unwrap();
//! assert_eq!(second.status(), 429);
//! assert_eq!(second.headers()["retry-after"], "7");
//! assert_eq!(provider.stats().throttled, 1);
//! # });
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod cli;
pub mod policy;
pub mod probe;
pub mod provider;
pub mod report;
pub mod scenario;
pub mod store;
pub mod tokens;

/// A duration times a factor, without the panics of `mul_f64`.
pub(crate) fn scale(d: std::time::Duration, by: f64) -> std::time::Duration {
    seconds(d.as_secs_f64() * by)
}

/// Seconds as a duration: nonsense is zero, too much is a year.
pub(crate) fn seconds(s: f64) -> std::time::Duration {
    const YEAR: f64 = 86_400.0 * 365.0;
    std::time::Duration::try_from_secs_f64(s.clamp(0.0, YEAR)).unwrap_or_default()
}

/// A boxed error that any layer of a stack may return.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
