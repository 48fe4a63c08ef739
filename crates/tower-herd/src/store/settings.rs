use super::{LeaseClock, Terms};
use crate::{Clock, Time};
use std::{error::Error, fmt, sync::Arc, time::Duration};

/// How a process shares through a store. All members of a fleet are best given the same.
///
/// The times hang together: `margin = gap + 50 ms`; a lease is used until `ttl - margin` after its report was
/// sent, so that with the defaults six renewals may fail before anything stops.
#[derive(Clone, Debug)]
pub struct FleetSettings {
    pub(super) label: String,
    pub(super) weight: u32,
    pub(super) ttl: Duration,
    pub(super) renew: Duration,
    pub(super) gap: Duration,
    pub(super) longest_call: Option<Duration>,
    pub(super) outage: Outage,
    pub(super) grace: Duration,
    pub(super) trickle: u32,
    pub(super) timeout: Duration,
    pub(super) clock: LeaseClock,
    pub(super) own_thread: bool,
}

/// What a process does when its lease has run out and the store does not answer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Outage {
    /// No calls: those in flight finish, no new ones start. The ceiling holds, whoever else lives.
    Stop,
    /// A share, 0 to 1, of the process's equal part of the ceiling goes on, for the
    /// [`grace`](FleetSettings::grace), where the ceiling is at least twice the members; below that it is
    /// [`Stop`](Self::Stop). The store keeps those slots aside for as long, so the ceiling holds here too: also
    /// where only this process has lost the store. The price: after a crash, or an end without
    /// [`Fleet::leave`](crate::Fleet::leave), they are nobody's until the grace is over. All that is kept, for the living
    /// and the dead, is never more than the share of the ceiling, so the rest is there whatever dies.
    ///
    /// The default, with a share of 0.5. A fleet whose ceiling is under twice its members cannot leave each of
    /// them a whole slot and still have half of the ceiling to hand out, so it stops; any other goes on at half
    /// speed. To lose the store is then no outage, and no stampede either.
    Keep(f64),
    /// So many calls at a time, as long as it lasts: each process for itself, so that N processes may have N
    /// times as many in flight (BerriAI/litellm#35533).
    Local(u32),
}

impl Default for Outage {
    fn default() -> Self {
        Outage::Keep(0.5)
    }
}

impl Default for FleetSettings {
    fn default() -> Self {
        FleetSettings {
            label: String::new(),
            weight: 1,
            ttl: Duration::from_secs(10),
            renew: Duration::from_secs(1),
            gap: Duration::from_secs(3),
            longest_call: None,
            outage: Outage::default(),
            grace: Duration::from_secs(600),
            trickle: 0,
            timeout: Duration::from_millis(500),
            clock: LeaseClock::Machine,
            own_thread: true,
        }
    }
}

impl FleetSettings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A name for people who look at the store, such as that of the host or pod. Default: none.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Its part of a ceiling that is too small for all: one of weight 3 gets three times what one of weight 1
    /// gets. Default 1.
    #[must_use]
    pub fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// How long the store keeps the slots of a process that it does not hear of. Default 10 s.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How often a lease is renewed, give or take a tenth. Default 1 s.
    #[must_use]
    pub fn renew(mut self, renew: Duration) -> Self {
        self.renew = renew;
        self
    }

    /// A longer silence at the store, or a jump of its clock, makes it wait for all members before it gives
    /// more. At least 2.5 times [`renew`](Self::renew). Default 3 s.
    #[must_use]
    pub fn gap(mut self, gap: Duration) -> Self {
        self.gap = gap;
        self
    }

    /// Strict: no call takes longer than this, so after [`ttl`](Self::ttl) and this time the calls of a process
    /// that was stopped, killed or cut off are over, and only then its slots are given to others. It is for the
    /// application to see to that with a timeout. Default: slots are given to others after `ttl`.
    #[must_use]
    pub fn strict(mut self, longest_call: Duration) -> Self {
        self.longest_call = Some(longest_call);
        self
    }

    /// What happens when the store is lost. Default [`Outage::Keep`] with a share of 0.5.
    #[must_use]
    pub fn outage(mut self, outage: Outage) -> Self {
        self.outage = outage;
        self
    }

    /// For how long [`Outage::Keep`] goes on. Default 10 minutes.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Slots, over the whole fleet, that a new store gives out before it knows who else there is (it learns
    /// that in one [`ttl`](Self::ttl)). A store that lost its data is new too: the ceiling may then be exceeded
    /// by this. Default 0.
    #[must_use]
    pub fn trickle(mut self, slots: u32) -> Self {
        self.trickle = slots;
        self
    }

    /// A store that has not answered after this is taken for lost. Default 500 ms.
    #[must_use]
    pub fn answer_within(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// For tests: leases go by tokio's clock, which may be paused, and are renewed by tasks of the runtime that
    /// the fleet is made in, and its first provider. By default they go by a clock that runs on while the machine sleeps, and are
    /// renewed on a thread of their own, so that a blocked runtime loses none.
    #[must_use]
    pub fn on_this_runtime(mut self) -> Self {
        self.clock = LeaseClock::Tokio(Clock::new());
        self.own_thread = false;
        self
    }

    /// For tests: leases go by this clock, in time since any fixed instant; as if the machine had slept, for
    /// instance.
    #[must_use]
    pub fn lease_clock(mut self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = LeaseClock::Custom(Arc::new(move || Time::ZERO.saturating_add(now())));
        self
    }

    /// From the sending of a report until its grant may be used no longer.
    pub(super) fn lease(&self) -> Duration {
        self.ttl.saturating_sub(self.margin())
    }

    pub(crate) fn clock(&self) -> &LeaseClock {
        &self.clock
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn renew_every(&self) -> Duration {
        self.renew
    }

    pub(crate) fn has_own_thread(&self) -> bool {
        self.own_thread
    }

    pub(crate) fn outage_policy(&self) -> Outage {
        self.outage
    }

    pub(super) fn longest_call(&self) -> Duration {
        self.longest_call.unwrap_or_default()
    }

    pub(super) fn margin(&self) -> Duration {
        self.gap.saturating_add(Duration::from_millis(50))
    }

    pub(super) fn keeps(&self) -> f64 {
        match self.outage {
            Outage::Keep(share) => share,
            Outage::Stop | Outage::Local(_) => 0.0,
        }
    }

    pub(super) fn terms(&self) -> Terms {
        Terms {
            ttl: millis(self.ttl),
            gap: millis(self.gap),
            extra: millis(self.longest_call.unwrap_or_default()),
            keep: self.keeps(),
            grace: millis(self.grace),
            trickle: self.trickle,
        }
    }

    pub(crate) fn check_runtime(&self) -> Result<(), FleetSettingsError> {
        if self.own_thread || tokio::runtime::Handle::try_current().is_ok() {
            return Ok(());
        }
        Err(FleetSettingsError {
            field: "on_this_runtime",
            why: "was asked for where there is no tokio runtime",
        })
    }

    pub(crate) fn check(&self) -> Result<(), FleetSettingsError> {
        let wrong = |field, why| Err(FleetSettingsError { field, why });
        if self.weight == 0 {
            return wrong("weight", "must be at least 1");
        }
        if self.renew < Duration::from_millis(10) {
            return wrong("renew", "must be at least 10 ms");
        }
        if self.gap < self.renew.saturating_mul(5) / 2 {
            return wrong("gap", "must be at least 2.5 times `renew`, or a late renewal stops the fleet");
        }
        if self.lease() < self.renew.saturating_mul(2) {
            return wrong("ttl", "must leave at least two renewals after `gap` and 50 ms are taken off");
        }
        if self.ttl > Duration::from_secs(24 * 3600) {
            return wrong("ttl", "is longer than a day");
        }
        if self.timeout.is_zero() || self.timeout > self.renew {
            return wrong("answer_within", "must be more than zero and no longer than `renew`");
        }
        if let Outage::Keep(share) = self.outage
            && !(0.0..=1.0).contains(&share)
        {
            return wrong("outage", "keeps a share that is not from 0 to 1");
        }
        if self.outage == Outage::Local(0) {
            return wrong("outage", "goes on with no calls; say `Outage::Stop`");
        }
        Ok(())
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A wait, in milliseconds: never a shorter one.
pub(crate) fn whole_millis(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Settings of a fleet that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetSettingsError {
    /// The field at fault.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: &'static str,
}

impl fmt::Display for FleetSettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "settings of the fleet: {} {}", self.field, self.why)
    }
}

impl Error for FleetSettingsError {}
