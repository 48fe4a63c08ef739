//! The store against a real server: who is granted, who is told what, and what a stale holder can do.
#![cfg(feature = "servers")]

mod support;

use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use std::{
    convert::Infallible,
    time::{Duration, SystemTime},
};
use support::{Db, long, seed, unique};
use tower_herd::retry_token::{Claim, Grant, HolderId, RetryTokens, Schedule, Token, Wait, WaitCause};
use tower_herd_postgres::{Error, PostgresTokens};
use tower_herd_sim::tokens::{Race, check, fresh_keys, race};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A window that is always the same.
fn window(length: Duration) -> Schedule {
    Schedule::new().growth(length, 1.0, length).unwrap().jitter(0.0).unwrap()
}

fn granted(claim: Claim) -> Grant {
    match claim {
        Claim::Granted(grant) => grant,
        Claim::NotBefore(wait) => panic!("{wait:?}"),
    }
}

fn refused(claim: Claim) -> Wait {
    match claim {
        Claim::NotBefore(wait) => wait,
        Claim::Granted(grant) => panic!("{grant:?}"),
    }
}

// ---------------------------------------------------------------------------------- the negative controls

/// What everybody writes first: look, then write. With the process's own clock, or the database's.
#[derive(Clone)]
struct LooksThenWrites {
    pool: sqlx::PgPool,
    schema: String,
    /// By how much this process's clock is wrong; None: asks the database for the time.
    clock: Option<f64>,
}

impl LooksThenWrites {
    fn now(&self) -> String {
        match self.clock {
            None => "clock_timestamp()".into(),
            Some(skew) => {
                #[expect(clippy::disallowed_methods, reason = "this is the mistake")]
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
                format!("to_timestamp({})", now + skew)
            }
        }
    }
}

impl RetryTokens for LooksThenWrites {
    type Error = Infallible;
    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Infallible> {
        let (table, now) = (format!("\"{}\".retry_token", self.schema), self.now());
        let sql = format!(
            "SELECT extract(epoch FROM not_before - {now})::float8 FROM {table} WHERE key = '{key}' AND not_before > {now}"
        );
        if let Some(row) = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(&self.pool).await.unwrap() {
            let wait = Duration::try_from_secs_f64(row.get(0)).unwrap().max(MS / 1000).min(schedule.cap());
            return Ok(Claim::NotBefore(Wait { wait, streak: 1, cause: WaitCause::Token }));
        }
        let wait = schedule.base().as_secs_f64();
        let sql = format!(
            "INSERT INTO {table} AS t VALUES ('{key}', {now} + make_interval(secs => {wait}), 1, 1)
             ON CONFLICT (key) DO UPDATE SET not_before = excluded.not_before, streak = t.streak + 1"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
        Ok(Claim::Granted(Grant { holder: HolderId::from(1), next_in: schedule.base(), streak: 1 }))
    }
    async fn extend(&self, _: &str, _: HolderId, _: Duration) -> Result<bool, Infallible> {
        Ok(false)
    }
    async fn clear(&self, _: &str, _: HolderId) -> Result<bool, Infallible> {
        Ok(false)
    }
    async fn peek(&self, _: &str) -> Result<Option<Token>, Infallible> {
        Ok(None)
    }
    async fn sweep(&self, _: Duration, _: u32) -> Result<u64, Infallible> {
        Ok(0)
    }
}

// ------------------------------------------------------------------------------------------------- races

/// What every store of the project must do, the races among them: of those who come together for a fresh key one
/// is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_does_what_a_store_must() {
    let db = Db::with("contract", 20, |options| options).await;
    check(&db.tokens, "check").await.assert_kept();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_time_a_hundred_callers_get_the_possible_grants_and_no_more() {
    let db = Db::with("hundred", 100, |options| options).await;
    db.watch().await;
    let raced = race(&db.tokens, "hundred", Race::default()).await;
    let (grants, gap) = db.gaps("hundred:race", "not_before").await;
    println!("{} of {} grants, {} claims", raced.grants, raced.possible, raced.claims);
    println!("shortest gap {:?}, by the database's clock {gap:?}", raced.min_gap);
    raced.assert_kept();
    assert_eq!(usize::try_from(grants).unwrap(), raced.grants);
    assert!(gap >= Race::default().window * 98 / 100, "{gap:?}");
    // A machine that is busy with other things misses a window; alone it misses none.
    if long() {
        raced.assert_exact();
    }
}

/// The tests above can fail: a store that looks and then writes does not pass them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looking_and_then_writing_fails_both_races() {
    let db = Db::with("looks", 50, |options| options).await;
    let wrong = LooksThenWrites { pool: db.pool.clone(), schema: db.schema.clone(), clock: None };
    let raced = race(&wrong, "looks", Race { length: SECOND, ..Race::default() }).await;
    println!("{} of {} grants", raced.grants, raced.possible);
    assert!(raced.report.findings.iter().any(|finding| finding.contains("two grants within")), "{raced:?}");
    let fresh = fresh_keys(&wrong, "looks", 20, 50).await;
    assert!(fresh.findings.iter().any(|finding| finding.contains("grants of a fresh key")), "{fresh}");
}

// ----------------------------------------------------------------------------------------- who loses, and why

/// Another transaction holds the row, and commits a grant that the waiting claim's snapshot does not hold. The
/// claim sees no row at all, asks once more, and is told the real wait.
#[tokio::test]
async fn who_loses_to_a_grant_it_could_not_see_asks_again() {
    let db = Db::new("unseen").await;
    let schedule = window(60 * SECOND);
    for (key, before) in [("new", None), ("old", Some(SECOND))] {
        if let Some(ago) = before {
            let old = ago.as_secs_f64();
            db.run(&format!(
                "INSERT INTO {{s}}.retry_token VALUES ('{key}', now() - make_interval(secs => {old}), 4, 1)"
            ))
            .await;
        }
        let mut other = PgConnection::connect_with(&db.options).await.unwrap();
        let mut transaction = other.begin().await.unwrap();
        let grant = format!(
            "INSERT INTO {{s}}.retry_token AS t VALUES ('{key}', now() + interval '30 s', 1, 2)
             ON CONFLICT (key) DO UPDATE SET not_before = excluded.not_before, streak = t.streak + 1"
        );
        sqlx::raw_sql(db.sql(&grant)).execute(&mut *transaction).await.unwrap();
        let claim = tokio::spawn({
            let tokens = db.tokens.clone();
            async move { tokens.claim(key, &schedule).await }
        });
        until_somebody_waits_for_a_lock(&db, 1).await;
        transaction.commit().await.unwrap();
        let wait = refused(claim.await.unwrap().unwrap());
        assert!(wait.wait > 20 * SECOND && wait.wait <= 30 * SECOND, "{wait:?}");
        assert_eq!(wait.streak, if before.is_some() { 5 } else { 1 });
    }
}

async fn until_somebody_waits_for_a_lock(db: &Db, number: i64) {
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{}%'
         AND pid <> pg_backend_pid()",
        db.schema
    );
    while db.number(&waiting).await < number {
        tokio::time::sleep(5 * MS).await;
    }
}

/// It asks once more and not for ever: a table that swallows every row is asked twice.
#[tokio::test]
async fn no_row_twice_is_a_short_wait() {
    let db = Db::new("swallow").await;
    db.run(
        "CREATE SEQUENCE {s}.asked;
         CREATE FUNCTION {s}.swallow() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN PERFORM nextval('{s}.asked'); RETURN NULL; END $$;
         CREATE TRIGGER swallow BEFORE INSERT ON {s}.retry_token FOR EACH ROW EXECUTE FUNCTION {s}.swallow()",
    )
    .await;
    let wait = refused(db.tokens.claim("key", &Schedule::new()).await.unwrap());
    assert_eq!((wait.wait, wait.cause), (SECOND, WaitCause::Token));
    assert_eq!(db.number("SELECT last_value FROM {s}.asked").await, 2);
}

/// Where the role's default is SERIALIZABLE or REPEATABLE READ, losing is an error 40001. It is no failure of the
/// job.
#[tokio::test]
async fn a_serialization_failure_is_a_wait() {
    for level in ["serializable", "repeatable read"] {
        let db = Db::with("strict", 4, |options| options.options([("default_transaction_isolation", level)]))
            .await;
        let shown = sqlx::raw_sql("SHOW transaction_isolation").fetch_one(&db.pool).await.unwrap();
        assert_eq!(shown.get::<String, _>(0), level);
        db.run("INSERT INTO {s}.retry_token VALUES ('key', now() - interval '1 s', 1, 1)").await;
        let mut other = db.pool.acquire().await.unwrap();
        let mut transaction = other.begin().await.unwrap();
        let update = "UPDATE {s}.retry_token SET not_before = now() + interval '30 s', streak = 2";
        sqlx::raw_sql(db.sql(update)).execute(&mut *transaction).await.unwrap();
        let claim = tokio::spawn({
            let tokens = db.tokens.clone();
            async move { tokens.claim("key", &Schedule::new()).await }
        });
        until_somebody_waits_for_a_lock(&db, 1).await;
        transaction.commit().await.unwrap();
        assert_eq!(refused(claim.await.unwrap().unwrap()).wait, SECOND, "{level}");
        // Alone it works there too.
        granted(db.tokens.claim("another", &Schedule::new()).await.unwrap());
    }
}

// ------------------------------------------------------------------------------ growth, holders, Retry-After

#[tokio::test]
async fn waits_grow_as_the_schedule_says() {
    let db = Db::new("growth").await;
    let schedule = Schedule::new().growth(SECOND, 3.0, 20 * SECOND).unwrap().jitter(0.0).unwrap();
    for (streak, seconds) in [(1, 1), (2, 3), (3, 9), (4, 20), (5, 20)] {
        let grant = granted(db.tokens.claim("key", &schedule).await.unwrap());
        assert_eq!(grant.streak, streak);
        let all = Duration::from_secs(seconds);
        assert!(grant.next_in <= all && grant.next_in + SECOND > all, "{grant:?}");
        db.run("UPDATE {s}.retry_token SET not_before = now()").await;
    }
    // A lease is a floor.
    let held = schedule.hold(Some(60 * SECOND)).unwrap();
    let grant = granted(db.tokens.claim("held", &held).await.unwrap());
    assert!(grant.next_in > 50 * SECOND && grant.next_in <= 60 * SECOND, "{grant:?}");
}

// yigit/android-priority-jobqueue#419, onosproject/onos-lib-go#127: 2^n overflowed, and the retry came at once.
#[tokio::test]
async fn the_longest_streak_overflows_nothing() {
    let db = Db::new("overflow").await;
    let steep = Schedule::new().growth(MS, 100.0, Schedule::MOST).unwrap();
    let slow = Schedule::new().growth(MS, 1.000_001, Schedule::MOST).unwrap();
    for schedule in [Schedule::new(), steep, slow] {
        let schedule = schedule.jitter(0.0).unwrap();
        for streak in [29, 30, 31, 63, 64, 1_000_000, i32::MAX - 1, i32::MAX] {
            db.run(&format!(
                "INSERT INTO {{s}}.retry_token VALUES ('key', now(), {streak}, 1) ON CONFLICT (key) DO UPDATE
                 SET streak = excluded.streak, not_before = excluded.not_before"
            ))
            .await;
            let grant = granted(db.tokens.claim("key", &schedule).await.unwrap());
            let streak = u32::try_from(streak).unwrap();
            assert_eq!(grant.streak, (streak + 1).min(i32::MAX.unsigned_abs()));
            let expected = schedule.delay(grant.streak, 0.5);
            assert!(grant.next_in.abs_diff(expected) <= SECOND.max(expected / 1000), "{streak}: {grant:?}");
        }
    }
}

/// Drawn for each claim, by each process from its own generator.
#[tokio::test]
async fn jitter_is_drawn_anew_for_each_claim_and_each_store() {
    let db = Db::new("jitter").await;
    let schedule = Schedule::new().growth(1000 * SECOND, 1.0, 1000 * SECOND).unwrap();
    let another = PostgresTokens::in_schema(db.pool.clone(), &db.schema).unwrap();
    let mut waits = Vec::new();
    for (name, tokens) in [("a", &db.tokens), ("b", &another)] {
        for key in 0..200 {
            let grant = granted(tokens.claim(&format!("{name}{key}"), &schedule).await.unwrap());
            waits.push(grant.next_in.as_secs());
        }
    }
    assert!(waits.iter().all(|wait| (699..1300).contains(wait)), "seed {}: {waits:?}", seed());
    let mean = waits.iter().sum::<u64>() / 400;
    assert!((960..1040).contains(&mean), "seed {}: {mean}", seed());
    let (a, b) = waits.split_at(200);
    assert_ne!(a, b);
}

/// A stale holder changes nothing (graphile/worker#169: a job over four hours was started a second time).
#[tokio::test]
async fn what_an_older_holder_says_changes_nothing() {
    let db = Db::new("fence").await;
    let schedule = window(60 * SECOND);
    let first = granted(db.tokens.claim("key", &schedule).await.unwrap());
    // Still the newest, though its window is over.
    db.run("UPDATE {s}.retry_token SET not_before = now() - interval '1 s'").await;
    assert!(db.tokens.extend("key", first.holder, MS).await.unwrap());
    db.run("UPDATE {s}.retry_token SET not_before = now() - interval '1 s'").await;
    let second = granted(db.tokens.claim("key", &schedule).await.unwrap());
    assert_ne!(first.holder, second.holder);
    assert_eq!(second.streak, 2);

    let before = db.tokens.peek("key").await.unwrap().unwrap();
    assert!(!db.tokens.clear("key", first.holder).await.unwrap());
    assert!(!db.tokens.extend("key", first.holder, 600 * SECOND).await.unwrap());
    let after = db.tokens.peek("key").await.unwrap().unwrap();
    assert_eq!((after.holder, after.streak), (second.holder, 2));
    assert!(after.wait <= before.wait);

    assert!(db.tokens.clear("key", second.holder).await.unwrap());
    assert!(!db.tokens.clear("key", second.holder).await.unwrap());
    assert_eq!(db.tokens.peek("key").await.unwrap(), None);
    assert!(!db.tokens.extend("key", second.holder, SECOND).await.unwrap());
    assert_eq!(granted(db.tokens.claim("key", &schedule).await.unwrap()).streak, 1);
}

#[tokio::test]
async fn retry_after_prolongs_and_never_shortens() {
    let db = Db::new("extend").await;
    let grant = granted(db.tokens.claim("key", &window(60 * SECOND)).await.unwrap());
    let left = || async { db.tokens.peek("key").await.unwrap().unwrap().wait };
    for short in [Duration::ZERO, MS, SECOND] {
        assert!(db.tokens.extend("key", grant.holder, short).await.unwrap());
        assert!(left().await > 50 * SECOND);
    }
    assert!(db.tokens.extend("key", grant.holder, 600 * SECOND).await.unwrap());
    assert!(left().await > 590 * SECOND && left().await <= 600 * SECOND);
    // No instant is too far.
    assert!(db.tokens.extend("key", grant.holder, Duration::MAX).await.unwrap());
    assert!(left().await > 9 * 365 * 24 * 3600 * SECOND);
}

/// The worker dies each time: dropped after its grant, in the middle of it, or without ever saying a word. The
/// streak grows, and the waits with it (oluciano/NexJob#143: a job that kills its worker came back at once, for
/// ever).
#[tokio::test]
async fn ten_crashes_are_ten_steps_of_the_schedule() {
    let db = Db::new("crash").await;
    let schedule = Schedule::new().growth(10 * SECOND, 2.0, 10_000 * SECOND).unwrap().jitter(0.0).unwrap();
    let mut last = Duration::ZERO;
    for crash in 1..=10 {
        let grant = granted(db.tokens.claim("poison", &schedule).await.unwrap());
        assert_eq!(grant.streak, crash);
        assert!(grant.next_in > last);
        last = grant.next_in;
        assert!(refused(db.tokens.claim("poison", &schedule).await.unwrap()).wait > last / 2);
        db.run("UPDATE {s}.retry_token SET not_before = now()").await;
    }
}

/// A claim is dropped at any instant: the key is closed, or it is not, and the pool is whole.
#[tokio::test]
async fn a_dropped_claim_does_all_or_nothing() {
    let db = Db::with("dropped", 4, |options| options).await;
    let mut closed = 0;
    for number in 0..200_u32 {
        let key = format!("key {number}");
        let patience = Duration::from_micros(u64::from(number) * 10);
        let claim = tokio::time::timeout(patience, db.tokens.claim(&key, &window(60 * SECOND))).await;
        match (claim, db.tokens.peek(&key).await.unwrap()) {
            (Ok(claim), token) => {
                assert_eq!(granted(claim.unwrap()).holder, token.unwrap().holder);
            }
            (Err(_), Some(token)) => {
                assert_eq!(token.streak, 1);
                closed += 1;
            }
            (Err(_), None) => {}
        }
    }
    println!("{closed} were granted after their caller had gone");
    let window60 = window(60 * SECOND);
    let all = join_all((0..20).map(|n| db.tokens.claim(["a", "b"][n % 2], &window60)));
    assert_eq!(all.await.into_iter().filter(|claim| matches!(claim, Ok(Claim::Granted(_)))).count(), 2);
}

// -------------------------------------------------------------------------------------------------- clocks

/// Three workers whose clocks differ by `skew` seconds; each obeys the waits that it is told. Returns what each
/// was granted, and the shortest gap.
async fn three_workers<T: RetryTokens>(
    db: &Db,
    stores: [T; 3],
    length: Duration,
    by: &str,
) -> ([u32; 3], Duration) {
    db.run("TRUNCATE {s}.seen, {s}.retry_token").await;
    let tasks = stores.map(|tokens| {
        tokio::spawn(async move {
            let mut grants = 0;
            for _ in 0..100 {
                match tokens.claim("one", &window(length)).await.unwrap() {
                    Claim::Granted(_) => grants += 1,
                    // Who is told too long a wait would sleep away the test, and be starved as well.
                    Claim::NotBefore(wait) => tokio::time::sleep(wait.wait.min(length)).await,
                }
            }
            grants
        })
    });
    let mut grants = [0; 3];
    for (task, grants) in tasks.into_iter().zip(&mut grants) {
        *grants = task.await.unwrap();
    }
    (grants, db.gaps("one", by).await.1)
}

/// Process clocks judged leases elsewhere: duplicate or missed runs (Krzysztof318/MailFathom#1989,
/// kagkarlsson/db-scheduler#364). Here a process has no clock to be wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_clock_makes_nobody_early_and_starves_nobody() {
    let db = Db::new("skew").await;
    db.watch().await;
    let length = 40 * MS;
    let (grants, gap) = three_workers(&db, [(); 3].map(|()| db.tokens.clone()), length, "not_before").await;
    assert!(gap >= length * 98 / 100, "{gap:?}");
    let all: u32 = grants.iter().sum();
    assert!(grants.iter().all(|grants| grants * 10 >= all), "{grants:?}");

    // The control: with the process's clock, three seconds wrong in both directions, the fast one is early and
    // the slow one starves.
    let wrong = [0.0, 3.0, -3.0].map(|skew| LooksThenWrites {
        pool: db.pool.clone(),
        schema: db.schema.clone(),
        clock: Some(skew),
    });
    let (grants, gap) = three_workers(&db, wrong, length, "seen_at").await;
    assert!(gap < length / 2, "{gap:?}");
    assert!(grants.iter().any(|mine| mine * 10 < grants.iter().sum()), "{grants:?}");
}

// ------------------------------------------------------------------------------------------------ clearing

/// Success deletes, whoever claims at the same time: nobody is lost, and nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_many_jobs_that_succeed_the_table_is_empty() {
    let db = Db::new("empty").await;
    let jobs = if long() { 100_000 } else { 4_000 };
    let workers = (0..8).map(|worker| {
        let tokens = db.tokens.clone();
        tokio::spawn(async move {
            for job in 0..jobs / 8 {
                // Two workers share a key, so that claims meet deletes.
                let key = format!("{} {job}", worker / 2);
                if let Claim::Granted(grant) = tokens.claim(&key, &Schedule::new()).await.unwrap() {
                    assert_eq!(grant.streak, 1);
                    assert!(tokens.clear(&key, grant.holder).await.unwrap());
                }
            }
        })
    });
    for worker in join_all(workers).await {
        worker.unwrap();
    }
    assert_eq!(db.number("SELECT count(*) FROM {s}.retry_token").await, 0);
}

#[tokio::test]
async fn the_sweeper_leaves_what_is_live() {
    let db = Db::new("sweep").await;
    db.run(
        "INSERT INTO {s}.retry_token SELECT 'old ' || n, now() - interval '2 h', 3, n FROM generate_series(1, 2500) AS n;
         INSERT INTO {s}.retry_token SELECT 'open ' || n, now() - interval '30 min', 3, n FROM generate_series(1, 10) AS n;
         INSERT INTO {s}.retry_token SELECT 'live ' || n, now() + interval '1 h', 3, n FROM generate_series(1, 10) AS n",
    )
    .await;
    // Somebody is at this one.
    let mut other = db.pool.acquire().await.unwrap();
    let mut transaction = other.begin().await.unwrap();
    let lock = "SELECT FROM {s}.retry_token WHERE key = 'old 7' FOR UPDATE";
    sqlx::raw_sql(db.sql(lock)).execute(&mut *transaction).await.unwrap();

    let hour = 3600 * SECOND;
    assert_eq!(db.tokens.sweep(hour, 100).await.unwrap(), 100);
    let (one, two) = tokio::join!(db.tokens.sweep_all(hour), db.tokens.sweep_all(hour));
    assert_eq!(one.unwrap() + two.unwrap(), 2399);
    transaction.rollback().await.unwrap();
    assert_eq!(db.tokens.sweep_all(hour).await.unwrap(), 1);
    assert_eq!(db.tokens.sweep(Duration::MAX, u32::MAX).await.unwrap(), 0);
    assert_eq!(db.number("SELECT count(*) FROM {s}.retry_token").await, 20);
    assert_eq!(db.tokens.sweep(Duration::ZERO, 1000).await.unwrap(), 10);
}

// ---------------------------------------------------------------------------------------------------- keys

#[tokio::test]
async fn any_text_is_a_key() {
    let db = Db::new("keys").await;
    let [long, longer] = [100_000, 100_001].map(|length| "x".repeat(length));
    let keys = [
        "",
        "'",
        "\\",
        "a'; DROP SCHEMA public CASCADE; --",
        "\u{1F980} \u{e9}",
        "nul\0byte",
        "nul\0byte2",
        &long,
        &longer,
        &"y".repeat(513),
        "$1",
    ];
    for (number, key) in keys.iter().enumerate() {
        let grant = granted(db.tokens.claim(key, &window(60 * SECOND)).await.unwrap());
        assert_eq!(grant.streak, 1, "{number}");
        assert_eq!(db.tokens.peek(key).await.unwrap().unwrap().holder, grant.holder);
        assert!(refused(db.tokens.claim(key, &window(60 * SECOND)).await.unwrap()).wait > 50 * SECOND);
        assert!(db.tokens.extend(key, grant.holder, SECOND).await.unwrap());
    }
    assert_eq!(db.number("SELECT count(*) FROM {s}.retry_token").await, i64::try_from(keys.len()).unwrap());
    assert_eq!(
        db.number("SELECT count(*) FROM {s}.retry_token WHERE key = '$1'").await,
        1,
        "short ones are legible"
    );
}

#[tokio::test]
async fn every_holder_fits() {
    let db = Db::new("holders").await;
    for bits in [0, 1, u64::MAX, i64::MAX.unsigned_abs(), 1 << 63] {
        db.run(&format!(
            "INSERT INTO {{s}}.retry_token VALUES ('key', now(), 1, '{}') ON CONFLICT (key) DO UPDATE SET holder = excluded.holder",
            bits.cast_signed()
        ))
        .await;
        let holder = HolderId::from(bits);
        assert_eq!(db.tokens.peek("key").await.unwrap().unwrap().holder, holder);
        assert!(db.tokens.extend("key", holder, MS).await.unwrap());
    }
}

// -------------------------------------------------------------------------------------------------- errors

#[tokio::test]
async fn errors_say_what_is_wrong() {
    let db = Db::new("errors").await;
    let elsewhere = PostgresTokens::in_schema(db.pool.clone(), &unique("nowhere")).unwrap();
    let error = elsewhere.claim("key", &Schedule::new()).await.unwrap_err();
    assert!(matches!(error, Error::Missing(_)) && !error.is_transient(), "{error:?}");
    assert_eq!(error.to_string(), "the tables of the retry tokens are not there; run migrate() first");

    let nobody = PostgresTokens::connect_lazy("postgres://tower_herd@127.0.0.1:1/postgres").unwrap();
    let error = nobody.claim("key", &Schedule::new()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)) && error.is_transient(), "{error:?}");

    assert!(PostgresTokens::connect_lazy("not a url").is_err());
    assert!(PostgresTokens::in_schema(db.pool.clone(), "").is_err());
    db.pool.close().await;
    let error = db.tokens.clear("key", HolderId::from(1)).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}
