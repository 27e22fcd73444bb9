//! How much of what OpenFGA can do the engine makes use of.

use std::iter::zip;

use clap::builder::RangedU64ValueParser;
use serde_json::json;

use crate::bed::{Bed, Target, Workload, rate};
use crate::table::{Table, median, rounded};

/// The engine against requests of 100 tuples that are sent to the same OpenFGA and nothing else
#[derive(clap::Args)]
pub struct Args {
    /// Rows, or tuples, of a round
    #[arg(long, default_value_t = 24_000, value_parser = RangedU64ValueParser::<u32>::new().range(100..))]
    rows: u32,
    #[arg(long, default_value_t = 3, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
}

pub async fn run(Args { rows, rounds }: Args) -> Vec<Table> {
    let rows = rows.next_multiple_of(100);
    let (sweep, in_flight) = best_in_flight(rows.div_ceil(200) * 100, 2).await;

    let title = format!("share of the ceiling ({in_flight} in flight), medians of {rounds} rounds of {rows} rows");
    let columns = ["engine draining", "rows/s", "tuples sent/s", "ceiling, tuples/s", "share, %"];
    let mut shares = Table::new(&title, columns);
    for (name, workload) in [("single-tuple rows", Workload::Single), ("archive rows", Workload::Archive)] {
        let (mut ceilings, mut engines) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let tuples = f64::from(rows) * workload.tuples_a_row();
            ceilings.push(rate(tuples, Target::openfga().await.send(workload, rows, in_flight).await));
            let bed = Bed::filled(&Target::openfga().await, workload, rows).await;
            engines.push(rate(f64::from(rows), bed.drain().await));
        }
        report(&mut shares, name, workload.tuples_a_row(), &ceilings, &engines);
    }
    let (mut ceilings, mut engines) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let store = Target::openfga().await;
        store.send(Workload::Single, rows, in_flight).await;
        let bed = Bed::filled(&store, Workload::Single, rows).await;
        ceilings.push(rate(f64::from(rows), store.send(Workload::Single, rows, in_flight).await));
        engines.push(rate(f64::from(rows), bed.drain().await));
    }
    report(&mut shares, "rows that are all there already", 1.0, &ceilings, &engines);
    vec![sweep, shares]
}

fn report(table: &mut Table, name: &str, tuples_a_row: f64, ceilings: &[f64], engines: &[f64]) {
    // Of each round: OpenFGA's own Postgres changes its plans now and then, and the server is another one after that.
    let shares: Vec<f64> =
        zip(ceilings, engines).map(|(ceiling, engine)| engine * tuples_a_row / ceiling * 100.0).collect();
    let (ceiling, engine) = (median(ceilings), median(engines));
    let sent = engine * tuples_a_row;
    table.row([json!(name), rounded(engine), rounded(sent), rounded(ceiling), rounded(median(&shares))]);
}

/// With how many requests in flight OpenFGA takes the most new tuples.
pub async fn best_in_flight(tuples: u32, rounds: u32) -> (Table, usize) {
    const TRIED: [usize; 6] = [1, 2, 3, 4, 6, 8];
    let mut rates = [const { Vec::new() }; TRIED.len()];
    for _ in 0..rounds {
        for (in_flight, rates) in zip(TRIED, &mut rates) {
            rates
                .push(rate(f64::from(tuples), Target::openfga().await.send(Workload::Single, tuples, in_flight).await));
        }
    }
    let mut table = Table::new("the ceiling: requests of 100 new tuples", ["in flight", "tuples/s"]);
    zip(TRIED, &rates).for_each(|(in_flight, rates)| table.row([json!(in_flight), rounded(median(rates))]));
    let best = zip(TRIED, rates.map(|rates| median(&rates))).max_by(|(_, a), (_, b)| a.total_cmp(b));
    (table, best.expect("some were tried").0)
}
