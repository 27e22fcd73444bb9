//! What it costs to keep rows in order.

use std::time::{Duration, Instant};

use clap::builder::RangedU64ValueParser;
use fga_outbox::EngineBuilder;
use futures_util::future::join_all;
use serde_json::json;

use crate::bed::{Bed, Target, Workload, rate};
use crate::sink;
use crate::table::{Table, median, rounded};

/// 4 engines with and without order; and rows that a process held which died
#[derive(clap::Args)]
pub struct Args {
    /// Rows of a round into OpenFGA; the sink gets eight times as many
    #[arg(long, default_value_t = 10_000, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rows: u32,
    #[arg(long, default_value_t = 3, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
    /// Rows that contradict each other, over 200 tuples
    #[arg(long, default_value_t = 2_000, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    contradicting: u32,
}

const ENGINES: usize = 4;

pub async fn run(Args { rows, rounds, contradicting }: Args) -> Vec<Table> {
    let title = format!("order, {ENGINES} engines, archive rows, medians of {rounds} rounds");
    let mut share = Table::new(&title, ["case", "rows", "without order, rows/s", "in order, rows/s", "share, %"]);
    compare(&mut share, "into OpenFGA", async || Target::openfga().await, rows, rounds).await;
    compare(&mut share, "into the sink", async || sink::start(), rows * 8, rounds).await;

    let title = format!("{contradicting} rows that contradict each other, over 200 tuples, one engine");
    let mut doubt = Table::new(&title, ["case", "all delivered after, s", "requests"]);
    for (name, died) in [("never held", false), ("held by a process that died", true)] {
        let (took, requests) = contradict(contradicting, died).await;
        doubt.row([json!(name), rounded(took.as_secs_f64()), json!(requests)]);
    }
    vec![share, doubt]
}

async fn compare(table: &mut Table, into: &str, target: impl AsyncFn() -> Target, rows: u32, rounds: u32) {
    let (mut without, mut in_order) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (rates, ordered) in [(&mut without, false), (&mut in_order, true)] {
            let bed = Bed::filled(&target().await, Workload::Archive, rows).await;
            let builder = if ordered { bed.builder() } else { bed.builder().without_order() };
            rates.push(rate(f64::from(rows), drain_together(&bed, builder).await));
        }
    }
    let (without, in_order) = (median(&without), median(&in_order));
    let share = in_order / without * 100.0;
    table.row([json!(into), json!(rows), rounded(without), rounded(in_order), rounded(share)]);
}

async fn drain_together(bed: &Bed, builder: EngineBuilder) -> Duration {
    let began = Instant::now();
    let engines: Vec<_> = (0..ENGINES).map(|_| builder.clone().start().expect("the settings are valid")).collect();
    let drained = join_all(engines.iter().map(|engine| engine.drain())).await;
    let took = began.elapsed();
    for drained in drained {
        drained.expect("both servers are there");
    }
    join_all(engines.iter().map(|engine| engine.stop())).await;
    bed.assert_drained().await;
    took
}

/// How long it takes until all of these are delivered for good, and how many requests that needs.
async fn contradict(rows: u32, died: bool) -> (Duration, u64) {
    let bed = Bed::new(&Target::openfga().await).await;
    let insert = format!(
        "INSERT INTO fga_outbox (payload)
         SELECT jsonb_build_object(CASE n / 200 % 2 WHEN 0 THEN 'writes' ELSE 'deletes' END, jsonb_build_array(
             jsonb_build_object('user', 'user:' || n % 200, 'relation', 'viewer', 'object', 'document:1')))
         FROM generate_series(0, {rows} - 1) n"
    );
    bed.database.execute(&insert).await;
    if died {
        // What a process leaves behind that was killed: locks of a transaction that was never committed.
        bed.database.execute("BEGIN; SELECT FROM fga_outbox FOR UPDATE; ROLLBACK").await;
    }
    let began = Instant::now();
    let engine = bed.builder().start().expect("the settings are valid");
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    loop {
        engine.drain().await.expect("both servers are there");
        // Rows that are to be confirmed wait for their time.
        if bed.database.query_one::<i64>(left).await == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = began.elapsed();
    engine.stop().await;
    (took, engine.stats().requests)
}
