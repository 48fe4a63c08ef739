//! The store itself, and the line of each process to it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tower_herd::store::{
    Exchange, FleetStore, Grant, HolderId, Listen, MemoryStore, Report, StoreError, StoreErrorKind, Wake,
};

use super::script::StoreScript;

/// What went over the lines of a store. Counted where it was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Exchanges that were begun, by process.
    pub exchanges: Vec<u64>,
    /// Reports that the store took in, the second ones of duplicates included.
    pub executed: u64,
    /// Reports that did not arrive.
    pub lost_requests: u64,
    /// Grants that did not arrive.
    pub lost_replies: u64,
    /// Reports that arrived twice.
    pub duplicates: u64,
    /// Reports that were under way for long.
    pub delayed: u64,
    /// Exchanges that were refused at once.
    pub refused: u64,
    /// Wake-ups that arrived.
    pub wakes: u64,
    /// Wake-ups that did not.
    pub lost_wakes: u64,
}

impl StoreStats {
    /// Exchanges of all processes.
    #[must_use]
    pub fn exchanges(&self) -> u64 {
        self.exchanges.iter().sum()
    }

    /// Those of the process that made the most.
    #[must_use]
    pub fn most_exchanges(&self) -> u64 {
        self.exchanges.iter().copied().max().unwrap_or_default()
    }
}

/// A store with the faults of its script. Clones are the same store. See the [module](super).
pub struct ScriptedStore<S = MemoryStore> {
    shared: Arc<Shared<S>>,
}

impl<S> Clone for ScriptedStore<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<S> fmt::Debug for ScriptedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedStore").field("script", &self.shared.script).finish_non_exhaustive()
    }
}

struct Shared<S> {
    script: StoreScript,
    started: Instant,
    again: Box<dyn Fn() -> S + Send + Sync>,
    state: Mutex<State>,
    /// The one in service.
    inner: watch::Sender<Arc<S>>,
}

struct State {
    rng: fastrand::Rng,
    stats: StoreStats,
    /// Losses of data that are still to come, the next one last.
    flushes: Vec<Duration>,
}

impl ScriptedStore {
    /// A [`MemoryStore`] with these faults: it is not new at the beginning, and after a loss of its data it is
    /// one that may have lost some.
    #[must_use]
    pub fn new(script: StoreScript) -> Self {
        Self::over(script, MemoryStore::new(), MemoryStore::may_have_lost)
    }
}

impl<S: FleetStore> ScriptedStore<S> {
    /// Any store. When all data are lost, `again` makes the one that takes its place.
    #[must_use]
    pub fn over(script: StoreScript, first: S, again: impl Fn() -> S + Send + Sync + 'static) -> Self {
        let mut flushes = script.flushes();
        flushes.reverse();
        let rng = fastrand::Rng::with_seed(script.seed ^ 0x0057_013E);
        let shared = Shared {
            script,
            started: Instant::now(),
            again: Box::new(again),
            state: Mutex::new(State { rng, stats: StoreStats::default(), flushes }),
            inner: watch::Sender::new(Arc::new(first)),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The line of one process, by its number from 0.
    #[must_use]
    pub fn process(&self, process: u32) -> ProcessStore<S> {
        ProcessStore { shared: self.shared.clone(), process }
    }

    /// What went over the lines up to now.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        self.shared.lock().stats.clone()
    }

    /// Loses all data, now.
    pub fn flush(&self) {
        self.shared.inner.send_replace(Arc::new((self.shared.again)()));
    }
}

impl<S> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Half of a latency.
    fn leg(&self, state: &mut State) -> Duration {
        let spread = self.script.spread;
        crate::scale(self.script.latency, (1.0 - spread + 2.0 * spread * state.rng.f64()) / 2.0)
    }

    /// The store in service; data whose time has come are lost first.
    fn inner(&self) -> Arc<S> {
        let now = self.now();
        let mut lost = false;
        {
            let mut state = self.lock();
            while state.flushes.last().is_some_and(|at| *at <= now) {
                state.flushes.pop();
                lost = true;
            }
        }
        if lost {
            self.inner.send_replace(Arc::new((self.again)()));
        }
        self.inner.borrow().clone()
    }

    fn chance(&self, probability: f64) -> bool {
        probability > 0.0 && self.lock().rng.f64() < probability
    }
}

/// How one report travels.
struct Trip {
    refused: bool,
    lost: bool,
    there: Duration,
    back: Duration,
    /// A second time, so much later.
    again: Option<Duration>,
}

impl<S: FleetStore> Shared<S> {
    /// Draws everything at once, in a fixed order, so that one fault does not change the others' chances.
    fn trip(&self, process: u32) -> Trip {
        let now = self.now();
        let way = self.script.way(process, now);
        let script = &self.script;
        let state = &mut *self.lock();
        let at = process as usize;
        if state.stats.exchanges.len() <= at {
            state.stats.exchanges.resize(at + 1, 0);
        }
        state.stats.exchanges[at] += 1;
        let mut there = way.held + self.leg(state);
        let back = self.leg(state);
        let draws: [f64; 4] = std::array::from_fn(|_| state.rng.f64());
        let (least, most) = script.delay;
        if draws[0] < script.delays {
            there += least + crate::scale(most.saturating_sub(least), draws[1]);
            state.stats.delayed += 1;
        }
        let again = (draws[2] < script.duplicates).then(|| crate::scale(most, state.rng.f64()));
        let lost = !way.there || draws[3] < script.lost_requests;
        state.stats.refused += u64::from(way.refused);
        state.stats.lost_requests += u64::from(lost && !way.refused);
        state.stats.duplicates += u64::from(again.is_some() && !lost && !way.refused);
        Trip { refused: way.refused, lost, there, back, again }
    }

    /// A report arrives. None: it was not taken in.
    async fn execute(
        &self,
        process: u32,
        provider: &str,
        report: &Report,
    ) -> Option<Result<Grant, StoreError>> {
        let stopped = self.script.way(process, self.now()).stopped;
        if !stopped.is_zero() {
            tokio::time::sleep(stopped).await;
        }
        // One that was under way when the store went away finds nothing there.
        let way = self.script.way(process, self.now());
        if way.refused || !way.there {
            self.lock().stats.lost_requests += 1;
            return None;
        }
        let inner = self.inner();
        let answer = inner.exchange(provider, report).await;
        self.lock().stats.executed += 1;
        Some(answer)
    }
}

/// The line of one process to a [`ScriptedStore`].
pub struct ProcessStore<S = MemoryStore> {
    shared: Arc<Shared<S>>,
    process: u32,
}

impl<S> Clone for ProcessStore<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), process: self.process }
    }
}

impl<S> fmt::Debug for ProcessStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessStore").field("process", &self.process).finish_non_exhaustive()
    }
}

impl<S: FleetStore> FleetStore for ProcessStore<S> {
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a> {
        let (shared, process) = (self.shared.clone(), self.process);
        let (provider, report) = (provider.to_owned(), report.clone());
        Box::pin(async move {
            let trip = shared.trip(process);
            if trip.refused {
                tokio::time::sleep(trip.there + trip.back).await;
                return Err(StoreErrorKind::Unreachable.into());
            }
            if trip.lost {
                return std::future::pending().await;
            }
            let (reply, answer) = oneshot::channel();
            // What was sent arrives, whether its sender waits for it or not.
            tokio::spawn(async move {
                tokio::time::sleep(trip.there).await;
                let answer = shared.execute(process, &provider, &report).await;
                if let Some(later) = trip.again {
                    let (shared, provider, report) = (shared.clone(), provider.clone(), report.clone());
                    tokio::spawn(async move {
                        tokio::time::sleep(later).await;
                        drop(shared.execute(process, &provider, &report).await);
                    });
                }
                let Some(answer) = answer else { return };
                tokio::time::sleep(trip.back).await;
                let held = shared.script.way(process, shared.now()).held;
                if !held.is_zero() {
                    tokio::time::sleep(held).await;
                }
                let way = shared.script.way(process, shared.now());
                if way.refused || !way.back || shared.chance(shared.script.lost_replies) {
                    shared.lock().stats.lost_replies += 1;
                    return;
                }
                drop(reply.send(answer));
            });
            match answer.await {
                Ok(answer) => answer,
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn listen<'a>(&'a self, wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        if !self.shared.script.wakes {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move {
            let shared = &*self.shared;
            let mut lives = shared.inner.subscribe();
            let mut coming = FuturesUnordered::new();
            loop {
                let inner = lives.borrow_and_update().clone();
                let (heard, mut hears) = mpsc::unbounded_channel::<(String, Option<HolderId>)>();
                let hear = move |wake: Wake<'_>| {
                    drop(heard.send((wake.provider.to_owned(), wake.holder)));
                };
                let mut listening = inner.listen(&hear);
                loop {
                    tokio::select! {
                        biased;
                        () = &mut listening => return,
                        changed = lives.changed() => match changed {
                            Ok(()) => break,
                            Err(_) => return,
                        },
                        Some((provider, holder)) = hears.recv() => {
                            let leg = shared.leg(&mut shared.lock());
                            coming.push(async move {
                                tokio::time::sleep(leg).await;
                                (provider, holder)
                            });
                        }
                        Some((provider, holder)) = coming.next() => {
                            let way = shared.script.way(self.process, shared.now());
                            let still = !way.stopped.is_zero() || !way.held.is_zero();
                            let gone = way.refused || !way.back || still;
                            if gone || shared.chance(shared.script.lost_wakes) {
                                shared.lock().stats.lost_wakes += 1;
                            } else {
                                shared.lock().stats.wakes += 1;
                                wakes(Wake { provider: &provider, holder });
                            }
                        }
                    }
                }
            }
        })
    }
}
