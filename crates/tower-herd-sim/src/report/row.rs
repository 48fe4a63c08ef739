//! The row of figures.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::scenario::{FleetFigures, Recovery};

/// The figures of one policy in one scenario. Keys are fixed; what could not be counted is `null`,
/// and what a scenario has not is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The scenario.
    pub scenario: String,
    /// The policy.
    pub policy: String,
    /// Tasks in all.
    pub tasks: u64,
    /// Tasks that ended with a good reply.
    pub done: u64,
    /// Tasks that did not.
    pub lost: u64,
    /// Calls that arrived at the providers.
    pub wire_calls: Option<u64>,
    /// Tasks that made a call: the others were refused before they had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub called: Option<u64>,
    /// Calls for each task that made one.
    pub amplification: Option<f64>,
    /// 429s.
    pub throttled: Option<u64>,
    /// When the last task was over.
    pub seconds: f64,
    /// The same for the oracle, with the same settings and seed.
    pub oracle_seconds: Option<f64>,
    /// Calls before an instant that their process had been told.
    pub early_calls: Option<u64>,
    /// Executions of a task beyond its first.
    pub duplicates: Option<u64>,
    /// Alerts raised.
    pub alerts: u64,
    /// Most arrivals in any 100 ms, by rung.
    pub peak_100ms: Option<BTreeMap<String, u64>>,
    /// Most calls served at the same time, by rung.
    pub in_flight_peak: Option<BTreeMap<String, u64>>,
    /// The longest time from the start of a task to its good end.
    #[serde(default)]
    pub longest_wait: Option<f64>,
    /// The same for the oracle.
    #[serde(default)]
    pub oracle_longest_wait: Option<f64>,
    /// Times that a breaker opened, as the policy says.
    #[serde(default)]
    pub trips: u64,
    /// The longest time until an agent beside a greedy one had its first task done; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_wait: Option<f64>,
    /// The longest time from a common start of all jobs to the end of the last; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<f64>,
    /// The same for the oracle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oracle_drain: Option<f64>,
    /// How an outage went; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// Of a fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetFigures>,
}

impl Row {
    /// A ratio rounded to three places; `None` when there is nothing to divide by.
    pub fn ratio(of: u64, by: u64) -> Option<f64> {
        (by > 0).then(|| Self::round(of as f64 / by as f64))
    }

    /// Rounds to three places, which is what the clock of a simulation resolves.
    pub fn round(x: f64) -> f64 {
        (x * 1000.0).round() / 1000.0
    }

    /// Time over the oracle's time; `None` where tasks were lost, since who gives up early is not fast.
    pub fn against_oracle(&self) -> Option<f64> {
        self.oracle_seconds.filter(|o| *o > 0.0 && self.lost == 0).map(|o| self.seconds / o)
    }

    /// One line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_fixed_and_in_order() {
        let row = Row {
            scenario: "stampede".into(),
            policy: "naive".into(),
            tasks: 3,
            done: 2,
            lost: 1,
            wire_calls: None,
            called: None,
            amplification: Row::ratio(7, 3),
            throttled: Some(4),
            seconds: 1.5,
            oracle_seconds: None,
            early_calls: Some(0),
            duplicates: Some(0),
            alerts: 0,
            peak_100ms: Some(BTreeMap::from([("1".into(), 3)])),
            in_flight_peak: None,
            longest_wait: Some(2.5),
            oracle_longest_wait: None,
            trips: 0,
            first_wait: None,
            drain: None,
            oracle_drain: None,
            recovery: None,
            fleet: None,
        };
        assert_eq!(
            row.json(),
            "{\"scenario\":\"stampede\",\"policy\":\"naive\",\"tasks\":3,\"done\":2,\"lost\":1,\
             \"wire_calls\":null,\"amplification\":2.333,\"throttled\":4,\"seconds\":1.5,\
             \"oracle_seconds\":null,\"early_calls\":0,\"duplicates\":0,\"alerts\":0,\
             \"peak_100ms\":{\"1\":3},\"in_flight_peak\":null,\"longest_wait\":2.5,\
             \"oracle_longest_wait\":null,\"trips\":0}"
        );
        assert_eq!(serde_json::from_str::<Row>(&row.json()).unwrap(), row);
        assert_eq!(Row::ratio(1, 0), None);
    }
}
