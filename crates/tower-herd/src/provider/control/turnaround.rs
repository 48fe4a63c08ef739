//! A place is free for us when the reply is there; the provider may count the call a little longer.
//!
//! nginx counts a connection down some milliseconds after the last byte left, and replies travel. Who
//! fills each place in the instant it becomes free is then refused at a level that was fine a moment
//! ago. To give up places for that costs a part of the throughput for good (two of twenty: a tenth); to
//! wait a few milliseconds before a place is taken again costs those milliseconds.

use crate::Time;
use std::{collections::VecDeque, time::Duration};

/// The first wait; each further refusal of the kind makes it four times longer ...
const FIRST: Duration = Duration::from_millis(8);
/// ... up to this, or an eighth of a call. Beyond that it is not the explanation.
const MOST: Duration = Duration::from_millis(40);

/// Of so many places at most it is remembered when they became free.
const MANY: usize = 1024;

/// Places that became free lately.
#[derive(Clone, Debug, Default)]
pub(super) struct Turnaround {
    wait: Duration,
    before: Duration,
    /// In flight when last looked.
    seen: u32,
    freed: VecDeque<Time>,
}

impl Turnaround {
    pub(super) fn is_on(&self) -> bool {
        !self.wait.is_zero()
    }

    /// Waits longer. False if it waits long enough already.
    pub(super) fn lengthen(&mut self, latency: Option<Duration>) -> bool {
        let most = latency.map_or(FIRST, |l| MOST.min(l / 8));
        let next = self.wait.saturating_mul(4).max(FIRST).min(most);
        let longer = next > self.wait;
        self.before = self.wait;
        self.wait = next.max(self.wait);
        longer
    }

    /// The last lengthening was for a wrong reason.
    pub(super) fn undo(&mut self) {
        self.wait = self.before;
    }

    /// Until when places are taken, with `busy` calls in flight and `cap` places.
    pub(super) fn full(&mut self, now: Time, busy: u32, cap: u32) -> Option<Time> {
        if !self.is_on() {
            return None;
        }
        self.look(now, busy);
        while self.freed.front().is_some_and(|at| at.saturating_add(self.wait) <= now) {
            self.freed.pop_front();
        }
        let freed = u32::try_from(self.freed.len()).unwrap_or(u32::MAX);
        let over = busy.saturating_add(freed).checked_sub(cap)?;
        // So many of them have to be over, and this call's.
        self.freed.get(over as usize).map(|at| at.saturating_add(self.wait))
    }

    /// So many are in flight now: those that were before and are not any more have just ended.
    pub(super) fn look(&mut self, now: Time, busy: u32) {
        if self.is_on() {
            let ended = self.seen.saturating_sub(busy) as usize;
            self.freed.extend(std::iter::repeat_n(now, ended.min(MANY)));
            self.freed.truncate(MANY);
        }
        self.seen = busy;
    }
}
