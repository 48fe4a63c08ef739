use crate::BoxError;
use std::{error::Error, fmt};

/// A store did not answer, or not with a grant. Never taken for a reply of a provider.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    source: Option<BoxError>,
}

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection, or it broke.
    Unreachable,
    /// No answer in time.
    Timeout,
    /// It is there, and does not work now: loading, read-only, out of memory, no master.
    Unavailable,
    /// It does not let us: wrong password, missing rights.
    Denied,
    /// Its answer is none that we know.
    Invalid,
}

impl StoreErrorKind {
    /// Whether it may be over by itself. Where it is not, somebody has to change the configuration.
    #[must_use]
    pub const fn heals(self) -> bool {
        !matches!(self, StoreErrorKind::Denied | StoreErrorKind::Invalid)
    }

    /// A short fixed name, for events and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            StoreErrorKind::Unreachable => "unreachable",
            StoreErrorKind::Timeout => "timeout",
            StoreErrorKind::Unavailable => "unavailable",
            StoreErrorKind::Denied => "denied",
            StoreErrorKind::Invalid => "invalid",
        }
    }
}

impl StoreError {
    /// An error of this kind, with its cause.
    pub fn new(kind: StoreErrorKind, source: impl Into<BoxError>) -> Self {
        StoreError { kind, source: Some(source.into()) }
    }

    /// What is wrong.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl From<StoreErrorKind> for StoreError {
    fn from(kind: StoreErrorKind) -> Self {
        StoreError { kind, source: None }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            StoreErrorKind::Unreachable => "the fleet's store cannot be reached",
            StoreErrorKind::Timeout => "the fleet's store did not answer in time",
            StoreErrorKind::Unavailable => "the fleet's store does not work at present",
            StoreErrorKind::Denied => "the fleet's store denies us access",
            StoreErrorKind::Invalid => "the fleet's store gave an answer that is none of ours",
        })
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
