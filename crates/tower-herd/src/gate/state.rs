//! What the lock of a gate guards: the pacer, the queue, and who keeps the time.
//!
//! The rule that no wake-up is lost: after each operation ([`Inner::settle`]),
//! with waiters in the queue, either
//! - as many waiters have been called as there are free slots (one at a time
//!   when the pacer must be asked: each that is admitted calls the next), or
//! - the pacer has refused until an instant, or slots linger: then one waiter,
//!   the *keeper*, was told that instant or has been woken to be told, or
//! - no slot is free: the next release comes here, since `WAITING` is set.

use std::{mem, task::Waker};

use super::{
    Blocked, Claimed, Pacer,
    linger::Lingering,
    queue::{EntryId, Queue, QueueConfig},
    sync::{Fault, fault},
    word::{Bits, LINGERING, MAX_CAP, SLOW, WAITING, Word},
};
use crate::clock::Time;

pub(super) struct Inner<P> {
    pub(super) pacer: P,
    pub(super) queue: Queue,
    pub(super) lingering: Lingering,
    /// The bound set from outside, beside the pacer's.
    pub(super) limit: u32,
    /// Down to where that falls with each slot that is given back.
    pub(super) shedding: Option<u32>,
    /// The pacer's last no, while it holds.
    blocked: Option<Blocked>,
    keeper: Option<Keeper>,
    /// The latest instant that any caller has read.
    now: Time,
}

/// The one waiter with a timer.
struct Keeper {
    id: EntryId,
    /// What it was told. `None`: it was woken to be told.
    at: Option<Time>,
    /// The first instant read after it was woken.
    woken: Option<Time>,
}

/// Wakers to be used or dropped outside the lock: both may run anything, even
/// an operation of this gate. One is the rule, and does not allocate.
#[derive(Default)]
pub(super) struct Wakes {
    first: Option<Waker>,
    more: Vec<Waker>,
    unused: Option<Waker>,
}

impl Wakes {
    fn push(&mut self, waker: Option<Waker>) {
        match waker {
            Some(waker) if self.first.is_none() => self.first = Some(waker),
            other => self.more.extend(other),
        }
    }

    pub(super) fn discard(&mut self, waker: Option<Waker>) {
        self.unused = waker;
    }

    pub(super) fn wake(self) {
        self.first.into_iter().chain(self.more).for_each(Waker::wake);
    }
}

impl<P: Pacer> Inner<P> {
    pub(super) fn new(pacer: P, config: QueueConfig) -> Self {
        Inner {
            pacer,
            queue: Queue::new(config),
            lingering: Lingering::default(),
            limit: MAX_CAP,
            shedding: None,
            blocked: None,
            keeper: None,
            now: Time::ZERO,
        }
    }

    /// Ceiling and flags as they should be now.
    pub(super) fn desired(&self) -> (u32, u32, u64) {
        let published = self.pacer.published();
        let mut flags = 0;
        // (Whoever gives a slot back must come here to learn that it goes with it.)
        if !self.queue.is_empty() || self.shedding.is_some() {
            flags |= WAITING;
        }
        if published.slow {
            flags |= SLOW;
        }
        if self.lingering.len() > 0 {
            flags |= LINGERING;
        }
        (published.cap.min(self.limit), published.fast, flags)
    }

    pub(super) fn publish(&self, word: &Word) -> Bits {
        let (cap, fast, flags) = self.desired();
        word.publish(cap, fast, flags)
    }

    /// Time passes: slots end their lingering, a pause is over, the absent lapse.
    pub(super) fn tick(&mut self, word: &Word, now: Time) {
        self.now = self.now.max(now);
        self.reap(word);
        if matches!(self.blocked, Some(Blocked::Until(at)) if at <= self.now) {
            self.blocked = None;
        }
        self.queue.lapse_called(self.now);
        if let Some(keeper) = &mut self.keeper {
            let woken = &mut keeper.woken;
            let expected = keeper.at.unwrap_or_else(|| *woken.get_or_insert(self.now));
            if expected.saturating_add(self.queue.grace()) <= self.now {
                self.queue.lapse(keeper.id);
                self.keeper = None;
            }
        }
    }

    /// One slot ends its lingering at `until`.
    pub(super) fn linger(&mut self, word: &Word, until: Time) {
        self.lingering.push(until);
        self.reap(word);
    }

    fn reap(&mut self, word: &Word) {
        let reaped = self.lingering.reap(self.now);
        if reaped > 0 {
            word.release(reaped);
            self.slot_freed();
            self.shed(word);
        }
    }

    /// Whoever was blocked for want of a slot may ask again.
    pub(super) fn slot_freed(&mut self) {
        if self.blocked == Some(Blocked::Slot) {
            self.blocked = None;
        }
    }

    /// The bound falls to what is still out, if it is to: whether it did.
    pub(super) fn shed(&mut self, word: &Word) -> bool {
        let Some(least) = self.shedding else { return false };
        let bound = word.load().busy().max(least);
        let falls = bound < self.limit;
        if falls {
            self.limit = bound;
        }
        falls
    }

    /// The pacer may have changed its mind.
    pub(super) fn pacer_changed(&mut self) {
        self.blocked = None;
    }

    /// Publishes, then calls those who may claim, or sees to it that somebody
    /// keeps the time; `present`, if it waits, is the one being polled. The word
    /// as published.
    pub(super) fn settle(&mut self, word: &Word, present: Option<EntryId>, wakes: &mut Wakes) -> Bits {
        let bits = self.publish(word);
        if self.queue.is_empty() {
            self.blocked = None;
            self.keeper = None;
            return bits;
        }
        let free = bits.free();
        let wanted = match free {
            _ if self.blocked.is_some() => 0,
            free if bits.has(SLOW) || bits.busy() >= bits.fast() => free.min(1),
            free => free,
        };
        while self.queue.called() < wanted as usize {
            let Some((id, waker)) = self.queue.call_next(self.now) else {
                break;
            };
            if self.keeper.as_ref().is_some_and(|keeper| keeper.id == id) {
                self.keeper = None;
            }
            wakes.push(waker);
        }
        if self.queue.called() == 0 {
            self.keep_time(free, present, wakes);
        }
        bits
    }

    /// The instant at which something will change by itself.
    fn due(&self, free: u32) -> Option<Time> {
        match self.blocked {
            Some(Blocked::Until(at)) if free > 0 => Some(at),
            None if free > 0 => None,
            _ => self.lingering.next(),
        }
    }

    fn keep_time(&mut self, free: u32, present: Option<EntryId>, wakes: &mut Wakes) {
        let Some(due) = self.due(free) else {
            self.keeper = None;
            return;
        };
        let id = match &self.keeper {
            Some(keeper) if keeper.at.is_none_or(|at| at <= due) => return,
            Some(keeper) => keeper.id,
            None => {
                let present = present.filter(|&id| self.queue.is_in_line(id));
                match present.or_else(|| self.queue.head(self.now)) {
                    Some(id) => id,
                    None => return,
                }
            }
        };
        self.keeper = Some(Keeper { id, at: None, woken: None });
        wakes.push(self.queue.take_waker(id));
    }

    /// Forgets that this waiter kept the time, if it did.
    pub(super) fn leave(&mut self, id: EntryId) {
        if self.keeper.as_ref().is_some_and(|keeper| keeper.id == id) {
            self.keeper = None;
        }
    }

    /// Asks for a slot, under `WAITING`. `Err(None)`: there is none.
    pub(super) fn ask(&mut self, word: &Word) -> Result<P::Admitted, Option<Blocked>> {
        let bits = word.load();
        if bits.free() == 0 {
            return Err(None);
        }
        match self.pacer.admit(self.now, bits.busy(), self.queue.len()) {
            Ok(admitted) => {
                word.admit();
                Ok(admitted)
            }
            // An instant that has come would be asked for again at once.
            Err(Blocked::Until(at)) => {
                let next = Time::from_nanos(self.now.as_nanos().saturating_add(1));
                Err(Some(Blocked::Until(at.max(next))))
            }
            Err(Blocked::Slot) => Err(Some(Blocked::Slot)),
        }
    }

    /// One poll of a waiter. `None`: there is no such waiter.
    pub(super) fn poll(
        &mut self,
        word: &Word,
        id: EntryId,
        now: Time,
        waker: &Waker,
        wakes: &mut Wakes,
    ) -> Option<Claimed<P::Admitted>> {
        self.tick(word, now);
        let mut mine = self.queue.attend(id)?;
        let mut bits = self.settle(word, Some(id), wakes);
        // Again if a slot was freed just after it found none: it was called
        // again then, with no waker to tell it.
        while self.queue.is_called(id) {
            match self.ask(word) {
                Ok(admitted) => {
                    self.queue.serve(id);
                    wakes.discard(mine);
                    self.settle(word, None, wakes);
                    return Some(Claimed::Got(admitted));
                }
                Err(blocked) => {
                    self.queue.put_back(id);
                    self.blocked = blocked;
                    bits = self.settle(word, Some(id), wakes);
                    if fault(Fault::AskOnce) {
                        break;
                    }
                }
            }
        }
        let due = self.due(bits.free());
        let mut again_at = None;
        if let Some(keeper) = &mut self.keeper
            && keeper.id == id
        {
            keeper.at = due;
            again_at = due;
            if due.is_none() {
                self.keeper = None;
            }
        }
        match mine.take_if(|mine| mine.will_wake(waker)) {
            Some(mine) => self.queue.wait(id, mine),
            None => {
                wakes.discard(mem::take(&mut mine));
                self.queue.wait(id, waker.clone());
            }
        }
        Some(Claimed::Wait { again_at })
    }

    /// A slot for somebody who is asked for by nobody but itself.
    pub(super) fn take(
        &mut self,
        word: &Word,
        now: Time,
        allow: impl FnOnce(&P, u32) -> bool,
        wakes: &mut Wakes,
    ) -> bool {
        self.tick(word, now);
        // Holds off the fast path: what is seen stays true, but for slots given back.
        let (cap, fast, flags) = self.desired();
        word.publish(cap, fast, flags | WAITING);
        let bits = word.load();
        let taken = bits.free() > 0 && allow(&self.pacer, bits.busy());
        if taken {
            word.admit();
        }
        self.settle(word, None, wakes);
        taken
    }

    /// A slot for somebody who does not wait.
    pub(super) fn admit_now(
        &mut self,
        word: &Word,
        now: Time,
        wakes: &mut Wakes,
    ) -> Result<P::Admitted, Blocked> {
        self.tick(word, now);
        let answer = match self.blocked {
            Some(blocked) => Err(blocked),
            None if self.queue.is_awaited() => Err(Blocked::Slot),
            None => {
                // Holds off the fast path: what the pacer is told stays true.
                let (cap, fast, flags) = self.desired();
                word.publish(cap, fast, flags | WAITING);
                self.ask(word).map_err(|no| no.unwrap_or(Blocked::Slot))
            }
        };
        self.settle(word, None, wakes);
        answer
    }
}
