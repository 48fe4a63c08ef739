//! The command line.

use std::{ffi::OsString, time::Duration};

use clap::{Parser, error::ErrorKind, value_parser};

const ABOUT: &str = "Eight processes call one provider that holds 16 calls at a time, and none of them asks anybody \
before a call: each holds a lease on some of the slots. The provider, a real HTTP server in this process, counts what \
is in flight there, and its count is the judge.";

const AFTER: &str = "\
Without --redis the fleet is in this process: a thread and a runtime for each member, and a store in memory.
  fleet                                  half a minute of that
  fleet --redis own                      eight processes and a private redis-server (from PATH)
  fleet --redis own --chaos              one is killed, one is stopped for longer than its lease lasts, and Redis is
                                         restarted empty
  fleet --redis redis://127.0.0.1:6379   your own server; --chaos leaves it alone, unless --flush says otherwise

In the table, slots are those that a process holds by its lease; then come its calls in flight, and those that wait
for a slot. Exit code: 0 if the ceiling held (or, around the stop, what the documentation says of one), 1 if not,
2 if it could not be run.";

/// What the reader asked for.
#[derive(Clone, Debug, Parser)]
#[command(name = "fleet", about = ABOUT, after_help = AFTER, version)]
pub struct Options {
    /// Where the processes meet: a URL, or `own` for a private server [default: in memory, in one process].
    #[arg(long, value_name = "URL|own")]
    pub redis: Option<String>,
    /// Kills one process, stops and continues another, and empties Redis.
    #[arg(long)]
    pub chaos: bool,
    /// With --chaos and a server that is yours: runs FLUSHALL there. Everything on it is lost.
    #[arg(long, requires = "chaos")]
    pub flush: bool,
    /// How long it runs.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,
    /// The calls that the provider holds at a time.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u32).range(1..=10_000))]
    pub ceiling: u32,
    /// How many processes.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=64))]
    pub processes: u32,
    /// The seed of latencies and demand.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// This is one of the processes: its orders come by its standard input.
    #[arg(long, hide = true)]
    pub worker: bool,
}

/// The blows, and when they fall.
pub const KILL_AT: Duration = Duration::from_secs(8);
pub const STOP_AT: Duration = Duration::from_secs(14);
pub const CONTINUE_AT: Duration = Duration::from_secs(20);
pub const EMPTY_AT: Duration = Duration::from_secs(22);
/// Until everything has come back after the last of them.
const CHAOS_TAKES: u64 = 29;

impl Options {
    /// Reads the process's arguments. `Err(Ok(text))` is help that was asked for, `Err(Err(text))` what is
    /// wrong, in one line.
    pub fn read<I, T>(arguments: I) -> Result<Self, Result<String, String>>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        let options = Options::try_parse_from(arguments).map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(error.to_string()),
            _ => {
                let text = error.to_string();
                let line = text.split("\n\n").next().unwrap_or_default().replace('\n', " ");
                let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
                Err(format!("{} (see --help)", line.trim_start_matches("error: ")))
            }
        })?;
        options.check().map_err(|wrong| Err(wrong.to_owned()))?;
        Ok(options)
    }

    fn check(&self) -> Result<(), &'static str> {
        if !self.chaos {
            return Ok(());
        }
        if self.redis.is_none() {
            return Err("--chaos needs processes to kill and a store to empty: add --redis own");
        }
        if self.flush && self.redis.as_deref() == Some("own") {
            return Err(
                "--flush is for a server of yours: with --redis own, --chaos restarts it empty anyway",
            );
        }
        if self.seconds < CHAOS_TAKES {
            return Err("--chaos takes 29 s: give it more --seconds");
        }
        if self.processes < 3 {
            return Err("--chaos kills one process and stops another: give it 3 --processes at least");
        }
        Ok(())
    }
}
