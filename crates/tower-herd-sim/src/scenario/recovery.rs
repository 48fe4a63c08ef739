//! What an outage and its end looked like from the provider.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::log::What;
use super::run::{Run, RungRun};
use crate::provider::{CallRecord, Outcome, peak};
use crate::report::Row;

/// A ramp as it is published: a twentieth of the tasks, doubling every 5 s.
const FIRST: f64 = 0.05;
const STEP: Duration = Duration::from_secs(5);
/// Goodput is counted over so long at a time, and looked at so often: at 100 tasks a second the latencies
/// of calls alone move a shorter window by more than the 5 percent in question.
const WINDOW: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(250);
/// What is reached must last so long: a rung that comes back for a moment has not come back.
const HOLD: Duration = Duration::from_secs(10);
/// From then on, calls in an outage are probes: whoever reacts has reacted.
const SETTLED: Duration = Duration::from_secs(10);

/// The figures of one outage. Times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// Calls at the rung while it was down.
    pub outage_calls: u64,
    /// The same over the tasks that started meanwhile.
    pub outage_share: Option<f64>,
    /// Calls while it was down, but for the first 10 s.
    pub probes: u64,
    /// Most of them in flight at one time.
    pub probes_in_flight: u64,
    /// Most of them in any 100 ms.
    pub probes_100ms: u64,
    /// From the rung's return to the end of the first call that it served.
    pub first_good: Option<f64>,
    /// From there until half as many tasks are done in 5 s as the oracle does, for 10 s on end.
    pub t50: Option<f64>,
    /// The same at 95 percent.
    pub t95: Option<f64>,
    /// Breakers that opened again between the return and the end of the run.
    pub second_trips: u64,
    /// By how much, at the worst, the share of tasks that had got through was ahead of the ramp: of all
    /// those that asked since the first good call, whether they got through, wait or gave up.
    pub ahead: f64,
    /// By how many calls, at the worst, the arrivals of a second were more than the ramp's share of
    /// the tasks that started in it. Tasks that waited for their turn come on top of that share.
    pub over_ramp: f64,
}

/// The share of tasks that a ramp lets through so long after the first good probe.
pub fn ramp(since: Duration) -> f64 {
    (FIRST * 2f64.powf(since.as_secs_f64() / STEP.as_secs_f64())).min(1.0)
}

impl Run {
    /// The rung of the outage.
    pub fn faulty_rung(&self) -> Option<&RungRun> {
        self.rungs.get(self.settings.fault_rung.max(1) - 1)
    }

    /// When the first call that arrived after the outage was served.
    pub fn first_good(&self) -> Option<Duration> {
        let (_, to) = self.settings.outage_at()?;
        let back = |r: &&CallRecord| r.arrival >= to && r.outcome == Outcome::Served;
        self.faulty_rung()?.records.iter().filter(back).filter_map(|r| r.ended).min()
    }

    /// Instants at which tasks were done, sorted.
    pub fn completions(&self) -> Vec<Duration> {
        self.tasks.iter().filter(|t| t.lost.is_none()).map(|t| t.ended).collect()
    }

    /// How the outage went, beside the oracle's run; none without an outage.
    pub fn recovery(&self, oracle: &Run) -> Option<Recovery> {
        let (from, to) = self.settings.outage_at()?;
        let rung = self.faulty_rung()?;
        let down = |r: &&CallRecord| (from..to).contains(&r.arrival);
        let probes: Vec<&CallRecord> =
            rung.records.iter().filter(down).filter(|r| r.arrival >= from + SETTLED).collect();
        let arrivals: Vec<Duration> = probes.iter().map(|r| r.arrival).collect();
        let outage_calls = rung.records.iter().filter(down).count() as u64;
        let demand = self.tasks.iter().filter(|t| (from..to).contains(&t.started)).count() as u64;
        let first_good = self.first_good();
        let end = self.settings.duration;
        let since = |share: f64| {
            let good = first_good?;
            reached(&self.completions(), &oracle.completions(), share, good, end)
        };
        let seconds = |d: Duration| Row::round(d.as_secs_f64());
        Some(Recovery {
            outage_calls,
            outage_share: (demand > 0).then(|| Row::round(outage_calls as f64 / demand as f64)),
            probes: probes.len() as u64,
            probes_in_flight: most_at_once(&probes),
            probes_100ms: peak(&arrivals, Duration::from_millis(100)),
            first_good: first_good.map(|at| seconds(at.saturating_sub(to))),
            t50: since(0.5).map(seconds),
            t95: since(0.95).map(seconds),
            second_trips: self
                .events
                .iter()
                .filter(|e| e.what == What::Opened && first_good.is_some_and(|at| e.at >= at))
                .count() as u64,
            ahead: first_good.map_or(0.0, |at| Row::round(self.ahead(at))),
            over_ramp: first_good.map_or(0.0, |at| Row::round(self.over_ramp(rung, at))),
        })
    }

    /// Of the tasks that asked from `good` to `at`, how many there are, and how many called the rung.
    pub fn readmitted(&self, good: Duration, at: Duration) -> (usize, usize) {
        let asked = self.tasks.iter().filter(|t| t.ended >= good && t.started < at).count();
        let Some(rung) = self.faulty_rung() else { return (asked, 0) };
        let since = rung.records.iter().filter(|r| (good..at).contains(&r.arrival));
        let called: BTreeSet<u64> = since.filter_map(|r| r.task).collect();
        (asked, called.len())
    }

    /// The worst lead of the share that got through over the ramp.
    fn ahead(&self, good: Duration) -> f64 {
        let seconds = (1u32..).map(|n| Duration::from_secs(1) * n);
        let ramping = seconds.take_while(|since| ramp(*since) < 1.0);
        let lead = ramping.map(|since| {
            let (asked, called) = self.readmitted(good, good + since);
            called as f64 / asked.max(1) as f64 - ramp(since)
        });
        lead.fold(0.0, f64::max)
    }

    /// The worst second of the ramp: arrivals less the share of the tasks that started in it.
    fn over_ramp(&self, rung: &RungRun, good: Duration) -> f64 {
        let arrivals: Vec<Duration> = rung.records.iter().map(|r| r.arrival).collect();
        let mut starts: Vec<Duration> = self.tasks.iter().map(|t| t.started).collect();
        starts.sort_unstable();
        let second = Duration::from_secs(1);
        let mut worst = 0.0f64;
        let mut at = good + second;
        // The second before `at`, against the share at its end.
        while ramp(at.saturating_sub(good)) < 1.0 {
            let from = at.saturating_sub(second);
            let share = ramp(at.saturating_sub(good)) * within(&starts, from, at) as f64;
            worst = worst.max(within(&arrivals, from, at) as f64 - share);
            at += Duration::from_millis(50);
        }
        worst
    }
}

/// How many of the sorted instants lie in `[from, to)`.
pub(crate) fn within(sorted: &[Duration], from: Duration, to: Duration) -> usize {
    sorted.partition_point(|t| *t < to).saturating_sub(sorted.partition_point(|t| *t < from))
}

/// From `start`, the time until `ours` keep up this share of `best`: in every window that begins within
/// the next 10 s and ends before `end`.
fn reached(
    ours: &[Duration],
    best: &[Duration],
    share: f64,
    start: Duration,
    end: Duration,
) -> Option<Duration> {
    let (mut at, mut since) = (start, None);
    while at + WINDOW <= end {
        let (done, most) = (within(ours, at, at + WINDOW), within(best, at, at + WINDOW));
        since = if (done as f64) < share * most as f64 { None } else { since.or(Some(at)) };
        if since.is_some_and(|since| at >= since + HOLD) {
            break;
        }
        at += LOOK;
    }
    since.map(|since| since.saturating_sub(start))
}

fn most_at_once(calls: &[&CallRecord]) -> u64 {
    let mut steps: Vec<(Duration, i64)> = Vec::new();
    for call in calls {
        steps.push((call.arrival, 1));
        steps.extend(call.ended.map(|at| (at, -1)));
    }
    steps.sort_unstable();
    let (mut level, mut most) = (0, 0);
    for (_, by) in steps {
        level += by;
        most = most.max(level);
    }
    u64::try_from(most).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every(ms: u64, from: u64, to: u64) -> Vec<Duration> {
        (from..to).step_by(ms as usize).map(Duration::from_millis).collect()
    }

    #[test]
    fn the_ramp_doubles_and_ends() {
        let at = |ms| ramp(Duration::from_millis(ms));
        assert_eq!((at(0), at(5000), at(10_000), at(20_000)), (0.05, 0.1, 0.2, 0.8));
        assert!(at(21_500) < 1.0);
        assert_eq!((at(21_700), at(1_000_000_000)), (1.0, 1.0));
    }

    #[test]
    fn goodput_counts_from_when_on_it_lasts() {
        let best = every(10, 0, 60_000);
        let (start, end) = (Duration::from_secs(10), Duration::from_secs(60));
        let took = |ours: &[Duration]| reached(ours, &best, 0.95, start, end);
        assert_eq!(took(&best), Some(Duration::ZERO));
        assert_eq!(took(&[]), None);
        // Back at 20 s: the window that begins a quarter of a second earlier is full to 95 percent.
        let mut late = every(10, 20_000, 60_000);
        assert_eq!(took(&late), Some(Duration::from_millis(9750)));
        // A dip soon afterwards undoes it, a later one does not.
        let dip = |late: &mut Vec<Duration>, at: u128| {
            late.retain(|t| !(at..at + 1000).contains(&t.as_millis()));
        };
        dip(&mut late, 50_000);
        assert_eq!(took(&late), Some(Duration::from_millis(9750)));
        dip(&mut late, 25_000);
        let again = took(&late).unwrap();
        assert!((Duration::from_millis(15_500)..=Duration::from_secs(16)).contains(&again), "{again:?}");
    }

    #[test]
    fn calls_at_once_count_ends_before_beginnings() {
        let call = |from, to| CallRecord {
            arrival: Duration::from_millis(from),
            task: None,
            process: 0,
            outcome: Outcome::Unreachable,
            ended: Some(Duration::from_millis(to)),
            early: false,
            probe: false,
        };
        let calls = [call(0, 5), call(5, 10), call(7, 9)];
        assert_eq!(most_at_once(&calls.iter().collect::<Vec<_>>()), 2);
    }
}
