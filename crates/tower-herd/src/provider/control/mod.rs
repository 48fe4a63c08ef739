//! The control of one provider scope: ceiling, pause, release, pacing. Pure and synchronous.
//!
//! # What it is for
//! A provider says "no" in one word (429) and means one of two things: *too many at once* or *too
//! many per second*. This machine finds out which and how many, from nothing but the replies, and
//! pays for each question with as few refused calls and pauses as it can, since **a refused call is
//! cheap and the pause it brings is not**: it stops the whole scope for a hint.
//!
//! # How it works
//! * **Exact inference.** Every call carries its *rank* (how many were in flight, itself included)
//!   and a *stamp* (how many 429s had come back when it left). When it is refused, the number that
//!   the provider was really serving is `rank - 1 - (429s that came back in between)`, because those
//!   were in flight too and about to be refused. One refusal tells the limit; there is nothing to
//!   search and no factor to tune.
//! * **One cut per event.** A 429 whose stamp is older than the cut belongs to it: it may sharpen
//!   the limit, it does not cut again.
//! * **Cap and limit.** `limit` is what the last event told, `cap` what is admitted now. Unlearned
//!   (`limit` unknown) the cap grows with each success, but only when it is what holds calls back.
//!   After a cut it returns to the limit quickly and stays there.
//! * **Probes.** After [`Settings::probe_gap`] pauses' length of holding, one call more than the
//!   limit. Refused, it cost one call and one pause and the next gap doubles; accepted, the step
//!   doubles. A call that has not been refused in four times what refusals take is accepted.
//! * **Release.** A pause ends in a paced line, never in a crowd. If the limit is trusted (the pause
//!   came from a failed probe) the line moves at the speed of the limit; if it is not, at twice
//!   what is *seen in service*, which is bounded by the true limit whatever was believed.
//!   If nothing was ever proven the whole backlog is spread over `max(1 s, hint / 2)`.
//! * **Turnaround.** A provider may count a call a few milliseconds longer than we do. Refused at a
//!   level that was fine a moment ago, a freed place is taken again a little later, before any is given
//!   up for good.
//! * **Rate.** Limit headers tell the rate, as far as the calls bear them out (`headers`): calls are
//!   paced by a GCRA. Without headers, refusals that contradict a limit on concurrency (lower and lower,
//!   or an acceptance just above a refusal) turn pacing on; between two refusals the bucket was emptied
//!   exactly once, so accepted calls over time is the rate. Where a pause costs several calls the first
//!   suspicion is heeded, beside the ceiling.
//! * **Timers are late** by up to a millisecond. Spacing and pacing count from when a turn was due, so
//!   that this costs no throughput.
//!
//! # How to drive it
//! All methods are called under one mutex; after each, publish [`Control::fast_cap`] (calls may be
//! admitted without the mutex while `busy < fast_cap` and nobody waits; such a call takes
//! `rank` from its own compare-and-swap and [`Control::stamp`] from an atomic) and
//! [`Control::watches`] (if false, successes need not be reported, but for a sample of latencies).
//! `busy` counts every admitted call that has not been settled, the settling one included.

mod adapt;
mod admit;
mod growth;
mod headers;
mod lead;
mod rate;
mod release;
mod replies;
#[cfg(test)]
mod tests;
mod turnaround;

use crate::Time;
use growth::Probe;
use headers::{Bucket, Headers};
use lead::Lead;
use rate::{Pace, Source};
use release::Release;
use std::time::Duration;
use turnaround::Turnaround;

/// What the owner of a provider may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The ceiling before anything is learned.
    pub start: u32,
    /// The ceiling never falls below it.
    pub floor: u32,
    /// The configured ceiling: where calls start, and never exceeded.
    pub max: Option<u32>,
    /// The pause after a 429 without a hint; doubles on consecutive ones, ...
    pub bare: Duration,
    /// ... up to this.
    pub bare_max: Duration,
    /// A rate that is known from the start.
    pub rate: Option<Rate>,
    /// Growth probes are this many pauses apart: 20 bounds what failed probes cost at 5 %.
    pub probe_gap: u32,
    /// The ceiling is the fleet's store's to learn, and what this process has of it comes by [`Control::lease`].
    pub led: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            start: 10,
            floor: 1,
            max: None,
            bare: Duration::from_secs(1),
            bare_max: Duration::from_secs(30),
            rate: None,
            probe_gap: 20,
            led: false,
        }
    }
}

/// A configured rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// One call in this time.
    pub every: Duration,
}

/// What a call carries from its admission to its settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// 429s that had come back when it was admitted: its generation.
    pub stamp: u64,
    /// Calls in flight at its admission, itself included.
    pub rank: u32,
    /// How many were admitted before it, and itself; 0 if that is not known.
    pub nth: u64,
    /// When (a coarse clock will do; `Time::ZERO` = unknown).
    pub at: Time,
    /// No call had reached this rank since the last congestion event (false for calls that were
    /// admitted without the mutex: they stay below what is warm).
    pub first: bool,
}

/// Not now: ask again at this instant, or (`None`) when a call settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockedUntil(pub Option<Time>);

/// What a reply says about a refilling bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitHeaders {
    /// Its capacity.
    pub limit: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// Until it is full again.
    pub reset: Duration,
    /// The unit in which the reset was told (1 s where it is in whole seconds): its error.
    pub resolution: Duration,
}

/// After a pause a full ceiling is released in no less than this: a sixth of it per 100 ms.
const SPAN: Duration = Duration::from_millis(600);
/// A rung that was idle is filled in no less than this.
const COLD: Duration = Duration::from_millis(250);
/// How long after a pause every admission is spaced.
const SETTLE: Duration = Duration::from_millis(2200);
/// A release's window is at least this.
const WINDOW: Duration = Duration::from_secs(1);
/// Until a reply tells, a call is taken to last this long (only for estimates).
const PRIOR: Duration = Duration::from_millis(250);
/// Failed probes double the gap up to this (or one plain gap, if that is longer).
const GAP_MAX: Duration = Duration::from_secs(600);
/// No pause is longer.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);
/// By how much a success grows a ceiling that was never cut.
const GROW: u32 = 3;
/// The least time after which a call that was not refused counts as accepted.
const ACCEPT: Duration = Duration::from_millis(100);
/// Contradictions of "it limits concurrency" after which it is taken to limit the rate.
const CONTRADICTIONS: u32 = 6;
/// A pause of so many calls' length is dear.
const DEAR: u32 = 3;

/// The last congestion event.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Admission of its first refused call.
    sent: Time,
    /// Length of its pause.
    cost: Duration,
    /// Admissions since.
    admits: u32,
    /// A call above the limit was already tried out of turn.
    verified: bool,
}

/// The state machine of one provider scope. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Control {
    set: Settings,
    /// Admissions so far.
    admitted: u64,
    /// 429s that came back.
    stamp: u64,
    /// Calls with an older stamp belong to the last event.
    cut: u64,
    cap: u32,
    limit: Option<u32>,
    step: u32,
    misses: u32,
    probe_at: Time,
    probe: Option<Probe>,
    /// The time for a probe had come when last asked.
    probe_due: bool,
    proven: u32,
    /// The highest rank reached since the last event.
    high: u32,
    pause: Time,
    bare: u32,
    event: Option<Event>,
    release: Option<Release>,
    /// In-flight level reached without a jump: above it admissions are spaced.
    warm: u32,
    idle: Option<Time>,
    last: Option<Time>,
    latency: Option<Duration>,
    refusal: Option<Duration>,
    contradictions: u32,
    /// The limit was seen from both sides.
    exact: bool,
    /// It is blurred: the provider counts calls a little longer than we do.
    shaded: bool,
    /// The limit before the probes under way.
    base: u32,
    /// Places that are taken again only a little after they became free.
    turnaround: Turnaround,
    pace: Option<Pace>,
    bucket: Option<Bucket>,
    headers: Headers,
    lead: Lead,
}

impl Control {
    /// A scope of which nothing is known but its settings.
    #[must_use]
    pub fn new(set: Settings) -> Self {
        let floor = set.floor.max(1);
        let set = Settings { floor, ..set };
        Control {
            set,
            stamp: 0,
            cut: 0,
            cap: set.max.unwrap_or(set.start).max(floor),
            limit: set.max.map(|m| m.max(floor)),
            step: 1,
            misses: 0,
            probe_at: Time::ZERO,
            probe: None,
            probe_due: false,
            proven: 0,
            high: 0,
            pause: Time::ZERO,
            bare: 0,
            event: None,
            release: None,
            warm: 0,
            idle: None,
            last: None,
            latency: None,
            refusal: None,
            contradictions: 0,
            exact: false,
            shaded: false,
            base: 0,
            // A rate that the fleet shares comes in chunks.
            pace: set.rate.filter(|_| !set.led).map(|rate| Pace::configured(rate.every)),
            turnaround: Turnaround::default(),
            bucket: None,
            headers: Headers::default(),
            lead: Lead::default(),
            admitted: 0,
        }
    }

    /// Whether [`Control::admit`] may agree to one call above the ceiling, or wants to be asked soon.
    #[must_use]
    pub fn looks_above(&self) -> bool {
        let verify = self.event.is_some_and(|e| !e.verified && e.admits == 0);
        self.limit.is_some_and(|l| self.cap >= l && self.cap < self.top())
            && (self.probe.is_some() || verify || (self.probe_due && self.release.is_none()))
    }

    /// The ceiling in force.
    #[must_use]
    pub fn ceiling(&self) -> u32 {
        self.cap
    }

    /// The limit that the last congestion event told, if any did.
    #[cfg(test)]
    #[must_use]
    pub fn limit(&self) -> Option<u32> {
        self.limit
    }

    /// The generation that a call admitted now must carry.
    #[must_use]
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Mean duration of served calls, once known.
    #[must_use]
    pub fn latency(&self) -> Option<Duration> {
        self.latency
    }

    #[cfg(test)]
    /// Calls a second at which it paces, if it does.
    #[must_use]
    pub fn pace_gap(&self) -> Option<Duration> {
        self.pace.map(|p| Duration::from_nanos(p.gap))
    }

    /// The pause in force.
    #[must_use]
    pub fn paused_until(&self, now: Time) -> Option<Time> {
        (self.pause > now).then_some(self.pause)
    }

    /// Whether every admission must go through [`Control::admit`]. Time alone never sets it (a pause
    /// is set by a call), so a published copy is never stale in the dangerous direction.
    #[must_use]
    pub fn slow(&self) -> bool {
        self.pause > Time::ZERO && self.release.is_some()
            || self.pace.is_some()
            || self.bucket.is_some()
            || self.turnaround.is_on()
            || self.contradictions > 0
            || self.lead.purse.is_some()
            || self.limit.is_some_and(|l| self.cap > l)
    }

    /// Below this many in flight a call may be admitted without the mutex, if nobody waits.
    #[must_use]
    pub fn fast_cap(&self) -> u32 {
        if self.slow() { 0 } else { self.cap.min(self.warm) }
    }

    /// Whether successes must be reported (otherwise a sample of latencies is enough).
    #[must_use]
    pub fn watches(&self) -> bool {
        if self.set.led {
            return self.bare > 0 || self.lead.counts;
        }
        self.bare > 0 || self.pace.is_some() || self.limit != Some(self.cap) || self.proven == 0
    }

    /// Whether the pace is reckoned from limit headers, so that each of them counts.
    #[must_use]
    pub fn follows_headers(&self) -> bool {
        self.bucket.is_some() || self.pace.is_some_and(|p| p.source == Source::Told)
    }

    fn top(&self) -> u32 {
        if self.set.led {
            return self.cap;
        }
        self.set.max.unwrap_or(u32::MAX).max(self.set.floor)
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// What a limit of `l` may look like when calls are counted at slightly different times.
fn blur(l: u32) -> u32 {
    l.saturating_add(l / 8).saturating_add(2)
}

fn mean(old: Option<Duration>, new: Duration) -> Duration {
    match old {
        None => new,
        Some(o) => o.saturating_mul(7).saturating_add(new) / 8,
    }
}
