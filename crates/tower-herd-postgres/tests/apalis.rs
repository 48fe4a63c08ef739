//! apalis-postgres, with real workers: what becomes of the rows of its table.
//!
//! joshrotenberg/tower-resilience#442 and its pull request 444 put breakers and bulkheads around the same workers;
//! a layer that rejects strands its jobs there, as the controls show here.
#![cfg(all(feature = "servers", feature = "apalis"))]

mod support;

use ::apalis::{layers::WorkerBuilderExt, prelude::*};
use apalis_core::{error::RetryAfterError, task::Task};
use apalis_postgres::{Config, PostgresStorage};
use sqlx::{AssertSqlSafe, PgPool, Row};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use support::{Db, database_url, pool, unique};
use tokio::time::{Instant, sleep};
use tower_herd::retry_token::{
    Claim, NoDefer, RetryTokenLayer, RetryTokens, Schedule, TokenSettings, Tokens,
};
use tower_herd_postgres::{PostgresTokens, apalis};
use tower_layer::Layer;
use tower_service::Service;

const MS: Duration = Duration::from_millis(1);

/// The table of the jobs, and a queue and a store of this test's own.
struct Jobs {
    db: Db,
    pool: PgPool,
    queue: String,
    tokens: Tokens<PostgresTokens>,
    runs: Arc<Mutex<Vec<Instant>>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Job {
    status: String,
    attempts: i32,
    done_at: bool,
    due_in: f64,
}

impl Jobs {
    async fn new(name: &str) -> Self {
        let db = Db::new(name).await;
        let pool = pool(database_url().parse().unwrap(), 10).await;
        PostgresStorage::setup(&pool).await.unwrap();
        let settings = TokenSettings::new().min_wait(200 * MS).seed(support::seed());
        let tokens = Tokens::with("jobs", db.tokens.clone(), settings).unwrap();
        Jobs { db, pool, queue: unique(name), tokens, runs: Arc::default() }
    }

    fn storage(&self) -> PostgresStorage<String> {
        let config =
            Config::default().queue(&self.queue).heartbeat_interval(200 * MS).missed_heartbeats(1000);
        PostgresStorage::new(&self.pool).with_config(config)
    }

    async fn push(&self, key: &str, max_attempts: usize) {
        let task = TaskBuilder::new(key.to_owned()).max_attempts(max_attempts).build();
        self.storage().push_task(task).await.unwrap();
    }

    async fn row(&self) -> Job {
        let sql = format!(
            "SELECT status, attempts, done_at IS NOT NULL, extract(epoch FROM run_at - clock_timestamp())::float8
             FROM apalis.jobs WHERE job_type = '{}'",
            self.queue
        );
        let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(&self.pool).await.unwrap();
        Job { status: row.get(0), attempts: row.get(1), done_at: row.get(2), due_in: row.get(3) }
    }

    /// Waits until the row is as it is to become; the runner ends a test that hangs.
    async fn until(&self, what: impl Fn(&Job) -> bool) -> Job {
        loop {
            let row = self.row().await;
            if what(&row) {
                return row;
            }
            sleep(10 * MS).await;
        }
    }

    fn layer(&self, schedule: Schedule) -> RetryTokenLayer<PostgresTokens, Key, Attempt> {
        let key: Key = |task| Some(task.args.clone());
        RetryTokenLayer::new(&self.tokens, key, apalis::attempt as Attempt).schedule(schedule)
    }

    /// A handler that notes its runs, and does what `result` says of the number of this one.
    fn handler<F, E>(
        &self,
        result: F,
    ) -> impl Fn(String) -> Running<E> + Clone + Send + Sync + 'static + use<F, E>
    where
        F: Fn(usize) -> Result<(), Option<E>> + Clone + Send + Sync + 'static,
        E: Send + 'static,
    {
        let runs = self.runs.clone();
        move |_| {
            let (runs, result) = (runs.clone(), result.clone());
            Box::pin(async move {
                let number = {
                    let mut runs = runs.lock().unwrap();
                    runs.push(Instant::now());
                    runs.len()
                };
                match result(number) {
                    Ok(()) => Ok(()),
                    Err(Some(error)) => Err(error),
                    Err(None) => std::future::pending().await,
                }
            })
        }
    }

    fn gaps(&self) -> Vec<Duration> {
        let runs = self.runs.lock().unwrap();
        runs.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

type Key = fn(&Task<String>) -> Option<String>;
type Attempt = fn(&Task<String>) -> u32;
type Running<E> = std::pin::Pin<Box<dyn Future<Output = Result<(), E>> + Send>>;

fn flat(window: Duration) -> Schedule {
    Schedule::new().growth(window, 1.0, window).unwrap().jitter(0.0).unwrap()
}

fn bad() -> std::io::Error {
    std::io::Error::other("the dependency is down")
}

/// Runs a worker beside a check of the table, and stops with the check.
macro_rules! while_worker {
    ($worker:expr, $check:expr) => {
        tokio::select! {
            biased;
            ended = $worker.run() => panic!("the worker has ended: {ended:?}"),
            checked = $check => checked,
        }
    };
}

/// Somebody else has just run what this job stands for. It is refused until its key opens, no attempt is counted,
/// and it is neither stranded nor spun.
#[tokio::test]
async fn a_refusal_comes_back_after_its_wait_and_costs_no_attempt() {
    let jobs = Jobs::new("ap_refused").await;
    let claim = jobs.db.tokens.claim("sync", &flat(1500 * MS)).await.unwrap();
    assert!(matches!(claim, Claim::Granted(_)));
    jobs.push("sync", 1).await;
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(flat(1500 * MS)).defer(apalis::Requeue::new(jobs.pool.clone())))
        .build(jobs.handler(|_| Ok::<(), Option<std::io::Error>>(())));
    let began = Instant::now();
    while_worker!(worker, async {
        let row = jobs.until(|row| row.done_at).await;
        assert_eq!((row.status.as_str(), row.attempts), ("Pending", 0));
        assert!(row.due_in > 0.1, "{row:?}");
        // With a single attempt allowed it still runs: none was used up.
        let row = jobs.until(|row| row.status == "Done").await;
        assert_eq!(row.attempts, 1);
    });
    assert!(began.elapsed() >= 1400 * MS);
    // In so long a time it was fetched a few times, and not as often as it was polled.
    let counts = jobs.tokens.counts();
    assert!((1..=8).contains(&counts.deferred), "{counts:?}");
    assert_eq!((counts.granted, jobs.runs.lock().unwrap().len()), (1, 1));
}

/// The control: without the adapter the refused job stays where no worker looks.
#[tokio::test]
async fn without_the_adapter_a_refusal_is_stranded() {
    let jobs = Jobs::new("ap_stranded").await;
    jobs.db.tokens.claim("sync", &flat(300 * MS)).await.unwrap();
    jobs.push("sync", 5).await;
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(flat(300 * MS)).defer(NoDefer))
        .build(jobs.handler(|_| Ok::<(), Option<std::io::Error>>(())));
    while_worker!(worker, async {
        jobs.until(|row| row.done_at).await;
        sleep(1000 * MS).await;
        let row = jobs.row().await;
        assert_eq!((row.status.as_str(), row.attempts), ("Queued", 0), "apalis fetches it by itself now?");
    });
    assert_eq!(jobs.runs.lock().unwrap().len(), 0);
}

/// A timeout further in drops the run before apalis knows how it ended. It is a failure, and counts as one.
#[tokio::test]
async fn a_timeout_is_a_failure_and_not_stranded() {
    let jobs = Jobs::new("ap_timeout").await;
    jobs.push("slow", 5).await;
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(flat(400 * MS)).defer(apalis::Requeue::new(jobs.pool.clone())))
        .timeout(100 * MS)
        .build(jobs.handler(|run| if run == 1 { Err(None::<std::io::Error>) } else { Ok(()) }));
    while_worker!(worker, async {
        let row = jobs.until(|row| row.done_at).await;
        assert_eq!((row.status.as_str(), row.attempts), ("Failed", 1));
        let row = jobs.until(|row| row.status == "Done").await;
        assert_eq!(row.attempts, 2);
    });
    assert!(jobs.gaps()[0] >= 390 * MS, "{:?}", jobs.gaps());
}

/// Each failure comes back when its key opens, not earlier, and not more often than it may
/// (apalis-dev/apalis#503, #554: endless retries, and attempts of a retry layer that were not stored).
#[tokio::test]
async fn failures_come_back_when_their_key_opens_and_end() {
    let jobs = Jobs::new("ap_failing").await;
    jobs.push("bad", 4).await;
    let schedule = Schedule::new().growth(100 * MS, 2.0, 10_000 * MS).unwrap().jitter(0.0).unwrap();
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(schedule).defer(apalis::Requeue::new(jobs.pool.clone())))
        .build(jobs.handler(|_| Err::<(), _>(Some(bad()))));
    while_worker!(worker, async {
        let row = jobs.until(|row| row.attempts == 4).await;
        assert_eq!(row.status, "Failed");
        // Longer than its key is closed: nobody runs it a fifth time.
        sleep(1000 * MS).await;
        assert_eq!(jobs.row().await.attempts, 4);
    });
    let gaps = jobs.gaps();
    assert_eq!(gaps.len(), 3);
    for (gap, least) in gaps.iter().zip([100, 200, 400]) {
        assert!(*gap >= least * MS * 98 / 100, "{gaps:?}");
    }
    // The adapter has put the job to the right time: hardly a claim came early.
    let counts = jobs.tokens.counts();
    assert_eq!(counts.granted, 4);
    assert!(counts.deferred <= 3, "{counts:?}");
    assert_eq!(jobs.db.tokens.peek("bad").await.unwrap().unwrap().streak, 4);
}

/// apalis' own way to ask for a wait: it, and the number of attempts, are kept.
#[tokio::test]
async fn a_retry_after_error_waits_and_ends() {
    let jobs = Jobs::new("ap_after").await;
    jobs.push("busy", 2).await;
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(
            jobs.layer(flat(50 * MS)).outcome(apalis::outcome).defer(apalis::Requeue::new(jobs.pool.clone())),
        )
        .build(jobs.handler(|_| Err::<(), _>(Some(RetryAfterError::new(bad(), 700 * MS)))));
    while_worker!(worker, async {
        let row = jobs.until(|row| row.attempts >= 1 && row.done_at).await;
        assert!(row.due_in > 0.1 || row.attempts > 1, "{row:?}");
        jobs.until(|row| row.attempts == 2).await;
        sleep(1000 * MS).await;
    });
    let row = jobs.row().await;
    assert_eq!((row.status.as_str(), row.attempts), ("Failed", 2));
    let gaps = jobs.gaps();
    assert!(gaps.len() == 1 && gaps[0] >= 690 * MS, "{gaps:?}");
}

/// A success leaves no token.
#[tokio::test]
async fn after_a_success_the_key_is_open() {
    let jobs = Jobs::new("ap_success").await;
    jobs.push("good", 5).await;
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(flat(60_000 * MS)).defer(apalis::Requeue::new(jobs.pool.clone())))
        .build(jobs.handler(|_| Ok::<(), Option<std::io::Error>>(())));
    while_worker!(worker, jobs.until(|row| row.status == "Done"));
    assert_eq!(jobs.db.tokens.peek("good").await.unwrap(), None);
}

/// A job that another worker has taken over, since this one was believed dead, is not touched.
#[tokio::test]
async fn a_job_of_another_worker_is_left_alone() {
    let jobs = Jobs::new("ap_taken").await;
    jobs.push("bad", 5).await;
    let (pool, queue) = (jobs.pool.clone(), jobs.queue.clone());
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(jobs.layer(flat(60_000 * MS)).defer(apalis::Requeue::new(jobs.pool.clone())))
        .build(move |_: String| {
            let (pool, queue) = (pool.clone(), queue.clone());
            async move {
                let taken = format!("UPDATE apalis.jobs SET lock_by = NULL WHERE job_type = '{queue}'");
                sqlx::raw_sql(AssertSqlSafe(taken)).execute(&pool).await.unwrap();
                Err::<(), _>(bad())
            }
        });
    while_worker!(worker, async {
        while jobs.db.tokens.peek("bad").await.unwrap().is_none() {
            sleep(10 * MS).await;
        }
        sleep(500 * MS).await;
    });
    assert!(jobs.row().await.due_in < 0.0);
}

/// The layer that is added first is the outermost, whatever the documentation of the builder says: the token has
/// to be.
#[tokio::test]
async fn the_first_layer_is_the_outermost() {
    #[derive(Clone)]
    struct Note<S>(S, &'static str, Arc<Mutex<Vec<&'static str>>>);
    impl<S> Layer<S> for Note<()> {
        type Service = Note<S>;
        fn layer(&self, service: S) -> Note<S> {
            Note(service, self.1, self.2.clone())
        }
    }
    impl<S: Service<R>, R> Service<R> for Note<S> {
        type Response = S::Response;
        type Error = S::Error;
        type Future = S::Future;
        fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
            self.0.poll_ready(cx)
        }
        fn call(&mut self, request: R) -> S::Future {
            self.2.lock().unwrap().push(self.1);
            self.0.call(request)
        }
    }
    let jobs = Jobs::new("ap_order").await;
    jobs.push("any", 1).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = |name| Note((), name, seen.clone());
    let worker = WorkerBuilder::new(unique("w").as_str())
        .backend(jobs.storage().poll_with_interval(20 * MS))
        .layer(note("first"))
        .layer(note("second"))
        .build(jobs.handler(|_| Ok::<(), Option<std::io::Error>>(())));
    while_worker!(worker, jobs.until(|row| row.status == "Done"));
    assert_eq!(*seen.lock().unwrap(), ["first", "second"]);
}
