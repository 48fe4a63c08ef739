//! The schema, and how it comes into a database.

use crate::{
    Error,
    name::{InvalidName, quote, text},
};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row};

/// One step of the schema. The steps only add: what an older version of this crate uses stays.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// 1, 2, 3: the order in which they run.
    pub version: i32,
    /// What it adds, in a word or two.
    pub name: &'static str,
    /// The statements, with every name written out in full, so that no `search_path` matters. Running them again
    /// changes nothing.
    pub sql: String,
}

/// The steps for a schema of this name ([`SCHEMA`](crate::SCHEMA) by default), for people who apply their own
/// DDL: with their own tool, under their own role, before a deployment.
///
/// Each step keeps the version table itself, so [`migrate`] finds nothing left to do afterwards, and needs no
/// right to create anything.
///
/// # Errors
/// A name that PostgreSQL would refuse or cut.
pub fn migrations(schema: &str) -> Result<Vec<Migration>, InvalidName> {
    let quoted = quote(schema)?;
    // `CREATE SCHEMA IF NOT EXISTS` asks for the right to create one even where it is there; a role that was
    // given the schema does not have it.
    let sql = format!(
        "DO $herd$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = {name}) THEN
    EXECUTE format('CREATE SCHEMA %I', {name});
  END IF;
END $herd$;
CREATE TABLE IF NOT EXISTS {quoted}.schema_version (
  version integer PRIMARY KEY,
  applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS {quoted}.retry_token (
  key text COLLATE \"C\" PRIMARY KEY,
  not_before timestamptz NOT NULL,
  streak integer NOT NULL,
  holder bigint NOT NULL,
  updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);
INSERT INTO {quoted}.schema_version (version) VALUES (1) ON CONFLICT DO NOTHING;
",
        name = text(schema),
    );
    Ok(vec![Migration { version: 1, name: "retry tokens", sql }])
}

/// Brings the schema of this name up to date: creates it, its version table and its tables, or does nothing.
///
/// Any number of processes may do so at once. A role that may not create anything needs
/// `GRANT USAGE ON SCHEMA` and `SELECT` on the version table, and finds a schema that is up to date (apply
/// [`migrations`] before). A schema that is newer than this crate is left alone.
///
/// # Errors
/// [`Error::Denied`] when something must be created and may not be; [`Error::Unavailable`]; [`Error::Name`].
///
/// # Cancellation
/// Dropped, it has done everything or nothing: it is one transaction.
pub async fn migrate(pool: &PgPool, schema: &str) -> Result<(), Error> {
    let steps = migrations(schema)?;
    let newest = steps.iter().map(|step| step.version).max().unwrap_or(0);
    if applied(&mut *pool.acquire().await?, schema).await? >= newest {
        return Ok(());
    }
    let mut transaction = pool.begin().await?;
    // `IF NOT EXISTS` is no protection against somebody who creates the same at the same time. The lock ends with
    // the transaction, so it works through a pooler too.
    let lock = format!("SELECT pg_catalog.pg_advisory_xact_lock(hashtextextended({}, 741082))", text(schema));
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *transaction).await?;
    let done = applied(&mut transaction, schema).await?;
    for step in steps.into_iter().filter(|step| step.version > done) {
        sqlx::raw_sql(AssertSqlSafe(step.sql)).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// The newest step that a database has; 0 if none.
async fn applied(connection: &mut PgConnection, schema: &str) -> Result<i32, Error> {
    let found = format!(
        "SELECT count(*) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {} AND c.relname = 'schema_version'",
        text(schema)
    );
    let row = sqlx::raw_sql(AssertSqlSafe(found)).fetch_one(&mut *connection).await?;
    if row.try_get::<i64, _>(0)? == 0 {
        return Ok(0);
    }
    let version = format!("SELECT coalesce(max(version), 0) FROM {}.schema_version", quote(schema)?);
    let row = sqlx::raw_sql(AssertSqlSafe(version)).fetch_one(&mut *connection).await?;
    Ok(row.try_get::<i32, _>(0)?)
}
