//! Every dimension of a scenario, as plain data with validation.

use std::fmt;
use std::time::Duration;

use super::happens::Happens;
use super::value::{bad, choice, flag, list, optional, real, seconds, whole};
use crate::provider::{HintForm, LimitHeaders};
use tower_herd::store::Outage;

/// The scenarios there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// A closed loop over a ladder whose first rung cuts its quota.
    Stampede,
    /// Many clients told the same wait at once.
    EqualHint,
    /// Calls at a fixed rate, of which a share fails.
    Brownout,
    /// Calls at a fixed rate over an outage and its end.
    Recovery,
    /// Stacks that retry, stacked on each other.
    Amplification,
    /// Jobs that start on the minute.
    Cron,
    /// Many processes under one ceiling.
    Fleet,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 7] = [
        Self::Stampede,
        Self::EqualHint,
        Self::Brownout,
        Self::Recovery,
        Self::Amplification,
        Self::Cron,
        Self::Fleet,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stampede => "stampede",
            Self::EqualHint => "equal-hint",
            Self::Brownout => "brownout",
            Self::Recovery => "recovery",
            Self::Amplification => "amplification",
            Self::Cron => "cron",
            Self::Fleet => "fleet",
        }
    }

    /// Finds a scenario by its name.
    pub fn parse(name: &str) -> Result<Self, SettingsError> {
        let found = Self::ALL.into_iter().find(|s| s.name() == name);
        found.ok_or_else(|| SettingsError::UnknownScenario(name.into()))
    }
}

/// What kind of quota the rungs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// So many calls at the same time.
    Concurrency,
    /// So many requests a second: the ceiling divided by the latency.
    Rate,
    /// So many tokens a second: the same at 1000 tokens a call; calls cost 500 to 1500.
    Tokens,
}

/// Mean tokens a call costs where tokens are counted.
pub const MEAN_COST: f64 = 1000.0;

/// Why settings were not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingsError {
    /// No such scenario.
    UnknownScenario(String),
    /// No such key.
    UnknownKey(String),
    /// Not of the form KEY=VALUE.
    NotAPair(String),
    /// The value cannot be read.
    BadValue {
        /// The key.
        key: String,
        /// What was given.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// The value is out of range.
    OutOfRange {
        /// The key.
        key: String,
        /// What was given.
        value: String,
        /// What would be right.
        range: String,
    },
    /// Values that do not fit together.
    Conflict(String),
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownScenario(name) => {
                let names: Vec<_> = Scenario::ALL.iter().map(|s| s.name()).collect();
                write!(f, "unknown scenario `{name}`; there are: {}", names.join(", "))
            }
            Self::UnknownKey(key) => {
                let names: Vec<_> = keys().iter().map(|(k, _)| *k).collect();
                write!(f, "unknown key `{key}`; the keys are: {}", names.join(", "))
            }
            Self::NotAPair(text) => write!(f, "`{text}` is not of the form KEY=VALUE"),
            Self::BadValue { key, value, expected } => write!(f, "{key}={value}: expected {expected}"),
            Self::OutOfRange { key, value, range } => write!(f, "{key}={value}: must be {range}"),
            Self::Conflict(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for SettingsError {}

/// The keys of [`Settings::set`], each with a line of help.
pub fn keys() -> &'static [(&'static str, &'static str)] {
    &[
        ("agents", "agents in the closed loop, clients (equal-hint), or jobs a period (cron)"),
        ("tasks", "tasks in all (equal-hint: one a client, so the same as agents); closed loop only"),
        ("rate", "none | tasks that arrive a second, whatever becomes of the others (open loop)"),
        ("arrivals", "poisson | even: how they arrive"),
        ("duration", "seconds in which tasks arrive: open loop and cron"),
        ("every", "none | seconds between two starts of every agent's job (cron)"),
        (
            "greedy",
            "of the tasks, those that the first agent starts all at once, before all others (stampede)",
        ),
        ("attempts", "calls a task may make that fail, in each stack"),
        ("stacks", "stacks of such attempts, each calling the next as a service"),
        ("limit", "concurrency | rate | tokens: what the ceilings mean"),
        ("hint", "none | seconds told with each refusal"),
        ("hint_form", "seconds | ms | date"),
        ("headers", "none | openai | anthropic | ietf | github (github: fixed windows of one second)"),
        ("latency", "mean seconds of a served call"),
        ("spread", "0..1: latency is uniform in mean x (1 -/+ spread)"),
        ("refusal_latency", "seconds until a refusal answers"),
        ("lag", "seconds by which the provider counts a call down late, in the mean (nginx does)"),
        ("body", "seconds over which the body streams after the head, its place still held"),
        ("ceilings", "one a rung, cheapest first: 100,20,20"),
        ("burst", "seconds' worth that a rate lets through at once"),
        ("cut_at", "none | instant of the cut (in the stampede it scales with latency)"),
        ("cut_to", "the ceiling after the cut"),
        ("cut_rung", "the rung that is cut, from 1"),
        ("returns", "none | instant at which the quota comes back (as cut_at)"),
        ("outage", "none | FROM..TO (as cut_at)"),
        ("outage_kind", "connect | 503"),
        ("failure", "0..1: probability that an admitted call fails; 1: the provider is dead"),
        ("brownout", "the same by another name"),
        ("stray", "0..1: probability that a call is answered 429 whatever the quota says"),
        ("fault_rung", "the rung of outage, failures and stray 429s, from 1; 0 for all"),
        ("aborts", "true | false: whether a call ends when its caller hangs up"),
        ("processes", "independent sets of handles over the same providers"),
        ("handles", "shared | separate: one process, or one for each agent"),
        ("configured", "true | false: whether policies know the published ceilings"),
        ("deadline", "seconds a task may take"),
        ("start_within", "seconds within which the agents start"),
        ("closed", "seconds from the start in which everything is refused"),
        ("store", "none | memory: whether the processes are one fleet, by a store in memory"),
        ("store_latency", "mean seconds of an exchange with the store"),
        ("wakes", "true | false: whether the store wakes processes, or is polled"),
        (
            "noise",
            "0..1: probability that a report, a grant or a wake-up is lost; reports are as often late by seconds, or doubled",
        ),
        (
            "happens",
            "none | WHAT@AT[:PROCESS][+SECONDS],...: kill stop cut deaf refuse (a process), down silent frozen flush (the store)",
        ),
        ("demand", "none | agents of each process, in turn, by which the agents are counted: 20,1"),
        ("weights", "none | weight of each process, in turn: 1,3"),
        ("outage_policy", "stop | keep:SHARE | local:CALLS: what a process does without the store"),
        (
            "longest_call",
            "none | seconds: slots of a process that was lost are given to others only then (strict)",
        ),
        (
            "enforced",
            "true | false: whether providers refuse what is above their ceilings, or serve and count it",
        ),
        (
            "case",
            "a set of these, for the fleet: turns, light, wide, faults, short, weights, greedy, pause, kill, flush, breaker",
        ),
    ]
}

/// One scenario with all its dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Which scenario.
    pub scenario: Scenario,
    /// Agents, each with one task at a time.
    pub agents: u32,
    /// Tasks in all: of a closed loop as set, of an open one as many as arrived.
    pub tasks: u64,
    /// Tasks that arrive a second, in an open loop.
    pub rate: Option<f64>,
    /// Whether they arrive at even distances (else at random ones: a Poisson process).
    pub even: bool,
    /// Time in which tasks arrive, in an open loop.
    pub duration: Duration,
    /// Time between two starts of every agent's job.
    pub every: Option<Duration>,
    /// Of the tasks, those that the first agent starts at once.
    pub greedy: u32,
    /// Calls that may fail, for each task in each stack.
    pub attempts: u32,
    /// Stacks, each calling the next.
    pub stacks: u32,
    /// What the ceilings mean.
    pub limit: LimitKind,
    /// The wait told with a refusal.
    pub hint: Option<Duration>,
    /// In which form.
    pub hint_form: HintForm,
    /// Limit headers on every reply.
    pub headers: LimitHeaders,
    /// Mean latency of a served call.
    pub latency: Duration,
    /// Spread of the latency.
    pub spread: f64,
    /// Latency of a refusal.
    pub refusal_latency: Duration,
    /// How much later than its caller a provider sees that a call is over.
    pub lag: Duration,
    /// Streaming time of the body.
    pub body: Duration,
    /// The ceilings as published, cheapest rung first; `None` in the field means unlimited.
    pub ceilings: Vec<u32>,
    /// Seconds' worth of a rate that may be used at once.
    pub burst: f64,
    /// Instant of the cut, for a latency of one second.
    pub cut_at: Option<Duration>,
    /// The ceiling after the cut.
    pub cut_to: u32,
    /// The rung that is cut, from 1.
    pub cut_rung: usize,
    /// Instant of the return, for a latency of one second.
    pub returns: Option<Duration>,
    /// An outage; in the stampede for a latency of one second.
    pub outage: Option<(Duration, Duration)>,
    /// Whether the outage refuses connections (else it answers 503).
    pub outage_connect: bool,
    /// Probability that an admitted call fails.
    pub failure: f64,
    /// Probability that a call is answered 429 for no reason.
    pub stray: f64,
    /// The rung of outage, failures and stray 429s, from 1; 0 for all.
    pub fault_rung: usize,
    /// Whether calls end when their caller hangs up.
    pub aborts: bool,
    /// Independent sets of handles.
    pub processes: u32,
    /// Whether policies know the published ceilings.
    pub configured: bool,
    /// Time a task may take.
    pub deadline: Duration,
    /// Time within which the agents start.
    pub start_within: Duration,
    /// Time from the start in which everything is refused.
    pub closed: Duration,
    /// Whether the processes share through a store.
    pub store: bool,
    /// Mean time of an exchange with it.
    pub store_latency: Duration,
    /// Whether it wakes processes.
    pub wakes: bool,
    /// Probability that a report, a grant or a wake-up is lost, that a report is late by seconds, or doubled.
    pub noise: f64,
    /// What happens to processes and to the store.
    pub happens: Vec<Happens>,
    /// Agents of each process, in turn; empty: as many in each.
    pub demand: Vec<u32>,
    /// Weight of each process, in turn; empty: the same for all.
    pub weights: Vec<u32>,
    /// What a process does without the store.
    pub outage_policy: Outage,
    /// Slots of a process that was lost are given to others only after this.
    pub longest_call: Option<Duration>,
    /// Whether providers refuse what is above their ceilings.
    pub enforced: bool,
}

impl Settings {
    /// Changes one dimension, given as `KEY=VALUE`.
    pub fn set_pair(&mut self, pair: &str) -> Result<(), SettingsError> {
        let (key, value) = pair.split_once('=').ok_or_else(|| SettingsError::NotAPair(pair.into()))?;
        self.set(key.trim(), value.trim())
    }

    /// Changes one dimension.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), SettingsError> {
        match key {
            "agents" => {
                self.agents = whole(key, value, 1, 100_000)? as u32;
                if self.scenario == Scenario::EqualHint {
                    if self.processes > 1 {
                        self.processes = self.agents;
                    }
                    self.tasks = u64::from(self.agents);
                }
            }
            "tasks" => {
                self.tasks = whole(key, value, 1, 10_000_000)?;
                if self.scenario == Scenario::EqualHint {
                    self.set("agents", value)?;
                }
            }
            "rate" => self.rate = optional(value, |v| real(key, v, 0.001, 100_000.0))?,
            "arrivals" => {
                self.even = choice(key, value, "poisson or even", &[("poisson", false), ("even", true)])?;
            }
            "duration" => self.duration = seconds(key, value, 0.001, 86_400.0)?,
            "every" => self.every = optional(value, |v| seconds(key, v, 0.001, 86_400.0))?,
            "greedy" => self.greedy = whole(key, value, 0, 1_000_000)? as u32,
            "attempts" => self.attempts = whole(key, value, 1, 1000)? as u32,
            "stacks" => self.stacks = whole(key, value, 1, 10)? as u32,
            "limit" => {
                let options = [
                    ("concurrency", LimitKind::Concurrency),
                    ("rate", LimitKind::Rate),
                    ("tokens", LimitKind::Tokens),
                ];
                self.limit = choice(key, value, "concurrency, rate or tokens", &options)?;
            }
            "hint" => self.hint = optional(value, |v| seconds(key, v, 0.0, 86_400.0))?,
            "hint_form" => {
                let options =
                    [("seconds", HintForm::Seconds), ("ms", HintForm::Millis), ("date", HintForm::Date)];
                self.hint_form = choice(key, value, "seconds, ms or date", &options)?;
            }
            "headers" => {
                let options = [
                    ("none", LimitHeaders::None),
                    ("openai", LimitHeaders::OpenAi),
                    ("anthropic", LimitHeaders::Anthropic),
                    ("ietf", LimitHeaders::Ietf),
                    ("github", LimitHeaders::GitHub),
                ];
                self.headers = choice(key, value, "none, openai, anthropic, ietf or github", &options)?;
            }
            "latency" => self.latency = seconds(key, value, 0.001, 3600.0)?,
            "spread" => self.spread = real(key, value, 0.0, 1.0)?,
            "refusal_latency" => self.refusal_latency = seconds(key, value, 0.0, 60.0)?,
            "lag" => self.lag = seconds(key, value, 0.0, 60.0)?,
            "body" => self.body = seconds(key, value, 0.0, 3600.0)?,
            "ceilings" => {
                let rungs: Result<Vec<u32>, _> =
                    value.split(',').map(|c| whole(key, c, 1, 1_000_000).map(|c| c as u32)).collect();
                self.ceilings = rungs?;
            }
            "burst" => self.burst = real(key, value, 0.0, 3600.0)?,
            "cut_at" => self.cut_at = optional(value, |v| seconds(key, v, 0.0, 86_400.0))?,
            "cut_to" => self.cut_to = whole(key, value, 0, 1_000_000)? as u32,
            "cut_rung" => self.cut_rung = whole(key, value, 1, 1000)? as usize,
            "returns" => self.returns = optional(value, |v| seconds(key, v, 0.0, 86_400.0))?,
            "outage" => {
                self.outage = optional(value, |v| {
                    let (from, to) = v.split_once("..").ok_or_else(|| bad(key, v, "FROM..TO"))?;
                    Ok((seconds(key, from, 0.0, 86_400.0)?, seconds(key, to, 0.0, 86_400.0)?))
                })?;
            }
            "outage_kind" => {
                self.outage_connect =
                    choice(key, value, "connect or 503", &[("connect", true), ("503", false)])?;
            }
            "failure" | "brownout" => self.failure = real(key, value, 0.0, 1.0)?,
            "stray" => self.stray = real(key, value, 0.0, 1.0)?,
            "fault_rung" => self.fault_rung = whole(key, value, 0, 1000)? as usize,
            "aborts" => self.aborts = flag(key, value)?,
            "processes" => {
                self.processes = whole(key, value, 1, 100_000)? as u32;
                self.count_agents();
            }
            "handles" => {
                let separate =
                    choice(key, value, "shared or separate", &[("shared", false), ("separate", true)])?;
                self.processes = if separate { self.agents } else { 1 };
            }
            "configured" => self.configured = flag(key, value)?,
            "deadline" => self.deadline = seconds(key, value, 0.001, 86_400.0)?,
            "start_within" => self.start_within = seconds(key, value, 0.0, 86_400.0)?,
            "closed" => self.closed = seconds(key, value, 0.0, 86_400.0)?,
            "store" => {
                self.store = choice(key, value, "none or memory", &[("none", false), ("memory", true)])?;
            }
            "store_latency" => self.store_latency = seconds(key, value, 0.0, 60.0)?,
            "wakes" => self.wakes = flag(key, value)?,
            "noise" => self.noise = real(key, value, 0.0, 1.0)?,
            "happens" => {
                let all = |text: &str| text.split(',').map(|one| Happens::parse(key, one)).collect();
                self.happens = optional(value, all)?.unwrap_or_default();
            }
            "demand" => {
                self.demand = list(key, value, 100_000)?;
                self.count_agents();
            }
            "weights" => self.weights = list(key, value, 1000)?,
            "outage_policy" => {
                let wrong = || bad(key, value, "stop, keep:SHARE or local:CALLS");
                self.outage_policy = match value.trim().split_once(':') {
                    None if value.trim() == "stop" => Outage::Stop,
                    Some(("keep", share)) => Outage::Keep(real(key, share, 0.0, 1.0)?),
                    Some(("local", calls)) => Outage::Local(whole(key, calls, 1, 1_000_000)? as u32),
                    _ => return Err(wrong()),
                };
            }
            "longest_call" => {
                self.longest_call = optional(value, |v| seconds(key, v, 0.0, 86_400.0))?;
            }
            "enforced" => self.enforced = flag(key, value)?,
            "case" => self.set_case(key, value)?,
            _ => return Err(SettingsError::UnknownKey(key.into())),
        }
        Ok(())
    }

    /// Checks what single values cannot tell.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let conflict = |why: String| Err(SettingsError::Conflict(why));
        let rungs = self.ceilings.len();
        if self.cut_at.is_some() && self.cut_rung > rungs {
            return conflict(format!("cut_rung={}: there are {rungs} rungs", self.cut_rung));
        }
        if self.fault_rung > rungs {
            return conflict(format!("fault_rung={}: there are {rungs} rungs", self.fault_rung));
        }
        if let Some(back) = self.returns {
            match self.cut_at {
                None => return conflict("returns needs a cut (cut_at)".into()),
                Some(cut) if back <= cut => return conflict("returns must come after cut_at".into()),
                Some(_) => {}
            }
        }
        if let Some((from, to)) = self.outage
            && from >= to
        {
            return conflict("outage: FROM must be before TO".into());
        }
        if self.rate.is_some() && self.every.is_some() {
            return conflict("every: tasks arrive either at a rate or every so often".into());
        }
        let closed = self.rate.is_none() && self.every.is_none();
        if self.greedy > 0 && (self.scenario != Scenario::Stampede || !closed) {
            return conflict("greedy needs the closed loop of the stampede".into());
        }
        if self.greedy > 0 && self.agents < 2 {
            return conflict("greedy needs a second agent".into());
        }
        if u64::from(self.greedy) > self.tasks {
            return conflict(format!("greedy={}: there are only {} tasks", self.greedy, self.tasks));
        }
        if let Some(trouble) = self.happens.iter().find(|h| h.process >= self.processes) {
            let (process, n) = (trouble.process, self.processes);
            return conflict(format!("happens: there is no process {process}, they are 0 to {}", n - 1));
        }
        if self.store && self.stacks > 1 {
            return conflict("store: stacks that call each other do not share providers (stacks)".into());
        }
        if self.processes > self.agents {
            return conflict(format!("processes={}: there are only {} agents", self.processes, self.agents));
        }
        Ok(())
    }

    /// The process in which an agent lives.
    pub fn home(&self, agent: u32) -> u32 {
        if self.demand.is_empty() {
            return agent % self.processes.max(1);
        }
        let mut before = 0;
        for process in 0..self.processes {
            before += self.demand[process as usize % self.demand.len()];
            if agent < before {
                return process;
            }
        }
        self.processes.saturating_sub(1)
    }

    /// The weight of a process.
    pub fn weight(&self, process: u32) -> u32 {
        if self.weights.is_empty() { 1 } else { self.weights[process as usize % self.weights.len()] }
    }

    fn count_agents(&mut self) {
        if !self.demand.is_empty() {
            self.agents = (0..self.processes).map(|p| self.demand[p as usize % self.demand.len()]).sum();
        }
    }

    /// An instant of the schedule: in the stampede it scales with the latency.
    pub fn scaled(&self, at: Duration) -> Duration {
        match self.scenario {
            Scenario::Stampede | Scenario::EqualHint => crate::scale(at, self.latency.as_secs_f64()),
            _ => at,
        }
    }

    /// When the outage is, if there is one.
    pub fn outage_at(&self) -> Option<(Duration, Duration)> {
        self.outage.map(|(from, to)| (self.scaled(from), self.scaled(to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_can_be_set_and_every_listed_key_exists() {
        let examples = [
            ("agents", "50"),
            ("tasks", "100"),
            ("rate", "50"),
            ("arrivals", "even"),
            ("duration", "30"),
            ("every", "5"),
            ("greedy", "10"),
            ("attempts", "5"),
            ("stacks", "2"),
            ("limit", "rate"),
            ("hint", "none"),
            ("hint_form", "date"),
            ("headers", "openai"),
            ("latency", "0.2"),
            ("spread", "0"),
            ("refusal_latency", "8ms"),
            ("lag", "2ms"),
            ("body", "1s"),
            ("ceilings", "10,5"),
            ("burst", "2"),
            ("cut_at", "3"),
            ("cut_to", "1"),
            ("cut_rung", "2"),
            ("returns", "25"),
            ("outage", "10..20"),
            ("outage_kind", "503"),
            ("brownout", "0.2"),
            ("failure", "0.2"),
            ("stray", "0.005"),
            ("fault_rung", "0"),
            ("aborts", "true"),
            ("processes", "7"),
            ("handles", "separate"),
            ("configured", "true"),
            ("deadline", "60"),
            ("start_within", "1"),
            ("closed", "1"),
            ("store", "memory"),
            ("store_latency", "5ms"),
            ("wakes", "false"),
            ("noise", "0.03"),
            ("happens", "kill@60:0,stop@90:0+15,flush@200"),
            ("demand", "20,1"),
            ("weights", "1,3"),
            ("outage_policy", "keep:0.3"),
            ("longest_call", "5"),
            ("enforced", "false"),
            ("case", "turns"),
        ];
        let listed: Vec<_> = keys().iter().map(|(k, _)| *k).collect();
        let mut shown: Vec<_> = examples.iter().map(|(k, _)| *k).collect();
        for (key, value) in examples {
            let mut s = Settings::new(Scenario::Stampede);
            s.set(key, value).unwrap();
            assert_ne!(s, Settings::new(Scenario::Stampede), "{key} changes nothing");
        }
        shown.sort_unstable();
        let mut sorted = listed.clone();
        sorted.sort_unstable();
        assert_eq!(shown, sorted);
    }

    #[test]
    fn bad_settings_say_what_would_be_right() {
        let mut s = Settings::new(Scenario::Stampede);
        let text = s.set_pair("colour=red").unwrap_err().to_string();
        assert!(text.contains("colour") && text.contains("refusal_latency"), "{text}");
        assert!(s.set_pair("agents").unwrap_err().to_string().contains("KEY=VALUE"));
        assert!(s.set_pair("agents=0").unwrap_err().to_string().contains("at least 1"));
        assert!(s.set_pair("spread=2").unwrap_err().to_string().contains("between 0 and 1"));
        assert!(s.set_pair("hint=soon").unwrap_err().to_string().contains("seconds"));
        assert!(s.set_pair("latency=NaN").is_err());
        assert!(s.set_pair("outage=5").unwrap_err().to_string().contains("FROM..TO"));
    }

    #[test]
    fn values_that_do_not_fit_together_are_refused() {
        for pairs in [
            &["returns=4"][..],
            &["cut_at=none", "returns=9"],
            &["ceilings=10", "cut_rung=2"],
            &["processes=101"],
            &["outage=9..3"],
            &["fault_rung=4"],
            &["rate=10", "every=5"],
            &["rate=10", "greedy=5"],
            &["tasks=100", "greedy=101"],
            &["agents=1", "greedy=1"],
            &["store=memory", "stacks=2"],
            &["processes=2", "happens=kill@1:2"],
        ] {
            let mut s = Settings::new(Scenario::Stampede);
            for p in pairs {
                s.set_pair(p).unwrap();
            }
            assert!(matches!(s.validate(), Err(SettingsError::Conflict(_))), "{pairs:?}");
        }
    }

    #[test]
    fn the_schedule_scales_with_latency() {
        let mut s = Settings::new(Scenario::Stampede);
        s.set("latency", "0.2").unwrap();
        assert_eq!(s.scaled(Duration::from_secs(5)), Duration::from_secs(1));
        // Where tasks arrive by the clock, so does what happens to them.
        let s = Settings::new(Scenario::Recovery);
        assert_eq!(s.outage_at(), Some((Duration::from_secs(120), Duration::from_secs(720))));
    }
}
