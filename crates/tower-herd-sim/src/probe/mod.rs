//! The contract probe: does a tower layer keep the `Service` contract when things go wrong?
//!
//! The contract is short and its breaches are quiet. A layer that calls a clone which nobody made
//! ready works over a plain client and panics over a concurrency limit. A permit that is given back
//! only at the end of the happy path is lost when a caller hangs up, once in a while, until none is
//! left. So the probe puts a [`ProbeService`] below the layer under test, whose clones are never
//! ready, whose futures and bodies are counted and whose script can be slow, refusing or broken, and
//! then behaves like every caller it can think of:
//!
//! | check | what it does | what must hold |
//! |---|---|---|
//! | `readiness` | calls in sequence, on clones of a ready service, on eight clones at once, ready twice before a call, with the service dropped before its future | the inner service is called only on an instance whose `poll_ready` said so since its last call; every call ends |
//! | `drop` | drops the future before its first poll and after each pending poll, then the reply unread and half read | no inner future and no body lives on, what the layer holds comes back ([`UnderTest::quiescent`]), and the next call goes through |
//! | `drop-ready` | drops a service that is waiting to be ready, and services that are ready and never called | the same |
//! | `ready-error` | lets the inner `poll_ready` fail | the caller gets an error and no hang |
//!
//! A future polled again after its end is noticed in all of them. Everything runs on tokio's clock:
//! use a paused one, since the probe waits for what may return late (a slot that lingers after a
//! drop, say) up to [`Contract::settle`].
//!
//! ```
//! use tower::limit::ConcurrencyLimitLayer;
//! use tower_herd_sim::probe::{Contract, UnderTest};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
//! # .block_on(async {
//! let report = Contract::new(|| UnderTest::new(ConcurrencyLimitLayer::new(2))).check_http().await;
//! report.assert_kept();
//! # });
//! ```

mod contract;
mod service;
mod wrong;

pub use contract::{Contract, Finding, Reply, Report, UnderTest};
pub use service::{ProbeBody, ProbeError, ProbeFuture, ProbeOutcome, ProbeScript, ProbeService, Violation};
pub use wrong::{Wrong, WrongLayer, WrongService};
