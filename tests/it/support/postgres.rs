//! Postgres: clusters and databases.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use tokio::{
    runtime,
    sync::{Mutex, OnceCell},
    time::{Instant, sleep},
};
use tokio_postgres::{Client, NoTls, types::FromSqlOwned};

use super::{
    DEADLINE,
    keeper::{Keeper, RunAs},
    parts,
};

/// A role that has to prove [`SECRET_PASSWORD`] by SCRAM and owns nothing. `postgres`, a superuser, is trusted.
pub const SECRET_USER: &str = "secret_user";
pub const SECRET_PASSWORD: &str = "correct-horse-battery";

const HBA: &str = "\
host all secret_user 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
";

const INIT: &str =
    r#""$PG_BIN/initdb" --pgdata="$DIR/data" --username=postgres --auth=trust --encoding=UTF8 --locale=C --no-sync"#;

/// TCP only. The folder does not outlive the process, so nothing has to survive the machine's crash; it does survive the
/// server's.
const START: &str = r#""$PG_BIN/postgres" -D "$DIR/data" -p "$PORT" -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c hba_file="$DIR/pg_hba.conf" -c ssl=on -c ssl_cert_file="$DIR/server.pem" -c ssl_key_file="$DIR/server.key" -c max_connections=400 -c fsync=off -c full_page_writes=off & pid=$!"#;

const STOP_IMMEDIATE: &str = r#"kill -s QUIT "$pid"; wait "$pid"; pid="#;

/// A Postgres server on a port of its own, with TLS for `localhost` and `127.0.0.1` offered and not demanded.
pub struct Cluster {
    keeper: Keeper,
    port: u16,
}

impl Cluster {
    /// The one that this process's tests share.
    pub async fn shared() -> &'static Cluster {
        static SHARED: OnceCell<Cluster> = OnceCell::const_new();
        SHARED.get_or_init(Cluster::start_private).await
    }

    /// One for a test that stops and starts it. It is gone when dropped.
    pub async fn start_private() -> Cluster {
        let port = parts::free_port();
        let keeper = Keeper::new(RunAs::Unprivileged, "QUIT", &[], |dir| {
            fs::write(dir.join("pg_hba.conf"), HBA).expect("the folder can be written");
            write_certificates(dir);
            vec![("PG_BIN", parts::postgres_bin().display().to_string()), ("PORT", port.to_string())]
        });
        let cluster = Cluster { keeper, port };
        cluster.keeper.run(INIT).await;
        cluster.start().await;
        let create_role = format!("CREATE ROLE {SECRET_USER} LOGIN PASSWORD '{SECRET_PASSWORD}'");
        connect(&cluster.url("postgres")).await.batch_execute(&create_role).await.expect("the role is new");
        cluster
    }

    /// Ends the server as `pg_ctl stop -m immediate` does: every connection breaks, nothing is flushed.
    pub async fn stop_immediate(&self) {
        self.keeper.run(STOP_IMMEDIATE).await;
    }

    /// Starts the stopped server on the same port with the same data, and waits until it takes connections.
    pub async fn start(&self) {
        self.keeper.run(START).await;
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = tokio_postgres::connect(&self.url("postgres"), NoTls).await {
            assert!(Instant::now() < deadline, "Postgres does not start: {error}; its log:\n{}", self.keeper.log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// A fresh, empty database of this cluster.
    pub async fn database(&self) -> Database {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}_{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let admin = connect(&self.url("postgres")).await;
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("the name is new");
        Database { port: self.port, name, client: Mutex::new(None) }
    }

    pub fn url(&self, database: &str) -> String {
        url("postgres", self.port, database)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The CA's certificate, in PEM, by which clients verify the server's.
    pub fn ca_pem(&self) -> PathBuf {
        self.keeper.dir().join("ca.pem")
    }

    /// What the server has logged.
    pub fn log(&self) -> String {
        self.keeper.log()
    }
}

/// A database of one test's own.
pub struct Database {
    port: u16,
    name: String,
    client: Mutex<Option<Arc<Client>>>,
}

impl Database {
    /// A fresh one in the shared cluster.
    pub async fn new() -> Database {
        Cluster::shared().await.database().await
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn url(&self) -> String {
        url("postgres", self.port, &self.name)
    }

    /// As [`SECRET_USER`], with the password.
    pub fn secret_url(&self) -> String {
        url(&format!("{SECRET_USER}:{SECRET_PASSWORD}"), self.port, &self.name)
    }

    /// A new connection.
    pub async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    /// Runs statements, several if separated by `;`, on a connection that these helpers share.
    pub async fn execute(&self, sql: &str) {
        let result = self.shared_client().await.batch_execute(sql).await;
        result.unwrap_or_else(|error| panic!("`{sql}`: {error:?}"));
    }

    /// The first column of the only row.
    pub async fn query_one<T: FromSqlOwned>(&self, sql: &str) -> T {
        let row = self.shared_client().await.query_one(sql, &[]).await;
        row.and_then(|row| row.try_get(0)).unwrap_or_else(|error| panic!("`{sql}`: {error:?}"))
    }

    /// The first column of every row.
    pub async fn query_all<T: FromSqlOwned>(&self, sql: &str) -> Vec<T> {
        let rows = self.shared_client().await.query(sql, &[]).await;
        rows.and_then(|rows| rows.iter().map(|row| row.try_get(0)).collect())
            .unwrap_or_else(|error| panic!("`{sql}`: {error:?}"))
    }

    /// Opened again where the server or the runtime that drove it has gone.
    async fn shared_client(&self) -> Arc<Client> {
        let mut client = self.client.lock().await;
        match client.as_ref().filter(|client| !client.is_closed()) {
            Some(open) => Arc::clone(open),
            None => Arc::clone(client.insert(Arc::new(connect(&self.url()).await))),
        }
    }
}

impl Drop for Database {
    /// Hundreds of databases would fill the disk before the cluster goes, so drop it now, if it can be; nobody waits.
    fn drop(&mut self) {
        let admin = url("postgres", self.port, "postgres");
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        thread::spawn(move || {
            let Ok(runtime) = runtime::Builder::new_current_thread().enable_all().build() else { return };
            runtime.block_on(async {
                if let Ok((client, connection)) = tokio_postgres::connect(&admin, NoTls).await {
                    tokio::spawn(connection);
                    let _ = client.batch_execute(&sql).await;
                }
            });
        });
    }
}

fn url(user: &str, port: u16, database: &str) -> String {
    format!("postgres://{user}@127.0.0.1:{port}/{database}")
}

async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
    tokio::spawn(connection);
    client
}

fn write_certificates(dir: &Path) {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "fga-outbox test CA");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(authority, new_key()).expect("the parameters are valid");

    let names = ["localhost", "127.0.0.1"].map(String::from);
    let server_key = new_key();
    let server = CertificateParams::new(names).expect("the names are valid");
    let server = server.signed_by(&server_key, &authority).expect("the parameters are valid");

    write(dir, "ca.pem", &authority.pem(), 0o644);
    write(dir, "server.pem", &server.pem(), 0o644);
    // Postgres refuses a key that others can read.
    write(dir, "server.key", &server_key.serialize_pem(), 0o600);
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("the system has randomness")
}

fn write(dir: &Path, name: &str, text: &str, mode: u32) {
    let path = dir.join(name);
    fs::write(&path, text).expect("the folder can be written");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("the file is ours");
}
