//! What came of a run.

use crate::Refusal;
use std::{error::Error, time::Duration};

/// What came of a run of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done: its key is forgotten.
    Success,
    /// It failed: its key stays closed for the wait of its grant, and for `retry_after` at least, if it names one.
    Failure {
        /// The wait that the reply or error asks for. It prolongs, and never shortens.
        retry_after: Option<Duration>,
    },
    /// It did not come to a result: a refusal of ours further in, a job that was cancelled. Its key stays closed for
    /// the wait of its grant, and nothing else is said of it.
    Neutral,
}

impl Outcome {
    /// A failure that names no wait.
    #[must_use]
    pub const fn failure() -> Self {
        Outcome::Failure { retry_after: None }
    }
}

/// Reads the outcome of a run off its result.
///
/// Implemented by functions: `|result: Result<&Reply, &(dyn Error + 'static)>| -> Outcome`.
pub trait Judge<Res> {
    /// What this result is.
    fn judge(&self, result: Result<&Res, &(dyn Error + 'static)>) -> Outcome;
}

impl<F, Res> Judge<Res> for F
where
    F: Fn(Result<&Res, &(dyn Error + 'static)>) -> Outcome,
{
    fn judge(&self, result: Result<&Res, &(dyn Error + 'static)>) -> Outcome {
        self(result)
    }
}

/// The default [`Judge`]: a reply is a success, an error a failure, and a [`Refusal`] of ours neither.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorsFail;

impl<Res> Judge<Res> for ErrorsFail {
    fn judge(&self, result: Result<&Res, &(dyn Error + 'static)>) -> Outcome {
        match result {
            Ok(_) => Outcome::Success,
            Err(error) if Refusal::find(error).is_some() => Outcome::Neutral,
            Err(_) => Outcome::failure(),
        }
    }
}
