//! What is done while the store cannot be asked.

use crate::Time;
use std::time::Duration;

/// What is done with a retry while the store cannot be asked. First attempts run in any case: there is no herd yet that
/// they could join.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum OnOutage {
    /// By the tokens of this process, which have seen all of its claims and so know the waits that still hold. A key
    /// is run once a wait **and process** at most, never without a limit. (Those who ran open when their store was down
    /// lost the protection exactly when all failed together, and came to the same: SweetSophia/noosphere#242.)
    #[default]
    Local,
    /// All run: no protection while the store is down. An opt-out, and logged as one at each outage.
    Open,
    /// None run: the store is as necessary as the queue. (crbnos/carbon#1079 is what becomes of a cache that was
    /// meant to be optional.) For tokens that live in the queue's own database, which is down as well then.
    Closed,
}

impl OnOutage {
    /// A short fixed name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            OnOutage::Local => "local",
            OnOutage::Open => "open",
            OnOutage::Closed => "closed",
        }
    }
}

/// The store cannot be asked. Told once an outage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StoreAlert {
    /// The name of the [`Tokens`](super::Tokens).
    pub store: String,
    /// What its error said.
    pub error: String,
    /// What is done meanwhile.
    pub policy: OnOutage,
}

/// Whether the store is asked: pure, fed with instants.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outage {
    /// Failures in a row; 0: all is well.
    failures: u32,
    /// Until then nobody asks.
    until: Time,
}

impl Outage {
    /// Whether to ask now. While it is down, one caller does at the end of each back-off, and all others are spared
    /// the timeout.
    pub(super) fn may_ask(&mut self, now: Time, patience: Duration) -> bool {
        if self.failures == 0 {
            return true;
        }
        if now < self.until {
            return false;
        }
        // If this one is dropped, another asks after its time would have been over.
        self.until = now.saturating_add(patience);
        true
    }

    /// It could not be asked. Whether that is news: an outage begins.
    pub(super) fn failed(&mut self, now: Time, first: Duration, longest: Duration, u: f64) -> bool {
        let bound = bound(first, longest, self.failures);
        // Half for certain, half at random: processes that lost it together do not come back together.
        let wait = Duration::try_from_secs_f64(bound.as_secs_f64() * (0.5 + u / 2.0)).unwrap_or(bound);
        self.until = now.saturating_add(wait);
        self.failures = self.failures.saturating_add(1);
        self.failures == 1
    }

    /// It answered. Whether that is news.
    pub(super) fn answered(&mut self) -> bool {
        std::mem::take(self).failures > 0
    }

    pub(super) fn is_down(&self) -> bool {
        self.failures > 0
    }

    /// How long it is not asked.
    pub(super) fn wait(&self, now: Time) -> Duration {
        self.until.saturating_since(now)
    }
}

/// `min(longest, first * 2^n)`.
fn bound(first: Duration, longest: Duration, n: u32) -> Duration {
    first.saturating_mul(1_u32.checked_shl(n).unwrap_or(u32::MAX)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn one_asks_at_the_end_of_each_back_off() {
        let mut outage = Outage::default();
        let mut now = Time::ZERO;
        assert!(outage.may_ask(now, SECOND) && outage.may_ask(now, SECOND) && !outage.is_down());
        assert!(outage.failed(now, SECOND, 30 * SECOND, 0.0), "news");
        assert!(!outage.failed(now, SECOND, 30 * SECOND, 1.0), "two of one moment are one outage");
        let mut waits = Vec::new();
        for _ in 0..8 {
            assert!(!outage.may_ask(now, SECOND));
            waits.push(outage.wait(now));
            now = now.saturating_add(outage.wait(now));
            assert!(outage.may_ask(now, SECOND), "one");
            assert!(!outage.may_ask(now, SECOND), "and one only");
            assert!(!outage.failed(now, SECOND, 30 * SECOND, 1.0));
        }
        assert_eq!(waits, [2, 4, 8, 16, 30, 30, 30, 30].map(|s| s * SECOND));
        assert!(outage.answered() && !outage.answered() && outage.may_ask(now, SECOND));
    }

    #[test]
    fn if_the_one_who_asks_is_dropped_another_does() {
        let mut outage = Outage::default();
        outage.failed(Time::ZERO, SECOND, SECOND, 1.0);
        let now = Time::ZERO.saturating_add(SECOND);
        assert!(outage.may_ask(now, SECOND) && !outage.may_ask(now, SECOND));
        assert!(outage.may_ask(now.saturating_add(SECOND), SECOND));
    }

    #[test]
    fn the_back_off_is_spread_and_does_not_overflow() {
        for (u, wait) in [(0.0, SECOND / 2), (1.0, SECOND)] {
            let mut outage = Outage::default();
            outage.failed(Time::ZERO, SECOND, 30 * SECOND, u);
            assert_eq!(outage.wait(Time::ZERO), wait);
        }
        let mut outage = Outage { failures: u32::MAX, until: Time::ZERO };
        outage.failed(Time::ZERO, SECOND, 30 * SECOND, 1.0);
        assert_eq!(outage.wait(Time::ZERO), 30 * SECOND);
    }
}
