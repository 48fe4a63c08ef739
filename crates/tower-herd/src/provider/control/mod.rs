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
//! * **Rate.** Limit headers tell the rate: calls are paced by a GCRA. Without headers, refusals
//!   that contradict a limit on concurrency (lower and lower, or an acceptance just above a
//!   refusal) turn pacing on; between two refusals the bucket was emptied exactly once, so accepted
//!   calls over time is the rate.
//!
//! # How to drive it
//! All methods are called under one mutex; after each, publish [`Control::fast_cap`] (calls may be
//! admitted without the mutex while `busy < fast_cap` and nobody waits; such a call takes
//! `rank` from its own compare-and-swap and [`Control::stamp`] from an atomic) and
//! [`Control::watches`] (if false, successes need not be reported, but for a sample of latencies).
//! `busy` counts every admitted call that has not been settled, the settling one included.

mod adapt;
#[cfg(test)]
mod tests;

use crate::Time;
use std::time::Duration;

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

/// The end of a pause.
#[derive(Clone, Copy, Debug)]
struct Release {
    from: Time,
    until: Time,
    window: Duration,
    /// Spacing that lets the backlog out evenly; set by the first admission.
    even: Option<Duration>,
    /// What had ever been in service with success before the pause.
    proven: u32,
    /// The limit is not to be trusted.
    doubt: bool,
}

/// Pacing by rate (a GCRA: `tat` is the theoretical arrival time).
#[derive(Clone, Copy, Debug)]
struct Pace {
    gap: u64,
    burst: u64,
    tat: Time,
    /// From headers, as opposed to from refusals.
    told: bool,
    /// Learned pace: the gap before the last raise, and when the next raise may be.
    before: Option<u64>,
    step: u64,
    raise_at: Time,
}

impl Pace {
    fn ready(&self) -> Time {
        Time::from_nanos(
            self.tat.as_nanos().saturating_sub(self.gap.saturating_mul(self.burst.saturating_sub(1))),
        )
    }

    fn in_hand(&self, now: Time) -> u64 {
        let full = self.gap.saturating_mul(self.burst);
        full.saturating_sub(nanos(self.tat.saturating_since(now))) / self.gap.max(1)
    }

    fn drain(&mut self, now: Time) {
        self.tat = self
            .tat
            .max(Time::from_nanos(now.as_nanos().saturating_add(self.gap.saturating_mul(self.burst))));
    }
}

/// A call above the limit that was neither refused nor served yet.
#[derive(Clone, Copy, Debug)]
struct Probe {
    rank: u32,
    at: Time,
}

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
    pace: Option<Pace>,
    told: Time,
    told_since: bool,
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
            pace: set.rate.map(|rate| {
                // A second's worth at most in one burst: minutes are often counted by the second.
                let gap = nanos(rate.every).max(1);
                let burst = (1_000_000_000 / gap).max(1);
                let tat = Time::ZERO;
                Pace { gap, burst, tat, told: true, before: None, step: 5, raise_at: Time::ZERO }
            }),
            told: Time::ZERO,
            told_since: false,
        }
    }

    /// Whether [`Control::admit`] may agree to one call above the ceiling, or wants to be asked soon.
    #[must_use]
    pub fn looks_above(&self) -> bool {
        let verify = self.event.is_some_and(|e| !e.verified && e.admits == 0);
        self.limit.is_some_and(|l| self.cap >= l && l < self.top())
            && (self.probe.is_some() || verify || (self.probe_due && self.release.is_none()))
    }

    /// The ceiling in force.
    #[must_use]
    pub fn ceiling(&self) -> u32 {
        self.cap
    }

    /// The limit that the last congestion event told, if any did.
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
            || self.contradictions > 0
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
        self.bare > 0 || self.pace.is_some() || self.limit != Some(self.cap) || self.proven == 0
    }

    fn top(&self) -> u32 {
        self.set.max.unwrap_or(u32::MAX).max(self.set.floor)
    }

    /// `most`, or two thirds of a call's length if that is shorter: in which time a ceiling fills.
    fn span(&self, most: Duration) -> Duration {
        self.latency.map_or(most, |l| most.min(l / 3 * 2))
    }

    /// The least time between two admissions.
    fn spacing(&self, now: Time, busy: u32) -> Duration {
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
        space.max(Duration::from_nanos(self.pace.map_or(0, |p| p.gap / 2)))
    }

    /// What can be counted on of a ceiling that is in doubt.
    fn plan(&self) -> u32 {
        (self.cap / 5).max(1)
    }

    /// How long until a call that was not refused counts as accepted.
    fn accept_after(&self) -> Duration {
        self.refusal.map_or(WINDOW, |r| r.saturating_mul(4)).max(ACCEPT)
    }

    fn gap(&self, cost: Duration) -> Duration {
        let base = cost.saturating_mul(self.set.probe_gap);
        base.saturating_mul(1 << self.misses.min(10)).min(GAP_MAX.max(base))
    }

    /// May one more call go now? `busy` are in flight, `waiting` wait (the asker included).
    ///
    /// # Errors
    /// The instant at which to ask again, if it is known.
    pub fn admit(&mut self, now: Time, busy: u32, waiting: usize) -> Result<Admitted, BlockedUntil> {
        if now < self.pause {
            return Err(BlockedUntil(Some(self.pause)));
        }
        self.settle_probe(now);
        self.probe_due = now >= self.probe_at;
        if let Some(r) = &mut self.release {
            if now >= r.until {
                self.release = None;
            } else if r.even.is_none() {
                let n = u32::try_from(waiting).unwrap_or(u32::MAX).max(1);
                r.even = Some((r.window - r.window / 16) / n);
            }
        }
        if let (Some(r), Some(l)) = (self.release, self.latency) {
            // what is still in service there may be all that is allowed now
            let first = r.from.saturating_add(l / 4);
            if r.doubt && busy > self.plan() && now < first {
                return Err(BlockedUntil(Some(first)));
            }
        }
        if busy >= self.cap {
            self.look_above(now, busy)?;
        }
        self.raise_pace(now, waiting);
        if let Some(p) = &self.pace {
            if now < p.ready() {
                return Err(BlockedUntil(Some(p.ready())));
            }
        }
        let rest = self.latency.unwrap_or(SPAN).saturating_mul(2).max(WINDOW);
        if busy == 0 && self.idle.is_some_and(|t| now.saturating_since(t) > rest) {
            self.warm = 0;
        }
        let above = self.limit.is_some_and(|l| busy >= l);
        if self.release.is_some() || busy >= self.warm || above {
            let mut gap = self.spacing(now, busy);
            if above {
                gap = gap.max(self.refusal.unwrap_or_default().saturating_mul(2));
            }
            let at = self.last.map_or(now, |t| t.saturating_add(gap));
            if now < at {
                return Err(BlockedUntil(Some(at)));
            }
        }
        let rank = busy.saturating_add(1);
        self.idle = None;
        self.last = Some(now);
        self.warm = self.warm.max(rank);
        let first = rank > self.high;
        self.high = self.high.max(rank);
        if above {
            self.probe = Some(Probe { rank, at: now });
        }
        if let Some(e) = &mut self.event {
            e.admits = e.admits.saturating_add(1);
        }
        if let Some(p) = &mut self.pace {
            let margin = if p.told { p.gap / 64 } else { 0 };
            p.tat = Time::from_nanos(p.tat.max(now).as_nanos().saturating_add(p.gap).saturating_add(margin));
        }
        Ok(Admitted { stamp: self.stamp, rank, at: now, first })
    }

    /// All of the cap is in flight: is it time to try one above the limit?
    fn look_above(&mut self, now: Time, busy: u32) -> Result<(), BlockedUntil> {
        let full = Err(BlockedUntil(None));
        let Some(l) = self.limit else { return full };
        if let Some(p) = self.probe {
            return Err(BlockedUntil(Some(p.at.saturating_add(self.accept_after()))));
        }
        if self.cap < l || l >= self.top() || busy > self.cap {
            return full;
        }
        // Nothing came back in a whole pause: calls outlast hints here, so a pause is cheap, and
        // whether the limit is one on concurrency shows at once.
        let verify = self.event.is_some_and(|e| !e.verified && e.admits == 0);
        if !verify && (now < self.probe_at || self.release.is_some()) {
            return full;
        }
        if let Some(e) = &mut self.event {
            e.verified = true;
        }
        self.cap = l.saturating_add(self.step).min(self.top());
        Ok(())
    }

    /// A call above the limit that was not refused in time has proven it wrong.
    fn settle_probe(&mut self, now: Time) {
        if let Some(p) = self.probe {
            if now >= p.at.saturating_add(self.accept_after()) {
                self.accepted_above(now, p.rank);
            }
        }
    }

    fn accepted_above(&mut self, now: Time, rank: u32) {
        self.probe = None;
        let Some(l) = self.limit else { return };
        if rank <= l {
            return;
        }
        self.limit = Some(rank);
        if rank > blur(self.base) {
            // more than blur: the quota has grown
            self.base = rank;
            self.misses = 0;
            self.shaded = false;
        }
        if let Some(e) = &mut self.event {
            if now < self.pause.saturating_add(e.cost.saturating_mul(3)) {
                // refused at this level a moment ago, accepted now
                self.contradictions += 2;
                e.verified = false;
            }
        }
        if rank >= self.cap {
            self.step = self.step.saturating_mul(2);
            self.cap = rank.saturating_add(self.step).min(self.top());
        }
    }

    /// A learned pace creeps up, rarely at first, then in doubling steps.
    fn raise_pace(&mut self, now: Time, waiting: usize) {
        let every = self.latency.unwrap_or(WINDOW).max(WINDOW);
        let Some(p) = &mut self.pace else { return };
        if p.told || waiting == 0 || now < self.probe_at || now < p.raise_at {
            return;
        }
        p.before = Some(p.gap);
        p.gap = (p.gap.saturating_mul(100) / (100 + p.step)).max(1);
        p.step = (p.step * 2).min(100);
        p.raise_at = now.saturating_add(every);
        if let Some(e) = &mut self.event {
            // what this pace brings is counted from here
            e.sent = now;
            e.cost = Duration::ZERO;
            e.admits = 0;
        }
    }

    /// A call was served. `busy` includes it.
    pub fn on_success(
        &mut self,
        now: Time,
        call: Admitted,
        busy: u32,
        waiting: usize,
        latency: Option<Duration>,
        limits: Option<LimitHeaders>,
    ) {
        self.bare = 0;
        self.note_idle(now, busy);
        if let Some(l) = latency {
            self.latency = Some(mean(self.latency, l));
        }
        if let Some(h) = limits {
            // the call that left last knows best
            if call.at >= self.told {
                self.told = call.at;
                self.on_headers(now, call.at, busy, h);
            }
        }
        if call.stamp < self.cut {
            return;
        }
        self.proven = self.proven.max(call.rank);
        if self.probe.is_some_and(|p| call.rank >= p.rank) {
            self.probe = None;
        }
        match self.limit {
            Some(l) if call.rank > l => self.accepted_above(now, call.rank),
            Some(l) if self.cap >= l => {}
            limit => {
                // grow only if the cap is what holds calls back
                if busy >= self.cap && (waiting > 0 || limit.is_none()) {
                    let by = if limit.is_none() { GROW } else { 1 };
                    self.cap = self.cap.saturating_add(by).min(limit.unwrap_or(u32::MAX)).min(self.top());
                }
            }
        }
    }

    fn on_headers(&mut self, now: Time, sent: Time, busy: u32, h: LimitHeaders) {
        let used = h.limit.saturating_sub(h.remaining);
        let least = nanos(h.reset.saturating_sub(h.resolution));
        if h.limit == 0 || used == 0 || least == 0 {
            return;
        }
        self.told_since = true;
        // "remaining" is whole tokens, so what is missing is in (used - 1, used]
        let low = (least / used).max(1);
        let high = nanos(h.reset).checked_div(used - 1).unwrap_or(u64::MAX);
        let (old, tat) = match self.pace {
            Some(p) if p.told => (Some(p.gap), p.tat),
            _ => {
                // what was refused before is explained now
                self.limit = self.set.max;
                self.cap = self.limit.unwrap_or(self.cap);
                self.contradictions = 0;
                (None, now)
            }
        };
        let (gap, fresh) = match old {
            Some(g) if g <= high => (g.max(low), low > g.saturating_add(g / 8)),
            _ => (low, true),
        };
        // Never more in hand than the server says was left; when this bucket is new to us, less
        // what may have left since.
        let gone = if fresh { used.saturating_add(u64::from(busy)) } else { used };
        let from = if fresh { now } else { sent };
        let tat = tat.max(Time::from_nanos(from.as_nanos().saturating_add(gap.saturating_mul(gone))));
        // one token is kept back, for what rounding hides
        let burst = (h.limit - 1).max(1);
        self.pace = Some(Pace { gap, burst, tat, told: true, before: None, step: 5, raise_at: now });
    }

    /// A call was refused for flow control (a 429). `busy` includes it.
    pub fn on_throttled(&mut self, now: Time, call: Admitted, busy: u32, hint: Option<Duration>) {
        self.throttled(now, call, busy, hint, true);
    }

    /// The same where only a part of the provider (a model, a route) is paused for `wait`, by
    /// somebody else: it cuts, and pauses nothing here.
    pub fn on_throttled_in_part(&mut self, now: Time, call: Admitted, busy: u32, wait: Duration) {
        self.throttled(now, call, busy, Some(wait), false);
    }

    fn throttled(&mut self, now: Time, call: Admitted, busy: u32, hint: Option<Duration>, pauses: bool) {
        self.note_idle(now, busy);
        let came_back = u32::try_from(self.stamp.saturating_sub(call.stamp)).unwrap_or(u32::MAX);
        let served = call.rank.saturating_sub(1).saturating_sub(came_back);
        self.stamp = self.stamp.saturating_add(1);
        if call.at > Time::ZERO {
            self.refusal = Some(mean(self.refusal, now.saturating_since(call.at)));
        }
        let same = call.stamp < self.cut;
        let cost = hint.unwrap_or_else(|| {
            let doubled = self.set.bare.saturating_mul(1 << self.bare.min(16)).min(self.set.bare_max);
            if same {
                self.set.bare
            } else {
                self.bare = self.bare.saturating_add(1);
                doubled
            }
        });
        let doubt = if same { self.release.is_none_or(|r| r.doubt) } else { true };
        let cost = if pauses {
            self.set_pause(now, cost, doubt);
            self.pause.saturating_since(now)
        } else {
            cost.min(PAUSE_MAX)
        };
        if same {
            if let Some(l) = self.limit {
                if served >= 1 && served < l && self.pace.is_none() {
                    let s = served.max(self.set.floor);
                    self.limit = Some(s);
                    self.cap = self.cap.min(s);
                }
            }
            self.probe_at = self.probe_at.max(self.pause.saturating_add(self.gap(cost)));
            return;
        }
        self.cut = self.stamp;
        let sent = if call.at > Time::ZERO { call.at } else { now };
        let since = self.event.replace(Event { sent, cost, admits: 0, verified: false });
        if since.is_some_and(|e| sent.saturating_since(e.sent) > self.gap(e.cost)) {
            self.contradictions = 0;
        }
        self.probe = None;
        if self.pace.is_some_and(|p| p.told) {
            if !self.told_rate_refused(now) {
                return;
            }
        } else if self.pace.is_some() {
            self.rate_refused(now, sent, since);
            self.probe_at = self.pause.saturating_add(self.gap(cost));
            return;
        }
        if served > 0 {
            self.cut_to(served, call, since);
            if self.contradictions >= CONTRADICTIONS {
                self.contradictions = 0;
                self.rate_refused(now, sent, since);
            }
        }
        self.high = 0;
        self.probe_at = self.pause.saturating_add(self.gap(cost));
    }

    /// The provider was serving `served` when it refused.
    fn cut_to(&mut self, served: u32, call: Admitted, since: Option<Event>) {
        let s = served.max(self.set.floor);
        let step = std::mem::replace(&mut self.step, 1);
        // Accepted up to here and refused at the first step beyond: that is the limit. Had this level
        // been reached before, the limit fell, and nobody knows how far; or it is none on concurrency.
        let some = since.is_none_or(|e| e.admits > 1);
        let bracketed = call.first && some;
        match self.limit {
            Some(l) if call.rank > l && s >= l => {
                // A probe failed: the limit is as it was. Where it is known to be blurred, what the
                // probe gained within the blur is given back.
                let l = if self.shaded && l <= blur(self.base) { self.base.min(l) } else { l };
                self.misses = self.misses.saturating_add(1);
                self.exact = true;
                self.limit = Some(l);
                self.cap = l;
                if let Some(r) = &mut self.release {
                    r.doubt = false;
                }
                if step == 1 {
                    // at the first step: that confirms it
                    self.contradictions = self.contradictions.saturating_sub(1);
                    if let Some(e) = &mut self.event {
                        e.verified = true;
                    }
                }
                return;
            }
            Some(l) if s >= l - l / 4 && some && !call.first => {
                // Refused where it was accepted a moment ago: the provider counts a finished call a
                // little longer than we do, so what we saw in service is one below already.
                self.contradictions += 1;
                self.misses = self.misses.saturating_add(1);
                self.shaded = true;
            }
            Some(l) => {
                if some && (!call.first || self.exact && s + 1 < l) {
                    self.contradictions += 2;
                }
                self.misses = 0;
                self.shaded = false;
            }
            None => self.misses = 0,
        }
        self.limit = Some(s);
        self.base = s;
        self.exact = bracketed;
        if let Some(r) = &mut self.release {
            r.doubt = !bracketed;
        }
        // Refused again though nothing was accepted in between: the limit is further down.
        let lost = since.is_some_and(|e| e.admits == 1);
        self.cap = if lost { (s - s / 4).max(self.set.floor) } else { s };
    }

    /// Refused though headers tell the rate. True if the rate cannot be the reason.
    fn told_rate_refused(&mut self, now: Time) -> bool {
        let known = std::mem::replace(&mut self.told_since, false);
        let Some(p) = &mut self.pace else { return true };
        let room = p.in_hand(now);
        p.drain(now);
        known && room > 1 + p.burst / 4
    }

    /// Refused for the rate: between two refusals the bucket was emptied once.
    fn rate_refused(&mut self, now: Time, sent: Time, since: Option<Event>) {
        let Some(e) = since else { return };
        let accepted = u64::from(e.admits.saturating_sub(1)).max(1);
        let mut time = sent.saturating_since(e.sent);
        // what refills in a pause is taken to be worth a second at most
        time = time.saturating_sub(e.cost.saturating_sub(WINDOW));
        let seen = (nanos(time) / accepted).max(1);
        let seen = seen.saturating_add(seen / 32);
        let (gap, missed) = match self.pace {
            None => (seen, false),
            Some(p) => {
                let least = p.gap.saturating_add(p.gap / 32).max(2);
                let most = p.before.map_or(p.gap.saturating_mul(2), |b| b.saturating_add(b / 32)).max(least);
                (seen.clamp(least, most), p.before.is_some())
            }
        };
        self.misses = if missed { self.misses.saturating_add(1) } else { 0 };
        self.pace = Some(Pace { gap, burst: 1, tat: now, told: false, before: None, step: 5, raise_at: now });
        // the ceiling only guards: what the rate needs, and as much again
        self.limit = self.set.max;
        self.cap = self.set.max.unwrap_or(self.cap.max(self.set.start));
    }

    /// The provider is overloaded (529, 503 with a hint): one cut by a quarter, and its pause.
    pub fn on_overloaded(&mut self, now: Time, call: Admitted, busy: u32, hint: Option<Duration>) {
        self.note_idle(now, busy);
        if let Some(h) = hint {
            self.set_pause(now, h, true);
        }
        if call.stamp < self.cut {
            return;
        }
        self.stamp = self.stamp.saturating_add(1);
        self.cut = self.stamp;
        let before = self.cap.min(busy.max(1));
        self.limit = Some(self.limit.unwrap_or(before));
        self.cap = (before - before / 4).max(self.set.floor);
        self.step = 1;
        self.probe = None;
        let cost = self.pause.saturating_since(now).max(self.set.bare);
        self.probe_at = self.pause.max(now).saturating_add(self.gap(cost));
    }

    /// A call failed in a way that says nothing about limits.
    pub fn on_failed(&mut self, now: Time, call: Admitted, busy: u32) {
        self.note_idle(now, busy);
        self.lose_probe(call);
    }

    /// A call was dropped (its slot may linger: then report it when the slot ends).
    pub fn on_dropped(&mut self, now: Time, call: Admitted, busy: u32) {
        self.note_idle(now, busy);
        self.lose_probe(call);
    }

    /// A probe that ended without a verdict proves nothing; another may go.
    fn lose_probe(&mut self, call: Admitted) {
        if self.probe.is_some_and(|p| p.rank == call.rank && p.at == call.at) {
            self.probe = None;
        }
    }

    fn note_idle(&mut self, now: Time, busy: u32) {
        if busy <= 1 {
            self.idle = Some(now);
        }
    }

    /// Pauses the scope for a reason other than a refused call (a drained account, another member
    /// of the fleet, an operator). Merged by maximum.
    pub fn pause(&mut self, now: Time, until: Time) {
        self.set_pause(now, until.saturating_since(now), false);
    }

    fn set_pause(&mut self, now: Time, cost: Duration, doubt: bool) {
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
        self.last = None;
    }

    /// Ends the pause (a later success, an operator). What follows is still released in line.
    pub fn pause_clear(&mut self, now: Time) {
        if now < self.pause {
            self.pause = now;
            if let Some(r) = &mut self.release {
                let length = r.until.saturating_since(r.from);
                r.from = now;
                r.until = now.saturating_add(length);
            }
        }
    }

    /// Sets or lifts the configured maximum at run time; what is in flight finishes.
    pub fn set_max(&mut self, max: Option<u32>) {
        self.set.max = max.map(|m| m.max(self.set.floor));
        if let Some(m) = self.set.max {
            self.cap = self.cap.min(m);
            self.limit = Some(self.limit.map_or(m, |l| l.min(m)));
        }
    }

    /// Overrides what was learned (an operator, a lease): growth goes on from there by probes.
    pub fn set_ceiling(&mut self, now: Time, ceiling: u32) {
        let c = ceiling.clamp(self.set.floor, self.top());
        self.cap = c;
        self.limit = Some(c);
        self.probe = None;
        self.step = 1;
        self.probe_at = now.saturating_add(self.gap(self.set.bare));
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
            _ => self.cap.max(1),
        };
        let turn = latency / cap;
        let mut wait = if let (Some(_), false) = (releasing, paused.is_zero()) {
            paused.saturating_add(turn.max(self.spacing(start, 0)).saturating_mul(position))
        } else {
            let free = self.cap.saturating_sub(busy);
            if position < free {
                releasing.map_or(Duration::ZERO, |_| self.spacing(start, busy).saturating_mul(position))
            } else {
                turn.saturating_mul((position - free).saturating_add(1))
            }
        };
        if let Some(p) = &self.pace {
            let line = Duration::from_nanos(p.gap.saturating_mul(u64::from(position)));
            wait = wait.max(p.ready().saturating_since(now).saturating_add(line));
        }
        wait
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
