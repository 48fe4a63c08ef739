//! The herd simulator's command line. See [`tower_herd_sim::cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

use tower_herd_sim::policy::Registry;

fn main() -> ExitCode {
    tower_herd_sim::cli::main(&Registry::standard())
}
