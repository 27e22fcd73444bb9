//! The pool: each use of a connection is a transaction.

use std::fmt::Write as _;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use diesel::connection::CacheSize;
use diesel::result::QueryResult;
use diesel_async::pooled_connection::PoolableConnection as _;
use diesel_async::{AnsiTransactionManager, AsyncConnection as _, AsyncPgConnection, TransactionManager as _};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::connect::{CONNECT_TIMEOUT, Opened};
use super::{DatabaseError, DatabaseUrl};

/// A pool of connections of one database.
pub(crate) struct Pool {
    connections: bb8::Pool<Server>,
    server: Server,
    home: Handle,
    /// Why the last connection could not be made.
    failure: watch::Sender<String>,
}

/// What connections are made to.
#[derive(Clone)]
struct Server {
    url: DatabaseUrl,
    /// Whether a pooler stands before it; once it is known, for good.
    pooler: Arc<AtomicBool>,
}

/// A connection of the pool while nobody uses it.
pub(crate) struct Session {
    connection: AsyncPgConnection,
    /// What begins a transaction on it.
    begin: String,
    /// A transaction could not be begun, so that its state is not known.
    failed: bool,
}

/// A connection in a transaction. Dropped, it goes back to its pool, or is closed where the transaction is still open.
pub(crate) struct Connection(bb8::PooledConnection<'static, Server>);

impl Pool {
    /// Up to this many connections. They are made and driven by the runtime of `home`, which has to outlive the actors:
    /// a connection dies with the runtime that it was made on.
    pub(crate) fn new(url: &DatabaseUrl, home: Handle, size: u32) -> Self {
        // bb8 keeps house in a task of its own.
        let _home = home.enter();
        let server = Server { url: url.clone(), pooler: Arc::default() };
        let failure = watch::Sender::default();
        let connections = bb8::Pool::builder()
            .max_size(size)
            .connection_timeout(CONNECT_TIMEOUT + Duration::from_secs(1))
            .idle_timeout(Some(Duration::from_secs(60)))
            // Whoever wants the connection hears of the failure, and tries again in its own time.
            .retry_connection(false)
            .error_sink(Box::new(Failures(failure.clone())))
            .build_unchecked(server.clone());
        Self { connections, server, home, failure }
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// [`DatabaseError::Unreachable`], as soon as it is known that no connection can be made.
    pub(crate) async fn begin(&self) -> Result<Connection, DatabaseError> {
        loop {
            let mut session = self.get().await?;
            match session.begin().await {
                Ok(()) => return Ok(Connection(session)),
                // Nothing was done on this connection, and the next ones have no statements to mix up.
                Err(error) if error.to_string().contains(STRANGER) => self.server.has_pooler(),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Asks this in a transaction of its own.
    pub(crate) async fn ask<T>(
        &self,
        question: impl AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        let mut connection = self.begin().await?;
        let answer = question(&mut connection).await?;
        connection.commit().await?;
        Ok(answer)
    }

    /// A connection of one's own to keep for what a session can do, driven by the runtime that this runs on; none where
    /// a pooler makes sessions useless.
    pub(crate) async fn session(&self) -> Result<Option<AsyncPgConnection>, DatabaseError> {
        let connection = self.server.open().await?.connection;
        Ok((!self.server.pooler.load(Relaxed)).then_some(connection))
    }

    async fn get(&self) -> Result<bb8::PooledConnection<'static, Server>, DatabaseError> {
        let mut failure = self.failure.subscribe();
        let connections = self.connections.clone();
        // On the home runtime, where bb8 makes connections in tasks of its own.
        let got = self.home.spawn(async move { connections.get_owned().await });
        let reason = tokio::select! {
            biased;
            got = got => match got {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(bb8::RunError::User(reason))) => reason,
                Ok(Err(bb8::RunError::TimedOut)) => "no answer in time".to_owned(),
                Err(error) => error.to_string(),
            },
            Ok(()) = failure.changed() => failure.borrow().clone(),
        };
        Err(DatabaseError::Unreachable(reason))
    }
}

impl Connection {
    pub(crate) async fn commit(mut self) -> Result<(), DatabaseError> {
        Ok(AnsiTransactionManager::commit_transaction(&mut *self).await?)
    }
}

impl Deref for Connection {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        &self.0.connection
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.0.connection
    }
}

impl Server {
    async fn open(&self) -> Result<Session, DatabaseError> {
        let Opened { mut connection, process, direct, version } = self.url.open().await?;
        if !direct {
            self.has_pooler();
        }
        let pooler = self.pooler.load(Relaxed);
        if pooler {
            connection.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        Ok(Session { connection, begin: begin(version, (!pooler).then_some(process)), failed: false })
    }

    fn has_pooler(&self) {
        if !self.pooler.swap(true, Relaxed) {
            tracing::info!(
                "DATABASE_URL leads to a pooler: statements are prepared anew in each transaction, and new rows are \
                 found by looking for them, every poll interval"
            );
        }
    }
}

impl bb8::ManageConnection for Server {
    type Connection = Session;
    type Error = String;

    async fn connect(&self) -> Result<Session, String> {
        self.open().await.map_err(|error| match error {
            DatabaseError::Unreachable(reason) | DatabaseError::Rejected(reason) => reason,
            error => error.to_string(),
        })
    }

    /// A transaction is about to be begun anyway, and finds out about a broken connection.
    async fn is_valid(&self, _: &mut Session) -> Result<(), String> {
        Ok(())
    }

    fn has_broken(&self, session: &mut Session) -> bool {
        std::thread::panicking() || session.failed || session.connection.is_broken()
    }
}

#[derive(Debug, Clone)]
struct Failures(watch::Sender<String>);

impl bb8::ErrorSink<String> for Failures {
    fn sink(&self, reason: String) {
        self.0.send_replace(reason);
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<String>> {
        Box::new(self.clone())
    }
}

impl Session {
    /// Never by a raw BEGIN: the pool would take the connection back with the transaction open.
    async fn begin(&mut self) -> QueryResult<()> {
        let begun = AnsiTransactionManager::begin_transaction_sql(&mut self.connection, &self.begin).await;
        self.failed = begun.is_err();
        begun
    }
}

/// A lost network must not hold rows for ever: this is above the longest delivery of a lease. The others keep Postgres
/// from reading and sorting a whole backlog for a lease, instead of the first rows of an index, because it knows of no
/// backlog yet: it finds out minutes later. They end with the transaction, as a pooler may give its connection to others.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
    SET LOCAL idle_in_transaction_session_timeout = '180s';
    SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; SET LOCAL jit = off;
    SET LOCAL plan_cache_mode = force_generic_plan;";

/// What the transaction fails with that another process answers than the one where statements were prepared.
const STRANGER: &str = "fga-outbox: a pooler has changed the server connection";

fn begin(version: i32, process: Option<i32>) -> String {
    let mut begin = BEGIN.to_owned();
    if version >= 140_000 {
        // A query must not go on whose client is gone.
        begin.push_str(" SET LOCAL client_connection_check_interval = '1s';");
    }
    if let Some(process) = process {
        // No statement is executed before this, and so none that only has the name of ours.
        let guard =
            write!(begin, " SELECT (CASE pg_backend_pid() WHEN {process} THEN '1' ELSE '{STRANGER}' END)::integer");
        guard.expect("a string takes whatever is written");
    }
    begin
}
