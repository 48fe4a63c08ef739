//! An open breaker, as the pause that it is: until when, and when it is probed.

use crate::{Mode, Switch, Time, random::Random};
use std::time::Duration;

/// An open breaker. It ends by a good probe or by an operator, never by time: when its open time is over
/// without one, there are still only probes.
#[derive(Debug)]
pub(crate) struct Broken {
    since: Time,
    /// What callers are told.
    until: Time,
    /// Calls sent in this generation or later were sent after it opened.
    generation: u64,
    probe_at: Time,
    /// The next probe goes a uniform time in `[gap, 2 gap]` after the one before.
    gap: Duration,
    /// The least it was, and when the last probe went.
    first: Duration,
    sent: Time,
    /// What `gap` grows to: half of the longest time between two probes, so that jitter survives the cap.
    most: Duration,
    probe_timeout: Duration,
    random: Random,
    switch: Switch,
}

/// When an open breaker is probed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probes {
    /// The first goes a uniform time in `[first, 2 first]` after the trip.
    pub(crate) first: Duration,
    /// The longest time between two.
    pub(crate) last: Duration,
    /// A probe that takes longer is given up, and another may go.
    pub(crate) timeout: Duration,
}

impl Broken {
    /// For `open`, and up to a quarter more.
    pub(crate) fn new(
        now: Time,
        open: Duration,
        probes: Probes,
        generation: u64,
        mut random: Random,
        switch: Switch,
    ) -> Self {
        let until = now.saturating_add(open).saturating_add(random.up_to(open / 4));
        let mut broken = Broken {
            since: now,
            until,
            generation,
            probe_at: now,
            gap: probes.first,
            first: probes.first,
            sent: now,
            most: probes.last / 2,
            probe_timeout: probes.timeout,
            random,
            switch,
        };
        broken.plan(now);
        broken
    }

    /// One that has been open for `since`, and is for `left` more.
    #[cfg(feature = "store")]
    pub(crate) fn joined(
        now: Time,
        since: Duration,
        left: Duration,
        probes: Probes,
        generation: u64,
        random: Random,
        switch: Switch,
    ) -> Self {
        let mut broken = Broken::new(now, Duration::ZERO, probes, generation, random, switch);
        (broken.since, broken.until) = (now.saturating_sub(since), now.saturating_add(left));
        broken
    }

    /// By an operator: nobody calls, probes included, until he closes it.
    pub(crate) fn forced(now: Time, generation: u64, random: Random, switch: Switch) -> Self {
        let never = Probes { first: Duration::ZERO, last: Duration::ZERO, timeout: Duration::ZERO };
        let broken = Broken::new(now, Duration::ZERO, never, generation, random, switch);
        Broken { probe_at: Time::MAX, ..broken }
    }

    pub(crate) fn since(&self) -> Time {
        self.since
    }

    /// The end of its open time.
    pub(crate) fn until(&self) -> Time {
        self.until
    }

    pub(crate) fn is_forced(&self) -> bool {
        self.probe_at == Time::MAX
    }

    /// When it is probed.
    #[cfg(all(feature = "store", feature = "breaker"))]
    pub(crate) fn probes(&self) -> Probes {
        Probes { first: self.first, last: self.most.saturating_mul(2), timeout: self.probe_timeout }
    }

    /// Whether it stops anybody.
    pub(crate) fn is_enforced(&self) -> bool {
        self.switch.mode() == Mode::Enforce
    }

    /// Whether a call of this generation was sent after it opened.
    pub(crate) fn is_proof(&self, sent: u64) -> bool {
        sent >= self.generation && !self.is_forced()
    }

    /// The instant that callers are told: the end of the open time, then that of the next probe.
    pub(crate) fn told(&self, now: Time) -> Time {
        /// Until a probe that is under way may be back, or an operator has changed his mind.
        const SOON: Duration = Duration::from_secs(1);
        if now < self.until {
            return self.until;
        }
        let next = if self.is_forced() { now } else { self.probe_at };
        next.max(now.saturating_add(SOON))
    }

    pub(crate) fn probe_at(&self) -> Time {
        self.probe_at
    }

    /// How soon to look again when a probe that is due cannot go yet.
    pub(crate) fn step(&self) -> Duration {
        (self.gap / 20).max(Duration::from_millis(1))
    }

    /// A probe goes; when it is given up.
    pub(crate) fn sends_probe(&mut self, now: Time) -> Time {
        self.plan(now);
        self.sent = now;
        now.saturating_add(self.probe_timeout)
    }

    pub(crate) fn untake(&mut self, now: Time) {
        self.probe_at = self.probe_at.min(now);
    }

    /// It is dead still: asked ever more rarely.
    pub(crate) fn probe_failed(&mut self, now: Time) {
        self.gap = self.gap.saturating_mul(2).min(self.most.max(self.gap));
        self.plan(now);
    }

    /// It was given up by its caller, or cut before it could have been answered: nothing was learned, and the
    /// next one need not wait for longer than the first did.
    pub(crate) fn probe_unanswered(&mut self) {
        let wait = self.first.saturating_add(self.random.up_to(self.first));
        self.probe_at = self.probe_at.min(self.sent.saturating_add(wait));
    }

    fn plan(&mut self, now: Time) {
        let wait = self.gap.saturating_add(self.random.up_to(self.gap));
        self.probe_at = now.saturating_add(wait);
    }
}
