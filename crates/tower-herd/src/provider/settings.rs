use std::{error::Error, fmt, time::Duration};

/// What a provider is known to allow, before anything was learned.
///
/// The default knows nothing: the ceiling starts at 10 and is learned from the provider's 429s.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct ProviderSettings {
    /// The most calls in flight, over the whole fleet. None (the default): learned.
    pub ceiling: Option<u32>,
    /// The ceiling is never learned below this. At least 1, the default.
    pub floor: u32,
    /// Where an unknown ceiling starts. Default 10.
    pub start: u32,
    /// Requests a minute. None (the default): no limit but what the replies' headers tell.
    pub requests_per_minute: Option<u32>,
    /// Tokens a minute, for [`TokenLimitLayer`](crate::token_limit). None (the default): no limit.
    pub tokens_per_minute: Option<u32>,
    /// The most tokens at once. None (the default): those of a minute, since that is what providers fill
    /// their buckets with (Anthropic, OpenAI), and any less would refuse long prompts that they take.
    pub token_burst: Option<u32>,
    /// The most waiters in the queue; further ones are refused. Default 10 000.
    pub queue: usize,
    /// After this long a batch waiter takes turns with the interactive ones. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "humantime_serde"))]
    pub batch_age: Duration,
    /// Where processes of a fleet were given different limits, those with the highest generation count; of
    /// several with that one, the lowest. An operator who changes limits raises it, so that processes which
    /// still have the old ones follow (sidekiq/sidekiq#4857). Default 0.
    pub generation: u64,
    /// Whether the provider stops working on a call that its caller drops. If not (the default), the
    /// slot of a dropped call stays taken for the 95th percentile of durations, 10 s at most.
    pub aborts: bool,
}

impl Default for ProviderSettings {
    fn default() -> Self {
        ProviderSettings {
            ceiling: None,
            floor: 1,
            start: 10,
            requests_per_minute: None,
            tokens_per_minute: None,
            token_burst: None,
            queue: 10_000,
            batch_age: Duration::from_secs(5),
            generation: 0,
            aborts: false,
        }
    }
}

impl ProviderSettings {
    /// Nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// The most calls in flight.
    #[must_use]
    pub fn ceiling(mut self, slots: u32) -> Self {
        self.ceiling = Some(slots);
        self
    }
    /// The ceiling is never learned below this.
    #[must_use]
    pub fn floor(mut self, slots: u32) -> Self {
        self.floor = slots;
        self
    }
    /// Where an unknown ceiling starts.
    #[must_use]
    pub fn start(mut self, slots: u32) -> Self {
        self.start = slots;
        self
    }
    /// Requests a minute.
    #[must_use]
    pub fn requests_per_minute(mut self, requests: u32) -> Self {
        self.requests_per_minute = Some(requests);
        self
    }
    /// Tokens a minute.
    #[must_use]
    pub fn tokens_per_minute(mut self, tokens: u32) -> Self {
        self.tokens_per_minute = Some(tokens);
        self
    }
    /// The most tokens at once.
    #[must_use]
    pub fn token_burst(mut self, tokens: u32) -> Self {
        self.token_burst = Some(tokens);
        self
    }
    /// The most waiters in the queue.
    #[must_use]
    pub fn queue(mut self, waiters: usize) -> Self {
        self.queue = waiters;
        self
    }
    /// After this long a batch waiter takes turns with the interactive ones.
    #[must_use]
    pub fn batch_age(mut self, age: Duration) -> Self {
        self.batch_age = age;
        self
    }
    /// Of these limits, where processes of a fleet have different ones.
    #[must_use]
    pub fn generation(mut self, generation: u64) -> Self {
        self.generation = generation;
        self
    }
    /// Whether the provider stops working on a call that its caller drops.
    #[must_use]
    pub fn aborts(mut self, aborts: bool) -> Self {
        self.aborts = aborts;
        self
    }

    pub(crate) fn check(&self, provider: &str) -> Result<(), SettingsError> {
        let wrong = |field, why| Err(SettingsError { provider: provider.into(), field, why });
        if self.floor == 0 {
            return wrong("floor", "must be at least 1, or nothing would ever be tried again");
        }
        if self.ceiling == Some(0) {
            return wrong("ceiling", "must be at least 1; to call nobody, pause the provider");
        }
        if self.ceiling.is_some_and(|ceiling| ceiling < self.floor) {
            return wrong("ceiling", "is below the floor");
        }
        // Where the ceiling is known, nothing starts from a guess.
        if self.ceiling.is_none() && self.start < self.floor {
            return wrong("start", "is below the floor");
        }
        if self.ceiling.unwrap_or(self.start).max(self.start) > crate::gate::MAX_CAP {
            return wrong("ceiling", "is larger than 2^20 - 1");
        }
        if self.requests_per_minute == Some(0) {
            return wrong("requests_per_minute", "must be at least 1; to call nobody, pause the provider");
        }
        if self.tokens_per_minute == Some(0) {
            return wrong("tokens_per_minute", "must be at least 1; to call nobody, pause the provider");
        }
        if self.token_burst == Some(0) {
            return wrong("token_burst", "must be at least 1, or no call would ever fit");
        }
        if self.token_burst.is_some() && self.tokens_per_minute.is_none() {
            return wrong("token_burst", "says nothing without tokens_per_minute");
        }
        Ok(())
    }
}

/// Settings that cannot be, or that contradict those the provider already has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SettingsError {
    /// The provider they were for.
    pub provider: String,
    /// The field at fault.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: &'static str,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "settings of provider {:?}: {} {}", self.provider, self.field, self.why)
    }
}

impl Error for SettingsError {}
