//! One ceiling for eight processes, and nobody is asked before a call.
//!
//! ```text
//! cargo run --release --example fleet                               # within one process
//! cargo run --release --example fleet -- --redis own --chaos        # real processes, a real Redis, and trouble
//! ```
//!
//! A provider, which is a real HTTP server, holds 16 calls at a time and refuses the 17th. Eight processes would
//! like to make twice as many. Each holds some of the 16 by a lease, and about once a second it tells the store what
//! it needs, and hears what it has. With `--chaos` one process is killed, one is stopped for longer than its
//! lease lasts and then goes on as if nothing had been, and Redis is restarted empty. What was in flight is counted at
//! the provider.

mod members;
mod options;
mod provider;
mod run;
mod screen;
mod server;
mod worker;

use std::{io::Write as _, process::ExitCode};

use members::Launch;
use options::Options;
use run::{Report, run};
use screen::Screen;
use server::Server;
use tower_herd::store::MemoryStore;

fn main() -> ExitCode {
    let options = match Options::read(std::env::args_os()) {
        Ok(options) => options,
        Err(Ok(help)) => {
            std::io::stdout().write_all(help.as_bytes()).ok();
            return ExitCode::SUCCESS;
        }
        Err(Err(wrong)) => return fail(&wrong),
    };
    if options.worker {
        return worker::child();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("no runtime: {error}")),
    };
    match runtime.block_on(fleet(&options)) {
        Ok(code) => code,
        Err(wrong) => fail(&wrong),
    }
}

fn fail(wrong: &str) -> ExitCode {
    eprintln!("error: {wrong}");
    ExitCode::from(2)
}

async fn fleet(options: &Options) -> Result<ExitCode, String> {
    let server = match &options.redis {
        Some(redis) => Some(Server::find(redis).await?),
        None => None,
    };
    let launch = if server.is_some() { Launch::myself()? } else { Launch::Threads(MemoryStore::new()) };
    let screen = Screen::new(options.processes as usize, false);
    screen.print(&introduction(options));
    let report = run(options, &launch, server, &screen, signalled()).await?;
    for line in conclusion(&report) {
        screen.print(&line);
    }
    if report.stopped {
        return Ok(ExitCode::from(130));
    }
    Ok(if report.held() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn introduction(options: &Options) -> String {
    let Options { processes, ceiling, seconds, .. } = options;
    match options.redis.as_deref() {
        None => format!(
            "{processes} fleets in this process, on a store in memory, under a ceiling of {ceiling}, for {seconds} s."
        ),
        Some(redis) => format!(
            "{processes} processes under a ceiling of {ceiling}, for {seconds} s, on {}.\nRedis is new to them: until \
             it knows who else there is, for 4 s, it gives nothing out.",
            if redis == "own" { "a private redis-server" } else { "your Redis" }
        ),
    }
}

fn conclusion(report: &Report) -> [String; 3] {
    let counts = &report.counts;
    [
        format!(
            "\nmembers:  {} calls answered, {} not; {:.2} calls to the store a second and process",
            report.done, report.failed, report.lease_calls
        ),
        format!(
            "provider: {} calls came, {} refused; {:.0} % of the ceiling in use; in flight at most {} of {}",
            counts.calls,
            counts.refused,
            report.used * 100.0,
            counts.peak,
            counts.ceiling
        ),
        match (counts.peak.saturating_sub(counts.ceiling), report.held()) {
            (0, _) => "verdict:  the ceiling held".to_owned(),
            (over, true) => format!(
                "verdict:  {over} above the ceiling, within what is documented of a process that was stopped for longer \
                 than its lease: by no more than its {} slots",
                report.allowed
            ),
            (_, false) => format!(
                "verdict:  EXCEEDED: at some time {} more than the ceiling allows there (around the stop of a process, \
                 {} more than the ceiling are documented)",
                counts.excess, report.allowed
            ),
        },
    ]
}

/// Until Ctrl-C, or until the process is asked to end. Where signals cannot be caught they end it as usual, and its
/// children see that their input has ended.
async fn signalled() {
    let interrupt = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                () = interrupt => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    interrupt.await;
}
