//! A herd as plain data.

use super::{
    Concern, Herd, HerdError, HerdHandle, Ladder, RungSettings,
    builder::{One, Parts},
};
use crate::{
    Criticality, Fleet, Mode, Provider, ProviderSettings, RatioBudget, Safety, failover::Rung,
    retry::RetryConfig,
};
use std::{collections::HashSet, time::Duration};

/// Everything that a [`Herd`] goes by, as plain data: for configuration files (feature `serde`), in which
/// durations are text (`"30s"`, `"1m 30s"`) and what is left out has its default.
///
/// ```
/// use tower_herd::{Fleet, Herd, herd::HerdConfig};
///
/// # #[cfg(feature = "serde")] {
/// let config: HerdConfig = serde_json::from_str(r#"{
///     "deadline": "2m",
///     "default_safety": "costly",
///     "attempt": { "headers": "45s" },
///     "modes": { "breaker": "observe" },
///     "rungs": [
///         { "provider": "own-gpu", "limits": { "ceiling": 20 } },
///         { "provider": "vendor", "tier": 1, "paid": true, "limits": { "tokens_per_minute": 400000 } }
///     ]
/// }"#)?;
/// let fleet = Fleet::local();
/// let herd = Herd::<_, _>::ladder_from(&fleet, &config, |rung, mut request: http::Request<String>| {
///     // The address and the key of each rung are for the program to know.
///     let url = if rung == "own-gpu" { "http://gpu.internal/v1/chat" } else { "http://vendor.example/v1/chat" };
///     *request.uri_mut() = http::Uri::from_static(url);
///     request
/// })?;
/// // Later, when the file has changed:
/// herd.handle().reload(&config)?;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct HerdConfig {
    /// How long a task may take in all. Default 60 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub deadline: Duration,
    /// How many wire calls of a task may fail, at least 1. Default 3.
    pub allowance: u32,
    /// Whom its tasks make wait. Default interactive.
    pub criticality: Criticality,
    /// What requests may suffer that say nothing about it. Default: unkeyed writes are sent once.
    pub default_safety: Option<Safety>,
    /// Its retries. `attempts` and `deadline` are those above where they are smaller.
    pub retry: RetryConfig,
    /// Its own retry budget.
    pub retry_budget: RetryBudget,
    /// The timeouts of an attempt.
    pub attempt: AttemptTimes,
    /// How many bytes of a success are looked into, for an error inside; 0, the default: none.
    pub read_success: u32,
    /// How long a task waits for a slot in one tier before it also queues at the next. Default 500 ms.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub slot_patience: Duration,
    /// Up to which wait a pause is sat out instead of left for the next tier. Default 2 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub hint_patience: Duration,
    /// How each concern is switched. Default: all enforce.
    pub modes: Modes,
    /// Its rungs, at least one.
    pub rungs: Vec<RungConfig>,
}

impl Default for HerdConfig {
    fn default() -> Self {
        let retry = RetryConfig::default();
        HerdConfig {
            deadline: retry.deadline,
            allowance: retry.attempts,
            criticality: Criticality::default(),
            default_safety: None,
            retry,
            retry_budget: RetryBudget::default(),
            attempt: AttemptTimes::default(),
            read_success: 0,
            slot_patience: Duration::from_millis(500),
            hint_patience: Duration::from_secs(2),
            modes: Modes::default(),
            rungs: Vec::new(),
        }
    }
}

/// The retry budget of a herd: [`RatioBudget`] as plain data.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct RetryBudget {
    /// Repetitions for each original request, 0 to 1. Default 0.1.
    pub ratio: f64,
    /// Over how long. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub window: Duration,
    /// A reserve for quiet times, in calls. Default 3.
    pub reserve: u32,
    /// One call of the reserve comes back in this time. Default 10 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub refill: Duration,
    /// The most repetitions in any minute. Default: no such ceiling.
    pub per_minute: Option<u32>,
}

impl Default for RetryBudget {
    fn default() -> Self {
        RetryBudget {
            ratio: 0.1,
            window: Duration::from_secs(30),
            reserve: 3,
            refill: Duration::from_secs(10),
            per_minute: None,
        }
    }
}

/// The timeouts of an attempt.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct AttemptTimes {
    /// To the head of the reply. Default 30 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub headers: Duration,
    /// Between two pieces of its body. Default 60 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub idle: Duration,
}

impl Default for AttemptTimes {
    fn default() -> Self {
        AttemptTimes { headers: Duration::from_secs(30), idle: Duration::from_secs(60) }
    }
}

/// How each concern is switched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is the concern of its name")]
pub struct Modes {
    pub retry: Mode,
    pub failover: Mode,
    pub readmission: Mode,
    pub spend: Mode,
    pub breaker: Mode,
    pub budget: Mode,
    pub pause: Mode,
    pub tokens: Mode,
    pub limit: Mode,
    pub attempts: Mode,
    pub sensor: Mode,
    pub timeout: Mode,
}

impl Modes {
    /// How this concern is switched.
    #[must_use]
    pub fn of(&self, concern: Concern) -> Mode {
        match concern {
            Concern::Retry => self.retry,
            Concern::Failover => self.failover,
            Concern::Readmission => self.readmission,
            Concern::Spend => self.spend,
            Concern::Breaker => self.breaker,
            Concern::Budget => self.budget,
            Concern::Pause => self.pause,
            Concern::Tokens => self.tokens,
            Concern::Limit => self.limit,
            Concern::Attempts => self.attempts,
            Concern::Sensor => self.sensor,
            Concern::Timeout => self.timeout,
        }
    }
}

/// One rung.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct RungConfig {
    /// The name of its provider. Several keys or accounts of one provider are providers of their own here,
    /// rungs of one tier.
    pub provider: String,
    /// A scope of it, if the rung is about one.
    pub scope: Option<String>,
    /// Its tier: lower ones are asked first. Default 0.
    pub tier: u32,
    /// Its share of the tier's tasks. Default 1.
    pub weight: f64,
    /// It costs money: an empty answer from it ends the chain.
    pub paid: bool,
    /// The idempotency domain that it shares with others, if it does.
    pub domain: Option<String>,
    /// What its provider allows.
    pub limits: ProviderSettings,
    /// When its breaker opens, how it comes back, what it costs.
    pub settings: RungSettings,
}

impl Default for RungConfig {
    fn default() -> Self {
        RungConfig {
            provider: String::new(),
            scope: None,
            tier: 0,
            weight: 1.0,
            paid: false,
            domain: None,
            limits: ProviderSettings::default(),
            settings: RungSettings::default(),
        }
    }
}

impl RungConfig {
    fn provider(&self, fleet: &Fleet) -> Provider {
        let provider = fleet.provider(&self.provider);
        match &self.scope {
            Some(scope) => provider.scope(scope),
            None => provider,
        }
    }
}

impl HerdConfig {
    /// One rung in front of this provider.
    #[must_use]
    pub fn new(provider: &str) -> Self {
        let rung = RungConfig { provider: provider.into(), ..RungConfig::default() };
        HerdConfig { rungs: vec![rung], ..HerdConfig::default() }
    }

    /// Looks at every field, without a fleet: what cannot be, by its path from the top.
    ///
    /// # Errors
    ///
    /// The first field that cannot be, and why.
    pub fn validate(&self) -> Result<(), HerdError> {
        let wrong =
            |field: &str, why: &str| Err(HerdError::Field { field: field.to_owned(), why: why.to_owned() });
        self.retry.validate()?;
        if self.deadline.is_zero() {
            return wrong("deadline", "must be above zero, or nothing could ever be sent");
        }
        if self.allowance == 0 {
            return wrong("allowance", "must be at least 1, or nothing could ever be sent");
        }
        if self.attempt.headers.is_zero() {
            return wrong("attempt.headers", "must be above zero");
        }
        if self.attempt.idle.is_zero() {
            return wrong("attempt.idle", "must be above zero");
        }
        // Written so that what is not a number fails too.
        if !(self.retry_budget.ratio >= 0.0 && self.retry_budget.ratio <= 1.0) {
            return wrong("retry_budget.ratio", "must be 0 to 1");
        }
        if self.retry_budget.window < Duration::from_secs(1) {
            return wrong("retry_budget.window", "must be at least 1 s");
        }
        if self.retry_budget.refill.is_zero() {
            return wrong("retry_budget.refill", "must be above zero");
        }
        if self.rungs.is_empty() {
            return wrong("rungs", "must name at least one provider");
        }
        let mut limits: Vec<(&str, &ProviderSettings)> = Vec::new();
        let mut names = HashSet::new();
        for (i, rung) in self.rungs.iter().enumerate() {
            let at = |field: &str| format!("rungs[{i}].{field}");
            if rung.provider.is_empty() {
                return wrong(&at("provider"), "must name a provider");
            }
            if !(rung.weight > 0.0 && rung.weight.is_finite()) {
                return wrong(&at("weight"), "must be a positive number");
            }
            if !names.insert((&rung.provider, &rung.scope)) {
                return wrong(&at("provider"), "is in the ladder twice; give the second one a scope");
            }
            if let Err(error) = rung.limits.check(&rung.provider) {
                return wrong(&at(&format!("limits.{}", error.field)), error.why);
            }
            match limits.iter().find(|(name, _)| *name == rung.provider) {
                Some((_, known)) if **known != rung.limits => {
                    return wrong(&at("limits"), "differ from those of an earlier rung of this provider");
                }
                Some(_) => {}
                None => limits.push((&rung.provider, &rung.limits)),
            }
            if let Some((field, why)) = rung.settings.fault() {
                return wrong(&at(&format!("settings.{field}")), why);
            }
        }
        Ok(())
    }

    /// Gives the providers what they go by.
    fn configure(&self, fleet: &Fleet) -> Result<(), HerdError> {
        for (i, rung) in self.rungs.iter().enumerate() {
            let named = |error: crate::SettingsError| HerdError::Field {
                field: format!("rungs[{i}].settings.{}", error.field),
                why: error.why.to_owned(),
            };
            fleet.provider(&rung.provider).reconfigure(rung.limits.clone())?;
            rung.settings.apply(&rung.provider(fleet)).map_err(named)?;
        }
        Ok(())
    }

    fn retries(&self) -> RetryConfig {
        RetryConfig {
            attempts: self.retry.attempts.min(self.allowance),
            deadline: self.retry.deadline.min(self.deadline),
            ..self.retry.clone()
        }
    }

    fn budget(&self, fleet: &Fleet) -> RatioBudget {
        let RetryBudget { ratio, window, reserve, refill, per_minute } = &self.retry_budget;
        let budget = RatioBudget::new(*ratio).window(*window).reserve(*reserve, *refill);
        #[cfg(feature = "store")]
        let budget = {
            let providers: Vec<Provider> = self.rungs.iter().map(|rung| rung.provider(fleet)).collect();
            budget.for_fleet(&providers)
        };
        #[cfg(not(feature = "store"))]
        let _ = fleet;
        match per_minute {
            Some(most) => budget.per_minute(*most),
            None => budget,
        }
    }

    /// What can change while it runs.
    fn steer(&self, parts: &Parts) -> Result<(), HerdError> {
        parts.retry.reconfigure(self.retries())?;
        let shared = &parts.shared;
        shared.set_task(self.deadline, self.allowance);
        shared.set_criticality(self.criticality);
        shared.set_safety(self.default_safety);
        shared.set_times(self.attempt.headers, self.attempt.idle);
        Ok(())
    }
}

impl Herd {
    /// In front of the one provider that this configuration names.
    ///
    /// # Errors
    ///
    /// Says which field cannot be; more than one rung is one of these.
    pub fn from_config(fleet: &Fleet, config: &HerdConfig) -> Result<Herd<One>, HerdError> {
        config.validate()?;
        let [rung] = &config.rungs[..] else {
            let why = "are several: `Herd::ladder_from` says how a request goes to each";
            return Err(HerdError::Field { field: "rungs".into(), why: why.into() });
        };
        config.configure(fleet)?;
        let herd = Herd::new(&rung.provider(fleet)).settings(rung.settings.clone())?;
        let herd = herd.retry_budget(config.budget(fleet)).read_success(config.read_success as usize);
        config.steer(&herd.parts)?;
        Ok(herd.known_as(fleet, config))
    }

    /// In front of a ladder; `map(rung, request)` is what a request looks like at the rung of this name: its
    /// address, its key, its model.
    ///
    /// # Errors
    ///
    /// Says which field cannot be.
    pub fn ladder_from<Req: 'static>(
        fleet: &Fleet,
        config: &HerdConfig,
        map: impl Fn(&str, Req) -> Req + Clone + Send + Sync + 'static,
    ) -> Result<Herd<Ladder<Req>>, HerdError> {
        config.validate()?;
        config.configure(fleet)?;
        let rungs = config.rungs.iter().map(|known| {
            let (name, map) = (known.provider.clone(), map.clone());
            let rung = Rung::new(&known.provider(fleet), known.settings.clone())
                .tier(known.tier)
                .weight(known.weight)
                .map(move |request| map(&name, request));
            let rung = if known.paid { rung.paid() } else { rung };
            match &known.domain {
                Some(domain) => rung.domain(domain.as_str()),
                None => rung,
            }
        });
        let herd = Herd::ladder(rungs)?
            .slot_patience(config.slot_patience)
            .hint_patience(config.hint_patience)
            .retry_budget(config.budget(fleet))
            .read_success(config.read_success as usize);
        config.steer(&herd.parts)?;
        Ok(herd.known_as(fleet, config))
    }
}

impl HerdHandle {
    /// Goes by another configuration from now on, without losing what is known: pauses, queues, breakers and
    /// calls in flight stay, and so do learned ceilings where no other ceiling is given.
    ///
    /// All of it can change but what the services were built of: the rungs with their tiers and weights, their
    /// settings, the retry budget, patience, and how far successes are read. These make an error that says so, and
    /// then nothing has changed; build a new [`Herd`] on the same fleet, which keeps the providers' state.
    ///
    /// A concern is switched only if its mode is another one than in the configuration before: what an operator
    /// has switched since, stays.
    ///
    /// # Errors
    ///
    /// The field that cannot be, or cannot change; and a herd that was not built of a configuration.
    pub fn reload(&self, config: &HerdConfig) -> Result<(), HerdError> {
        config.validate()?;
        let mut known = self.built_of();
        let Some((fleet, before)) = known.as_mut() else {
            let why = "cannot be reloaded: it was built by setters, not of a configuration".to_owned();
            return Err(HerdError::Field { field: "this herd".into(), why });
        };
        if let Some(field) = config.fixed_differs(before) {
            let why = "cannot change while it runs; build a new herd on the same fleet".to_owned();
            return Err(HerdError::Field { field, why });
        }
        config.configure(fleet)?;
        config.steer(&self.parts)?;
        for concern in Concern::ALL {
            let mode = config.modes.of(concern);
            if mode != before.modes.of(concern) {
                self.set(concern, mode);
            }
        }
        *before = config.clone();
        Ok(())
    }
}

impl HerdConfig {
    /// The first of the fields that cannot change while it runs and does.
    fn fixed_differs(&self, before: &HerdConfig) -> Option<String> {
        let fixed = [
            ("retry_budget", self.retry_budget != before.retry_budget),
            ("read_success", self.read_success != before.read_success),
            ("slot_patience", self.slot_patience != before.slot_patience),
            ("hint_patience", self.hint_patience != before.hint_patience),
            ("rungs", self.rungs.len() != before.rungs.len()),
        ];
        if let Some((field, _)) = fixed.iter().find(|(_, differs)| *differs) {
            return Some((*field).to_owned());
        }
        for (i, (rung, old)) in self.rungs.iter().zip(&before.rungs).enumerate() {
            let fixed = [
                ("provider", rung.provider != old.provider),
                ("scope", rung.scope != old.scope),
                ("tier", rung.tier != old.tier),
                ("weight", rung.weight != old.weight),
                ("paid", rung.paid != old.paid),
                ("domain", rung.domain != old.domain),
                ("settings", rung.settings != old.settings),
            ];
            if let Some((field, _)) = fixed.iter().find(|(_, differs)| *differs) {
                return Some(format!("rungs[{i}].{field}"));
            }
        }
        None
    }
}
