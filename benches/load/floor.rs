//! What is left of the engine's cost where OpenFGA costs nothing.

use clap::builder::RangedU64ValueParser;
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

/// pgbench keeps no rows, only variables: the ids and the payloads come as one row of two long values. That is cheaper
/// than a thousand rows, and nothing is parsed of them: a lower bound for any worker's way with these two statements.
const CLAIM_AND_MARK: &str = "
BEGIN;
SELECT array_agg(id) AS ids, string_agg(payload::text, '') AS payloads FROM (SELECT id, payload FROM fga_outbox WHERE processed_at IS NULL ORDER BY id LIMIT 1000 FOR UPDATE SKIP LOCKED) AS claimed \\gset
UPDATE fga_outbox SET processed_at = clock_timestamp() WHERE id = ANY(:ids::bigint[]);
COMMIT;
";

pub async fn run(Args { rows, rounds }: Args) -> Vec<Table> {
    const CLIENTS: [u32; 3] = [1, 2, 4];
    // A whole number of batches for each client.
    let rows = rows / (4 * BATCH) * (4 * BATCH);
    let sink = sink::start();
    let (mut engines, mut by_clients) = (Vec::new(), [const { Vec::new() }; CLIENTS.len()]);
    for _ in 0..rounds {
        for (clients, rates) in CLIENTS.iter().zip(&mut by_clients) {
            let bed = Bed::filled(&sink, Workload::Single, rows).await;
            let (clients, transactions) = (clients.to_string(), (rows / BATCH / clients).to_string());
            let args = ["--client", &clients, "--jobs", &clients, "--transactions", &transactions];
            rates.push(pgbench::run(&bed.database, CLAIM_AND_MARK, &args) * f64::from(BATCH));
            bed.assert_drained().await;
        }
        let bed = Bed::filled(&sink, Workload::Single, rows).await;
        engines.push(rate(f64::from(rows), bed.drain().await));
    }
    let by_clients = by_clients.map(|rates| median(&rates));
    let best = by_clients.iter().copied().fold(0.0, f64::max);
    let title = format!("without OpenFGA: medians of {rounds} rounds of {rows} single-tuple rows");
    let mut table = Table::new(&title, ["case", "rows/s", "of pgbench's best, %"]);
    for (clients, rate) in CLIENTS.iter().zip(by_clients) {
        table.row([json!(format!("pgbench, {clients} clients")), rounded(rate), rounded(rate / best * 100.0)]);
    }
    let engine = median(&engines);
    table.row([json!("engine"), rounded(engine), rounded(engine / best * 100.0)]);
    vec![table]
}
