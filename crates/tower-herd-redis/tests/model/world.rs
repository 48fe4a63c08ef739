//! Processes, the network, the store's machine, the provider, and what goes wrong with each.
//!
//! Time goes by in steps of [`QUANTUM`]. In one, every process that is not stopped lives on by itself; what it sent
//! is under way for longer than a step, and so the store gets all reports in the order in which they arrive.

use super::{
    judge::{At, Judge},
    process::{Birth, Load, Process, Reply, Sent, Stop, lock, unreachable},
    store::{Store, Woken},
};
use fastrand::Rng;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};
use tower_herd::{
    Provider,
    store::{FleetSettings, Grant, HolderId, LeaseState, Report},
};

pub const MS: At = 1_000_000;
pub const SECOND: At = 1000 * MS;
pub const QUANTUM: At = 25 * MS;
/// Somewhere in the life of a server's clock, in milliseconds.
const EPOCH: u64 = 1_700_000_000_000;
/// The longest that a message is under way.
const LATEST: At = 4500 * MS;

/// What can go wrong, besides the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A process is killed; the provider drops its calls.
    Kill,
    /// A process is killed; the provider works on at its calls.
    Orphan,
    /// A process has no more work, says goodbye, and ends.
    Leave,
    /// A process stands still.
    Stopped(Stop),
    /// A process is cut off from the store: what it says, what it hears, or both.
    Cut { says: bool, hears: bool },
    /// Nobody reaches the store.
    Outage,
    /// The store is emptied.
    Flush,
    /// The store is started again, empty.
    Restart,
    /// A copy that is a little old becomes the store.
    Promote,
    /// The store's clock steps by so many milliseconds.
    Step(i64),
    /// The store's clock stands still, and catches up in the end or not.
    Freeze { catches_up: bool },
    /// A process is told to wait for a minute, and when the others know that, that it need not.
    Pause,
}

/// The rules of the client, or of its settings, that are left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Without {
    /// A reply that is old looks new.
    pub versions: bool,
    /// Leases are held by a clock that stops with the machine.
    pub lease_clock: bool,
}

/// How a world is, before anything happens in it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub processes: usize,
    pub ceiling: u32,
    pub ttl: Duration,
    pub gap: Duration,
    /// Slots are others' after the ttl and this.
    pub extra: Duration,
    /// And after this, those that were kept.
    pub grace: Duration,
    pub settings: FleetSettings,
    pub load: Load,
    /// Of a thousand messages, those that are lost,
    pub lost: u32,
    /// that are seconds late,
    pub late: u32,
    /// and that come twice.
    pub twice: u32,
    pub wakes_lost: u32,
    /// Of the answers that are lost, in a thousand, those for which an older one is handed out.
    pub mixed_up: u32,
    /// The most by which clocks run wrong, in millionths.
    pub drift: i64,
    pub faults: Vec<(At, Fault)>,
    pub without: Without,
}

enum Event {
    Arrives(Sent),
    Answers(usize, Reply, Grant),
    Wakes(usize, Option<HolderId>),
    Fault(Fault),
    GoesOn(usize, u32, Stop),
    SaysGoodbye(usize, u32),
    /// Once it has been answered so often.
    Clears(usize, u64),
    Ends(usize, u32),
    Thaws {
        frozen: u64,
        catches_up: bool,
    },
    Copy,
}

/// A place for a process, after another when that was killed.
struct Place {
    process: Process,
    stopped: Option<Stop>,
    leaving: bool,
    /// What it says is lost until then, and what it is told.
    says: At,
    hears: At,
    /// Answers that came too late.
    late: VecDeque<Grant>,
    /// The version that it would know, and the one that it was told, where versions are left out.
    versions: (u64, u64),
}

pub struct World<'a> {
    plan: Plan,
    store: &'a mut Store,
    rng: Rng,
    pub now: At,
    number: u64,
    order: BinaryHeap<Reverse<(At, u64)>>,
    events: BTreeMap<u64, Event>,
    places: Vec<Place>,
    lives: u32,
    outbox: Arc<Mutex<Vec<Sent>>>,
    judge: Arc<Mutex<Judge>>,
    /// The life of the server, by how far its clock is off (ms), where it stands still.
    run: u64,
    skew: i64,
    frozen: Option<u64>,
    /// A step that is too small to be seen may come again then.
    small_step: At,
    down: At,
    copies: VecDeque<(At, Option<Vec<u8>>)>,
    /// When the last fault is over, and all it has left under way.
    quiet: At,
    pub exchanges: u64,
    trace: Option<Vec<String>>,
}

fn nanos(duration: Duration) -> At {
    At::try_from(duration.as_nanos()).unwrap_or(At::MAX)
}

impl<'a> World<'a> {
    pub fn new(seed: u64, plan: Plan, store: &'a mut Store, traced: bool) -> Self {
        store.flush();
        let judge = Arc::new(Mutex::new(Judge::new(plan.ceiling)));
        let mut world = World {
            store,
            rng: Rng::with_seed(seed ^ 0x5eed),
            now: 0,
            number: 0,
            order: BinaryHeap::new(),
            events: BTreeMap::new(),
            places: Vec::new(),
            lives: 0,
            outbox: Arc::default(),
            judge,
            run: 1,
            skew: 0,
            frozen: None,
            small_step: 0,
            down: 0,
            copies: VecDeque::new(),
            quiet: 0,
            exchanges: 0,
            trace: traced.then(Vec::new),
            plan,
        };
        for at in 0..world.plan.processes {
            let place = world.place(at);
            world.places.push(place);
        }
        for (at, fault) in world.plan.faults.clone() {
            world.at(at, Event::Fault(fault));
            world.quiet = world.quiet.max(at + LATEST);
        }
        if world.plan.faults.iter().any(|(_, fault)| *fault == Fault::Promote) {
            world.at(0, Event::Copy);
        }
        world
    }

    fn place(&mut self, at: usize) -> Place {
        self.lives += 1;
        let drift = self.plan.drift;
        let birth = Birth {
            life: (at, self.lives),
            at: self.now,
            seed: self.rng.u64(..),
            drift: if drift > 0 { self.rng.i64(-drift..=drift) } else { 0 },
            ceiling: self.plan.ceiling,
            settings: &self.plan.settings,
            sleepy_clock: self.plan.without.lease_clock,
            load: self.plan.load,
            outbox: &self.outbox,
            judge: &self.judge,
        };
        let process = Process::new(&birth);
        Place {
            process,
            stopped: None,
            leaving: false,
            says: 0,
            hears: 0,
            late: VecDeque::new(),
            versions: (0, 0),
        }
    }

    fn say(&mut self, what: impl FnOnce(&Self) -> String) {
        let Some(mut trace) = self.trace.take() else { return };
        trace.push(format!("{:>9.3} {}", self.now as f64 / SECOND as f64, what(self)));
        self.trace = Some(trace);
    }

    pub fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().unwrap_or_default()
    }

    fn at(&mut self, at: At, event: Event) {
        self.number += 1;
        self.order.push(Reverse((at, self.number)));
        self.events.insert(self.number, event);
    }

    pub fn judge<R>(&self, judge: impl FnOnce(&mut Judge) -> R) -> R {
        judge(&mut lock(&self.judge))
    }

    /// The part of the ceiling that was in use since this was last asked.
    pub fn used(&self) -> f64 {
        self.judge(Judge::take_use)
    }

    /// Whether each of them holds a lease.
    pub fn all_hold(&self) -> bool {
        self.places.iter().all(|place| {
            let lease = place.process.with(Provider::lease);
            lease.is_some_and(|lease| matches!(lease.state, LeaseState::Held | LeaseState::Learning))
        })
    }

    fn is_running(&self, at: usize) -> bool {
        self.places[at].stopped.is_none() && !self.places[at].leaving
    }

    /// Lives on for so long; stops when the ceiling is exceeded. Whether it held.
    pub fn run(&mut self, time: At) -> bool {
        let end = self.now + time;
        while self.now < end {
            self.happen();
            let next = self.now + QUANTUM;
            for place in &self.places {
                if place.stopped.is_none() {
                    place.process.run(next);
                }
            }
            let mut sent = std::mem::take(&mut *lock(&self.outbox));
            sent.sort_by_key(|sent| (sent.at, sent.life));
            for sent in sent {
                self.send(sent);
            }
            self.now = next;
            lock(&self.judge).count(next);
            if let Some((at, n)) = self.judge(|judge| judge.over) {
                self.say(|_| format!("{n} in flight at {:.3}", at as f64 / SECOND as f64));
                return false;
            }
        }
        true
    }

    fn happen(&mut self) {
        while let Some(Reverse((at, number))) = self.order.pop() {
            if at > self.now {
                self.order.push(Reverse((at, number)));
                break;
            }
            if let Some(event) = self.events.remove(&number) {
                self.event(at, event);
            }
        }
    }

    fn chance(&mut self, of_a_thousand: u32) -> bool {
        self.rng.u32(..1000) < of_a_thousand
    }

    fn delay(&mut self) -> At {
        if self.chance(self.plan.late) {
            self.rng.u64(1500 * MS..4000 * MS)
        } else {
            self.rng.u64(QUANTUM + 2 * MS..60 * MS)
        }
    }

    fn send(&mut self, mut sent: Sent) {
        let (place, _) = sent.life;
        if self.plan.without.versions && sent.report.version > 0 {
            sent.report.version = self.places[place].versions.0;
        }
        if self.chance(self.plan.twice) {
            // The copy is nobody's to answer.
            let (reply, _) = tokio::sync::oneshot::channel();
            let copy = Sent { reply, report: sent.report.clone(), ..sent };
            let at = sent.at + self.delay() + self.rng.u64(..2500 * MS);
            self.at(at.min(sent.at + LATEST), Event::Arrives(copy));
        }
        if self.chance(self.plan.lost) {
            return self.lose(sent.at, place, sent.reply);
        }
        let at = sent.at + self.delay();
        self.at(at, Event::Arrives(sent));
    }

    /// No answer comes; or an older one does, and whoever carries it knows only that it is not the newest.
    fn lose(&mut self, at: At, place: usize, reply: Reply) {
        if self.chance(self.plan.mixed_up) && self.places[place].says <= at && self.places[place].hears <= at
        {
            let late = &self.places[place].late;
            if !late.is_empty() {
                let mut grant = late[self.rng.usize(..late.len())].clone();
                grant.stale = true;
                let at = at + self.delay();
                self.at(at, Event::Answers(place, reply, grant));
            }
        }
    }

    fn event(&mut self, at: At, event: Event) {
        match event {
            Event::Arrives(sent) => self.arrives(at, sent),
            Event::Answers(place, reply, grant) => self.answers(at, place, reply, grant),
            Event::Wakes(place, holder) => self.places[place].process.wake(holder),
            Event::Fault(fault) => self.fault(fault),
            Event::GoesOn(place, life, stop) => {
                let now = self.now;
                let here = &mut self.places[place];
                if here.process.life().1 == life {
                    here.stopped = None;
                    here.process.resume(stop, now);
                    self.say(|_| format!("{place} goes on"));
                }
            }
            Event::SaysGoodbye(place, life) => {
                let here = &self.places[place];
                if here.process.life().1 == life {
                    here.process.leave();
                    self.say(|_| format!("{place} says goodbye"));
                }
            }
            Event::Clears(place, answers) => {
                let answered = self.answered(place);
                if answered < answers {
                    return self.at(self.now + SECOND / 10, Event::Clears(place, answers));
                }
                self.places[place].process.with(Provider::clear_pause);
                self.say(|_| format!("{place} need not wait"));
            }
            Event::Ends(place, life) => {
                if self.places[place].process.life().1 == life {
                    self.kill(place, false);
                }
            }
            Event::Thaws { frozen, catches_up } => {
                self.frozen = None;
                if !catches_up {
                    self.skew +=
                        i64::try_from(frozen).unwrap_or(0) - i64::try_from(self.clock(self.now)).unwrap_or(0);
                }
                self.say(|world| format!("the store's clock goes on, off by {} ms", world.skew));
            }
            Event::Copy => {
                let copy = (self.now, self.store.dump());
                self.copies.push_back(copy);
                if self.copies.len() > 21 {
                    self.copies.pop_front();
                }
                self.at(self.now + SECOND / 5, Event::Copy);
            }
        }
    }

    /// What the store's clock says.
    fn clock(&self, at: At) -> u64 {
        self.frozen.unwrap_or_else(|| (EPOCH + at / MS).saturating_add_signed(self.skew))
    }

    fn arrives(&mut self, at: At, sent: Sent) {
        let (place, life) = sent.life;
        if at < self.down {
            if self.rng.bool() && at >= self.places[place].says {
                sent.reply.send(Err(unreachable())).ok();
            }
            return;
        }
        if at < self.places[place].says {
            return;
        }
        self.exchanges += 1;
        let (grant, woken) = self.store.exchange(self.clock(at), self.run, &sent.report);
        self.say(|_| told(at, place, life, &sent.report, &grant, &woken));
        let holders = match woken {
            Woken::All => vec![None],
            Woken::These(holders) => holders.into_iter().map(Some).collect(),
        };
        for holder in holders {
            for place in 0..self.places.len() {
                if at >= self.places[place].hears && !self.chance(self.plan.wakes_lost) {
                    let at = at + self.delay();
                    self.at(at, Event::Wakes(place, holder));
                }
            }
        }
        if self.chance(self.plan.lost) {
            if self.rng.u32(..4) == 0 {
                // The connection broke, and who carries the report tells it again on another one.
                let again = at + self.rng.u64(50 * MS..300 * MS);
                return self.at(again, Event::Arrives(sent));
            }
            return self.lose(at, place, sent.reply);
        }
        let at = at + self.delay();
        // It belongs to a life that may be over by then: nobody listens any more.
        self.at(at, Event::Answers(place, sent.reply, grant));
    }

    fn answers(&mut self, at: At, place: usize, reply: Reply, mut grant: Grant) {
        let here = &mut self.places[place];
        if at < here.hears {
            return;
        }
        if reply.is_closed() {
            here.late.push_back(grant);
            if here.late.len() > 6 {
                here.late.pop_front();
            }
            return;
        }
        if self.plan.without.versions {
            here.versions = (grant.version, here.versions.1 + 1);
            grant.version = here.versions.1;
        }
        if reply.send(Ok(grant)).is_err() {
            self.say(|_| format!("{place} does not listen any more"));
        }
    }

    /// How often it was answered by the store.
    pub fn answered(&self, place: usize) -> u64 {
        self.places[place].process.with(|provider| provider.lease().map_or(0, |lease| lease.exchanges))
    }

    /// The store's clock stands still until then.
    pub fn freeze(&mut self, until: At, catches_up: bool) {
        let frozen = self.clock(self.now);
        self.frozen = Some(frozen);
        self.small_step = until + 2 * nanos(self.plan.ttl + self.plan.extra);
        self.quiet = self.quiet.max(until);
        self.at(until, Event::Thaws { frozen, catches_up });
    }

    pub fn kill(&mut self, place: usize, orphans: bool) {
        let now = self.now;
        let life = self.places[place].process.life();
        let next = self.place(place);
        std::mem::replace(&mut self.places[place], next).process.kill();
        if !orphans {
            lock(&self.judge).hang_up(life, now);
        }
        let next = self.places[place].process.life().1;
        self.say(|_| format!("{place} is dead ({}), and is {next} now", life.1));
    }

    /// A time that may be shorter or longer than the ttl.
    fn while_(&mut self) -> At {
        let ttl = nanos(self.plan.ttl);
        self.now + self.rng.u64(ttl / 2..ttl * 5 / 2)
    }

    fn fault(&mut self, fault: Fault) {
        self.quiet = self.quiet.max(self.now + LATEST);
        let n = self.places.len();
        let running: Vec<usize> = (0..n).filter(|at| self.is_running(*at)).collect();
        let Some(at) = (!running.is_empty()).then(|| running[self.rng.usize(..running.len())]) else {
            return;
        };
        let mut until = self.now;
        self.say(|_| format!("{fault:?} ({at})"));
        match fault {
            Fault::Kill => self.kill(at, false),
            Fault::Orphan => {
                until += nanos(self.plan.load.longest);
                self.kill(at, true);
            }
            Fault::Leave => until = self.leave(at),
            Fault::Stopped(stop) => {
                until = self.while_();
                if self.rng.u32(..3) > 0 {
                    // What matters most is what is under way meanwhile.
                    if let Some(busy) = running.iter().copied().find(|at| self.waits(*at)) {
                        return self.stop(busy, stop, until);
                    }
                    return self.at(self.now + QUANTUM, Event::Fault(fault));
                }
                self.stop(at, stop, until);
            }
            Fault::Cut { says, hears } => {
                until = self.while_();
                let here = &mut self.places[at];
                here.says = if says { until } else { here.says };
                here.hears = if hears { until } else { here.hears };
            }
            Fault::Outage => {
                until = self.while_();
                self.down = self.down.max(until);
            }
            Fault::Flush => self.store.flush(),
            Fault::Restart => {
                until += self.rng.u64(..2 * SECOND);
                self.down = self.down.max(until);
                self.run += 1;
                self.store.flush();
            }
            Fault::Promote => {
                let age = self.rng.u64(SECOND / 5..4 * SECOND);
                let old = self.copies.iter().rev().find(|(copied, _)| copied + age <= self.now);
                self.store.restore(old.and_then(|(_, copy)| copy.as_deref()));
                until += self.rng.u64(SECOND / 10..2 * SECOND);
                self.down = self.down.max(until);
                self.run += 1;
            }
            Fault::Step(by) => {
                // One that is not seen, within the ttl after another: not promised.
                let small = by > 0 && Duration::from_millis(by.unsigned_abs()) <= self.plan.gap;
                if !small || self.now >= self.small_step {
                    self.skew += by;
                }
                if small {
                    self.small_step = self.now + 2 * nanos(self.plan.ttl + self.plan.extra);
                }
            }
            Fault::Freeze { catches_up } => {
                if self.frozen.is_none() && (!catches_up || self.now >= self.small_step) {
                    until = self.while_();
                    self.freeze(until, catches_up);
                }
            }
            Fault::Pause => {
                self.places[at].process.with(|provider| provider.pause_for(Duration::from_secs(60)));
                let answers = self.answered(at) + 3;
                self.at(self.now, Event::Clears(at, answers));
            }
        }
        self.quiet = self.quiet.max(until + LATEST);
    }

    /// It has no more work, and says goodbye when that is done. When it is gone.
    pub fn leave(&mut self, at: usize) -> At {
        let here = &mut self.places[at];
        here.leaving = true;
        here.process.idle();
        let life = here.process.life().1;
        // The longest wait for a slot, and then the longest call.
        let drained = self.now + 9 * SECOND + nanos(self.plan.load.longest);
        self.at(drained, Event::SaysGoodbye(at, life));
        self.at(drained + 3 * SECOND, Event::Ends(at, life));
        drained + 3 * SECOND
    }

    /// Whether an answer to it is on its way.
    fn waits(&self, at: usize) -> bool {
        let life = self.places[at].process.life();
        self.events.values().any(|event| match event {
            Event::Answers(place, reply, _) => *place == life.0 && !reply.is_closed(),
            _ => false,
        })
    }

    pub fn stop(&mut self, at: usize, stop: Stop, until: At) {
        self.quiet = self.quiet.max(until + LATEST);
        let life = self.places[at].process.life();
        self.places[at].stopped = Some(stop);
        self.at(until, Event::GoesOn(at, life.1, stop));
        if self.rng.bool() {
            // What it was about to send it sends when it goes on.
            let held: Vec<u64> = self
                .events
                .iter()
                .filter(|(_, event)| matches!(event, Event::Arrives(sent) if sent.life == life))
                .map(|(number, _)| *number)
                .collect();
            for number in held {
                if let Some(event) = self.events.remove(&number) {
                    let delay = self.delay();
                    self.at(until + delay, event);
                }
            }
        }
    }

    /// Until all faults are over, and what they left under way; and then until all is as it was.
    pub fn heal(&mut self) -> bool {
        for place in &self.places {
            place.process.steady();
        }
        while self.now < self.quiet {
            if !self.run(SECOND) {
                return false;
            }
            for place in &self.places {
                place.process.steady();
            }
        }
        // A lease that runs out, or a time of learning; then what was kept; then a renewal, an answer, and the work.
        let bound = nanos(self.plan.ttl + self.plan.extra + self.plan.grace) + 3 * SECOND;
        self.run(bound)
    }
}

fn told(at: At, place: usize, life: u32, report: &Report, grant: &Grant, woken: &Woken) -> String {
    format!(
        "{place}.{life} at {:.3} #{} v{} held {} busy {} need {} -> {}v{} slots {} safe {} target {}{}{}{} of {} \
         learning {} {woken:?}",
        at as f64 / SECOND as f64,
        report.seq,
        report.version,
        report.held,
        report.busy,
        report.need,
        if report.epoch == Some(grant.epoch) { "" } else { "new book " },
        grant.version,
        grant.slots,
        grant.safe,
        grant.target,
        if grant.contended { " contended" } else { "" },
        if grant.turns { " turns" } else { "" },
        if grant.stale { " stale" } else { "" },
        grant.ceiling,
        grant.learning,
    )
}
