//! The breaker of one provider, or of one scope of it: what its layers, its handles and the sensor share.
//!
//! Whether it is open, and when it is probed, is part of the pause
//! ([`Broken`](crate::provider)); here is what leads there, and what is told of it.

use super::{
    Alert, BreakerSettings,
    alert::{AlertKind, Facts, Trouble, name},
    state::{Recent, Window},
    sync::{AtomicBool, AtomicU32, AtomicU64, StateGuard, StateMutex},
};
use crate::{
    Clock, Kind, Mode, SettingsError, Switch, Time,
    provider::{Effect, Verdict, lock},
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::Ordering::{Acquire, Relaxed, Release},
    },
};

pub(crate) type Listener = Arc<dyn Fn(&Alert) + Send + Sync>;

/// The place of a breaker in every scope: empty until a layer is built for it.
#[derive(Default)]
pub(crate) struct Cell {
    given: Mutex<Given>,
    engine: OnceLock<Box<Engine>>,
}

#[derive(Default)]
struct Given {
    settings: Option<BreakerSettings>,
    switch: Switch,
    listener: Option<Listener>,
}

/// The counting part, in use.
struct Engine {
    settings: BreakerSettings,
    /// Grows when it opens and when it closes; a call counts only in the one it was sent in.
    epoch: AtomicU32,
    /// The window holds a failure: every outcome goes into it.
    dirty: AtomicBool,
    recent: Recent,
    refused: AtomicU64,
    state: StateMutex<State>,
}

struct State {
    window: Window,
    trouble: Trouble,
    is_open: bool,
    incident: Option<Incident>,
}

/// From the first trip to the end of the ramp.
#[derive(Clone, Copy)]
struct Incident {
    trouble: Trouble,
    facts: Facts,
}

/// What the open breaker's alert is about.
pub(crate) struct About<'a> {
    pub(crate) provider: &'a str,
    pub(crate) scope: Option<&'a str>,
    pub(crate) clock: Clock,
    pub(crate) now: Time,
}

impl Cell {
    /// Gives it its settings; the same may be given again.
    pub(crate) fn configure(&self, settings: BreakerSettings, provider: &str) -> Result<(), SettingsError> {
        settings.check(provider)?;
        let mut given = lock(&self.given);
        let known = self.engine.get().map(|engine| engine.settings).or(given.settings);
        match known {
            Some(known) if known != settings => Err(SettingsError {
                provider: provider.into(),
                field: "all",
                why: "differ from those its breaker already has; give them in one place, before its first layer",
            }),
            _ => {
                given.settings = Some(settings);
                Ok(())
            }
        }
    }

    pub(crate) fn set_switch(&self, switch: &Switch) {
        lock(&self.given).switch = switch.clone();
    }

    pub(crate) fn switch(&self) -> Switch {
        lock(&self.given).switch.clone()
    }

    pub(crate) fn mode(&self) -> Mode {
        lock(&self.given).switch.mode()
    }

    pub(crate) fn listen(&self, listener: Listener) {
        lock(&self.given).listener = Some(listener);
    }

    pub(crate) fn listener(&self) -> Option<Listener> {
        lock(&self.given).listener.clone()
    }

    fn engine(&self) -> &Engine {
        self.engine.get_or_init(|| {
            let settings = lock(&self.given).settings.unwrap_or_default();
            let size = settings.window as usize;
            Box::new(Engine {
                settings,
                epoch: AtomicU32::new(0),
                dirty: AtomicBool::new(false),
                recent: Recent::new(size),
                refused: AtomicU64::new(0),
                state: StateMutex::new(State {
                    window: Window::new(size, settings.trip()),
                    trouble: Trouble::default(),
                    is_open: false,
                    incident: None,
                }),
            })
        })
    }

    /// From here on calls are counted, by these settings.
    pub(crate) fn settings(&self) -> BreakerSettings {
        self.engine().settings
    }

    /// The epoch of a call that starts now.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        // Acquire: who sees the epoch after a close was sent after it.
        self.engine.get().map_or(0, |engine| engine.epoch.load(Acquire))
    }

    /// What became of a call.
    #[inline]
    pub(crate) fn settled(
        &self,
        epoch: u32,
        start: u64,
        verdict: Verdict,
        now: impl FnOnce() -> Time,
    ) -> Option<Effect> {
        let engine = self.engine.get()?;
        match verdict {
            Verdict::Reply(Kind::Success | Kind::Empty) => {
                if engine.epoch.load(Relaxed) == epoch {
                    engine.recent.push(start);
                    if engine.dirty.load(Acquire) {
                        engine.succeeded(epoch, start);
                    }
                }
                None
            }
            Verdict::Reply(kind @ (Kind::Failed | Kind::Overloaded)) => {
                self.failed(engine, epoch, start, name(kind), now())
            }
            Verdict::TimedOut => self.failed(engine, epoch, start, "timed_out", now()),
            Verdict::Reply(_) | Verdict::Dropped => None,
        }
    }

    #[cold]
    #[inline(never)]
    fn failed(
        &self,
        engine: &Engine,
        epoch: u32,
        start: u64,
        what: &'static str,
        now: Time,
    ) -> Option<Effect> {
        if self.mode() == Mode::Off {
            return None;
        }
        let mut guard = engine.lock();
        let state = &mut *guard;
        if engine.epoch.load(Relaxed) != epoch {
            return None;
        }
        if state.is_open {
            return Some(Effect::ProbeFailed(now));
        }
        if !engine.dirty.load(Relaxed) {
            // Raised first: a success that sees it waits for the lock. One at this very instant may be missed,
            // and then the window holds one success less than there was.
            engine.dirty.store(true, Release);
            state.window.begin(&engine.recent.starts());
            state.trouble = Trouble::default();
        }
        let before = state.window.failures();
        let trips = state.window.push(start, true);
        if trips || state.window.failures() > before {
            state.trouble.add(what, now);
        }
        if !trips {
            engine.dirty.store(state.window.failures() > 0, Release);
            return None;
        }
        state.is_open = true;
        engine.next_epoch();
        Some(Effect::Tripped(now))
    }

    /// The breaker has just opened, until `until`; the alert, if this is a new incident.
    pub(crate) fn opened(&self, until: Time, id: u64, about: &About<'_>) -> Option<Alert> {
        let engine = self.engine();
        let mut guard = engine.lock();
        let state = &mut *guard;
        let (failures, calls) = (state.window.failures(), state.window.len());
        state.window.clear();
        engine.dirty.store(false, Release);
        if let Some(incident) = &mut state.incident {
            incident.facts.until = until;
            return None;
        }
        engine.refused.store(0, Relaxed);
        let kind = AlertKind::Broken;
        let facts = Facts { kind, incident: id, failures, calls, until, refused: 0 };
        let incident = Incident { trouble: state.trouble, facts };
        state.incident = Some(incident);
        drop(guard);
        Some(incident.alert(0, about))
    }

    /// An operator has opened it: nothing failed, and nobody need be told.
    pub(crate) fn forced(&self) {
        let engine = self.engine();
        let mut state = engine.lock();
        state.is_open = true;
        state.window.clear();
        engine.dirty.store(false, Release);
        engine.next_epoch();
    }

    /// Another process of the fleet has opened it: the incident is known, and the alert is raised there.
    #[cfg(feature = "store")]
    pub(crate) fn opened_elsewhere(&self, until: Time, id: u64) {
        self.forced();
        let mut state = self.engine().lock();
        let trouble = state.trouble;
        let facts = Facts { kind: AlertKind::Broken, incident: id, failures: 0, calls: 0, until, refused: 0 };
        state.incident.get_or_insert(Incident { trouble, facts });
    }

    /// It has closed: what was sent before counts no more.
    pub(crate) fn closed(&self) {
        let engine = self.engine();
        let mut state = engine.lock();
        state.is_open = false;
        state.window.clear();
        engine.dirty.store(false, Release);
        engine.next_epoch();
    }

    /// The incident has ended, unless it has opened again meanwhile.
    pub(crate) fn incident_over(&self) {
        if let Some(engine) = self.engine.get() {
            let mut state = engine.lock();
            if !state.is_open {
                state.incident = None;
            }
        }
    }

    /// The incident that goes on, as an alert about it would say now.
    pub(crate) fn incident(&self, about: &About<'_>) -> Option<Alert> {
        let engine = self.engine.get()?;
        let incident = engine.lock().incident;
        incident.map(|incident| incident.alert(engine.refused.load(Relaxed), about))
    }

    /// Failures in the window.
    pub(crate) fn failures(&self) -> usize {
        self.engine.get().map_or(0, |engine| engine.lock().window.failures())
    }

    /// A call was refused.
    pub(crate) fn refused(&self) {
        self.engine().refused.fetch_add(1, Relaxed);
    }
}

impl Engine {
    fn lock(&self) -> StateGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    #[inline(never)]
    fn succeeded(&self, epoch: u32, start: u64) {
        let mut state = self.lock();
        if self.epoch.load(Relaxed) == epoch && !state.is_open {
            state.window.push(start, false);
            self.dirty.store(state.window.failures() > 0, Release);
        }
    }

    /// Under the lock of the state.
    fn next_epoch(&self) {
        self.epoch.store(self.epoch.load(Relaxed).wrapping_add(1), Release);
    }
}

impl Incident {
    fn alert(&self, refused: u64, about: &About<'_>) -> Alert {
        let facts = Facts { refused, ..self.facts };
        Alert::new(about.provider, about.scope, &self.trouble, facts, about.clock, about.now)
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cell").field("in_use", &self.engine.get().is_some()).finish_non_exhaustive()
    }
}
