//! The store of tokens, as the layer sees it.

use super::{LocalTokens, Schedule};
use std::{error::Error, fmt, future::Future, time::Duration};

/// A store of retry tokens: for each key, the instant before which nobody runs it.
///
/// Waits travel as durations, measured by the store's own clock; never as instants, which a process whose clock is
/// wrong would compare with its own (Krzysztof318/MailFathom#1989, kagkarlsson/db-scheduler#364).
///
/// A token is `{ not_before, streak, holder }`. What a store must do, atomically for each key:
///
/// - [`claim`](Self::claim): if there is no token, or its `not_before` is reached, grant: `streak + 1` (from 0),
///   a new `holder`, `not_before = now + schedule.window(streak, u)` with a fresh `u`. Else nothing changes.
/// - [`extend`](Self::extend), [`clear`](Self::clear): only for the holder of the newest grant; for an
///   older one nothing changes. Both also where `not_before` is past, until there is another grant.
///
/// `tower_herd_sim::tokens` tests a store for this. A future of a store that is dropped half-way may have done its
/// work, or not; it must not have done half of it.
pub trait RetryTokens: Clone + Send + Sync + 'static {
    /// What can go wrong: the store cannot be reached, mostly.
    type Error: Error + Send + Sync + 'static;

    /// Asks to run what the key stands for, now.
    fn claim(
        &self,
        key: &str,
        schedule: &Schedule,
    ) -> impl Future<Output = Result<Claim, Self::Error>> + Send;

    /// Keeps the key closed for at least this long from now: longer than it is, never shorter. False: `holder`
    /// is not the newest one, or there is no token; nothing was changed. True otherwise, also where the key is closed for
    /// longer anyway.
    fn extend(
        &self,
        key: &str,
        holder: HolderId,
        at_least: Duration,
    ) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// The run was a success: forgets the key. False: `holder` is not the newest one, or there is no token;
    /// nothing was changed.
    fn clear(&self, key: &str, holder: HolderId) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// What is known about a key. Changes nothing, and need not be a locked read.
    fn peek(&self, key: &str) -> impl Future<Output = Result<Option<Token>, Self::Error>> + Send;

    /// Removes at most `limit` tokens that have been open for `idle`, and says how many they were. `idle` must be long
    /// enough that their streaks are history: twice the cap at least.
    fn sweep(&self, idle: Duration, limit: u32) -> impl Future<Output = Result<u64, Self::Error>> + Send;

    /// The store itself, if it is one of this process: then no future of it is boxed, and nothing is timed.
    fn local(&self) -> Option<&LocalTokens> {
        None
    }
}

/// The answer to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Run it now.
    Granted(Grant),
    /// Do not.
    NotBefore(Wait),
}

/// A grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Who may extend and clear the token, until another is granted.
    pub holder: HolderId,
    /// For how long the key is closed from now: the wait if the run fails.
    pub next_in: Duration,
    /// Grants since the last success, this one included.
    pub streak: u32,
}

/// The other answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// How long the key is closed from now; above zero.
    pub wait: Duration,
    /// Grants since the last success.
    pub streak: u32,
    /// What stands in the way.
    pub cause: WaitCause,
}

/// What stands in the way of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WaitCause {
    /// The token: somebody runs it, or has, and it failed.
    Token,
    /// The breaker of its dependency.
    Breaker,
    /// The store cannot be asked, and the policy is not to run then.
    StoreDown,
    /// The store is full of live tokens and does not know this one.
    Full,
}

impl WaitCause {
    /// A short fixed name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            WaitCause::Token => "token",
            WaitCause::Breaker => "breaker",
            WaitCause::StoreDown => "store_down",
            WaitCause::Full => "full",
        }
    }
}

/// What a store knows about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The newest one.
    pub holder: HolderId,
    /// How long the key is closed from now; zero: it is open.
    pub wait: Duration,
    /// Grants since the last success.
    pub streak: u32,
}

/// Names one grant. It fences: what an older holder does to the token is nothing.
///
/// 64 random bits, drawn anew for each claim by the store, in whichever process it runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HolderId(u64);

impl HolderId {
    /// The bits.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for HolderId {
    fn from(bits: u64) -> Self {
        HolderId(bits)
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
