//! A scripted store: where the processes of a fleet meet, with every fault that a network and a server have.
//!
//! [`ScriptedStore`] wraps any [`FleetStore`] (by default [`MemoryStore`](tower_herd::store::MemoryStore), the
//! fleet's rules in memory) and puts a bad line before it: latency and its spread, lost requests, lost replies,
//! requests that arrive twice, or long after their sender has given up, wake-ups that get lost; outages,
//! processes that are cut off on one side or both, and the loss of all data. It is seeded: the same script and
//! the same calls give the same trace.
//!
//! Each process of the fleet has its own line to it, [`ScriptedStore::process`]. That is what it shares through:
//!
//! ```
//! use std::time::Duration;
//! use tower_herd::{Fleet, ProviderSettings, store::FleetSettings};
//! use tower_herd_sim::store::{ScriptedStore, StoreFault, StoreScript};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
//! # .block_on(async {
//! let second = Duration::from_secs;
//! let script = StoreScript::new()
//!     .lose_requests(0.03)
//!     .fault(StoreFault::CutOff { process: 1, from: second(10), to: second(30) });
//! let store = ScriptedStore::new(script);
//! let processes: Vec<_> = (0..2)
//!     .map(|process| {
//!         let settings = FleetSettings::new().on_this_runtime();
//!         let fleet = Fleet::shared(store.process(process), settings).expect("these settings can be");
//!         fleet.configure("search", ProviderSettings::new().ceiling(6)).expect("so can these")
//!     })
//!     .collect();
//!
//! tokio::time::sleep(second(5)).await;
//! assert_eq!(processes[0].lease().unwrap().members, 2);
//! // A lease lasts ten seconds at the store: cut off for longer, a process is a member no more.
//! tokio::time::sleep(second(20)).await;
//! assert_eq!(processes[0].lease().unwrap().members, 1);
//! assert!(store.stats().lost_requests > 0);
//! # });
//! ```
//!
//! What a process in trouble does itself is the test's to play: a killed process is one whose services and
//! [`Fleet`](tower_herd::Fleet) are dropped while [`StoreFault::CutOff`] keeps its goodbye from the store.

mod script;
mod scripted;

pub use script::{StoreFault, StoreScript};
pub use scripted::{ProcessStore, ScriptedStore, StoreStats};

#[cfg(doc)]
use tower_herd::store::FleetStore;
