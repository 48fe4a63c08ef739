//! What members were configured with, made one.

use crate::store::{Limits, RateLimit};

/// The limits in force.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Merged {
    pub(super) limits: Limits,
    /// Members of one generation said different things.
    pub(super) disagree: bool,
}

impl Merged {
    pub(super) fn of(limits: &Limits) -> Self {
        Merged { limits: limits.clone(), disagree: false }
    }

    /// The highest generation counts; of one, the lowest of each limit, where known beats unknown.
    pub(super) fn with(self, other: &Limits) -> Self {
        if other.generation > self.limits.generation {
            return Merged::of(other);
        }
        if other.generation < self.limits.generation || *other == self.limits {
            return self;
        }
        let Merged { limits: a, .. } = self;
        let limits = Limits {
            generation: a.generation,
            floor: a.floor.min(other.floor),
            start: a.start.min(other.start),
            ceiling: lower(a.ceiling, other.ceiling, u32::min),
            requests: lower(a.requests, other.requests, slower),
            tokens: lower(a.tokens, other.tokens, slower),
        };
        Merged { limits, disagree: true }
    }
}

fn lower<T>(a: Option<T>, b: Option<T>, least: impl FnOnce(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(least(a, b)),
        (a, b) => a.or(b),
    }
}

fn slower(a: RateLimit, b: RateLimit) -> RateLimit {
    RateLimit { per_minute: a.per_minute.min(b.per_minute), burst: a.burst.min(b.burst) }
}
