//! The pause, and its end: a paced line, never a crowd.

use super::{COLD, Control, PAUSE_MAX, PRIOR, SETTLE, SPAN, WINDOW};
use crate::Time;
use std::time::Duration;

/// The end of a pause.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    pub(super) from: Time,
    pub(super) until: Time,
    pub(super) window: Duration,
    /// Spacing that lets the backlog out evenly; set by the first admission.
    pub(super) even: Option<Duration>,
    /// What had ever been in service with success before the pause.
    pub(super) proven: u32,
    /// The limit is not to be trusted.
    pub(super) doubt: bool,
}

impl Control {
    /// `most`, or two thirds of a call's length if that is shorter: in which time a ceiling fills.
    pub(super) fn span(&self, most: Duration) -> Duration {
        self.latency.map_or(most, |l| most.min(l / 3 * 2))
    }

    /// The least time between two admissions.
    pub(super) fn spacing(&self, now: Time, busy: u32) -> Duration {
        let Some(r) = self.release.filter(|r| now < r.until) else {
            return self.span(COLD) / self.cap.max(1);
        };
        let space = if self.limit.is_none() && self.pace.is_none() {
            let own = self.span(SPAN) / r.proven.max(1);
            return r.even.map_or(own, |e| e.min(own));
        } else if r.doubt {
            self.span(SPAN) / busy.clamp(self.plan(), self.cap)
        } else {
            self.span(SPAN) / self.cap.max(1)
        };
        // a bucket that filled up in the pause is not emptied at once
        space.max(Duration::from_nanos(self.pace.map_or(0, |p| p.gap / 2)).min(self.span(SPAN)))
    }

    /// What can be counted on of a ceiling that is in doubt.
    pub(super) fn plan(&self) -> u32 {
        (self.cap / 5).max(1)
    }

    /// Pauses the scope for a reason other than a refused call (a drained account, another member
    /// of the fleet, an operator). Merged by maximum.
    pub fn pause(&mut self, now: Time, until: Time) {
        self.set_pause(now, until.saturating_since(now), false);
    }

    pub(super) fn set_pause(&mut self, now: Time, cost: Duration, doubt: bool) {
        let until = now.saturating_add(cost.min(PAUSE_MAX));
        if until < self.pause {
            return;
        }
        self.pause = until;
        let window = (cost / 2).max(WINDOW);
        let settle = if self.limit.is_some() { SETTLE } else { SETTLE.max(window) };
        self.release = Some(Release {
            from: until,
            until: until.saturating_add(settle),
            window,
            even: None,
            proven: self.proven,
            doubt,
        });
        self.warm = 0;
        // A wait of zero is no gap between what went before it and what comes after.
        if !cost.is_zero() {
            self.last = None;
        }
    }

    /// Pauses the scope for as long as its breaker is open: nobody knows until when.
    pub fn hold(&mut self, now: Time) {
        self.set_pause(now, WINDOW, false);
        self.pause = Time::MAX;
    }

    /// The breaker has closed. What is left of another pause goes on, until `until`; and in line, as
    /// always.
    pub fn let_go(&mut self, now: Time, until: Time) {
        if self.pause == Time::MAX {
            self.pause = now;
            self.set_pause(now, until.saturating_since(now), false);
        }
    }

    /// Ends the pause (a later success, an operator). What follows is still released in line.
    pub fn pause_clear(&mut self, now: Time) {
        if now < self.pause && self.pause != Time::MAX {
            self.pause = now;
            if let Some(r) = &mut self.release {
                let length = r.until.saturating_since(r.from);
                r.from = now;
                r.until = now.saturating_add(length);
            }
        }
    }

    /// What a caller waits at least, the pause aside, that has `position` others before it: for who must
    /// not be sent away on a guess. A ceiling that is still being discovered promises nothing.
    #[must_use]
    pub fn least_wait(&self, now: Time, position: usize, busy: u32) -> Duration {
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        let mut wait = Duration::ZERO;
        if let (Some(limit), Some(latency)) = (self.limit, self.latency) {
            let cap = limit.max(self.prospects().1).max(1);
            let free = cap.saturating_sub(busy);
            if position >= free {
                wait = (latency / cap).saturating_mul((position - free).saturating_add(1));
            }
        }
        if let Some(p) = self.pace.filter(super::Pace::is_known) {
            let line = Duration::from_nanos(p.gap.saturating_mul(u64::from(position)));
            wait = wait.max(p.ready().saturating_since(now).saturating_add(line));
        }
        wait
    }

    /// About how long a caller waits that has `position` others before it.
    #[must_use]
    pub fn estimate_wait(&self, now: Time, position: usize, busy: u32) -> Duration {
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        let latency = self.latency.unwrap_or(PRIOR);
        let paused = self.pause.saturating_since(now);
        let start = now.max(self.pause);
        let releasing = self.release.filter(|r| start < r.until);
        let cap = match releasing {
            Some(r) if r.doubt => self.plan(),
            _ => self.prospects().0.max(1),
        };
        let turn = latency / cap;
        let mut wait = if let (Some(_), false) = (releasing, paused.is_zero()) {
            paused.saturating_add(turn.max(self.spacing(start, 0)).saturating_mul(position))
        } else {
            let free = cap.min(self.prospects().0).saturating_sub(busy);
            if position < free {
                releasing.map_or(Duration::ZERO, |_| self.spacing(start, busy).saturating_mul(position))
            } else {
                turn.saturating_mul((position - free).saturating_add(1))
            }
        };
        wait = wait.max(paused.saturating_add(self.line(position)));
        if let Some(p) = &self.pace {
            let line = Duration::from_nanos(p.gap.saturating_mul(u64::from(position)));
            wait = wait.max(p.ready().saturating_since(now).saturating_add(line));
        }
        wait
    }
}
