//! What a retry token costs a queue: claim and finish of empty jobs, in paired rounds.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo bench -p tower-herd-postgres --bench tokens
//! WORKERS=3 ROUNDS=21 JOBS=1500     # the defaults
//! ```
//!
//! Each round runs every variant once, in an order that turns from round to round, and compares it with the plain
//! queue of the same round: the machine's moods meet both. Bars: folded 0.95 of the plain queue and at most 500
//! bytes of WAL a job more, filter only 0.98, neither a transaction more. It works in a schema of its own, which
//! it drops.

use sqlx::{AssertSqlSafe, PgPool, Row, postgres::PgPoolOptions};
use std::{env, process::ExitCode, sync::Arc};
use tokio::time::Instant;
use tower_herd::retry_token::{Claim, RetryTokens, Schedule};
use tower_herd_postgres::{PostgresTokens, queue::QueueTokens};

const SCHEMA: &str = "herd_bench";

struct Variant {
    name: &'static str,
    /// Whether the table has the three columns.
    columns: bool,
    claim: String,
    /// Between claim and finish.
    separate: Option<String>,
    /// Claims and clears in a table of their own.
    own_table: bool,
    finish: String,
}

fn variants() -> Vec<Variant> {
    let (tokens, schedule) = (QueueTokens::new(), Schedule::new());
    let claim = |filter: &str, set: &str| {
        format!(
            "WITH next AS (
               SELECT id FROM {SCHEMA}.jobs AS j
               WHERE j.state = 'ready' AND j.run_at <= statement_timestamp() {filter}
               ORDER BY j.run_at, j.id LIMIT 1 FOR UPDATE SKIP LOCKED)
             UPDATE {SCHEMA}.jobs AS j SET state = 'running', attempts = j.attempts + 1, locked_by = $1 {set}
             FROM next WHERE j.id = next.id RETURNING j.id, j.payload"
        )
    };
    let finish =
        |set: &str| format!("UPDATE {SCHEMA}.jobs SET state = 'done' {set} WHERE id = $1 AND locked_by = $2");
    let due = format!("AND {}", tokens.due("j"));
    let granted = format!(", {}", tokens.granted("j", &schedule, "$1"));
    let cleared = format!(", {}", tokens.cleared());
    let (plain, done) = (claim("", ""), finish(""));
    let separate =
        format!("UPDATE {SCHEMA}.jobs AS j SET {} WHERE j.id = $2", tokens.granted("j", &schedule, "$1"));
    vec![
        Variant {
            name: "plain",
            columns: false,
            claim: plain.clone(),
            separate: None,
            own_table: false,
            finish: done.clone(),
        },
        Variant {
            name: "folded",
            columns: true,
            claim: claim(&due, &granted),
            separate: None,
            own_table: false,
            finish: finish(&cleared),
        },
        Variant {
            name: "filter only",
            columns: true,
            claim: claim(&due, ""),
            separate: None,
            own_table: false,
            finish: done.clone(),
        },
        Variant {
            name: "separate UPDATE",
            columns: true,
            claim: claim(&due, ""),
            separate: Some(separate),
            own_table: false,
            finish: finish(&cleared),
        },
        Variant {
            name: "own table",
            columns: false,
            claim: plain,
            separate: None,
            own_table: true,
            finish: done,
        },
    ]
}

struct Measured {
    per_second: f64,
    wal: f64,
    transactions: f64,
}

fn setting(name: &str, default: usize) -> usize {
    env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

async fn run(pool: &PgPool, sql: &str) -> sqlx::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop)
}

/// Bytes of WAL and transactions so far.
async fn counters(pool: &PgPool) -> sqlx::Result<(f64, f64)> {
    let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8, pg_current_xact_id()::text::float8";
    let row = sqlx::raw_sql(sql).fetch_one(pool).await?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}

async fn measure(
    pool: &PgPool,
    variant: &Arc<Variant>,
    workers: usize,
    jobs: usize,
) -> sqlx::Result<Measured> {
    run(
        pool,
        &format!(
            "DROP TABLE IF EXISTS {SCHEMA}.jobs;
             CREATE TABLE {SCHEMA}.jobs (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'ready', attempts int NOT NULL
               DEFAULT 0, run_at timestamptz NOT NULL DEFAULT now(), locked_by bigint, payload text NOT NULL)"
        ),
    )
    .await?;
    if variant.columns {
        let columns = QueueTokens::new().add_columns(SCHEMA, "jobs");
        run(pool, &columns.map_err(|error| sqlx::Error::Configuration(error.into()))?).await?;
    }
    run(
        pool,
        &format!(
            "INSERT INTO {SCHEMA}.jobs (id, payload) SELECT n, repeat('x', 100) FROM generate_series(1, {jobs}) AS n;
             CREATE INDEX ON {SCHEMA}.jobs (run_at, id) WHERE state = 'ready'; ANALYZE {SCHEMA}.jobs; CHECKPOINT"
        ),
    )
    .await?;
    let (wal, transactions) = counters(pool).await?;
    let begin = Instant::now();
    let tasks: Vec<_> = (0..workers)
        .map(|worker| tokio::spawn(work(pool.clone(), variant.clone(), i64::try_from(worker).unwrap_or(0))))
        .collect();
    for task in tasks {
        task.await.map_err(|error| sqlx::Error::Configuration(error.into()))??;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let after = counters(pool).await?;
    let per_job = |count: f64| count / jobs as f64;
    Ok(Measured {
        per_second: jobs as f64 / seconds,
        wal: per_job(after.0 - wal),
        // The second look is one itself.
        transactions: per_job(after.1 - transactions - 1.0),
    })
}

async fn work(pool: PgPool, variant: Arc<Variant>, worker: i64) -> sqlx::Result<()> {
    let tokens = PostgresTokens::in_schema(pool.clone(), SCHEMA);
    let tokens = tokens.map_err(|error| sqlx::Error::Configuration(error.into()))?;
    let mut connection = pool.acquire().await?;
    loop {
        let claim = sqlx::query(AssertSqlSafe(variant.claim.as_str())).bind(worker);
        let Some(job) = claim.fetch_optional(&mut *connection).await? else { return Ok(()) };
        let id: i64 = job.try_get(0)?;
        if let Some(separate) = &variant.separate {
            sqlx::query(AssertSqlSafe(separate.as_str()))
                .bind(worker)
                .bind(id)
                .execute(&mut *connection)
                .await?;
        }
        let mut held = None;
        if variant.own_table {
            let key = format!("job {id}");
            match tokens
                .claim(&key, &Schedule::new())
                .await
                .map_err(|error| sqlx::Error::Configuration(error.into()))?
            {
                Claim::Granted(grant) => held = Some((key, grant.holder)),
                Claim::NotBefore(_) => {}
            }
        }
        sqlx::query(AssertSqlSafe(variant.finish.as_str()))
            .bind(id)
            .bind(worker)
            .execute(&mut *connection)
            .await?;
        if let Some((key, holder)) = held {
            tokens.clear(&key, holder).await.map_err(|error| sqlx::Error::Configuration(error.into()))?;
        }
    }
}

/// The quartiles.
fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| {
        let at = (sorted.len().saturating_sub(1)) as f64 * f64::from(quarter) / 4.0;
        let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        low + (high - low) * at.fract()
    })
}

async fn bench(url: &str) -> sqlx::Result<bool> {
    let (workers, rounds, jobs) = (setting("WORKERS", 3), setting("ROUNDS", 21), setting("JOBS", 1500));
    // Two connections a worker: the table of its own is asked through the pool.
    let connections = u32::try_from(2 * workers + 1).unwrap_or(64);
    let pool =
        PgPoolOptions::new().max_connections(connections).test_before_acquire(false).connect(url).await?;
    run(&pool, &format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")).await?;
    tower_herd_postgres::migrate(&pool, SCHEMA)
        .await
        .map_err(|error| sqlx::Error::Configuration(error.into()))?;
    let about = "SELECT version(), current_setting('fsync'), current_setting('synchronous_commit')";
    let about = sqlx::raw_sql(about).fetch_one(&pool).await?;
    let [version, fsync, sync]: [String; 3] = [about.try_get(0)?, about.try_get(1)?, about.try_get(2)?];
    println!("{}", version.split(" on ").next().unwrap_or_default());
    println!(
        "fsync {fsync}, synchronous_commit {sync}; {workers} workers, {rounds} rounds of {jobs} empty jobs\n"
    );

    let variants: Vec<_> = variants().into_iter().map(Arc::new).collect();
    let mut all: Vec<Vec<Measured>> = variants.iter().map(|_| Vec::new()).collect();
    // The first round warms up.
    for round in 0..=rounds {
        for turn in 0..variants.len() {
            let at = (turn + round) % variants.len();
            let measured = measure(&pool, &variants[at], workers, jobs).await?;
            if round > 0 {
                all[at].push(measured);
            }
        }
    }
    run(&pool, &format!("DROP SCHEMA {SCHEMA} CASCADE")).await?;

    println!(
        "| variant | of the plain queue: median [quartiles] | jobs/s | WAL a job | transactions a job |"
    );
    println!("|---|---|---|---|---|");
    let mut kept = true;
    let median =
        |of: &[Measured], what: fn(&Measured) -> f64| quartiles(&of.iter().map(what).collect::<Vec<_>>())[1];
    let plain = (median(&all[0], |it| it.wal), median(&all[0], |it| it.transactions));
    for (variant, measured) in variants.iter().zip(&all) {
        let ratios: Vec<f64> =
            measured.iter().zip(&all[0]).map(|(this, plain)| this.per_second / plain.per_second).collect();
        let [low, middle, high] = quartiles(&ratios);
        let (wal, transactions) = (median(measured, |it| it.wal), median(measured, |it| it.transactions));
        println!(
            "| {} | {middle:.3} [{low:.3}, {high:.3}] | {:.0} | {wal:.0} B ({:+.0}) | {transactions:.2} |",
            variant.name,
            median(measured, |it| it.per_second),
            wal - plain.0,
        );
        let bar = match variant.name {
            "folded" => 0.95,
            "filter only" => 0.98,
            _ => continue,
        };
        kept &= middle >= bar && wal - plain.0 <= 500.0 && transactions - plain.1 < 0.01;
    }
    println!("\nbars {}", if kept { "kept" } else { "MISSED" });
    Ok(kept)
}

fn main() -> ExitCode {
    // `cargo test --benches` builds and starts it without this.
    if !env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let Ok(url) = env::var("DATABASE_URL") else {
        eprintln!(
            "DATABASE_URL is not set: the bench needs a PostgreSQL server, in which it makes and drops the"
        );
        eprintln!("schema {SCHEMA}, and the right to CHECKPOINT there");
        return ExitCode::from(2);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(sqlx::Error::Io).and_then(|runtime| runtime.block_on(bench(&url))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("tokens: {error}");
            ExitCode::FAILURE
        }
    }
}
