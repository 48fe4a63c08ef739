use super::{
    lock,
    pause::{Look, Pause, PauseReason},
};
use crate::Time;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// A pause with what the hot path reads of it.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(super) name: Option<Arc<str>>,
    /// The end of the pause in nanoseconds; 0: none, and then no clock is read.
    until: AtomicU64,
    generation: AtomicU64,
    wants_success: AtomicBool,
    pause: Mutex<Pause>,
}

impl Scope {
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

    pub(super) fn paused(&self, now: Time) -> Option<(Time, PauseReason)> {
        if self.is_open() {
            return None;
        }
        let pause = lock(&self.pause);
        match pause.look(now) {
            Look::Until(until, reason) => Some((until, reason)),
            Look::Open => {
                // Over: spare the next calls the look. Under the lock, so no newer pause is lost.
                self.until.store(0, Ordering::Release);
                None
            }
        }
    }

    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Pause) -> R) -> R {
        let mut pause = lock(&self.pause);
        let result = change(&mut pause);
        // A pause that was cleared ends in the past: the next look finds it open.
        self.until.store(pause.until().as_nanos(), Ordering::Release);
        self.generation.store(pause.generation(), Ordering::Release);
        self.wants_success.store(pause.wants_success(), Ordering::Relaxed);
        result
    }
}

/// Scopes that are chosen per request must not fill the memory: beyond this many, those that are
/// open and that nobody holds are forgotten.
const MANY: usize = 4096;

pub(super) fn make_room(scopes: &mut HashMap<Arc<str>, Arc<Scope>>, now: Time) {
    if scopes.len() >= MANY {
        scopes.retain(|_, scope| Arc::strong_count(scope) > 1 || scope.paused(now).is_some());
    }
}
