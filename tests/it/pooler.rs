//! Behind a pooler in transaction mode, where each transaction may have another server connection, all of it works, and
//! nothing of it is left on the connections for those who share them.

use std::process::{Child, Command, Stdio};

use fga_outbox::{DatabaseUrl, Requeue, Undelivered, list, migrate, requeue, status};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::bed::{Bed, write};
use crate::command_line::{on, run, run_with_stdin};
use crate::support::{Cluster, Database, Flavor, Pooler, eventually, within_deadline};

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// What somebody has left on the server connection that answers; PgBouncer itself looks after the settings that it
/// knows.
const LEFT: &str = "
    SELECT 'setting ' || name || ' = ' || setting FROM pg_settings WHERE source = 'session'
        AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone')
    UNION ALL SELECT 'statement ' || name || ': ' || statement FROM pg_prepared_statements
    UNION ALL SELECT 'channel ' || channel FROM pg_listening_channels() AS channel
    UNION ALL SELECT 'lock ' || objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()";

async fn left(client: &Client, sql: &str) -> Vec<String> {
    let answer = client.simple_query(sql).await.unwrap();
    let text = |message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(Into::into),
        _ => None,
    };
    answer.into_iter().filter_map(text).collect()
}

/// Looks at all server connections at once, after those that use them have gone.
async fn assert_nothing_left(pooler: &Pooler, database: &Database) {
    let mut clients = Vec::new();
    for _ in 0..pooler.connections {
        let client = connect(&pooler.url(database.name())).await;
        client.simple_query("BEGIN").await.unwrap();
        assert_eq!(left(&client, LEFT).await, [""; 0]);
        clients.push(client);
    }
}

/// An engine in a process of its own.
struct Running(Child);

impl Running {
    fn start(bed: &Bed, url: &str) -> Self {
        let mut run = on(bed, &["run"]);
        Self(run.env("DATABASE_URL", url).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Gives its log.
    fn stop(mut self) -> String {
        assert!(Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap().success());
        let log = std::io::read_to_string(self.0.stderr.take().unwrap()).unwrap();
        assert_eq!(self.0.wait().unwrap().code(), Some(0), "{log}");
        log
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const UNDELIVERED: &str = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
const FAILED: &str = "SELECT count(*) FROM fga_outbox WHERE attempts > 0 OR last_error IS NOT NULL";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_deliver_and_share_their_connections_with_an_application() {
    let (pooler, bed) = (Pooler::start(6).await, Bed::new(Flavor::Memory).await);
    let url = pooler.url(bed.database.name());
    bed.insert_many(5_000).await;
    let engines = [Running::start(&bed, &url), Running::start(&bed, &url)];
    let mut application = tokio::task::JoinSet::new();
    for session in 0..3 {
        let client = connect(&url).await;
        application.spawn(async move {
            for at in 0..200 {
                let payload = write(&format!("application{session}"), &at.to_string());
                let sql = format!("BEGIN; {LEFT}; INSERT INTO fga_outbox (payload) VALUES ('{payload}'); COMMIT");
                assert_eq!(left(&client, &sql).await, [""; 0]);
            }
        });
    }
    while let Some(done) = application.join_next().await {
        done.unwrap();
    }
    eventually(async || bed.database.query_one::<i64>(UNDELIVERED).await == 0).await;
    // They sleep between looks, and hold no server connection meanwhile.
    let idle = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()
        AND state = 'idle in transaction'";
    eventually(async || bed.database.query_one::<bool>(idle).await).await;
    let id = bed.insert(&write("late", "1")).await;
    eventually(async || bed.state(id).await.delivered).await;
    assert_eq!(bed.database.query_one::<i64>(FAILED).await, 0);
    assert_eq!(bed.store.read_all().await.len(), 5_601);

    for log in engines.map(Running::stop) {
        assert_eq!(log.matches("leads to a pooler").count(), 1, "{log}");
        assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    }
    assert_nothing_left(&pooler, &bed.database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_and_the_library_work_there() {
    let (pooler, bed) = (Pooler::start(4).await, Bed::new(Flavor::Memory).await);
    bed.database.execute("DROP TABLE fga_outbox, __diesel_schema_migrations").await;
    let url = pooler.url(bed.database.name());
    let on = |args: &[&str]| {
        let mut command = on(&bed, args);
        command.env("DATABASE_URL", &url);
        command
    };
    let migrated = "SELECT count(*) FROM __diesel_schema_migrations";
    assert_eq!(run(on(&["migrate"])).0, 0);
    assert_eq!(bed.database.query_one::<i64>(migrated).await, 6);
    assert_eq!(run(on(&["migrate"])).1, "nothing to do: fga_outbox is up to date\n");
    let lines = format!(
        "{}\n{}\n",
        write("anne", "1"),
        json!({"writes": [{"user": "user:anne", "relation": "viewer", "object": "planet:1"}]})
    );
    assert_eq!(run_with_stdin(on(&["enqueue"]), &lines).1, "enqueued 2 rows\n");
    assert!(run(on(&["list", "--ready"])).1.contains("+ user:anne viewer document:1"));
    let (code, stdout, stderr) = run(on(&["drain"]));
    assert_eq!(code, 1, "{stdout}");
    assert!(!stderr.contains("can't be used"), "{stderr}");
    assert!(run(on(&["list", "--refused"])).1.contains("type 'planet' not found"));
    assert_eq!(run(on(&["requeue", "--refused", "--dry-run"])).1, "would requeue 1 row\n");
    assert_eq!(run(on(&["requeue", "--refused"])).1, "requeued 1 row\n");
    assert!(run(on(&["status"])).1.starts_with("ready      1\n"));

    let mut connection = url.parse::<DatabaseUrl>().unwrap().connect().await.unwrap();
    for _ in 0..10 {
        assert_eq!(status(&mut connection).await.unwrap().0.ready, 1);
        assert_eq!(list(&mut connection, Undelivered::Ready, 5).await.unwrap().len(), 1);
        assert_eq!(requeue(&mut connection, &Requeue::Refused, true).await.unwrap(), 0);
    }
    drop(connection);
    assert_nothing_left(&pooler, &bed.database).await;
}

#[tokio::test]
async fn migrations_run_once_and_a_process_that_dies_leaves_no_lock() {
    let (pooler, bed) = (Pooler::start(6).await, Bed::new(Flavor::Memory).await);
    let url: DatabaseUrl = pooler.url(bed.database.name()).parse().unwrap();
    bed.database.execute("DROP TABLE __diesel_schema_migrations").await;
    let mut other = bed.database.client().await;
    let reader = other.transaction().await.unwrap();
    reader.batch_execute("LOCK TABLE fga_outbox IN ACCESS SHARE MODE").await.unwrap();
    let mut migrating = on(&bed, &["migrate"]).env("DATABASE_URL", pooler.url(bed.database.name())).spawn().unwrap();
    let waits = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'fga_outbox'::regclass AND NOT granted";
    eventually(|| bed.database.query_one::<bool>(waits)).await;
    migrating.kill().unwrap();
    migrating.wait().unwrap();
    reader.commit().await.unwrap();

    let (a, b, c) = within_deadline(async { tokio::join!(migrate(&url), migrate(&url), migrate(&url)) }).await;
    let run = [a, b, c].map(|migrated| migrated.unwrap().run.len());
    assert_eq!(run.iter().filter(|run| **run > 0).count(), 1, "{run:?}");
    assert_nothing_left(&pooler, &bed.database).await;
}

#[tokio::test]
async fn a_schema_is_chosen_in_the_database() {
    let (pooler, database) = (Pooler::start(3).await, Database::new().await);
    let url = pooler.url(database.name());
    for parameter in ["search_path=app", "options=-c%20search_path%3Dapp"] {
        let error = migrate(&format!("{url}?{parameter}").parse().unwrap()).await.unwrap_err().to_string();
        assert!(error.contains("unsupported startup parameter: options"), "{error}");
        assert!(error.contains("ALTER ROLE"), "{error}");
    }
    let choose = format!("CREATE SCHEMA app; ALTER DATABASE {} SET search_path = app", database.name());
    database.execute(&choose).await;
    pooler.reconnect().await;
    migrate(&url.parse().unwrap()).await.unwrap();
    let tables = "SELECT schemaname::text FROM pg_tables WHERE tablename = 'fga_outbox'";
    assert_eq!(database.query_all::<String>(tables).await, ["app"]);
}

#[tokio::test]
async fn postgres_itself_is_not_taken_for_one() {
    let bed = Bed::new(Flavor::Memory).await;
    for mode in ["disable", "prefer", "require"] {
        let url = format!("{}?sslmode={mode}", bed.database.url());
        let engine = bed.builder().database_url(url).start().unwrap();
        // It is heard where there is none.
        eventually(async || {
            bed.insert(&write("anne", mode)).await;
            engine.stats().rings > 0
        })
        .await;
        engine.stop().await;
    }
}

/// A pooler that names Postgres's processes as they are, and gives a client another server connection after every third
/// of its transactions.
async fn deceive() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = Cluster::shared().await.port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move { switch(client, server).await });
        }
    });
    port
}

async fn switch(mut client: TcpStream, port: u16) -> Option<()> {
    // What a client begins with is in one packet: its length comes first, and it is not encrypted.
    let mut startup = vec![0; client.read_u32().await.ok()? as usize];
    client.read_exact(&mut startup[4..]).await.ok()?;
    let length = startup.len() as u32;
    startup[..4].copy_from_slice(&length.to_be_bytes());
    let mut server = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    server.write_all(&startup).await.ok()?;
    let (mut asked, mut answered, mut transactions) = ([0; 65_536], [0; 65_536], 0);
    loop {
        tokio::select! {
            length = client.read(&mut asked) => match length.ok()? {
                0 => return None,
                length => server.write_all(&asked[..length]).await.ok()?,
            },
            length = server.read(&mut answered) => {
                let answer = &answered[..length.ok().filter(|length| *length > 0)?];
                client.write_all(answer).await.ok()?;
                if answer.ends_with(b"COMMIT\0Z\0\0\0\x05I") || answer.ends_with(b"ROLLBACK\0Z\0\0\0\x05I") {
                    transactions += 1;
                    if transactions % 3 == 0 {
                        server = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
                        server.write_all(&startup).await.ok()?;
                        let mut ready = Vec::new();
                        while !ready.ends_with(b"Z\0\0\0\x05I") {
                            server.read_buf(&mut ready).await.ok()?;
                        }
                    }
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_is_not_to_be_told_from_postgres_is_noticed_before_it_does_harm() {
    let bed = Bed::new(Flavor::Memory).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/{}?sslmode=disable", deceive().await, bed.database.name());
    bed.insert_many(2_000).await;
    let engine = Running::start(&bed, &url);
    eventually(async || bed.database.query_one::<i64>(UNDELIVERED).await == 0).await;
    let id = bed.insert(&write("late", "1")).await;
    eventually(async || bed.state(id).await.delivered).await;
    assert_eq!(bed.database.query_one::<i64>(FAILED).await, 0);
    let log = engine.stop();
    assert_eq!(log.matches("leads to a pooler").count(), 1, "{log}");
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}
