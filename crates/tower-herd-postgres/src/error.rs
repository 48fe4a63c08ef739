//! What can go wrong.

use crate::name::InvalidName;
use std::{error, fmt};

/// What can go wrong. A job's own failure is none of these, and neither is a claim that lost.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The server cannot be asked now: no connection, none free in the pool in time, it starts, stops, is out of
    /// memory, has cancelled the statement, or is a standby. It may be asked again later.
    Unavailable(sqlx::Error),
    /// There is no table: [`migrate`](crate::migrate()) has not run, or ran for another schema or database.
    Missing(sqlx::Error),
    /// The role may not do it, or may not connect.
    Denied(sqlx::Error),
    /// The name of the schema is none.
    Name(InvalidName),
    /// Anything else that the driver or the server said.
    Other(sqlx::Error),
}

impl Error {
    /// Whether the same call may succeed later without anybody doing anything.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Error::Unavailable(_))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Unavailable(_) => f.write_str("PostgreSQL cannot be asked now"),
            Error::Missing(_) => {
                f.write_str("the tables of the retry tokens are not there; run migrate() first")
            }
            Error::Denied(_) => f.write_str("PostgreSQL refused the role the right to do this"),
            Error::Name(_) => f.write_str("the name of a schema, table or column is none"),
            Error::Other(_) => f.write_str("PostgreSQL did not do what it was asked for"),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Error::Unavailable(why) | Error::Missing(why) | Error::Denied(why) | Error::Other(why) => {
                Some(why)
            }
            Error::Name(why) => Some(why),
        }
    }
}

impl From<InvalidName> for Error {
    fn from(why: InvalidName) -> Self {
        Error::Name(why)
    }
}

impl From<sqlx::Error> for Error {
    fn from(why: sqlx::Error) -> Self {
        match &why {
            sqlx::Error::Io(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Error::Unavailable(why),
            sqlx::Error::Database(_) => {
                // The classes of PostgreSQL's appendix A. 25006: a standby, or the old primary after a failover.
                match code(&why).as_deref() {
                    Some("42P01" | "3F000") => Error::Missing(why),
                    Some("42501") => Error::Denied(why),
                    Some("25006") => Error::Unavailable(why),
                    Some(code) if code.starts_with("28") => Error::Denied(why),
                    Some(code) if ["08", "53", "57"].iter().any(|class| code.starts_with(class)) => {
                        Error::Unavailable(why)
                    }
                    _ => Error::Other(why),
                }
            }
            _ => Error::Other(why),
        }
    }
}

/// The five signs of an answer of the server.
fn code(why: &sqlx::Error) -> Option<String> {
    why.as_database_error().and_then(sqlx::error::DatabaseError::code).map(std::borrow::Cow::into_owned)
}

/// Whether two transactions could not be put in an order. Only where the default isolation of the role or the
/// database is stricter than READ COMMITTED.
pub(crate) fn lost_to_another(why: &sqlx::Error) -> bool {
    code(why).as_deref() == Some("40001")
}

/// Whether the connection should not be used again: the server closes it, or it leads to a standby.
pub(crate) fn spoils_connection(why: &sqlx::Error) -> bool {
    match code(why) {
        Some(code) => code == "25006" || code.starts_with("57P") || code.starts_with("08"),
        None => true,
    }
}
