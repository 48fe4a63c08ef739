//! What a provider is told to do.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::request::Parts;

use super::dialect::{HintForm, LimitHeaders};
use super::quota::Quota;

/// How the cost of a call in tokens is found.
#[derive(Clone, Default)]
pub enum Cost {
    /// From the header `x-cost` (or the [`Caller`](super::Caller) extension), else 1.
    #[default]
    Header,
    /// By a closure over the request's head.
    By(Arc<dyn Fn(&Parts) -> f64 + Send + Sync>),
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Header => "Header",
            Self::By(_) => "By(..)",
        })
    }
}

/// Something that goes wrong between two instants of the provider's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Connections are refused.
    Connect {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// Every call is answered 503 without a hint.
    Unavailable {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
    /// Admitted calls fail with this probability, after having held their place to the end (500).
    Brownout {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
        /// Between 0 and 1.
        probability: f64,
    },
    /// A call is refused with a 429 with this probability, whatever the quota says.
    Stray {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
        /// Between 0 and 1.
        probability: f64,
    },
    /// Every call of one process is refused with a 429 whatever the quota says.
    Refused {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
        /// Whose calls.
        process: u32,
    },
    /// Every call is refused with a 429 whatever the quota says.
    Closed {
        /// When it begins.
        from: Duration,
        /// When it is over.
        to: Duration,
    },
}

/// The script of one provider: plain data with consuming setters.
///
/// Instants are counted from the creation of the provider.
#[derive(Clone, Debug)]
#[must_use = "a script does nothing until a provider runs it"]
pub struct Script {
    pub(crate) name: String,
    pub(crate) quota: Quota,
    pub(crate) changes: Vec<(Duration, Quota)>,
    pub(crate) hint: Option<Duration>,
    pub(crate) hint_form: HintForm,
    pub(crate) headers: LimitHeaders,
    pub(crate) latency: Duration,
    pub(crate) spread: f64,
    pub(crate) refusal_latency: Duration,
    pub(crate) lag: Duration,
    pub(crate) body: Bytes,
    pub(crate) body_time: Duration,
    pub(crate) body_chunks: u32,
    pub(crate) faults: Vec<Fault>,
    pub(crate) aborts: bool,
    pub(crate) seed: u64,
    pub(crate) wall_start: Option<SystemTime>,
    pub(crate) cost: Cost,
    pub(crate) told_grace: Duration,
    pub(crate) enforced: bool,
}

impl Script {
    /// A provider with this quota, a latency of 1 s (0.5 to 1.5), refusals after 5 ms without hint.
    pub fn new(quota: Quota) -> Self {
        Self {
            name: "provider".into(),
            quota,
            changes: Vec::new(),
            hint: None,
            hint_form: HintForm::default(),
            headers: LimitHeaders::default(),
            latency: Duration::from_secs(1),
            spread: 0.5,
            refusal_latency: Duration::from_millis(5),
            lag: Duration::ZERO,
            body: Bytes::from_static(b"{\"object\":\"completion\"}"),
            body_time: Duration::ZERO,
            body_chunks: 4,
            faults: Vec::new(),
            aborts: false,
            seed: 0,
            wall_start: None,
            cost: Cost::default(),
            told_grace: Duration::ZERO,
            enforced: true,
        }
    }

    /// A name for reports.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Changes the quota at an instant, unannounced; calls in flight finish.
    pub fn change_at(mut self, at: Duration, quota: Quota) -> Self {
        self.changes.push((at, quota));
        self.changes.sort_by_key(|(at, _)| *at);
        self
    }

    /// The wait told with every refusal; `None` for none.
    pub fn hint(mut self, wait: Option<Duration>) -> Self {
        self.hint = wait;
        self
    }

    /// The wait told with every refusal, in seconds.
    pub fn hint_seconds(self, seconds: f64) -> Self {
        self.hint(Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)))
    }

    /// The form in which the wait is told.
    pub fn hint_form(mut self, form: HintForm) -> Self {
        self.hint_form = form;
        self
    }

    /// The family of limit headers on every reply.
    pub fn limit_headers(mut self, headers: LimitHeaders) -> Self {
        self.headers = headers;
        self
    }

    /// The mean time to the head of a served reply.
    pub fn latency(mut self, mean: Duration) -> Self {
        self.latency = mean;
        self
    }

    /// The latency is uniform in `mean * (1 - spread) ..= mean * (1 + spread)`; clamped to 0..=1.
    pub fn spread(mut self, spread: f64) -> Self {
        self.spread = spread.clamp(0.0, 1.0);
        self
    }

    /// How much later than its caller the provider sees that a call is over: uniform, this is the mean.
    pub fn lag(mut self, mean: Duration) -> Self {
        self.lag = mean;
        self
    }

    /// The time after which a refusal arrives.
    pub fn refusal_latency(mut self, latency: Duration) -> Self {
        self.refusal_latency = latency;
        self
    }

    /// The body of a served reply.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Streams the body in `chunks` pieces over `time` after the head; the call holds its place meanwhile.
    pub fn stream_body(mut self, time: Duration, chunks: u32) -> Self {
        self.body_time = time;
        self.body_chunks = chunks.max(1);
        self
    }

    /// Adds a fault.
    pub fn fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Whether a call ends when its caller hangs up. If not (the default), it runs to its natural
    /// end, holds its place until then and counts as executed.
    pub fn aborts(mut self, aborts: bool) -> Self {
        self.aborts = aborts;
        self
    }

    /// The seed of latencies and failures.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The wall clock at the provider's start, which shows in dates only. Default: the machine's.
    pub fn wall_start(mut self, at: SystemTime) -> Self {
        self.wall_start = Some(at);
        self
    }

    /// How the cost of a call is found.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// The cost of a call, by a closure over its head.
    pub fn cost_by(self, cost: impl Fn(&Parts) -> f64 + Send + Sync + 'static) -> Self {
        self.cost(Cost::By(Arc::new(cost)))
    }

    /// How long a refusal takes to reach its caller after it left here. Zero inside one process;
    /// over a real socket a few milliseconds, so that calls which crossed it are not called early.
    pub fn told_grace(mut self, grace: Duration) -> Self {
        self.told_grace = grace;
        self
    }

    /// Whether calls above the quota are refused. If not, they are served, and only counted: how far a ceiling
    /// that others keep is exceeded then shows in the most in service.
    pub fn enforced(mut self, enforced: bool) -> Self {
        self.enforced = enforced;
        self
    }

    pub(crate) fn quota_at(&self, at: Duration) -> Quota {
        self.changes.iter().rev().find(|(t, _)| *t <= at).map_or(self.quota, |(_, q)| *q)
    }
}
