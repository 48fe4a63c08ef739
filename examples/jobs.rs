//! Three worker processes of apalis, one dependency that is down: the same three jobs without and with retry
//! tokens.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run --example jobs
//! ```
//!
//! The same cron trigger has fired in three agents, so there are three jobs about one thing. What they call
//! answers on a socket of this process, which counts. For eight seconds it says that it is down.
//!
//! | | |
//! |---|---|
//! | without | apalis fetches a failed job again at once: all attempts are used up in the first moment of the outage, and the jobs are lost |
//! | with | one of the three runs at a time, about 0.5, 1, 2 and 4 s after the one before; who is refused keeps its attempts; when the dependency is back all are done |
//!
//! The tokens are in the schema `herd_example_jobs`, which is dropped at the end; apalis' own tables (schema
//! `apalis`) stay, without the rows of this example.

use apalis::prelude::*;
use apalis_postgres::{Config, PostgresStorage};
use sqlx::{AssertSqlSafe, PgPool, Row, postgres::PgPoolOptions};
use std::{
    collections::VecDeque,
    io,
    net::Ipv4Addr,
    process::{ExitCode, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::{Instant, sleep},
};
use tower_herd::retry_token::{RetryTokenLayer, Schedule, Tokens};
use tower_herd_postgres::{PostgresTokens, apalis as adapter};

type Failed = Box<dyn std::error::Error + Send + Sync>;

const SCHEMA: &str = "herd_example_jobs";
const OUTAGE: Duration = Duration::from_secs(8);
const ATTEMPTS: usize = 8;
const AGENTS: [&str; 3] = ["a", "b", "c"];

/// A tenth of a usual one, so that the example is short.
fn schedule() -> Result<Schedule, Failed> {
    Ok(Schedule::new().growth(Duration::from_millis(500), 2.0, Duration::from_secs(60))?)
}

// ------------------------------------------------------------------------------------------- a worker

/// What a job does: asks the dependency.
async fn sync(port: u16) -> io::Result<()> {
    let mut answer = String::new();
    BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?).read_line(&mut answer).await?;
    match answer.trim() {
        "ok" => Ok(()),
        answer => Err(io::Error::other(answer.to_owned())),
    }
}

/// One process: works until its standard input ends, then says how often it was refused.
async fn worker(name: &str, queue: &str, port: u16, with: bool) -> Result<(), Failed> {
    let pool = PgPoolOptions::new().max_connections(5).connect(&std::env::var("DATABASE_URL")?).await?;
    let config = Config::default().queue(queue).heartbeat_interval(Duration::from_millis(500));
    let storage = PostgresStorage::<String>::new(&pool)
        .with_config(config)
        .poll_with_interval(Duration::from_millis(50));
    let builder = WorkerBuilder::new(format!("{queue}-{name}").as_str()).backend(storage);
    let handler = move |_: String| sync(port);

    let tokens = Tokens::new("jobs", PostgresTokens::in_schema(pool.clone(), SCHEMA)?);
    let layer = RetryTokenLayer::new(
        &tokens,
        // The same for all three: what the job is about, and not which trigger it came from.
        |job: &Task<String>| Some(job.args.clone()),
        adapter::attempt,
    )
    .schedule(schedule()?)
    .outcome(adapter::outcome)
    .defer(adapter::Requeue::new(pool));

    let stop = async {
        let mut rest = Vec::new();
        tokio::io::stdin().read_to_end(&mut rest).await.map(drop)
    };
    // The two workers have different types. A worker that stops when it is told to finishes what it has begun.
    match with {
        true => builder.layer(layer).build(handler).run_until(stop).await?,
        false => builder.build(handler).run_until(stop).await?,
    }
    println!("{}", tokens.counts().deferred);
    Ok(())
}

// ----------------------------------------------------------------------------------------- the dependency

/// Notes when it was called.
type Calls = Arc<Mutex<Vec<Instant>>>;

async fn dependency(socket: TcpListener, begin: Instant, calls: Calls) -> io::Result<()> {
    loop {
        let (mut caller, _) = socket.accept().await?;
        let now = Instant::now();
        calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(now);
        let answer: &[u8] = if now - begin < OUTAGE { b"down\n" } else { b"ok\n" };
        caller.write_all(answer).await.ok();
    }
}

/// The most calls in any stretch of this length.
fn peak(calls: &[Instant], length: Duration) -> usize {
    let (mut window, mut most) = (VecDeque::new(), 0);
    for call in calls {
        window.push_back(*call);
        while window.front().is_some_and(|first| *call - *first >= length) {
            window.pop_front();
        }
        most = most.max(window.len());
    }
    most
}

// -------------------------------------------------------------------------------------------------- a run

struct Outcome {
    begin: Instant,
    calls: Vec<Instant>,
    attempts: i64,
    refused: u64,
    done: i64,
    lost: i64,
    took: Duration,
}

fn spawn(agent: &str, queue: &str, port: u16, with: bool) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(["worker", agent, queue, &port.to_string(), if with { "with" } else { "without" }])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
}

async fn run(pool: &PgPool, with: bool) -> Result<Outcome, Failed> {
    let queue = format!("herd-example-{}-{with}", std::process::id());
    let mut storage = PostgresStorage::<String>::new(pool).with_config(Config::default().queue(&queue));
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = socket.local_addr()?.port();
    let workers: Vec<Child> =
        AGENTS.iter().map(|agent| spawn(agent, &queue, port, with)).collect::<Result<_, _>>()?;
    for _ in AGENTS {
        storage
            .push_task(TaskBuilder::new("sync:account-7".to_owned()).max_attempts(ATTEMPTS).build())
            .await?;
    }
    let (begin, calls) = (Instant::now(), Calls::default());
    let server = tokio::spawn(dependency(socket, begin, calls.clone()));

    let of_queue = format!(
        "SELECT coalesce(sum(attempts), 0), count(*) FILTER (WHERE status = 'Done'),
           count(*) FILTER (WHERE status = 'Failed' AND attempts >= max_attempts)
         FROM apalis.jobs WHERE job_type = '{queue}'"
    );
    let (attempts, done, lost) = loop {
        let row = sqlx::query(AssertSqlSafe(of_queue.as_str())).fetch_one(pool).await?;
        let (attempts, done, lost): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        if done + lost >= AGENTS.len() as i64 {
            break (attempts, done, lost);
        }
        sleep(Duration::from_millis(100)).await;
    };
    let took = begin.elapsed();
    server.abort();
    let mut refused = 0;
    for worker in workers {
        // Its standard input ends here.
        let output = worker.wait_with_output().await?;
        refused += String::from_utf8_lossy(&output.stdout).trim().parse::<u64>()?;
    }
    let rows = format!(
        "DELETE FROM apalis.jobs WHERE job_type = '{queue}'; DELETE FROM apalis.workers WHERE worker_type = '{queue}'"
    );
    sqlx::raw_sql(AssertSqlSafe(rows)).execute(pool).await?;
    let calls = std::mem::take(&mut *calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    Ok(Outcome { begin, calls, attempts, refused, done, lost, took })
}

async fn compare(url: &str) -> Result<(), Failed> {
    let pool = PgPoolOptions::new().max_connections(5).connect(url).await?;
    PostgresStorage::setup(&pool).await?;
    let drop_schema = format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE");
    sqlx::raw_sql(AssertSqlSafe(drop_schema.as_str())).execute(&pool).await?;
    tower_herd_postgres::migrate(&pool, SCHEMA).await?;

    println!(
        "three worker processes, three jobs about one thing, {ATTEMPTS} attempts each; what they call is down"
    );
    println!("for the first {} s\n", OUTAGE.as_secs());
    let mut outcomes = Vec::new();
    for with in [false, true] {
        let outcome = run(&pool, with).await?;
        let name = if with { "with retry tokens" } else { "without" };
        let at: Vec<String> =
            outcome.calls.iter().map(|at| format!("{:.1}", (*at - outcome.begin).as_secs_f64())).collect();
        println!("{name}: {:.1} s, with calls at {}", outcome.took.as_secs_f64(), at.join(" "));
        outcomes.push((name, outcome));
    }
    println!(
        "\n| | calls, peak of a minute | peak of a second | attempts counted | refused, no attempt | done | lost |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (name, of) in outcomes {
        let [minute, second] = [60, 1].map(|seconds| peak(&of.calls, Duration::from_secs(seconds)));
        println!(
            "| {name} | {minute} | {second} | {} | {} | {} | {} |",
            of.attempts, of.refused, of.done, of.lost
        );
    }
    sqlx::raw_sql(AssertSqlSafe(drop_schema)).execute(&pool).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match (arguments.as_slice(), std::env::var("DATABASE_URL")) {
        (_, Err(_)) => {
            eprintln!(
                "DATABASE_URL is not set. This example needs a PostgreSQL server with the extension hstore"
            );
            eprintln!("(Debian: in the package postgresql), and a role that may create schemas:");
            eprintln!("    DATABASE_URL=postgres://localhost/test cargo run --example jobs");
            return ExitCode::from(2);
        }
        (["worker", name, queue, port, with], Ok(_)) => match port.parse() {
            Ok(port) => worker(name, queue, port, *with == "with").await,
            Err(error) => Err(error.into()),
        },
        (_, Ok(url)) => compare(&url).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jobs: {error}");
            ExitCode::FAILURE
        }
    }
}
