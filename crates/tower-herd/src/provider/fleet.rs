#[cfg(feature = "store")]
use super::lease::Driver;
use super::{Core, Provider, ProviderSettings, SettingsError, lock};
#[cfg(feature = "store")]
use crate::store::{FleetSettings, FleetSettingsError, FleetStore};
use crate::{
    Clock,
    observe::{Observe, Trace},
    random::Seeds,
};
#[cfg(feature = "store")]
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

/// All that shares providers: this one process, or all that meet at one [store](crate::store). A handle: clones are the same fleet.
///
/// Make one for the process and hand clones of it around. Providers of two fleets share nothing, even
/// under the same name: a fleet made for each client, or each request, has a ceiling, a pause and a
/// queue of its own, and controls no herd.
#[derive(Clone)]
pub struct Fleet {
    shared: Arc<Shared>,
    providers: Arc<Mutex<HashMap<Arc<str>, Arc<Core>>>>,
}

/// What a fleet gives to each of its providers.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) seeds: Seeds,
    pub(super) observer: Arc<dyn Observe>,
    #[cfg(feature = "store")]
    pub(super) store: Option<Meeting>,
}

/// Where a fleet of several processes meets.
#[cfg(feature = "store")]
pub(super) struct Meeting {
    store: Arc<dyn FleetStore>,
    pub(super) settings: FleetSettings,
    /// Starts with the first provider.
    driver: OnceLock<Option<Driver>>,
    /// This process has left: so has each provider that is asked for later.
    left: AtomicBool,
}

#[cfg(feature = "store")]
impl Meeting {
    fn new(store: Arc<dyn FleetStore>, settings: FleetSettings) -> Self {
        Meeting { store, settings, driver: OnceLock::new(), left: AtomicBool::new(false) }
    }

    fn keep(&self, core: &Arc<Core>, seeds: &Seeds) {
        let Some(link) = core.link() else { return };
        if self.left.load(Ordering::Acquire) {
            link.begin_to_leave();
            link.has_left();
            return;
        }
        let start = || {
            // Epochs must differ between processes, whatever seed they were given.
            let own = self.settings.has_own_thread();
            let seeds = if own { Seeds::from_entropy() } else { Seeds::from_seed(seeds.session().bits()) };
            Driver::start(self.store.clone(), &self.settings, seeds)
                .inspect_err(|error| {
                    tracing::error!(target: "tower_herd", %error, "no thread to keep the leases on: nothing is admitted");
                })
                .ok()
        };
        match self.driver.get_or_init(start) {
            Some(driver) => driver.keep(core),
            None => link.has_left(),
        }
    }
}

impl Fleet {
    /// A fleet of this process alone, with tokio's clock, random seeds and `tracing` events.
    #[must_use]
    pub fn local() -> Self {
        Self::with(Seeds::from_entropy(), Arc::new(Trace))
    }

    fn with(seeds: Seeds, observer: Arc<dyn Observe>) -> Self {
        let shared = Shared {
            clock: Clock::new(),
            seeds,
            observer,
            #[cfg(feature = "store")]
            store: None,
        };
        Fleet { shared: Arc::new(shared), providers: Arc::default() }
    }

    /// This fleet, but for what `with` is given anew, and without providers.
    fn anew(&self, seeds: Seeds, observer: Arc<dyn Observe>) -> Self {
        let fleet = Self::with(seeds, observer);
        #[cfg(feature = "store")]
        if let Some(meeting) = &self.shared.store {
            return fleet.meet(meeting.store.clone(), meeting.settings.clone());
        }
        fleet
    }

    #[cfg(feature = "store")]
    fn meet(self, store: Arc<dyn FleetStore>, settings: FleetSettings) -> Self {
        let Shared { clock, observer, seeds, .. } = &*self.shared;
        let shared = Shared {
            clock: *clock,
            seeds: Seeds::from_seed(seeds.session().bits()),
            observer: observer.clone(),
            store: Some(Meeting::new(store, settings)),
        };
        Fleet { shared: Arc::new(shared), providers: Arc::default() }
    }

    /// All processes that share through this store are one fleet: its providers have one ceiling, one pause and
    /// one breaker among them.
    ///
    /// Leases are kept on a thread of its own, which ends when the fleet and all its providers are dropped.
    /// Until the store has answered, nobody is admitted: calls wait, or are refused, as where there is no slot. A store
    /// that is empty, or has heard of nobody for long, gives no slots out for one [`ttl`](FleetSettings::ttl) (10 s),
    /// since somebody may hold some: all of a first start wait so long. [`FleetSettings::trickle`] lets a few through;
    /// say that you are ready when [`Provider::lease`] says [`Held`](crate::store::LeaseState::Held).
    ///
    /// Before the process ends, call [`leave`](Self::leave): what a process held that was just killed nobody has for
    /// the ttl, and what it may [keep](crate::store::Outage::Keep) for the whole grace, ten minutes.
    ///
    /// # Errors
    ///
    /// Says which of the settings cannot be; with [`on_this_runtime`](FleetSettings::on_this_runtime), that there is
    /// no runtime.
    #[cfg(feature = "store")]
    pub fn shared(store: impl FleetStore, settings: FleetSettings) -> Result<Self, FleetSettingsError> {
        settings.check()?;
        settings.check_runtime()?;
        Ok(Self::local().meet(Arc::new(store), settings))
    }

    /// Says goodbye: from here on this process admits nothing, and what it holds is free for others as soon as
    /// the store has heard of it (its calls in flight, when their lease runs out). To be called when a service
    /// shuts down, on SIGTERM, after its last call: without it, its slots are nobody's for the ttl (10 s), and those that
    /// it might have [kept](crate::store::Outage::Keep) for the grace (10 minutes). In a fleet without a store it does nothing.
    ///
    /// Ends when the store has heard of it, or was tried for about a second. Dropped, it goes on; said again, it does
    /// no harm. There is no way back: a process that wants to go on makes another fleet.
    #[cfg(feature = "store")]
    pub async fn leave(&self) {
        let links: Vec<_> = {
            let providers = lock(&self.providers);
            // Under the lock: a provider is either seen here, or sees this.
            if let Some(meeting) = &self.shared.store {
                meeting.left.store(true, Ordering::Release);
            }
            let mut links: Vec<_> = providers.values().filter_map(|core| core.link().cloned()).collect();
            links.sort_by_key(Arc::as_ptr);
            links
        };
        for link in &links {
            link.begin_to_leave();
        }
        for link in links {
            link.leave().await;
        }
    }

    /// A fleet without providers yet that draws from a fixed seed: the same seed, the same waits.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        self.anew(Seeds::from_seed(seed), self.shared.observer.clone())
    }

    /// A fleet without providers yet whose events go to `observer`.
    #[must_use]
    pub fn observer(self, observer: impl Observe) -> Self {
        self.anew(Seeds::from_seed(self.shared.seeds.session().bits()), Arc::new(observer))
    }

    /// The provider of this name: the same shared state each time it is asked for.
    #[must_use]
    pub fn provider(&self, name: &str) -> Provider {
        let (core, is_new) = self.core(name);
        self.keep(&core, is_new);
        Provider::of(core)
    }

    fn core(&self, name: &str) -> (Arc<Core>, bool) {
        let mut providers = lock(&self.providers);
        if let Some(core) = providers.get(name) {
            return (core.clone(), false);
        }
        let name: Arc<str> = name.into();
        let core = Arc::new(Core::new(name.clone(), self.shared.clone(), None));
        providers.insert(name, core.clone());
        (core, true)
    }

    /// Begins to keep the lease of a new provider.
    fn keep(&self, core: &Arc<Core>, is_new: bool) {
        #[cfg(feature = "store")]
        if let Some(meeting) = self.shared.store.as_ref().filter(|_| is_new) {
            meeting.keep(core, &self.shared.seeds);
        }
        #[cfg(not(feature = "store"))]
        let _ = (core, is_new);
    }

    /// The provider of this name, with these settings.
    ///
    /// Fails if they cannot be, or if it has others already.
    pub fn configure(&self, name: &str, settings: ProviderSettings) -> Result<Provider, SettingsError> {
        let (core, is_new) = self.core(name);
        // Before the others hear of it, who would be told other limits first.
        let configured = Provider::of(core.clone()).configure(settings);
        self.keep(&core, is_new);
        configured.map(|()| Provider::of(core))
    }

    /// The fleet's clock.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.shared.clock
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self::local()
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<Arc<str>> = lock(&self.providers).keys().cloned().collect();
        f.debug_struct("Fleet").field("providers", &names).finish_non_exhaustive()
    }
}
