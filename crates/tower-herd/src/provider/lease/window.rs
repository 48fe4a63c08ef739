use crate::{Time, store::Glance};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The time in which a glance at two coarse clocks shows that a lease lasts, which costs a third of a precise reading.
///
/// The one goes on while this process is stopped, and cannot be set; the other goes on while the machine is suspended,
/// too. What both allow, the precise clock allows. When one of them does not, nothing is said: somebody has set the
/// wall clock, the machine was suspended, or the lease ends soon, and the precise clock decides.
///
/// (A wall clock that is set back by as much as the machine was suspended, before anything is renewed, would hide
/// that. It must be as much to within the age of the lease, or the wall clock is before the window.)
#[derive(Debug, Default)]
pub(super) struct Window {
    // Each bound is true for itself: who reads one of an older window is the more careful.
    /// 0: it is closed.
    running_until: AtomicU64,
    wall_from: AtomicU64,
    wall_until: AtomicU64,
}

/// By so much a coarse clock may be behind: a tick is 10 ms at most, and a machine that is busy with others misses
/// some. (One that misses more is covered by the margin of the lease, as every delay is.)
const COARSE: Duration = Duration::from_millis(100);

impl Window {
    /// What is seen `now` will be seen for `left`.
    pub(super) fn open(&self, now: Glance, left: Duration) {
        let left = left.saturating_sub(COARSE);
        self.wall_from.store(now.wall.as_nanos(), Ordering::Relaxed);
        self.wall_until.store(now.wall.saturating_add(left).as_nanos(), Ordering::Relaxed);
        self.running_until.store(now.running.saturating_add(left).as_nanos(), Ordering::Release);
    }

    pub(super) fn close(&self) {
        self.running_until.store(0, Ordering::Release);
    }

    /// Whether the lease lasts, as far as a glance tells. The clocks are read after the bounds, or a moment that passes
    /// in between would be gained.
    #[inline]
    pub(super) fn is_open(&self, now: impl FnOnce() -> Option<Glance>) -> bool {
        let running_until = self.running_until.load(Ordering::Acquire);
        if running_until == 0 {
            return false;
        }
        let from = self.wall_from.load(Ordering::Relaxed);
        let until = self.wall_until.load(Ordering::Relaxed);
        now().is_some_and(|now| {
            now.running.as_nanos() < running_until && (from..until).contains(&now.wall.as_nanos())
        })
    }
}

/// Until when a lease may be used, for the hot path.
#[derive(Debug)]
pub(super) struct UseBy {
    at: AtomicU64,
    window: Window,
}

impl UseBy {
    /// For ever.
    pub(super) fn new() -> Self {
        UseBy { at: AtomicU64::new(Time::MAX.as_nanos()), window: Window::default() }
    }

    #[inline]
    pub(super) fn is_to_come(
        &self,
        now: impl FnOnce() -> Time,
        glance: impl FnOnce() -> Option<Glance>,
    ) -> bool {
        if self.window.is_open(glance) {
            return true;
        }
        let at = self.at.load(Ordering::Acquire);
        at == Time::MAX.as_nanos() || now().as_nanos() < at
    }

    pub(super) fn set(&self, at: Time, now: impl FnOnce() -> Time, glance: Option<Glance>) {
        // Before it may fall, nobody goes by the window of what it was.
        self.window.close();
        self.at.store(at.as_nanos(), Ordering::Release);
        if let Some(glance) = glance.filter(|_| at != Time::MAX) {
            // Read after the glance, so that what passes in between is taken off.
            let left = at.saturating_since(now());
            if left > COARSE {
                self.window.open(glance, left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * SECOND)
    }

    /// A machine: its clocks, and whether the precise one was read.
    struct Machine {
        boot: u64,
        running: u64,
        wall: u64,
    }

    impl Machine {
        fn glance(&self) -> Option<Glance> {
            Some(Glance { running: at(self.running), wall: at(self.wall) })
        }
        fn sees(&self, use_by: &UseBy) -> (bool, bool) {
            let mut precise = false;
            let now = || {
                precise = true;
                at(self.boot)
            };
            let to_come = use_by.is_to_come(now, || self.glance());
            (to_come, precise)
        }
        fn passes(&mut self, seconds: u64) {
            (self.boot, self.running, self.wall) =
                (self.boot + seconds, self.running + seconds, self.wall + seconds);
        }
    }

    fn leased(seconds: u64) -> (Machine, UseBy) {
        let machine = Machine { boot: 1000, running: 400, wall: 1_700_000_000 };
        let use_by = UseBy::new();
        use_by.set(at(1000 + seconds), || at(machine.boot), machine.glance());
        (machine, use_by)
    }

    #[test]
    fn a_glance_is_enough_until_shortly_before_the_end() {
        let (mut machine, use_by) = leased(7);
        assert_eq!(machine.sees(&use_by), (true, false));
        machine.passes(6);
        assert_eq!(machine.sees(&use_by), (true, false));
        machine.passes(1);
        assert_eq!(machine.sees(&use_by), (false, true));
    }

    // rust-lang/rust#87906: the clock that runs on only while the machine does says that no time has passed.
    #[test]
    fn a_machine_that_slept_asks_the_precise_clock() {
        let (mut machine, use_by) = leased(7);
        (machine.boot, machine.wall) = (machine.boot + 60, machine.wall + 60);
        assert_eq!(machine.sees(&use_by), (false, true));
    }

    #[test]
    fn a_wall_clock_that_was_set_decides_nothing() {
        for by in [-3600, -8, -1, 1, 8, 3600] {
            let (mut machine, use_by) = leased(7);
            machine.passes(2);
            machine.wall = machine.wall.saturating_add_signed(by);
            assert!(machine.sees(&use_by).0, "{by}");
            machine.passes(5);
            assert!(!machine.sees(&use_by).0, "{by}");
        }
    }

    #[test]
    fn slept_and_set_back_is_seen_unless_it_comes_to_the_same() {
        let (mut machine, use_by) = leased(7);
        (machine.boot, machine.wall) = (machine.boot + 60, machine.wall + 60 - 3600);
        assert_eq!(machine.sees(&use_by), (false, true));
    }

    #[test]
    fn what_never_ends_reads_no_clock_and_what_was_cut_short_is_over() {
        let (machine, use_by) = leased(7);
        use_by.set(Time::MAX, || unreachable!("it has no end"), machine.glance());
        assert_eq!(machine.sees(&use_by), (true, false));
        use_by.set(at(999), || at(machine.boot), machine.glance());
        assert_eq!(machine.sees(&use_by), (false, true));
        // Where there are no coarse clocks.
        use_by.set(at(1007), || at(machine.boot), None);
        assert_eq!(machine.sees(&use_by), (true, true));
    }
}
