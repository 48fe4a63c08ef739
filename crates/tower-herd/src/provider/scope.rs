use super::{
    lock,
    pause::{Look, Pause, PauseReason},
    ramp::Ramping,
    watch::Watch,
};
use crate::Time;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
};

/// A pause with what the hot path reads of it.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(super) name: Option<Arc<str>>,
    /// The end of the pause in nanoseconds; 0: none, and then no clock is read.
    until: AtomicU64,
    generation: AtomicU64,
    wants_success: AtomicBool,
    /// A ramp runs, or may have to begin; else nobody asks for it.
    pub(super) ramps: AtomicBool,
    pub(super) state: Mutex<State>,
    /// Its breaker is open, enforced or not.
    broken: AtomicBool,
    pub(super) watch: Watch,
    /// The fleet leaves the next probe to this process until then; 0: it does not.
    #[cfg(feature = "store")]
    leave: AtomicU64,
    /// When it was last asked to.
    #[cfg(feature = "store")]
    asked: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) pause: Pause,
    pub(super) ramp: Ramping,
    /// Those who wait for its end; woken if that comes before its time. (The provider's own pause is
    /// waited for in the queue.)
    sleepers: BTreeMap<u64, Waker>,
    /// After the end: when each of them may leave. They were told the same instant, and would be a
    /// herd again.
    turns: BTreeMap<u64, Time>,
    names: u64,
}

impl State {
    /// The pause is over: those who waited leave in the order in which they came, evenly spread.
    fn line_up(&mut self) {
        let many = u32::try_from(self.sleepers.len()).unwrap_or(u32::MAX);
        let spacing = self.pause.window() / many.max(1);
        let mut turn = self.pause.until();
        self.turns.clear();
        for name in self.sleepers.keys() {
            self.turns.insert(*name, turn);
            turn = turn.saturating_add(spacing);
        }
    }

    fn keep(&mut self, name: u64, waker: &Waker) -> Option<Waker> {
        match self.sleepers.get(&name) {
            Some(before) if before.will_wake(waker) => None,
            _ => self.sleepers.insert(name, waker.clone()),
        }
    }
}

/// A place among the sleepers of a scope; left when dropped.
pub(crate) struct Rest {
    scope: Arc<Scope>,
    name: u64,
}

impl Rest {
    fn of(&self, scope: &Arc<Scope>) -> bool {
        Arc::ptr_eq(&self.scope, scope)
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        let waker = {
            let mut state = lock(&self.scope.state);
            state.turns.remove(&self.name);
            state.sleepers.remove(&self.name)
        };
        // After the lock: what a waker runs when dropped is not ours.
        drop(waker);
    }
}

impl Scope {
    /// Until when one has to wait: for the end of the pause, and who waited for that, for its turn
    /// after it, if that comes before `end`. The waker is kept in `rest`, to be woken if the pause ends
    /// before.
    pub(super) fn rest(
        self: &Arc<Self>,
        now: Time,
        end: Time,
        rest: &mut Option<Rest>,
        waker: &Waker,
    ) -> Option<Time> {
        let mine = rest.as_ref().filter(|rest| rest.of(self)).map(|rest| rest.name);
        if self.is_open() && mine.is_none() {
            *rest = None;
            return None;
        }
        let mut state = lock(&self.state);
        let (name, until) = match (state.pause.look(now), mine) {
            (Look::Until(until, _), Some(name)) => (name, until),
            (Look::Until(until, _), None) => {
                state.names += 1;
                (state.names, until)
            }
            (Look::Open, None) => {
                drop(state);
                *rest = None;
                return None;
            }
            (Look::Open, Some(name)) => {
                if state.turns.is_empty() {
                    state.line_up();
                }
                match state.turns.get(&name) {
                    Some(turn) if now < *turn && *turn < end => (name, *turn),
                    _ => {
                        drop(state);
                        *rest = None;
                        return None;
                    }
                }
            }
        };
        let before = state.keep(name, waker);
        drop(state);
        drop(before);
        if mine.is_none() {
            *rest = Some(Rest { scope: self.clone(), name });
        }
        Some(until)
    }

    #[cfg(feature = "store")]
    pub(super) fn leave(&self) -> Time {
        Time::from_nanos(self.leave.load(Ordering::Acquire))
    }

    /// The fleet leaves a probe to this process ([`Time::ZERO`]: not any more).
    #[cfg(feature = "store")]
    pub(super) fn give_leave(&self, until: Time) {
        self.leave.store(until.as_nanos(), Ordering::Release);
    }

    /// Whether the fleet is to be asked for leave: so often at most.
    #[cfg(feature = "store")]
    pub(super) fn asked(&self, now: Time, apart: std::time::Duration) -> bool {
        let is_due = |last| {
            let again = Time::from_nanos(last).saturating_add(apart);
            (last == 0 || again <= now).then_some(now.as_nanos().max(1))
        };
        self.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok()
    }

    pub(super) fn named(name: &str) -> Self {
        Scope { name: Some(name.into()), ..Scope::default() }
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.until.load(Ordering::Acquire) == 0
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn wants_success(&self) -> bool {
        self.wants_success.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub(super) fn paused(&self, now: Time) -> Option<(Time, PauseReason)> {
        if self.is_open() {
            return None;
        }
        let state = lock(&self.state);
        match state.pause.look(now) {
            Look::Until(until, reason) => Some((until, reason)),
            Look::Open => {
                // Over: spare the next calls the look. Under the lock, so no newer pause is lost.
                self.until.store(0, Ordering::Release);
                None
            }
        }
    }

    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Pause) -> R) -> R {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let pause = &mut state.pause;
        let before = pause.until();
        let result = change(pause);
        // A pause that was cleared ends in the past: the next look finds it open.
        self.until.store(pause.until().as_nanos(), Ordering::Release);
        self.generation.store(pause.generation(), Ordering::Release);
        self.wants_success.store(pause.wants_success(), Ordering::Relaxed);
        self.broken.store(pause.broken().is_some(), Ordering::Release);
        let after = pause.until();
        state.ramp.paused(pause, before);
        if pause.is_long() {
            self.ramps.store(true, Ordering::Relaxed);
        }
        if after > before {
            state.turns.clear();
        }
        let mut woken = Vec::new();
        if after < before {
            // They leave in a line all the same: each is woken to learn its turn.
            state.line_up();
            woken.extend(state.sleepers.values().cloned());
        }
        drop(guard);
        woken.into_iter().for_each(Waker::wake);
        result
    }
}

/// Scopes that are chosen per request must not fill the memory: beyond this many, those that are
/// open and that nobody holds are forgotten.
const MANY: usize = 4096;

/// The scopes of one provider, by name.
#[derive(Debug)]
pub(super) struct Scopes {
    known: HashMap<Arc<str>, Arc<Scope>>,
    /// When there are so many, those that can be are forgotten.
    most: usize,
}

impl Default for Scopes {
    fn default() -> Self {
        Scopes { known: HashMap::new(), most: MANY }
    }
}

impl Scopes {
    #[cfg(feature = "store")]
    pub(super) fn all(&self) -> Vec<(Arc<str>, Arc<Scope>)> {
        let mut all: Vec<_> = self.known.iter().map(|(name, scope)| (name.clone(), scope.clone())).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    pub(super) fn get(&mut self, name: &str, now: impl FnOnce() -> Time) -> Arc<Scope> {
        if let Some(scope) = self.known.get(name) {
            return scope.clone();
        }
        if self.known.len() >= self.most {
            let now = now();
            self.known.retain(|_, scope| {
                Arc::strong_count(scope) > 1 || scope.paused(now).is_some() || scope.is_broken()
            });
            // Not at each newcomer where all are in use: to look at all of them takes its time.
            self.most = MANY.max(self.known.len().saturating_mul(2));
        }
        let scope = Arc::new(Scope::named(name));
        self.known.insert(name.into(), scope.clone());
        scope
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn scopes_without_number_are_forgotten_but_for_those_in_use() {
        let mut scopes = Scopes::default();
        let held = scopes.get("held", || Time::ZERO);
        scopes
            .get("paused", || Time::ZERO)
            .change(|pause| pause.set(Time::ZERO, Duration::from_secs(9), PauseReason::Hint));
        let mut looks = 0;
        for n in 0..100_000 {
            scopes.get(&n.to_string(), || {
                looks += 1;
                Time::from_nanos(1)
            });
            assert!(scopes.known.len() <= MANY);
        }
        assert!(looks <= 100_000 / (MANY - 2) + 1);
        assert!(Arc::ptr_eq(&held, &scopes.get("held", || Time::ZERO)));
        assert!(!scopes.get("paused", || Time::ZERO).is_open());
        // All in use: they are looked at when their number has doubled, not each time.
        looks = 0;
        let all: Vec<_> = (0..20_000)
            .map(|n| {
                scopes.get(&n.to_string(), || {
                    looks += 1;
                    Time::from_nanos(1)
                })
            })
            .collect();
        assert!(looks <= 4 && all.len() == 20_000, "{looks}");
    }
}
