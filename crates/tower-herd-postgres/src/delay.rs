//! A schedule in SQL.

use std::time::Duration;
use tower_herd::retry_token::Schedule;

/// Seconds as a literal of type `float8`. Ten years are enough for everybody, and no timestamp overflows.
pub(crate) fn seconds(duration: Duration) -> String {
    const MOST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    format!("{}::float8", duration.min(MOST).as_secs_f64())
}

/// The interval that [`Schedule::window`] gives after `grants` grants (SQL, an integer: those before this one),
/// for a `u` of `[0, 1)` (SQL too).
pub(crate) fn window(schedule: &Schedule, grants: &str, u: &str) -> String {
    // The exponent is cut before anything is multiplied, and so can no streak overflow.
    let mut wait = format!(
        "least({cap}, {base} * power({factor}::float8, least({grants}, {last})))",
        cap = seconds(schedule.cap()),
        base = seconds(schedule.base()),
        factor = schedule.factor(),
        last = schedule.last_exponent(),
    );
    if schedule.spread() > 0.0 {
        wait += &format!(" * (1 + {}::float8 * (2 * {u} - 1))", schedule.spread());
    }
    if let Some(lease) = schedule.lease() {
        wait = format!("greatest({}, {wait})", seconds(lease));
    }
    format!("make_interval(secs => {wait})")
}
