use crate::{BoxError, Provider, RefusalKind, Time};

/// What it refuses with: exact, as long as nothing disturbs the ramp.
#[cold]
pub(super) fn refusal(provider: &Provider, until: Time) -> BoxError {
    let why = "it recovers, and this task is not among those that it gets back already";
    provider.refuse(RefusalKind::NotReadmitted, why, Some(until)).into()
}
