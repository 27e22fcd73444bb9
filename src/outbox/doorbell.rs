//! The doorbell: a commit wakes an engine that sleeps, and is not told of one that is awake.
//!
//! An engine that has nothing to do takes a nap: it holds the table's bell, an advisory lock, and looks once more.
//! Whoever inserts a row tries to share that lock to the end of his transaction (the trigger `fga_outbox_ring`); where
//! he can't, because somebody naps, he sends a `NOTIFY`. So a nap begins only once all transactions have ended that
//! did not ring: the look after that sees their rows, and no wake-up is lost.

use std::pin::pin;

use diesel::sql_types::{Bool, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{
    AnsiTransactionManager, AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _, TransactionManager as _,
};
use futures_util::StreamExt as _;

use super::{Connection, DatabaseError, Pool};

/// The bell, held by an open transaction: so it is free whatever becomes of its holder.
pub(crate) struct Nap(Box<Connection>);

/// Whether one may sleep.
pub(crate) enum Bell {
    /// Every insert rings from now on.
    Taken(Nap),
    /// Somebody else naps, so every insert rings already.
    TakenByOther,
    /// A transaction is open that inserted a row and will not ring.
    InUse,
}

/// As in the trigger.
const LOCK: &str = "1179074895, 'fga_outbox'::regclass::oid::int4";

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Bool)]
    yes: bool,
}

impl Nap {
    /// Tries to take the bell. What was committed before is to be looked for once more after that.
    pub(crate) async fn take(pool: &Pool) -> Result<Bell, DatabaseError> {
        let mut connection = pool.begin().await?;
        let try_it = sql_query(format!("SELECT pg_try_advisory_xact_lock({LOCK}) AS yes"));
        if try_it.get_result::<Answer>(&mut connection).await?.yes {
            // Ends the statement before, whose snapshot would keep vacuums from their work and indexes from being built.
            connection.batch_execute("SELECT").await?;
            return Ok(Bell::Taken(Self(Box::new(connection))));
        }
        let other: Answer = sql_query(
            "SELECT EXISTS (SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted
                     AND classid = 1179074895 AND objid = 'fga_outbox'::regclass::oid AND objsubid = 2
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS yes",
        )
        .get_result(&mut connection)
        .await?;
        AnsiTransactionManager::rollback_transaction(&mut *connection).await?;
        Ok(if other.yes { Bell::TakenByOther } else { Bell::InUse })
    }

    /// Lets go of the bell. Dropping it does the same, at the cost of the connection.
    pub(crate) async fn end(mut self) -> Result<(), DatabaseError> {
        Ok(AnsiTransactionManager::rollback_transaction(&mut **self.0).await?)
    }
}

/// A connection that hears the rings.
pub(crate) struct Listener {
    connection: AsyncPgConnection,
    table: String,
}

impl Listener {
    /// Rings from now on are heard; whether there were any before is to be looked for. None where a pooler keeps them
    /// from being heard.
    pub(crate) async fn connect(pool: &Pool) -> Result<Option<Self>, DatabaseError> {
        #[derive(QueryableByName)]
        struct Table {
            #[diesel(sql_type = Text)]
            oid: String,
        }
        let Some(mut connection) = pool.session().await? else { return Ok(None) };
        let table: Table =
            sql_query("SELECT 'fga_outbox'::regclass::oid::text AS oid").get_result(&mut connection).await?;
        connection.batch_execute("LISTEN fga_outbox").await?;
        Ok(Some(Self { connection, table: table.oid }))
    }

    /// Waits for the next ring of this table.
    pub(crate) async fn ring(&mut self) -> Result<(), DatabaseError> {
        let mut rings = pin!(self.connection.notifications_stream());
        loop {
            match rings.next().await {
                Some(Ok(ring)) if ring.payload == self.table => return Ok(()),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                // A stream that has ended must not be asked again.
                None => return Err(DatabaseError::Unreachable("the connection that listens has ended".to_owned())),
            }
        }
    }
}
