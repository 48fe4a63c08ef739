//! The ceiling over all processes: one cut for what was admitted under one generation, back quickly to just
//! under the last good limit, and above it rarely.
//!
//! It is the policy of one process ([`FleetLimitLayer`](crate::FleetLimitLayer)) on what a store can know: sums,
//! about a second old, and a news of each refusal.

use super::record::{DAY, MOST};

/// Probes above the limit are so many times the cost of the last one apart,
const APART: u64 = 20;
/// but no more than this, unless one plain such time is longer.
const APART_MOST: u64 = 600_000;
/// A refusal costs that at least.
const COST: u64 = 1000;
/// A ceiling that is not in doubt is reached in this time after a pause.
const SETTLE: u64 = 600;
/// One that is in doubt doubles in this time.
const DOUBLE: u64 = 1000;
/// What was not refused for so long is good.
const GOOD: u64 = 1000;
/// A good reply to an unlearned ceiling is worth so many slots more.
const GROW: u64 = 3;

#[derive(Clone, Debug)]
pub(super) struct Control {
    floor: u32,
    /// The configured ceiling.
    configured: Option<u32>,
    /// None: unlearned, and `cap` is in force.
    limit: Option<u32>,
    cap: u32,
    pub(super) generation: u64,
    release: Option<Release>,
    event: Event,
    probe: Probe,
    /// In force at the last exchange.
    last: u32,
    high: High,
}

/// What was in flight at most since the last time that calls were refused.
#[derive(Clone, Copy, Debug, Default)]
struct High {
    /// Until a while ago: it was not refused, so it was good.
    proven: u64,
    now: u64,
    since: u64,
}

/// The way back after a pause or a cut.
#[derive(Clone, Copy, Debug)]
struct Release {
    /// Not before: when it was set.
    since: u64,
    /// When it began; none: there is a pause still.
    from: Option<u64>,
    /// Where it begins; none: with what is in service then.
    base: Option<u32>,
    /// Nobody knows how much of the limit is left.
    doubt: bool,
}

/// The last time calls were refused for flow control.
#[derive(Clone, Copy, Debug, Default)]
struct Event {
    /// In flight then, over all, and the ceiling.
    base: u64,
    before: u32,
    /// Refused of them, as far as is known.
    calls: u64,
    /// So many of them were above the limit: a probe.
    spare: u64,
    /// What had been good until then.
    proven: u64,
    cost: u64,
}

/// Looking above the limit.
#[derive(Clone, Copy, Debug)]
struct Probe {
    step: u32,
    /// The last event, and how long after its pause.
    at: u64,
    gap: u64,
    misses: u32,
    /// Slots above the limit were given out.
    out: bool,
    /// Calls above the limit were seen to be in flight, since then; so many; and good replies in that time.
    since: Option<u64>,
    peak: u64,
    good: u64,
}

impl Default for Probe {
    fn default() -> Self {
        Probe { step: 1, at: 0, gap: 0, misses: 0, out: false, since: None, peak: 0, good: 0 }
    }
}

/// What all members together told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) charge: u64,
    pub(super) need: u64,
    /// In flight, as far as can be known.
    pub(super) busy: u64,
    /// Wanting for a slot.
    pub(super) lack: u64,
}

impl Control {
    pub(super) fn new(start: u32) -> Self {
        let cap = start.clamp(1, MOST);
        Control {
            floor: 1,
            configured: None,
            limit: None,
            cap,
            generation: 1,
            release: None,
            event: Event::default(),
            probe: Probe::default(),
            last: cap,
            high: High::default(),
        }
    }

    /// The ceiling, pauses and probes aside.
    pub(super) fn full(&self) -> u32 {
        self.limit.unwrap_or(self.cap)
    }

    fn most(&self) -> u32 {
        self.configured.unwrap_or(MOST)
    }

    /// What members were configured with. Another maximum is taken at its word.
    pub(super) fn configure(&mut self, floor: u32, ceiling: Option<u32>) {
        let ceiling = ceiling.map(|ceiling| ceiling.min(MOST));
        self.floor = floor.clamp(1, MOST);
        self.cap = self.cap.max(self.floor);
        if ceiling != self.configured {
            self.configured = ceiling;
            self.generation += 1;
            if let Some(ceiling) = ceiling {
                self.limit = Some(ceiling);
                self.probe = Probe::default();
                if let Some(release) = &mut self.release {
                    release.doubt = false;
                }
            }
        }
        if let Some(limit) = self.limit {
            self.limit = Some(limit.max(self.floor).min(self.most()));
        }
    }

    /// Calls were refused for flow control. `busy` is what all have in flight, without these.
    pub(super) fn throttled(&mut self, now: u64, generation: u64, calls: u64, wait: u64, busy: u64) {
        let cost = wait.clamp(COST, DAY);
        let calls = calls.max(1);
        if generation >= self.generation {
            let probing = self.probe.out || self.probe.since.is_some();
            let spare = if probing { self.probe.step.into() } else { 0 };
            let before = self.full().min(self.last);
            let proven = self.high.proven;
            self.high = High { since: now, ..High::default() };
            self.event = Event { base: busy + calls, before, calls: 0, spare, proven, cost };
            self.generation += 1;
            let misses = if probing { self.probe.misses.saturating_add(1).min(10) } else { 0 };
            self.probe = Probe { at: now, misses, ..Probe::default() };
            self.restart(now, false);
        }
        let event = &mut self.event;
        event.calls += calls;
        event.cost = event.cost.max(cost);
        if event.calls > event.spare {
            // More were refused than there were above the limit: it has fallen.
            let served = event.base.saturating_sub(event.calls);
            let served = u32::try_from(served).unwrap_or(MOST).min(event.before).min(self.full());
            self.limit = Some(served.max(self.floor).min(self.most()));
            self.probe.misses = 0;
            // On the way up, where it had not been for long: that is the limit. Where so many were served before,
            // it has fallen, and nobody knows how far.
            let fallen = u64::from(served) <= self.event.proven + self.event.proven / 4;
            if let Some(release) = &mut self.release {
                release.doubt = fallen;
            }
        }
        let plain = APART * self.event.cost;
        self.probe.gap = (plain << self.probe.misses).min(APART_MOST.max(plain));
    }

    /// The provider is overloaded: a cut by a quarter, once for what was admitted under one generation.
    pub(super) fn overloaded(&mut self, now: u64, generation: u64, wait: u64) {
        if generation < self.generation {
            return;
        }
        self.generation += 1;
        self.probe = Probe { at: now, gap: APART * wait.clamp(COST, DAY), ..Probe::default() };
        self.restart(now, true);
        if let Some(release) = &mut self.release {
            release.base = Some((self.last - self.last / 4).max(self.floor));
        }
    }

    fn restart(&mut self, now: u64, doubt: bool) {
        let doubt = doubt || self.release.is_some_and(|release| release.doubt);
        self.release = Some(Release { since: now, from: None, base: None, doubt });
    }

    /// Moves on with time and with what members told. `closed`: nobody calls now; `ended`: when that was last.
    pub(super) fn settle(&mut self, now: u64, closed: bool, ended: u64, sums: Sums, served: u64) {
        let busy = u32::try_from(sums.busy).unwrap_or(MOST).min(MOST);
        if closed {
            let unlearned = self.limit.is_none();
            match &mut self.release {
                Some(release) if release.from.is_some() => {
                    *release = Release { since: now, from: None, base: None, doubt: release.doubt };
                }
                Some(_) => {}
                None => self.restart(now, unlearned),
            }
            (self.probe.out, self.probe.since) = (false, None);
            return;
        }
        let full = self.full();
        if let Some(release) = &mut self.release {
            if release.from.is_none() {
                release.from = Some(release.since.max(ended).min(now));
                let least = if release.doubt { 1 } else { full / 6 };
                release.base.get_or_insert(busy.max(least).max(1));
            }
            if self.ramp(now) >= full {
                self.release = None;
            }
        }
        if self.limit.is_none() && self.release.is_none() && served > 0 && sums.need >= self.cap.into() {
            let grown = u64::from(self.cap) + GROW * served;
            self.cap = u32::try_from(grown).unwrap_or(MOST).min(MOST);
        }
        self.settle_probe(now, sums, served);
    }

    fn settle_probe(&mut self, now: u64, sums: Sums, served: u64) {
        if now >= self.high.since + GOOD {
            (self.high.proven, self.high.since) = (self.high.now, now);
        }
        self.high.now = self.high.now.max(sums.busy);
        let Some(limit) = self.limit else { return };
        let probe = &mut self.probe;
        if sums.busy > limit.into() && probe.out && probe.since.is_none() {
            (probe.since, probe.peak, probe.good) = (Some(now), 0, 0);
        } else if probe.since.is_some() {
            probe.good += served;
        }
        let Some(since) = probe.since else {
            probe.out &= sums.charge > limit.into();
            return;
        };
        probe.peak = probe.peak.max(sums.busy);
        if now >= since + GOOD && probe.good >= 2 {
            // So many were served at once, and not one was refused.
            let next = limit.saturating_add(probe.step);
            let proven = u32::try_from(probe.peak).unwrap_or(MOST).min(next);
            let step = if proven == next { (probe.step * 2).min(limit / 2 + 1) } else { probe.step };
            self.probe = Probe { step, at: now, ..Probe::default() };
            self.limit = Some(proven.max(limit).min(self.most()));
        }
    }

    /// Where the way back has come to; the limit if there is none.
    fn ramp(&self, now: u64) -> u32 {
        let full = self.full();
        let Some(release) = self.release else { return full };
        let (Some(from), Some(base)) = (release.from, release.base) else { return full };
        let passed = now.saturating_sub(from);
        let (full, base) = (u64::from(full), u64::from(base.min(full)));
        let at = if release.doubt {
            // Doubles each second; between, a straight line: whole numbers are the same everywhere.
            let doubled = (base.max(1) << (passed / DOUBLE).min(20)) * (DOUBLE + passed % DOUBLE) / DOUBLE;
            if passed / DOUBLE >= 20 { full } else { doubled }
        } else {
            base + (full - base) * passed.min(SETTLE) / SETTLE
        };
        u32::try_from(at.min(full)).unwrap_or(MOST)
    }

    /// The ceiling in force.
    pub(super) fn in_force(&mut self, now: u64, closed: bool, ended: u64, sums: Sums) -> u32 {
        let full = self.full();
        let busy = u32::try_from(sums.busy).unwrap_or(MOST).min(MOST);
        self.last = match self.release {
            // With how much it would begin if the pause ended now: what is above may be given back already.
            Some(release) if release.from.is_none() && closed => {
                let least = if release.doubt { 1 } else { full / 6 };
                release.base.unwrap_or_else(|| busy.max(least).max(1)).min(full)
            }
            Some(_) => self.ramp(now),
            None if self.looks_above(now, ended, sums) => {
                full.saturating_add(self.probe.step).min(self.most())
            }
            None => full,
        };
        self.last
    }

    fn looks_above(&self, now: u64, ended: u64, sums: Sums) -> bool {
        let due = now >= self.probe.at.max(ended).saturating_add(self.probe.gap);
        self.limit.is_some_and(|limit| {
            limit < self.most() && (self.probe.since.is_some() || due && sums.need > limit.into())
        })
    }

    /// So many slots are given out, after an exchange.
    pub(super) fn gave(&mut self, charge: u64) {
        if self.limit.is_some_and(|limit| charge > limit.into() && self.last > limit) {
            self.probe.out = true;
        }
    }

    /// When the ceiling in force will be so many more; none: not by time alone.
    pub(super) fn again(&self, now: u64, more: u64) -> Option<u64> {
        let release = self.release?;
        let (from, base) = (release.from?, u64::from(release.base?.min(self.full())));
        let wanted = u64::from(self.ramp(now)) + more;
        let full = u64::from(self.full());
        if wanted > full {
            return None;
        }
        let at = if release.doubt {
            let base = base.max(1);
            let doublings = (0..20).take_while(|n| base << (n + 1) <= wanted).count() as u64;
            doublings * DOUBLE + (wanted * DOUBLE).div_ceil(base << doublings) - DOUBLE
        } else {
            ((wanted - base) * SETTLE).div_ceil((full - base).max(1))
        };
        Some((from + at).saturating_sub(now))
    }
}
