//! A provider's part in a fleet of several processes: what it holds by lease, and what it tells and is told.
//!
//! The gate is bound by the lease ([`Gate::bind`](crate::gate::Gate::bind)); the pause, the breaker and the
//! ramp are what they are without a store, and are moved by the grants as well as by the calls of this process.
//!
//! Locks: the lease's is taken last, under that of the gate or of what is shared; nothing is called under it.

mod driver;
mod grants;
mod rates;
mod status;
mod window;

pub use status::LeaseStatus;
use window::UseBy;

pub(super) use driver::Driver;
pub(super) use rates::Rates;

use super::{Apart, Core, PauseReason, Scope, lock};
use crate::{
    Time,
    gate::Bound,
    random::{Random, Seeds},
    store::{Bond, Epoch, FleetSettings, HolderId, Lease, LeaseClock, Load, News},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// What ties a provider to the fleet's store.
pub(super) struct Link {
    lease: Mutex<Lease>,
    clock: LeaseClock,
    /// [`Lease::use_by`], for the hot path.
    use_by: Apart<UseBy>,
    bell: Notify,
    has_left: AtomicBool,
    left: Notify,
    /// The fleet leaves a probe to this process until then, for which it needs a slot.
    leave: AtomicU64,
    /// It was rung for want of slots, and the next report is not sent yet.
    rung: AtomicBool,
    /// The process leaves the fleet.
    leaving: AtomicBool,
    shared: Mutex<Shared>,
    rates: Mutex<Rates>,
}

/// What is known of the fleet's scopes.
#[derive(Default)]
struct Shared {
    scopes: HashMap<Option<Arc<str>>, Known>,
    /// The life of the book that was heard of last, and the scopes that it has.
    epoch: Option<Epoch>,
    in_book: Vec<Option<String>>,
    ceiling: u32,
    /// Told once.
    disagrees: bool,
    lost: bool,
    #[cfg(feature = "breaker")]
    alerts: Vec<(Option<Arc<str>>, crate::breaker::Alert)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    generation: u64,
    /// Calls and throttles of ramps here, as they were told last.
    told: (u64, u64),
    /// Of those, what the last grant does not include yet.
    fresh: (u64, u64),
    /// Those of all processes, as the last grant had them.
    fleet: Option<(u64, u64)>,
}

impl Link {
    pub(super) fn new(me: HolderId, settings: FleetSettings, random: Random) -> Self {
        let clock = settings.clock().clone();
        let lease = Lease::new(me, settings, random, clock.now());
        Link {
            lease: Mutex::new(lease),
            clock,
            // Nothing is held yet: the gate is bound to nothing.
            use_by: Apart(UseBy::new()),
            bell: Notify::new(),
            has_left: AtomicBool::new(false),
            left: Notify::new(),
            leave: AtomicU64::new(0),
            rung: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            shared: Mutex::default(),
            rates: Mutex::default(),
        }
    }

    #[inline]
    fn is_in_time(&self) -> bool {
        self.use_by.0.is_to_come(|| self.clock.now(), || self.clock.glance())
    }

    /// Somebody waits for a slot: the driver looks whether the store is to be asked.
    fn demand(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.bell.notify_one();
        }
    }

    fn hurry(&self) {
        lock(&self.lease).hurry();
        self.bell.notify_one();
    }

    fn tell(&self, news: News) {
        lock(&self.lease).tell(self.clock.now(), news);
        self.bell.notify_one();
    }

    fn publish(&self, lease: &Lease) {
        self.use_by.0.set(lease.use_by(), || self.clock.now(), self.clock.glance());
    }
}

/// What a provider holds on to.
pub(super) type Tie = Arc<Link>;

/// The link of a new provider, where its fleet has a store.
pub(super) fn tie(fleet: &super::fleet::Shared) -> Option<Tie> {
    let meeting = fleet.store.as_ref()?;
    let random = fleet.seeds.session();
    // Whatever seed the fleet was given: two processes of one name would share one record at the store.
    let mut names = if meeting.settings.has_own_thread() {
        Seeds::from_entropy().session()
    } else {
        fleet.seeds.session()
    };
    let me = HolderId(u128::from(names.bits()) << 64 | u128::from(names.bits()));
    Some(Arc::new(Link::new(me, meeting.settings.clone(), random)))
}

impl Core {
    pub(super) fn link(&self) -> Option<&Arc<Link>> {
        self.link.as_ref()
    }

    /// A slot was taken on a lease that has not run out. If it has, the slot is given back.
    #[inline]
    pub(super) fn is_in_time(&self) -> bool {
        match &self.link {
            None => true,
            Some(link) => link.is_in_time() || self.too_late(link),
        }
    }

    #[cold]
    #[inline(never)]
    fn too_late(&self, link: &Link) -> bool {
        self.gate.release();
        self.lapse(link);
        false
    }

    /// Before a slot is asked for under the gate's lock.
    #[inline]
    pub(crate) fn check_lease(&self) {
        if let Some(link) = self.link.as_ref().filter(|link| !link.is_in_time()) {
            self.lapse(link);
        }
    }

    /// The lease has run out: what the policy leaves is in force.
    #[cold]
    fn lapse(&self, link: &Link) {
        self.bind(link, |lease, now, load, _| lease.lapse(now, load));
        self.lost(link);
    }

    /// Binds the gate to what the lease says; none: as before.
    fn bind(&self, link: &Link, bond: impl FnOnce(&mut Lease, Time, Load, bool) -> Option<Bond>) -> Load {
        let paused = self.root.paused(self.clock().now()).is_some();
        let mut waits = 0;
        let bound = self.gate.bind(|control, here, waiting| {
            waits = u32::try_from(waiting).unwrap_or(u32::MAX);
            let load = Load { cap: here.cap, busy: here.busy, waiting: waits };
            let mut lease = lock(&link.lease);
            let bond = bond(&mut lease, link.clock.now(), load, paused);
            link.publish(&lease);
            let bond = bond.unwrap_or(Bond { cap: load.cap, shed: None });
            control.lease(bond.cap);
            Bound { cap: bond.cap, shed: bond.shed }
        });
        let (here, _) = self.gate.bound();
        Load { cap: here.cap, busy: bound.busy, waiting: waits }
    }

    fn load(&self) -> Load {
        let (here, waiting) = self.gate.bound();
        Load { cap: here.cap, busy: here.busy, waiting: u32::try_from(waiting).unwrap_or(u32::MAX) }
    }

    /// Its limits were changed: the others are to know at once.
    pub(super) fn tell_limits(&self) {
        if let Some(link) = &self.link {
            link.hurry();
        }
    }

    /// Somebody waits, or was sent away, for want of a slot.
    #[inline]
    pub(super) fn demand(&self) {
        if let Some(link) = &self.link {
            link.demand();
        }
    }

    /// A slot went back to the fleet with the call that ended.
    #[cold]
    pub(super) fn has_shed(&self) {
        if let Some(link) = &self.link {
            link.hurry();
        }
    }

    /// A pause began, or was made longer, here.
    pub(super) fn tell_pause(&self, on: Option<&Scope>, wait: Duration, reason: PauseReason) {
        if let Some(link) = &self.link {
            let wait = crate::store::whole_millis(wait);
            link.tell(News::Paused { scope: name(on), wait, reason });
        }
    }

    /// A pause was ended here, by a call that was answered well or by an operator.
    pub(super) fn tell_cleared(&self, on: Option<&Scope>) {
        if let Some(link) = &self.link {
            let generation = link.generation(on);
            link.tell(News::Cleared { scope: name(on), generation });
        }
    }

    /// A call was refused for flow control.
    pub(super) fn tell_throttled(&self, generation: u64, wait: Duration) {
        if let Some(link) = &self.link {
            let wait = crate::store::whole_millis(wait);
            link.tell(News::Throttled { generation, calls: 1, wait });
        }
    }

    pub(super) fn tell_overloaded(&self, generation: u64, wait: Option<Duration>) {
        if let Some(link) = &self.link {
            let wait = wait.map_or(0, crate::store::whole_millis);
            link.tell(News::Overloaded { generation, wait });
        }
    }

    /// Leave for a probe, of the fleet: only one of all processes has it at a time. Who has lost the store goes by
    /// its own schedule; so does everybody where the book knows nothing of this scope, or nobody ever had leave.
    pub(super) fn may_probe(&self, on: &Scope, now: Time) -> bool {
        let Some(link) = &self.link else { return true };
        if now < on.leave() || link.is_alone(on) {
            return true;
        }
        link.ask_probe(on, now);
        false
    }

    /// The probe goes: for the next one leave is to be asked again.
    pub(super) fn used_leave(&self, on: &Scope) {
        if let Some(link) = &self.link {
            on.give_leave(Time::ZERO);
            link.give_leave(Time::ZERO);
        }
    }

    /// The probe that was allowed is over.
    pub(super) fn tell_probed(&self, on: &Scope, failed: bool) {
        if let Some(link) = &self.link {
            link.tell(News::Probed { scope: name(Some(on)), failed });
        }
    }
}

#[cfg(feature = "breaker")]
impl Core {
    pub(super) fn tell_closed(&self, on: Option<&Scope>) {
        if let Some(link) = &self.link {
            let generation = link.generation(on);
            link.tell(News::Closed { scope: name(on), generation });
        }
    }

    /// A breaker opened here: the fleet decides who raises the alert.
    pub(super) fn tell_opened(
        &self,
        on: Option<&Scope>,
        wait: Duration,
        probes: super::broken::Probes,
        alert: Option<crate::breaker::Alert>,
    ) -> Option<crate::breaker::Alert> {
        let Some(link) = &self.link else { return alert };
        // At one step, or it would seem to be an alert of which the fleet was told.
        let mut shared = lock(&link.shared);
        if shared.lost {
            return alert;
        }
        shared.alerts.extend(alert.map(|alert| (on.and_then(|on| on.name.clone()), alert)));
        link.tell(opened(on, wait, probes));
        None
    }
}

#[cfg(feature = "breaker")]
fn opened(on: Option<&Scope>, wait: Duration, probes: super::broken::Probes) -> News {
    let millis = crate::store::whole_millis;
    News::Opened {
        scope: name(on),
        wait: millis(wait),
        first: millis(probes.first),
        last: millis(probes.last),
    }
}

/// How its scope is called outside.
fn name(on: Option<&Scope>) -> Option<String> {
    on.and_then(|on| on.name.as_deref().map(str::to_owned))
}

impl Link {
    fn is(&self, holder: HolderId) -> bool {
        lock(&self.lease).holder() == holder
    }

    fn has_leave(&self, now: Time) -> bool {
        now.as_nanos() < self.leave.load(Ordering::Acquire)
    }

    fn give_leave(&self, until: Time) {
        self.leave.store(until.as_nanos(), Ordering::Release);
    }

    pub(super) fn begin_to_leave(&self) {
        self.leaving.store(true, Ordering::Release);
        self.bell.notify_one();
    }

    /// Nothing more is said to the store.
    pub(super) fn has_left(&self) {
        self.has_left.store(true, Ordering::Release);
        self.left.notify_waiters();
    }

    /// Until this process has said goodbye to the store.
    pub(super) async fn leave(self: Arc<Self>) {
        loop {
            let left = self.left.notified();
            if self.has_left.load(Ordering::Acquire) {
                return;
            }
            left.await;
        }
    }

    fn generation(&self, on: Option<&Scope>) -> u64 {
        let name = on.and_then(|on| on.name.clone());
        lock(&self.shared).scopes.get(&name).map_or(0, |known| known.generation)
    }

    /// Whether nobody but this process can say when this scope is probed.
    fn is_alone(&self, on: &Scope) -> bool {
        let shared = lock(&self.shared);
        let name = on.name.as_deref();
        let closes = |news: &News| match news {
            News::Paused { scope, .. } | News::Opened { scope, .. } => scope.as_deref() == name,
            _ => false,
        };
        shared.lost || !shared.has(name) && !lock(&self.lease).knows_of(closes)
    }

    fn ask_probe(&self, on: &Scope, now: Time) {
        /// Not each time that somebody looks.
        const APART: Duration = Duration::from_secs(1);
        /// A probe that takes longer is given up.
        const TIMEOUT: u64 = 30_000;
        if on.asked(now, APART) {
            self.tell(News::Probe { scope: name(Some(on)), timeout: TIMEOUT });
        }
    }
}
