//! Scenarios: what the fleet does and how its providers behave.
//!
//! * `stampede`: agents in a closed loop work off a list of tasks over a ladder of three rungs, one
//!   rung a tier, cheapest first. The first rung is roomy and cuts its quota without notice; the
//!   other two are small. Nothing is ever down, yet a chain that takes a 429 for a failure loses
//!   most of its tasks.
//! * `equal-hint`: a thousand clients are told the same wait within one second by a single provider
//!   that serves everything afterwards. What matters is how they come back.
//!
//! * `brownout`: tasks arrive at a rate, whatever becomes of those before them, and a share of the calls
//!   fails. What matters is how many tasks succeed, and with how few calls. A second ceiling
//!   (`ceilings=100,40`) adds a healthy rung.
//! * `recovery`: the same arrivals, over ten minutes in which the provider is gone. What matters is what
//!   it sees meanwhile, and how the tasks come back: [`Recovery`].
//! * `amplification`: three services, each a stack of its own that tries four times and calls the next,
//!   in front of a dead provider. Between two of them is a network: nothing of one process is seen by
//!   the next but what HTTP carries.
//! * `fleet`: many processes that share one ceiling through a store: who gets how much, how well the ceiling is
//!   used, and whether it holds when processes are killed, stopped or cut off, and when the store is slow, gone
//!   or empty: [`FleetFigures`]. The provider serves what is above its ceiling, too, and counts it.
//! * `cron`: a thousand jobs that start at the same instant, every minute; and beside it, what the retries of a few
//!   jobs do to a dependency that is down: [`cron`].
//!
//! [`Settings`] holds every dimension; [`Settings::set`] changes one by name, as `--set` does.
//! Instants of the stampede's schedule (cut, return, outage) are given for a latency of one second and
//! scale with it, so that `latency=0.2` is the same story told five times as fast. Where tasks arrive by
//! the clock, so do the events.
//!
//! # What the oracle does
//! It knows every limit from the start, learns an unannounced cut, return or outage from one reply, obeys
//! the hint of that reply, and repeats what failed until it is served: the most tasks that can be
//! done, not the fewest calls.

pub mod cron;
mod drive;
mod fleet;
mod happens;
mod log;
mod presets;
mod recovery;
mod run;
mod scripts;
mod settings;
mod value;

pub use fleet::FleetFigures;
pub use happens::{Happens, Trouble};
pub use log::{Log, Noted, What};
pub use recovery::{Recovery, ramp};
pub use run::{Run, RunError, RungRun, TaskResult, oracle_seconds, run, trace_hash};
pub use settings::{LimitKind, MEAN_COST, Scenario, Settings, SettingsError, keys};
