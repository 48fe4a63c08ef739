//! What a store is told to do.

use std::time::Duration;

/// Something that goes wrong with a store between two instants of its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StoreFault {
    /// It refuses connections: every exchange fails at once, nobody is woken.
    Down {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// It is not there: nothing is answered, and nothing arrives.
    Silent {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// It stands still: what arrives is answered when that is over, as by a stopped server.
    Stopped {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// One process does not reach it, nor it that process.
    CutOff {
        /// Which.
        process: u32,
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// Nothing goes to or from one process until that is over, and then all of it, as of a stopped process.
    Held {
        /// Which.
        process: u32,
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// One process reaches it, and does not hear of it: replies and wake-ups are lost.
    Deaf {
        /// Which.
        process: u32,
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// All its data are lost.
    Flushed {
        /// When.
        at: Duration,
    },
}

/// The script of a store: plain data with consuming setters.
///
/// Instants are counted from the creation of the store.
#[derive(Clone, Debug)]
#[must_use = "a script does nothing until a store runs it"]
pub struct StoreScript {
    pub(super) latency: Duration,
    pub(super) spread: f64,
    pub(super) lost_requests: f64,
    pub(super) lost_replies: f64,
    pub(super) lost_wakes: f64,
    pub(super) duplicates: f64,
    pub(super) delays: f64,
    pub(super) delay: (Duration, Duration),
    pub(super) wakes: bool,
    pub(super) faults: Vec<StoreFault>,
    pub(super) seed: u64,
}

impl Default for StoreScript {
    fn default() -> Self {
        Self::new()
    }
}

impl StoreScript {
    /// A store that answers after a millisecond (0.5 to 1.5), and nothing goes wrong.
    pub fn new() -> Self {
        Self {
            latency: Duration::from_millis(1),
            spread: 0.5,
            lost_requests: 0.0,
            lost_replies: 0.0,
            lost_wakes: 0.0,
            duplicates: 0.0,
            delays: 0.0,
            delay: (Duration::from_millis(1500), Duration::from_secs(4)),
            wakes: true,
            faults: Vec::new(),
            seed: 0,
        }
    }

    /// The mean time of an exchange: half of it to the store, half of it back. A wake-up takes half of it.
    pub fn latency(mut self, mean: Duration) -> Self {
        self.latency = mean;
        self
    }

    /// The latency is uniform in `mean * (1 - spread) ..= mean * (1 + spread)`; clamped to 0..=1.
    pub fn spread(mut self, spread: f64) -> Self {
        self.spread = spread.clamp(0.0, 1.0);
        self
    }

    /// The probability that a report does not arrive.
    pub fn lose_requests(mut self, probability: f64) -> Self {
        self.lost_requests = probability.clamp(0.0, 1.0);
        self
    }

    /// The probability that a grant does not arrive, though its report was taken in.
    pub fn lose_replies(mut self, probability: f64) -> Self {
        self.lost_replies = probability.clamp(0.0, 1.0);
        self
    }

    /// The probability that a wake-up does not arrive.
    pub fn lose_wakes(mut self, probability: f64) -> Self {
        self.lost_wakes = probability.clamp(0.0, 1.0);
        self
    }

    /// The probability that a report arrives a second time, up to the longest [delay](Self::delays) later.
    pub fn duplicate(mut self, probability: f64) -> Self {
        self.duplicates = probability.clamp(0.0, 1.0);
        self
    }

    /// The probability that a report is under way for so long (uniform between the two): its sender has given
    /// up on it, and it is executed all the same.
    pub fn delays(mut self, probability: f64, least: Duration, most: Duration) -> Self {
        self.delays = probability.clamp(0.0, 1.0);
        self.delay = (least, most.max(least));
        self
    }

    /// Whether it wakes anybody. If not, the fleet polls.
    pub fn wakes(mut self, wakes: bool) -> Self {
        self.wakes = wakes;
        self
    }

    /// Adds a fault.
    pub fn fault(mut self, fault: StoreFault) -> Self {
        self.faults.push(fault);
        self
    }

    /// The seed of all that is left to chance.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The instants at which all data are lost, in order.
    pub(super) fn flushes(&self) -> Vec<Duration> {
        let flush = |fault: &StoreFault| match *fault {
            StoreFault::Flushed { at } => Some(at),
            _ => None,
        };
        let mut flushes: Vec<_> = self.faults.iter().filter_map(flush).collect();
        flushes.sort_unstable();
        flushes
    }

    /// What happens to something that travels to or from a process at an instant.
    pub(super) fn way(&self, process: u32, now: Duration) -> Way {
        let mut way = Way::default();
        for fault in &self.faults {
            match *fault {
                StoreFault::Down { from, to } if (from..to).contains(&now) => way.refused = true,
                StoreFault::Silent { from, to } if (from..to).contains(&now) => {
                    (way.there, way.back) = (false, false);
                }
                StoreFault::CutOff { process: p, from, to } if p == process && (from..to).contains(&now) => {
                    (way.there, way.back) = (false, false);
                }
                StoreFault::Deaf { process: p, from, to } if p == process && (from..to).contains(&now) => {
                    way.back = false;
                }
                StoreFault::Held { process: p, from, to } if p == process && (from..to).contains(&now) => {
                    way.held = way.held.max(to.saturating_sub(now));
                }
                StoreFault::Stopped { from, to } if (from..to).contains(&now) => {
                    way.stopped = way.stopped.max(to.saturating_sub(now));
                }
                _ => {}
            }
        }
        way
    }
}

/// See [`StoreScript::way`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) refused: bool,
    pub(super) there: bool,
    pub(super) back: bool,
    /// For so long it stands still,
    pub(super) stopped: Duration,
    /// or its process does.
    pub(super) held: Duration,
}

impl Default for Way {
    fn default() -> Self {
        Way { refused: false, there: true, back: true, stopped: Duration::ZERO, held: Duration::ZERO }
    }
}
