//! The one word that decides: `cap:20 | fast:20 | waiting:1 | slow:1 | lingering:1 | busy:21`.
//!
//! Ceiling and use live in one atomic, so that "shrink" and "admit" are one
//! linear order: after a shrink nobody enters on the old ceiling. The flags are
//! in it too, so that the fast path cannot pass a waiter or a pacer that came
//! between its look and its step. A release is `busy - 1`, never `free + 1`, so
//! a slot taken under a larger ceiling does not mint one under a smaller.
//!
//! `fast` is up to where the fast path admits without asking the pacer; it is never
//! above `cap`. Whatever but `busy` changes only under the lock of the gate.

// Not loom's: the count decides nothing that a model checks.
use std::sync::atomic::{
    AtomicU64 as Count,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use super::sync::{AtomicU64, Fault, fault};

const BUSY: u64 = (1 << 21) - 1;
const FAST_SHIFT: u32 = 24;
const CAP_SHIFT: u32 = 44;

/// Somebody waits (or is being asked for under the lock): nobody passes.
pub(super) const WAITING: u64 = 1 << 23;
/// The pacer wants to be asked.
pub(super) const SLOW: u64 = 1 << 22;
/// Some of the busy slots end by themselves.
pub(super) const LINGERING: u64 = 1 << 21;

/// The largest ceiling; a larger one is taken for this.
pub const MAX_CAP: u32 = (1 << 20) - 1;

/// One reading of the word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Bits(u64);

impl Bits {
    pub(super) fn cap(self) -> u32 {
        (self.0 >> CAP_SHIFT) as u32
    }

    /// Up to where nobody needs to ask.
    pub(super) fn fast(self) -> u32 {
        (self.0 >> FAST_SHIFT) as u32 & MAX_CAP
    }

    pub(super) fn busy(self) -> u32 {
        (self.0 & BUSY) as u32
    }

    pub(super) fn free(self) -> u32 {
        self.cap().saturating_sub(self.busy())
    }

    pub(super) fn has(self, flags: u64) -> bool {
        self.0 & flags != 0
    }
}

/// Alone in its cache lines (two, since processors fetch them in pairs): every
/// call writes it.
#[repr(align(128))]
pub(super) struct Word {
    bits: AtomicU64,
    /// Calls counted so far. Here, because whoever takes a slot has these lines.
    calls: Count,
}

impl Word {
    pub(super) fn new(cap: u32, fast: u32, flags: u64) -> Self {
        Word { bits: AtomicU64::new(pack(cap, fast) | flags), calls: Count::new(0) }
    }

    /// Counts a call; how many came before, about: of two at one instant one may get lost, since an
    /// exact count costs as much as the admission.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        let calls = self.calls.load(Relaxed);
        self.calls.store(calls.wrapping_add(1), Relaxed);
        calls
    }

    #[inline]
    pub(super) fn load(&self) -> Bits {
        Bits(self.bits.load(Acquire))
    }

    /// The fast path: one slot if few enough are out and no flag forbids it.
    #[inline]
    pub(super) fn try_acquire(&self) -> bool {
        let mut forbidding = WAITING | SLOW;
        if fault(Fault::NoWaitingFlag) {
            forbidding = SLOW;
        }
        if fault(Fault::NoSlowFlag) {
            forbidding = WAITING;
        }
        let mut now = self.bits.load(Relaxed);
        loop {
            if now & forbidding != 0 || Bits(now).busy() >= Bits(now).fast() {
                return false;
            }
            match self.bits.compare_exchange_weak(now, now + 1, AcqRel, Relaxed) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
    }

    /// Gives `count` slots back; what the word said before.
    #[inline]
    pub(super) fn release(&self, count: u32) -> Bits {
        let early = fault(Fault::EarlyLook).then(|| self.load());
        let before = Bits(self.bits.fetch_sub(u64::from(count), AcqRel));
        if before.busy() < count {
            // A slot given back twice would borrow from the flags.
            self.bits.fetch_add(u64::from(count), AcqRel);
            debug_assert!(false, "a slot was given back twice");
        }
        early.unwrap_or(before)
    }

    /// Takes a slot that is known to be free: under the lock, with `WAITING`
    /// set, others can only give back.
    pub(super) fn admit(&self) {
        let before = Bits(self.bits.fetch_add(1, AcqRel));
        debug_assert!(before.free() > 0 && before.has(WAITING));
    }

    /// Sets ceiling and flags, leaves the slots; under the lock. What it says then.
    pub(super) fn publish(&self, cap: u32, fast: u32, flags: u64) -> Bits {
        let mut now = self.bits.load(Acquire);
        loop {
            let next = pack(cap, fast) | flags | (now & BUSY);
            if next == now {
                return Bits(now);
            }
            match self.bits.compare_exchange_weak(now, next, AcqRel, Acquire) {
                Ok(_) => return Bits(next),
                Err(changed) => now = changed,
            }
        }
    }
}

fn pack(cap: u32, fast: u32) -> u64 {
    let cap = cap.min(MAX_CAP);
    u64::from(cap) << CAP_SHIFT | u64::from(fast.min(cap)) << FAST_SHIFT
}
