//! A control that is led: the fleet's store learns the ceiling and shares the rates, this process admits what it
//! was given. The pause, and the line after it, stay its own.

use super::{Admitted, Control, PAUSE_MAX, mean};
use crate::{Time, provider::wallet::Wallet};
use std::time::Duration;

/// What the store has told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lead {
    /// Good replies are to be counted: the ceiling is to grow.
    pub(super) counts: bool,
    /// Calls that wait for a slot in other processes.
    queued: u32,
    /// Good replies since they were last asked for.
    served: u32,
    /// Slots of all members, and the part of them that this process may count on: for estimates only.
    pub(super) ceiling: u32,
    pub(super) share: u32,
    /// What may be spent of a rate that the fleet shares; none: there is no such limit.
    pub(super) purse: Option<Purse>,
}

/// A process's part of a rate of requests.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::provider) struct Purse {
    wallet: Wallet,
    /// The least time between two calls: a chunk is not one burst.
    gap: Duration,
    /// When the next may go.
    next: Time,
    /// It fills up by itself, a call in this time, while the store is lost.
    alone: Option<Duration>,
    /// Calls that went since this was last asked for.
    spent: u64,
}

impl Purse {
    /// A chunk came.
    pub(in crate::provider) fn fill(&mut self, now: Time, amount: u64, until: Time) {
        self.alone = None;
        self.wallet.fill(now, amount, until);
        let many = u32::try_from(self.wallet.holds(now)).unwrap_or(u32::MAX).max(1);
        // In half of its time: the other half is for what comes late.
        self.gap = until.saturating_since(now) / 2 / many;
    }

    /// Calls that went since this was last asked for, and what is left.
    pub(in crate::provider) fn look(&mut self, now: Time) -> (u64, u64) {
        (std::mem::take(&mut self.spent), self.wallet.holds(now))
    }

    /// Takes out what is not needed.
    pub(in crate::provider) fn surplus(&mut self, now: Time, keep: u64) -> u64 {
        self.wallet.surplus(now, keep)
    }

    /// The store is lost: one call in this time, with no burst.
    pub(in crate::provider) fn fend(&mut self, every: Duration) {
        self.alone = Some(every);
    }

    /// When a call may go; none: when a chunk comes.
    fn ready(&self, now: Time) -> Option<Time> {
        (self.alone.is_some() || self.wallet.affords(now, 1)).then_some(self.next)
    }

    fn take(&mut self, now: Time) {
        self.spent += 1;
        // A timer is late by its grain: the next turn counts from when this one was due.
        let due = self.next.max(now.saturating_sub(super::rate::LATE));
        let mut gap = self.gap;
        match self.alone {
            Some(every) if !self.wallet.affords(now, 1) => gap = every,
            _ => self.wallet.take(now, 1),
        }
        self.next = due.saturating_add(gap);
    }
}

impl Control {
    /// This process has so many slots of a ceiling of this generation.
    pub(in crate::provider) fn lease(&mut self, slots: u32) {
        self.cap = slots.max(1);
        self.limit = Some(self.cap);
    }

    /// Calls admitted from now on carry this generation; good replies are counted or not. `share` of the `ceiling`
    /// is what this process may count on, though it may hold less while it needs less.
    pub(in crate::provider) fn follow(&mut self, generation: u64, counts: bool, ceiling: u32, share: u32) {
        self.stamp = generation;
        (self.lead.counts, self.lead.ceiling, self.lead.share) = (counts, ceiling, share);
    }

    /// So many calls wait for a slot in other processes.
    pub(in crate::provider) fn queued(&mut self, calls: u32) {
        self.lead.queued = calls;
    }

    /// About how long it takes until the line of the whole fleet is through, and `position` calls more.
    pub(super) fn line(&self, position: u32) -> Duration {
        if self.lead.queued == 0 {
            return Duration::ZERO;
        }
        let turn = self.latency.unwrap_or(super::PRIOR) / self.prospects().1.max(1);
        turn.saturating_mul(self.lead.queued.saturating_add(position).saturating_add(1))
    }

    /// What can be counted on of the ceiling, in an estimate, and what there can be at best.
    pub(super) fn prospects(&self) -> (u32, u32) {
        (self.cap.max(self.lead.share), self.cap.max(self.lead.ceiling))
    }

    pub(in crate::provider) fn take_served(&mut self) -> u32 {
        std::mem::take(&mut self.lead.served)
    }

    /// The purse of a rate that the fleet shares, where there is one.
    pub(in crate::provider) fn purse(&mut self, is_limited: bool) -> Option<&mut Purse> {
        if is_limited {
            self.lead.purse.get_or_insert_default();
        } else {
            self.lead.purse = None;
        }
        self.lead.purse.as_mut()
    }

    /// What holds a call back: until when, or (none) until a chunk comes.
    pub(super) fn held_by_purse(&self, now: Time) -> Option<Option<Time>> {
        let ready = self.lead.purse.as_ref()?.ready(now);
        if ready.is_some_and(|at| at <= now) { None } else { Some(ready) }
    }

    pub(super) fn spend(&mut self, now: Time) {
        if let Some(purse) = &mut self.lead.purse {
            purse.take(now);
        }
    }

    pub(super) fn led_success(&mut self) {
        self.lead.served = self.lead.served.saturating_add(1);
    }

    /// The wait that a refused call costs. It was told to the store, which cuts.
    pub(super) fn led_throttled(&mut self, now: Time, call: Admitted, wait: Option<Duration>, pauses: bool) {
        if call.at > Time::ZERO {
            self.refusal = Some(mean(self.refusal, now.saturating_since(call.at)));
        }
        if let Some(wait) = wait.filter(|_| pauses) {
            self.set_pause(now, wait.min(PAUSE_MAX), false);
        }
    }
}
