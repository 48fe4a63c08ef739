//! Time as the state machines see it, and the clock that is injected into a [`Fleet`](crate::Fleet).
//!
//! Every policy of this crate is a pure state machine that is handed the present instant; none reads
//! a clock itself. [`Time`] is that instant: nanoseconds since the origin of one [`Clock`]. It is a
//! plain number, so that it fits into an atomic, and all its arithmetic saturates.

use std::time::Duration;
use tokio::time::Instant;

/// An instant: nanoseconds since the origin of the [`Clock`] that gave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The origin of the clock.
    pub const ZERO: Time = Time(0);
    /// Later than every real instant (584 years after the origin).
    pub const MAX: Time = Time(u64::MAX);

    /// The instant so many nanoseconds after the origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Time(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// This instant plus `duration`, at most [`Time::MAX`].
    #[must_use]
    pub const fn saturating_add(self, duration: Duration) -> Self {
        Time(self.0.saturating_add(nanos(duration)))
    }

    /// This instant less `duration`, at least [`Time::ZERO`].
    #[must_use]
    pub const fn saturating_sub(self, duration: Duration) -> Self {
        Time(self.0.saturating_sub(nanos(duration)))
    }

    /// How long ago `earlier` was; zero if it is not in the past.
    #[must_use]
    pub const fn saturating_since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

const fn nanos(duration: Duration) -> u64 {
    let nanos = duration.as_nanos();
    if nanos > u64::MAX as u128 { u64::MAX } else { nanos as u64 }
}

/// The one monotonic clock of a fleet.
///
/// It is tokio's: a test with a paused runtime clock moves it, and nothing else has to be injected.
/// Reading it costs about 27 ns, so the layers read it only where an instant decides something: on
/// the way of a call that meets no pause, no queue and no ramp it is read for one call in eight, to
/// learn durations (one in 64 where calls take less than a millisecond).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    origin: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// A clock whose origin is now.
    #[must_use]
    pub fn new() -> Self {
        Clock { origin: Instant::now() }
    }

    /// The present instant, read precisely.
    #[must_use]
    pub fn now(&self) -> Time {
        self.time(Instant::now())
    }

    /// The time of day, for people to read: no decision depends on it.
    #[cfg_attr(not(feature = "breaker"), allow(dead_code, reason = "for its alerts"))]
    #[expect(clippy::disallowed_methods, reason = "an alert tells when, and only tells it")]
    pub(crate) fn wall(&self) -> std::time::SystemTime {
        std::time::SystemTime::now()
    }

    /// `instant` on this clock; [`Time::ZERO`] for instants before its origin.
    #[must_use]
    pub fn time(&self, instant: Instant) -> Time {
        Time::ZERO.saturating_add(instant.saturating_duration_since(self.origin))
    }

    /// `time` as an instant that tokio can sleep until; 30 years ahead at most.
    #[must_use]
    pub fn instant(&self, time: Time) -> Instant {
        // tokio's timers and `Instant` addition both have an end; nobody waits 30 years.
        const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        self.origin + Duration::from_nanos(time.0).min(FAR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Time::MAX.saturating_add(Duration::MAX), Time::MAX);
        assert_eq!(Time::ZERO.saturating_sub(Duration::from_secs(1)), Time::ZERO);
        assert_eq!(Time::ZERO.saturating_since(Time::MAX), Duration::ZERO);
        assert_eq!(Time::from_nanos(7).saturating_since(Time::from_nanos(2)), Duration::from_nanos(5));
    }

    #[tokio::test(start_paused = true)]
    async fn follows_the_paused_clock_of_tokio() {
        let clock = Clock::new();
        assert_eq!(clock.now(), Time::ZERO);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(clock.now(), Time::from_nanos(3_000_000_000));
        assert_eq!(clock.time(clock.instant(clock.now())), clock.now());
        assert_eq!(clock.time(Instant::now() - Duration::from_secs(60)), Time::ZERO);
    }

    #[test]
    fn the_far_future_is_an_instant() {
        let clock = Clock::new();
        assert!(clock.instant(Time::MAX) > Instant::now());
    }
}
