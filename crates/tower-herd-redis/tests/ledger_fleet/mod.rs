//! Random reports, of processes that keep the rules of a lease over a network that keeps none.

use fastrand::Rng;
use tower_herd::{
    PauseReason,
    store::{Epoch, Grant, HolderId, Limits, News, Quantity, RateLimit, RateReport, Report, Terms, Wakes},
};

/// What kind of fleet.
pub struct Shape {
    pub name: &'static str,
    pub steps: usize,
    holders: u64,
    /// The most slots that one needs.
    need: u32,
    ceilings: &'static [Option<u32>],
    /// The longest usual time between two reports.
    pace: u64,
    /// One in so many steps is a fault.
    faults: u32,
}

pub const SMALL: Shape = Shape {
    name: "small",
    steps: 600,
    holders: 6,
    need: 12,
    ceilings: &[Some(12), Some(12), Some(12), None],
    pace: 300,
    faults: 60,
};
pub const CROWDED: Shape = Shape {
    name: "crowded",
    steps: 1200,
    holders: 50,
    need: 3,
    ceilings: &[Some(3), Some(20), None],
    pace: 40,
    faults: 200,
};
pub const LARGE: Shape = Shape {
    name: "large",
    steps: 3000,
    holders: 180,
    need: 4,
    ceilings: &[Some(150), None],
    pace: 12,
    faults: 700,
};

struct Process {
    id: HolderId,
    seq: u64,
    epoch: Option<Epoch>,
    version: u64,
    cap: u32,
    busy: u32,
    need: u32,
    weight: u32,
    generation: u64,
    scopes: Vec<(Option<String>, u64)>,
    chunks: [(u64, u64); 2],
    limits: Limits,
    terms: Terms,
    news: Vec<News>,
}

/// What a store loses.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// All it has.
    All,
    /// What a replica did not have yet.
    Latest,
}

/// Processes, the network between them and the store, and the store's clock.
pub struct Fleet {
    rng: Rng,
    clock: u64,
    run: u32,
    lost: Option<Loss>,
    processes: Vec<Process>,
    /// Reports that come late, or twice.
    late: Vec<Report>,
    /// Holders that were woken.
    woken: Vec<HolderId>,
    need: u32,
    pace: u64,
    faults: u32,
    ceilings: &'static [Option<u32>],
    /// Something happens in one of so many reports, about.
    quiet: u32,
}

impl Fleet {
    pub fn new(seed: u64, shape: &Shape) -> Self {
        let mut rng = Rng::with_seed(seed);
        let ceiling = shape.ceilings[rng.usize(..shape.ceilings.len())];
        let rate = |rng: &mut Rng, most: u64| {
            rng.bool().then(|| RateLimit { per_minute: rng.u64(1..most), burst: rng.u64(1..most / 10 + 2) })
        };
        let limits = Limits {
            generation: 1,
            floor: rng.u32(1..3),
            start: rng.u32(2..12),
            ceiling,
            requests: rate(&mut rng, 2000),
            tokens: rate(&mut rng, 3_000_000),
        };
        let terms = Terms {
            ttl: 10_000,
            gap: 3000,
            extra: [0, 0, 4000][rng.usize(..3)],
            keep: [0.0, 0.5, 0.3][rng.usize(..3)],
            grace: [5000, 60_000][rng.usize(..2)],
            trickle: [0, 0, 2][rng.usize(..3)],
        };
        let weighted = rng.bool();
        let process = |rng: &mut Rng| Process {
            id: HolderId(rng.u128(..)),
            seq: 0,
            epoch: None,
            version: 0,
            cap: 0,
            busy: 0,
            need: 0,
            weight: if weighted { rng.u32(1..4) } else { 1 },
            generation: 0,
            scopes: Vec::new(),
            chunks: [(0, 0); 2],
            limits: limits.clone(),
            terms: terms.clone(),
            news: Vec::new(),
        };
        let processes = (0..shape.holders).map(|_| process(&mut rng)).collect();
        Fleet {
            clock: 1_700_000_000_000 + rng.u64(..1000),
            run: 1,
            lost: None,
            processes,
            late: Vec::new(),
            woken: Vec::new(),
            need: shape.need,
            // A calm fleet has time for what takes long: ramps, looks above the limit, probes that get lost.
            pace: shape.pace * [1, 1, 4][rng.usize(..3)],
            quiet: [60, 60, 500, 2000][rng.usize(..4)],
            faults: shape.faults,
            ceilings: shape.ceilings,
            rng,
        }
    }

    /// What the store has lost since last asked.
    pub fn take_loss(&mut self) -> Option<Loss> {
        self.lost.take()
    }

    /// The store's clock, its life, and what it is told then.
    pub fn next(&mut self) -> (u64, String, Report) {
        self.clock += match self.rng.u32(..20) {
            0..6 => 0,
            6..19 => self.rng.u64(..self.pace),
            _ => self.rng.u64(..self.pace * 8),
        };
        if self.rng.u32(..self.faults) == 0 {
            self.fault();
        }
        let late = !self.late.is_empty() && self.rng.u32(..8) == 0;
        let report = if late {
            let at = self.rng.usize(..self.late.len());
            self.late.swap_remove(at)
        } else {
            let woken = self.woken.pop().and_then(|id| self.processes.iter().position(|p| p.id == id));
            let i = woken.unwrap_or_else(|| self.rng.usize(..self.processes.len()));
            let report = self.report(i);
            if self.rng.u32(..12) == 0 {
                // Comes twice.
                self.late.push(report.clone());
            }
            if self.rng.u32(..12) == 0 {
                // Comes later than the next one.
                self.late.push(report);
                self.report(i)
            } else {
                report
            }
        };
        (self.clock, format!("run{}", self.run), report)
    }

    fn fault(&mut self) {
        let rng = &mut self.rng;
        match rng.u32(..9) {
            0 => self.lost = Some(Loss::All),
            1 => self.run += 1,
            7 => {
                // Another machine takes over, and may say so.
                self.lost = Some(Loss::Latest);
                self.run += rng.u32(..2);
            }
            2 => self.clock += rng.u64(2000..20_000),
            3 => self.clock -= rng.u64(100..20_000),
            4 => self.clock += rng.u64(60_000..4_000_000),
            5 => {
                // A new configuration rolls out, one by one.
                let ceiling = self.ceilings[rng.usize(..self.ceilings.len())].map(|n| n + rng.u32(..5));
                let i = rng.usize(..self.processes.len());
                let limits = &mut self.processes[i].limits;
                limits.ceiling = ceiling;
                limits.generation += rng.u64(..2);
            }
            6 => {
                // Killed, and another comes.
                let i = rng.usize(..self.processes.len());
                let process = &mut self.processes[i];
                process.id = HolderId(rng.u128(..));
                (process.seq, process.epoch, process.version) = (0, None, 0);
                (process.cap, process.busy, process.chunks) = (0, 0, [(0, 0); 2]);
            }
            _ => {
                let i = rng.usize(..self.processes.len());
                self.processes[i].terms.ttl = rng.u64(4000..20_000);
            }
        }
    }

    fn report(&mut self, i: usize) -> Report {
        let rng = &mut self.rng;
        let process = &mut self.processes[i];
        process.busy = match rng.u32(..4) {
            0 => rng.u32(..=process.busy),
            _ => rng.u32(process.busy.min(process.cap)..=process.cap.max(process.busy)),
        };
        if rng.u32(..3) == 0 {
            process.need = rng.u32(..=self.need * if self.quiet > 60 { 2 } else { 1 });
        }
        let need = process.need.max(process.busy);
        if rng.bool() {
            process.cap = process.cap.min(need.max(process.busy));
        }
        let mut report = Report::new(process.id, Epoch(rng.u64(..)));
        process.seq += 1;
        report.label = format!("pod-{i}");
        report.seq = process.seq;
        (report.epoch, report.version) = (process.epoch, process.version);
        (report.held, report.busy, report.need) = (process.cap.max(process.busy), process.busy, need);
        report.headroom = rng.u32(..4) + need;
        report.weight = process.weight;
        report.terms = process.terms.clone();
        report.limits = process.limits.clone();
        report.served = rng.u32(..4);
        for _ in 0..rng.u32(..4) / 2 {
            if let Some(news) = news(rng, process, self.quiet) {
                process.news.push(news);
            }
        }
        report.news.clone_from(&process.news);
        for (n, of) in [Quantity::Requests, Quantity::Tokens].into_iter().enumerate() {
            if rng.u32(..3) > 0 {
                let most = [20, 20_000][n];
                let (chunk, amount) = process.chunks[n];
                let (want, rest) = (rng.u64(..most), rng.u64(..=amount));
                report.rates.push(RateReport { of, want, least: rng.u64(..=want), chunk, rest });
            }
        }
        if rng.u32(..150) == 0 {
            (report.bye, report.need) = (true, report.busy);
        }
        report
    }

    /// The answer, which may get lost.
    pub fn hear(&mut self, report: &Report, grant: Grant, wakes: &Wakes) {
        match wakes {
            Wakes::All => {}
            Wakes::Holders(holders) => self.woken.extend(holders.iter().filter(|_| self.rng.u32(..10) > 0)),
        }
        self.woken.truncate(8);
        let Some(process) = self.processes.iter_mut().find(|process| process.id == report.holder) else {
            return;
        };
        if report.seq != process.seq || self.rng.u32(..10) == 0 {
            return;
        }
        process.news.clear();
        if process.epoch != Some(grant.epoch) {
            (process.epoch, process.version, process.cap) = (Some(grant.epoch), grant.version, grant.slots);
        } else if grant.version > process.version {
            (process.version, process.cap) = (grant.version, grant.slots);
        } else if grant.version == process.version {
            process.cap = process.cap.min(grant.slots);
        }
        process.generation = grant.generation;
        process.scopes = grant.scopes.into_iter().map(|scope| (scope.scope, scope.generation)).collect();
        for chunk in grant.rates {
            process.chunks[chunk.of as usize] = (chunk.chunk, chunk.amount);
        }
    }
}

fn news(rng: &mut Rng, process: &Process, quiet: u32) -> Option<News> {
    let scope = [None, None, Some("a"), Some("b"), Some("c")][rng.usize(..5)].map(str::to_owned);
    let known =
        process.scopes.iter().find(|(name, _)| *name == scope).map_or(0, |(_, generation)| *generation);
    let wait = match rng.u32(..20) {
        0 => rng.u64(300_000..8_000_000),
        1..4 => rng.u64(5000..40_000),
        4..10 => rng.u64(..5000),
        _ => rng.u64(..500),
    };
    let generation = process.generation.saturating_sub(rng.u64(..8) / 6);
    let reason = [PauseReason::Hint, PauseReason::Bare, PauseReason::Depleted][rng.usize(..3)];
    // Most of the time nothing happens, but for what follows on what has happened.
    let follows = !process.scopes.is_empty() && rng.bool();
    Some(match if follows { rng.u32(8..60) } else { rng.u32(..quiet) } {
        0..4 => News::Throttled { generation, calls: rng.u32(1..5), wait },
        4 => News::Overloaded { generation, wait: wait * rng.u64(..2) },
        5..8 => News::Paused { scope, wait, reason },
        8..14 => News::Cleared { scope, generation: known },
        14 => News::Opened { scope, wait: wait + 1, first: rng.u64(1..5000), last: rng.u64(5000..30_000) },
        15..22 => News::Probe { scope, timeout: rng.u64(1..20_000) },
        22..26 => News::Probed { scope, failed: rng.bool() },
        26..32 => News::Closed { scope, generation: known * rng.u64(..2) },
        32..36 => News::Ramped { scope, calls: rng.u64(..100), throttled: rng.u64(..10) },
        36..40 => {
            let of = if rng.bool() { Quantity::Requests } else { Quantity::Tokens };
            News::Quota { of, left: rng.u64(..30_000) }
        }
        _ => return None,
    })
}
