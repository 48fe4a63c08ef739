//! A fleet of real processes on a real redis-server, and all that goes wrong there: processes are killed, stopped and
//! cut off, the server is stopped, emptied, restarted and replaced by an old copy of itself.
//!
//! The judge is the [provider](judge) that all of them call: it counts for itself what is in flight. What is to hold,
//! and by how much it may be exceeded where it does not, is the table in `tower_herd::store`; each test says which
//! row it is about.
//!
//! Steps of the store's clock are not here, since the clock of a redis-server cannot be set: the model check has them,
//! over the same function and a clock that the test moves. Nor is a suspended machine (`fleet.rs` of tower-herd fakes
//! one).
//!
//! The times of a lease are short; with `TOWER_HERD_LONG=1` they are the defaults.

#[path = "../support/mod.rs"]
mod support;

mod herd;
mod judge;
mod worker;

mod crashes;
mod cuts;
mod limits;
mod losses;
mod outages;
mod replicas;
mod stops;
