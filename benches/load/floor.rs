//! What is left of the engine's cost where OpenFGA costs nothing.

use clap::builder::RangedU64ValueParser;
use fga_outbox::internals::claim_and_mark;
use serde_json::json;

use crate::bed::{Bed, Workload, rate};
use crate::table::{Table, median, rounded};
use crate::{pgbench, sink};

/// The engine against an instant sink, beside pgbench that claims and marks as many rows at a time
#[derive(clap::Args)]
pub struct Args {
    /// Rows of a round
    #[arg(long, default_value_t = 100_000, value_parser = RangedU64ValueParser::<u32>::new().range(4_000..))]
    rows: u32,
    #[arg(long, default_value_t = 3, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
}

/// The rows of a transaction: what the engine's leases have while the backlog is long.
const BATCH: u32 = 1_000;

/// The simplest statements that claim and mark.
const PLAIN: [&str; 2] = [
    "SELECT id, payload::text FROM fga_outbox WHERE processed_at IS NULL ORDER BY id LIMIT 1000 FOR UPDATE SKIP LOCKED",
    "UPDATE fga_outbox SET processed_at = clock_timestamp() WHERE id = ANY(:ids::bigint[])",
];

/// pgbench keeps no rows, only variables: the ids and the payloads come as one row of two long values. That is cheaper
/// than a thousand rows, and nothing is parsed of them: a lower bound for any worker's way with these two statements.
fn script(claim: &str, mark: &str) -> String {
    let claim = claim.replace('\n', " ");
    format!(
        "BEGIN;
         SELECT array_agg(id) AS ids, string_agg(payload, '') AS payloads FROM ({claim}) AS claimed (id, payload) \\gset
         {};
         COMMIT;",
        mark.replace('\n', " ")
    )
}

pub async fn run(Args { rows, rounds }: Args) -> Vec<Table> {
    const CLIENTS: [u32; 3] = [1, 2, 4];
    // A whole number of batches for each client.
    let rows = rows / (4 * BATCH) * (4 * BATCH);
    let sink = sink::start();
    let [claim, mark] = claim_and_mark(i64::from(BATCH), ":ids::bigint[]");
    let scripts =
        [("the plainest statements", script(PLAIN[0], PLAIN[1])), ("its own statements", script(&claim, &mark))];
    let (mut engines, mut floors) = (Vec::new(), [const { [const { Vec::new() }; CLIENTS.len()] }; 2]);
    for _ in 0..rounds {
        for ((_, script), by_clients) in scripts.iter().zip(&mut floors) {
            for (clients, rates) in CLIENTS.iter().zip(by_clients) {
                let bed = Bed::filled(&sink, Workload::Single, rows).await;
                let (clients, transactions) = (clients.to_string(), (rows / BATCH / clients).to_string());
                let args = ["--client", &clients, "--jobs", &clients, "--transactions", &transactions];
                rates.push(pgbench::run(&bed.database, script, &args) * f64::from(BATCH));
                bed.assert_drained().await;
            }
        }
        let bed = Bed::filled(&sink, Workload::Single, rows).await;
        engines.push(rate(f64::from(rows), bed.drain().await));
    }
    let engine = median(&engines);
    let title = format!("without OpenFGA: medians of {rounds} rounds of {rows} single-tuple rows");
    let mut table = Table::new(&title, ["case", "rows/s", "the engine's share, %"]);
    for ((name, _), by_clients) in scripts.iter().zip(floors) {
        for (clients, rates) in CLIENTS.iter().zip(by_clients) {
            let (case, rate) = (format!("pgbench, {name}, {clients} clients"), median(&rates));
            table.row([json!(case), rounded(rate), rounded(engine / rate * 100.0)]);
        }
    }
    table.row([json!("engine"), rounded(engine), json!(100)]);
    vec![table]
}
