//! The scenarios as they are published.

use std::time::Duration;

use super::settings::{LimitKind, Scenario, Settings, SettingsError};
use super::value::bad;
use crate::provider::{HintForm, LimitHeaders};
use tower_herd::store::Outage;

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
            noise: 0.0,
            happens: Vec::new(),
            demand: Vec::new(),
            weights: Vec::new(),
            outage_policy: Outage::default(),
            longest_call: None,
            enforced: true,
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
            // Fifty processes on three slots, all of them with more tasks than they can send.
            Scenario::Fleet => Self {
                agents: 100,
                processes: 50,
                rate: None,
                tasks: 1,
                duration: Duration::from_secs(300),
                latency: Duration::from_secs(1),
                ceilings: vec![3],
                configured: true,
                store: true,
                enforced: false,
                aborts: true,
                deadline: Duration::from_secs(3600),
                ..open
            },
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

    /// Sets a published case of the fleet.
    pub(super) fn set_case(&mut self, key: &str, name: &str) -> Result<(), SettingsError> {
        let pairs: &[&str] = match name.trim() {
            // 50 processes on 3 slots, with more tasks than they can send; and at a load of 0.6.
            "turns" => &[],
            "light" => &["rate=1.8", "agents=50", "duration=600"],
            "wide" => &["processes=20", "ceilings=200", "agents=500"],
            "faults" => &[
                "processes=6",
                "ceilings=12",
                "agents=60",
                "noise=0.03",
                "duration=360",
                "happens=kill@40:0,stop@70:1+6,cut@100:2+25,deaf@150:3+25,silent@190+20,frozen@230+5,down@250+15,flush@290,flush@294",
            ],
            "short" => &["processes=10", "ceilings=20", "agents=100", "latency=0.01", "duration=60"],
            "weights" => &["processes=8", "ceilings=16", "agents=160", "weights=1,3"],
            "greedy" => &["processes=2", "ceilings=10", "demand=100,1"],
            "pause" => &[
                "processes=20",
                "ceilings=40",
                "agents=100",
                "hint=5",
                "duration=60",
                "happens=refuse@30:0+2",
            ],
            "kill" => &["processes=6", "ceilings=24", "agents=120", "duration=90", "happens=kill@30.3:2"],
            "flush" => &["processes=6", "ceilings=12", "agents=60", "duration=90", "happens=flush@30.3"],
            "breaker" => &[
                "processes=20",
                "ceilings=40",
                "rate=40",
                "agents=200",
                "deadline=10",
                "duration=240",
                "outage=60..120",
            ],
            _ => {
                let names =
                    "turns, light, wide, faults, short, weights, greedy, pause, kill, flush or breaker";
                return Err(bad(key, name, names));
            }
        };
        *self = Settings::new(Scenario::Fleet);
        pairs.iter().try_for_each(|pair| self.set_pair(pair))
    }
}
