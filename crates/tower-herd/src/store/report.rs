use crate::PauseReason;
use std::{fmt, str::FromStr};

/// One life of a process, to a store: random, never a host name or a process id, which are used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId(pub u128);

/// One life of a store's book: random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

macro_rules! hexadecimal {
    ($name:ident, $number:ty, $digits:literal) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{:0", $digits, "x}"), self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
        impl FromStr for $name {
            type Err = std::num::ParseIntError;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                <$number>::from_str_radix(text, 16).map($name)
            }
        }
        // As text: 64 bits do not fit into the numbers of JSON and Lua.
        #[cfg(feature = "serde")]
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'_, str> as serde::Deserialize>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
hexadecimal!(HolderId, u128, "32");
hexadecimal!(Epoch, u64, "16");

/// What a process tells a store about one provider.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Report {
    /// Who.
    pub holder: HolderId,
    /// For people who look at the store: a host or pod name. Decides nothing.
    pub label: String,
    /// The number of this report. A store that has seen this or a later one of the holder changes nothing.
    pub seq: u64,
    /// The life of the book that the holder knows; none: it never had an answer.
    pub epoch: Option<Epoch>,
    /// The version of the newest grant that the holder knows of that epoch.
    pub version: u64,
    /// The most calls that may be in flight from here until the next report: the larger of what it holds and
    /// what is in flight.
    pub held: u32,
    /// Calls in flight.
    pub busy: u32,
    /// Calls in flight and in the queue.
    pub need: u32,
    /// The most that `need` was lately, and one: what it can use of slots that nobody needs.
    pub headroom: u32,
    /// Its part of a ceiling that is too small for all. At least 1.
    pub weight: u32,
    /// The name of the next life of the book, should this report begin one: random.
    pub offer: Epoch,
    /// How it shares.
    pub terms: Terms,
    /// What limits it was configured with.
    pub limits: Limits,
    /// Good replies since the last report that was taken in.
    pub served: u32,
    /// What happened since the last report that was taken in, oldest first.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub news: Vec<News>,
    /// What it needs of each limited rate, and gives back.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub rates: Vec<RateReport>,
    /// It leaves, with nothing in flight: what it holds is free at once.
    pub bye: bool,
}

/// How long things last, and what happens when a holder is not heard of. All times in milliseconds.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Terms {
    /// A holder that was not heard of for so long has nothing any more. Default 10 000.
    pub ttl: u64,
    /// The longest time for which the store may have heard of nobody at all, or its clock may have jumped:
    /// beyond it nobody is given more until each holder has reported. Default 3000.
    pub gap: u64,
    /// Added to `ttl` before slots are given to others, and to the time of learning: the longest time of a
    /// call, so that calls of a holder that was stopped are over by then (strict). Default 0.
    pub extra: u64,
    /// Of its equal share of the ceiling, the part that a holder keeps while the store is lost to it, where the
    /// ceiling is at least twice the members. 0: none. Default 0.5.
    pub keep: f64,
    /// For so long after `ttl`. Default 600 000.
    pub grace: u64,
    /// Slots that are given out while the store is new and does not know who else there is. Default 0.
    pub trickle: u32,
}

/// What a process knows of the provider's limits, by configuration.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Limits {
    /// The highest generation of all members counts; of several with that one, the lowest limits.
    pub generation: u64,
    /// The ceiling never falls below it.
    pub floor: u32,
    /// Where an unknown ceiling starts.
    pub start: u32,
    /// The most calls in flight; none: learned.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub ceiling: Option<u32>,
    /// Requests a minute.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub requests: Option<RateLimit>,
    /// Tokens a minute.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub tokens: Option<RateLimit>,
}

/// A limited rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RateLimit {
    /// So many a minute.
    pub per_minute: u64,
    /// The most at once.
    pub burst: u64,
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Quantity {
    /// Calls.
    Requests,
    /// Tokens of a model.
    Tokens,
}

/// What a process needs of one rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RateReport {
    /// Of what.
    pub of: Quantity,
    /// What it can use until its next report: what waits, what it owes, and what it spends in that time.
    pub want: u64,
    /// What the first of those who wait costs: less is of no use to it. 0: nobody waits.
    pub least: u64,
    /// The chunk that it gives the rest of back; 0: none.
    pub chunk: u64,
    /// So much of it. Taken once, and only while the chunk is valid.
    pub rest: u64,
}

/// Something that happened, and that the others have to know.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(tag = "what", rename_all = "snake_case")
)]
pub enum News {
    /// Calls were refused for flow control (a 429). One cut for all that were admitted under one generation.
    Throttled {
        /// The generation of the ceiling that they were admitted under.
        generation: u64,
        /// How many calls.
        calls: u32,
        /// The pause that this costs: what the provider said, or the wait after a bare 429.
        wait: u64,
    },
    /// The provider is overloaded: one cut by a quarter.
    Overloaded {
        /// The generation of the ceiling that the call was admitted under.
        generation: u64,
        /// The pause that this costs; 0: none.
        wait: u64,
    },
    /// Nobody calls for so long. Merged by maximum.
    Paused {
        /// The paused scope; none: all of the provider.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// What is left of the wait when this is sent.
        wait: u64,
        /// Why.
        #[cfg_attr(feature = "serde", serde(with = "reason"))]
        reason: PauseReason,
    },
    /// The pause is over: a call that was sent after it began was answered well, or an operator said so.
    Cleared {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// The pause that is meant, by [`ScopeGrant::generation`](super::ScopeGrant); another one stays.
        generation: u64,
    },
    /// Its breaker opened here.
    Opened {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// For so long at most.
        wait: u64,
        /// The time between two probes: at first,
        first: u64,
        /// and at most.
        last: u64,
    },
    /// Somebody here could send the probe of a long pause or of an open breaker.
    Probe {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// A probe that takes longer is given up.
        timeout: u64,
    },
    /// The probe that was allowed here is over, and the pause or breaker is not.
    Probed {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// It was answered, badly: the next waits longer. Else it told nothing.
        failed: bool,
    },
    /// Its breaker closed here.
    Closed {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// The opening that is meant, by [`ScopeGrant::generation`](super::ScopeGrant); 0: any (an operator).
        generation: u64,
    },
    /// Calls while a ramp runs.
    Ramped {
        /// The scope.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        scope: Option<String>,
        /// Sent since the last such news.
        calls: u64,
        /// Of which throttled.
        throttled: u64,
    },
    /// What a reply said is left of a rate. It can only lower the bucket.
    Quota {
        /// Of what.
        of: Quantity,
        /// Whole units left when the reply was made.
        left: u64,
    },
}

#[cfg(feature = "serde")]
pub(super) mod reason {
    use crate::PauseReason;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(reason: &PauseReason, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(reason.as_str())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PauseReason, D::Error> {
        let name = std::borrow::Cow::<'_, str>::deserialize(from)?;
        Ok(PauseReason::named(&name))
    }
}

impl Default for Terms {
    fn default() -> Self {
        Terms { ttl: 10_000, gap: 3000, extra: 0, keep: 0.5, grace: 600_000, trickle: 0 }
    }
}

impl Terms {
    /// How long nobody is given more after the book was lost.
    #[must_use]
    pub fn learning(&self) -> u64 {
        self.ttl.saturating_add(self.extra)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits { generation: 0, floor: 1, start: 10, ceiling: None, requests: None, tokens: None }
    }
}

impl Report {
    /// A first report of a process that holds nothing.
    #[must_use]
    pub fn new(holder: HolderId, offer: Epoch) -> Self {
        Report {
            holder,
            label: String::new(),
            seq: 1,
            epoch: None,
            version: 0,
            held: 0,
            busy: 0,
            need: 0,
            headroom: 1,
            weight: 1,
            offer,
            terms: Terms::default(),
            limits: Limits::default(),
            served: 0,
            news: Vec::new(),
            rates: Vec::new(),
            bye: false,
        }
    }
}
