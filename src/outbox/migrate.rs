//! The table's migrations: diesel's, embedded.

use std::time::{Duration, Instant};

use diesel::migration::{self, Migration};
use diesel::pg::Pg;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;
use diesel_async::{
    AnsiTransactionManager, AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _,
    TransactionManager as _,
};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use super::{DatabaseError, DatabaseUrl};

type Blocking = AsyncConnectionWrapper<AsyncPgConnection>;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// Two processes that migrate at once do so one after the other. Any number will do that nobody else uses.
const MIGRATION_LOCK: i64 = 0x0066_6761_6f75_7462;

/// How long a migration is tried again that other sessions' locks keep from the table.
const PATIENCE: Duration = Duration::from_secs(60);

/// What [`migrate`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// The migrations that were run, in order; empty where all had been run before.
    pub run: Vec<String>,
}

/// Brings the table of this database into the form that the engine needs: creates it, or adopts the one that is there.
///
/// Nothing is rewritten, and the table is never locked for longer than an instant: a lock that is not to be had within
/// half a second is let go and asked for again, for up to a minute.
///
/// # Errors
/// [`DatabaseError::Migration`] where a table is there that lacks a column or has another type in one; it names the
/// differences, and the table is left as it was.
pub async fn migrate(url: &DatabaseUrl) -> Result<Migrated, DatabaseError> {
    let mut connection = url.connect().await?;
    connection.transaction(check_schema).await?;
    let lock = lock(url).await?;
    restore_indexes(&mut connection).await?;
    // diesel's harness blocks, and this runtime may have only one thread. Where nobody waits for it any more, it goes on,
    // and keeps the lock.
    let (migrated, mut lock) = tokio::task::spawn_blocking(move || (run_pending(connection), lock))
        .await
        .map_err(|error| DatabaseError::Migration(error.to_string()))?;
    // The end of the connection does the same, but only once somebody drives it.
    let _ = AnsiTransactionManager::rollback_transaction(&mut lock).await;
    migrated.map_err(|error| DatabaseError::Migration(error.to_string()))
}

async fn check_schema(connection: &mut AsyncPgConnection) -> Result<(), DatabaseError> {
    #[derive(QueryableByName)]
    struct Schema {
        #[diesel(sql_type = Bool)]
        exists: bool,
        #[diesel(sql_type = Text)]
        search_path: String,
    }
    let query =
        sql_query("SELECT current_schema() IS NOT NULL AS exists, current_setting('search_path') AS search_path");
    match query.get_result::<Schema>(connection).await? {
        Schema { exists: true, .. } => Ok(()),
        Schema { search_path, .. } => Err(DatabaseError::Migration(format!(
            "no schema of the search_path {search_path} exists: create it first (CREATE SCHEMA)"
        ))),
    }
}

/// Takes the lock, in a transaction that has to stay open: a session's lock would stay behind in a pooler for ever.
///
/// It is asked for again and again: whoever waits inside a statement has a snapshot, and the other one's `CREATE INDEX
/// CONCURRENTLY` would wait for that, in a circle.
async fn lock(url: &DatabaseUrl) -> Result<AsyncPgConnection, DatabaseError> {
    #[derive(QueryableByName)]
    struct Locked {
        #[diesel(sql_type = Bool)]
        locked: bool,
    }
    let mut connection = url.connect().await?;
    let began = Instant::now();
    let mut said = false;
    loop {
        let begin = "BEGIN ISOLATION LEVEL READ COMMITTED";
        AnsiTransactionManager::begin_transaction_sql(&mut connection, begin).await?;
        let query = sql_query("SELECT pg_try_advisory_xact_lock($1) AS locked").bind::<BigInt, _>(MIGRATION_LOCK);
        if query.get_result::<Locked>(&mut connection).await?.locked {
            // This also ends the statement before, which has a snapshot until then.
            connection.batch_execute("SET LOCAL idle_in_transaction_session_timeout = 0").await?;
            return Ok(connection);
        }
        AnsiTransactionManager::rollback_transaction(&mut connection).await?;
        if !said && began.elapsed() > Duration::from_secs(5) {
            tracing::warn!("waiting for another process that runs these migrations");
            said = true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Drops what a `CREATE INDEX CONCURRENTLY` leaves that did not get to its end, and has the migrations of indexes that are
/// not there run again.
async fn restore_indexes(connection: &mut AsyncPgConnection) -> Result<(), DatabaseError> {
    #[derive(QueryableByName)]
    struct Unfinished {
        #[diesel(sql_type = Text)]
        name: String,
    }
    let query = sql_query(
        "SELECT quote_ident(c.relname) AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
         WHERE NOT i.indisvalid AND i.indrelid = to_regclass('fga_outbox')
             AND c.relname IN ('fga_outbox_pending_idx', 'fga_outbox_next_attempt_idx')",
    );
    let load = async |connection: &mut AsyncPgConnection| query.load::<Unfinished>(connection).await;
    let unfinished = connection.transaction(load).await?;
    for index in unfinished {
        connection.batch_execute(&format!("DROP INDEX CONCURRENTLY IF EXISTS {}", index.name)).await?;
    }
    let forget = "DO $$ BEGIN
        IF to_regclass('__diesel_schema_migrations') IS NOT NULL THEN
            DELETE FROM __diesel_schema_migrations
            USING (VALUES ('20261130000004', 'fga_outbox_pending_idx'), ('20261130000010', 'fga_outbox_next_attempt_idx'))
                AS indexes (migration, name)
            WHERE version = migration AND NOT EXISTS (
                SELECT FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                WHERE i.indrelid = to_regclass('fga_outbox') AND c.relname = indexes.name);
        END IF;
    END $$";
    connection.batch_execute(forget).await?;
    Ok(())
}

/// Whatever is prepared is executed in the same transaction, so that a pooler does not come between.
fn run_pending(connection: AsyncPgConnection) -> migration::Result<Migrated> {
    let mut connection = Blocking::from(connection);
    let pending = transaction(&mut connection, |connection| connection.pending_migrations(MIGRATIONS))?;
    let mut run = Vec::new();
    for migration in pending {
        run_one(&mut connection, &*migration)?;
        run.push(migration.name().to_string());
    }
    Ok(Migrated { run })
}

fn run_one(connection: &mut Blocking, migration: &dyn Migration<Pg>) -> migration::Result<()> {
    let began = Instant::now();
    loop {
        let run = match migration.metadata().run_in_transaction() {
            true => connection.run_migration(migration).map(drop),
            false => run_alone(connection, migration),
        };
        match run {
            Err(error) if error.to_string().contains("lock timeout") && began.elapsed() < PATIENCE => {
                tracing::info!(migration = %migration.name(), "waiting for other sessions to let go of the table");
                std::thread::sleep(Duration::from_millis(500));
            }
            run => return run,
        }
    }
}

/// Its statement is not prepared, and what diesel's harness does after it would not be in a transaction.
fn run_alone(connection: &mut Blocking, migration: &dyn Migration<Pg>) -> migration::Result<()> {
    migration.run(connection)?;
    let record = sql_query("INSERT INTO __diesel_schema_migrations (version) VALUES ($1)");
    let record = record.bind::<Text, _>(migration.name().version().to_string());
    transaction(connection, |connection| Ok(diesel::RunQueryDsl::execute(record, connection)?))?;
    Ok(())
}

fn transaction<T>(
    connection: &mut Blocking,
    what: impl FnOnce(&mut Blocking) -> migration::Result<T>,
) -> migration::Result<T> {
    diesel::Connection::transaction(connection, what)
}
