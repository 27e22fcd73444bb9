//! How long after its commit a row takes effect.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

use crate::bed::{Bed, Target, Workload, rate};
use crate::ceiling::best_in_flight;
use crate::proxy::{self, Answered, Micros, Proxy, now};
use crate::support::{Database, eventually};
use crate::table::{Table, rounded};

/// From the commit to OpenFGA's answer and to processed_at: idle, and at shares of the ceiling
#[derive(clap::Args)]
pub struct Args {
    /// Commits of the idle run, one every 50 to 150 ms
    #[arg(long, default_value_t = 300, value_parser = RangedU64ValueParser::<u32>::new().range(10..))]
    commits: u32,
    /// Seconds of each run under load
    #[arg(long, default_value_t = 6, value_parser = RangedU64ValueParser::<u64>::new().range(1..))]
    seconds: u64,
    /// Connections that commit
    #[arg(long, default_value_t = 8, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    writers: u32,
}

pub async fn run(Args { commits, seconds, writers }: Args) -> Vec<Table> {
    let (_, in_flight) = best_in_flight(4_000, 1).await;
    // Over as long a time as each of the runs: it is not as fast as in a short one.
    const TUPLES: u32 = 24_000;
    let ceiling = rate(f64::from(TUPLES), Target::openfga().await.send(Workload::Single, TUPLES, in_flight).await);
    let proxy = proxy::start(&Target::openfga().await);
    let title = format!(
        "milliseconds from the time when a commit was due, {writers} writers, ceiling {ceiling:.0} tuples/s; \
         'beyond' is without OpenFGA's own time for the row's request"
    );
    let mut table = Table::new(&title, ["load", "time", "commits", "p50", "p95", "p99", "p99.9", "longest"]);
    let mut random = StdRng::seed_from_u64(7);
    let idle = due(commits, |_| random.random_range(50_000.0..150_000.0));
    measure(&mut table, "idle", &proxy, idle, writers).await;
    for share in [0.25, 0.5, 0.75] {
        let commits_per_second = ceiling * share;
        // Arrivals that know nothing of each other.
        let gap = |_| -(1.0 - random.random::<f64>()).ln() * 1e6 / commits_per_second;
        let due = due((commits_per_second * seconds as f64) as u32, gap);
        measure(&mut table, &format!("{:.0} %", share * 100.0), &proxy, due, writers).await;
    }
    vec![table]
}

/// When each commit is due, from the beginning on.
fn due(commits: u32, mut gap: impl FnMut(u32) -> f64) -> Vec<Micros> {
    let mut at = 0.0;
    let next = |n| {
        at += gap(n);
        at as Micros
    };
    (0..commits).map(next).collect()
}

/// A commit.
struct Commit {
    row: i64,
    number: usize,
    due: Micros,
    done: Micros,
}

async fn measure(table: &mut Table, load: &str, proxy: &Proxy, due: Vec<Micros>, writers: u32) {
    let store = Target::openfga().await;
    let bed = Bed::new(&Target { api_url: proxy.url.clone(), ..store }).await;
    let engine = bed.builder().start().expect("the settings are valid");
    // So that it is up, with nothing to do.
    engine.drain().await.expect("both servers are there");
    proxy.take();
    let commits = commit(&bed.database, due, writers).await;
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    eventually(async || bed.database.query_one::<i64>(left).await == 0).await;
    engine.stop().await;

    let (answered, processed) = (proxy.take(), processed(&bed.database).await);
    let answered: Vec<Answered> = commits.iter().map(|it| answered[&format!("document:{}", it.number)]).collect();
    let mut report = |name: &str, times: Vec<Micros>| {
        let mut histogram = Histogram::<u64>::new(3).expect("three digits are few enough");
        times.iter().for_each(|time| histogram.record((*time).max(0) as u64).expect("it grows"));
        let at = |quantile| rounded(histogram.value_at_quantile(quantile) as f64 / 1e3);
        let longest: Value = rounded(histogram.max() as f64 / 1e3);
        table.row([json!(load), json!(name), json!(times.len()), at(0.5), at(0.95), at(0.99), at(0.999), longest]);
    };
    report("committed", commits.iter().map(|it| it.done - it.due).collect());
    report("OpenFGA has answered", commits.iter().zip(&answered).map(|(it, at)| at.answered - it.due).collect());
    report("processed_at", commits.iter().map(|it| processed[&it.row] - it.due).collect());
    report("OpenFGA's own time", answered.iter().map(|at| at.answered - at.asked).collect());
    let beyond = |(it, at): (&Commit, &Answered)| at.asked - it.due;
    report("beyond, from when it was due", commits.iter().zip(&answered).map(beyond).collect());
    let beyond = |(it, at): (&Commit, &Answered)| at.asked - it.done;
    report("beyond, from the commit", commits.iter().zip(&answered).map(beyond).collect());
}

async fn processed(database: &Database) -> HashMap<i64, Micros> {
    let sql = "SELECT id, (extract(epoch FROM processed_at) * 1000000)::bigint FROM fga_outbox";
    let rows = database.client().await.query(sql, &[]).await.expect("the table is there");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Commits a row each time that one is due, by whichever writer is free: one that is late counts from when it was due.
async fn commit(database: &Database, due: Vec<Micros>, writers: u32) -> Vec<Commit> {
    let (arrive, arrivals) = mpsc::unbounded_channel();
    let arrivals = Arc::new(Mutex::new(arrivals));
    let mut tasks = Vec::new();
    for _ in 0..writers {
        let client = database.client().await;
        let insert = "INSERT INTO fga_outbox (payload) VALUES ($1::text::jsonb) RETURNING id";
        let insert = client.prepare(insert).await.expect("the table is there");
        let arrivals = arrivals.clone();
        tasks.push(tokio::spawn(async move {
            let mut commits = Vec::new();
            loop {
                let next = arrivals.lock().await.recv().await;
                let Some((number, due)) = next else { return commits };
                let (user, object) = (format!("user:{number}"), format!("document:{number}"));
                let tuple = json!({"user": user, "relation": "viewer", "object": object});
                let payload = json!({"writes": [tuple]}).to_string();
                let row = client.query_one(&insert, &[&payload]).await.expect("the row is good");
                commits.push(Commit { row: row.get(0), number, due, done: now() });
            }
        }));
    }
    // A thread of its own: a runtime's timers are as coarse as what is measured.
    let pacer = thread::spawn(move || {
        let began = now();
        for (number, due) in due.into_iter().enumerate() {
            let wait = began + due - now();
            thread::sleep(Duration::from_micros(wait.max(0) as u64));
            arrive.send((number, began + due)).expect("the writers wait for it");
        }
    });
    let mut commits = Vec::new();
    for task in tasks {
        commits.extend(task.await.expect("a writer does not panic"));
    }
    pacer.join().expect("the pacer does not panic");
    commits
}
