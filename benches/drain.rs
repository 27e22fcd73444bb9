//! The engine against the worker that people write by hand, side by side in one run, on a private Postgres and a real
//! OpenFGA with its Postgres datastore:
//!
//!     cargo bench --bench drain
//!     cargo bench --bench drain -- --rows 20000 --rounds 5 --json

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use clap::Parser;
use fga_outbox::{DatabaseUrl, Engine, migrate};
use serde_json::{Value, json};

use support::{Database, Flavor, Store};

/// Compares the engine with a worker that takes one row at a time.
#[derive(Parser)]
struct Args {
    /// Rows that the engine drains in each round; the worker gets an eighth of them
    #[arg(long, default_value_t = 16_000)]
    rows: u32,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// What a row holds.
#[derive(Clone, Copy)]
enum Workload {
    /// One tuple of its own.
    Single,
    /// One tuple of its own, and one that a hundred rows share.
    Archive,
    /// One tuple, which is in OpenFGA already.
    AlreadyThere,
}

impl Workload {
    const ALL: [(Self, &str); 3] =
        [(Self::Single, "single-tuple rows"), (Self::Archive, "archive rows"), (Self::AlreadyThere, "already there")];

    fn writes(self) -> &'static str {
        match self {
            Self::Single | Self::AlreadyThere => {
                "jsonb_build_object('user', 'user:' || n, 'relation', 'viewer', 'object', 'document:' || n)"
            }
            Self::Archive => {
                "jsonb_build_object('user', 'capture_job:' || n / 100, 'relation', 'parent', 'object', 'archive:' || n),
                 jsonb_build_object('user', 'organization:acme', 'relation', 'parent', 'object', 'capture_job:' || n / 100)"
            }
        }
    }
}

#[tokio::main]
async fn main() {
    let args = Args::parse();
    let mut results = Vec::new();
    for (workload, name) in Workload::ALL {
        let (mut by_hand, mut by_engine) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            let rows = args.rows / 8;
            by_hand.push(f64::from(rows) / measure(workload, rows, row_by_row).await.as_secs_f64());
            by_engine.push(f64::from(args.rows) / measure(workload, args.rows, engine).await.as_secs_f64());
        }
        let (by_hand, by_engine) = (median(by_hand), median(by_engine));
        results.push((name, by_hand, by_engine));
    }
    if args.json {
        let results: Vec<Value> = results
            .iter()
            .map(|(name, by_hand, engine)| {
                json!({"workload": name, "row_by_row_rows_per_second": by_hand, "engine_rows_per_second": engine,
                       "ratio": engine / by_hand})
            })
            .collect();
        println!("{}", json!(results));
        return;
    }
    println!("{:<20}{:>16}{:>16}{:>9}", "", "row by row", "engine", "ratio");
    for (name, by_hand, engine) in results {
        println!("{name:<20}{by_hand:>10.0} row/s{engine:>10.0} row/s{:>8.1}×", engine / by_hand);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// How long a drain takes of this many rows, in a database and a store of its own.
async fn measure(workload: Workload, rows: u32, drain: impl AsyncFn(&Database, &Store)) -> Duration {
    let database = Database::new().await;
    let store = Store::new(Flavor::Postgres).await;
    migrate(&database.url().parse::<DatabaseUrl>().unwrap()).await.unwrap();
    let insert = format!(
        "INSERT INTO fga_outbox (payload)
         SELECT jsonb_build_object('writes', jsonb_build_array({})) FROM generate_series(1, {rows}) n",
        workload.writes()
    );
    database.execute(&insert).await;
    if let Workload::AlreadyThere = workload {
        engine(&database, &store).await;
        database.execute("UPDATE fga_outbox SET processed_at = NULL").await;
    }
    database.execute("VACUUM ANALYZE fga_outbox").await;
    let began = Instant::now();
    drain(&database, &store).await;
    let took = began.elapsed();
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    assert_eq!(database.query_one::<i64>(left).await, 0, "all was delivered");
    took
}

async fn engine(database: &Database, store: &Store) {
    let engine = Engine::builder()
        .database_url(database.url())
        .api_url(store.api_url())
        .store_id(store.store_id())
        .model_id(store.model_id())
        .start()
        .unwrap();
    engine.drain().await.unwrap();
    engine.stop().await;
}

/// One row, one request, one update: the worker that this engine replaces.
async fn row_by_row(database: &Database, store: &Store) {
    let client = database.client().await;
    let http = reqwest::Client::new();
    let url = format!("{}/stores/{}/write", store.api_url(), store.store_id());
    let take = "SELECT id, payload::text FROM fga_outbox WHERE processed_at IS NULL ORDER BY id
        FOR UPDATE SKIP LOCKED LIMIT 100";
    let take = client.prepare(take).await.unwrap();
    let mark = client.prepare("UPDATE fga_outbox SET processed_at = now() WHERE id = $1").await.unwrap();
    loop {
        client.batch_execute("BEGIN").await.unwrap();
        let rows = client.query(&take, &[]).await.unwrap();
        for row in &rows {
            let payload: Value = serde_json::from_str(row.get(1)).unwrap();
            let body = json!({
                "authorization_model_id": store.model_id(),
                "writes": {"tuple_keys": payload["writes"], "on_duplicate": "ignore"},
            });
            let answer = http.post(&url).json(&body).send().await.unwrap();
            assert_eq!(answer.status(), 200);
            client.execute(&mark, &[&row.get::<_, i64>(0)]).await.unwrap();
        }
        client.batch_execute("COMMIT").await.unwrap();
        if rows.is_empty() {
            return;
        }
    }
}
