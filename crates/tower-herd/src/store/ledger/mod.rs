//! The fleet's book for one provider: what every process of the fleet holds, and the one step that changes it.
//!
//! [`Ledger::exchange`] is pure and synchronous: a report and the store's clock in, a grant and the list of those
//! to wake out. The crate `tower-herd-redis` has the same rules as one Lua function; a test drives both with the
//! same reports and compares every grant. A rule that is changed here is changed there.
//!
//! # Time
//!
//! The book has a clock of its own. It goes on as the store's does, but never back: after a backward step it
//! goes on from where it was. So every length that is kept here (a lease, a pause, a bucket that fills) can only
//! get longer by a step, which is the safe side of all of them.
//!
//! # What costs nothing to trust
//!
//! A report with a version that the book has not reached proves that the book is an older one (a stale copy was
//! promoted, and the store does not let us see it): the book then begins anew, as after a loss.

mod control;
mod limits;
#[cfg(test)]
mod model;
mod rates;
mod record;
mod scopes;
mod shares;
#[cfg(test)]
mod tests;

use super::{Chunk, Epoch, Grant, HolderId, News, Quantity, RateReport, Report};
use control::{Control, Sums};
use limits::Merged;
use rates::Bucket;
use record::{Record, Times};
use scopes::Scopes;
use shares::{Ask, shares};
use std::collections::BTreeMap;

/// Above so many records, shares are worked out for all only now and then.
const MANY: usize = 100;
/// So often.
const EVERY: u64 = 250;
/// Then so many of those who lack slots are remembered.
const LACKING: usize = 64;
/// Who had more service than the others waits for no more than so much of theirs, in slot-milliseconds: who was
/// alone for a while, and had all, is one of many afterwards.
const DEBT: f64 = 1000.0;
/// A smaller step of the store's clock is no sign of another machine.
const STEP: u64 = 1000;
/// When to ask again where slots are to come by time, at the earliest and at the latest.
const AGAIN: (u64, u64) = (20, 250);

/// The book of one provider.
#[derive(Clone, Debug)]
pub struct Ledger {
    book: Option<Book>,
    learns: bool,
}

/// Who should exchange at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wakes {
    /// Everybody.
    All,
    /// These, in this order.
    Holders(Vec<HolderId>),
}

#[derive(Clone, Debug)]
struct Book {
    epoch: Epoch,
    /// Which process of the store wrote it.
    run: String,
    /// The store's clock at the last exchange, and the book's own.
    clock: u64,
    now: u64,
    /// Nobody is given more until then; `hard`: whatever members say, since the book was lost.
    began: u64,
    learn_until: u64,
    hard: bool,
    /// Of versions and chunks.
    counter: u64,
    /// The pass of the one with least service of those that needed some; never goes back.
    low: f64,
    records: BTreeMap<HolderId, Record>,
    control: Control,
    scopes: Scopes,
    rates: [Option<Bucket>; 2],
    merged: Merged,
    plan: Plan,
}

/// What the last pass over all records found.
#[derive(Clone, Debug, Default)]
struct Plan {
    at: u64,
    /// Targets of all are in their records.
    stored: bool,
    /// Who lacks slots that it has a target for, least service first.
    lack: Vec<HolderId>,
    /// So many need a slot.
    needy: u64,
    /// The weights of those who want some of a rate.
    wanting: [u64; 2],
}

/// What one exchange has found out on its way.
struct Step<'a> {
    report: &'a Report,
    times: Times,
    now: u64,
    /// It changes nothing.
    stale: bool,
    /// All records are looked at.
    full: bool,
    /// The version that the holder has seen, of this epoch; 0: none.
    known: u64,
    /// That is the newest.
    acked: bool,
    learning: bool,
    wake_all: bool,
}

impl Ledger {
    /// A book that nobody has written in. `learns`: there may have been one before, that was lost; false only
    /// where that cannot be, since the processes would be lost with it.
    #[must_use]
    pub fn new(learns: bool) -> Self {
        Ledger { book: None, learns }
    }

    /// One step. `clock` is the store's, in milliseconds, and `run` tells one life of the store from another
    /// (empty where there is only one).
    pub fn exchange(&mut self, clock: u64, run: &str, report: &Report) -> (Grant, Wakes) {
        let fits = self.book.take_if(|book| {
            book.run == run && !(report.epoch == Some(book.epoch) && report.version > book.counter)
        });
        let fresh = fits.is_none();
        let mut book = fits.unwrap_or_else(|| {
            let learns = std::mem::replace(&mut self.learns, true);
            Book::begin(self.book.take(), clock, run, report, learns)
        });
        let answer = book.exchange(clock, report, fresh);
        self.book = Some(book);
        answer
    }
}

impl Book {
    /// Another life. Nobody believes who holds what. The rest is kept, if there is something to keep: a pause of
    /// hours does not end because a replica was promoted.
    fn begin(old: Option<Book>, clock: u64, run: &str, report: &Report, learns: bool) -> Self {
        let now = old.as_ref().map_or(clock, |old| old.now + clock.saturating_sub(old.clock));
        let learning = Times::of(&report.terms).learning();
        let (counter, control, scopes, mut records) = old.map_or_else(
            || (0, Control::new(report.limits.start), Scopes::default(), BTreeMap::new()),
            |old| (old.counter, old.control, old.scopes.outlive(), old.records),
        );
        // What is safe is kept too: its holder may be cut off, and use it still.
        records.retain(|_, record| record.outlive(now + learning));
        Book {
            epoch: report.offer,
            run: run.to_owned(),
            clock,
            now,
            began: now,
            learn_until: if learns { now + learning } else { now },
            hard: learns,
            counter,
            low: 0.0,
            records,
            control,
            scopes,
            rates: [None, None],
            merged: Merged::of(&report.limits),
            plan: Plan::default(),
        }
    }

    fn exchange(&mut self, clock: u64, report: &Report, fresh: bool) -> (Grant, Wakes) {
        let times = Times::of(&report.terms);
        let gap = self.tick(clock, &times) && !fresh;
        let now = self.now;
        self.scopes.forget(now);
        let full = fresh || gap || !self.plan.stored || now >= self.plan.at + EVERY;
        if full {
            self.records.retain(|_, record| record.expire(now));
            let active = self.records.values().filter(|record| record.is_member() && record.need > 0);
            let low = active.map(|record| record.pass_at(now)).reduce(f64::min);
            self.low = low.map_or(self.low, |low| low.max(self.low));
        }
        self.hard &= now < self.learn_until;
        if self.hard {
            self.learn_until = self.learn_until.max(self.began + times.learning());
        }
        let own = self.records.get(&report.holder);
        let before = own.map_or(0, |own| own.seq);
        let known = if report.epoch == Some(self.epoch) { report.version } else { 0 };
        let acked = own.is_some_and(|own| known > 0 && known == own.version && !own.lapsed);
        let stale = own.is_some() && report.seq <= before;
        let mut step =
            Step { report, times, now, stale, full, known, acked, learning: false, wake_all: false };
        if !stale {
            self.take_in(&step);
        }
        step.learning = now < self.learn_until && (self.hard || self.records.values().any(|r| r.pending));
        self.merge(&step);
        if !stale {
            for news in &report.news {
                step.wake_all |= self.hear(&step, news);
            }
        }
        self.answer(&step, before)
    }

    /// Moves the book's clock. True if the store was silent, or its clock stepped, so that nobody is given more
    /// until all have reported.
    fn tick(&mut self, clock: u64, times: &Times) -> bool {
        let passed = clock.saturating_sub(self.clock);
        let back = self.clock.saturating_sub(clock);
        let hard = self.hard && self.now < self.learn_until;
        (self.clock, self.now) = (clock, self.now + passed);
        let now = self.now;
        if passed <= times.gap && back <= STEP {
            return false;
        }
        let mut any = false;
        for record in self.records.values_mut().filter(|record| !record.left || record.charge > 0) {
            any = true;
            record.pending = true;
            // How much of it was silence, and how much a step, nobody knows.
            let length = if record.lapsed { record.grace } else { times.learning() };
            record.until = record.until.max(now + length);
        }
        // An empty fleet is silent, and nobody holds anything. But who held something by a lost book may do so
        // still: that time begins again.
        if any || hard {
            (self.hard, self.began, self.learn_until) = (hard, now, now + times.learning());
        }
        any || hard
    }

    /// Writes down what the holder says it has and needs.
    fn take_in(&mut self, step: &Step<'_>) {
        let Step { report, now, .. } = *step;
        let own = self.records.get(&report.holder);
        let charge = Record::claim(own, report, step.acked, self.hard);
        let low = self.low;
        // Who did not take part has no credit for it.
        let enters = own.is_none_or(|own| !own.is_member() || own.need == 0);
        let pass = own.map_or(self.low, |own| own.pass_at(now));
        let is_new = own.is_none_or(|own| own.lapsed);
        if is_new {
            self.counter += 1;
        }
        let counter = self.counter;
        let own = self
            .records
            .entry(report.holder)
            .or_insert_with(|| Record::new(counter, now, report.limits.clone()));
        if own.lapsed {
            own.version = counter;
        }
        if step.acked {
            own.safe = own.safe_told;
        }
        own.pass = if enters { pass.max(self.low) } else { pass };
        own.charge = charge;
        own.update(report, now);
        #[expect(clippy::cast_precision_loss, reason = "weights are small")]
        let most = low + DEBT / own.weight as f64;
        own.pass = own.pass.min(most);
        if report.bye {
            (own.safe, own.safe_told, own.target) = (0, 0, 0);
            self.scopes.leave(report.holder);
        }
    }

    /// The limits in force, by what members were configured with.
    fn merge(&mut self, step: &Step<'_>) {
        let mut members = self.records.values().filter(|record| record.is_member());
        if !step.full {
            if !step.report.bye && !step.stale {
                self.merged = self.merged.clone().with(&step.report.limits);
            }
        } else if let Some(first) = members.next() {
            self.merged =
                members.fold(Merged::of(&first.limits), |merged, record| merged.with(&record.limits));
        }
        let limits = &self.merged.limits;
        self.control.configure(limits.floor, limits.ceiling);
        for (bucket, limit) in self.rates.iter_mut().zip([limits.requests, limits.tokens]) {
            if let (Some(bucket), Some(_)) = (bucket.as_mut(), limit) {
                bucket.fill(step.now);
            }
            match (bucket.as_mut(), limit) {
                (Some(bucket), Some(limit)) => bucket.configure(limit),
                (None, Some(limit)) => *bucket = Some(Bucket::new(step.now, limit)),
                (_, None) => *bucket = None,
            }
        }
    }

    fn sums(&self) -> Sums {
        self.records.values().fold(Sums::default(), |sums, record| Sums {
            charge: sums.charge + record.charge,
            need: sums.need + record.need,
            busy: sums.busy + record.in_use(),
            lack: sums.lack + record.need.saturating_sub(record.charge),
        })
    }

    /// Takes in what happened. Whether all should know at once.
    fn hear(&mut self, step: &Step<'_>, news: &News) -> bool {
        let Step { report, now, .. } = *step;
        let holder = report.holder;
        match news {
            News::Throttled { generation, calls, wait } => {
                // What the reporter has in flight it says itself: who was refused is none of them.
                let own = self.records.get(&holder).map_or(0, |own| own.in_use() - own.busy);
                let busy = self.sums().busy - own;
                self.control.throttled(now, *generation, (*calls).into(), *wait, busy);
                false
            }
            News::Overloaded { generation, wait } => {
                self.control.overloaded(now, *generation, *wait);
                false
            }
            News::Paused { scope, wait, reason } => self.scopes.pause(now, scope.as_deref(), *wait, *reason),
            News::Cleared { scope, generation } => self.scopes.clear(now, scope.as_deref(), *generation),
            News::Opened { scope, wait, first, last } => {
                let version = self.counter + 1;
                let opened = self.scopes.open(now, scope.as_deref(), *wait, *first, *last, holder, version);
                if opened {
                    self.counter = version;
                    if let Some(own) = self.records.get_mut(&holder) {
                        own.version = version;
                    }
                }
                opened
            }
            News::Closed { scope, generation } => self.scopes.close(now, scope.as_deref(), *generation),
            News::Probed { scope, failed } => {
                self.scopes.probed(now, scope.as_deref(), holder, *failed);
                false
            }
            News::Ramped { scope, calls, throttled } => {
                self.scopes.tally(scope.as_deref(), *calls, *throttled);
                false
            }
            News::Quota { of, left } => {
                let own = self.records.get(&holder).map(|own| own.rates[*of as usize]).unwrap_or_default();
                if let Some(bucket) = &mut self.rates[*of as usize] {
                    bucket.observe(now, &own, *left);
                }
                false
            }
            // When it is known what is free.
            News::Probe { .. } => false,
        }
    }

    /// Gives what can be given, and says what there is.
    fn answer(&mut self, step: &Step<'_>, before: u64) -> (Grant, Wakes) {
        let Step { report, now, stale, learning, .. } = *step;
        let holder = report.holder;
        let closed = self.scopes.closed(now);
        let ended = self.scopes.ended();
        let mut sums = self.sums();
        let lacks_itself = self.records.get(&holder).map_or(0, |own| own.need.saturating_sub(own.charge));
        let served = if stale { 0 } else { report.served.into() };
        self.control.settle(now, closed, ended, sums, served);
        let ceiling = u64::from(self.control.in_force(now, closed, ended, sums));
        if step.full {
            self.plan(step, ceiling);
        } else {
            self.follow_plan(step, ceiling);
        }
        if !stale && !report.bye {
            sums.charge += self.give(step, closed, ceiling, sums.charge);
        }
        if report.bye || self.records.get(&holder).is_some_and(|own| own.target.min(own.need) <= own.charge) {
            self.plan.lack.retain(|id| *id != holder);
        }
        self.control.gave(sums.charge);
        let probes = if stale { Vec::new() } else { self.allow_probes(step, &mut sums) };
        let (rates, rate_again) = self.take_rates(step);

        let members = self.records.values().filter(|record| record.is_member());
        let (members, weights) = members.fold((0_u64, 0), |(n, sum), record| (n + 1, sum + record.weight));
        let charge = self.records.get(&holder).map_or(0, |own| own.charge);
        // What is charged beyond the ceiling is in flight, or was (its lease had run out, the ceiling was cut): it is
        // counted until its holder says that it is over, and is not there to be used again.
        let bound = ceiling.max(self.control.full().into());
        let slots = charge.min(bound.saturating_sub(sums.charge - charge));
        if !stale {
            self.promise(step, members, weights, slots);
        }
        let (lacks, again) = self.lacks(step, closed, ceiling, sums.charge);
        let own = self.records.get(&holder);
        let target = own.map_or(0, |own| own.target);
        let others_lack = self.plan.lack.iter().any(|id| *id != holder);
        let spare = if learning || closed { 0 } else { ceiling.saturating_sub(sums.charge) };
        let woken = self.plan.lack.iter().filter(|id| **id != holder);
        let woken = woken.take(usize::try_from(spare).unwrap_or(usize::MAX)).copied().collect();
        let grant = Grant {
            epoch: self.epoch,
            version: own.map_or(0, |own| own.version),
            slots: narrow(slots),
            safe: narrow(own.map_or(0, |own| own.safe_told.min(slots))),
            target: narrow(target),
            contended: others_lack || sums.charge > ceiling,
            turns: self.plan.needy > ceiling && (charge > 0 || target > 0),
            stale,
            before,
            learning: if learning { (self.learn_until - now).max(1) } else { 0 },
            again: [lacks.then_some(again).flatten(), rate_again].into_iter().flatten().min(),
            members: narrow(members),
            weights,
            ceiling: narrow(ceiling),
            queued: narrow(sums.lack.saturating_sub(lacks_itself)),
            generation: self.control.generation,
            disagree: self.merged.disagree,
            scopes: self.scopes.told(now, holder, step.known, &probes),
            rates,
        };
        (grant, if step.wake_all { Wakes::All } else { Wakes::Holders(woken) })
    }

    /// Works out what each should have.
    fn plan(&mut self, step: &Step<'_>, ceiling: u64) {
        let now = step.now;
        // Heard of about once a second: then three polls of one who waits have gone by.
        let patience = step.times.gap / 2;
        let ask = |record: &Record| {
            let (need, headroom) = record.asks(now, patience);
            (need.min(ceiling), headroom.min(ceiling))
        };
        let mut asks: Vec<Ask> = self
            .records
            .values()
            .map(|record| Ask {
                want: ask(record).0,
                weight: record.weight,
                has: record.charge,
                pass: record.pass_at(now),
                last: record.version,
            })
            .collect();
        let mut targets = shares(ceiling, &asks);
        let left = ceiling - targets.iter().sum::<u64>();
        if left > 0 {
            // Nobody needs it now: it is parked where it was asked for.
            for ((asked, record), target) in asks.iter_mut().zip(self.records.values()).zip(&targets) {
                asked.want = ask(record).1.saturating_sub(*target);
                asked.has = record.charge.saturating_sub(*target);
            }
            for (target, more) in targets.iter_mut().zip(shares(left, &asks)) {
                *target += more;
            }
        }
        let stored = self.records.len() > MANY;
        let mut lack = Vec::new();
        let mut needy = 0;
        for ((id, record), target) in self.records.iter_mut().zip(targets) {
            let need = ask(record).0;
            needy += u64::from(record.is_member() && record.need > 0);
            if target.min(need) > record.charge {
                lack.push((record.pass_at(now), record.version, *id));
            }
            if stored || *id == step.report.holder {
                record.target = target;
            }
        }
        lack.sort_by(|(a, v, x), (b, w, y)| a.total_cmp(b).then(v.cmp(w)).then(x.cmp(y)));
        let mut lack: Vec<HolderId> = lack.into_iter().map(|(.., id)| id).collect();
        if stored {
            lack.truncate(LACKING);
        }
        self.plan = Plan { at: now, stored, lack, needy, wanting: self.plan.wanting };
    }

    /// Between two plans: where nobody lacks any, who needs more takes what is free.
    fn follow_plan(&mut self, step: &Step<'_>, ceiling: u64) {
        let nobody_lacks = self.plan.lack.is_empty();
        if let Some(own) = self.records.get_mut(&step.report.holder) {
            own.target = own.target.min(ceiling);
            if nobody_lacks {
                own.target = own.target.max(own.need.min(ceiling));
            }
        }
    }

    /// More slots, if there are some; how many.
    fn give(&mut self, step: &Step<'_>, closed: bool, ceiling: u64, charged: u64) -> u64 {
        let bound = if step.learning { ceiling.min(step.times.trickle) } else { ceiling };
        let free = if closed { 0 } else { bound.saturating_sub(charged) };
        let Some(own) = self.records.get_mut(&step.report.holder) else { return 0 };
        let more = own.target.saturating_sub(own.charge).min(free);
        if more > 0 {
            self.counter += 1;
            own.charge += more;
            own.version = self.counter;
        }
        more
    }

    /// The probes that were asked for and may go. Each needs a slot, as every call does.
    fn allow_probes<'a>(&mut self, step: &Step<'a>, sums: &mut Sums) -> Vec<Option<&'a str>> {
        let Step { report, now, .. } = *step;
        let mut allowed = Vec::new();
        for news in &report.news {
            let News::Probe { scope, timeout } = news else { continue };
            let scope = scope.as_deref();
            let Some(own) = self.records.get_mut(&report.holder).filter(|own| !own.left) else { continue };
            if !self.scopes.may_probe(now, scope, report.holder) {
                continue;
            }
            if own.charge <= own.busy {
                if step.learning || sums.charge >= self.control.full().into() {
                    continue;
                }
                self.counter += 1;
                own.charge += 1;
                own.version = self.counter;
                sums.charge += 1;
            }
            self.scopes.send_probe(now, scope, report.holder, *timeout);
            allowed.push(scope);
        }
        allowed
    }

    /// What the holder gets of each rate, and when there is more.
    fn take_rates(&mut self, step: &Step<'_>) -> (Vec<Chunk>, Option<u64>) {
        let Step { report, now, stale, .. } = *step;
        let (mut chunks, mut again) = (Vec::new(), None);
        for of in [Quantity::Requests, Quantity::Tokens] {
            let Some(bucket) = &mut self.rates[of as usize] else { continue };
            let asked: Option<&RateReport> = report.rates.iter().find(|rate| rate.of == of && !stale);
            if let (Some(asked), Some(own)) = (asked, self.records.get_mut(&report.holder)) {
                bucket.give_back(now, &mut own.rates[of as usize], asked);
            }
            let mut chunk = bucket.chunk(of, 0, 0);
            if let Some(asked) = asked.filter(|_| !report.bye) {
                let members = || self.records.iter().filter(|(_, record)| record.is_member());
                let wants = |record: &Record| record.rates[of as usize].want;
                if step.full {
                    let wanting = members().filter(|(_, record)| wants(record) > 0);
                    self.plan.wanting[of as usize] = wanting.map(|(_, record)| record.weight).sum();
                }
                let ask = |record: &Record| Ask {
                    want: wants(record),
                    weight: record.weight,
                    has: 0,
                    pass: record.pass_at(now),
                    last: record.version,
                };
                let part = if step.full {
                    let own = members().take_while(|(id, _)| **id != report.holder).count();
                    let asks: Vec<Ask> = members().map(|(_, record)| ask(record)).collect();
                    bucket.part(asked.least, &asks, own)
                } else {
                    // The others as they were when all were looked at last: as one who wants everything.
                    let own = self.records.get(&report.holder).map(ask).into_iter();
                    let weight = own.clone().map(|own| own.weight).sum::<u64>();
                    let others = self.plan.wanting[of as usize].saturating_sub(weight);
                    let others = Ask { want: rates::MOST, weight: others, has: 0, pass: 0.0, last: 0 };
                    let asks: Vec<Ask> = own.chain((others.weight > 0).then_some(others)).collect();
                    bucket.part(asked.least, &asks, 0)
                };
                again = again.into_iter().chain(part.again).min();
                if let Some(own) = self.records.get_mut(&report.holder).filter(|_| part.amount > 0) {
                    self.counter += 1;
                    bucket.take(now, &mut own.rates[of as usize], part.amount, self.counter);
                    chunk = bucket.chunk(of, self.counter, part.amount);
                }
            }
            chunks.push(chunk);
        }
        (chunks, again)
    }

    /// What the holder may use after its lease has run out. A lower promise counts when the holder is known to
    /// have heard it, and until then the higher one.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "all of them below 2^40, and the same doubles as in Lua"
    )]
    fn promise(&mut self, step: &Step<'_>, members: u64, weights: u64, slots: u64) {
        let full = u64::from(self.control.full());
        let kept = self.records.iter().filter(|(id, _)| **id != step.report.holder);
        let kept: u64 = kept.map(|(_, record)| record.safe.min(record.charge)).sum();
        let Some(own) = self.records.get_mut(&step.report.holder).filter(|own| !own.left) else { return };
        let all = step.times.keep * full as f64;
        let share = all * own.weight as f64 / weights.max(1) as f64;
        // What is kept for those who are gone adds up to no more than that part of the ceiling, however many go.
        let left = (all.floor() as u64).saturating_sub(kept);
        let safe = if full >= 2 * members { slots.min(share.floor() as u64).min(left) } else { 0 };
        if safe < own.safe_told.min(own.charge) {
            self.counter += 1;
            own.version = self.counter;
        }
        own.safe = own.safe.max(safe).min(own.charge);
        own.safe_told = safe;
    }

    /// Whether the holder lacks slots, and when it should ask again.
    fn lacks(&self, step: &Step<'_>, closed: bool, ceiling: u64, charged: u64) -> (bool, Option<u64>) {
        let now = step.now;
        let holder = step.report.holder;
        let Some(own) = self.records.get(&holder) else { return (false, None) };
        if own.need <= own.charge || closed || step.learning {
            return (false, None);
        }
        let pass = own.pass_at(now);
        let first = |(id, other): &(&HolderId, &Record)| {
            let order = other.pass_at(now).total_cmp(&pass).then(id.cmp(&&holder));
            other.need > other.charge && order.is_lt()
        };
        let turn = if step.full { self.records.iter().filter(first).count() as u64 } else { LACKING as u64 };
        let lacking = charged.saturating_sub(ceiling) + turn + 1;
        let by_time = self.control.again(now, lacking).map(|wait| wait.clamp(AGAIN.0, AGAIN.1));
        let by_plan = (!step.full || self.plan.stored)
            .then(|| (self.plan.at + EVERY).saturating_sub(now).clamp(AGAIN.0, AGAIN.1));
        (true, by_time.into_iter().chain(by_plan).min())
    }
}

fn narrow(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
