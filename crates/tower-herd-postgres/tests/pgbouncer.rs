//! Through PgBouncer in transaction mode: a hundred clients on twenty connections, none of which is anybody's own
//! (bensheldon/good_job#52, pgbouncer/pgbouncer#617, netbox-community/netbox#23009: locks of a session that
//! had no session were silently none).
#![cfg(feature = "servers")]

mod support;

use sqlx::Row;
use std::time::Duration;
use support::{Db, PgBouncer, pool};
use tower_herd::retry_token::{Claim, RetryTokens, Schedule};
use tower_herd_postgres::PostgresTokens;
use tower_herd_sim::tokens::{Race, check, race};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_time_a_hundred_clients_on_twenty_connections() {
    let db = Db::new("bounced").await;
    db.watch().await;
    let bouncer = PgBouncer::start(20);
    let clients = pool(bouncer.options(), 100).await;
    let tokens = PostgresTokens::in_schema(clients.clone(), &db.schema).unwrap();
    let raced = race(&tokens, "bounced", Race::default()).await;
    let (grants, gap) = db.gaps("bounced:race", "not_before").await;
    println!("{} of {} grants, {} claims, shortest gap {gap:?}", raced.grants, raced.possible, raced.claims);
    raced.assert_kept();
    assert_eq!(usize::try_from(grants).unwrap(), raced.grants);
    assert!(gap >= Race::default().window * 98 / 100, "{gap:?}");
    if support::long() {
        raced.assert_exact();
    }

    // Twenty transactions at once see each of the twenty servers.
    let mut seen = std::collections::HashSet::new();
    let mut open = Vec::new();
    for _ in 0..20 {
        let mut transaction = clients.begin().await.unwrap();
        let left_behind = "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements),
            (SELECT count(*) FROM pg_listening_channels()),
            (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())";
        let row = sqlx::raw_sql(left_behind).fetch_one(&mut *transaction).await.unwrap();
        seen.insert(row.get::<i32, _>(0));
        for (column, what) in [(1, "prepared statements"), (2, "channels"), (3, "advisory locks")] {
            assert_eq!(row.get::<i64, _>(column), 0, "{what}");
        }
        open.push(transaction);
    }
    assert_eq!(seen.len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_does_what_a_store_must() {
    let db = Db::new("bcheck").await;
    let bouncer = PgBouncer::start(5);
    let clients = pool(bouncer.options(), 20).await;
    let tokens = PostgresTokens::in_schema(clients, &db.schema).unwrap();
    check(&tokens, "check").await.assert_kept();
}

/// The pool that this crate makes itself needs no setting of PgBouncer, and a client that asks for what PgBouncer
/// does not know is turned away.
#[tokio::test]
async fn the_pool_made_here_needs_no_setting() {
    let db = Db::new("own").await;
    let bouncer = PgBouncer::start(2);
    let tokens = PostgresTokens::connect_lazy(&bouncer.url()).unwrap();
    let tokens = PostgresTokens::in_schema(tokens.pool().clone(), &db.schema).unwrap();
    assert!(matches!(tokens.claim("key", &Schedule::new()).await.unwrap(), Claim::Granted(_)));

    let usual = sqlx::postgres::PgPoolOptions::new()
        .acquire_timeout(Duration::from_secs(5))
        .connect(&bouncer.url())
        .await;
    assert!(usual.unwrap_err().to_string().contains("extra_float_digits"));
}

/// Why nothing is bound: sqlx prepares in one message and binds in the next, and in between the server is somebody
/// else's. What is told not to be kept is so too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_parameter_gets_lost() {
    let bouncer = PgBouncer::start(2);
    let clients = pool(bouncer.options(), 20).await;
    let tasks = (0..20_i32).map(|client| {
        let clients = clients.clone();
        tokio::spawn(async move {
            let mut lost = 0;
            for _ in 0..50 {
                let text = format!("SELECT $1::int4 + {client}");
                let query = sqlx::query(sqlx::AssertSqlSafe(text)).bind(client).persistent(false);
                match query.fetch_one(&clients).await {
                    Ok(row) if row.get::<i32, _>(0) == 2 * client => {}
                    _ => lost += 1,
                }
            }
            lost
        })
    });
    let mut lost = 0;
    for task in futures_util::future::join_all(tasks).await {
        lost += task.unwrap();
    }
    println!("{lost} of 1000");
    assert!(lost > 0, "sqlx binds in the message in which it prepares: the keys may be parameters again");
}
