//! The command line of `tower-herd-sim`, as a library so that other binaries can add policies.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::policy::{Oracle, Policy, Registry};
use crate::report;
use crate::report::Row;
use crate::scenario::{Run, Scenario, Settings, cron, keys, run};

/// How long a policy that needs real time may take without being asked for.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Parser)]
#[command(name = "tower-herd-sim", version, about = "Runs policies against scripted, rate-limited providers.", after_help = keys_help())]
struct Args {
    /// The scenario: stampede, equal-hint, brownout, recovery, amplification, cron or fleet.
    scenario: String,
    /// A policy to run; repeat for several, or `all` (the default: those that the scenario is about).
    #[arg(long, value_name = "P")]
    policy: Vec<String>,
    /// The seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Runs so many seeds, counting up from --seed, and prints means and maxima.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,
    /// Changes one dimension of the scenario; the keys are listed below.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Prints one JSON object a line for each policy (and seed), and nothing else on stdout.
    #[arg(long)]
    json: bool,
    /// Writes a self-contained HTML page with plots (of the first seed).
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Writes one SVG image with the runs side by side (of the first seed).
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

fn keys_help() -> String {
    let mut out = String::from("Keys of --set:\n");
    for (key, help) in keys() {
        out.push_str(&format!("  {key:<16} {help}\n"));
    }
    out
}

/// Parses the process's arguments and runs them with the policies of a registry.
pub fn main(registry: &Registry) -> ExitCode {
    let args = Args::parse();
    match execute(&args, registry) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

fn execute(args: &Args, registry: &Registry) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let mut settings = Settings::new(Scenario::parse(&args.scenario).map_err(|e| text(&e))?);
    for pair in &args.set {
        settings.set_pair(pair).map_err(|e| format!("--set {e}"))?;
    }
    settings.validate().map_err(|e| text(&e))?;
    let mut policies = Vec::new();
    for name in args.policy.iter().flat_map(|p| p.split(',')).filter(|p| *p != "all") {
        policies.push(registry.get(name).map_err(|e| text(&e))?);
    }
    if policies.is_empty() {
        policies = registry.all().iter().filter(|p| plays(p.as_ref(), &settings)).cloned().collect();
    }

    let (mut rows, mut first): (Vec<Row>, Vec<Run>) = (Vec::new(), Vec::new());
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        let oracle = run(&settings, &Oracle, seed).map_err(|e| text(&e))?;
        for policy in &policies {
            let made = if policy.name() == Oracle.name() {
                oracle.clone()
            } else {
                run(&settings, policy.as_ref(), seed).map_err(|e| text(&e))?
            };
            let row = made.row_beside(&oracle);
            if args.json {
                say(&row.json())?;
            }
            rows.push(row);
            if seed == args.seed {
                first.push(made);
            }
        }
    }
    if let Some(path) = &args.report {
        let page = report::html(&first, &rows[..first.len()]);
        std::fs::write(path, page).map_err(|e| format!("--report {}: {e}", path.display()))?;
        eprintln!("report: {}", path.display());
    }
    if let Some(path) = &args.picture {
        let image = report::picture(&first);
        std::fs::write(path, image).map_err(|e| format!("--picture {}: {e}", path.display()))?;
        eprintln!("picture: {}", path.display());
    }
    // Of jobs that are retried, whatever the policy of their calls.
    let retries = settings.scenario == Scenario::Cron && args.policy.is_empty();
    if args.json && retries {
        for line in cron::json(args.seed) {
            say(&line)?;
        }
    }
    // Last: a reader that closes the pipe early ends the program.
    if !args.json {
        say(&tables(args, &rows, &first))?;
        if retries {
            let jobs = cron::Jobs::default();
            say(&format!(
                "\nRetries of jobs: {} agents with one job, what it depends on is down for {} s\n\n{}",
                jobs.agents,
                jobs.outage.as_secs(),
                cron::table(args.seed).trim_end()
            ))?;
        }
    }
    Ok(())
}

/// Whether a policy that nobody named is worth its time.
fn plays(policy: &dyn Policy, settings: &Settings) -> bool {
    let long = settings.rate.is_some() && settings.duration > PATIENCE;
    let skip = policy.plays(settings) && long && policy.real_time(settings);
    if skip {
        eprintln!("{} needs real time: left out, --policy {} runs it", policy.name(), policy.name());
    }
    policy.plays(settings) && !skip
}

/// A line on stdout; whoever closes the pipe early has seen enough.
fn say(text: &str) -> Result<(), String> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.map_err(|e| format!("stdout: {e}")),
    }
}

fn tables(args: &Args, rows: &[Row], first: &[Run]) -> String {
    let mut out = format!("scenario {}, seed {}{}\n\n", args.scenario, args.seed, set_text(&args.set));
    if args.seeds > 1 {
        out.push_str(&report::summary(rows));
    } else {
        out.push_str(&format!("{}\n{}", report::table(rows), report::rungs(first)));
    }
    out.push_str(&format!("\n{}\n{}\n", report::extras(rows), report::LEGEND));
    if rows.iter().any(|row| row.recovery.is_some()) {
        out.push_str(&format!("{}\n", report::OUTAGE_LEGEND));
    }
    for run in first {
        if let Some(about) = &run.about {
            out.push_str(&format!("\n{}: {about}\n", run.policy));
        }
    }
    out.trim_end().to_string()
}

fn set_text(set: &[String]) -> String {
    if set.is_empty() { String::new() } else { format!(", {}", set.join(", ")) }
}
