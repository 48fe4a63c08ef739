//! The two primitives of the gate, std's or loom's.

#[cfg(not(herd_loom))]
pub(super) use std::sync::{Arc, Mutex, MutexGuard, atomic::AtomicU64};

#[cfg(herd_loom)]
pub(super) use loom::sync::{Arc, Mutex, MutexGuard, atomic::AtomicU64};

/// Mistakes that the loom models switch on, one at a time, to show that they
/// would catch them. Outside loom none exists: [`fault`] is a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The fast path and `release` do not look at the waiting flag.
    NoWaitingFlag,
    /// The fast path does not look at the slow flag.
    NoSlowFlag,
    /// A cancelled waiter wakes nobody.
    SilentCancel,
    /// A changed pacer or ceiling wakes nobody.
    SilentChange,
    /// A release looks for waiters before it gives back, in two steps.
    EarlyLook,
    /// A waiter that was called in its own poll asks once only (a mistake that
    /// was made here, and that the shrink model found).
    AskOnce,
}

#[cfg(not(herd_loom))]
#[inline(always)]
pub(super) const fn fault(_: Fault) -> bool {
    false
}

#[cfg(all(test, herd_loom))]
pub(super) use faults::VARIABLE;
#[cfg(herd_loom)]
pub(super) use faults::fault;

#[cfg(herd_loom)]
mod faults {
    use super::Fault;
    use std::sync::OnceLock;

    /// The mistake of this process, by name.
    pub(crate) const VARIABLE: &str = "GATE_FAULT";

    pub(crate) fn fault(which: Fault) -> bool {
        static FAULT: OnceLock<Option<String>> = OnceLock::new();
        let fault = FAULT.get_or_init(|| std::env::var(VARIABLE).ok());
        fault.as_deref().is_some_and(|name| name == format!("{which:?}"))
    }
}
