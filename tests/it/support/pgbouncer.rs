//! PgBouncer, in transaction mode.

use std::{fs, time::Duration};

use tokio::time::{Instant, sleep};
use tokio_postgres::NoTls;

use super::{
    Cluster, DEADLINE,
    keeper::{Keeper, RunAs},
    parts,
};

const START: &str = r#""$PGBOUNCER_BIN" "$DIR/ini" & pid=$!"#;

/// A pooler before the shared cluster. Each database has so many server connections, and each transaction gets the one
/// that has rested longest.
pub struct Pooler {
    keeper: Keeper,
    port: u16,
    pub connections: usize,
}

impl Pooler {
    pub async fn start(connections: usize) -> Pooler {
        let (port, to) = (parts::free_port(), Cluster::shared().await.port());
        let ini = format!(
            "[databases]\n* = host=127.0.0.1 port={to} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             server_round_robin = 1\nadmin_users = postgres\ndefault_pool_size = {connections}\nmin_pool_size = {connections}\n"
        );
        let keeper = Keeper::new(RunAs::Unprivileged, "KILL", &[], |dir| {
            fs::write(dir.join("ini"), ini).expect("the folder can be written");
            vec![("PGBOUNCER_BIN", parts::pgbouncer().display().to_string())]
        });
        keeper.run(START).await;
        let pooler = Pooler { keeper, port, connections };
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = tokio_postgres::connect(&pooler.url("postgres"), NoTls).await {
            assert!(Instant::now() < deadline, "PgBouncer does not start: {error}; its log:\n{}", pooler.keeper.log());
            sleep(Duration::from_millis(20)).await;
        }
        pooler
    }

    /// Has it make new server connections, which know what was set for the database.
    pub async fn reconnect(&self) {
        let url = self.url("pgbouncer");
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("PgBouncer's console");
        tokio::spawn(connection);
        client.simple_query("RECONNECT").await.expect("a command of PgBouncer's");
    }

    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }
}
