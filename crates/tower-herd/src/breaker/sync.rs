//! The primitives of the counting part, std's or loom's.

#[cfg(not(herd_loom))]
pub(super) use std::sync::{
    Mutex as StateMutex, MutexGuard as StateGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};

#[cfg(herd_loom)]
pub(super) use loom::sync::{
    Mutex as StateMutex, MutexGuard as StateGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};
