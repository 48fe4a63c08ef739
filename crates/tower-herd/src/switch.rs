//! Whether a layer decides, only counts, or stands aside: changed while it runs.
//!
//! Nobody puts a new gate in front of production and hopes. Every layer takes a [`Switch`]: first it
//! only observes ([`Mode::Observe`]), and tells by its count and by
//! [`Event::WouldRefuse`](crate::observe::Event::WouldRefuse) what it would have refused or changed; then
//! it enforces; and when it turns out wrong at three in the morning it is turned off without a deploy.
//!
//! A switch is read when a call comes to the layer: calls that wait already, wait on. To read it costs one
//! relaxed load.
//!
//! | layer | `Observe` | `Off` |
//! |---|---|---|
//! | [`TaskLayer`](crate::TaskLayer) | as `Enforce`: it holds nothing back | starts no task |
//! | `JitteredRetryLayer` | what would be sent again is counted, and returned; the budget is asked, and gets back what it gave | no copy is kept, nothing is sent again |
//! | `HashedFailoverLayer` | each call goes to the first rung of its order; counted is who would have gone on from there, or waited | each call goes to the first rung of its order |
//! | `RampedReadmissionLayer` | who is not back yet is counted, and passes | all pass |
//! | `SpendLayer` | a call that its task has no money for is counted, and passes uncharged | nothing is charged |
//! | `BreakerLayer` | it opens and closes as it would, alerts included; who comes meanwhile is counted, and passes | nothing is counted; an open one is reset by the next call |
//! | `BudgetLayer` | calls that it would have drawn are counted, and pass | all pass; the sensor counts on |
//! | `RetryAfterLayer` | calls that come in a pause are counted, and pass | all pass |
//! | `TokenLimitLayer` | a call that would have waited, or is too large, is counted, and passes | no tokens are taken |
//! | `FleetLimitLayer` | a call that finds no slot is counted, and passes without one | nobody takes a slot |
//! | `AttemptsLayer` | requests that would be written to are counted; retries further in are reported | nothing is written, read or reported |
//! | [`ClassifyLayer`](crate::ClassifyLayer) | as `Enforce`: it only observes | nothing is learned from its calls |
//! | `RetryTokenLayer` | keys are claimed and cleared; a job that comes too early is counted, and runs | nothing is claimed |
//! | `JobBreakerLayer` | it opens and closes as it would, alerts included; who comes meanwhile is counted, and runs | nothing is counted |
//! | `AttemptTimeoutLayer` | calls that outlive it are counted, and go on | no call is timed |
//!
//! Each layer counts for itself what it alone would have done: where two share a switch, a call that both
//! would have held back counts twice. A layer knows nothing of the switches of others: a limit that
//! enforces below a pause layer that is off still obeys the pause. Switch such layers together.
//!
//! ```
//! use tower_herd::{Fleet, FleetLimitLayer, Mode, Switch};
//!
//! let search = Fleet::local().provider("search");
//! let switch = Switch::new(Mode::Observe);
//! let layer = FleetLimitLayer::new(&search).switch(&switch);
//! // A day later, by configuration or an operator's endpoint:
//! if switch.would_refuse() < 10 {
//!     switch.set(Mode::Enforce);
//! }
//! # let _ = layer;
//! ```

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

/// What a layer does with a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Mode {
    /// It decides.
    #[default]
    Enforce,
    /// It counts what it would have refused or changed, and lets every call pass. The
    /// [module](self) says what each layer counts.
    Observe,
    /// It lets every call pass and counts nothing.
    Off,
}

/// The mode of one layer, or of several that are switched together. A handle: clones are the same switch.
/// See the [module](self).
#[derive(Clone, Default)]
pub struct Switch(Arc<Inner>);

#[derive(Default)]
// In cache lines of its own: its readers do not feel those who clone the handle.
#[repr(align(128))]
struct Inner {
    mode: AtomicU8,
    would_refuse: AtomicU64,
}

impl Switch {
    /// A switch that stands so. `Switch::default()` enforces.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        let switch = Switch::default();
        switch.set(mode);
        switch
    }

    /// How it stands.
    #[inline]
    #[must_use]
    pub fn mode(&self) -> Mode {
        match self.0.mode.load(Ordering::Relaxed) {
            0 => Mode::Enforce,
            1 => Mode::Observe,
            _ => Mode::Off,
        }
    }

    /// Turns it: for every call that comes from now on.
    pub fn set(&self, mode: Mode) {
        self.0.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// Calls so far that a layer in [`Mode::Observe`] would have refused, delayed or sent again.
    #[must_use]
    pub fn would_refuse(&self) -> u64 {
        self.0.would_refuse.load(Ordering::Relaxed)
    }

    /// Whether the other is the same switch.
    #[cfg(feature = "herd")]
    pub(crate) fn is(&self, other: &Switch) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Counts one of them.
    #[cfg_attr(not(feature = "full"), allow(dead_code, reason = "each layer uses a part of it"))]
    #[cold]
    pub(crate) fn count(&self) {
        self.0.would_refuse.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Switch")
            .field("mode", &self.mode())
            .field("would_refuse", &self.would_refuse())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_one_switch() {
        let switch = Switch::default();
        let other = switch.clone();
        for mode in [Mode::Observe, Mode::Off, Mode::Enforce] {
            other.set(mode);
            assert_eq!(switch.mode(), mode);
        }
        other.count();
        assert_eq!(switch.would_refuse(), 1);
        assert_eq!(Switch::new(Mode::Off).mode(), Mode::Off);
    }
}
