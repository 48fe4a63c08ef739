use super::{Core, Provider, ProviderSettings, SettingsError, lock};
use crate::{
    Clock,
    observe::{Observe, Trace},
    random::Seeds,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

/// All that shares providers: here, this one process. A handle: clones are the same fleet.
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
}

impl Fleet {
    /// A fleet of this process alone, with tokio's clock, random seeds and `tracing` events.
    #[must_use]
    pub fn local() -> Self {
        Self::with(Seeds::from_entropy(), Arc::new(Trace))
    }

    fn with(seeds: Seeds, observer: Arc<dyn Observe>) -> Self {
        Fleet { shared: Arc::new(Shared { clock: Clock::new(), seeds, observer }), providers: Arc::default() }
    }

    /// A fleet without providers yet that draws from a fixed seed: the same seed, the same waits.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self::with(Seeds::from_seed(seed), self.shared.observer.clone())
    }

    /// A fleet without providers yet whose events go to `observer`.
    #[must_use]
    pub fn observer(self, observer: impl Observe) -> Self {
        Self::with(Seeds::from_seed(self.shared.seeds.session().bits()), Arc::new(observer))
    }

    /// The provider of this name: the same shared state each time it is asked for.
    #[must_use]
    pub fn provider(&self, name: &str) -> Provider {
        let mut providers = lock(&self.providers);
        if let Some(core) = providers.get(name) {
            return Provider::of(core.clone());
        }
        let name: Arc<str> = name.into();
        let core = Arc::new(Core::new(name.clone(), self.shared.clone(), None));
        providers.insert(name, core.clone());
        Provider::of(core)
    }

    /// The provider of this name, with these settings.
    ///
    /// Fails if they cannot be, or if it has others already.
    pub fn configure(&self, name: &str, settings: ProviderSettings) -> Result<Provider, SettingsError> {
        let provider = self.provider(name);
        provider.configure(settings)?;
        Ok(provider)
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
