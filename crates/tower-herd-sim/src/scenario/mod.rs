//! Scenarios: what the fleet does and how its providers behave.
//!
//! * `stampede`: agents in a closed loop work off a list of tasks over a ladder of three rungs, one
//!   rung a tier, cheapest first. The first rung is roomy and cuts its quota without notice; the
//!   other two are small. Nothing is ever down, yet a chain that takes a 429 for a failure loses
//!   most of its tasks.
//! * `equal-hint`: a thousand clients are told the same wait within one second by a single provider
//!   that serves everything afterwards. What matters is how they come back.
//!
//! [`Settings`] holds every dimension; [`Settings::set`] changes one by name, as `--set` does.
//! Instants of the schedule (cut, return, outage) are given for a latency of one second and scale
//! with it, so that `latency=0.2` is the same story told five times as fast.

mod run;
mod settings;
mod value;

pub use run::{Run, RunError, RungRun, TaskResult, oracle_seconds, run, trace_hash};
pub use settings::{LimitKind, MEAN_COST, Scenario, Settings, SettingsError, keys};
