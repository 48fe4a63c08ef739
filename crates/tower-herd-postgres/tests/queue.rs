//! The token on the job's own row: a queue of `FOR UPDATE SKIP LOCKED` built from the pieces of `queue`.
#![cfg(feature = "servers")]

mod support;

use futures_util::future::join_all;
use sqlx::{Executor, Postgres, Row};
use std::time::Duration;
use support::{Db, long};
use tower_herd::retry_token::Schedule;
use tower_herd_postgres::queue::QueueTokens;

const SECOND: Duration = Duration::from_secs(1);

fn schedule() -> Schedule {
    Schedule::new().growth(60 * SECOND, 2.0, 600 * SECOND).unwrap().jitter(0.0).unwrap()
}

struct Queue {
    db: Db,
    tokens: QueueTokens,
    folded: bool,
}

impl Queue {
    async fn new(name: &str, folded: bool) -> Self {
        let db = Db::new(name).await;
        let tokens = QueueTokens::new();
        db.run(
            "CREATE TABLE {s}.jobs (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'ready', attempts int NOT NULL
               DEFAULT 0, created_at timestamptz NOT NULL DEFAULT now(), payload text NOT NULL DEFAULT '')",
        )
        .await;
        // Twice: it adds only what is missing.
        for _ in 0..2 {
            db.run(&tokens.add_columns(&db.schema, "jobs").unwrap()).await;
        }
        db.run("CREATE INDEX due ON {s}.jobs (retry_not_before, id) WHERE state = 'ready'").await;
        Queue { db, tokens, folded }
    }

    fn claim_sql(&self, limit: &str, holder: &str) -> String {
        let granted = match self.folded {
            true => format!(", {}", self.tokens.granted("j", &schedule(), holder)),
            false => String::new(),
        };
        format!(
            "WITH next AS (
               SELECT id FROM {{s}}.jobs AS j WHERE j.state = 'ready' AND {due}
               ORDER BY j.retry_not_before, j.id LIMIT {limit} FOR UPDATE SKIP LOCKED)
             UPDATE {{s}}.jobs AS j SET state = 'running', attempts = j.attempts + 1 {granted}
             FROM next WHERE j.id = next.id RETURNING j.id",
            due = self.tokens.due("j"),
        )
    }

    async fn claim(&self, limit: i64, holder: i64) -> Vec<i64> {
        self.claim_with(&self.db.pool, limit, holder).await
    }

    async fn claim_with<'c>(
        &self,
        executor: impl Executor<'c, Database = Postgres>,
        limit: i64,
        holder: i64,
    ) -> Vec<i64> {
        let sql = self.claim_sql(&limit.to_string(), &holder.to_string());
        let rows = sqlx::raw_sql(self.db.sql(&sql)).fetch_all(executor).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Seconds from now until the job may run, and its streak.
    async fn token(&self, id: i64) -> (f64, i32) {
        let sql = format!(
            "SELECT extract(epoch FROM retry_not_before - clock_timestamp())::float8, retry_streak FROM {{s}}.jobs WHERE id = {id}"
        );
        let row = sqlx::raw_sql(self.db.sql(&sql)).fetch_one(&self.db.pool).await.unwrap();
        (row.get(0), row.get(1))
    }

    async fn jobs(&self, number: i64) {
        self.db.run(&format!("INSERT INTO {{s}}.jobs (id) SELECT generate_series(1, {number})")).await;
    }
}

/// The worker dies, and the reaper makes its job claimable again without a thought for the token, as one path
/// forgot elsewhere (qf-studio/pilot#4394: five agent runs in fifteen minutes). It is still not run early.
#[tokio::test]
async fn folded_every_way_back_into_the_queue_is_covered() {
    let queue = Queue::new("folded", true).await;
    queue.jobs(1).await;
    let mut last = 0.0;
    for streak in 1..=3 {
        assert_eq!(queue.claim(10, 7).await, [1]);
        let (wait, counted) = queue.token(1).await;
        assert_eq!(counted, streak);
        assert!(wait > 59.0 && wait > last, "{wait}");
        last = wait;
        queue.db.run("UPDATE {s}.jobs SET state = 'ready'").await;
        assert_eq!(queue.claim(10, 8).await, [0; 0]);
        queue.db.run("UPDATE {s}.jobs SET retry_not_before = now() WHERE id = 1").await;
    }
    // Attempts are those that ran; refusals count nothing.
    assert_eq!(queue.db.number("SELECT attempts::bigint FROM {s}.jobs").await, 3);
}

/// The delay counts from the failure and not from the job's creation (maxcountryman/underway#117: an old job had
/// no back-off at all).
#[tokio::test]
async fn filter_only_a_failure_closes_an_old_job_from_now_on() {
    let queue = Queue::new("filter", false).await;
    queue.jobs(2).await;
    queue.db.run("UPDATE {s}.jobs SET created_at = now() - interval '1 hour'").await;
    assert_eq!(queue.claim(1, 7).await, [1]);
    // Nothing is written by the claim.
    assert_eq!(queue.token(1).await.1, 0);
    let failed =
        format!("UPDATE {{s}}.jobs AS j SET state = 'ready', {}", queue.tokens.failed("j", &schedule()));
    assert_eq!(queue.db.run(&format!("{failed} WHERE j.id = 1")).await, 1);
    let (wait, streak) = queue.token(1).await;
    assert!(wait > 59.0 && wait <= 60.0, "{wait}");
    assert_eq!(streak, 1);
    assert_eq!(queue.claim(10, 7).await, [2]);
    // The reaper does the same, and counts on.
    queue.db.run("UPDATE {s}.jobs SET retry_not_before = now(), state = 'running' WHERE id = 1").await;
    assert_eq!(queue.db.run(&format!("{failed} WHERE j.id = 1 AND j.state = 'running'")).await, 1);
    let (wait, streak) = queue.token(1).await;
    assert!(wait > 119.0 && wait <= 120.0 && streak == 2, "{wait} {streak}");
    // The longest streak stays, and so does its wait.
    queue.db.run("UPDATE {s}.jobs SET retry_streak = 2147483647 WHERE id = 1").await;
    queue.db.run(&format!("{failed} WHERE j.id = 1")).await;
    let (wait, streak) = queue.token(1).await;
    assert!(wait > 599.0 && wait <= 600.0 && streak == i32::MAX, "{wait} {streak}");
}

#[tokio::test]
async fn an_older_holder_changes_no_row() {
    let queue = Queue::new("qfence", true).await;
    queue.jobs(1).await;
    queue.claim(1, 1).await;
    queue.db.run("UPDATE {s}.jobs SET state = 'ready', retry_not_before = now()").await;
    assert_eq!(queue.claim(1, 2).await, [1]);
    let say = async |what: &str, holder: i64| {
        let held = queue.tokens.held("j", &holder.to_string());
        queue.db.run(&format!("UPDATE {{s}}.jobs AS j SET {what} WHERE j.id = 1 AND {held}")).await
    };
    let (done, heartbeat) = (queue.tokens.cleared(), queue.tokens.put_off("j", 600 * SECOND));
    assert_eq!((say(&done, 1).await, say(&heartbeat, 1).await), (0, 0));
    assert_eq!(say(&heartbeat, 2).await, 1);
    assert!(queue.token(1).await.0 > 590.0);
    // Retry-After never shortens.
    assert_eq!(say(&queue.tokens.extended("j", "1.5"), 2).await, 1);
    assert!(queue.token(1).await.0 > 590.0);
    assert_eq!(queue.token(1).await.1, 2, "none of this is a run");
    assert_eq!(say(&done, 2).await, 1);
    assert_eq!(queue.token(1).await.1, 0);
    assert_eq!(queue.db.number("SELECT count(*) FROM {s}.jobs WHERE retry_not_before = 'epoch'").await, 1);
}

/// A queue that has a due time uses it, and says itself when the row is due next.
#[tokio::test]
async fn the_due_time_of_a_queue_is_its_token() {
    let db = Db::new("reuse").await;
    let tokens =
        QueueTokens::new().not_before("run at").unwrap().streak("fails").unwrap().holder("By").unwrap();
    db.run("CREATE TABLE {s}.cron (id int, \"run at\" timestamptz NOT NULL DEFAULT now() - interval '1 s')")
        .await;
    db.run(&tokens.add_columns(&db.schema, "cron").unwrap()).await;
    db.run("INSERT INTO {s}.cron VALUES (1)").await;
    let claim = format!(
        "UPDATE {{s}}.cron AS c SET {} WHERE {}",
        tokens.granted("c", &schedule(), "42"),
        tokens.due("c")
    );
    assert_eq!((db.run(&claim).await, db.run(&claim).await), (1, 0));
    let done =
        format!("UPDATE {{s}}.cron SET \"run at\" = '2001-01-01', {} WHERE \"By\" = 42", tokens.reset());
    assert_eq!(db.run(&done).await, 1);
    assert_eq!(db.run(&claim).await, 1);
    assert_eq!(db.number("SELECT fails::bigint FROM {s}.cron").await, 1);
}

/// `now()` stands still in a transaction (que-rb/que#409): a job that came due in a long one would not be seen,
/// and a window that is written in it would begin before it. (The report's 30 s are one here.)
#[tokio::test]
async fn a_long_transaction_sees_what_has_come_due_and_writes_the_time_it_is() {
    let queue = Queue::new("long", true).await;
    queue.jobs(1).await;
    queue.db.run("UPDATE {s}.jobs SET retry_not_before = clock_timestamp() + interval '500 ms'").await;
    let mut transaction = queue.db.pool.begin().await.unwrap();
    assert_eq!(queue.claim_with(&mut *transaction, 1, 7).await, [0; 0]);
    sqlx::raw_sql("SELECT pg_sleep(1)").execute(&mut *transaction).await.unwrap();
    assert_eq!(queue.claim_with(&mut *transaction, 1, 7).await, [1]);
    transaction.commit().await.unwrap();
    // From `now()` it would be a second less.
    assert!(queue.token(1).await.0 > 59.2, "{:?}", queue.token(1).await);
}

/// The plan's buffers for a poll that finds nothing, and whether its condition is one of the index.
async fn idle_poll(queue: &Queue, sql: &str) -> (u64, bool) {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}");
    let row = sqlx::raw_sql(queue.db.sql(&explain)).fetch_one(&queue.db.pool).await.unwrap();
    let plan: serde_json::Value = serde_json::from_str(&row.get_unchecked::<String, _>(0)).unwrap();
    let plan = &plan[0]["Plan"];
    let buffers = ["Shared Hit Blocks", "Shared Read Blocks"].map(|kind| plan[kind].as_u64().unwrap());
    let text = plan.to_string();
    let condition =
        text.split("\"Index Cond\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or("");
    (buffers.iter().sum(), condition.contains("retry_not_before"))
}

/// 200,000 jobs wait for their time, and nothing is due: the poll looks at the index and at nothing else.
#[tokio::test]
async fn an_idle_poll_reads_a_handful_of_pages() {
    let queue = Queue::new("idle", true).await;
    queue.jobs(200_000).await;
    queue
        .db
        .run("UPDATE {s}.jobs SET retry_not_before = now() + interval '1 h' + id * interval '1 ms'")
        .await;
    // What autovacuum does in time; the statement above left twice as many entries in the index.
    queue.db.run("VACUUM ANALYZE {s}.jobs").await;
    let claim = queue.claim_sql("10", "7");
    let (buffers, by_index) = idle_poll(&queue, &claim).await;
    assert!(by_index && buffers < 10, "{buffers} buffers");
    // The control: a clock that changes within the statement cannot be looked up.
    let wrong = claim.replace("statement_timestamp()", "clock_timestamp()");
    assert_ne!(wrong, claim);
    let (buffers, by_index) = idle_poll(&queue, &wrong).await;
    assert!(!by_index && buffers > 1000, "{buffers} buffers");
}

/// saurabhnanda/odd-jobs#115, QueueClassic/queue_classic#320, fazer-ai/agents#679: with `IN (SELECT ... LIMIT)`
/// more rows than the limit were claimed. With the statistics of an empty table, and plans of all kinds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_gets_no_more_than_its_limit() {
    let queue = Queue::new("limit", true).await;
    queue.db.run("ALTER TABLE {s}.jobs SET (autovacuum_enabled = off)").await;
    queue.db.run("ANALYZE {s}.jobs").await;
    let polls = if long() { 10_000 } else { 1_500 };
    queue.jobs(3 * polls).await;
    let kinds = [
        "",
        "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; ",
        "SET LOCAL enable_nestloop = off; ",
    ];
    let workers = (0..6).map(|worker| {
        let (queue, kind) = (&queue, kinds[worker % 3]);
        async move {
            let mut claimed = Vec::new();
            for _ in 0..polls / 6 {
                let sql = format!("{kind}{}", queue.claim_sql("3", "1"));
                let rows = sqlx::raw_sql(queue.db.sql(&sql)).fetch_all(&queue.db.pool).await.unwrap();
                assert!(rows.len() <= 3, "{}", rows.len());
                claimed.extend(rows.iter().map(|row| row.get::<i64, _>(0)));
            }
            claimed
        }
    });
    let mut all: Vec<i64> = join_all(workers).await.concat();
    let claimed = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), claimed, "a job was claimed twice");
    assert!(claimed as i64 > polls, "{claimed}");
}
