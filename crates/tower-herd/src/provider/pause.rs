//! The pause: the instant before which nobody calls, with its reason.
//!
//! One state for everything that stops traffic for a while (a hint, a bare 429, an empty account, a
//! bad key, an operator), merged by maximum: a later, shorter wait never shortens an earlier one
//! (BerriAI/litellm#40130). A pause of minutes may be far longer than the trouble lasts
//! (openclaw/openclaw#90717), so a long one lets a sparse probe through: one call every
//! max(5 min, pause / 20).
//!
//! An open breaker is a pause too, kept beside the others ([`Broken`]): neither shortens the other, and its
//! probes wait for the end of the server's own word.

use super::broken::Broken;
use crate::Time;
use std::time::Duration;

/// Why nobody calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PauseReason {
    /// The server named a wait.
    Hint,
    /// A 429 without a wait.
    Bare,
    /// A reply said that it was the last one its window of time allows.
    Quota,
    /// The account has nothing left.
    Depleted,
    /// The key or the configuration is wrong.
    Misconfigured,
    /// An operator said so.
    Operator,
    /// Its [breaker](crate::breaker) is open.
    Broken,
}

impl PauseReason {
    /// A short fixed name, for events and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            PauseReason::Hint => "hint",
            PauseReason::Bare => "bare",
            PauseReason::Quota => "quota",
            PauseReason::Depleted => "depleted",
            PauseReason::Misconfigured => "misconfigured",
            PauseReason::Operator => "operator",
            PauseReason::Broken => "broken",
        }
    }

    /// The reason of this name; what a newer version calls otherwise is the server's word.
    #[cfg(feature = "serde")]
    pub(crate) fn named(name: &str) -> Self {
        const ALL: [PauseReason; 7] = [
            PauseReason::Hint,
            PauseReason::Bare,
            PauseReason::Quota,
            PauseReason::Depleted,
            PauseReason::Misconfigured,
            PauseReason::Operator,
            PauseReason::Broken,
        ];
        ALL.into_iter().find(|reason| reason.as_str() == name).unwrap_or(PauseReason::Hint)
    }
}

/// The longest pause; longer hints are parsed whole, but held no longer than this.
pub(crate) const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Pauses longer than this are probed, at least so far apart.
pub(crate) const PROBED: Duration = Duration::from_secs(5 * 60);

const BARE: Duration = Duration::from_secs(1);
const BARE_CAP: Duration = Duration::from_secs(30);
const DEPLETED: Duration = Duration::from_secs(15 * 60);
const DEPLETED_CAP: Duration = Duration::from_secs(6 * 3600);
const MISCONFIGURED: Duration = Duration::from_secs(15 * 60);

/// The pause of one provider or scope.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    until: Time,
    reason: Option<PauseReason>,
    /// Grows with each pause that is set or cleared: tells calls sent before from calls sent after.
    generation: u64,
    bare_streak: u32,
    depleted_streak: u32,
    /// The wait that set its end.
    length: Duration,
    probe_at: Option<Time>,
    probe_gap: Duration,
    probing: Option<Probing>,
    broken: Option<Broken>,
    /// When its end was moved last.
    moved: Time,
    /// Since when it is closed without a gap.
    began: Time,
    /// It was closed for more than five minutes, and whoever asks first after its end learns that.
    long: bool,
    /// When it was seen to be open again: cleared, or by a success after its end.
    seen_open: Option<Time>,
}

/// What is left behind by a pause of over five minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closure {
    /// When it ends, or ended.
    pub(crate) until: Time,
    /// How long it lasts, or lasted.
    pub(crate) length: Duration,
    /// Since when it was seen to be over; none: nobody has looked.
    pub(crate) seen_open: Option<Time>,
}

/// A probe that is under way.
#[derive(Clone, Copy, Debug)]
struct Probing {
    /// Tells it from an earlier one that was given up.
    number: u32,
    /// Then it is given up, and another may go.
    until: Time,
    /// It was let out by a layer from which the gates below are hidden (a buffer stands between them): the
    /// first of them that is asked for a probe sends this one.
    lent: bool,
    /// It came to nothing: that was counted.
    failed: bool,
}

/// What a call that starts now meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Nothing.
    Open,
    /// Not before this instant.
    Until(Time, PauseReason),
}

impl Pause {
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// When it ends; [`Time::MAX`] if nobody can tell, since a breaker is open.
    pub(crate) fn until(&self) -> Time {
        if self.in_force().is_some() { Time::MAX } else { self.until }
    }

    /// When it ends, its breaker aside.
    pub(crate) fn own_until(&self) -> Time {
        self.until
    }

    /// The pause in force, its breaker aside: when it ends, and why it is.
    pub(crate) fn own(&self, now: Time) -> Option<(Time, PauseReason)> {
        self.reason.filter(|_| now < self.until).map(|reason| (self.until, reason))
    }

    pub(crate) fn look(&self, now: Time) -> Look {
        let own = self.own(now);
        let broken = self.in_force().map(|broken| (broken.told(now), PauseReason::Broken));
        match own.into_iter().chain(broken).max_by_key(|(until, _)| *until) {
            Some((until, reason)) => Look::Until(until, reason),
            None => Look::Open,
        }
    }

    /// The open breaker, whether or not it is enforced.
    pub(crate) fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }

    #[inline]
    fn in_force(&self) -> Option<&Broken> {
        self.broken.as_ref().filter(|broken| broken.is_enforced())
    }

    /// Its breaker opens. Calls that are sent from here on tell of what is behind it.
    pub(crate) fn open_breaker(&mut self, broken: impl FnOnce(u64) -> Broken) {
        self.generation += 1;
        self.probing = None;
        self.broken = Some(broken(self.generation));
    }

    /// Its breaker closes, if `proof` (told whether a probe is under way) says so; since when it was open.
    /// A pause beside it goes on.
    pub(crate) fn close_breaker(
        &mut self,
        now: Time,
        proof: impl FnOnce(&Broken, bool) -> bool,
    ) -> Option<Time> {
        let probing = self.probing.is_some();
        let broken = self.broken.take_if(|broken| proof(broken, probing))?;
        self.generation += 1;
        self.probing = None;
        if self.until < now {
            // From here on those who waited are let out.
            (self.until, self.reason) = (now, None);
        }
        Some(broken.since())
    }

    /// A probe of the open breaker came to nothing.
    pub(crate) fn probe_failed(&mut self, now: Time) {
        // None under way: it was given up before, or it is a call that nobody should have let through.
        if let (Some(broken), Some(probe)) = (&mut self.broken, &mut self.probing) {
            broken.probe_failed(now);
            probe.failed = true;
        }
    }

    fn is_probing(&self, now: Time) -> bool {
        self.probing.is_some_and(|probe| now < probe.until)
    }

    /// Whether there is a probe that a gate further in may send for who has let it out.
    pub(crate) fn probe_is_lent(&self, now: Time) -> bool {
        self.probing.is_some_and(|probe| probe.lent && now < probe.until)
    }

    /// Sends it: the place is the gate's now.
    pub(crate) fn adopt_probe(&mut self, now: Time, number: u32) -> bool {
        let is_lent = self.probe_is_lent(now);
        if let Some(probe) = self.probing.as_mut().filter(|_| is_lent) {
            (probe.number, probe.lent) = (number, false);
        }
        is_lent
    }

    /// Whether a probe may go now.
    pub(crate) fn probe_is_due(&self, now: Time) -> bool {
        let own = now < self.until;
        let broken = self.in_force();
        (own || broken.is_some())
            && !self.is_probing(now)
            && (!own || self.probe_at.is_some_and(|at| at <= now))
            && broken.is_none_or(|broken| broken.probe_at() <= now)
    }

    /// Takes the one probe that is due, if one is; [`Self::probe_ended`] gives the place back.
    pub(crate) fn take_probe(&mut self, now: Time, number: u32) -> bool {
        if !self.probe_is_due(now) {
            return false;
        }
        let mut until = Time::MAX;
        if now < self.until {
            self.probe_at = Some(now.saturating_add(self.probe_gap));
            until = now.saturating_add(self.probe_gap);
        }
        self.begin_probe(now, number, until);
        true
    }

    fn begin_probe(&mut self, now: Time, number: u32, mut until: Time) {
        let given_up = self.probing.is_some_and(|probe| !probe.failed);
        if let Some(broken) = &mut self.broken {
            if given_up {
                broken.probe_failed(now);
            }
            until = until.min(broken.sends_probe(now));
        }
        self.probing = Some(Probing { number, until, lent: false, failed: false });
    }

    /// The probe of a breaker that is only observed: it takes no slot.
    pub(crate) fn take_watched_probe(&mut self, now: Time, number: u32) -> bool {
        let due = self.broken.as_ref().is_some_and(|broken| broken.probe_at() <= now);
        let is_due = due && !self.is_probing(now);
        if is_due {
            self.begin_probe(now, number, Time::MAX);
        }
        is_due
    }

    /// The probe that was just taken does not go after all.
    pub(crate) fn untake_probe(&mut self, now: Time) {
        self.probing = None;
        self.probe_at = self.probe_at.map(|at| at.min(now));
        if let Some(broken) = &mut self.broken {
            broken.untake(now);
        }
    }

    /// A gate further in, which could not be seen, may send it.
    pub(crate) fn lend_probe(&mut self, number: u32) {
        if let Some(probe) = self.probing.as_mut().filter(|probe| probe.number == number) {
            probe.lent = true;
        }
    }

    /// When to look for a probe again, for who found none to take `now`; none if this pause is too short
    /// for one.
    pub(crate) fn probe_at(&self, now: Time) -> Option<Time> {
        let own = if now < self.until { Some(self.probe_at) } else { None };
        let (at, step) = match (own, self.in_force()) {
            (None | Some(None), None) => return None,
            (Some(Some(at)), None) => (at, self.probe_gap / 20),
            (None, Some(broken)) => (broken.probe_at(), broken.step()),
            (Some(at), Some(broken)) => (at.unwrap_or(self.until).max(broken.probe_at()), broken.step()),
        };
        // Due, but one is under way or no slot was free: not at every instant.
        let at = if at <= now { now.saturating_add(step) } else { at };
        (at < self.until()).then_some(at)
    }

    /// Whoever sent it is back, or gone. (Not if it was given up: the place is another's by then.)
    /// Whether it had failed; none if its end was seen already.
    pub(crate) fn probe_ended(&mut self, number: u32) -> Option<bool> {
        let probe = self.probing.take_if(|probe| probe.number == number)?;
        if let Some(broken) = self.broken.as_mut().filter(|_| !probe.failed) {
            broken.probe_unanswered();
        }
        Some(probe.failed)
    }

    /// Sets a pause; the wait in force after the merge.
    pub(crate) fn set(&mut self, now: Time, wait: Duration, reason: PauseReason) -> Duration {
        let wait = wait.min(LONGEST);
        let until = now.saturating_add(wait);
        self.generation += 1;
        if now >= self.until {
            // The one before is over, and its probes with it: this one may be too short for any.
            self.probe_at = None;
            // Seen to be open for as long as a ramp could have lasted: nothing is left of it.
            let length = self.until.saturating_since(self.began);
            if !self.long || self.seen_open.is_some_and(|open| now.saturating_since(open) > length) {
                (self.began, self.long) = (now, false);
            }
        }
        if until > self.until || now >= self.until {
            self.until = until;
            self.reason = Some(reason);
            self.length = wait;
            if wait > PROBED {
                self.probe_gap = PROBED.max(wait / 20);
                let due = now.saturating_add(self.probe_gap);
                // An earlier long pause keeps its probe: being extended does not put it off for ever.
                self.probe_at = Some(self.probe_at.filter(|at| *at > now).map_or(due, |at| at.min(due)));
            }
            self.long |= until.saturating_since(self.began) > PROBED;
            (self.moved, self.seen_open) = (now, None);
        }
        self.until.saturating_since(now)
    }

    /// When its end was moved last.
    pub(crate) fn moved(&self) -> Time {
        self.moved
    }

    /// Whether [`take_closure`](Self::take_closure) has something to tell, now or at the end of the pause.
    pub(crate) fn is_long(&self) -> bool {
        self.long
    }

    /// The pause in force, if it is one of over five minutes.
    pub(crate) fn closure(&self, now: Time) -> Option<Closure> {
        let length = self.until.saturating_since(self.began);
        let is_in_force = self.long && now < self.until;
        is_in_force.then_some(Closure { until: self.until, length, seen_open: None })
    }

    /// A pause of over five minutes that is over: told once.
    pub(crate) fn take_closure(&mut self, now: Time) -> Option<Closure> {
        if !self.long || now < self.until {
            return None;
        }
        self.long = false;
        let length = self.until.saturating_since(self.began);
        Some(Closure { until: self.until, length, seen_open: self.seen_open.take() })
    }

    /// Over how long those leave that waited for its end: half of it, but no long pause makes a long
    /// line, and none that was cleared, since then the provider was seen to be well.
    pub(crate) fn window(&self) -> Duration {
        const LEAST: Duration = Duration::from_secs(1);
        const MOST: Duration = Duration::from_secs(30);
        if self.reason.is_none() { LEAST } else { (self.length / 2).clamp(LEAST, MOST) }
    }

    /// The pause for a 429 without a hint, sent in generation `sent`: 1 s, doubling to 30 s until a
    /// success. Calls that were in flight together are one event and double it once.
    pub(crate) fn bare(&mut self, sent: u64) -> Duration {
        let fresh = sent >= self.generation;
        let exponent = if fresh { self.bare_streak } else { self.bare_streak.saturating_sub(1) };
        if fresh {
            self.bare_streak = self.bare_streak.saturating_add(1);
        }
        (BARE * 2u32.saturating_pow(exponent.min(8))).min(BARE_CAP)
    }

    /// The pause for an empty account that names no instant: 15 min, doubling to 6 h.
    pub(crate) fn depleted(&mut self, sent: u64) -> Duration {
        let fresh = sent >= self.generation;
        let exponent = if fresh { self.depleted_streak } else { self.depleted_streak.saturating_sub(1) };
        if fresh {
            self.depleted_streak = self.depleted_streak.saturating_add(1);
        }
        (DEPLETED * 2u32.saturating_pow(exponent.min(8))).min(DEPLETED_CAP)
    }

    pub(crate) fn misconfigured(&self) -> Duration {
        MISCONFIGURED
    }

    /// A call succeeded that was sent in generation `sent`. True if that ended a pause.
    /// (A breaker closes by [`Self::close_breaker`].)
    pub(crate) fn succeeded(&mut self, now: Time, sent: u64) -> bool {
        if sent != self.generation {
            return false;
        }
        self.bare_streak = 0;
        self.depleted_streak = 0;
        let ended = now < self.until;
        if ended {
            self.clear(now);
        } else {
            self.seen_open.get_or_insert(self.until);
        }
        // Over by itself, it has nothing more to learn: the next successes need not come here.
        self.reason = None;
        ended
    }

    /// Whether a success would change anything.
    pub(crate) fn wants_success(&self) -> bool {
        self.bare_streak > 0 || self.depleted_streak > 0 || self.reason.is_some() || self.broken.is_some()
    }

    /// Ends the pause now.
    pub(crate) fn clear(&mut self, now: Time) {
        if now < self.until {
            (self.until, self.moved, self.seen_open) = (now, now, Some(now));
        }
        self.reason = None;
        self.probe_at = None;
        self.generation += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::{super::broken::Probes, *};
    use crate::{Switch, random::Seeds};
    use proptest::prelude::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO.saturating_add(Duration::from_secs(seconds))
    }
    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    // BerriAI/litellm#40130: the second, longer wait was stored, but the first one's end still opened.
    #[test]
    fn merged_by_maximum() {
        let mut pause = Pause::default();
        pause.set(at(0), secs(1), PauseReason::Hint);
        pause.set(at(0), secs(60), PauseReason::Hint);
        pause.set(at(1), secs(5), PauseReason::Bare);
        assert_eq!(pause.look(at(59)), Look::Until(at(60), PauseReason::Hint));
        assert_eq!(pause.look(at(60)), Look::Open);
    }

    #[test]
    fn a_bare_429_doubles_once_an_event_and_a_success_resets_it() {
        let mut pause = Pause::default();
        for (second, expected) in [(0, 1), (10, 2), (20, 4), (30, 8), (40, 16), (60, 30), (100, 30)] {
            let sent = pause.generation();
            for _ in 0..50 {
                let wait = pause.bare(sent);
                assert_eq!(wait, secs(expected), "at {second} s");
                pause.set(at(second), wait, PauseReason::Bare);
            }
        }
        assert!(!pause.succeeded(at(200), 0), "sent before the pause: proves nothing");
        assert!(
            !pause.succeeded(at(200), pause.generation()) && !pause.wants_success(),
            "nothing left to learn"
        );
        assert_eq!(pause.bare(pause.generation()), secs(1));
    }

    // gajae-code#2444, openclaw/openclaw#90717: the advertised reset is days away, capacity is back in minutes.
    #[test]
    fn a_long_pause_lets_one_sparse_probe_through() {
        let mut pause = Pause::default();
        pause.set(at(0), secs(48 * 3600), PauseReason::Hint);
        assert_eq!(pause.until(), at(24 * 3600), "held 24 h at most");
        assert!(!pause.take_probe(at(4000), 1));
        assert!(pause.take_probe(at(4320), 1), "24 h / 20");
        assert!(!pause.take_probe(at(4321), 1), "one at a time");
        pause.probe_ended(1);
        assert!(!pause.take_probe(at(4400), 1) && pause.take_probe(at(8640), 1));
        let sent = pause.generation();
        assert!(pause.succeeded(at(8641), sent));
        assert_eq!(pause.look(at(8641)), Look::Open);
    }

    #[test]
    fn short_pauses_are_not_probed() {
        let mut pause = Pause::default();
        pause.set(at(0), secs(300), PauseReason::Hint);
        assert!((0..300).all(|second| !pause.take_probe(at(second), 1)));
        assert_eq!(pause.probe_at(at(0)), None);
        // Nor is a short one by the probe that a long one before it has left over.
        pause.set(at(1000), secs(600), PauseReason::Hint);
        pause.set(at(1700), secs(10), PauseReason::Hint);
        assert!((1700..1710).all(|second| !pause.take_probe(at(second), 1)));
        assert_eq!(pause.probe_at(at(1701)), None);
    }

    #[test]
    fn a_drained_account_is_asked_ever_more_rarely() {
        let mut pause = Pause::default();
        let mut waits = vec![];
        for i in 0..7 {
            let wait = pause.depleted(pause.generation());
            pause.set(at(i * 100_000), wait, PauseReason::Depleted);
            waits.push(wait.as_secs() / 60);
        }
        assert_eq!(waits, [15, 30, 60, 120, 240, 360, 360]);
    }

    #[test]
    fn an_operator_clears_it() {
        let mut pause = Pause::default();
        pause.set(at(0), secs(600), PauseReason::Operator);
        pause.clear(at(3));
        assert_eq!(pause.look(at(3)), Look::Open);
    }

    // A short pause leaves nothing to tell; a long one does, once, however it ended.
    #[test]
    fn a_long_pause_is_told_of_once_after_its_end() {
        let told = |length, seen_open| Some(Closure { until: at(length), length: secs(length), seen_open });
        let mut pause = Pause::default();
        pause.set(at(0), secs(300), PauseReason::Hint);
        assert!(!pause.is_long() && pause.take_closure(at(301)).is_none());
        type Way = (&'static str, fn(&mut Pause), Option<Closure>);
        let ways: [Way; 4] = [
            ("by itself", |_| {}, told(600, None)),
            ("an operator", |pause| pause.clear(at(20)), told(20, Some(at(20)))),
            ("a probe", |pause| assert!(pause.succeeded(at(310), 1)), told(310, Some(at(310)))),
            ("a call after it", |pause| assert!(!pause.succeeded(at(700), 1)), told(600, Some(at(600)))),
        ];
        for (way, end, expected) in ways {
            let mut pause = Pause::default();
            pause.set(at(0), secs(600), PauseReason::Hint);
            assert_eq!(pause.closure(at(1)), told(600, None), "{way}");
            assert!(pause.take_closure(at(19)).is_none(), "{way}: not before its end");
            end(&mut pause);
            assert_eq!(pause.take_closure(at(1000)), expected, "{way}");
            assert!(pause.take_closure(at(1000)).is_none() && !pause.is_long(), "{way}: once");
        }
        // Pauses without a gap are one; a short one after a long one that nobody has looked at since, too.
        let mut pause = Pause::default();
        for n in 0..10 {
            pause.set(at(n * 50), secs(60), PauseReason::Bare);
        }
        assert_eq!(pause.take_closure(at(510)), told(510, None));
        pause.set(at(1000), secs(600), PauseReason::Hint);
        pause.set(at(1700), secs(1), PauseReason::Bare);
        assert_eq!(pause.take_closure(at(1701)).map(|closure| closure.length), Some(secs(701)));
        // But not if calls went through for as long as a ramp would have lasted.
        for (later, told) in [(3100, true), (3300, false)] {
            let mut pause = Pause::default();
            pause.set(at(2000), secs(600), PauseReason::Hint);
            assert!(!pause.succeeded(at(2700), 1));
            pause.set(at(later), secs(1), PauseReason::Bare);
            assert_eq!(pause.take_closure(at(4000)).is_some(), told);
        }
    }

    const PROBES: Probes = Probes { first: secs(5), last: secs(30), timeout: secs(30) };

    fn broken(now: Time, open: u64, seed: u64) -> impl FnOnce(u64) -> Broken {
        let random = Seeds::from_seed(seed).session();
        move |generation| Broken::new(now, secs(open), PROBES, generation, random, Switch::default())
    }

    #[test]
    fn an_open_breaker_and_a_hint_leave_each_other_alone() {
        let mut pause = Pause::default();
        pause.open_breaker(broken(at(0), 600, 1));
        pause.set(at(0), secs(60), PauseReason::Hint);
        assert!(matches!(pause.look(at(59)), Look::Until(until, PauseReason::Broken) if until >= at(600)));
        assert!((0..60).all(|second| !pause.take_probe(at(second), 1)), "not before the server's word");
        assert!(pause.take_probe(at(60), 1) && !pause.take_probe(at(61), 2));
        // It closes; a wait that was set meanwhile goes on.
        pause.set(at(61), secs(10), PauseReason::Hint);
        assert_eq!(pause.close_breaker(at(62), |_, probing| probing), Some(at(0)));
        assert_eq!(pause.look(at(70)), Look::Until(at(71), PauseReason::Hint));
        assert_eq!(pause.look(at(71)), Look::Open);
        // A longer hint outlives it, and is what callers are told.
        pause.open_breaker(broken(at(100), 10, 2));
        pause.set(at(100), secs(200), PauseReason::Hint);
        assert_eq!(pause.look(at(101)), Look::Until(at(300), PauseReason::Hint));
        assert!(matches!(pause.look(at(301)), Look::Until(_, PauseReason::Broken)), "half open, still shut");
    }

    #[test]
    fn a_probe_that_takes_too_long_is_given_up_and_gives_nothing_back() {
        let mut pause = Pause::default();
        pause.open_breaker(broken(at(0), 600, 3));
        assert!(pause.take_probe(at(10), 1));
        assert!((11..40).all(|second| !pause.take_probe(at(second), 2)));
        let second = (40..75).find(|second| pause.take_probe(at(*second), 2)).expect("another goes");
        pause.probe_ended(1);
        assert!((second..second + 30).all(|second| !pause.take_probe(at(second), 3)), "the place is taken");
        pause.probe_ended(2);
        assert!((second..second + 61).any(|second| pause.take_probe(at(second), 3)));
    }

    #[test]
    fn a_lent_probe_is_sent_once_by_a_gate_further_in() {
        let mut pause = Pause::default();
        pause.open_breaker(broken(at(0), 600, 4));
        assert!(!pause.adopt_probe(at(10), 9), "there is none");
        assert!(pause.take_probe(at(10), 1) && !pause.adopt_probe(at(10), 2));
        pause.lend_probe(1);
        assert!(!pause.take_probe(at(11), 3), "who comes from outside finds it under way");
        assert!(pause.adopt_probe(at(11), 4) && !pause.adopt_probe(at(11), 5));
        pause.probe_ended(1);
        assert!(!pause.take_probe(at(39), 6), "it is the gate's, which is not done");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Hint(u64),
        Trip(u64),
        Close,
        Probe,
        Fails,
        Ends,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u64..300).prop_map(Step::Hint),
            (1u64..100).prop_map(Step::Trip),
            Just(Step::Close),
            Just(Step::Probe),
            Just(Step::Probe),
            Just(Step::Fails),
            Just(Step::Ends),
        ]
    }

    proptest! {
        /// Law 1 and law 6, with breakers: it is shut while a hint or a breaker says so; no probe goes before
        /// the end of the hint; of those, one at a time, and the next within 30 s of the last.
        #[test]
        fn a_breaker_never_lets_anybody_through_early(
            seed in any::<u64>(),
            steps in proptest::collection::vec((0u64..40, step()), 1..80),
        ) {
            let mut pause = Pause::default();
            let (mut now, mut hint, mut open) = (at(0), at(0), false);
            let mut flying: Option<(u32, Time)> = None;
            // Since when a probe may be due at the latest in 30 s.
            let mut idle = at(0);
            let mut number = 0;
            for (later, step) in steps {
                now = now.saturating_add(secs(later));
                match step {
                    Step::Hint(wait) => {
                        pause.set(now, secs(wait), PauseReason::Hint);
                        hint = hint.max(now.saturating_add(secs(wait)));
                    }
                    Step::Trip(time) if !open => {
                        pause.open_breaker(broken(now, time, seed ^ u64::from(number)));
                        (open, flying, idle) = (true, None, now);
                    }
                    Step::Close if open => {
                        prop_assert!(pause.close_breaker(now, |_, _| true).is_some());
                        (open, flying) = (false, None);
                    }
                    Step::Probe => {
                        number += 1;
                        let busy = flying.is_some_and(|(_, sent)| now < sent.saturating_add(PROBES.timeout));
                        let taken = pause.take_probe(now, number);
                        prop_assert!(!taken || (open && !busy && now >= hint), "{now:?}");
                        let due = now >= hint && !busy && now >= idle.saturating_add(secs(30));
                        prop_assert!(taken || !open || !due, "{now:?}: probes stop");
                        if taken {
                            (flying, idle) = (Some((number, now)), now);
                        }
                    }
                    Step::Fails if flying.is_some() => {
                        pause.probe_failed(now);
                        idle = now;
                    }
                    Step::Ends => {
                        if let Some((number, _)) = flying.take() {
                            pause.probe_ended(number);
                        }
                    }
                    _ => {}
                }
                let look = pause.look(now);
                prop_assert_eq!(look == Look::Open, !open && now >= hint);
                if let Look::Until(until, _) = look {
                    prop_assert!(until > now && until >= hint);
                }
                if let Some(again) = pause.probe_at(now) {
                    prop_assert!(again > now, "nobody asks at every instant");
                }
            }
        }

        // Law 1: no look between the setting of a wait and its end says open, unless it was cleared.
        #[test]
        fn never_early(waits in proptest::collection::vec((0u64..100, 0u64..400_000), 1..40), probe in 0u64..500_000) {
            let mut pause = Pause::default();
            let (mut now, mut latest) = (at(0), at(0));
            for (step, wait) in waits {
                now = now.saturating_add(secs(step));
                pause.set(now, secs(wait), PauseReason::Hint);
                latest = latest.max(now.saturating_add(secs(wait).min(LONGEST)));
                prop_assert_eq!(pause.look(now) == Look::Open, now >= latest);
                prop_assert!(pause.until() >= latest);
            }
            let later = now.saturating_add(secs(probe));
            prop_assert_eq!(pause.look(later) == Look::Open, later >= latest);
        }
    }
}
