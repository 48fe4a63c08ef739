//! The provider: it counts what is in flight, and nobody else's count is believed.

use std::collections::{BTreeMap, BTreeSet};

/// Nanoseconds of the world's time.
pub type At = u64;

/// One life of one process: its place, and which life.
pub type Life = (usize, u32);

struct Call {
    life: Life,
    begin: At,
    end: At,
}

pub struct Judge {
    ceiling: usize,
    next: u64,
    calls: BTreeMap<u64, Call>,
    /// Not counted yet, as their instant has not come.
    begins: Vec<(At, u64)>,
    ends: BTreeSet<(At, u64)>,
    counted: At,
    pub most: usize,
    /// When the ceiling was first exceeded, and by how many there were then.
    pub over: Option<(At, usize)>,
    pub begun: u64,
    /// Since the last [`take_use`](Self::take_use): slots times nanoseconds.
    area: u128,
    since: At,
}

impl Judge {
    pub fn new(ceiling: u32) -> Self {
        Judge {
            ceiling: ceiling as usize,
            next: 0,
            calls: BTreeMap::new(),
            begins: Vec::new(),
            ends: BTreeSet::new(),
            counted: 0,
            most: 0,
            over: None,
            begun: 0,
            area: 0,
            since: 0,
        }
    }

    pub fn begin(&mut self, life: Life, begin: At, end: At) -> u64 {
        self.next += 1;
        self.begun += 1;
        self.calls.insert(self.next, Call { life, begin, end });
        self.begins.push((begin, self.next));
        self.next
    }

    /// The provider stops to work on it.
    pub fn end(&mut self, id: u64, at: At) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let end = call.end.min(at.max(call.begin));
        if self.ends.remove(&(call.end, id)) {
            self.ends.insert((end, id));
        }
        call.end = end;
    }

    /// The provider sees that a process is gone, and drops its calls.
    pub fn hang_up(&mut self, life: Life, at: At) {
        let ids: Vec<u64> =
            self.calls.iter().filter(|(_, call)| call.life == life).map(|(id, _)| *id).collect();
        for id in ids {
            self.end(id, at);
        }
    }

    fn pass(&mut self, until: At) {
        while let Some((end, id)) = self.ends.first().copied().filter(|(end, _)| *end <= until) {
            self.add(end);
            self.ends.pop_first();
            self.calls.remove(&id);
        }
        self.add(until);
    }

    fn add(&mut self, until: At) {
        let used = self.ends.len().min(self.ceiling) as u128;
        self.area += used * u128::from(until.saturating_sub(self.counted));
        self.counted = self.counted.max(until);
    }

    /// Counts up to here: nothing begins before it any more.
    pub fn count(&mut self, until: At) {
        self.begins.sort_unstable();
        let later = self.begins.partition_point(|(begin, _)| *begin <= until);
        for (begin, id) in self.begins.drain(..later).collect::<Vec<_>>() {
            self.pass(begin);
            let end = self.calls[&id].end;
            self.ends.insert((end, id));
            let now = self.ends.len();
            self.most = self.most.max(now);
            if now > self.ceiling {
                self.over.get_or_insert((begin, now));
            }
        }
        self.pass(until);
    }

    /// The part of the ceiling that was in use since this was last asked.
    pub fn take_use(&mut self) -> f64 {
        let whole = self.ceiling as f64 * self.counted.saturating_sub(self.since).max(1) as f64;
        let used = std::mem::take(&mut self.area) as f64 / whole;
        self.since = self.counted;
        used
    }
}
