//! The whole stack from one builder.

mod body;
mod rung;
mod service;
mod wire;

pub use body::HerdBody;
pub use rung::{Guarded, bench_rung};
pub use service::{HerdService, bench_herd};
