//! The scenarios as they are published.

use std::time::Duration;

use super::settings::{LimitKind, Scenario, Settings};
use crate::provider::{HintForm, LimitHeaders};

impl Settings {
    /// The published form of a scenario.
    pub fn new(scenario: Scenario) -> Self {
        let stampede = Self {
            scenario,
            agents: 100,
            tasks: 3000,
            rate: None,
            even: false,
            duration: Duration::from_secs(60),
            every: None,
            greedy: 0,
            attempts: 3,
            stacks: 1,
            limit: LimitKind::Concurrency,
            hint: Some(Duration::from_secs(1)),
            hint_form: HintForm::Seconds,
            headers: LimitHeaders::None,
            latency: Duration::from_secs(1),
            spread: 0.5,
            refusal_latency: Duration::from_millis(5),
            lag: Duration::ZERO,
            body: Duration::ZERO,
            ceilings: vec![100, 20, 20],
            burst: 1.0,
            cut_at: Some(Duration::from_secs(5)),
            cut_to: 20,
            cut_rung: 1,
            returns: None,
            outage: None,
            outage_connect: true,
            failure: 0.0,
            stray: 0.0,
            fault_rung: 1,
            aborts: false,
            processes: 1,
            configured: false,
            deadline: Duration::from_secs(600),
            start_within: Duration::ZERO,
            closed: Duration::ZERO,
            store: false,
            store_latency: Duration::from_millis(1),
            wakes: true,
        };
        // Calls that arrive by the clock, at one provider with room for them.
        let open = Self {
            rate: Some(100.0),
            latency: Duration::from_millis(200),
            ceilings: vec![100],
            cut_at: None,
            deadline: Duration::from_secs(60),
            ..stampede.clone()
        };
        match scenario {
            Scenario::Stampede => stampede,
            Scenario::EqualHint => Self {
                agents: 1000,
                tasks: 1000,
                hint: Some(Duration::from_secs(30)),
                latency: Duration::from_millis(200),
                // Roomy enough to serve all clients at once.
                ceilings: vec![100_000],
                cut_at: None,
                start_within: Duration::from_secs(1),
                closed: Duration::from_secs(1),
                ..stampede
            },
            Scenario::Brownout => Self { failure: 0.2, duration: Duration::from_secs(600), ..open },
            Scenario::Recovery => Self {
                outage: Some((Duration::from_secs(120), Duration::from_secs(720))),
                duration: Duration::from_secs(1020),
                // A demand of 100 a second keeps 20 places busy in the mean, and hardly ever more than 40.
                ceilings: vec![40],
                // Whoever waits for an answer does not wait for the end of an outage.
                deadline: Duration::from_secs(10),
                ..open
            },
            Scenario::Amplification => {
                Self { failure: 1.0, stacks: 3, attempts: 4, ceilings: vec![1000], ..open }
            }
            Scenario::Cron => Self {
                agents: 1000,
                processes: 100,
                rate: None,
                every: Some(Duration::from_secs(60)),
                duration: Duration::from_secs(300),
                latency: Duration::from_millis(500),
                ceilings: vec![20],
                deadline: Duration::from_secs(600),
                ..open
            },
        }
    }
}
