//! Who waits, in which order, and who has been called.
//!
//! Waiting is like at a counter: those in the *line* stand in order, the
//! *called* ones were woken because a slot is free and claim it when they are
//! polled. A called waiter is not in the line any more, so no newcomer, of
//! whatever class, can take its call; nor does it own the slot: if it goes away
//! the next is called, and if it stays away for [`QueueConfig::grace`] it is
//! *lapsed*: its place is kept, its call goes to the next. (A future that its
//! owner does not poll for a while must not hold a slot of the fleet.)
//!
//! Every step is O(log n), and nothing is kept of an agent without waiters.

use std::{collections::BTreeMap, mem, task::Waker, time::Duration};

use super::line::{Agent, Line};
use crate::clock::Time;

/// How pressing a waiter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Somebody waits for the answer: served first.
    Interactive,
    /// Nobody does: served when no interactive waiter is left, or in
    /// alternation once one has waited [`QueueConfig::age`].
    Batch,
}

/// A newcomer to the queue.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    /// Whom it belongs to: agents are served in turns. Those without an agent
    /// count as one together.
    pub agent: Option<u64>,
    /// How pressing it is.
    pub class: Class,
    /// When it came.
    pub now: Time,
}

/// The settings of a queue.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct QueueConfig {
    /// The most waiters; more are refused. 1024 by default.
    pub bound: usize,
    /// How old a batch waiter must be for its class to be served in alternation
    /// with the interactive one. 5 s by default.
    pub age: Duration,
    /// How long a waiter may stay unpolled after it was called (or its timer
    /// was due) before the next is called in its place. 1 s by default: much
    /// longer than an executor takes, since it makes room for those behind.
    pub grace: Duration,
}

impl Default for QueueConfig {
    fn default() -> Self {
        QueueConfig { bound: 1024, age: Duration::from_secs(5), grace: Duration::from_secs(1) }
    }
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the queue of the provider is full")
    }
}

impl std::error::Error for Full {}

/// Names one waiter in its gate, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(u64);

impl EntryId {
    fn class(self) -> usize {
        (self.0 & 1) as usize
    }
}

struct Entry {
    agent: Agent,
    since: Time,
    /// The turn with which it was called and the class that had been called
    /// last, to come back to.
    turn: u64,
    last: usize,
    place: Place,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Line,
    Called(u64),
    Lapsed,
}

pub(super) struct Queue {
    config: QueueConfig,
    /// By arrival, one map a class.
    entries: [BTreeMap<u64, Entry>; 2],
    lines: [Line; 2],
    /// By the order of the calls; the first instant that was read after each.
    called: BTreeMap<u64, (EntryId, Option<Time>)>,
    undated: u64,
    /// The class that was called last: ageing alternates.
    last: usize,
    arrivals: u64,
    turns: u64,
    calls: u64,
}

const INTERACTIVE: usize = Class::Interactive as usize;
const BATCH: usize = Class::Batch as usize;

impl Queue {
    pub(super) fn new(config: QueueConfig) -> Self {
        Queue {
            config,
            entries: Default::default(),
            lines: Default::default(),
            called: BTreeMap::new(),
            undated: 0,
            last: BATCH,
            arrivals: 0,
            turns: 0,
            calls: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.iter().map(BTreeMap::len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether anybody would be passed: those who have lapsed are not.
    pub(super) fn is_awaited(&self) -> bool {
        !self.called.is_empty() || self.lines.iter().any(|line| !line.is_empty())
    }

    /// How many have been called and are expected.
    pub(super) fn called(&self) -> usize {
        self.called.len()
    }

    pub(super) fn is_called(&self, id: EntryId) -> bool {
        self.place(id).is_some_and(|place| matches!(place, Place::Called(_)))
    }

    pub(super) fn is_in_line(&self, id: EntryId) -> bool {
        self.place(id) == Some(Place::Line)
    }

    pub(super) fn grace(&self) -> Duration {
        self.config.grace
    }

    pub(super) fn configure(&mut self, bound: usize, age: Duration) {
        self.config.bound = bound;
        self.config.age = age;
    }

    /// Joins the line; `Err` if the queue is full.
    pub(super) fn push(&mut self, waiter: Waiter) -> Result<EntryId, Full> {
        if self.len() >= self.config.bound {
            return Err(Full);
        }
        let class = waiter.class as usize;
        let id = EntryId(draw(&mut self.arrivals) << 1 | class as u64);
        let turn = draw(&mut self.turns);
        self.lines[class].insert(waiter.agent, id.0, turn);
        let entry = Entry {
            agent: waiter.agent,
            since: waiter.now,
            turn,
            last: self.last,
            place: Place::Line,
            waker: None,
        };
        self.entries[class].insert(id.0, entry);
        Ok(id)
    }

    /// The one who would be called next.
    pub(super) fn head(&self, now: Time) -> Option<EntryId> {
        self.lines[self.next_class(now)?].head().map(EntryId)
    }

    /// Calls the next in line. Its waker, if it has one that was not used.
    pub(super) fn call_next(&mut self, now: Time) -> Option<(EntryId, Option<Waker>)> {
        let class = self.next_class(now)?;
        let next = draw(&mut self.turns);
        let (waiter, turn) = self.lines[class].pop(next)?;
        let call = draw(&mut self.calls);
        self.called.insert(call, (EntryId(waiter), None));
        let last = mem::replace(&mut self.last, class);
        let entry = self.entries[class].get_mut(&waiter)?;
        entry.place = Place::Called(call);
        (entry.turn, entry.last) = (turn, last);
        Some((EntryId(waiter), entry.waker.take()))
    }

    fn next_class(&self, now: Time) -> Option<usize> {
        let [interactive, batch] = &self.lines;
        match (interactive.is_empty(), batch.oldest()) {
            (true, None) => None,
            (true, Some(_)) => Some(BATCH),
            (false, Some(oldest)) if self.last == INTERACTIVE => {
                let since = self.entries[BATCH].get(&oldest).map(|entry| entry.since);
                let waited = since.map_or(Duration::ZERO, |since| now.saturating_since(since));
                Some(if waited > self.config.age { BATCH } else { INTERACTIVE })
            }
            (false, _) => Some(INTERACTIVE),
        }
    }

    /// A waiter is polled: a lapsed one takes its place in the line again. Its
    /// waker is taken out, so that it does not wake itself. `None` if there is
    /// no such waiter.
    pub(super) fn attend(&mut self, id: EntryId) -> Option<Option<Waker>> {
        let entry = self.entries[id.class()].get_mut(&id.0)?;
        if entry.place == Place::Lapsed {
            entry.place = Place::Line;
            self.lines[id.class()].insert(entry.agent, id.0, entry.turn);
        }
        Some(entry.waker.take())
    }

    /// The poll ends in waiting.
    pub(super) fn wait(&mut self, id: EntryId, waker: Waker) {
        if let Some(entry) = self.entries[id.class()].get_mut(&id.0) {
            entry.waker = Some(waker);
        }
    }

    /// The waker of one that is to be polled though not called.
    pub(super) fn take_waker(&mut self, id: EntryId) -> Option<Waker> {
        self.entries[id.class()].get_mut(&id.0)?.waker.take()
    }

    /// A called waiter finds no slot: back to its place, which it does not lose.
    pub(super) fn put_back(&mut self, id: EntryId) {
        let class = id.class();
        let Some(entry) = self.entries[class].get_mut(&id.0) else {
            return;
        };
        if let Place::Called(call) = mem::replace(&mut entry.place, Place::Line) {
            self.called.remove(&call);
            self.lines[class].insert(entry.agent, id.0, entry.turn);
            self.last = entry.last;
        }
    }

    /// A called waiter got its slot.
    pub(super) fn serve(&mut self, id: EntryId) {
        if let Some(entry) = self.entries[id.class()].remove(&id.0)
            && let Place::Called(call) = entry.place
        {
            self.called.remove(&call);
        }
    }

    /// A waiter leaves. Its waker, to be dropped outside the lock.
    pub(super) fn cancel(&mut self, id: EntryId) -> Option<Waker> {
        let class = id.class();
        let entry = self.entries[class].remove(&id.0)?;
        match entry.place {
            Place::Line => {
                self.lines[class].remove(entry.agent, id.0);
            }
            Place::Called(call) => {
                self.called.remove(&call);
                self.lines[class].give_back(entry.agent, entry.turn);
                self.last = entry.last;
            }
            Place::Lapsed => {}
        }
        entry.waker
    }

    /// Lets those lapse who were called and have not come. Calls are dated by
    /// the first instant read after them, since a release reads no clock.
    pub(super) fn lapse_called(&mut self, now: Time) {
        for (_, date) in self.called.range_mut(self.undated..).map(|(_, call)| call) {
            *date = Some(now);
        }
        self.undated = self.calls;
        while let Some((&call, &(id, date))) = self.called.first_key_value() {
            if date.is_none_or(|date| date.saturating_add(self.config.grace) > now) {
                break;
            }
            self.called.remove(&call);
            self.set_aside(id);
        }
    }

    /// Lets one lapse who is in the line, but has not come to its timer.
    pub(super) fn lapse(&mut self, id: EntryId) {
        if let Some(entry) = self.entries[id.class()].get(&id.0)
            && let Some(turn) = self.lines[id.class()].remove(entry.agent, id.0)
        {
            self.set_aside(id);
            if let Some(entry) = self.entries[id.class()].get_mut(&id.0) {
                entry.turn = turn;
            }
        }
    }

    fn set_aside(&mut self, id: EntryId) {
        if let Some(entry) = self.entries[id.class()].get_mut(&id.0) {
            entry.place = Place::Lapsed;
        }
    }

    pub(super) fn position(&self, id: EntryId) -> Option<usize> {
        let entry = self.entries[id.class()].get(&id.0)?;
        Some(match entry.place {
            Place::Called(call) => self.called.range(..call).count(),
            Place::Lapsed => 0,
            Place::Line => {
                let pressing = match id.class() {
                    BATCH => self.lines[INTERACTIVE].len(),
                    _ => 0,
                };
                self.called() + pressing + self.lines[id.class()].ahead(entry.agent, id.0)
            }
        })
    }

    pub(super) fn oldest_wait(&self, now: Time) -> Option<Duration> {
        let firsts = self.entries.iter().filter_map(|map| map.values().next());
        firsts.map(|entry| now.saturating_since(entry.since)).max()
    }

    fn place(&self, id: EntryId) -> Option<Place> {
        Some(self.entries[id.class()].get(&id.0)?.place)
    }

    #[cfg(all(test, not(herd_loom)))]
    pub(super) fn agents(&self) -> usize {
        self.lines.iter().map(Line::agents).sum()
    }
}

fn draw(counter: &mut u64) -> u64 {
    let drawn = *counter;
    *counter += 1;
    drawn
}
