//! The schema: twice, at once, for roles that may not create anything, beside the tables of others.
#![cfg(feature = "servers")]

mod support;

use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, PgPool, Row, postgres::PgConnectOptions};
use support::{PgBouncer, database_url, pool, unique};
use tower_herd::retry_token::{Claim, RetryTokens, Schedule};
use tower_herd_postgres::{Error, PostgresTokens, migrate, migrations};

fn options() -> PgConnectOptions {
    database_url().parse().unwrap()
}

async fn run(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap();
}

async fn works(pool: &PgPool, schema: &str) {
    let tokens = PostgresTokens::in_schema(pool.clone(), schema).unwrap();
    let claim = tokens.claim("key", &Schedule::new()).await.unwrap();
    let Claim::Granted(grant) = claim else { panic!("{claim:?}") };
    assert!(tokens.clear("key", grant.holder).await.unwrap());
}

#[tokio::test]
async fn twice_is_once() {
    let (pool, schema) = (pool(options(), 2).await, unique("twice"));
    for _ in 0..3 {
        migrate(&pool, &schema).await.unwrap();
    }
    let versions = format!("SELECT count(*), max(version) FROM \"{schema}\".schema_version");
    let row = sqlx::raw_sql(AssertSqlSafe(versions)).fetch_one(&pool).await.unwrap();
    let newest = migrations(&schema).unwrap().last().unwrap().version;
    assert_eq!((row.get::<i64, _>(0), row.get::<i32, _>(1)), (i64::from(newest), newest));
    works(&pool, &schema).await;
}

/// Every process of a fleet starts at once, and each migrates.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_at_once() {
    let pool = pool(options(), 20).await;
    for _ in 0..5 {
        let schema = unique("at_once");
        for done in join_all((0..20).map(|_| migrate(&pool, &schema))).await {
            done.unwrap();
        }
        works(&pool, &schema).await;
    }
}

/// A name is a name, whatever stands in it, and the `search_path` of a role is nobody's business.
#[tokio::test]
async fn any_schema_and_any_search_path() {
    let names = ["Caps and spaces", "quo\"te", "$herd$; DROP TABLE x; --", "select", "\u{e9}\u{1F980}"];
    for (name, path) in names.iter().zip(["public", "pg_catalog", "\"$user\"", "nowhere", ""]) {
        let schema = unique(name);
        let pool = pool(options().options([("search_path", path)]), 2).await;
        migrate(&pool, &schema).await.unwrap();
        migrate(&pool, &schema).await.unwrap();
        works(&pool, &schema).await;
    }
    let pool = pool(options(), 1).await;
    for bad in ["", "a\0b", &"x".repeat(64)] {
        assert!(matches!(migrate(&pool, bad).await, Err(Error::Name(_))));
    }
}

/// The tables of others stay as they are: the user's own migrations by sqlx, in the same database, in `public`.
#[tokio::test]
async fn beside_the_migrations_of_others() {
    let (pool, schema) = (pool(options(), 2).await, unique("beside"));
    run(
        &pool,
        "CREATE TABLE IF NOT EXISTS public._sqlx_migrations (version bigint PRIMARY KEY, description text);
         CREATE TABLE IF NOT EXISTS public.schema_version (theirs text);
         CREATE TABLE IF NOT EXISTS public.retry_token (theirs text);
         INSERT INTO public._sqlx_migrations VALUES (1, 'init') ON CONFLICT DO NOTHING",
    )
    .await;
    let theirs = || async {
        let all = "SELECT string_agg(relname || relnatts || relfilenode, ',' ORDER BY relname), (SELECT count(*) FROM
                   public._sqlx_migrations) FROM pg_class WHERE relnamespace = 'public'::regnamespace
                   AND relname IN ('_sqlx_migrations', 'schema_version', 'retry_token')";
        let row = sqlx::raw_sql(all).fetch_one(&pool).await.unwrap();
        (row.get::<String, _>(0), row.get::<i64, _>(1))
    };
    let before = theirs().await;
    migrate(&pool, &schema).await.unwrap();
    works(&pool, &schema).await;
    assert_eq!(theirs().await, before);
}

/// Somebody else applies the SQL; the role of the application may create nothing.
#[tokio::test]
async fn a_role_that_may_create_nothing_needs_not_to() {
    let (admin, schema, role) = (pool(options(), 2).await, unique("given"), unique("role"));
    run(&admin, &format!("CREATE ROLE {role} LOGIN NOSUPERUSER PASSWORD 'pw'")).await;
    let app = pool(options().username(&role).password("pw"), 2).await;

    // Nothing is there, and it may not make it.
    let error = migrate(&app, &schema).await.unwrap_err();
    assert!(matches!(error, Error::Denied(_)) && !error.is_transient(), "{error:?}");

    for step in migrations(&schema).unwrap() {
        // Twice, as by hand and then by a tool.
        run(&admin, &step.sql).await;
        run(&admin, &step.sql).await;
    }
    run(
        &admin,
        &format!(
            "GRANT USAGE ON SCHEMA \"{schema}\" TO {role}; GRANT SELECT ON \"{schema}\".schema_version TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE ON \"{schema}\".retry_token TO {role}"
        ),
    )
    .await;
    migrate(&app, &schema).await.unwrap();
    works(&app, &schema).await;
}

/// A role that owns a schema, but may not create others, fills it.
#[tokio::test]
async fn a_role_that_was_given_a_schema_fills_it() {
    let (admin, schema, role) = (pool(options(), 2).await, unique("owned"), unique("owner"));
    run(
        &admin,
        &format!("CREATE ROLE {role} LOGIN NOSUPERUSER PASSWORD 'pw'; CREATE SCHEMA \"{schema}\" AUTHORIZATION {role}"),
    )
    .await;
    let app = pool(options().username(&role).password("pw"), 2).await;
    migrate(&app, &schema).await.unwrap();
    works(&app, &schema).await;
}

/// A rolled back deployment meets the schema of a newer one.
#[tokio::test]
async fn a_newer_schema_is_left_alone() {
    let (pool, schema) = (pool(options(), 2).await, unique("newer"));
    migrate(&pool, &schema).await.unwrap();
    run(&pool, &format!("INSERT INTO \"{schema}\".schema_version VALUES (1000000)")).await;
    migrate(&pool, &schema).await.unwrap();
    works(&pool, &schema).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_pgbouncer_too() {
    let bouncer = PgBouncer::start(5);
    let (pool, schema) = (pool(bouncer.options(), 20).await, unique("bounced"));
    for done in join_all((0..20).map(|_| migrate(&pool, &schema))).await {
        done.unwrap();
    }
    works(&pool, &schema).await;
}
