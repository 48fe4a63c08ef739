use super::ledger::{Ledger, Wakes};
use super::{Exchange, FleetStore, HolderId, Listen, Report, Wake};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::Instant,
};

/// So many wake-ups are kept for a listener that is behind. What it misses, the fleet's polls make up for.
const KEPT: usize = 1024;
/// The book's clock at the beginning: in the middle of a life, as that of a server is.
const BEGIN: u64 = 1_000_000;

/// A store in memory: for fleets that are all within this process, and for tests.
///
/// Clones are the same store. Time is tokio's, so a paused clock moves it; all who share a store should read the
/// same clock.
///
/// A store that can lose its data gives nobody more for a while after it has begun anew, since there may be
/// processes that hold slots by what was lost. Here they would be lost with it, so nothing is waited for; with
/// [`may_have_lost`](Self::may_have_lost), it is.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    ledgers: Mutex<BTreeMap<Arc<str>, Ledger>>,
    wakes: broadcast::Sender<(Arc<str>, Option<HolderId>)>,
    begin: Instant,
    learns: bool,
}

impl MemoryStore {
    /// An empty store, that was never anything else.
    #[must_use]
    pub fn new() -> Self {
        MemoryStore::with(false)
    }

    /// An empty store in place of one that was lost: each provider begins with a time of learning
    /// ([`Terms::learning`](super::Terms::learning)), as it does on a server.
    #[must_use]
    pub fn may_have_lost() -> Self {
        MemoryStore::with(true)
    }

    fn with(learns: bool) -> Self {
        let (wakes, _) = broadcast::channel(KEPT);
        MemoryStore {
            shared: Arc::new(Shared { ledgers: Mutex::default(), wakes, begin: Instant::now(), learns }),
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl FleetStore for MemoryStore {
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a> {
        Box::pin(async move {
            let shared = &*self.shared;
            let clock = Instant::now().saturating_duration_since(shared.begin).as_millis();
            let clock = BEGIN.saturating_add(u64::try_from(clock).unwrap_or(u64::MAX));
            // A panic in here would be ours, and no report leaves a book half written that the next one does not
            // put right.
            let mut ledgers = shared.ledgers.lock().unwrap_or_else(PoisonError::into_inner);
            let name = match ledgers.get_key_value(provider) {
                Some((name, _)) => Arc::clone(name),
                None => Arc::from(provider),
            };
            let ledger = ledgers.entry(Arc::clone(&name)).or_insert_with(|| Ledger::new(shared.learns));
            let (grant, wakes) = ledger.exchange(clock, "", report);
            drop(ledgers);
            // Without a listener, nobody is to be woken.
            match wakes {
                Wakes::All => drop(shared.wakes.send((name, None))),
                Wakes::Holders(holders) => {
                    for holder in holders {
                        drop(shared.wakes.send((Arc::clone(&name), Some(holder))));
                    }
                }
            }
            Ok(grant)
        })
    }

    fn listen<'a>(&'a self, wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        let mut receiver = self.shared.wakes.subscribe();
        Box::pin(async move {
            loop {
                match receiver.recv().await {
                    Ok((provider, holder)) => wakes(Wake { provider: &provider, holder }),
                    Err(RecvError::Lagged(_)) => {}
                    // Not while the store is borrowed here.
                    Err(RecvError::Closed) => return,
                }
            }
        })
    }
}
