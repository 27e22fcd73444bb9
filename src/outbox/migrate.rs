//! The table's migrations: diesel's, embedded.

use std::time::{Duration, Instant};

use diesel::migration::{Migration, MigrationVersion};
use diesel::pg::Pg;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncMigrationHarness, AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use super::{DatabaseError, DatabaseUrl};

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
    check_schema(&mut connection).await?;
    lock(&mut connection).await?;
    let dropped = drop_unfinished_indexes(&mut connection).await;
    let (migrated, mut connection) = match dropped {
        Err(error) => (Err(error), connection),
        // diesel's harness blocks, and this runtime may have only one thread.
        Ok(()) => tokio::task::spawn_blocking(move || {
            let mut harness = AsyncMigrationHarness::new(connection);
            (run_pending(&mut harness), harness.into_inner())
        })
        .await
        .map_err(|error| DatabaseError::Migration(error.to_string()))?,
    };
    // The end of the connection would do, but only once somebody drives it.
    let unlock = sql_query("SELECT pg_advisory_unlock($1)").bind::<BigInt, _>(MIGRATION_LOCK);
    unlock.execute(&mut connection).await?;
    migrated
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

/// Takes the lock by asking for it again and again: a session that waits inside a statement has a snapshot, and the
/// other one's `CREATE INDEX CONCURRENTLY` would wait for that, in a circle.
async fn lock(connection: &mut AsyncPgConnection) -> Result<(), DatabaseError> {
    #[derive(QueryableByName)]
    struct Locked {
        #[diesel(sql_type = Bool)]
        locked: bool,
    }
    let began = Instant::now();
    let mut said = false;
    loop {
        let query = sql_query("SELECT pg_try_advisory_lock($1) AS locked").bind::<BigInt, _>(MIGRATION_LOCK);
        if query.get_result::<Locked>(connection).await?.locked {
            return Ok(());
        }
        if !said && began.elapsed() > Duration::from_secs(5) {
            tracing::warn!("waiting for another process that runs these migrations");
            said = true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What a `CREATE INDEX CONCURRENTLY` leaves that did not get to its end.
async fn drop_unfinished_indexes(connection: &mut AsyncPgConnection) -> Result<(), DatabaseError> {
    #[derive(QueryableByName)]
    struct Unfinished {
        #[diesel(sql_type = Text)]
        name: String,
    }
    let unfinished: Vec<Unfinished> = sql_query(
        "SELECT quote_ident(c.relname) AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
         WHERE NOT i.indisvalid AND i.indrelid = to_regclass('fga_outbox')
             AND c.relname IN ('fga_outbox_retry_idx', 'fga_outbox_pending_idx', 'fga_outbox_doubt_idx',
                 'fga_outbox_waiting_idx', 'fga_outbox_waiting_keys_idx', 'fga_outbox_overruling_idx')",
    )
    .load(connection)
    .await?;
    for index in unfinished {
        connection.batch_execute(&format!("DROP INDEX CONCURRENTLY IF EXISTS {}", index.name)).await?;
    }
    Ok(())
}

fn run_pending(harness: &mut AsyncMigrationHarness<AsyncPgConnection>) -> Result<Migrated, DatabaseError> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| DatabaseError::Migration(error.to_string());
    let mut run = Vec::new();
    for migration in harness.pending_migrations(MIGRATIONS).map_err(failed)? {
        run_one(harness, &*migration).map_err(failed)?;
        run.push(migration.name().to_string());
    }
    Ok(Migrated { run })
}

fn run_one(
    harness: &mut AsyncMigrationHarness<AsyncPgConnection>,
    migration: &dyn Migration<Pg>,
) -> diesel::migration::Result<()> {
    let began = Instant::now();
    loop {
        match harness.run_migration(migration) {
            Err(error) if error.to_string().contains("lock timeout") && began.elapsed() < PATIENCE => {
                tracing::info!(migration = %migration.name(), "waiting for other sessions to let go of the table");
                std::thread::sleep(Duration::from_millis(500));
            }
            result => return result.map(|_: MigrationVersion| ()),
        }
    }
}
