use std::{error::Error, fmt};

/// A ladder that cannot be built.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LadderError {
    /// It has no rung.
    Empty,
    /// It has more than 64 rungs.
    TooMany(usize),
    /// A weight is not a positive number.
    Weight {
        /// The rung.
        rung: String,
        /// Its weight.
        weight: f64,
    },
    /// Two rungs are the same provider (and scope): one of them would never be chosen by hash.
    Twice(String),
}

impl fmt::Display for LadderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LadderError::Empty => write!(f, "a ladder needs at least one rung"),
            LadderError::TooMany(rungs) => write!(f, "a ladder has 64 rungs at most, not {rungs}"),
            LadderError::Weight { rung, weight } => {
                write!(f, "rung {rung:?}: the weight {weight} is not a positive number")
            }
            LadderError::Twice(rung) => write!(
                f,
                "rung {rung:?} is in the ladder twice; give the second one a provider or scope of its own"
            ),
        }
    }
}

impl Error for LadderError {}
