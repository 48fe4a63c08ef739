//! What a fleet of processes under one ceiling looks like from the provider.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::run::Run;
use crate::provider::{CallRecord, Outcome};

/// The figures of a fleet at its first rung. Times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetFigures {
    /// The ceiling.
    pub ceiling: u64,
    /// Most calls in service at the same time, by the provider's count.
    pub in_flight_peak: u64,
    /// Slot-seconds in use over those there were, while tasks were started.
    pub used: f64,
    /// The same of the oracle, which is one central line.
    pub oracle_used: f64,
    /// Jain's index over the slot-seconds of the processes for their weight: 1 is the same for all, 1/n all for
    /// one.
    pub jain: f64,
    /// The longest time in which a process that had tasks all the time sent no call.
    pub longest_gap: f64,
    /// From the start of a task until it was called, in the median.
    pub wait_p50: f64,
    /// At 99 percent.
    pub wait_p99: f64,
    /// The oracle's.
    pub oracle_wait_p50: f64,
    /// The oracle's.
    pub oracle_wait_p99: f64,
    /// Exchanges with the store, a second and process, in the mean.
    pub exchanges: f64,
    /// Of the process that made the most.
    pub most_exchanges: f64,
}

impl Run {
    /// The figures of the scenario `fleet`, beside the oracle's run of the same settings and seed.
    pub fn fleet(&self, oracle: &Run) -> Option<FleetFigures> {
        let rung = self.rungs.first()?;
        let &(_, ceiling) = rung.ceiling.first()?;
        let length = self.settings.duration;
        let seconds = length.as_secs_f64();
        let store = self.store.clone().unwrap_or_default();
        let waits = (self.waits(), oracle.waits());
        let processes = f64::from(self.settings.processes);
        let round = |x: f64| crate::report::Row::round(x);
        Some(FleetFigures {
            ceiling: ceiling.into(),
            in_flight_peak: rung.stats.in_flight_peak,
            used: round(self.used(Duration::ZERO, length)),
            oracle_used: round(oracle.used(Duration::ZERO, length)),
            jain: round(self.jain()),
            longest_gap: round(self.longest_gap().as_secs_f64()),
            wait_p50: round(quantile(&waits.0, 0.5)),
            wait_p99: round(quantile(&waits.0, 0.99)),
            oracle_wait_p50: round(quantile(&waits.1, 0.5)),
            oracle_wait_p99: round(quantile(&waits.1, 0.99)),
            exchanges: round(store.exchanges() as f64 / seconds / processes),
            most_exchanges: round(store.most_exchanges() as f64 / seconds),
        })
    }

    /// Slot-seconds in use at the first rung over those that its ceiling has, between two instants.
    pub fn used(&self, from: Duration, to: Duration) -> f64 {
        let Some((rung, &(_, ceiling))) = self.rungs.first().and_then(|r| Some((r, r.ceiling.first()?)))
        else {
            return 0.0;
        };
        let mut area = 0.0;
        let ends = rung.in_flight.iter().skip(1).map(|(at, _)| *at).chain([Duration::MAX]);
        for (&(at, level), end) in rung.in_flight.iter().zip(ends) {
            let span = end.min(to).saturating_sub(at.max(from));
            area += level as f64 * span.as_secs_f64();
        }
        area / (f64::from(ceiling) * to.saturating_sub(from).as_secs_f64())
    }

    /// Slot-seconds that each process had at the first rung while tasks were started, served calls only.
    pub fn service(&self) -> BTreeMap<u32, f64> {
        let mut had: BTreeMap<u32, f64> =
            (0..self.settings.processes).map(|process| (process, 0.0)).collect();
        let length = self.settings.duration;
        for call in self.calls().filter(|call| call.outcome == Outcome::Served) {
            let end = call.ended.unwrap_or(call.arrival).min(length);
            *had.entry(call.process).or_default() += end.saturating_sub(call.arrival).as_secs_f64();
        }
        had
    }

    fn jain(&self) -> f64 {
        let weight = |process: &u32| f64::from(self.settings.weight(*process));
        let shares: Vec<f64> = self.service().iter().map(|(process, had)| had / weight(process)).collect();
        let sum: f64 = shares.iter().sum();
        let squares: f64 = shares.iter().map(|share| share * share).sum();
        if squares > 0.0 { sum * sum / (squares * shares.len() as f64) } else { 1.0 }
    }

    fn calls(&self) -> impl Iterator<Item = &CallRecord> {
        self.rungs.first().into_iter().flat_map(|rung| &rung.records)
    }

    fn longest_gap(&self) -> Duration {
        let length = self.settings.duration;
        let mut last: BTreeMap<u32, Duration> =
            (0..self.settings.processes).map(|process| (process, Duration::ZERO)).collect();
        let mut longest = Duration::ZERO;
        for call in self.calls().filter(|call| call.arrival <= length) {
            let before = last.entry(call.process).or_default();
            longest = longest.max(call.arrival.saturating_sub(*before));
            *before = call.arrival;
        }
        last.values().fold(longest, |longest, last| longest.max(length.saturating_sub(*last)))
    }

    /// From the start of each task that was served until that call arrived, sorted.
    pub fn waits(&self) -> Vec<Duration> {
        let served = self.calls().filter(|call| call.outcome == Outcome::Served);
        let called: BTreeMap<u64, Duration> =
            served.filter_map(|call| Some((call.task?, call.arrival))).collect();
        let wait = |task: &super::TaskResult| Some(called.get(&task.id)?.saturating_sub(task.started));
        let mut waits: Vec<_> = self.tasks.iter().filter_map(wait).collect();
        waits.sort_unstable();
        waits
    }
}

fn quantile(sorted: &[Duration], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    sorted[(last as f64 * share).round() as usize].as_secs_f64()
}
