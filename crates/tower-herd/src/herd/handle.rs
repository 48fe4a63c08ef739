//! A herd from outside: its switches, its numbers, its end.

use super::{HerdConfig, builder::Parts};
use crate::{
    BoxError, Criticality, Fleet, Mode, Provider, Refusal, RefusalKind, Safety, Switch, breaker::Alert,
    random::Seeds, task::far,
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// What a layer of a [`Herd`](super::Herd) is about: each can be switched by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Concern {
    /// Sending again.
    Retry,
    /// Falling over to the next rung.
    Failover,
    /// The ramp of a recovering provider.
    Readmission,
    /// What a task may spend.
    Spend,
    /// The breaker.
    Breaker,
    /// Adaptive throttling.
    Budget,
    /// The provider's own wait.
    Pause,
    /// The tokens of a minute.
    Tokens,
    /// Calls in flight.
    Limit,
    /// The headers that count attempts.
    Attempts,
    /// The sensor: off, nothing is learned any more.
    Sensor,
    /// The timeout of each attempt.
    Timeout,
}

impl Concern {
    /// All of them, outermost first.
    pub const ALL: [Concern; 12] = [
        Concern::Retry,
        Concern::Failover,
        Concern::Readmission,
        Concern::Spend,
        Concern::Breaker,
        Concern::Budget,
        Concern::Pause,
        Concern::Tokens,
        Concern::Limit,
        Concern::Attempts,
        Concern::Sensor,
        Concern::Timeout,
    ];

    /// A short fixed name: that of its field in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Concern::Retry => "retry",
            Concern::Failover => "failover",
            Concern::Readmission => "readmission",
            Concern::Spend => "spend",
            Concern::Breaker => "breaker",
            Concern::Budget => "budget",
            Concern::Pause => "pause",
            Concern::Tokens => "tokens",
            Concern::Limit => "limit",
            Concern::Attempts => "attempts",
            Concern::Sensor => "sensor",
            Concern::Timeout => "timeout",
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Switches {
    pub(super) retry: Switch,
    pub(super) failover: Switch,
    pub(super) spend: Switch,
    pub(super) budget: Switch,
    pub(super) pause: Switch,
    pub(super) tokens: Switch,
    pub(super) limit: Switch,
    pub(super) attempts: Switch,
    pub(super) sensor: Switch,
    pub(super) timeout: Switch,
}

pub(super) type Listener = Arc<dyn Fn(&Alert) + Send + Sync>;

/// What all services of one herd share, and its handle changes.
pub(super) struct Shared {
    name: Arc<str>,
    pub(super) seeds: Seeds,
    pub(super) switches: Switches,
    /// They have the switches of their breakers and ramps, which other stacks go by too.
    providers: Vec<Provider>,
    /// Every layer enforces: the short way may be taken.
    plain: AtomicBool,
    switching: Mutex<()>,
    headers: AtomicU64,
    idle: AtomicU64,
    deadline: AtomicU64,
    allowance: AtomicU32,
    safety: AtomicU8,
    criticality: AtomicU8,
    listener: Mutex<Option<Listener>>,
    config: Mutex<Option<(Fleet, HerdConfig)>>,
    draining: AtomicBool,
    /// One more handle for each call under way.
    flights: Arc<()>,
}

const SAFETIES: [Safety; 4] = [Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Once];
const UNSAID: u8 = u8::MAX;

/// One call under way, until its body has ended or was dropped.
#[derive(Clone, Debug)]
pub(super) struct Flight(#[expect(dead_code, reason = "held to be counted")] Arc<()>);

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    pub(super) fn new(name: Arc<str>, seeds: Seeds, providers: Vec<Provider>) -> Self {
        Shared {
            name,
            seeds,
            providers,
            switches: Switches::default(),
            plain: AtomicBool::new(true),
            switching: Mutex::default(),
            headers: AtomicU64::new(nanos(Duration::from_secs(30))),
            idle: AtomicU64::new(nanos(Duration::from_secs(60))),
            deadline: AtomicU64::new(nanos(crate::task::DEFAULT_DEADLINE)),
            allowance: AtomicU32::new(crate::task::DEFAULT_ALLOWANCE),
            safety: AtomicU8::new(UNSAID),
            criticality: AtomicU8::new(Criticality::Interactive as u8),
            listener: Mutex::default(),
            config: Mutex::default(),
            draining: AtomicBool::new(false),
            flights: Arc::default(),
        }
    }

    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.plain.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn times(&self) -> (Duration, Duration) {
        let time = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        (time(&self.headers), time(&self.idle))
    }

    pub(super) fn set_times(&self, headers: Duration, idle: Duration) {
        self.headers.store(nanos(headers), Ordering::Relaxed);
        self.idle.store(nanos(idle), Ordering::Relaxed);
    }

    pub(super) fn set_task(&self, deadline: Duration, allowance: u32) {
        self.deadline.store(nanos(deadline), Ordering::Relaxed);
        self.allowance.store(allowance.max(1), Ordering::Relaxed);
    }

    pub(super) fn deadline(&self) -> Duration {
        Duration::from_nanos(self.deadline.load(Ordering::Relaxed))
    }

    pub(super) fn allowance(&self) -> u32 {
        self.allowance.load(Ordering::Relaxed)
    }

    /// Whether something is said about the safety of requests that say nothing.
    #[inline]
    pub(super) fn has_default_safety(&self) -> bool {
        self.safety.load(Ordering::Relaxed) != UNSAID
    }

    pub(super) fn default_safety(&self) -> Option<Safety> {
        SAFETIES.get(usize::from(self.safety.load(Ordering::Relaxed))).copied()
    }

    pub(super) fn set_safety(&self, safety: Option<Safety>) {
        let place = SAFETIES.iter().position(|known| Some(*known) == safety);
        let place = place.and_then(|place| u8::try_from(place).ok()).unwrap_or(UNSAID);
        self.safety.store(place, Ordering::Relaxed);
    }

    pub(super) fn criticality(&self) -> Criticality {
        if self.criticality.load(Ordering::Relaxed) == Criticality::Batch as u8 {
            Criticality::Batch
        } else {
            Criticality::Interactive
        }
    }

    pub(super) fn set_criticality(&self, criticality: Criticality) {
        self.criticality.store(criticality as u8, Ordering::Relaxed);
    }

    pub(super) fn set(&self, concern: Concern, mode: Mode) {
        // One at a time: what `plain` says is taken from all of them.
        let _one = self.switching.lock().unwrap_or_else(PoisonError::into_inner);
        self.switches_of(concern).iter().for_each(|switch| switch.set(mode));
        let plain = Concern::ALL.into_iter().all(|concern| self.mode(concern) == Mode::Enforce);
        self.plain.store(plain, Ordering::Relaxed);
    }

    /// Each once.
    fn switches_of(&self, concern: Concern) -> Vec<Switch> {
        let own = &self.switches;
        let of_providers = |of: fn(&Provider) -> Switch| {
            let mut all: Vec<Switch> = Vec::new();
            for switch in self.providers.iter().map(of) {
                if !all.iter().any(|known| known.is(&switch)) {
                    all.push(switch);
                }
            }
            all
        };
        let one = |switch: &Switch| vec![switch.clone()];
        match concern {
            Concern::Retry => one(&own.retry),
            Concern::Failover => one(&own.failover),
            Concern::Readmission => of_providers(Provider::has_ramp),
            Concern::Spend => one(&own.spend),
            Concern::Breaker => of_providers(|provider| provider.breaker().switch()),
            Concern::Budget => one(&own.budget),
            Concern::Pause => one(&own.pause),
            Concern::Tokens => one(&own.tokens),
            Concern::Limit => one(&own.limit),
            Concern::Attempts => one(&own.attempts),
            Concern::Sensor => one(&own.sensor),
            Concern::Timeout => one(&own.timeout),
        }
    }

    /// Where the providers of a ladder differ, because other stacks have switched some of them: the strictest.
    fn mode(&self, concern: Concern) -> Mode {
        let modes = self.switches_of(concern).into_iter().map(|switch| switch.mode());
        modes.min_by_key(|mode| *mode as u8).unwrap_or_default()
    }

    pub(super) fn listen(&self, listener: Listener) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
    }

    pub(super) fn listener(&self) -> Option<Listener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A call comes: it is under way, unless the herd is shutting down.
    #[inline]
    pub(super) fn depart(&self) -> Option<Flight> {
        // Counted before the look: whoever drains sees either the flight or its refusal.
        let flight = Flight(self.flights.clone());
        (!self.draining.load(Ordering::Acquire)).then_some(flight)
    }

    #[cold]
    pub(super) fn draining(&self) -> BoxError {
        let why = "this client is shutting down";
        Refusal::new(RefusalKind::Draining, why, self.name.clone(), None).into()
    }

    fn under_way(&self) -> usize {
        Arc::strong_count(&self.flights) - 1
    }
}

/// Reads and steers a [`Herd`](super::Herd) from outside, while it runs. Clones steer the same one.
#[derive(Clone)]
pub struct HerdHandle {
    pub(super) parts: Parts,
}

impl HerdHandle {
    pub(super) fn new(parts: Parts) -> Self {
        HerdHandle { parts }
    }

    fn shared(&self) -> &Shared {
        &self.parts.shared
    }

    /// The configuration in force and its fleet, if it was built of one.
    pub(super) fn built_of(&self) -> MutexGuard<'_, Option<(Fleet, HerdConfig)>> {
        self.parts.shared.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Switches one concern, for every call that comes from now on.
    ///
    /// The switches of breaker and readmission belong to the providers: other stacks for the same provider
    /// are switched with this one, and whoever switched last has the say.
    pub fn set(&self, concern: Concern, mode: Mode) {
        self.shared().set(concern, mode);
    }

    /// Switches all concerns that say no or send again, and leaves sensor and timeout as they are. With
    /// [`Mode::Observe`]: the way to try the stack in production before it decides anything.
    pub fn set_all(&self, mode: Mode) {
        let kept = [Concern::Sensor, Concern::Timeout];
        Concern::ALL.into_iter().filter(|concern| !kept.contains(concern)).for_each(|on| self.set(on, mode));
    }

    /// How a concern is switched.
    #[must_use]
    pub fn mode(&self, concern: Concern) -> Mode {
        self.shared().mode(concern)
    }

    /// Calls so far that this concern would have refused, delayed or sent again, while it only observed.
    #[must_use]
    pub fn would_refuse(&self, concern: Concern) -> u64 {
        self.shared().switches_of(concern).iter().map(Switch::would_refuse).sum()
    }

    /// Calls under way: from their coming to the end of their reply's body.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.shared().under_way()
    }

    /// Shuts down gracefully: from now on calls are refused ([`RefusalKind::Draining`]), and those under way
    /// are waited for, retries and bodies included, for `patience` at most. How many are still under way then;
    /// 0: none. They are not cut off.
    ///
    /// It looks every 10 ms, so that calls pay nothing for it. Dropping the future stops the waiting, not
    /// the refusing. In a fleet of several processes call `Fleet::leave` afterwards.
    pub async fn drain(&self, patience: Duration) -> usize {
        const LOOK: Duration = Duration::from_millis(10);
        self.shared().draining.store(true, Ordering::Release);
        let end = far(patience);
        loop {
            // Before the first look, too: a call that came at this instant is seen then.
            tokio::time::sleep(LOOK.min(patience)).await;
            let left = self.under_way();
            if left == 0 || Instant::now() >= end {
                return left;
            }
        }
    }

    /// Whether it takes no more calls.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared().draining.load(Ordering::Acquire)
    }
}

impl fmt::Debug for HerdHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HerdHandle")
            .field("name", &self.shared().name)
            .field("under_way", &self.under_way())
            .field("switches", &self.shared().switches)
            .field("breaker", &self.mode(Concern::Breaker))
            .field("readmission", &self.mode(Concern::Readmission))
            .finish_non_exhaustive()
    }
}
