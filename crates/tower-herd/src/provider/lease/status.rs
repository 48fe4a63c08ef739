use super::{Core, lock};
use crate::{
    Provider,
    store::{LeaseState, Outage, StoreErrorKind},
};
use std::time::Duration;

/// How a process stands in its fleet, for one provider: [`Provider::lease`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeaseStatus {
    /// How it stands with the store.
    pub state: LeaseState,
    /// Slots that it may fill now.
    pub slots: u32,
    /// The ceiling of all members, when it was last told.
    pub ceiling: u32,
    /// Processes that share the provider, when it was last told.
    pub members: u32,
    /// For so long the lease lasts without another renewal.
    pub left: Duration,
    /// Calls of this process that may be in flight beyond the ceiling: those that run on after its slots may have
    /// been given to others, and under [`Outage::Local`] all that it makes of its own accord. 0: the ceiling holds.
    pub overshoot_possible: u32,
    /// Exchanges with the store so far.
    pub exchanges: u64,
    /// Of those, the ones that failed.
    pub errors: u64,
    /// What was wrong with the last one, while the store does not answer; none once it does.
    pub last_error: Option<StoreErrorKind>,
}

impl Provider {
    /// How this process stands in its fleet; none in a fleet without a store.
    #[must_use]
    pub fn lease(&self) -> Option<LeaseStatus> {
        self.core().lease_status()
    }
}

impl Provider {
    /// Whether other processes share it.
    #[cfg(feature = "budget")]
    pub(crate) fn is_shared(&self) -> bool {
        self.core().link().is_some()
    }

    /// The ceiling of its fleet, and who shares it; none in a fleet without a store, and until it has answered.
    #[cfg(feature = "budget")]
    pub(crate) fn fleet_share(&self) -> Option<(u32, u32)> {
        let lease = lock(&self.core().link()?.lease);
        (lease.ceiling > 0).then_some((lease.ceiling, lease.members))
    }
}

impl Core {
    /// Why there is no slot, where it is for want of a lease.
    pub(in crate::provider) fn no_lease(&self) -> Option<&'static str> {
        let link = self.link()?;
        let lease = lock(&link.lease);
        match lease.state(link.clock.now()) {
            LeaseState::Joining => Some("no slot, since the fleet's store has not answered yet"),
            LeaseState::Learning => {
                Some("no slot, since the fleet's store is new and waits to hear who holds any")
            }
            LeaseState::Lost => {
                Some("no slot, since the lease has run out and the fleet's store does not answer")
            }
            LeaseState::Held => None,
        }
    }

    fn lease_status(&self) -> Option<LeaseStatus> {
        let link = self.link()?;
        self.check_lease();
        let load = self.load();
        let lease = lock(&link.lease);
        let now = link.clock.now();
        let overshoot_possible = match lease.settings().outage_policy() {
            Outage::Local(_) if lease.is_lapsed() => load.busy,
            _ if lease.is_reclaimed(now) => load.busy.saturating_sub(lease.safe(now)),
            _ => 0,
        };
        Some(LeaseStatus {
            state: lease.state(now),
            slots: load.cap,
            ceiling: lease.ceiling,
            members: lease.members,
            left: lease.left(now),
            overshoot_possible,
            exchanges: lease.exchanges,
            errors: lease.errors,
            last_error: lease.last_error,
        })
    }
}
