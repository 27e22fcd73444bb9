//! Everything that is SQL: connecting, migrating, enqueueing, leasing rows and recording what became of them.

mod connect;
mod doorbell;
mod enqueue;
mod horizon;
mod lease;
mod migrate;
mod pool;
mod pooler;
mod report;
mod requeue;
#[rustfmt::skip]
mod schema;
mod statement;

use diesel::result::DatabaseErrorKind;

pub use connect::DatabaseUrl;
pub(crate) use doorbell::{Bell, Listener, Nap};
pub use enqueue::enqueue_all;
pub(crate) use horizon::Horizon;
#[cfg(feature = "internals")]
pub(crate) use lease::claim_and_mark;
pub(crate) use lease::{Claim, Claimed, Lease, claim};
pub use migrate::{Migrated, migrate};
pub(crate) use pool::{Connection, Pool};
pub(crate) use report::{Left, is_any_ready, last_id, left};
pub use report::{Reason, Status, status};
pub(crate) use requeue::requeue_older;
pub use requeue::{Listed, Requeue, Undelivered, list, requeue};

/// Why the database could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// The address can't be used as it is.
    #[error("DATABASE_URL: {0}")]
    InvalidUrl(String),
    /// No connection could be made.
    #[error("can't connect to Postgres: {0}")]
    Unreachable(String),
    /// The server does not let us in, or has no such database.
    #[error("Postgres refuses the connection: {0}")]
    Rejected(String),
    /// The table, or a column of it, is not there.
    #[error("{0}: run 'fga-outbox migrate' on this database first")]
    NotMigrated(String),
    /// The migrations can't be run on what is there.
    #[error("{0}")]
    Migration(String),
    /// A statement failed.
    #[error("Postgres: {0}")]
    Query(diesel::result::Error),
}

impl From<diesel::result::Error> for DatabaseError {
    fn from(error: diesel::result::Error) -> Self {
        use diesel::result::Error::DatabaseError as Database;
        match &error {
            // What becomes of a statement whose connection is gone, and of one whose server is being shut down.
            Database(DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand, info) => {
                Self::Unreachable(info.message().to_owned())
            }
            Database(_, info) if info.message().starts_with("terminating connection") => {
                Self::Unreachable(info.message().to_owned())
            }
            // "undefined_table" and "undefined_column" have no kind of their own.
            Database(_, info)
                if info.message().ends_with("does not exist") && info.message().contains("fga_outbox") =>
            {
                Self::NotMigrated(info.message().to_owned())
            }
            Database(_, info)
                if ["next_attempt_at", "refused_model_id"].iter().any(|it| info.message().contains(it)) =>
            {
                Self::NotMigrated(info.message().to_owned())
            }
            _ => Self::Query(error),
        }
    }
}
