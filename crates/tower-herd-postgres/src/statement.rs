//! How everything here is asked.

use crate::error::spoils_connection;
use sqlx::{AssertSqlSafe, PgPool, Postgres, pool::PoolConnection, postgres::PgRow};

/// One statement, by itself, as one message.
pub(crate) async fn run(pool: &PgPool, sql: String) -> Result<Vec<PgRow>, sqlx::Error> {
    let mut connection = Busy(Some(pool.acquire().await?));
    let Some(open) = &mut connection.0 else { return Err(sqlx::Error::PoolClosed) };
    let result = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut **open).await;
    if result.as_ref().err().is_none_or(|why| !spoils_connection(why)) {
        // Back to the pool.
        drop(connection.0.take());
    }
    result
}

/// A connection on which an answer is due. Dropped before it has come, it is not given back: behind a dead route
/// the pool would wait for it until the system gives up, and hold its place for as long.
struct Busy(Option<PoolConnection<Postgres>>);

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.close_on_drop();
        }
    }
}
