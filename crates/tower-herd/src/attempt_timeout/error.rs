use std::{error::Error, fmt, time::Duration};

/// The provider was silent for too long. See the [module](super).
///
/// Found in an error chain it means [`Failed`](crate::Kind::Failed), and that the request
/// [may](crate::Executed::Maybe) have taken effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttemptTimeout {
    /// Which silence it was.
    pub phase: Phase,
    /// How long it was waited for: less than the layer says where the task had less time left.
    pub after: Duration,
}

/// What was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The head of the reply.
    Headers,
    /// The next piece of its body.
    Idle,
}

impl fmt::Display for AttemptTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.phase {
            Phase::Headers => "no answer",
            Phase::Idle => "the body stood still",
        };
        write!(f, "{what} for {:.1} s", self.after.as_secs_f64())
    }
}

impl Error for AttemptTimeout {}
