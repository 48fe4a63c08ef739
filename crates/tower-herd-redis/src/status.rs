//! What the store knows, for people.

use serde::Deserialize;
use tower_herd::store::{Epoch, HolderId, Quantity};

/// What the store knows of a provider. Waits and ages in milliseconds of the store's clock.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The life of the book.
    pub epoch: Epoch,
    /// The life of the server that wrote it; `none`: it does not tell.
    pub run: String,
    /// Since the last exchange of anybody.
    pub silent: u64,
    /// For so long nobody is given more, since the book is new or was silent.
    pub learning: u64,
    /// And that whatever members report, since the book was lost.
    pub hard: bool,
    /// The ceiling in force at the last exchange.
    pub ceiling: u32,
    /// The ceiling without a ramp or a probe; none: not learned yet.
    #[serde(default)]
    pub limit: Option<u32>,
    /// The most that it may be; none: not configured.
    #[serde(default)]
    pub configured: Option<u32>,
    /// Of the ceiling.
    pub generation: u64,
    /// Members were configured with different limits.
    pub disagree: bool,
    /// By holder.
    #[serde(default)]
    pub members: Vec<Member>,
    /// What is or was paused or broken.
    #[serde(default)]
    pub scopes: Vec<Scope>,
    /// The limited rates.
    #[serde(default)]
    pub rates: Vec<Rate>,
}

impl Status {
    /// Slots that are held, in the worst case.
    #[must_use]
    pub fn charge(&self) -> u64 {
        self.members.iter().map(|member| u64::from(member.charge)).sum()
    }

    /// Calls in flight, as last reported.
    #[must_use]
    pub fn busy(&self) -> u64 {
        self.members.iter().map(|member| u64::from(member.busy)).sum()
    }
}

/// One process.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Member {
    /// One life of it.
    pub holder: HolderId,
    /// Its host or pod.
    #[serde(default)]
    pub label: String,
    /// Of its last report.
    pub seq: u64,
    /// Of its last grant.
    pub version: u64,
    /// Slots that it may have in flight, in the worst case.
    pub charge: u32,
    /// Calls in flight, as last reported.
    pub busy: u32,
    /// Calls in flight and in its queue.
    pub need: u32,
    /// What it should have.
    pub target: u32,
    /// Of the charge, what it keeps for a while without a word from it.
    pub safe: u32,
    /// Its part of a ceiling that is too small for all.
    pub weight: u32,
    /// Since its last report.
    pub heard: u64,
    /// Until its slots are given to others.
    pub left: u64,
    /// It has not reported since the store was silent for too long.
    #[serde(default)]
    pub pending: bool,
    /// Its lease has run out, and it has only what is safe.
    #[serde(default)]
    pub lapsed: bool,
    /// It has said goodbye with calls in flight.
    #[serde(default)]
    pub gone: bool,
}

/// One scope, or all of the provider.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Scope {
    /// None: all of the provider.
    #[serde(default)]
    pub scope: Option<String>,
    /// Changes with its pause and its breaker.
    pub generation: u64,
    /// Nobody calls.
    #[serde(default)]
    pub pause: Option<Pause>,
    /// Its breaker is open.
    #[serde(default)]
    pub open: Option<Open>,
    /// A probe is out.
    #[serde(default)]
    pub probe: Option<Probe>,
    /// Calls while the ramp runs.
    #[serde(default)]
    pub calls: u64,
    /// Of which throttled.
    #[serde(default)]
    pub throttled: u64,
}

/// A pause.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Pause {
    /// What is left of it.
    pub wait: u64,
    /// Why, as [`PauseReason::as_str`](tower_herd::PauseReason::as_str).
    pub reason: String,
}

/// An open breaker.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Open {
    /// What is left of its open time.
    pub wait: u64,
    /// For how long it has been open.
    pub since: u64,
    /// When the next probe may go.
    pub probe: u64,
    /// Who opened it.
    #[serde(default)]
    pub by: Option<HolderId>,
}

/// A probe.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Probe {
    /// Whose.
    pub holder: HolderId,
    /// Given up after this time.
    pub within: u64,
}

/// A limited rate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Rate {
    /// Of what.
    pub of: Quantity,
    /// So many a minute.
    pub per_minute: u64,
    /// The most at once.
    pub burst: u64,
    /// What can be handed out now. Below zero where a reply said that less is left than was handed out.
    pub left: i64,
}
