//! The account of what a provider saw.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How a call ended, seen from the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Not over yet.
    Running,
    /// Executed to its end with a 2xx.
    Served,
    /// Refused with a 429.
    Throttled,
    /// Answered with a 5xx.
    Failed,
    /// The connection was refused.
    Unreachable,
    /// The caller hung up and the work stopped, or the refusal was never delivered.
    Aborted,
}

/// One call on the wire. Instants are counted from the provider's start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallRecord {
    /// When it arrived.
    pub arrival: Duration,
    /// The task it belongs to, if it said so.
    pub task: Option<u64>,
    /// The process it came from.
    pub process: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// When it ended.
    pub ended: Option<Duration>,
    /// It came before an instant that its process had been told.
    pub early: bool,
    /// It came during a pause of more than five minutes.
    pub probe: bool,
}

/// The figures of one provider, or of several taken together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls that arrived, refused connections included.
    pub wire_calls: u64,
    /// Calls executed to their end.
    pub served: u64,
    /// 429s.
    pub throttled: u64,
    /// 5xx.
    pub failed: u64,
    /// Refused connections.
    pub unreachable: u64,
    /// Calls that ended because their caller hung up.
    pub aborted: u64,
    /// Calls before an instant their process had been told.
    pub early_calls: u64,
    /// Calls during a pause of more than five minutes.
    pub probes: u64,
    /// Executions of a task beyond its first.
    pub duplicates: u64,
    /// Tasks that made a call.
    pub tasks: u64,
    /// Most arrivals in any 100 ms.
    pub peak_100ms: u64,
    /// Most arrivals in any second.
    pub peak_1s: u64,
    /// Most calls served at the same time.
    pub in_flight_peak: u64,
    /// Most arrivals in any 100 ms within the 2 s after the end of an announced pause.
    pub after_pause_100ms: u64,
    /// Most arrivals in any 100 ms since the first announced pause of any caller ended: how dense
    /// the crowd was when it came back.
    pub return_100ms: u64,
}

impl Stats {
    /// Adds up what several providers recorded. Peaks are the largest of any one of them; tasks and
    /// duplicates are counted over all of them, since a task served by two rungs ran twice.
    pub fn of_all<'a>(parts: impl IntoIterator<Item = (&'a Stats, &'a [CallRecord])>) -> Stats {
        let mut all = Stats::default();
        let mut runs: BTreeMap<u64, u64> = BTreeMap::new();
        let mut tasks = BTreeSet::new();
        for (s, records) in parts {
            all.wire_calls += s.wire_calls;
            all.served += s.served;
            all.throttled += s.throttled;
            all.failed += s.failed;
            all.unreachable += s.unreachable;
            all.aborted += s.aborted;
            all.early_calls += s.early_calls;
            all.probes += s.probes;
            all.peak_100ms = all.peak_100ms.max(s.peak_100ms);
            all.peak_1s = all.peak_1s.max(s.peak_1s);
            all.in_flight_peak = all.in_flight_peak.max(s.in_flight_peak);
            all.after_pause_100ms = all.after_pause_100ms.max(s.after_pause_100ms);
            all.return_100ms = all.return_100ms.max(s.return_100ms);
            count_tasks(records, &mut tasks, &mut runs);
        }
        all.tasks = tasks.len() as u64;
        all.duplicates = runs.values().map(|n| n - 1).sum();
        all
    }

    pub(crate) fn of(
        records: &[CallRecord],
        in_flight_peak: u64,
        pause_ends: &[Duration],
        first_end: Option<Duration>,
    ) -> Stats {
        let mut s = Stats { in_flight_peak, wire_calls: records.len() as u64, ..Stats::default() };
        for r in records {
            match r.outcome {
                Outcome::Running => {}
                Outcome::Served => s.served += 1,
                Outcome::Throttled => s.throttled += 1,
                Outcome::Failed => s.failed += 1,
                Outcome::Unreachable => s.unreachable += 1,
                Outcome::Aborted => s.aborted += 1,
            }
            s.early_calls += u64::from(r.early);
            s.probes += u64::from(r.probe);
        }
        let arrivals: Vec<Duration> = records.iter().map(|r| r.arrival).collect();
        s.peak_100ms = peak(&arrivals, Duration::from_millis(100));
        s.peak_1s = peak(&arrivals, Duration::from_secs(1));
        s.after_pause_100ms =
            peak_after(&arrivals, pause_ends, Duration::from_secs(2), Duration::from_millis(100));
        let back = first_end.map_or(arrivals.len(), |end| arrivals.partition_point(|t| *t < end));
        s.return_100ms = peak(&arrivals[back..], Duration::from_millis(100));
        let (mut tasks, mut runs) = (BTreeSet::new(), BTreeMap::new());
        count_tasks(records, &mut tasks, &mut runs);
        s.tasks = tasks.len() as u64;
        s.duplicates = runs.values().map(|n: &u64| n - 1).sum();
        s
    }
}

fn count_tasks(records: &[CallRecord], tasks: &mut BTreeSet<u64>, runs: &mut BTreeMap<u64, u64>) {
    for r in records {
        if let Some(task) = r.task {
            tasks.insert(task);
            if r.outcome == Outcome::Served {
                *runs.entry(task).or_default() += 1;
            }
        }
    }
}

/// Most instants in any half-open window of this length, `[t, t + window)`, for sorted instants.
pub fn peak(sorted: &[Duration], window: Duration) -> u64 {
    let (mut first, mut most) = (0, 0);
    for (last, at) in sorted.iter().enumerate() {
        while at.saturating_sub(sorted[first]) >= window && first < last {
            first += 1;
        }
        most = most.max(last - first + 1);
    }
    if window.is_zero() { 0 } else { most as u64 }
}

/// The largest [`peak`] among the instants that lie within `after` of one of the (sorted) ends.
pub fn peak_after(sorted: &[Duration], ends: &[Duration], after: Duration, window: Duration) -> u64 {
    ends.iter()
        .map(|end| {
            let from = sorted.partition_point(|t| t < end);
            let to = sorted.partition_point(|t| *t < *end + after);
            peak(&sorted[from..to], window)
        })
        .max()
        .unwrap_or(0)
}

/// Counts instants in steps of `step` from zero to the last one: a series to plot.
pub fn series(instants: impl IntoIterator<Item = Duration>, step: Duration) -> Vec<u64> {
    let mut out = Vec::new();
    let step = step.as_nanos().max(1);
    for t in instants {
        let i = usize::try_from(t.as_nanos() / step).unwrap_or(usize::MAX);
        if i > 10_000_000 {
            continue;
        }
        if out.len() <= i {
            out.resize(i + 1, 0);
        }
        out[i] += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn brute(sorted: &[Duration], window: Duration) -> u64 {
        sorted
            .iter()
            .map(|start| sorted.iter().filter(|t| *t >= start && **t < *start + window).count() as u64)
            .max()
            .unwrap_or(0)
    }

    fn instants() -> impl Strategy<Value = Vec<Duration>> {
        proptest::collection::vec(0u64..3000, 0..120).prop_map(|mut v| {
            v.sort_unstable();
            v.into_iter().map(Duration::from_millis).collect()
        })
    }

    proptest! {
        #[test]
        fn the_sliding_peak_equals_brute_force(times in instants(), window in 1u64..1500) {
            let window = Duration::from_millis(window);
            prop_assert_eq!(peak(&times, window), brute(&times, window));
        }

        #[test]
        fn the_peak_after_a_pause_equals_brute_force(
            times in instants(), mut ends in proptest::collection::vec(0u64..3000, 0..6),
        ) {
            ends.sort_unstable();
            let ends: Vec<_> = ends.into_iter().map(Duration::from_millis).collect();
            let (after, window) = (Duration::from_millis(700), Duration::from_millis(100));
            let expected = ends.iter().map(|e| {
                let inside: Vec<_> =
                    times.iter().copied().filter(|t| t >= e && *t < *e + after).collect();
                brute(&inside, window)
            }).max().unwrap_or(0);
            prop_assert_eq!(peak_after(&times, &ends, after, window), expected);
        }

        #[test]
        fn a_series_loses_nothing(times in instants(), step in 1u64..500) {
            let s = series(times.iter().copied(), Duration::from_millis(step));
            prop_assert_eq!(s.iter().sum::<u64>(), times.len() as u64);
        }
    }

    #[test]
    fn a_task_served_by_two_providers_is_a_duplicate() {
        let record = |outcome| CallRecord {
            arrival: Duration::ZERO,
            task: Some(7),
            process: 0,
            outcome,
            ended: None,
            early: false,
            probe: false,
        };
        let one = [record(Outcome::Throttled), record(Outcome::Served)];
        let two = [record(Outcome::Served)];
        let (a, b) = (Stats::of(&one, 1, &[], None), Stats::of(&two, 1, &[], None));
        assert_eq!((a.duplicates, b.duplicates), (0, 0));
        let all = Stats::of_all([(&a, &one[..]), (&b, &two[..])]);
        assert_eq!((all.duplicates, all.tasks, all.wire_calls), (1, 1, 3));
    }
}
