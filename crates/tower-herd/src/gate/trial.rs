//! A pacer for tests.

use std::time::Duration;

use super::*;

/// A ceiling, and whatever else is set.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub(super) cap: u32,
    pub(super) spacing: Duration,
    /// A second ceiling that is not published.
    pub(super) inner: Option<u32>,
    /// Always says to ask again at once.
    pub(super) late: bool,
    paused: Option<Time>,
    next: Time,
    pub(super) asked: u32,
}

impl Trial {
    pub(super) fn fixed(cap: u32) -> Self {
        Trial {
            cap,
            spacing: Duration::ZERO,
            inner: None,
            late: false,
            paused: None,
            next: Time::ZERO,
            asked: 0,
        }
    }

    pub(super) fn pause(&mut self, until: Time) {
        self.paused = Some(until);
    }
}

impl Pacer for Trial {
    type Admitted = ();

    fn admit(&mut self, now: Time, busy: u32, _: usize) -> Result<(), Blocked> {
        self.asked += 1;
        if self.late {
            return Err(Blocked::Until(now));
        }
        match self.paused {
            Some(until) if now < until => return Err(Blocked::Until(until)),
            _ => self.paused = None,
        }
        if self.inner.is_some_and(|inner| busy >= inner) {
            return Err(Blocked::Slot);
        }
        if self.spacing > Duration::ZERO {
            if now < self.next {
                return Err(Blocked::Until(self.next));
            }
            self.next = now.saturating_add(self.spacing);
        }
        Ok(())
    }

    fn published(&self) -> Published {
        Published {
            cap: self.cap,
            fast: self.cap,
            slow: self.late || self.paused.is_some() || self.inner.is_some() || self.spacing > Duration::ZERO,
        }
    }
}

impl<P: Pacer> Gate<P> {
    /// Nothing is kept of agents without waiters.
    pub(super) fn check_queue(&self) {
        let inner = self.lock();
        assert!(inner.queue.agents() <= inner.queue.len());
    }
}
