use crate::{Clock, Kind, Time};
use std::time::{Duration, UNIX_EPOCH};

/// One incident, told once: what broke, since when, and what follows. See the [module](super).
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Alert {
    /// What it is about.
    pub kind: AlertKind,
    /// The provider.
    pub provider: String,
    /// The scope below it; none: all of it.
    pub scope: Option<String>,
    /// Tells this incident from others: 16 hexadecimal digits.
    pub incident: String,
    /// When the first of the failures behind it settled, in milliseconds since 1970 by the local clock.
    pub first_failure_unix_ms: u64,
    /// When the last one did.
    pub last_failure_unix_ms: u64,
    /// The time between the two.
    pub failing_for: Duration,
    /// Failures in the window.
    pub failures: u32,
    /// Calls in the window; those that were neither success nor failure are not in it.
    pub calls: u32,
    /// Some of the failures, the last ones.
    pub samples: Vec<Sample>,
    /// Until when nobody calls unless a probe succeeds, in milliseconds since 1970 by the local clock.
    pub open_until_unix_ms: u64,
    /// The same as a time from now.
    pub open_for: Duration,
    /// Calls that were refused in this incident so far. (None yet when the alert is raised; see
    /// [`BreakerHandle::incident`](super::BreakerHandle::incident).)
    pub refused: u64,
    /// How many calls a second it is going to keep back, from how fast the last ones came; none if they
    /// came at one instant.
    pub shed_per_second: Option<f64>,
}

/// What an [`Alert`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum AlertKind {
    /// Its calls fail: the breaker has opened.
    Broken,
    /// Its account has nothing left.
    Depleted,
    /// It does not take our key, or does not know what we ask for.
    Misconfigured,
}

impl AlertKind {
    /// A short fixed name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            AlertKind::Broken => "broken",
            AlertKind::Depleted => "depleted",
            AlertKind::Misconfigured => "misconfigured",
        }
    }
}

/// One failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Sample {
    /// What it was: `failed`, `overloaded`, or `timed_out` where its caller waited until its deadline;
    /// `depleted` or `misconfigured` in an alert about that.
    pub what: &'static str,
    /// How long before the alert it settled.
    pub ago: Duration,
}

/// Failures that are kept as samples.
const SAMPLES: usize = 4;

/// What the failures of one window leave behind for an alert, in fixed memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trouble {
    first: Option<Time>,
    last: Time,
    samples: [Option<(&'static str, Time)>; SAMPLES],
    seen: usize,
}

impl Trouble {
    pub(crate) fn add(&mut self, what: &'static str, now: Time) {
        self.first.get_or_insert(now);
        self.last = self.last.max(now);
        self.samples[self.seen % SAMPLES] = Some((what, now));
        self.seen = self.seen.wrapping_add(1);
    }
}

/// What an alert says beside its trouble.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) kind: AlertKind,
    pub(crate) incident: u64,
    pub(crate) failures: usize,
    pub(crate) calls: usize,
    pub(crate) until: Time,
    pub(crate) refused: u64,
}

impl Alert {
    pub(crate) fn new(
        provider: &str,
        scope: Option<&str>,
        trouble: &Trouble,
        facts: Facts,
        clock: Clock,
        now: Time,
    ) -> Self {
        let first = trouble.first.unwrap_or(trouble.last);
        let failing_for = trouble.last.saturating_since(first);
        let open_for = facts.until.saturating_since(now);
        let wall = clock.wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ms = |at: Duration| u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        let ago = |time: Time| now.saturating_since(time);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut samples: Vec<Sample> =
            trouble.samples.iter().flatten().map(|(what, at)| Sample { what, ago: ago(*at) }).collect();
        samples.sort_by_key(|sample| std::cmp::Reverse(sample.ago));
        let between = f64::from(count(facts.calls.saturating_sub(1)));
        Alert {
            kind: facts.kind,
            provider: provider.to_owned(),
            scope: scope.map(str::to_owned),
            incident: format!("{:016x}", facts.incident),
            first_failure_unix_ms: ms(wall.saturating_sub(ago(first))),
            last_failure_unix_ms: ms(wall.saturating_sub(ago(trouble.last))),
            failing_for,
            failures: count(facts.failures),
            calls: count(facts.calls),
            samples,
            open_until_unix_ms: ms(wall.saturating_add(open_for)),
            open_for,
            refused: facts.refused,
            shed_per_second: (!failing_for.is_zero() && between > 0.0)
                .then(|| between / failing_for.as_secs_f64()),
        }
    }

    pub(crate) fn tell(&self) {
        tracing::warn!(
            target: "tower_herd",
            kind = self.kind.as_str(),
            provider = self.provider,
            scope = self.scope,
            incident = self.incident,
            failures = self.failures,
            calls = self.calls,
            failing_ms = u64::try_from(self.failing_for.as_millis()).unwrap_or(u64::MAX),
            open_ms = u64::try_from(self.open_for.as_millis()).unwrap_or(u64::MAX),
            shed_per_second = self.shed_per_second,
            "alert"
        );
    }
}

/// The name of a failure in a sample.
pub(crate) const fn name(kind: Kind) -> &'static str {
    kind.as_str()
}
