//! What one process holds of one provider: pure, fed with instants of the lease's clock.
//!
//! The rules, and what each of them is for, are in the documentation of [the module](super): bind to less
//! first and tell then; never hold more by a reply that is not new; count a lease from before its report was
//! sent.

use super::{Epoch, FleetSettings, Grant, HolderId, News, Outage, Report, StoreErrorKind, settings::millis};
use crate::{
    Time,
    random::{Random, Seeds},
};
use std::{collections::VecDeque, time::Duration};

/// A slot that was given is kept for at least so long, however short calls are: or it would only travel.
const TENURE: Duration = Duration::from_millis(250);
/// Between two reports at the least.
const APART: Duration = Duration::from_millis(2);
/// Who needs more asks within this time.
const SOON: Duration = Duration::from_millis(20);
/// Who lacks slots and was told that there are none asks again so much later, give or take a half: wake-ups
/// carry the rest.
const POLL: Duration = Duration::from_millis(650);
/// The most reports at once; over time it is two a second.
const BURST: u32 = 8;
const EVERY: Duration = Duration::from_millis(500);
/// Where leases are renewed more often than once a second, these two times are so much of a renewal: who is heard of
/// less often than its renewals come is taken for silent.
const POLL_PART: (u32, u32) = (13, 20);
const EVERY_PART: (u32, u32) = (1, 2);
/// For so long the most that was needed is remembered.
const LATELY: Duration = Duration::from_secs(3);
/// Lives of the book that are over.
const DEAD: usize = 32;
/// Reports that are left out at most, where two processes may have one name.
const AHEAD: u64 = 16;
/// News that could not be told are kept up to this many; the oldest go first.
const NEWS: usize = 256;

/// What is in the gate of a provider, and who waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) cap: u32,
    pub(crate) busy: u32,
    pub(crate) waiting: u32,
}

impl Load {
    fn need(&self) -> u32 {
        self.busy.saturating_add(self.waiting)
    }
}

/// What a process binds itself to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bond {
    pub(crate) cap: u32,
    /// It falls to this as calls end.
    pub(crate) shed: Option<u32>,
}

/// How a process stands with its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseState {
    /// It has not been answered yet.
    Joining,
    /// It holds a lease.
    Held,
    /// The store is new, or was silent: what is held is held, nobody is given more.
    Learning,
    /// The lease has run out unrenewed: the [`Outage`] policy is in force.
    Lost,
}

/// Something to be told until it was heard.
#[derive(Debug)]
struct Told {
    news: News,
    /// When it happened.
    at: Time,
    /// The report that told it first.
    by: Option<u64>,
}

impl Told {
    /// As it is to be told now: what is left of a wait.
    fn news(&self, now: Time) -> News {
        let passed = millis(now.saturating_since(self.at));
        let mut news = self.news.clone();
        if let News::Paused { wait, .. } | News::Opened { wait, .. } = &mut news {
            *wait = wait.saturating_sub(passed);
        }
        news
    }
}

#[derive(Debug)]
pub(crate) struct Lease {
    me: HolderId,
    settings: FleetSettings,
    random: Random,
    seq: u64,
    /// Under way: its number, and when it was sent.
    sent: Option<(u64, Time)>,
    epoch: Option<Epoch>,
    dead: VecDeque<Epoch>,
    version: u64,
    /// Until when what is held may be used.
    use_by: Time,
    lapsed: bool,
    /// It has left the fleet, and admits nothing whatever the policy says.
    left: bool,
    safe: u32,
    /// Until when `safe` may be.
    safe_until: Time,
    target: u32,
    contended: bool,
    turns: bool,
    /// Nobody calls: the end of each call is news, since all begin from what is in service when that is over.
    drains: bool,
    learning: bool,
    /// What was told of `need` last, and of what is held.
    told: u32,
    told_held: u32,
    /// All that this process may have for now it has.
    satisfied: bool,
    given_at: Time,
    peaks: VecDeque<(Time, u32)>,
    renew_at: Time,
    poll_at: Time,
    again_at: Option<Time>,
    last_send: Time,
    /// It is to be sent at once.
    urgent: bool,
    allowance: u32,
    allowed_at: Time,
    news: VecDeque<Told>,
    failures: u32,
    /// What was wrong the last time, while the store does not answer.
    pub(crate) last_error: Option<StoreErrorKind>,
    pub(crate) members: u32,
    pub(crate) weights: u64,
    pub(crate) ceiling: u32,
    pub(crate) exchanges: u64,
    pub(crate) errors: u64,
}

impl Lease {
    pub(crate) fn new(me: HolderId, settings: FleetSettings, mut random: Random, now: Time) -> Self {
        let first = now.saturating_add(random.up_to(SOON));
        Lease {
            me,
            settings,
            random,
            seq: 0,
            sent: None,
            epoch: None,
            dead: VecDeque::new(),
            version: 0,
            use_by: Time::ZERO,
            lapsed: true,
            left: false,
            safe: 0,
            safe_until: Time::ZERO,
            target: 0,
            contended: false,
            turns: false,
            drains: false,
            learning: false,
            told: 0,
            told_held: 0,
            satisfied: false,
            given_at: Time::ZERO,
            peaks: VecDeque::new(),
            renew_at: first,
            poll_at: first,
            again_at: None,
            last_send: Time::ZERO,
            urgent: false,
            allowance: BURST,
            allowed_at: now,
            news: VecDeque::new(),
            failures: 0,
            last_error: None,
            members: 1,
            weights: 1,
            ceiling: 0,
            exchanges: 0,
            errors: 0,
        }
    }

    pub(crate) fn settings(&self) -> &FleetSettings {
        &self.settings
    }

    pub(crate) fn state(&self, now: Time) -> LeaseState {
        match self.epoch {
            _ if now < self.use_by && self.learning => LeaseState::Learning,
            _ if now < self.use_by => LeaseState::Held,
            None => LeaseState::Joining,
            Some(_) => LeaseState::Lost,
        }
    }

    /// From when on [`lapse`](Self::lapse) has to be asked before a call is admitted.
    pub(crate) fn use_by(&self) -> Time {
        match (self.lapsed, self.settings.outage) {
            _ if self.left => Time::MAX,
            (false, _) => self.use_by,
            (true, Outage::Local(_)) => Time::MAX,
            (true, _) if self.safe > 0 => self.safe_until,
            (true, _) => Time::MAX,
        }
    }

    /// What it is bound to now that its lease has run out; none if it has not.
    pub(crate) fn lapse(&mut self, now: Time, load: Load) -> Option<Bond> {
        if now < self.use_by {
            return None;
        }
        self.lapsed = true;
        let cap = match self.settings.outage {
            _ if self.left => 0,
            // (A process that was never answered has a share of nothing.)
            Outage::Local(slots) => slots,
            Outage::Keep(_) if now < self.safe_until => load.cap.min(self.safe),
            Outage::Keep(_) | Outage::Stop => {
                self.safe = 0;
                0
            }
        };
        Some(Bond { cap, shed: None })
    }

    /// It leaves the fleet: nothing is admitted from here on.
    pub(crate) fn leave(&mut self) -> Bond {
        self.left = true;
        Bond { cap: 0, shed: None }
    }

    /// Whether it was ever answered.
    pub(crate) fn was_held(&self) -> bool {
        self.epoch.is_some()
    }

    pub(crate) fn is_lapsed(&self) -> bool {
        self.lapsed
    }

    /// More is needed than is held, a slot was shed, or others must know of something.
    pub(crate) fn hurry(&mut self) {
        self.urgent = true;
    }

    /// Tells the others with the next report. Those that nobody can wait for go at once.
    pub(crate) fn tell(&mut self, now: Time, news: News) {
        let urgent = !matches!(news, News::Ramped { .. } | News::Quota { .. });
        match (&news, self.news.back_mut()) {
            // Many refusals of one event are one piece of news.
            (
                News::Throttled { generation, calls, wait },
                Some(Told { news: News::Throttled { generation: g, calls: c, wait: w }, by: None, .. }),
            ) if g == generation => {
                *c = c.saturating_add(*calls);
                *w = (*w).max(*wait);
            }
            _ => {
                if self.news.len() >= NEWS {
                    self.news.pop_front();
                }
                self.news.push_back(Told { news, at: now, by: None });
            }
        }
        self.urgent |= urgent;
    }

    /// When the next report is to be sent. None while one is under way.
    pub(crate) fn due(&mut self, now: Time, load: Load) -> Option<Time> {
        if self.sent.is_some() {
            return None;
        }
        let need = load.need();
        let lacks = need > load.cap && !(self.lapsed && self.failures > 0);
        let mut at = self.renew_at;
        if lacks {
            let again = self.again_at.unwrap_or(self.poll_at).min(self.poll_at);
            let soon = self.last_send.saturating_add(SOON);
            at = at.min(if self.satisfied || need <= self.told { again } else { soon.min(again) });
        }
        if self.urgent {
            at = now;
        }
        if let Some(tenure) = self.shed_at(load) {
            at = at.min(tenure);
        }
        self.refill(now);
        if self.allowance == 0 {
            at = at.max(self.allowed_at.saturating_add(self.at_most(EVERY, EVERY_PART)));
        }
        Some(at.max(self.last_send.saturating_add(APART)))
    }

    /// When slots that others need are to be given back, if that is still to come.
    fn shed_at(&self, load: Load) -> Option<Time> {
        let least = if self.turns { 0 } else { self.target };
        let sheds = (self.contended || self.turns) && load.cap > least.max(load.busy);
        sheds.then(|| self.given_at.saturating_add(TENURE))
    }

    /// This time, or so much of a renewal, if that is shorter.
    fn at_most(&self, time: Duration, (part, of): (u32, u32)) -> Duration {
        time.min(self.settings.renew.saturating_mul(part) / of)
    }

    fn refill(&mut self, now: Time) {
        let every = self.at_most(EVERY, EVERY_PART);
        let steps = now.saturating_since(self.allowed_at).as_nanos() / every.as_nanos();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        if steps > 0 {
            self.allowance = self.allowance.saturating_add(steps).min(BURST);
            self.allowed_at = self.allowed_at.saturating_add(every.saturating_mul(steps));
            if self.allowance == BURST {
                self.allowed_at = now;
            }
        }
    }

    /// What it binds itself to before it says what it holds.
    pub(crate) fn bind(&mut self, now: Time, load: Load, paused: bool, leave: bool) -> Bond {
        let paused = paused && !leave;
        let need = load.need();
        self.peaks.retain(|(at, _)| now.saturating_since(*at) < LATELY);
        self.peaks.push_back((now, need));
        let keep = match (paused, self.contended) {
            // After a pause all begin from what is in service.
            (true, _) => load.busy,
            (false, true) if self.tenured(now) => need.min(self.target),
            (false, true) => need,
            (false, false) => self.headroom(),
        };
        // A probe needs a slot, whatever its target: it is the only call there is.
        let keep = if leave { keep.max(load.busy.saturating_add(1)) } else { keep };
        let cap = if self.lapsed { load.cap } else { load.cap.min(keep.max(load.busy)) };
        self.drains = paused;
        Bond { cap, shed: self.shed(now) }
    }

    fn tenured(&self, now: Time) -> bool {
        now >= self.given_at.saturating_add(TENURE)
    }

    fn shed(&self, now: Time) -> Option<u32> {
        if self.drains && !self.lapsed {
            return Some(0);
        }
        // Where there are fewer slots than members somebody waits for each of them, though it has no target yet.
        if self.lapsed || !(self.contended || self.turns) || !self.tenured(now) {
            return None;
        }
        Some(if self.turns { 0 } else { self.target })
    }

    fn headroom(&self) -> u32 {
        let peak = self.peaks.iter().map(|(_, need)| *need).max().unwrap_or_default();
        peak.saturating_add(1)
    }

    /// The report of a process that is bound as `load` says: the caller fills in limits, rates and counts.
    pub(crate) fn report(&mut self, now: Time, load: Load, offer: Epoch) -> Report {
        self.seq += 1;
        self.refill(now);
        self.allowance = self.allowance.saturating_sub(1);
        self.sent = Some((self.seq, now));
        self.last_send = now;
        self.urgent = false;
        self.again_at = None;
        let renew = self.settings.renew;
        let early = self.random.up_to(renew / 5);
        self.renew_at = now.saturating_add(renew.saturating_mul(11) / 10).saturating_sub(early);
        let poll = self.at_most(POLL, POLL_PART);
        self.poll_at = now.saturating_add(poll / 2).saturating_add(self.random.up_to(poll));
        let need = load.need();
        (self.told, self.told_held) = (need, load.cap.max(load.busy));
        let (seq, headroom) = (self.seq, self.headroom());
        let news = self.news.iter_mut().map(|told| {
            told.by.get_or_insert(seq);
            told.news(now)
        });
        Report {
            label: self.settings.label.clone(),
            seq,
            epoch: self.epoch,
            version: self.version,
            held: self.told_held,
            busy: load.busy,
            need,
            headroom,
            weight: self.settings.weight,
            terms: self.settings.terms(),
            news: news.collect(),
            ..Report::new(self.me, offer)
        }
    }

    /// The answer to the report under way. What it is bound to then; none: as before. Whether the rest of the
    /// grant is to be taken in.
    pub(crate) fn granted(&mut self, now: Time, load: Load, grant: &Grant) -> (Option<Bond>, bool) {
        let Some((seq, sent)) = self.sent.take() else { return (None, false) };
        self.exchanges += 1;
        (self.failures, self.last_error) = (0, None);
        if grant.before > seq || grant.before == seq && self.epoch.is_none() {
            return (Some(self.begin_anew()), false);
        }
        if grant.before == seq {
            // It came twice, or another process is just as far: then one of the two gets ahead, and both are found out.
            self.seq += 1 + self.random.bits() % AHEAD;
        }
        if self.dead.contains(&grant.epoch) {
            if grant.stale || now < self.use_by {
                return (None, false);
            }
            // Nothing is held by the life that followed it, which is lost too: an old copy is the book now.
            self.dead.retain(|dead| *dead != grant.epoch);
        }
        if !grant.stale {
            // The store has seen all up to here.
            self.news.retain(|told| told.by.is_none_or(|by| by > seq));
        }
        if grant.stale && (self.epoch != Some(grant.epoch) || now >= self.use_by) {
            // It is no renewal: it neither begins a new life of the book, nor gives anything to who has no lease.
            return (None, false);
        }
        let lease = sent.saturating_add(self.settings.lease());
        let mut cap = if now >= self.use_by { load.cap.min(load.busy) } else { load.cap };
        if self.epoch != Some(grant.epoch) {
            let first = self.epoch.is_none();
            if let Some(old) = self.epoch.replace(grant.epoch) {
                self.dead.push_back(old);
                if self.dead.len() > DEAD {
                    self.dead.pop_front();
                }
            }
            self.version = grant.version;
            cap = if first || grant.learning == 0 { grant.slots } else { cap.min(grant.slots) };
        } else if grant.version > self.version {
            self.version = grant.version;
            cap = grant.slots;
        } else if grant.version == self.version {
            cap = cap.min(grant.slots);
        } else {
            return (None, false);
        }
        if grant.stale {
            return (Some(Bond { cap, shed: self.shed(now) }), false);
        }
        if cap > load.cap {
            self.given_at = now;
        }
        self.use_by = self.use_by.max(lease);
        self.lapsed = now >= self.use_by;
        self.safe = grant.safe;
        self.safe_until = lease.saturating_add(self.settings.grace);
        (self.target, self.contended, self.turns) = (grant.target, grant.contended, grant.turns);
        self.drains = grant.closed() && !grant.leaves();
        self.learning = grant.learning > 0;
        self.satisfied = grant.target <= grant.slots && grant.target < self.told;
        self.again_at = grant.again.map(|wait| now.saturating_add(Duration::from_millis(wait)));
        (self.members, self.weights) = (grant.members.max(1), grant.weights.max(1));
        self.ceiling = grant.ceiling;
        if self.lapsed {
            // It took so long that it is worth nothing.
            return (self.lapse(now, load), true);
        }
        if self.contended && self.tenured(now) {
            cap = cap.min(self.target.max(load.busy));
        }
        // What was told to be held, and is not any more, is others': they should not wait for a renewal.
        let gives = self.told_held > cap.max(load.busy);
        self.urgent |= (self.contended || self.turns) && gives;
        (Some(Bond { cap, shed: self.shed(now) }), true)
    }

    /// The store has heard more in this process's name than it ever said: there is another with the same name, a fork
    /// of it, or a copy of its machine's memory. What was held in that name is the other's; this one takes a new
    /// name, and has nothing until it is given something.
    #[cold]
    fn begin_anew(&mut self) -> Bond {
        // A copy has a copy of the generator too.
        if self.settings.has_own_thread() {
            self.random = Seeds::from_entropy().session();
        }
        self.me = HolderId(u128::from(self.random.bits()) << 64 | u128::from(self.random.bits()));
        (self.seq, self.epoch, self.version) = (0, None, 0);
        (self.use_by, self.lapsed) = (Time::ZERO, true);
        (self.safe, self.safe_until) = (0, Time::ZERO);
        (self.target, self.contended, self.learning) = (0, false, false);
        for told in &mut self.news {
            told.by = None;
        }
        self.urgent = true;
        Bond { cap: 0, shed: None }
    }

    /// The report under way came to nothing, as far as one can tell.
    pub(crate) fn failed(&mut self, now: Time) {
        self.sent = None;
        self.errors += 1;
        self.failures = self.failures.saturating_add(1);
        // Who is about to lose the lease asks in time; who has lost it need not ask often.
        let exponent = self.failures.min(4).saturating_sub(1);
        let wait = (self.settings.renew / 4).saturating_mul(1 << exponent).min(self.settings.renew);
        let wait = wait.saturating_add(self.random.up_to(wait / 2));
        self.renew_at = now.saturating_add(wait);
        self.poll_at = self.renew_at;
        self.urgent = false;
    }

    /// The store could not be asked; whether that begins here.
    pub(crate) fn outage(&mut self, error: StoreErrorKind) -> bool {
        self.last_error.replace(error).is_none()
    }

    pub(crate) fn holder(&self) -> HolderId {
        self.me
    }

    /// Whether something like this is still to be told, or its telling was not confirmed.
    pub(crate) fn knows_of(&self, is: impl Fn(&News) -> bool) -> bool {
        self.news.iter().any(|told| is(&told.news))
    }

    /// Whether its slots may have been given to others by now.
    pub(crate) fn is_reclaimed(&self, now: Time) -> bool {
        let settings = &self.settings;
        // (By the store's clock that is a little later; this is the careful side.)
        let after = settings.longest_call().saturating_add(settings.margin());
        self.use_by > Time::ZERO && now >= self.use_by.saturating_add(after)
    }

    /// Slots that it may go on with in spite of that.
    pub(crate) fn safe(&self, now: Time) -> u32 {
        if now < self.safe_until { self.safe } else { 0 }
    }

    /// What is told of the rate in an outage: its share of `per_minute`.
    pub(crate) fn share(&self, per_minute: u64) -> u64 {
        (per_minute.saturating_mul(u64::from(self.settings.weight)) / self.weights.max(1)).max(1)
    }

    /// How long its lease lasts without another renewal.
    pub(crate) fn left(&self, now: Time) -> Duration {
        self.use_by.saturating_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Time {
        Time::from_nanos((1_000_000 + ms) * 1_000_000)
    }

    fn lease(settings: FleetSettings) -> Lease {
        Lease::new(HolderId(7), settings, Seeds::from_seed(1).session(), at(0))
    }

    fn load(cap: u32, busy: u32, waiting: u32) -> Load {
        Load { cap, busy, waiting }
    }

    fn grant(epoch: u64, version: u64, slots: u32) -> Grant {
        Grant {
            epoch: Epoch(epoch),
            version,
            slots,
            safe: 0,
            target: slots,
            contended: false,
            turns: false,
            stale: false,
            before: 0,
            learning: 0,
            again: None,
            members: 2,
            weights: 2,
            queued: 0,
            ceiling: 10,
            generation: 1,
            disagree: false,
            scopes: Vec::new(),
            rates: Vec::new(),
        }
    }

    /// One that was answered by these lives of the book, with this version.
    fn lease_of(answers: &[(u64, u64)]) -> Lease {
        let mut lease = lease(FleetSettings::new());
        for (epoch, version) in answers {
            exchange(&mut lease, 10 * version, load(0, 0, 1), &grant(*epoch, *version, 1));
        }
        lease
    }

    /// One exchange: what it is bound to after it.
    fn exchange(lease: &mut Lease, ms: u64, load: Load, grant: &Grant) -> u32 {
        lease.report(at(ms), load, Epoch(99));
        lease.granted(at(ms + 1), load, grant).0.map_or(load.cap, |bond| bond.cap)
    }

    // inngest/inngest#3733, #3814: a late or doubled answer changes nothing for the worse of others.
    #[test]
    fn only_a_new_version_raises_what_is_held() {
        let mut lease = lease(FleetSettings::new());
        assert_eq!(exchange(&mut lease, 0, load(0, 0, 3), &grant(1, 5, 3)), 3);
        assert_eq!(exchange(&mut lease, 10, load(2, 2, 1), &grant(1, 5, 3)), 2, "given back meanwhile");
        assert_eq!(exchange(&mut lease, 20, load(2, 2, 1), &grant(1, 4, 9)), 2, "an older one");
        assert_eq!(exchange(&mut lease, 30, load(2, 2, 1), &grant(1, 6, 4)), 4);
        // Another life of the book; then one of the dead one.
        assert_eq!(exchange(&mut lease, 40, load(4, 2, 1), &Grant { learning: 9000, ..grant(2, 1, 9) }), 4);
        assert_eq!(exchange(&mut lease, 50, load(4, 2, 1), &grant(1, 70, 9)), 4);
        assert_eq!(exchange(&mut lease, 60, load(4, 2, 1), &grant(2, 2, 5)), 5);
        // Once nothing is held any more, an old copy that came back is a book like any other.
        let mut lost = lease_of(&[(1, 1), (2, 2)]);
        assert_eq!(exchange(&mut lost, 9000, load(0, 0, 1), &grant(1, 3, 4)), 4);
        assert_eq!(exchange(&mut lease, 70, load(5, 2, 1), &Grant { stale: true, ..grant(2, 9, 9) }), 9);
    }

    // Of two with one name, the one that the store has heard less of takes another, and holds nothing until it is
    // given something. A report that came twice is no other process.
    #[test]
    fn two_with_one_name_become_two() {
        let mut new = lease(FleetSettings::new());
        let mut lease = lease(FleetSettings::new());
        assert_eq!(exchange(&mut lease, 0, load(0, 0, 3), &grant(1, 5, 3)), 3);
        let twice = Grant { stale: true, before: 2, ..grant(1, 5, 3) };
        assert_eq!(exchange(&mut lease, 10, load(3, 2, 1), &twice), 3);
        assert!(lease.seq > 2 && lease.holder() == HolderId(7));
        lease.tell(at(0), News::Cleared { scope: None, generation: 1 });
        let others = Grant { stale: true, before: 100, ..grant(1, 6, 9) };
        assert_eq!(exchange(&mut lease, 20, load(3, 2, 1), &others), 0);
        assert_eq!(lease.state(at(22)), LeaseState::Joining);
        assert!(lease.holder() != HolderId(7));
        let report = lease.report(at(30), load(0, 2, 1), Epoch(99));
        assert_eq!((report.holder, report.seq, report.epoch), (lease.holder(), 1, None));
        assert_eq!((report.held, report.busy, report.news.len()), (2, 2, 1), "what is in flight is");
        let bond = lease.granted(at(31), load(0, 2, 1), &grant(1, 9, 4)).0;
        assert_eq!(bond.map(|bond| bond.cap), Some(4));
        // Who has heard nothing yet has nothing to lose.
        assert_eq!(
            exchange(&mut new, 0, load(0, 0, 3), &Grant { stale: true, before: 1, ..grant(1, 5, 3) }),
            0
        );
        assert!(new.holder() != HolderId(7));
    }

    #[test]
    fn a_lease_counts_from_before_its_report_was_sent() {
        let mut lease = lease(FleetSettings::new().outage(Outage::Keep(0.5)));
        lease.report(at(0), load(0, 0, 4), Epoch(9));
        assert!(lease.due(at(400), load(0, 0, 4)).is_none(), "one report at a time");
        lease.granted(at(400), load(0, 0, 4), &Grant { safe: 2, ..grant(1, 1, 4) });
        assert_eq!(lease.use_by(), at(6950));
        assert!(lease.lapse(at(6949), load(4, 4, 0)).is_none());
        assert_eq!(lease.state(at(6949)), LeaseState::Held);
        assert_eq!(lease.lapse(at(6950), load(4, 4, 0)), Some(Bond { cap: 2, shed: None }));
        assert_eq!((lease.state(at(6950)), lease.use_by()), (LeaseState::Lost, at(606_950)));
        assert!(!lease.is_reclaimed(at(9999)) && lease.is_reclaimed(at(10_000)));
        // What it held less than it might keep it does not get back by losing the store.
        assert_eq!(lease.lapse(at(7000), load(1, 1, 0)).map(|bond| bond.cap), Some(1));
        assert_eq!(lease.lapse(at(606_950), load(2, 2, 0)).map(|bond| bond.cap), Some(0));
        // An answer that took longer than the lease is worth nothing.
        lease.report(at(700_000), load(0, 0, 4), Epoch(9));
        assert_eq!(
            lease.granted(at(707_000), load(0, 0, 4), &grant(1, 2, 4)).0.map(|bond| bond.cap),
            Some(0)
        );
    }

    #[test]
    fn slots_that_others_lack_go_back_after_their_tenure() {
        let mut lease = lease(FleetSettings::new());
        let contended = Grant { target: 1, contended: true, ..grant(1, 1, 3) };
        exchange(&mut lease, 0, load(0, 0, 3), &contended);
        assert_eq!(
            lease.bind(at(100), load(3, 2, 1), false, false),
            Bond { cap: 3, shed: None },
            "not at once"
        );
        let due = lease.due(at(100), load(3, 2, 0)).expect("none under way");
        assert_eq!(due, at(1 + 250), "it looks again then");
        assert_eq!(lease.bind(at(251), load(3, 2, 1), false, false), Bond { cap: 2, shed: Some(1) });
        // Turns: each slot after one call.
        exchange(&mut lease, 300, load(2, 2, 1), &Grant { turns: true, target: 1, ..contended });
        assert_eq!(lease.bind(at(301), load(2, 2, 1), false, false).shed, Some(0));
        // Nobody lacks any: what was used lately stays, and one.
        exchange(&mut lease, 400, load(2, 1, 0), &grant(1, 2, 9));
        assert_eq!(lease.bind(at(500), load(9, 1, 0), false, false), Bond { cap: 4, shed: None });
        assert_eq!(lease.bind(at(9000), load(4, 0, 0), false, false), Bond { cap: 1, shed: None });
        // After a pause all begin from what is in service.
        assert_eq!(lease.bind(at(9001), load(4, 2, 2), true, false).cap, 2);
    }

    // L23, redisson/redisson#5762: a wake-up that was missed costs no more than a poll.
    #[test]
    fn who_lacks_slots_asks_soon_and_then_polls() {
        let mut lease = lease(FleetSettings::new());
        exchange(&mut lease, 0, load(0, 0, 0), &grant(1, 1, 1));
        let asks = lease.due(at(100), load(1, 1, 1)).expect("none under way");
        assert!(asks <= at(120), "{asks:?}");
        exchange(&mut lease, 120, load(1, 1, 1), &Grant { target: 1, ..grant(1, 1, 1) });
        let polls = lease.due(at(130), load(1, 1, 1)).expect("none under way");
        assert!(polls >= at(120 + 325) && polls <= at(120 + 975), "{polls:?}");
        let again = Grant { target: 1, again: Some(40), ..grant(1, 1, 1) };
        exchange(&mut lease, 500, load(1, 1, 1), &again);
        assert_eq!(lease.due(at(505), load(1, 1, 1)), Some(at(541)));
    }

    #[test]
    fn news_are_told_until_they_were_heard() {
        let mut lease = lease(FleetSettings::new());
        let throttled = |calls| News::Throttled { generation: 3, calls, wait: 1000 };
        (0..100).for_each(|_| lease.tell(at(0), throttled(1)));
        assert_eq!(lease.report(at(0), load(0, 0, 0), Epoch(9)).news, [throttled(100)]);
        lease.failed(at(500));
        lease.tell(at(0), throttled(1));
        let report = lease.report(at(600), load(0, 0, 0), Epoch(9));
        assert_eq!(report.news, [throttled(100), throttled(1)], "what may have been heard is told again");
        lease.tell(at(0), News::Quota { of: crate::store::Quantity::Tokens, left: 4 });
        lease.granted(at(601), load(0, 0, 0), &grant(1, 1, 1));
        assert_eq!(lease.report(at(700), load(0, 0, 0), Epoch(9)).news.len(), 1, "the rest was heard");
        lease.failed(at(701));
        (0..1000).for_each(|n| lease.tell(at(0), News::Cleared { scope: None, generation: n }));
        assert_eq!(lease.report(at(800), load(0, 0, 0), Epoch(9)).news.len(), NEWS, "memory is bounded");
        // A wait that is told again is what is left of it.
        lease.granted(at(801), load(0, 0, 0), &grant(1, 1, 1));
        lease.tell(at(900), News::Paused { scope: None, wait: 5000, reason: crate::PauseReason::Hint });
        for (ms, left) in [(900, 5000), (2900, 3000), (9900, 0)] {
            let report = lease.report(at(ms), load(0, 0, 0), Epoch(9));
            assert!(matches!(report.news[..], [News::Paused { wait, .. }] if wait == left), "{report:?}");
            lease.failed(at(ms + 100));
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Need(u32),
        Grant { version: u64, slots: u32, target: u32, contended: bool },
        Fail,
        News,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u32..20).prop_map(Step::Need),
            (0u64..3, 0u32..20, 0u32..20, any::<bool>()).prop_map(|(version, slots, target, contended)| {
                Step::Grant { version, slots, target, contended }
            }),
            Just(Step::Fail),
            Just(Step::News),
        ]
    }

    proptest! {
        /// However much is needed, refused and told: two reports a second, and a few at once; and a renewal
        /// in time, always.
        #[test]
        fn two_reports_a_second_at_most(steps in prop::collection::vec((0u64..400, step()), 1..300)) {
            let mut lease = lease(FleetSettings::new());
            let (mut now, mut here, mut version) = (0u64, load(0, 0, 0), 1);
            let mut sent = Vec::new();
            for (passed, step) in steps {
                let end = now + passed;
                while let Some(due) = lease.due(at(now), here) {
                    let due = due.as_nanos().div_ceil(1_000_000).saturating_sub(1_000_000);
                    now = now.max(due.min(end));
                    if due > end {
                        break;
                    }
                    let bond = lease.bind(at(now), here, false, false);
                    prop_assert!(bond.cap <= here.cap && bond.cap >= here.busy.min(here.cap));
                    here.cap = bond.cap;
                    let report = lease.report(at(now), here, Epoch(9));
                    prop_assert_eq!(report.held, here.cap.max(here.busy));
                    sent.push(now);
                }
                now = end;
                match step {
                    Step::Need(need) => {
                        here.busy = need.min(here.cap);
                        here.waiting = need - here.busy;
                    }
                    Step::News => lease.hurry(),
                    Step::Fail => lease.failed(at(now)),
                    Step::Grant { version: newer, slots, target, contended } => {
                        version += newer;
                        let news = lease.epoch.is_none() || version > lease.version;
                        let told = Grant { target, contended, ..grant(1, version, slots) };
                        if let (Some(bond), _) = lease.granted(at(now), here, &told) {
                            prop_assert!(news || bond.cap <= here.cap);
                            prop_assert!(bond.cap <= slots.max(here.cap));
                            here.cap = bond.cap;
                        }
                    }
                }
            }
            for (n, first) in sent.iter().enumerate() {
                let within = sent[n..].iter().take_while(|sent| **sent < first + 10_000).count();
                prop_assert!(within <= 20 + BURST as usize, "{} in ten seconds", within);
            }
        }
    }
}
