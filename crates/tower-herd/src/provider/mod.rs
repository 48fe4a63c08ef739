//! The provider: one place for everything that is shared about something with a quota.

use crate::{
    Clock, Signal,
    observe::{Event, Observe, Trace},
    random::Seeds,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

/// All processes (or, here, all parts of one process) that share providers.
#[derive(Clone)]
pub struct Fleet(Arc<FleetInner>);

struct FleetInner {
    clock: Clock,
    seeds: Seeds,
    observer: Arc<dyn Observe>,
    providers: Mutex<HashMap<Arc<str>, Provider>>,
}

impl Fleet {
    /// A fleet of this one process.
    #[must_use]
    pub fn local() -> Self {
        Fleet(Arc::new(FleetInner {
            clock: Clock::new(),
            seeds: Seeds::from_entropy(),
            observer: Arc::new(Trace),
            providers: Mutex::default(),
        }))
    }

    /// The provider of this name: the same shared state each time it is asked for.
    #[must_use]
    pub fn provider(&self, name: &str) -> Provider {
        let mut providers = self.0.providers.lock().expect("no panics while held");
        if let Some(provider) = providers.get(name) {
            return provider.clone();
        }
        let name: Arc<str> = name.into();
        let provider = Provider(Arc::new(Inner { name: name.clone(), scope: None, fleet: self.clone() }));
        providers.insert(name, provider.clone());
        provider
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fleet")
    }
}

/// Something with a quota that the fleet calls.
#[derive(Clone)]
pub struct Provider(Arc<Inner>);

struct Inner {
    name: Arc<str>,
    scope: Option<Arc<str>>,
    fleet: Fleet,
}

impl Provider {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.0.name
    }
    /// The scope of this handle, if it is one.
    #[must_use]
    pub fn scope_name(&self) -> Option<&Arc<str>> {
        self.0.scope.as_ref()
    }
    /// The fleet's clock.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.0.fleet.0.clock
    }
    /// The fleet's seeds.
    #[must_use]
    pub fn seeds(&self) -> &Seeds {
        &self.0.fleet.0.seeds
    }
    /// Tells the fleet's observer; the event is built only if it listens.
    #[inline]
    pub fn observe<'a>(&'a self, event: impl FnOnce() -> Event<'a>) {
        let observer = &*self.0.fleet.0.observer;
        if observer.enabled() {
            observer.observe(&event());
        }
    }

    /// A sensor is in place: the gates leave the sensing to it.
    pub(crate) fn set_sensed(&self) {}

    /// A call starts. What comes of it is reported through the guard; a guard that is dropped
    /// unreported counts as a call that its caller gave up.
    pub(crate) fn begin(&self) -> Sensing {
        Sensing { provider: self.clone() }
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider")
            .field("name", &self.0.name)
            .field("scope", &self.0.scope)
            .finish_non_exhaustive()
    }
}

/// One call under observation.
pub(crate) struct Sensing {
    provider: Provider,
}

impl Sensing {
    /// The head of the reply (or an error) is there and says this.
    pub(crate) fn outcome(&mut self, signal: &Signal) {
        let _ = (signal, &self.provider);
    }
    /// The reply went on after a good head, and its body has ended: well (none), or with this signal
    /// (trailers, a body error, an error event).
    pub(crate) fn end(&mut self, signal: Option<&Signal>) {
        let _ = (signal, &self.provider);
    }
}
