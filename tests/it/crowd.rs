//! Many deliverers at one table, and processes that die.

use std::collections::HashSet;
use std::process::{Child, Stdio};

use crate::bed::Bed;
use crate::command_line::on;
use crate::support::{Database, Flavor, eventually, within_deadline};

/// Archive rows as in the demonstration: one tuple of its own, one that many rows share.
async fn insert_archives(bed: &Bed, rows: i32) {
    let sql = format!(
        "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(
            jsonb_build_object('user', 'capture_job:' || n % 97, 'relation', 'parent', 'object', 'archive:' || n),
            jsonb_build_object('user', 'organization:acme', 'relation', 'parent', 'object', 'capture_job:' || n % 97)
        )) FROM generate_series(1, {rows}) n"
    );
    bed.database.execute(&sql).await;
}

/// Who marked a row, and how often, as the table itself sees it.
const WITNESS: &str = "
    CREATE TABLE marks (id bigint);
    CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO marks VALUES (NEW.id); RETURN NULL; END $$;
    CREATE TRIGGER witness AFTER UPDATE OF processed_at ON fga_outbox FOR EACH ROW EXECUTE FUNCTION witness()";

async fn all_is_there(bed: &Bed, rows: usize) {
    let keys: HashSet<String> = bed.store.read_all().await.into_iter().map(|key| key.to_string()).collect();
    assert_eq!(keys.len(), rows + 97.min(rows));
    assert_eq!(bed.database.query_one::<i64>("SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL").await, 0);
}

/// A drain that knows row locks and nothing else, as applications have it: it sends its rows itself, one by one.
async fn foreign_drain(database: &Database, store: &crate::support::Store) -> u64 {
    let mut client = database.client().await;
    let mut marked = 0;
    loop {
        let transaction = client.transaction().await.unwrap();
        let rows = transaction
            .query(
                "SELECT id, payload::text FROM fga_outbox WHERE processed_at IS NULL ORDER BY id
                 FOR UPDATE SKIP LOCKED LIMIT 20",
                &[],
            )
            .await
            .unwrap();
        if rows.is_empty() {
            return marked;
        }
        for row in rows {
            let payload: serde_json::Value = serde_json::from_str(row.get(1)).unwrap();
            for tuple in payload["writes"].as_array().unwrap() {
                let body = serde_json::json!({"writes": {"tuple_keys": [tuple], "on_duplicate": "ignore"}});
                while store.write_raw(&body).await.0 != 200 {}
            }
            let mark = "UPDATE fga_outbox SET processed_at = now() WHERE id = $1";
            marked += transaction.execute(mark, &[&row.get::<_, i64>(0)]).await.unwrap();
        }
        transaction.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_engines_and_two_foreign_drains_share_the_rows() {
    const ROWS: i32 = 20_000;
    let bed = Bed::new(Flavor::Postgres).await;
    bed.database.execute(WITNESS).await;
    insert_archives(&bed, ROWS).await;
    let engines: Vec<_> = (0..4).map(|_| bed.engine()).collect();
    let drains = futures_util::future::try_join_all(engines.iter().map(|engine| engine.drain()));
    let foreign =
        futures_util::future::join(foreign_drain(&bed.database, &bed.store), foreign_drain(&bed.database, &bed.store));
    let (drained, (a, b)) = within_long_deadline(futures_util::future::join(drains, foreign)).await;
    let delivered: u64 = drained.unwrap().iter().map(|drained| drained.delivered).sum();
    for engine in engines {
        engine.stop().await;
    }
    assert_eq!(delivered + a + b, ROWS as u64);
    assert!(delivered > 0 && a + b > 0, "engines {delivered}, foreign drains {a} and {b}");
    let twice = "SELECT count(*) FROM (SELECT id FROM marks GROUP BY id HAVING count(*) > 1) twice";
    assert_eq!(bed.database.query_one::<i64>(twice).await, 0);
    assert_eq!(bed.database.query_one::<i64>("SELECT count(*) FROM marks").await, ROWS as i64);
    all_is_there(&bed, ROWS as usize).await;
    assert_eq!(bed.database.query_one::<i64>("SELECT count(*) FROM fga_outbox WHERE attempts > 0").await, 0);
}

struct Running(Child);

impl Running {
    fn start(bed: &Bed) -> Self {
        Self(on(bed, &["run"]).stderr(Stdio::null()).spawn().unwrap())
    }

    /// `kill -9`.
    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_process_killed_at_any_moment_loses_nothing() {
    const ROWS: i32 = 20_000;
    let bed = Bed::new(Flavor::Postgres).await;
    insert_archives(&bed, ROWS).await;
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    for kill in 0..20 {
        let running = Running::start(&bed);
        // At another moment each time: after some rows more, anywhere within a lease.
        let until = bed.database.query_one::<i64>(left).await - rand::random_range(1..700);
        eventually(async || bed.database.query_one::<i64>(left).await <= until.max(0)).await;
        running.kill();
        assert!(kill > 0 || bed.database.query_one::<i64>(left).await > 0, "killed too late to prove anything");
    }
    let second = Running::start(&bed);
    eventually(async || bed.database.query_one::<i64>(left).await == 0).await;
    second.kill();
    all_is_there(&bed, ROWS as usize).await;
}

/// For what is bounded in count but large.
async fn within_long_deadline<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(5 * crate::support::DEADLINE, future).await.expect("ended in time")
}

#[tokio::test]
async fn a_killed_process_frees_its_rows_at_once() {
    let bed = Bed::new(Flavor::Postgres).await;
    insert_archives(&bed, 3_000).await;
    let running = Running::start(&bed);
    let held = "SELECT count(*) FILTER (WHERE state = 'idle in transaction') > 0 FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'fga-outbox'";
    eventually(|| bed.database.query_one::<bool>(held)).await;
    running.kill();
    let engine = bed.engine();
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.waiting, drained.refused, drained.held), (0, 0, 0));
    engine.stop().await;
    all_is_there(&bed, 3_000).await;
}
