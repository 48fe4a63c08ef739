//! A plain queue of `FOR UPDATE SKIP LOCKED`, with the retry token folded into its own statements:
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run --example queue_sql
//! ```
//!
//! Three workers, one job that fails four times and nine that succeed. What is to be seen: nobody runs the failing
//! job before its time, whichever worker takes it up; a worker that dies in the middle leaves a job that is not
//! run early either; and the queue has not one statement more than it had.
//!
//! It works in a schema of its own, `herd_example_queue`, which it drops at the end.

use sqlx::{AssertSqlSafe, PgPool, Row, postgres::PgPoolOptions};
use std::{process::ExitCode, time::Duration};
use tokio::time::{Instant, sleep};
use tower_herd::{
    random::Seeds,
    retry_token::{Schedule, ScheduleError},
};
use tower_herd_postgres::queue::QueueTokens;

const TABLES: &str = "
DROP SCHEMA IF EXISTS herd_example_queue CASCADE;
CREATE SCHEMA herd_example_queue;
CREATE TABLE herd_example_queue.jobs (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  state text NOT NULL DEFAULT 'ready',
  attempts integer NOT NULL DEFAULT 0,
  -- A worker that has not said anything for so long is dead.
  seen_at timestamptz,
  payload text NOT NULL
)";
const INDEX: &str = "CREATE INDEX ON herd_example_queue.jobs (retry_not_before, id) WHERE state = 'ready'";

/// The statements of the queue. Nothing here but the token is new: `due` in the claim's filter, `granted` in its
/// `SET`, `held` in what a worker says about its job.
struct Statements {
    claim: String,
    succeed: String,
    fail: String,
    reap: &'static str,
}

impl Statements {
    fn new(tokens: &QueueTokens, schedule: &Schedule) -> Self {
        Statements {
            // $1: this worker's run, a number of its own.
            claim: format!(
                "WITH next AS (
                   SELECT id FROM herd_example_queue.jobs AS j WHERE j.state = 'ready' AND {due}
                   ORDER BY j.retry_not_before, j.id LIMIT 1 FOR UPDATE SKIP LOCKED)
                 UPDATE herd_example_queue.jobs AS j
                 SET state = 'running', attempts = j.attempts + 1, seen_at = clock_timestamp(), {granted}
                 FROM next WHERE j.id = next.id RETURNING j.id, j.attempts, j.payload",
                due = tokens.due("j"),
                granted = tokens.granted("j", schedule, "$1"),
            ),
            // The token goes with the row.
            succeed: format!(
                "DELETE FROM herd_example_queue.jobs AS j WHERE j.id = $1 AND {}",
                tokens.held("j", "$2")
            ),
            // The claim has closed the job already; what the failure adds is the server's own wait ($3, in
            // seconds), if it named one: `greatest` of it and of what is set, so it never shortens.
            fail: format!(
                "UPDATE herd_example_queue.jobs AS j SET state = 'ready', {} WHERE j.id = $1 AND {}",
                tokens.extended("j", "$3"),
                tokens.held("j", "$2")
            ),
            // It knows nothing of tokens, and needs not: the job of a dead worker is as closed as its claim left
            // it.
            reap: "UPDATE herd_example_queue.jobs SET state = 'ready'
                   WHERE state = 'running' AND seen_at < clock_timestamp() - interval '400 ms'",
        }
    }
}

/// The work. The dependency of `flaky` is down for the first four runs, and once it says how long to stay away.
async fn work(payload: &str, attempts: i32) -> Result<(), Option<Duration>> {
    sleep(Duration::from_millis(20)).await;
    match (payload, attempts) {
        ("flaky", 3) => Err(Some(Duration::from_secs(3))),
        ("flaky", ..=4) => Err(None),
        _ => Ok(()),
    }
}

async fn worker(
    name: char,
    pool: PgPool,
    statements: &Statements,
    begin: Instant,
) -> Result<(), sqlx::Error> {
    let mut runs = Seeds::from_entropy().session();
    loop {
        // One number a run: who was believed dead changes nothing when it comes back.
        let holder = runs.bits().cast_signed();
        let claim = sqlx::query(AssertSqlSafe(statements.claim.as_str())).bind(holder);
        let Some(job) = claim.fetch_optional(&pool).await? else {
            let left = sqlx::query("SELECT count(*) FROM herd_example_queue.jobs").fetch_one(&pool).await?;
            if left.get::<i64, _>(0) == 0 {
                return Ok(());
            }
            sleep(Duration::from_millis(25)).await;
            continue;
        };
        let (id, attempts, payload): (i64, i32, String) = (job.get(0), job.get(1), job.get(2));
        let at = begin.elapsed().as_secs_f64();
        if payload == "deadly" && attempts == 1 {
            println!("{at:6.2} s  worker {name}  job {id:2} {payload:6} run {attempts}: the worker dies");
            continue;
        }
        let said = match work(&payload, attempts).await {
            Ok(()) => {
                let done = sqlx::query(AssertSqlSafe(statements.succeed.as_str())).bind(id).bind(holder);
                done.execute(&pool).await?;
                "ok".to_owned()
            }
            Err(wait) => {
                let seconds = wait.unwrap_or_default().as_secs_f64();
                let failed = sqlx::query(AssertSqlSafe(statements.fail.as_str()));
                failed.bind(id).bind(holder).bind(seconds).execute(&pool).await?;
                match wait {
                    Some(wait) => format!("failed, and was told to stay away for {wait:?}"),
                    None => "failed".to_owned(),
                }
            }
        };
        println!("{at:6.2} s  worker {name}  job {id:2} {payload:6} run {attempts}: {said}");
    }
}

async fn reaper(pool: PgPool, statements: &Statements) -> Result<(), sqlx::Error> {
    loop {
        sleep(Duration::from_millis(100)).await;
        sqlx::query(statements.reap).execute(&pool).await?;
    }
}

async fn run(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPoolOptions::new().max_connections(8).connect(url).await?;
    let tokens = QueueTokens::new();
    let statements = Statements::new(&tokens, &schedule()?);
    sqlx::raw_sql(TABLES).execute(&pool).await?;
    sqlx::raw_sql(AssertSqlSafe(tokens.add_columns("herd_example_queue", "jobs")?)).execute(&pool).await?;
    sqlx::raw_sql(INDEX).execute(&pool).await?;
    let jobs = "INSERT INTO herd_example_queue.jobs (payload)
                SELECT CASE n WHEN 3 THEN 'flaky' WHEN 6 THEN 'deadly' ELSE 'easy' END FROM generate_series(1, 10) AS n";
    sqlx::query(jobs).execute(&pool).await?;

    let begin = Instant::now();
    let workers = ['a', 'b', 'c'].map(|name| worker(name, pool.clone(), &statements, begin));
    let workers = futures_util::future::try_join_all(workers);
    tokio::select! {
        biased;
        done = workers => drop(done?),
        reaped = reaper(pool.clone(), &statements) => reaped?,
    }
    sqlx::raw_sql("DROP SCHEMA herd_example_queue CASCADE").execute(&pool).await?;
    Ok(())
}

/// Short, so that the example is. The defaults are 2 s, doubling up to 10 min.
fn schedule() -> Result<Schedule, ScheduleError> {
    Schedule::new().growth(Duration::from_millis(500), 2.0, Duration::from_secs(60))
}

#[tokio::main]
async fn main() -> ExitCode {
    let Ok(url) = std::env::var("DATABASE_URL") else {
        eprintln!(
            "DATABASE_URL is not set. This example needs a PostgreSQL server, in which it makes and drops"
        );
        eprintln!("the schema herd_example_queue:");
        eprintln!("    DATABASE_URL=postgres://localhost/test cargo run --example queue_sql");
        return ExitCode::from(2);
    };
    match run(&url).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("queue_sql: {error}");
            ExitCode::FAILURE
        }
    }
}
