//! What a breaker counts: failures among the last n settled calls, by when they were sent.
//!
//! By their start, since outcomes come late and in any order. A burst of calls that hung for their whole
//! timeout says what the provider was thirty seconds ago; a thousand calls that were sent later and went
//! well say what it is now, though they came back earlier.

use super::sync::{AtomicU64, AtomicUsize};
use crate::provider::Apart;
// Not loom's: which shard a thread has decides nothing that a model checks.
use std::{
    cell::Cell,
    collections::VecDeque,
    sync::atomic::{AtomicUsize as Count, Ordering::Relaxed},
};

/// The last calls, in the order of their start. Fixed memory; a call costs as many steps as calls that were
/// sent after it have settled before it, and as the window has places at most.
#[derive(Debug)]
pub(crate) struct Window {
    calls: VecDeque<Settled>,
    size: usize,
    trip: usize,
    failures: usize,
}

#[derive(Clone, Copy, Debug)]
struct Settled {
    start: u64,
    failed: bool,
}

impl Window {
    /// Of `size` calls; it trips at `trip` failures.
    pub(crate) fn new(size: usize, trip: usize) -> Self {
        Window { calls: VecDeque::with_capacity(size), size, trip, failures: 0 }
    }

    pub(crate) fn failures(&self) -> usize {
        self.failures
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(crate) fn clear(&mut self) {
        self.calls.clear();
        self.failures = 0;
    }

    /// Starts again from these successes, of which it holds none yet.
    pub(crate) fn begin(&mut self, starts: &[u64]) {
        self.clear();
        let from = starts.len().saturating_sub(self.size);
        self.calls.extend(starts[from..].iter().map(|start| Settled { start: *start, failed: false }));
    }

    /// A call that was the `start`-th has settled. Whether that trips the breaker.
    pub(crate) fn push(&mut self, start: u64, failed: bool) -> bool {
        if self.calls.len() == self.size {
            match self.calls.front() {
                Some(oldest) if start < oldest.start => return false,
                _ => self.failures -= usize::from(self.calls.pop_front().is_some_and(|call| call.failed)),
            }
        }
        let later = self.calls.iter().rev().take_while(|call| call.start > start).count();
        self.calls.insert(self.calls.len() - later, Settled { start, failed });
        self.failures += usize::from(failed);
        failed && self.failures >= self.trip
    }
}

/// Threads write to shards of their own, as far as there are enough.
const SHARDS: usize = 8;

/// The last successes while nothing fails: their starts, written down where no other thread writes, so that
/// a healthy provider's calls meet no lock and share no cache line here. When a call fails, the window
/// begins with these.
///
/// Each shard keeps the last `2 n` by when they settled, so a success may be missed that overtook more than
/// n others; one more failure among n is then seen than there was.
#[derive(Debug)]
pub(crate) struct Recent(Box<[Apart<Shard>]>);

#[derive(Debug)]
struct Shard {
    next: AtomicUsize,
    /// Plus 1; 0: none yet.
    starts: Box<[AtomicU64]>,
}

impl Recent {
    /// For a window of `size` calls.
    pub(crate) fn new(size: usize) -> Self {
        let places = (2 * size).next_power_of_two();
        let shard =
            || Shard { next: AtomicUsize::new(0), starts: (0..places).map(|_| AtomicU64::new(0)).collect() };
        Recent((0..SHARDS).map(|_| Apart(shard())).collect())
    }

    /// A call that was the `start`-th has succeeded.
    #[inline]
    pub(crate) fn push(&self, start: u64) {
        let Shard { next, starts } = &self.0[shard()].0;
        // Two threads of one shard may write to one place: a success is lost.
        let n = next.load(Relaxed);
        next.store(n.wrapping_add(1), Relaxed);
        starts[n & (starts.len() - 1)].store(start.wrapping_add(1), Relaxed);
    }

    /// The starts that are known, in order.
    pub(crate) fn starts(&self) -> Vec<u64> {
        let all = self.0.iter().flat_map(|shard| &shard.0.starts);
        let mut starts: Vec<u64> = all.filter_map(|start| start.load(Relaxed).checked_sub(1)).collect();
        starts.sort_unstable();
        starts
    }
}

/// This thread's.
#[inline]
fn shard() -> usize {
    static THREADS: Count = Count::new(0);
    thread_local! {
        static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    SHARD.with(|shard| {
        if shard.get() == usize::MAX {
            shard.set(THREADS.fetch_add(1, Relaxed) % SHARDS);
        }
        shard.get()
    })
}
