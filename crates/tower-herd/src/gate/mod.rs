//! The admission gate of one provider: how many calls are in flight here, and
//! who goes next.
//!
//! A semaphore does not do. The ceiling shrinks while slots are out, to zero if
//! it must (tokio's can forget only free permits); a slot is *claimed* by a
//! waiter that is polled, never assigned to one that may not be polled again; a
//! pause, a release ramp or a rate, the [`Pacer`], has a say in each admission
//! while one is in force; waiters are served in turns over agents and by class;
//! and a slot whose call was dropped may have to [linger](Gate::release_at).
//!
//! While there is room, no pause and nobody waiting, an admission is one
//! compare-exchange and a release one subtraction on one word. All else happens
//! under one lock, of which the word's flags tell.
//!
//! # Use
//!
//! [`try_acquire`](Gate::try_acquire) first. If it says no,
//! [`try_admit`](Gate::try_admit) for who does not wait, else
//! [`enqueue`](Gate::enqueue) and then **at once**, and whenever woken,
//! [`poll_claim`](Gate::poll_claim). A waiter that was told an instant polls
//! again at that instant at the latest: it keeps the time for all the others.
//! One that gives up says so by [`cancel`](Gate::cancel) ([`Entry`] does it when
//! dropped), so that the next is woken in its place.
//!
//! A task may wait in several gates with one waker: when one serves it, it
//! cancels the others, called or not.
//!
//! Newcomers never pass waiters, and a waiter that was called for a slot does
//! not lose it to a newcomer, of whatever class. One release wakes one waiter
//! at most.
//!
//! # Instants
//!
//! They come from the caller, and may come in any order: the gate goes by the
//! latest that anyone has read. A release reads no clock. A poll that follows a
//! timer wants a precise reading: with one that lags behind the timer the waiter
//! is told the same instant again, though it is over.
#![allow(
    dead_code,
    reason = "which of these are used depends on the features; the fleet's lease drives the rest"
)]

mod guard;
mod line;
mod linger;
mod queue;
mod state;
mod sync;
mod word;

#[cfg(all(test, herd_loom))]
mod loom_tests;
#[cfg(all(test, not(herd_loom)))]
mod model_tests;
#[cfg(all(test, not(herd_loom)))]
mod queue_tests;
#[cfg(all(test, not(herd_loom)))]
mod tests;
#[cfg(all(test, not(herd_loom)))]
mod trial;

use std::{fmt, sync::PoisonError, task::Context, time::Duration};

#[cfg(test)]
use guard::Permit;
pub use guard::{Entry, Handle};
pub use queue::{Class, EntryId, Full, QueueConfig, Waiter};
pub use word::MAX_CAP;

use crate::clock::Time;
use state::{Inner, Wakes};
use sync::{Fault, Mutex, MutexGuard, fault};
use word::{LINGERING, SLOW, WAITING, Word};

/// What decides when a free slot may be used, beside that it is free.
pub trait Pacer {
    /// What an admission is told, for instance whether it is a probe.
    type Admitted;

    /// May one more call start `now`, with `busy` in flight and `waiting` in the
    /// queue (the one who asks is counted if it waits)? `Ok` counts as started:
    /// it always is.
    ///
    /// Only asked while a slot is free. A refusal holds until what it names
    /// happens, or [`Gate::with_pacer`]: the question is not repeated before.
    fn admit(&mut self, now: Time, busy: u32, waiting: usize) -> Result<Self::Admitted, Blocked>;

    /// What the fast path goes by; read after each call of the above.
    fn published(&self) -> Published;
}

/// Why a pacer says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Ask again when a slot frees or the ceiling changes.
    Slot,
    /// Ask again at this instant.
    Until(Time),
}

/// What a pacer shows of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The most calls in flight.
    pub cap: u32,
    /// [`Pacer::admit`] must be asked for each call. Whoever may refuse below
    /// `cap` sets it, or the fast path admits without a question.
    pub slow: bool,
    /// Below this many in flight a call is admitted without asking. At most `cap`.
    pub fast: u32,
}

/// The answer to a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Claimed<A> {
    /// A slot: it is to be released.
    Got(A),
    /// Not yet: the waker was kept.
    Wait {
        /// Poll again at this instant, woken or not. Only one waiter is told; an
        /// instant told before is void.
        again_at: Option<Time>,
    },
}

/// A bound of the ceiling from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The most calls in flight.
    pub cap: u32,
    /// The bound falls to this with the calls that end.
    pub shed: Option<u32>,
}

/// Who is in a gate, under its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Slots that are out, the lingering ones included.
    pub busy: u32,
    /// Waiters in the queue.
    pub waiting: usize,
}

/// Use and ceiling at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// The ceiling.
    pub cap: u32,
    /// Slots that are out, the lingering ones included. More than `cap` after a
    /// shrink.
    pub busy: u32,
}

/// The gate. See the [module](self).
pub struct Gate<P> {
    word: Word,
    inner: Mutex<Inner<P>>,
}

impl<P: Pacer> Gate<P> {
    /// A gate with nobody in it.
    pub fn new(pacer: P, config: QueueConfig) -> Self {
        let inner = Inner::new(pacer, config);
        let (cap, fast, flags) = inner.desired();
        Gate { word: Word::new(cap, fast, flags), inner: Mutex::new(inner) }
    }

    /// Takes a slot if one is free, nobody waits and the pacer need not be
    /// asked. Lock-free. A no may be passing: it only means to ask under the
    /// lock.
    #[inline]
    pub fn try_acquire(&self) -> bool {
        self.word.try_acquire()
    }

    /// Counts a call, slot or not; how many came before, about.
    #[inline]
    pub fn count(&self) -> u64 {
        self.word.count()
    }

    /// Takes a slot if the pacer agrees, one is free and nobody waits.
    ///
    /// `Err(Slot)`: all are out, or others wait.
    pub fn try_admit(&self, now: Time) -> Result<P::Admitted, Blocked> {
        let bits = self.word.load();
        if bits.free() == 0 && !bits.has(WAITING | SLOW | LINGERING) {
            return Err(Blocked::Slot);
        }
        self.locked(|inner, wakes| inner.admit_now(&self.word, now, wakes))
    }

    /// Takes a free slot past the queue and the pacer, if `allow` (told what is in flight) agrees: for a
    /// probe while all others are paused.
    pub fn try_take(&self, now: Time, allow: impl FnOnce(&P, u32) -> bool) -> bool {
        self.locked(|inner, wakes| inner.take(&self.word, now, allow, wakes))
    }

    /// Gives a slot back. True if it went with it: the bound from outside fell ([`bind`](Self::bind)).
    #[inline]
    pub fn release(&self) -> bool {
        let before = self.word.release(1);
        before.has(WAITING) && !fault(Fault::NoWaitingFlag) && self.slot_freed()
    }

    #[cold]
    #[inline(never)]
    fn slot_freed(&self) -> bool {
        self.locked(|inner, wakes| {
            inner.slot_freed();
            let shed = inner.shed(&self.word);
            inner.settle(&self.word, None, wakes);
            shed
        })
    }

    /// Gives a slot back at `until`: its call was dropped, but may still run at
    /// the provider. It counts as busy until then, and a little longer if nobody
    /// looks.
    pub fn release_at(&self, until: Time) {
        self.locked(|inner, wakes| {
            inner.linger(&self.word, until);
            inner.settle(&self.word, None, wakes);
        });
    }

    /// Bounds the ceiling from outside, for instance by the lease of a fleet:
    /// the smaller of this and the pacer's is in force. It may go below what is
    /// out, and to zero; nobody is thrown out, nobody enters. No slot is
    /// assigned, those who may claim one are woken.
    ///
    /// What was out at the very step, so that `max(cap, busy)` bounds what can
    /// be in flight from then on.
    pub fn set_cap(&self, cap: u32) -> Occupancy {
        self.bind(|_, _, _| Bound { cap, shed: None })
    }

    /// The same by what is in the gate at that step; `bound` may change the pacer as well.
    ///
    /// Down to [`shed`](Bound::shed) the bound falls with each slot that is given back from then on: those
    /// slots are others'.
    ///
    /// `bound` is told the bound in force, what is out, and how many wait.
    pub fn bind(&self, bound: impl FnOnce(&mut P, Occupancy, usize) -> Bound) -> Occupancy {
        self.locked(|inner, wakes| {
            // Holds off the fast path: what the bound is reckoned from stays true, but for slots given back.
            let (cap, fast, flags) = inner.desired();
            let bits = self.word.publish(cap, fast, flags | WAITING);
            let here = Occupancy { cap: inner.limit.min(MAX_CAP), busy: bits.busy() };
            let bound = bound(&mut inner.pacer, here, inner.queue.len());
            (inner.limit, inner.shedding) = (bound.cap, bound.shed);
            inner.shed(&self.word);
            inner.pacer_changed();
            let bits = match fault(Fault::SilentChange) {
                true => inner.publish(&self.word),
                false => inner.settle(&self.word, None, wakes),
            };
            Occupancy { cap: bits.cap(), busy: bits.busy() }
        })
    }

    /// Changes the pacer. Once this has returned the new ceiling and flag are
    /// in force, and those who may go now have been woken.
    pub fn with_pacer<R>(&self, change: impl FnOnce(&mut P) -> R) -> R {
        self.locked(|inner, wakes| {
            let result = change(&mut inner.pacer);
            inner.pacer_changed();
            if fault(Fault::SilentChange) {
                inner.publish(&self.word);
            } else {
                inner.settle(&self.word, None, wakes);
            }
            result
        })
    }

    /// [`with_pacer`](Self::with_pacer), told who is in the gate.
    pub fn change<R>(&self, change: impl FnOnce(&mut P, Load) -> R) -> R {
        self.locked(|inner, wakes| {
            let load = Load { busy: self.word.load().busy(), waiting: inner.queue.len() };
            let result = change(&mut inner.pacer, load);
            inner.pacer_changed();
            inner.settle(&self.word, None, wakes);
            result
        })
    }

    /// [`read_pacer`](Self::read_pacer), told who is in the gate.
    pub fn look<R>(&self, look: impl FnOnce(&P, Load) -> R) -> R {
        let inner = self.lock();
        look(&inner.pacer, Load { busy: self.word.load().busy(), waiting: inner.queue.len() })
    }

    /// Whether the pacer must be asked for each admission.
    #[inline]
    pub fn is_slow(&self) -> bool {
        self.word.load().has(SLOW)
    }

    /// Changes the bound of the queue and the age of a batch waiter.
    pub fn configure(&self, bound: usize, age: Duration) {
        self.locked(|inner, _| inner.queue.configure(bound, age));
    }

    /// Reads the pacer. Wakes nobody.
    pub fn read_pacer<R>(&self, read: impl FnOnce(&P) -> R) -> R {
        read(&self.lock().pacer)
    }

    /// Joins the queue. To be polled at once, and cancelled if given up.
    pub fn enqueue(&self, waiter: Waiter) -> Result<EntryId, Full> {
        self.locked(|inner, wakes| {
            inner.tick(&self.word, waiter.now);
            let joined = inner.queue.push(waiter);
            inner.settle(&self.word, None, wakes);
            joined
        })
    }

    /// Claims the slot of a waiter, or keeps its waker.
    ///
    /// # Panics
    ///
    /// If it has been served or cancelled.
    pub fn poll_claim(&self, id: EntryId, now: Time, cx: &mut Context<'_>) -> Claimed<P::Admitted> {
        self.locked(|inner, wakes| inner.poll(&self.word, id, now, cx.waker(), wakes))
            .expect("polled after it was served or cancelled")
    }

    /// A waiter gives up; the next is woken if it was called. Nothing happens if
    /// it has been served or cancelled.
    pub fn cancel(&self, id: EntryId) {
        self.locked(|inner, wakes| {
            let unused = inner.queue.cancel(id);
            wakes.discard(unused);
            inner.leave(id);
            if fault(Fault::SilentCancel) {
                inner.publish(&self.word);
            } else {
                inner.settle(&self.word, None, wakes);
            }
        });
    }

    /// How many waiters go before this one, if none comes, leaves or ages.
    /// `None` if it does not wait. Takes time in proportion to the queue.
    pub fn position(&self, id: EntryId) -> Option<usize> {
        self.lock().queue.position(id)
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.lock().queue.len()
    }

    /// For how long the oldest waiter has waited.
    pub fn oldest_wait(&self, now: Time) -> Option<Duration> {
        self.lock().queue.oldest_wait(now)
    }

    /// How many slots linger, as far as anyone has looked.
    pub fn lingering(&self) -> usize {
        self.lock().lingering.len()
    }

    /// How many slots are out, the lingering ones included.
    #[inline]
    pub fn busy(&self) -> u32 {
        self.word.load().busy()
    }

    /// The same by this clock: slots whose lingering is over, but that nobody has
    /// looked at since, are given back first. The clock is read only if some linger.
    pub fn busy_at(&self, now: impl FnOnce() -> Time) -> u32 {
        if self.word.load().has(LINGERING) {
            self.locked(|inner, wakes| {
                inner.tick(&self.word, now());
                inner.settle(&self.word, None, wakes);
            });
        }
        self.busy()
    }

    /// The ceiling in force.
    pub fn cap(&self) -> u32 {
        self.word.load().cap()
    }

    /// The bound from outside, what is out, and how many wait.
    pub fn bound(&self) -> (Occupancy, usize) {
        let inner = self.lock();
        (Occupancy { cap: inner.limit, busy: self.word.load().busy() }, inner.queue.len())
    }

    /// Ceiling and use at one instant.
    pub fn occupancy(&self) -> Occupancy {
        let bits = self.word.load();
        Occupancy { cap: bits.cap(), busy: bits.busy() }
    }

    /// Runs under the lock; wakes, and drops wakers, after it.
    fn locked<R>(&self, run: impl FnOnce(&mut Inner<P>, &mut Wakes) -> R) -> R {
        let mut wakes = Wakes::default();
        let result = run(&mut self.lock(), &mut wakes);
        wakes.wake();
        result
    }

    /// A pacer that panicked leaves nothing half done that the next operation
    /// does not publish anew, so poison is of no interest.
    fn lock(&self) -> MutexGuard<'_, Inner<P>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Pacer> fmt::Debug for Gate<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("occupancy", &self.occupancy()).finish_non_exhaustive()
    }
}
