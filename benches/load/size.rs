//! Whether the cost of a claim follows the backlog, whatever else lies in the table.

use std::time::{Duration, Instant};

use clap::builder::RangedU64ValueParser;
use fga_outbox::internals::Claims;
use serde_json::{Value, json};

use crate::bed::{Bed, Workload, database_url, rate};
use crate::process::Process;
use crate::sink;
use crate::table::{Table, median, rounded};

/// The engine's claims and drains by what lies in the table besides; and the memory of a process
#[derive(clap::Args)]
pub struct Args {
    /// Delivered rows of the largest table
    #[arg(long, default_value_t = 10_000_000, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rows: u32,
    /// Rows to drain in each
    #[arg(long, default_value_t = 50_000, value_parser = RangedU64ValueParser::<u32>::new().range(2_000..))]
    drained: u32,
    /// Rows of the long backlog
    #[arg(long, default_value_t = 1_000_000, value_parser = RangedU64ValueParser::<u32>::new().range(2_000..))]
    backlog: u32,
    /// Seconds that the process runs whose memory is looked at
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

const REFUSED: u32 = 200_000;
/// Delivered while a snapshot is held, so that their index entries stay.
const UNDER_SNAPSHOT: u32 = 450_000;

pub async fn run(Args { rows, drained, backlog, seconds }: Args) -> Vec<Table> {
    let sink = sink::start();
    let title = format!("claims of one engine, and drains of {drained} rows into the sink");
    let columns = [
        "beside them",
        "first look, ms",
        "claim of 100, ms",
        "ratio",
        "claim of 1000, ms",
        "ratio",
        "drain, rows/s",
        "ratio",
    ];
    let mut claims = Table::new(&title, columns);
    let mut empty = None;
    let mut report = |name: String, measured: Measured| {
        let first = *empty.get_or_insert(measured);
        let Measured { look, of_100, of_1000, rate } = measured;
        claims.row([
            json!(name),
            ms(look),
            ms(of_100),
            ratio(of_100, first.of_100),
            ms(of_1000),
            ratio(of_1000, first.of_1000),
            rounded(rate),
            rounded(rate / first.rate),
        ]);
    };

    // Once in vain: the first one is on a server that is cold, and the others are compared with it.
    measure(&Bed::filled(&sink, Workload::Single, drained).await).await;
    report("nothing".into(), measure(&Bed::filled(&sink, Workload::Single, drained).await).await);
    for delivered in [1_000_000, rows] {
        let bed = Bed::new(&sink).await;
        insert(&bed, delivered, "processed_at", "now()").await;
        report(format!("{delivered} delivered"), measure(&filled(bed, drained).await).await);
    }
    let bed = Bed::new(&sink).await;
    // Under the model that is still the latest: an engine would bring them back for another.
    let values = format!("1, 'type not found', 'infinity', '{}'", sink.model_id);
    insert(&bed, REFUSED, "attempts, last_error, next_attempt_at, refused_model_id", &values).await;
    report(format!("{REFUSED} refused before them"), measure(&filled(bed, drained).await).await);

    let bed = Bed::filled(&sink, Workload::Single, UNDER_SNAPSHOT + drained).await;
    let forgotten = bed.database.client().await;
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM fga_outbox LIMIT 1";
    forgotten.batch_execute(begin).await.expect("the table is there");
    deliver(&bed, UNDER_SNAPSHOT).await;
    report(format!("{UNDER_SNAPSHOT} delivered under a forgotten snapshot"), measure(&bed).await);
    drop(forgotten);

    let long = async || Bed::filled(&sink, Workload::Single, backlog).await;
    report(format!("a backlog of {backlog}, drained to its end"), measure(&long().await).await);
    vec![claims, memory(&long().await, Duration::from_secs(seconds)).await]
}

#[derive(Clone, Copy)]
struct Measured {
    /// Where rows may be new, as an engine looks when it is started and every few seconds.
    look: Duration,
    of_100: Duration,
    of_1000: Duration,
    /// Of the drain, in rows a second.
    rate: f64,
}

async fn measure(bed: &Bed) -> Measured {
    let mut claims = Claims::new(&database_url(&bed.database));
    let began = Instant::now();
    claims.look().await.expect("the table is there");
    let look = began.elapsed();
    // What was seen counts once every transaction has ended that had begun by then, and a second later at the earliest.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let from = claims.look().await.expect("the table is there");
    let (of_100, of_1000) = (claim(&claims, from, 100).await, claim(&claims, from, 1_000).await);
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL AND next_attempt_at IS NULL";
    let left = bed.database.query_one::<i64>(left).await;
    let began = Instant::now();
    let engine = bed.builder().start().expect("the settings are valid");
    engine.drain().await.expect("both servers are there");
    let rate = rate(left as f64, began.elapsed());
    engine.stop().await;
    Measured { look, of_100, of_1000, rate }
}

/// How long it takes to claim so many rows, as an engine's sweep does.
async fn claim(claims: &Claims, from: i64, rows: i64) -> Duration {
    let mut times = Vec::new();
    for _ in 0..25 {
        let began = Instant::now();
        let held = claims.claim(from.saturating_sub(1), rows).await.expect("the table is there");
        times.push(began.elapsed().as_secs_f64());
        let held = held.expect("there are enough rows");
        assert_eq!(held.ids().count() as i64, rows);
        held.give_back().await.expect("the lease is good");
    }
    Duration::from_secs_f64(median(&times))
}

async fn filled(bed: Bed, rows: u32) -> Bed {
    bed.insert(Workload::Single, rows).await;
    bed.database.execute("VACUUM ANALYZE fga_outbox").await;
    // So that it does not run while claims are timed.
    bed.database.execute("CHECKPOINT").await;
    bed
}

/// Rows that are not to be claimed.
async fn insert(bed: &Bed, rows: u32, columns: &str, values: &str) {
    let payload = Workload::Single.payload();
    let insert = format!(
        "INSERT INTO fga_outbox (payload, {columns}) SELECT {payload}, {values} FROM generate_series(1, {rows}) n"
    );
    bed.database.execute(&insert).await;
}

/// Delivers the first rows, as an engine records it.
async fn deliver(bed: &Bed, rows: u32) {
    let claims = Claims::new(&database_url(&bed.database));
    let mut last = 0;
    for _ in 0..rows / 1_000 {
        let held = claims.claim(last, 1_000).await.expect("the table is there").expect("there are enough rows");
        last = held.ids().max().expect("it holds rows");
        held.deliver().await.expect("the lease is good");
    }
}

/// The memory of a process that has a long backlog.
async fn memory(bed: &Bed, time: Duration) -> Table {
    let pending = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    let before = bed.database.query_one::<i64>(pending).await;
    let process = Process::start(bed, "run");
    tokio::time::sleep(time).await;
    let mebibytes = process.peak_mebibytes();
    drop(process);
    let delivered = before - bed.database.query_one::<i64>(pending).await;
    let title = format!("a process with {before} rows pending, after {} s", time.as_secs());
    let mut table = Table::new(&title, ["peak memory, MiB", "rows delivered"]);
    table.row([mebibytes.map_or(Value::Null, rounded), json!(delivered)]);
    table
}

fn ms(time: Duration) -> Value {
    rounded(time.as_secs_f64() * 1e3)
}

fn ratio(time: Duration, to: Duration) -> Value {
    rounded(time.as_secs_f64() / to.as_secs_f64())
}
