//! The tokens in a table of their own.

use crate::{
    Error,
    delay::{seconds, window},
    error::lost_to_another,
    migrate::{migrate, migrations},
    name::{InvalidName, quote, text},
    statement,
};
use sqlx::{
    PgPool, Row,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};
use std::{fmt, sync::Arc, time::Duration};
use tower_herd::{
    random::Seeds,
    retry_token::{Claim, Grant, HolderId, RetryTokens, Schedule, Token, Wait, WaitCause},
};

/// The schema, unless another one is named.
pub const SCHEMA: &str = "herd";

/// Longer keys are stored as their SHA-256: an index entry has room for 2,704 bytes.
const LONGEST_KEY: usize = 512;

/// What a caller is told that lost against somebody whose token it could not see yet.
const LOST: Duration = Duration::from_secs(1);

/// Retry tokens in a table of PostgreSQL, shared by all processes that use the database. A handle: clones are the
/// same store.
///
/// Each operation is one statement that commits by itself, in one message and without parameters: see
/// [the crate](crate) for why. It decides by the database's clock, never by that of the process.
///
/// # Errors
///
/// Every operation fails with [`Error`] when the database cannot be asked; what the layer does then is its own
/// policy. A claim that loses is no error, and neither is a serialization failure (40001, only where the default
/// isolation is stricter than READ COMMITTED): both are a [`Claim::NotBefore`].
///
/// # Cancellation
///
/// A dropped operation has done all of its work or nothing. A claim that was dropped after the server granted it
/// leaves a token that nobody holds: the key opens by itself when the window is over. The connection of a dropped
/// operation is closed and not given back to the pool: nobody knows whether an answer will ever come.
#[derive(Clone)]
pub struct PostgresTokens(Arc<Shared>);

struct Shared {
    pool: PgPool,
    schema: String,
    table: String,
    seeds: Seeds,
}

impl PostgresTokens {
    /// In the schema [`SCHEMA`], over a pool that the application has already.
    ///
    /// Nothing is sent. Of the pool's settings two matter: `acquire_timeout` (30 s by default) is longer than
    /// anybody waits for a token, so the layer's own store timeout decides; and through PgBouncer without
    /// `ignore_startup_parameters = extra_float_digits`, connect with
    /// `PgConnectOptions::extra_float_digits(None)`.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self::build(pool, SCHEMA.into(), format!("\"{SCHEMA}\".retry_token"), Seeds::from_entropy())
    }

    /// In another schema.
    ///
    /// # Errors
    ///
    /// A name that PostgreSQL would refuse or cut.
    pub fn in_schema(pool: PgPool, schema: &str) -> Result<Self, InvalidName> {
        let table = format!("{}.retry_token", quote(schema)?);
        Ok(Self::build(pool, schema.into(), table, Seeds::from_entropy()))
    }

    /// For a process that has no pool: one of at most 4 connections, made when they are needed, fit for PgBouncer.
    ///
    /// # Errors
    ///
    /// Only for a URL that is none: nothing is sent.
    pub fn connect_lazy(url: &str) -> Result<Self, Error> {
        let options: PgConnectOptions = url.parse()?;
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .acquire_timeout(Duration::from_secs(2))
            .connect_lazy_with(options.extra_float_digits(None).statement_cache_capacity(0));
        Ok(Self::new(pool))
    }

    /// The same with a fixed seed, for tests: jitter and holders repeat. No two processes may share a seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        let Shared { pool, schema, table, .. } = &*self.0;
        Self::build(pool.clone(), schema.clone(), table.clone(), Seeds::from_seed(seed))
    }

    fn build(pool: PgPool, schema: String, table: String, seeds: Seeds) -> Self {
        PostgresTokens(Arc::new(Shared { pool, schema, table, seeds }))
    }

    /// Creates what is missing: [`migrate`] for this store's pool and schema.
    ///
    /// # Errors
    ///
    /// See [`migrate`].
    pub async fn migrate(&self) -> Result<(), Error> {
        migrate(&self.0.pool, &self.0.schema).await
    }

    /// The same as SQL, for people who apply it themselves: [`migrations`] for this store's schema.
    ///
    /// # Errors
    ///
    /// None, for a store that exists.
    pub fn migrations(&self) -> Result<Vec<crate::Migration>, InvalidName> {
        migrations(&self.0.schema)
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    /// Removes what nobody has claimed for `idle`, in batches of a thousand, and says how many they were. To be
    /// called now and then, an hour apart for instance, by any one process or by all: batches do not wait for each
    /// other.
    ///
    /// `idle` should be twice the longest cap at least: with its token a key forgets its streak.
    ///
    /// # Errors
    ///
    /// [`Error`], of the first batch that failed; what was removed before stays removed.
    pub async fn sweep_all(&self, idle: Duration) -> Result<u64, Error> {
        const BATCH: u32 = 1000;
        let mut removed = 0;
        loop {
            let batch = self.sweep(idle, BATCH).await?;
            removed += batch;
            if batch < u64::from(BATCH) {
                return Ok(removed);
            }
        }
    }

    async fn run(&self, sql: String) -> Result<Vec<PgRow>, sqlx::Error> {
        statement::run(&self.0.pool, sql).await
    }

    async fn run_for_one(&self, sql: String) -> Result<Option<PgRow>, Error> {
        Ok(self.run(sql).await?.into_iter().next())
    }

    fn claim_sql(&self, key: &str, schedule: &Schedule, u: f64, holder: HolderId) -> String {
        // `cur` sends the many away who come too early, and locks nothing. The winner among the others is found by
        // the insert: what stands behind `DO UPDATE ... WHERE` is decided on the newest version of the row, which
        // the statement has locked, so exactly one of those who come together gets it. The others change nothing
        // and see nothing: for them the statement gives no row. They must not be given the token of `cur`'s
        // snapshot instead: it is the old one, and its wait is over.
        format!(
            "WITH cur AS MATERIALIZED (
  SELECT not_before, streak FROM {table} WHERE key = {key} AND not_before > clock_timestamp()
), up AS (
  INSERT INTO {table} AS t (key, not_before, streak, holder, updated_at)
  SELECT {key}, clock_timestamp() + {first}, 1, {holder}, clock_timestamp()
  WHERE NOT EXISTS (SELECT FROM cur)
  ON CONFLICT (key) DO UPDATE SET
    streak = least(t.streak, 2147483646) + 1, holder = excluded.holder,
    not_before = clock_timestamp() + {next}, updated_at = excluded.updated_at
  WHERE t.not_before <= clock_timestamp()
  RETURNING not_before, streak
)
SELECT true, {left}, streak FROM up
UNION ALL SELECT false, {left}, streak FROM cur",
            table = self.0.table,
            key = key_sql(key),
            first = window(schedule, "0", &format!("{u}::float8")),
            next = window(schedule, "t.streak", &format!("{u}::float8")),
            holder = holder_sql(holder),
            left = LEFT,
        )
    }
}

/// What is left of a token, in microseconds, rounded up: told less, somebody would come early.
const LEFT: &str = "greatest(0, ceil(extract(epoch FROM not_before - clock_timestamp()) * 1000000))::bigint";

/// The key, or its digest where it is too long for an index, or holds a NUL, which no text of PostgreSQL does.
fn key_sql(key: &str) -> String {
    match key.len() <= LONGEST_KEY && !key.contains('\0') {
        true => text(key),
        false => {
            let digits: String = key.bytes().map(|byte| format!("{byte:02x}")).collect();
            format!("('sha256:' || encode(sha256(decode('{digits}', 'hex')), 'hex'))")
        }
    }
}

fn holder_sql(holder: HolderId) -> String {
    // In quotes: the smallest of them is no literal otherwise, but the negation of one that is too large.
    format!("'{}'::bigint", holder.get().cast_signed())
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn streak(row: &PgRow, column: usize) -> Result<u32, sqlx::Error> {
    Ok(u32::try_from(row.try_get::<i32, _>(column)?).unwrap_or(0))
}

impl RetryTokens for PostgresTokens {
    type Error = Error;

    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Error> {
        let mut random = self.0.seeds.session();
        let (u, holder) = (random.unit(), HolderId::from(random.bits()));
        let sql = self.claim_sql(key, schedule, u, holder);
        // No row: lost against a winner whose token this statement could not see. The second time it can.
        for _ in 0..2 {
            let rows = match self.run(sql.clone()).await {
                Ok(rows) => rows,
                Err(why) if lost_to_another(&why) => break,
                Err(why) => return Err(why.into()),
            };
            if let Some(row) = rows.first() {
                let left = duration(row.try_get(1)?);
                let streak = streak(row, 2)?;
                return Ok(match row.try_get(0)? {
                    true => Claim::Granted(Grant { holder, next_in: left, streak }),
                    // It may have opened between the two looks at the clock.
                    false => Claim::NotBefore(Wait {
                        wait: left.max(Duration::from_micros(1)),
                        streak,
                        cause: WaitCause::Token,
                    }),
                });
            }
        }
        let wait = LOST.min(schedule.base());
        Ok(Claim::NotBefore(Wait { wait, streak: 1, cause: WaitCause::Token }))
    }

    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, Error> {
        let sql = format!(
            "UPDATE {table} SET not_before = greatest(not_before, clock_timestamp() + make_interval(secs => {wait})), \
             updated_at = clock_timestamp() WHERE key = {key} AND holder = {holder} RETURNING 1",
            table = self.0.table,
            wait = seconds(at_least),
            key = key_sql(key),
            holder = holder_sql(holder),
        );
        Ok(self.run_for_one(sql).await?.is_some())
    }

    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, Error> {
        let sql = format!(
            "DELETE FROM {} WHERE key = {} AND holder = {} RETURNING 1",
            self.0.table,
            key_sql(key),
            holder_sql(holder)
        );
        Ok(self.run_for_one(sql).await?.is_some())
    }

    async fn peek(&self, key: &str) -> Result<Option<Token>, Error> {
        let sql = format!("SELECT holder, {LEFT}, streak FROM {} WHERE key = {}", self.0.table, key_sql(key));
        let Some(row) = self.run_for_one(sql).await? else { return Ok(None) };
        Ok(Some(Token {
            holder: HolderId::from(row.try_get::<i64, _>(0)?.cast_unsigned()),
            wait: duration(row.try_get(1)?),
            streak: streak(&row, 2)?,
        }))
    }

    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, Error> {
        // Who is claimed now is locked, and skipped: it is not idle. Who was, in between, no longer matches.
        let sql = format!(
            "WITH idle AS MATERIALIZED (
  SELECT key FROM {table} WHERE not_before <= statement_timestamp() - make_interval(secs => {idle})
  LIMIT {limit} FOR UPDATE SKIP LOCKED
), gone AS (DELETE FROM {table} AS t USING idle WHERE t.key = idle.key RETURNING 1)
SELECT count(*) FROM gone",
            table = self.0.table,
            idle = seconds(idle),
        );
        let row = self.run_for_one(sql).await?;
        let removed = row.map_or(Ok(0), |row| row.try_get::<i64, _>(0))?;
        Ok(u64::try_from(removed).unwrap_or(0))
    }
}

impl fmt::Debug for PostgresTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTokens").field("schema", &self.0.schema).finish_non_exhaustive()
    }
}
