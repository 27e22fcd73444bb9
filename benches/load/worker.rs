//! The worker that people write by hand.

use std::time::{Duration, Instant};

use clap::builder::RangedU64ValueParser;
use serde_json::{Value, json};

use crate::bed::{Bed, Target, Workload, rate};
use crate::table::{Table, median, rounded};

/// The engine against a worker that takes one row at a time
#[derive(clap::Args)]
pub struct Args {
    /// Rows that the engine drains in each round; the worker gets an eighth of them
    #[arg(long, default_value_t = 12_000, value_parser = RangedU64ValueParser::<u32>::new().range(800..))]
    rows: u32,
    #[arg(long, default_value_t = 3, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
}

pub async fn run(Args { rows, rounds }: Args) -> Vec<Table> {
    let workloads = [
        ("single-tuple rows", Workload::Single, false),
        ("archive rows", Workload::Archive, false),
        ("rows that are all there already", Workload::Single, true),
    ];
    let title = format!("the worker written by hand, medians of {rounds} rounds of {rows} rows");
    let mut table = Table::new(&title, ["case", "row by row, rows/s", "engine, rows/s", "ratio"]);
    for (name, workload, is_there) in workloads {
        let (mut by_hand, mut engines) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let few = rows / 8;
            by_hand.push(rate(f64::from(few), row_by_row(&bed(workload, few, is_there).await).await));
            engines.push(rate(f64::from(rows), bed(workload, rows, is_there).await.drain().await));
        }
        let (by_hand, engine) = (median(&by_hand), median(&engines));
        table.row([json!(name), rounded(by_hand), rounded(engine), rounded(engine / by_hand)]);
    }
    vec![table]
}

async fn bed(workload: Workload, rows: u32, is_there: bool) -> Bed {
    let store = Target::openfga().await;
    if is_there {
        store.send(Workload::Single, rows, 4).await;
    }
    Bed::filled(&store, workload, rows).await
}

/// One row, one request, one update.
async fn row_by_row(bed: &Bed) -> Duration {
    let client = bed.database.client().await;
    let http = reqwest::Client::builder().no_proxy().build().expect("the settings are valid");
    let url = bed.target.url("write");
    let take = "SELECT id, payload::text FROM fga_outbox WHERE processed_at IS NULL ORDER BY id
        FOR UPDATE SKIP LOCKED LIMIT 100";
    let take = client.prepare(take).await.unwrap();
    let mark = client.prepare("UPDATE fga_outbox SET processed_at = now() WHERE id = $1").await.unwrap();
    let began = Instant::now();
    loop {
        client.batch_execute("BEGIN").await.unwrap();
        let rows = client.query(&take, &[]).await.unwrap();
        for row in &rows {
            let payload: Value = serde_json::from_str(row.get(1)).unwrap();
            let body = json!({
                "authorization_model_id": bed.target.model_id,
                "writes": {"tuple_keys": payload["writes"], "on_duplicate": "ignore"},
            });
            let answer = http.post(&url).json(&body).send().await.unwrap();
            assert_eq!(answer.status(), 200);
            client.execute(&mark, &[&row.get::<_, i64>(0)]).await.unwrap();
        }
        client.batch_execute("COMMIT").await.unwrap();
        if rows.is_empty() {
            bed.assert_drained().await;
            return began.elapsed();
        }
    }
}
