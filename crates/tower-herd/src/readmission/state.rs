//! One ramp: which share of the tasks is readmitted when. Pure, and of fixed size.
//!
//! It runs along the [`Profile`]'s curve, at a speed of at least 1 and so fast that it is over by
//! [`ends`](Ramp::begin): as long after its beginning as the provider was closed before. Three things hold it
//! up, all of them by moving the point from which it goes on:
//!
//! - a pause: time in which nobody calls teaches nothing, so the ramp stands still, and its end moves too;
//! - a step back: within one step, at least three calls were throttled, and more than one in a hundred.
//!   It goes one step back, and stands there until a step has passed without that;
//! - more of the same while it stands: it stands on, and goes back no further.
//!
//! The end does not move for a step back. What is left is run through faster then, and at the latest at
//! its end the ramp lets everybody in: that the provider cannot carry them all is for its ceiling to find.

use super::Profile;
use crate::Time;
use std::time::Duration;

/// Calls that were begun, and those that were throttled, from any beginning on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) calls: u64,
    pub(crate) throttled: u64,
}

#[derive(Debug)]
pub(crate) struct Ramp {
    profile: Profile,
    /// How far along the curve it is, in nanoseconds, ...
    done: u64,
    /// ... from when on it goes on from there ...
    from: Time,
    /// ... and how fast: at least 1.
    speed: f64,
    /// The length of the curve.
    length: u64,
    /// It is over then, however far it is.
    ends: Time,
    /// The present step: until when it lasts, and the counts at its beginning.
    step_ends: Time,
    before: Counts,
    /// It went a step back, and no step has passed since without throttling.
    back: bool,
    /// It stands until then for pauses that it knows of.
    paused: Time,
}

impl Ramp {
    /// Begins at `now`, for a provider that was closed for so long.
    pub(crate) fn begin(profile: Profile, now: Time, closed_for: Duration, seen: Counts) -> Self {
        let mut ramp = Ramp {
            profile,
            done: 0,
            from: now,
            speed: 1.0,
            length: profile.reaches(1.0),
            ends: now.saturating_add(closed_for),
            step_ends: now,
            before: seen,
            back: false,
            paused: now,
        };
        ramp.pace();
        ramp.step_ends = now.saturating_add(ramp.step());
        ramp
    }

    /// The share that is readmitted.
    pub(crate) fn share(&self, now: Time) -> f64 {
        if self.is_over(now) { 1.0 } else { self.profile.share(self.position(now)) }
    }

    /// From when on a task of this number is readmitted, if nothing disturbs the ramp.
    pub(crate) fn admits_at(&self, unit: f64) -> Time {
        let left = self.profile.reaches(unit).saturating_sub(self.done);
        match left {
            0 => Time::ZERO,
            left => self.from.saturating_add(real(left as f64 / self.speed)).min(self.ends),
        }
    }

    /// Whether everybody is readmitted.
    pub(crate) fn is_over(&self, now: Time) -> bool {
        now >= self.ends || self.position(now) >= self.length
    }

    /// When it will be, if nothing disturbs it.
    #[cfg(test)]
    fn over_at(&self) -> Time {
        let left = self.length.saturating_sub(self.done);
        self.from.saturating_add(real(left as f64 / self.speed)).min(self.ends)
    }

    /// What was counted until now. True if a step is over, or was taken back.
    pub(crate) fn hear(&mut self, now: Time, counts: Counts) -> bool {
        let calls = counts.calls.saturating_sub(self.before.calls);
        let throttled = counts.throttled.saturating_sub(self.before.throttled);
        if throttled >= 3 && u128::from(throttled) * 100 > u128::from(calls) {
            let again = self.back;
            self.rebase(now);
            if !again {
                self.done = self.done.saturating_sub(self.profile.step());
                self.back = true;
            }
            self.from = self.from.max(now.saturating_add(self.step())).min(self.ends);
            self.pace();
            (self.step_ends, self.before) = (self.from, counts);
            return !again;
        }
        if now < self.step_ends {
            return false;
        }
        self.back = false;
        (self.step_ends, self.before) = (now.saturating_add(self.step()), counts);
        true
    }

    /// Nobody calls from `now` until then (in the past: the pause that it knew of is over early).
    pub(crate) fn pause(&mut self, now: Time, until: Time) {
        if self.is_over(now) {
            return;
        }
        self.rebase(now);
        let known = self.paused.max(now);
        let moved = |time: Time| match until >= known {
            true => time.saturating_add(until.saturating_since(known)),
            false => time.saturating_sub(known.saturating_since(until.max(now))),
        };
        (self.from, self.ends, self.step_ends) = (moved(self.from), moved(self.ends), moved(self.step_ends));
        self.paused = until.max(now);
    }

    /// How far along the curve it is. Rounded up: who was readmitted must not miss it by a rounding.
    fn position(&self, now: Time) -> u64 {
        let since = now.saturating_since(self.from).as_nanos() as f64;
        // A cast from a float saturates.
        self.done.saturating_add((since * self.speed).ceil() as u64).min(self.length)
    }

    /// Goes on from `now`, where it is by then.
    fn rebase(&mut self, now: Time) {
        if now > self.from {
            (self.done, self.from) = (self.position(now), now);
        }
    }

    /// So fast that it is over in time.
    fn pace(&mut self) {
        let left = self.length.saturating_sub(self.done) as f64;
        let time = self.ends.saturating_since(self.from).as_nanos() as f64;
        // No time left: it is over at `ends`, whatever the speed.
        self.speed = if time > 0.0 { (left / time).max(1.0) } else { 1.0 };
    }

    /// How long a step takes at the present speed.
    fn step(&self) -> Duration {
        real(self.profile.step() as f64 / self.speed)
    }
}

fn real(nanos: f64) -> Duration {
    Duration::from_nanos(nanos.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::{super::config::tests::profiles, *};
    use proptest::prelude::*;

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }
    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }
    fn counts(calls: u64, throttled: u64) -> Counts {
        Counts { calls, throttled }
    }
    fn default(closed_for: Duration) -> Ramp {
        Ramp::begin(Profile::default(), at(0), closed_for, Counts::default())
    }
    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6
    }

    #[test]
    fn five_percent_doubling_every_five_seconds() {
        let ramp = default(secs(600));
        let shares = [0, 5, 10, 15, 20, 22].map(|second| ramp.share(at(second * 1000)));
        assert_eq!(shares, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]);
        assert!(!ramp.is_over(at(21_609)) && ramp.is_over(at(21_610)));
        assert_eq!(ramp.admits_at(0.04), Time::ZERO);
        assert_eq!(ramp.admits_at(0.1), at(5000));
    }

    #[test]
    fn not_longer_than_it_was_closed() {
        let ramp = default(secs(5));
        assert!(!ramp.is_over(at(4999)) && ramp.is_over(at(5000)));
        assert!(close(ramp.share(at(2500)), 0.05f64.sqrt()), "half of the way");
        let half_hour = Ramp::begin(Profile::half_more_every_15_min(), at(0), secs(600), Counts::default());
        assert!(!half_hour.is_over(at(599_999)) && half_hour.is_over(at(600_000)));
        assert!(default(Duration::ZERO).is_over(at(0)));
        assert_eq!(default(Duration::ZERO).share(at(0)), 1.0);
    }

    #[test]
    fn one_stray_throttle_in_two_hundred_does_not_stretch_it() {
        for (calls, throttled, back) in
            [(200, 1, false), (2, 2, false), (3, 3, true), (299, 3, true), (300, 3, false), (1000, 11, true)]
        {
            let mut ramp = default(secs(600));
            let undisturbed = ramp.over_at();
            assert_eq!(ramp.hear(at(4000), counts(calls, throttled)), back, "{throttled} of {calls}");
            assert_eq!(ramp.over_at() > undisturbed, back, "{throttled} of {calls}");
        }
    }

    #[test]
    fn one_step_back_and_on_after_a_clean_one() {
        let mut ramp = default(secs(600));
        assert!(ramp.hear(at(5000), counts(100, 0)) && ramp.hear(at(10_000), counts(200, 0)));
        assert!(ramp.hear(at(12_000), counts(300, 9)), "back to where it was five seconds ago");
        let there = ramp.share(at(12_000));
        assert!(close(there, 0.05 * 2f64.powf(7.0 / 5.0)), "{there}");
        // More of the same: it stands where it is, until a step has passed without.
        assert!(!ramp.hear(at(14_000), counts(400, 20)) && !ramp.hear(at(16_000), counts(500, 40)));
        assert_eq!(ramp.share(at(20_999)), there);
        assert!(ramp.hear(at(21_000), counts(900, 41)));
        assert!(close(ramp.share(at(26_000)), there * 2.0));
        // Then the next trouble is a step back of its own.
        assert!(ramp.hear(at(26_000), counts(1000, 60)));
        assert!(close(ramp.share(at(26_000)), there));
    }

    #[test]
    fn a_throttled_ramp_is_over_in_time_all_the_same() {
        let mut ramp = default(secs(30));
        let mut seen = Counts::default();
        for second in 0..30 {
            assert!(!ramp.is_over(at(second * 1000)), "{second} s");
            seen = counts(seen.calls + 10, seen.throttled + 5);
            ramp.hear(at(second * 1000), seen);
        }
        assert!(ramp.is_over(at(30_000)));
        // A step back with time left: the rest is run through faster, and there is no jump at the end.
        let mut ramp = default(secs(24));
        ramp.hear(at(15_000), counts(100, 5));
        assert!(ramp.share(at(23_990)) > 0.99, "{}", ramp.share(at(23_990)));
    }

    #[test]
    fn it_stands_still_in_a_pause() {
        let mut ramp = default(secs(60));
        ramp.pause(at(5000), at(15_000));
        assert!(close(ramp.share(at(15_000)), 0.1));
        // Extended, then cleared early.
        ramp.pause(at(6000), at(20_000));
        assert!(close(ramp.share(at(20_000)), 0.1));
        ramp.pause(at(12_000), at(12_000));
        assert!(close(ramp.share(at(12_000)), 0.1) && close(ramp.share(at(17_000)), 0.2));
        assert_eq!(ramp.over_at().saturating_since(ramp.ends), Duration::ZERO);
        assert_eq!(ramp.ends, at(67_000), "seven seconds in which nobody called");
        // A new one after it moves by its own length.
        ramp.pause(at(17_000), at(18_000));
        assert_eq!(ramp.ends, at(68_000));
        assert!(close(ramp.share(at(23_000)), 0.4));
    }

    #[test]
    fn a_pause_is_no_part_of_the_step_that_has_to_be_clean() {
        let mut ramp = default(secs(600));
        ramp.hear(at(10_000), counts(100, 5));
        let there = ramp.share(at(10_000));
        ramp.pause(at(10_000), at(40_000));
        assert!(!ramp.hear(at(44_999), counts(200, 5)));
        assert_eq!(ramp.share(at(44_999)), there);
        assert!(ramp.hear(at(45_000), counts(200, 5)) && ramp.share(at(46_000)) > there);
    }

    #[derive(Clone, Copy, Debug)]
    enum Happens {
        Nothing,
        Calls(u64, u64),
        Pause(u64),
        Clear,
    }

    fn happens() -> impl Strategy<Value = Happens> {
        prop_oneof![
            Just(Happens::Nothing),
            (0u64..400, 0u64..12).prop_map(|(calls, throttled)| Happens::Calls(calls, throttled)),
            (0u64..20_000).prop_map(Happens::Pause),
            Just(Happens::Clear),
        ]
    }

    proptest! {
        #[test]
        fn undisturbed_it_only_grows_and_says_when(
            profile in profiles(), start in 0u64..1_000_000, closed in 0u64..100_000_000, unit in 0.0f64..1.0,
            steps in proptest::collection::vec(0u64..40_000, 1..60),
        ) {
            let (mut now, closed) = (at(start), Duration::from_millis(closed));
            let mut ramp = Ramp::begin(profile, now, closed, counts(7, 3));
            let promised = ramp.admits_at(unit);
            let ends = now.saturating_add(closed);
            prop_assert!(promised <= ends && ramp.over_at() <= ends && ramp.is_over(ramp.over_at()));
            let (mut share, mut calls) = (0.0, 7);
            for step in steps {
                now = now.saturating_add(Duration::from_millis(step));
                calls += step;
                // One in two hundred, or two in all, is no trouble.
                ramp.hear(now, counts(calls, 3));
                let next = ramp.share(now);
                prop_assert!((0.0..=1.0).contains(&next) && next >= share, "{next} after {share}");
                share = next;
                prop_assert_eq!(ramp.is_over(now), ramp.over_at() <= now);
                // Readmitted precisely from the promised instant on, and not above the share.
                let admitted = ramp.admits_at(unit) <= now;
                prop_assert_eq!(admitted, promised <= now, "{:?} {:?}", ramp.admits_at(unit), promised);
                prop_assert!(!admitted || unit <= share + 1e-9, "{unit} {share}");
            }
            prop_assert!(ramp.is_over(ends) && ramp.share(ends) == 1.0);
        }

        #[test]
        fn whatever_happens(
            profile in profiles(), closed in 1u64..2_000_000,
            steps in proptest::collection::vec((0u64..8000, happens()), 1..120),
        ) {
            let start = at(1_000_000);
            let (mut now, mut paused_until) = (start, start);
            let mut seen = Counts::default();
            let mut ramp = Ramp::begin(profile, now, Duration::from_millis(closed), seen);
            let (mut standing, mut end) = (false, ramp.ends);
            for (step, happens) in steps {
                now = now.saturating_add(Duration::from_millis(step));
                let share = ramp.share(now);
                let mut back = false;
                match happens {
                    Happens::Nothing => {}
                    // Nobody counts once it is over.
                    Happens::Calls(..) if ramp.is_over(now) => {}
                    Happens::Pause(_) | Happens::Clear if ramp.is_over(now) => ramp.pause(now, at(u64::MAX >> 20)),
                    Happens::Calls(calls, throttled) => {
                        seen = counts(seen.calls + calls, seen.throttled + throttled.min(calls));
                        ramp.hear(now, seen);
                        back = ramp.share(now) < share;
                        // At most one step, and the next only after a step without trouble.
                        prop_assert!(!(back && standing), "twice");
                        standing = ramp.back;
                    }
                    Happens::Pause(millis) => {
                        let until = now.saturating_add(Duration::from_millis(millis)).max(paused_until);
                        let known = paused_until.max(now);
                        end = end.saturating_add(until.saturating_since(known));
                        ramp.pause(now, until);
                        paused_until = until;
                    }
                    Happens::Clear => {
                        end = end.saturating_sub(paused_until.saturating_since(now));
                        ramp.pause(now, now);
                        paused_until = now;
                    }
                }
                let next = ramp.share(now);
                prop_assert!((0.0..=1.0).contains(&next));
                prop_assert!(back || next >= share * (1.0 - 1e-9), "{next} after {share} by {happens:?}");
                prop_assert_eq!(ramp.ends, end, "only pauses move it");
                prop_assert!(ramp.over_at() <= ramp.ends && ramp.speed >= 1.0);
            }
            prop_assert!(ramp.is_over(end) && ramp.share(end) == 1.0);
        }
    }
}
