//! Several engines on one table.

use std::time::Instant;

use clap::builder::RangedU64ValueParser;
use serde_json::json;

use crate::bed::{Bed, Target, Workload, rate};
use crate::process::{Process, Taken};
use crate::sink;
use crate::table::{Table, median, rounded};

/// 1, 2, 4 and 8 processes that drain one table, into one OpenFGA and into an instant sink
#[derive(clap::Args)]
pub struct Args {
    /// Rows of a round into OpenFGA; the sink gets sixteen times as many
    #[arg(long, default_value_t = 10_000, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rows: u32,
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
}

pub async fn run(Args { rows, rounds }: Args) -> Vec<Table> {
    vec![
        scale("into OpenFGA", async || Target::openfga().await, rows, rounds).await,
        scale("into the sink", async || sink::start(), rows * 16, rounds).await,
    ]
}

async fn scale(into: &str, target: impl AsyncFn() -> Target, rows: u32, rounds: u32) -> Table {
    let title = format!("engines side by side {into}, medians of {rounds} rounds of {rows} single-tuple rows");
    let columns = ["processes", "rows/s", "peak memory of one, MiB", "CPU seconds for 10,000 rows, all together"];
    let mut table = Table::new(&title, columns);
    for processes in [1, 2, 4, 8] {
        let (mut rates, mut memory, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let bed = Bed::filled(&target().await, Workload::Single, rows).await;
            let began = Instant::now();
            let started: Vec<_> = (0..processes).map(|_| Process::start(&bed, "drain")).collect();
            let taken: Vec<Taken> = std::thread::scope(|scope| {
                let waits: Vec<_> = started.into_iter().map(|it| scope.spawn(|| it.wait())).collect();
                waits.into_iter().map(|wait| wait.join().expect("every process drains")).collect()
            });
            rates.push(rate(f64::from(rows), began.elapsed()));
            bed.assert_drained().await;
            memory.push(taken.iter().map(|it| it.mebibytes).fold(0.0, f64::max));
            cpu.push(taken.iter().map(|it| it.cpu_seconds).sum::<f64>() * 10_000.0 / f64::from(rows));
        }
        table.row([json!(processes), rounded(median(&rates)), rounded(median(&memory)), rounded(median(&cpu))]);
    }
    table
}
