//! When a task that waits at one tier goes on to the next: pure functions.
//!
//! A pause up to the hint patience is waited out in place, but only by those whose turn comes within
//! the slot patience after it: one task after a short hint stays, the crowd behind it goes on at once,
//! where the spaced admissions of the next tier keep it from arriving in one burst. The queue's
//! estimate counts tasks that will be served elsewhere; that is intended, it errs towards the next tier.

use crate::provider::Outlook;
use std::time::Duration;

/// How long a task waits at a tier before it is queued at the next one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    /// For a slot; half a call's mean length where that is shorter (to wait longer than that for
    /// a cheaper slot costs more than half of the throughput).
    pub(super) slot: Duration,
    /// For the end of a pause.
    pub(super) hint: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { slot: Duration::from_millis(500), hint: Duration::from_secs(2) }
    }
}

/// What a waiting task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Queue at the next tier too, now.
    Overflow,
    /// Stay, and ask again after this long.
    Stay(Duration),
}

/// What a task does that waits at a tier.
///
/// `waited` is how long it has been at this tier.
///
/// A pause is waited out in place up to [`Patience::hint`], but only by those whose turn comes within
/// the slot patience after it: one task after a short hint stays, the crowd behind it goes on at once.
#[must_use]
pub(super) fn step(p: Patience, waited: Duration, outlook: Outlook) -> Step {
    let Outlook { pause, queue, latency } = outlook;
    let slot = latency.map_or(p.slot, |l| p.slot.min(l / 2));
    let limit = if pause.is_zero() { slot } else { p.hint };
    let left = limit.saturating_sub(waited);
    if left.is_zero() || pause > left || queue > slot { Step::Overflow } else { Step::Stay(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn decisions() {
        let p = Patience::default();
        let l = Some(ms(1000));
        let z = Duration::ZERO;
        for (name, waited, pause, queue, latency, want) in [
            ("alone after a short hint", z, ms(1000), z, l, Step::Stay(ms(2000))),
            ("alone after a hint of 2 s", z, ms(2000), z, l, Step::Stay(ms(2000))),
            ("a longer hint", z, ms(2001), z, l, Step::Overflow),
            ("far back after a short hint", z, ms(1000), ms(501), l, Step::Overflow),
            ("short queue", z, z, ms(400), l, Step::Stay(ms(500))),
            ("nothing known", z, z, z, None, Step::Stay(ms(500))),
            ("patience over", ms(500), z, z, l, Step::Overflow),
            ("short calls, short patience", z, z, ms(101), Some(ms(200)), Step::Overflow),
            ("the pause began while it waited", ms(1500), ms(1000), z, l, Step::Overflow),
        ] {
            assert_eq!(step(p, waited, Outlook { pause, queue, latency }), want, "{name}");
        }
    }
}
