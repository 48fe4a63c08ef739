use super::{Epoch, Quantity};
use crate::PauseReason;

/// What a process has after an exchange. All times in milliseconds.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Grant {
    /// The life of the book that this is written in. A holder that has seen a newer one ignores it.
    pub epoch: Epoch,
    /// Of the grant. A higher one than the holder knew may raise what it holds, the same may only lower it,
    /// a lower one is ignored.
    pub version: u64,
    /// The slots that it may use: its charge, but for what the charges of all are above the ceiling.
    pub slots: u32,
    /// Of them, those that it may use after its lease has run out unrenewed, for [`Terms::grace`](super::Terms).
    pub safe: u32,
    /// What it should have: above it, slots are to be given back as their calls end if others lack them.
    pub target: u32,
    /// Others lack slots.
    pub contended: bool,
    /// There are more who need a slot than slots: each goes back after one call.
    pub turns: bool,
    /// The report was not newer than one taken in before: nothing was changed by it, nor extended.
    pub stale: bool,
    /// The number of the last report that was taken in before this one; 0: none.
    pub before: u64,
    /// For so long nobody is given more, since the book is new or was silent.
    pub learning: u64,
    /// When to ask again, where more is to be had soon: a pause's end is a ramp.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub again: Option<u64>,
    /// Processes that share the provider.
    pub members: u32,
    /// The sum of their weights.
    pub weights: u64,
    /// The ceiling in force for all of them.
    pub ceiling: u32,
    /// Calls that wait for a slot in other processes: how long the line is.
    #[cfg_attr(feature = "serde", serde(default))]
    pub queued: u32,
    /// Of the ceiling: calls admitted from now on carry it.
    pub generation: u64,
    /// Members were configured with different limits of one generation; the lowest count.
    pub disagree: bool,
    /// Each scope that something is known of.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub scopes: Vec<ScopeGrant>,
    /// What was taken out of the rates for this holder.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub rates: Vec<Chunk>,
}

impl Grant {
    /// Nobody is to call at all: a pause of the whole provider, or its open breaker.
    pub(crate) fn closed(&self) -> bool {
        let root = self.scopes.iter().filter(|scope| scope.scope.is_none());
        root.into_iter().any(|root| root.pause.is_some() || root.open.is_some())
    }
}

impl Grant {
    /// A probe may go.
    pub(crate) fn leaves(&self) -> bool {
        self.scopes.iter().any(|scope| scope.leave.is_some())
    }
}

/// What is known of one scope.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct ScopeGrant {
    /// Its name; none: all of the provider.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub scope: Option<String>,
    /// Grows whenever its pause is set, moved or cleared, or its breaker opens or closes.
    pub generation: u64,
    /// Its pause, breaker aside.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub pause: Option<SharedPause>,
    /// Its open breaker.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub open: Option<Opened>,
    /// The probe that was asked for may go.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub leave: Option<Leave>,
    /// Calls of all members while the ramp runs, since the last opening or long pause.
    pub calls: u64,
    /// Of which throttled.
    pub throttled: u64,
}

/// A pause that all keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SharedPause {
    /// What is left of it, counted from the receipt of the grant.
    pub wait: u64,
    /// Why.
    #[cfg_attr(feature = "serde", serde(with = "super::report::reason"))]
    pub reason: PauseReason,
}

/// A breaker that is open for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Opened {
    /// What is left of its open time; 0: it is over, and there are only probes until one succeeds.
    pub wait: u64,
    /// For how long it has been open.
    pub since: u64,
    /// The time between two probes: at first,
    pub first: u64,
    /// and at most.
    pub last: u64,
    /// The report that this answers opened it: its holder raises the alert, nobody else.
    pub yours: bool,
}

/// Leave for one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Leave {
    /// It is to be sent within this time.
    pub within: u64,
}

/// A part of a rate, taken out of the fleet's bucket for one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Chunk {
    /// Of what.
    pub of: Quantity,
    /// Its number.
    pub chunk: u64,
    /// So much. It adds to what is left of the one before.
    pub amount: u64,
    /// To be used or given back within this time, counted from when its report was sent.
    pub valid: u64,
    /// The rate in force for all members, a minute.
    pub per_minute: u64,
    /// The most at once, over all members. A cost above it can never be paid.
    pub burst: u64,
}
