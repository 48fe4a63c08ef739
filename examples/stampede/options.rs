//! The command line.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use clap::{Parser, ValueEnum, error::ErrorKind, value_parser};
use http::Uri;
use tower_herd_sim::scenario::{Scenario, Settings};

const ABOUT: &str = "A hundred agents against three rate-limited HTTP providers, one of which cuts its quota from \
100 to 20 concurrent calls without a word: first with a naive failover chain, then with tower-herd.";

/// What the reader asked for.
#[derive(Debug, Parser)]
#[command(name = "stampede", about = ABOUT, version)]
pub struct Options {
    /// Agents, each with one task at a time.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(1..=10_000))]
    pub agents: u32,
    /// Tasks in all.
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub tasks: u64,
    /// The seed of latencies and waits.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Which policy to run.
    #[arg(long, value_name = "P", value_enum, default_value_t = Choice::Both)]
    pub policy: Choice,
    /// Tells tower-herd the published ceilings, 100/20/20 (the cut stays unannounced).
    #[arg(long, conflicts_with = "provider")]
    pub configured: bool,
    /// Runs it in the simulator instead: the same story in milliseconds.
    #[arg(long = "virtual", conflicts_with_all = ["provider", "listen"])]
    pub simulated: bool,
    /// Calls this server instead of ours, with its known ceiling if you like; repeat it, cheapest first.
    #[arg(long, value_name = "URL[,CEILING]")]
    pub provider: Vec<Target>,
    /// The port of our first provider; the others take the next two [default: free ones].
    #[arg(long, value_name = "PORT", conflicts_with = "provider", value_parser = value_parser!(u16).range(1..=65_533))]
    pub listen: Option<u16>,
    /// Prints one JSON object a line for each policy, and nothing else on stdout.
    #[arg(long)]
    pub json: bool,
    /// Where to write the HTML report [default: stampede.html in the target directory].
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Policies to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Three tries a rung, no backoff, a 429 means "down".
    Naive,
    /// The layers of this project.
    TowerHerd,
    /// One after the other.
    Both,
}

/// A provider to call: one rung of the ladder.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Where its completions are.
    pub url: Uri,
    /// Its ceiling, if it is known.
    pub ceiling: Option<u32>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (url, ceiling) = match text.rsplit_once(',') {
            None => (text, None),
            Some((url, ceiling)) => match ceiling.trim().parse() {
                Ok(n) if n > 0 => (url, Some(n)),
                _ => return Err(format!("the ceiling `{ceiling}` is not a whole number above 0")),
            },
        };
        let url: Uri = url.trim().parse().map_err(|e| format!("not a URL ({e})"))?;
        match (url.scheme_str(), url.host()) {
            (Some("http"), Some(host)) if !host.is_empty() => Ok(Target { url, ceiling }),
            _ => Err("only URLs like http://127.0.0.1:8080/path can be called here".into()),
        }
    }
}

impl Options {
    /// Reads the process's arguments. `Err(Ok(text))` is help that was asked for, `Err(Err(text))` what is
    /// wrong, in one line.
    pub fn read<I, T>(arguments: I) -> Result<Self, Result<String, String>>
    where
        I: IntoIterator<Item = T>,
        T: Into<std::ffi::OsString> + Clone,
    {
        Options::try_parse_from(arguments).map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(error.to_string()),
            _ => {
                let text = error.to_string();
                let line = text.split("\n\n").next().unwrap_or_default().replace('\n', " ");
                let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
                Err(format!("{} (see --help)", line.trim_start_matches("error: ")))
            }
        })
    }

    /// The scenario with these options.
    pub fn settings(&self) -> Settings {
        Settings { agents: self.agents, tasks: self.tasks, configured: self.configured, ..scaled(LATENCY) }
    }

    /// Whether a policy was asked for.
    pub fn runs(&self, policy: Choice) -> bool {
        self.policy == policy || self.policy == Choice::Both
    }
}

/// Mean time of a call: the scenario's second, told two and a half times as fast.
const LATENCY: Duration = Duration::from_millis(400);

/// The stampede at another speed: the cut scales with the latency, the hint stays at one second, since
/// `Retry-After` knows nothing smaller.
pub fn scaled(latency: Duration) -> Settings {
    Settings { latency, deadline: Duration::from_secs(120), ..Settings::new(Scenario::Stampede) }
}

/// Connects to each provider once, so that a server that is not there is told before a long run.
pub fn check_reachable(targets: &[Target]) -> Result<(), String> {
    for Target { url, .. } in targets {
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        connect(host, url.port_u16().unwrap_or(80)).map_err(|e| {
            let what = match e.kind() {
                io::ErrorKind::ConnectionRefused => "refuses connections".to_string(),
                io::ErrorKind::TimedOut => "does not answer within 3 s".to_string(),
                _ => format!("cannot be reached ({e})"),
            };
            format!("provider {url} {what}: start it first, or leave --provider out to use ours")
        })?;
    }
    Ok(())
}

fn connect(host: &str, port: u16) -> io::Result<()> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address for this name");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(3)) {
            Ok(_) => return Ok(()),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Every agent may leave an idle connection at each rung, and ours are in this process at both ends.
pub fn check_open_files(agents: u32, rungs: usize, ends: usize) -> Result<(), String> {
    let needed = agents as usize * rungs * ends + 64;
    let Ok(limits) = std::fs::read_to_string("/proc/self/limits") else { return Ok(()) };
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    match soft {
        Some(soft) if soft < needed => Err(format!(
            "{agents} agents may need {needed} open files and this process may open {soft}: \
             run `ulimit -n {needed}` first, or use fewer --agents"
        )),
        _ => Ok(()),
    }
}
