//! Pauses, open breakers and ramps that all share, one entry a scope.

use super::record::DAY;
use crate::PauseReason;
use crate::store::{HolderId, Leave, Opened, ScopeGrant, SharedPause};

/// So many named scopes at most; more are not shared.
const NAMED: usize = 64;
/// What is over is told for so long, so that all learn of it.
const TOLD: u64 = 60_000;
/// A longer pause is probed, at least so far apart, and ends in a ramp.
const LONG: u64 = 5 * 60_000;
/// An end that moves by less is not worth waking anybody.
const SOON: u64 = 50;

/// All scopes of a provider, the oldest first. There is one list, not an order by name: Lua orders text by the
/// server's locale.
#[derive(Clone, Debug, Default)]
pub(super) struct Scopes {
    list: Vec<Scope>,
    /// Generations are numbered over all scopes, so that one that was dropped and comes again has a new one.
    generation: u64,
}

/// One scope.
#[derive(Clone, Debug)]
struct Scope {
    /// Empty: all of the provider.
    name: String,
    generation: u64,
    pause: Option<Pause>,
    open: Option<Open>,
    probe: Option<Probe>,
    calls: u64,
    throttled: u64,
    /// When a pause was cleared, or a breaker closed, last.
    over: u64,
    /// An incident lasts until here: a breaker that opens again before is no new one.
    incident: u64,
    /// It is known until here, though nothing is in force.
    keep: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    until: u64,
    reason: PauseReason,
    /// If it is a long one: when it may be probed, and how far apart.
    probe_at: Option<u64>,
    gap: u64,
    /// How long it is at most, from its beginning.
    began: u64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    since: u64,
    until: u64,
    first: u64,
    last: u64,
    gap: u64,
    probe_at: u64,
    /// Who opened it, and with which version of its grant that is told: until it is known to have seen that.
    by: HolderId,
    version: u64,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    holder: HolderId,
    sent: u64,
    until: u64,
}

impl Scope {
    fn paused(&self, now: u64) -> Option<&Pause> {
        self.pause.as_ref().filter(|pause| now < pause.until)
    }

    fn in_force(&self, now: u64) -> bool {
        self.open.is_some() || self.paused(now).is_some()
    }

    fn probing(&self, now: u64) -> Option<&Probe> {
        self.probe.as_ref().filter(|probe| now < probe.until)
    }

    fn reset_tally(&mut self) {
        (self.calls, self.throttled) = (0, 0);
    }
}

impl Scopes {
    /// What is long over is forgotten. So is a breaker that nobody has probed for a day.
    pub(super) fn forget(&mut self, now: u64) {
        for scope in &mut self.list {
            scope.open = scope.open.filter(|open| now < open.until + DAY);
            if scope.in_force(now) {
                scope.keep = scope.keep.max(now + TOLD);
            } else if let Some(pause) = scope.pause.take() {
                scope.over = scope.over.max(pause.until);
                // A ramp lasts no longer than what was before it.
                let length = pause.until.saturating_sub(pause.began);
                scope.keep = scope.keep.max(pause.until + TOLD.max(length));
            }
        }
        self.list.retain(|scope| now < scope.keep);
    }

    /// In the next life of the book. Who opened a breaker was told in the last one.
    pub(super) fn outlive(mut self) -> Self {
        for open in self.list.iter_mut().filter_map(|scope| scope.open.as_mut()) {
            open.version = 0;
        }
        self
    }

    /// Whether nobody calls at all now.
    pub(super) fn closed(&self, now: u64) -> bool {
        self.root().is_some_and(|root| root.in_force(now))
    }

    /// When the last time ended in which nobody called at all; if that goes on, when it will end at the
    /// earliest.
    pub(super) fn ended(&self) -> u64 {
        self.root().map_or(0, |root| root.pause.map_or(0, |pause| pause.until).max(root.over))
    }

    fn root(&self) -> Option<&Scope> {
        self.list.iter().find(|scope| scope.name.is_empty())
    }

    fn find(&self, name: Option<&str>) -> Option<usize> {
        let name = name.unwrap_or_default();
        self.list.iter().position(|scope| scope.name == name)
    }

    /// The entry of this scope; none if there are too many.
    fn entry(&mut self, name: Option<&str>, now: u64) -> Option<&mut Scope> {
        let at = match self.find(name) {
            Some(at) => at,
            None if name.is_some_and(|name| !name.is_empty())
                && self.list.iter().filter(|scope| !scope.name.is_empty()).count() >= NAMED =>
            {
                return None;
            }
            None => {
                self.list.push(Scope {
                    name: name.unwrap_or_default().to_owned(),
                    generation: 0,
                    pause: None,
                    open: None,
                    probe: None,
                    calls: 0,
                    throttled: 0,
                    over: 0,
                    incident: 0,
                    keep: now + TOLD,
                });
                self.list.len() - 1
            }
        };
        self.list.get_mut(at)
    }

    fn next(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Merged by maximum. Whether all should know at once.
    pub(super) fn pause(&mut self, now: u64, name: Option<&str>, wait: u64, reason: PauseReason) -> bool {
        let wait = wait.min(DAY);
        let until = now + wait;
        let generation = self.generation + 1;
        let Some(scope) = self.entry(name, now) else { return false };
        let before = scope.paused(now).copied();
        let end = before.map_or(now, |pause| pause.until);
        if until <= end {
            return false;
        }
        let mut pause = Pause { until, reason, probe_at: None, gap: 0, began: now };
        if let Some(before) = before {
            pause = Pause { until, reason, ..before };
        }
        if wait > LONG {
            // An earlier long pause keeps its probe: to be extended does not put it off for ever.
            let gap = LONG.max(wait / 20);
            let due = now + gap;
            if pause.probe_at.is_none() {
                scope.reset_tally();
            }
            pause.probe_at = Some(pause.probe_at.filter(|at| *at > now).map_or(due, |at| at.min(due)));
            pause.gap = gap;
        }
        scope.pause = Some(pause);
        scope.generation = generation;
        scope.keep = scope.keep.max(until + TOLD);
        self.generation = generation;
        until > end + SOON
    }

    /// This pause is over. Whether it was this one.
    pub(super) fn clear(&mut self, now: u64, name: Option<&str>, generation: u64) -> bool {
        let Some(at) = self.find(name) else { return false };
        if self.list[at].generation != generation || self.list[at].paused(now).is_none() {
            return false;
        }
        let next = self.next();
        let scope = &mut self.list[at];
        if let Some(pause) = scope.pause.take() {
            // A ramp may follow, no longer than the pause was.
            scope.keep = now + TOLD.max(now.saturating_sub(pause.began));
        }
        (scope.generation, scope.over, scope.probe) = (next, now, None);
        true
    }

    /// A breaker opened. Whether it was closed before. `version` is the one of the grant that tells its holder.
    #[expect(clippy::too_many_arguments, reason = "the fields of the news, and who sends it")]
    pub(super) fn open(
        &mut self,
        now: u64,
        name: Option<&str>,
        wait: u64,
        first: u64,
        last: u64,
        by: HolderId,
        version: u64,
    ) -> bool {
        let generation = self.generation + 1;
        let Some(scope) = self.entry(name, now) else { return false };
        if scope.open.is_some() {
            return false;
        }
        let first = first.min(DAY);
        // One that opens again before its ramp is over is the same trouble: no second alert.
        let version = if now < scope.incident { 0 } else { version };
        scope.open = Some(Open {
            since: now,
            until: now + wait.min(DAY),
            first,
            last: last.min(DAY),
            gap: first,
            probe_at: now + first,
            by,
            version,
        });
        scope.probe = None;
        scope.reset_tally();
        scope.generation = generation;
        scope.keep = scope.keep.max(now + TOLD);
        self.generation = generation;
        true
    }

    /// A breaker closed. Whether it was this opening.
    pub(super) fn close(&mut self, now: u64, name: Option<&str>, generation: u64) -> bool {
        let Some(at) = self.find(name) else { return false };
        let Some(open) = self.list[at].open else { return false };
        if generation != 0 && self.list[at].generation != generation {
            return false;
        }
        let next = self.next();
        let scope = &mut self.list[at];
        let length = now.saturating_sub(open.since);
        (scope.open, scope.probe) = (None, None);
        (scope.generation, scope.over) = (next, now);
        scope.incident = now + length;
        scope.keep = now + TOLD.max(length);
        scope.reset_tally();
        true
    }

    /// Calls while a ramp runs.
    pub(super) fn tally(&mut self, name: Option<&str>, calls: u64, throttled: u64) {
        /// Far below what Lua counts exactly.
        const MOST: u64 = 1 << 40;
        if let Some(at) = self.find(name) {
            let scope = &mut self.list[at];
            scope.calls = scope.calls.saturating_add(calls).min(MOST);
            scope.throttled = scope.throttled.saturating_add(throttled).min(MOST);
        }
    }

    /// Whether this holder may send a probe now: one at a time, and not while something longer forbids it.
    pub(super) fn may_probe(&self, now: u64, name: Option<&str>, holder: HolderId) -> bool {
        let Some(at) = self.find(name) else { return false };
        let scope = &self.list[at];
        if !scope.name.is_empty() {
            let root = self.root().filter(|root| root.in_force(now));
            if root.is_some_and(|root| root.probing(now).is_none_or(|probe| probe.holder != holder)) {
                return false;
            }
        }
        if let Some(probe) = scope.probing(now) {
            // Its own, and it asks again: it was not told.
            return probe.holder == holder;
        }
        let own = scope.paused(now);
        (own.is_some() || scope.open.is_some())
            && own.is_none_or(|pause| pause.probe_at.is_some_and(|at| at <= now))
            && scope.open.is_none_or(|open| open.probe_at <= now)
    }

    /// Lets its probe go.
    pub(super) fn send_probe(&mut self, now: u64, name: Option<&str>, holder: HolderId, timeout: u64) {
        let Some(at) = self.find(name) else { return };
        let scope = &mut self.list[at];
        if scope.probing(now).is_some() {
            return;
        }
        let until = now + timeout.clamp(1, DAY);
        let given_up = scope.probe.replace(Probe { holder, sent: now, until }).is_some();
        if let Some(pause) = scope.pause.as_mut().filter(|pause| now < pause.until) {
            pause.probe_at = Some(now + pause.gap);
        }
        if let Some(open) = &mut scope.open {
            if given_up {
                open.later();
            }
            open.probe_at = now + open.gap;
        }
    }

    /// The probe is over, and what it was about is not.
    pub(super) fn probed(&mut self, now: u64, name: Option<&str>, holder: HolderId, failed: bool) {
        let Some(at) = self.find(name) else { return };
        let scope = &mut self.list[at];
        let Some(probe) = scope.probe.take_if(|probe| probe.holder == holder) else { return };
        if let Some(open) = &mut scope.open {
            if failed {
                open.later();
                open.probe_at = now + open.gap;
            } else {
                // Nothing was learned, and the next need not wait for longer than the first did.
                open.probe_at = open.probe_at.min(probe.sent + open.first);
            }
        }
    }

    /// It leaves: another may send its probes.
    pub(super) fn leave(&mut self, holder: HolderId) {
        for scope in &mut self.list {
            scope.probe.take_if(|probe| probe.holder == holder);
        }
    }

    /// What a holder is told: everything that is known. `asked`: the scopes that it wants to probe; `known`: the
    /// version of the grant that it has seen.
    pub(super) fn told(
        &self,
        now: u64,
        holder: HolderId,
        known: u64,
        asked: &[Option<&str>],
    ) -> Vec<ScopeGrant> {
        let tell = |scope: &Scope| {
            let name = Some(scope.name.as_str()).filter(|name| !name.is_empty());
            let leave = scope
                .probing(now)
                .filter(|probe| probe.holder == holder)
                .filter(|_| asked.iter().any(|asked| asked.unwrap_or_default() == scope.name))
                .map(|probe| Leave { within: probe.until - now });
            ScopeGrant {
                scope: name.map(str::to_owned),
                generation: scope.generation,
                pause: scope
                    .paused(now)
                    .map(|pause| SharedPause { wait: pause.until - now, reason: pause.reason }),
                open: scope.open.map(|open| Opened {
                    wait: open.until.saturating_sub(now),
                    since: now.saturating_sub(open.since),
                    first: open.first,
                    last: open.last,
                    yours: open.by == holder && known < open.version,
                }),
                leave,
                calls: scope.calls,
                throttled: scope.throttled,
            }
        };
        self.list.iter().map(tell).collect()
    }
}

impl Open {
    /// It is dead still: asked ever more rarely. The members add as much again at most, so that half of the
    /// longest time is the most here.
    fn later(&mut self) {
        self.gap = self.gap.saturating_mul(2).min((self.last / 2).max(self.gap));
    }
}
