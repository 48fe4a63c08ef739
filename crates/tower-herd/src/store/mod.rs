//! Where the processes of a fleet meet: one ceiling, one pause, one breaker for all of them.
//!
//! A limit that each process keeps for itself is a limit times the number of processes. With a [`FleetStore`]
//! the processes that share a provider are one fleet: each holds a *lease* on some of the provider's slots and
//! admits calls against that, without asking anybody; about once a second (and at once when it needs more,
//! was told to wait, or can give slots back) it *exchanges* a [`Report`] for a [`Grant`].
//!
//! The store's part is one atomic step for one provider: read its state, take the report in, answer. All rules
//! are in that step, so that every process sees the same. [`MemoryStore`] is the step as plain code, for fleets
//! within one process and for tests; the crate `tower-herd-redis` has it as one function on Redis or Valkey.
//!
//! # What is counted
//!
//! - **charge**: slots that a process may have in flight at worst, by the store's book. A grant is given only
//!   while the sum of all charges is within the ceiling, and a charge falls only when its holder itself says
//!   that it holds less, or when its lease has run out.
//! - **version**: grants are numbered over the provider. A reply may raise what a process holds only if its
//!   version is new; a late or doubled reply can only lower it.
//! - **epoch**: one life of the book. Lost data is a new epoch: nobody is given more until all leases of the
//!   old one have run out.
//!
//! # Two processes, one ceiling
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_herd::{Fleet, ProviderSettings, store::{FleetSettings, MemoryStore}};
//!
//! // In the place of a Redis: fleets of this process that meet in memory.
//! let store = MemoryStore::new();
//! let settings = FleetSettings::new().label("web-1");
//! # let settings = settings.on_this_runtime();
//! let here = Fleet::shared(store.clone(), settings.clone())?;
//! let there = Fleet::shared(store, settings)?;
//! // Everything else is as in a fleet of one process: layers take the provider.
//! let llm = here.configure("llm", ProviderSettings::new().ceiling(20))?;
//! let same = there.configure("llm", ProviderSettings::new().ceiling(20))?;
//! # let _ = same;
//! # tokio::time::sleep(std::time::Duration::from_secs(2)).await;
//! let lease = llm.lease().expect("in a fleet with a store");
//! assert_eq!((lease.ceiling, lease.members), (20, 2));
//! // When a service shuts down, after its last call:
//! here.leave().await;
//! # Ok(())
//! # }
//! ```
//!
//! # What holds, and when it does not
//!
//! In flight at the provider, counted there, is never above the ceiling in force when each call was admitted. After
//! a cut, calls that were in flight run on: until they end there may be more than the new ceiling. What that
//! takes, and what is left to chance:
//!
//! | situation | slots are others' after the ttl (default) | strict: after the ttl and the longest call |
//! |---|---|---|
//! | messages lost, doubled, delayed, reordered; a slow store; an outage for all; data lost (flush, restart empty, eviction); a stale replica promoted (1); one step of the store's clock (2) | holds | holds |
//! | a process is killed, and the provider drops its calls | holds | holds |
//! | a process is killed, and the provider works on at its calls | exceeded by those calls, until they end | holds |
//! | a process is cut off from the store, and not from the provider | exceeded by its calls in flight, until they end | holds |
//! | a process or its machine is stopped for longer than the ttl, with calls in flight | exceeded by its calls in flight, until they end | holds |
//!
//! (1) If the old primary stops granting; otherwise both do, up to twice the ceiling. On Redis: `min-replicas-to-write
//! 1`, and `min-replicas-max-lag` below the time that a lease is used (`ttl - gap - 50 ms`).
//! (2) Several steps, each below [`gap`](FleetSettings::gap), within one ttl add up.
//!
//! Also needed: calls end in the time that [`strict`](FleetSettings::strict) was told, which a timeout has to see
//! to; one process for each fleet handle (a forked process must make its own: where two have one name, as after a fork or in
//! a copy of a machine's memory, one of them takes another within about a renewal, and until then both use what they
//! share); nobody else uses the provider's account.
//! Between the check of the lease and the writing to the socket lies a moment: a process that is stopped right there
//! for longer than the margin (the gap, 3 s) lets those calls out late, one for each task that stood there. Providers
//! know no fencing tokens, so this cannot be closed from outside.
//!
//! When the lease cannot be renewed, [`Outage`] says what goes on:
//!
//! | policy | in flight at most | for how long |
//! |---|---|---|
//! | [`Stop`](Outage::Stop) | the ceiling; no new calls | until the store answers |
//! | [`Keep`](Outage::Keep) (default) | the ceiling; each process at most its safe share of it, which the store gives to nobody else. A store that loses its data *while* a process is cut off forgets that share: then exceeded by it | [`grace`](FleetSettings::grace), then as `Stop` |
//! | [`Local(n)`](Outage::Local) | n times the processes | until the store answers |
//!
//! [`LeaseStatus::overshoot_possible`] tells, for this process, how many of its calls may be beyond the ceiling now.
//!
//! A store that has lost its data is told again, by each process, of the pauses and open breakers that it knows of: none
//! ends early. For a provider a store keeps 64 named scopes at most that are paused or broken, or were in the last minute.
//! Those beyond are each process's own, their probes and alerts too.
//!
//! # Where it stands
//!
//! Nowhere in the stack: a [`Provider`](crate::Provider) of a fleet with a store is one, and the layers ask it as
//! they always do. Left out, each process has a ceiling, a pause, a breaker and a budget of its own, and N of them
//! send N times what the provider allows.
//!
//! # Times
//!
//! Six renewals may fail before anything stops, with the defaults: a lease lasts 10 s, is renewed each second and used
//! until 6.95 s after its last good report was sent. A wait that one process was told is known everywhere at once
//! where wake-ups come through, and within a renewal (1.1 s) where they do not.
//!
//! No clock of a host is compared with that of another: only durations travel, in whole milliseconds. A lease
//! counts from before its report was sent, a wait from when its reply came.

mod clock;
mod error;
mod grant;
mod lease;
mod ledger;
mod memory;
mod report;
mod settings;

pub use crate::provider::LeaseStatus;
pub use error::{StoreError, StoreErrorKind};
pub use grant::{Chunk, Grant, Leave, Opened, ScopeGrant, SharedPause};
pub use lease::LeaseState;
#[doc(hidden)]
pub use ledger::{Ledger, Wakes};
pub use memory::MemoryStore;
pub use report::{Epoch, HolderId, Limits, News, Quantity, RateLimit, RateReport, Report, Terms};
pub use settings::{FleetSettings, FleetSettingsError, Outage};

pub(crate) use clock::{Glance, LeaseClock};
pub(crate) use lease::{Bond, Lease, Load};
pub(crate) use settings::whole_millis;

use std::{future::Future, pin::Pin};

/// The answer of a store, some time later.
pub type Exchange<'a> = Pin<Box<dyn Future<Output = Result<Grant, StoreError>> + Send + 'a>>;
/// See [`FleetStore::listen`].
pub type Listen<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// What a fleet shares through. See the [module](self).
///
/// It is driven by one thread of the fleet, apart from the application's: connections are best made in the
/// first [`exchange`](Self::exchange), so that they live there.
pub trait FleetStore: Send + Sync + 'static {
    /// One atomic step for `provider`: takes the report in, and answers with what its holder has then.
    ///
    /// To be answered or given up within half a second. An error says nothing about whether the report was
    /// taken in; the next one has a higher [`seq`](Report::seq), and an older one that comes later changes
    /// nothing. Dropped, it may or may not have been taken in.
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a>;

    /// Calls `wakes` whenever somebody should exchange at once, for as long as it is polled: slots became free
    /// for a holder that lacks some, or a pause began. Without it (the default) the fleet polls: a pause is
    /// then known everywhere within one renewal, a free slot within half a second.
    fn listen<'a>(&'a self, _wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        Box::pin(std::future::pending())
    }
}

/// Somebody should exchange at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wake<'a> {
    /// At this provider.
    pub provider: &'a str,
    /// This holder; none: all.
    pub holder: Option<HolderId>,
}
