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
//! # Times
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

pub(crate) use clock::LeaseClock;
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
