//! The main job: a hundred agents, three rate-limited providers, and no outage.
//!
//! ```text
//! cargo run --release --example stampede
//! ```
//!
//! Three real HTTP servers on loopback answer completions. The first and cheapest holds 100 calls at a
//! time and, two seconds in, cuts that to 20 without a word; the others hold 20 each. All of them are
//! healthy all the time. A hundred agents work off 3000 tasks, twice: through the chain of fallbacks that
//! everybody writes first (`policies::naive`), and through the layers of this project
//! (`policies::tower_herd`), which are told nothing about the ceilings. Everything is counted at the
//! servers, and the time is held against an oracle that knows every ceiling (from the simulator).

mod crossing;
mod drive;
mod options;
mod policies;
mod progress;
mod providers;
mod wire;

use std::{
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use drive::{Field, Policy, drive};
use options::{Choice, Options, check_open_files, check_reachable};
use progress::Progress;
use providers::Providers;
use tower_herd_sim::{
    policy::{Oracle, Registry},
    report::{self, Row},
    scenario::{Run, Settings, run},
};

fn main() -> ExitCode {
    let options = match Options::read(std::env::args_os()) {
        Ok(options) => options,
        Err(Ok(help)) => return print(&help, ExitCode::SUCCESS),
        Err(Err(wrong)) => return fail(&wrong),
    };
    match stampede(&options) {
        Ok(code) => code,
        Err(wrong) => fail(&wrong),
    }
}

fn fail(wrong: &str) -> ExitCode {
    eprintln!("error: {wrong}");
    ExitCode::from(2)
}

/// To stdout, where nobody may be listening any more (`| head`).
fn print(text: &str, code: ExitCode) -> ExitCode {
    std::io::stdout().write_all(text.as_bytes()).ok();
    code
}

/// The runs and rows so far, in the order of the table.
#[derive(Default)]
struct Results {
    runs: Vec<Run>,
    rows: Vec<Row>,
    stopped: bool,
}

impl Results {
    fn add(&mut self, options: &Options, run: Run, row: Row) {
        if options.json && run.policy != "oracle" {
            print(&format!("{}\n", row.json()), ExitCode::SUCCESS);
        }
        self.runs.push(run);
        self.rows.push(row);
    }
}

fn stampede(options: &Options) -> Result<ExitCode, String> {
    let path = options.report.clone().unwrap_or_else(default_report);
    check_writable(&path)?;
    let mut settings = options.settings();
    if !options.provider.is_empty() {
        // Nothing is known of the reader's own servers.
        (settings.ceilings, settings.cut_at, settings.hint) = (Vec::new(), None, None);
    }
    let results =
        if options.simulated { simulate(options, &settings)? } else { over_sockets(options, &settings)? };

    if !options.json {
        results.runs.iter().filter_map(why_lost).for_each(|line| eprintln!("{line}"));
        print(&format!("\n{}\n", report::table(&results.rows)), ExitCode::SUCCESS);
        print(&format!("{}\n{}\n\n", report::rungs(&results.runs), report::LEGEND), ExitCode::SUCCESS);
    }
    let html = report::html(&results.runs, &results.rows);
    std::fs::write(&path, html).map_err(|e| unwritable(&path, &e))?;
    eprintln!("report: {}", path.display());
    if results.stopped {
        eprintln!("stopped: the figures are what there was until then");
        return Ok(ExitCode::from(130));
    }
    Ok(ExitCode::SUCCESS)
}

fn policies(options: &Options) -> Vec<Policy> {
    let mut policies = Vec::new();
    if options.runs(Choice::Naive) {
        policies.push(Policy::Naive);
    }
    if options.runs(Choice::TowerHerd) {
        policies.push(Policy::TowerHerd);
    }
    policies
}

/// The same settings in the simulator, whose clock jumps over every wait.
fn simulate(options: &Options, settings: &Settings) -> Result<Results, String> {
    let registry = Registry::standard();
    let oracle = run(settings, &Oracle, options.seed).map_err(|e| e.to_string())?;
    let seconds = Some(oracle.elapsed.as_secs_f64());
    let mut results = Results::default();
    for policy in policies(options) {
        let policy = registry.get(policy.name()).map_err(|e| e.to_string())?;
        let made = run(settings, policy.as_ref(), options.seed).map_err(|e| e.to_string())?;
        let row = made.row(seconds);
        results.add(options, made, row);
    }
    let row = oracle.row(seconds);
    results.add(options, oracle, row);
    Ok(results)
}

/// Real calls to real servers.
fn over_sockets(options: &Options, settings: &Settings) -> Result<Results, String> {
    let rungs = if options.provider.is_empty() { settings.ceilings.len() } else { options.provider.len() };
    check_open_files(settings.agents, rungs, if options.provider.is_empty() { 2 } else { 1 })?;
    check_reachable(&options.provider)?;
    let ours = match options.provider.is_empty() {
        true => Some(Providers::start(settings, options.seed, options.listen)?),
        false => None,
    };
    let (field, oracle) = match &ours {
        Some(providers) => {
            (Field::Ours(providers), Some(run(settings, &Oracle, options.seed).map_err(|e| e.to_string())?))
        }
        None => (Field::Theirs(&options.provider), None),
    };
    let seconds = oracle.as_ref().map(|run| Row::round(run.elapsed.as_secs_f64()));

    let runtime = tokio::runtime::Runtime::new().map_err(|e| format!("no runtime: {e}"))?;
    let mut results = Results::default();
    for policy in policies(options) {
        let progress = Progress::begin(policy, settings, rungs, options.json);
        let stop = async {
            // Where signals cannot be caught, the first one ends the process as usual.
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let watch = |live| progress.watch(&live);
        let finished = runtime.block_on(drive(settings, options.seed, policy, &field, watch, stop))?;
        progress.end(&finished);
        results.stopped = finished.stopped;
        // Half a story cannot be held against a whole one.
        let oracle_seconds = seconds.filter(|_| !finished.stopped);
        let row = Row { oracle_seconds, ..finished.row };
        results.add(options, finished.run, row);
        if results.stopped {
            return Ok(results);
        }
    }
    if let Some(oracle) = oracle {
        let row = oracle.row(seconds);
        results.add(options, oracle, row);
    }
    Ok(results)
}

/// The commonest reason for which tasks were lost.
fn why_lost(run: &Run) -> Option<String> {
    let mut counts = std::collections::BTreeMap::new();
    for why in run.tasks.iter().filter_map(|task| task.lost.as_deref()) {
        *counts.entry(why).or_insert(0u64) += 1;
    }
    let lost: u64 = counts.values().sum();
    let (why, times) = counts.into_iter().max_by_key(|(_, times)| *times)?;
    Some(format!("{}: {lost} tasks lost, {times} of them with: {why}", run.policy))
}

/// In the target directory, wherever that is: this binary lies in `<target>/<profile>/examples`.
fn default_report() -> PathBuf {
    let own = std::env::current_exe().ok();
    let examples = own.as_deref().and_then(Path::parent).filter(|dir| dir.ends_with("examples"));
    examples.and_then(|dir| dir.ancestors().nth(2)).unwrap_or(Path::new(".")).join("stampede.html")
}

/// Before the run, so that a wrong path is told at once. Nothing is left there, and what is there stays.
fn check_writable(path: &Path) -> Result<(), String> {
    let new = !path.exists();
    OpenOptions::new().append(true).create(true).open(path).map_err(|e| unwritable(path, &e))?;
    if new { std::fs::remove_file(path).map_err(|e| unwritable(path, &e)) } else { Ok(()) }
}

fn unwritable(path: &Path, error: &std::io::Error) -> String {
    format!(
        "the report cannot be written to {} ({error}): choose another place with --report FILE",
        path.display()
    )
}
