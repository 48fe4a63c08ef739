use crate::{Clock, Time};
use std::{fmt, sync::Arc};

/// The clock that leases are held by: it goes on while the machine is suspended, or a stopped process would
/// wake up with a lease that others hold by now (rust-lang/rust#87906).
#[derive(Clone)]
pub(crate) enum LeaseClock {
    /// The machine's, since it was started: `CLOCK_BOOTTIME` where there is one.
    Machine,
    /// tokio's, which a test may pause.
    Tokio(Clock),
    /// A test's own.
    Custom(Arc<dyn Fn() -> Time + Send + Sync>),
}

/// Two coarse clocks at a glance: some milliseconds behind, at a third of the price of a precise reading.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Glance {
    /// Goes on while this process is stopped, not while the machine is suspended; nobody sets it.
    pub(crate) running: Time,
    /// Goes on while the machine is suspended, too, and may be set.
    pub(crate) wall: Time,
}

impl LeaseClock {
    /// None where there are no such clocks.
    #[inline]
    pub(crate) fn glance(&self) -> Option<Glance> {
        match self {
            #[cfg(any(target_os = "linux", target_os = "android"))]
            LeaseClock::Machine => Some(Glance {
                running: read(rustix::time::ClockId::MonotonicCoarse),
                wall: read(rustix::time::ClockId::RealtimeCoarse),
            }),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Time {
        match self {
            LeaseClock::Machine => machine(),
            LeaseClock::Tokio(clock) => clock.now(),
            LeaseClock::Custom(now) => now(),
        }
    }
}

#[cfg(unix)]
#[inline]
fn machine() -> Time {
    // Elsewhere than on Linux the monotonic clock is the one that goes on.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const ID: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const ID: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    read(ID)
}

#[cfg(unix)]
#[inline]
fn read(clock: rustix::time::ClockId) -> Time {
    let now = rustix::time::clock_gettime(clock);
    let part = |part: i64| u64::try_from(part).unwrap_or_default();
    Time::from_nanos(part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec)))
}

#[cfg(not(unix))]
fn machine() -> Time {
    use std::sync::OnceLock;
    static ORIGIN: OnceLock<std::time::Instant> = OnceLock::new();
    Time::ZERO.saturating_add(ORIGIN.get_or_init(std::time::Instant::now).elapsed())
}

impl fmt::Debug for LeaseClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeaseClock::Machine => "Machine",
            LeaseClock::Tokio(_) => "Tokio",
            LeaseClock::Custom(_) => "Custom",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "no runtime here, and the real clock is what is tested")]
    fn the_machines_clock_moves_on() {
        let before = LeaseClock::Machine.now();
        std::thread::sleep(std::time::Duration::from_millis(5));
        let passed = LeaseClock::Machine.now().saturating_since(before);
        assert!(passed >= std::time::Duration::from_millis(5), "{passed:?}");
    }
}
