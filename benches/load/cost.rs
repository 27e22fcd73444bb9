//! What the outbox costs the application that inserts into it.

use clap::builder::RangedU64ValueParser;
use serde_json::json;
use tokio_postgres::Client;

use crate::bed::Bed;
use crate::support::Database;
use crate::table::{Table, median, rounded};
use crate::{pgbench, sink};

/// Inserts a second and commit times of 8 writers, by what there is beside the plain table
#[derive(clap::Args)]
pub struct Args {
    /// Seconds of each round of each case
    #[arg(long, default_value_t = 4, value_parser = RangedU64ValueParser::<u64>::new().range(1..))]
    seconds: u64,
    #[arg(long, default_value_t = 3, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    rounds: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// The table as any application would make it, with its two indexes.
    Plain,
    /// Migrated. No engine sleeps, so no insert rings.
    Awake,
    /// As if an engine fell asleep again before each insert: every insert rings.
    Asleep,
    /// An engine delivers to the sink what is inserted.
    AtWork,
    /// As `Awake`, by the function that keeps rows of one key in the order of their commits.
    InOrder,
}

const CASES: [(Case, &str); 5] = [
    (Case::Plain, "plain table"),
    (Case::Awake, "migrated, no engine asleep"),
    (Case::Asleep, "migrated, an engine asleep at each insert"),
    (Case::AtWork, "migrated, an engine at work"),
    (Case::InOrder, "migrated, by fga_outbox_enqueue"),
];

const PLAIN: &str = "
    CREATE TABLE fga_outbox (id bigserial PRIMARY KEY, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
        processed_at timestamptz, attempts integer NOT NULL DEFAULT 0, last_error text);
    CREATE INDEX fga_outbox_pending_idx ON fga_outbox (id) WHERE processed_at IS NULL";

const PAYLOAD: &str =
    r#"('{"writes": [{"user": "user:' || :n::text || '", "relation": "viewer", "object": "document:1"}]}')::jsonb"#;

pub async fn run(Args { seconds, rounds }: Args) -> Vec<Table> {
    let mut rounds_of = [const { (Vec::new(), Vec::new(), Vec::new()) }; CASES.len()];
    for _ in 0..rounds {
        for ((case, _), (rates, middles, lates)) in CASES.iter().zip(&mut rounds_of) {
            let pgbench::Timed { tps, latencies } = insert(*case, seconds).await;
            rates.push(tps);
            middles.push(latencies.value_at_quantile(0.5) as f64 / 1e3);
            lates.push(latencies.value_at_quantile(0.99) as f64 / 1e3);
        }
    }
    let settings = Database::new().await;
    let setting = async |name: &str| settings.query_one::<String>(&format!("SHOW {name}")).await;
    let title = format!(
        "one insert a transaction, 8 writers, medians of {rounds} rounds of {seconds} s \
         (fsync {}, synchronous_commit {})",
        setting("fsync").await,
        setting("synchronous_commit").await
    );
    let columns = ["case", "inserts/s", "of plain, %", "p50, ms", "p99, ms", "p99, of plain, %"];
    let mut table = Table::new(&title, columns);
    let medians = rounds_of.map(|(rates, middles, lates)| (median(&rates), median(&middles), median(&lates)));
    let (plain_rate, _, plain_late) = medians[0];
    for ((_, name), (rate, middle, late)) in CASES.iter().zip(medians) {
        let (of_rate, of_late) = (rate / plain_rate * 100.0, late / plain_late * 100.0);
        table.row([json!(name), rounded(rate), rounded(of_rate), rounded(middle), rounded(late), rounded(of_late)]);
    }
    vec![table]
}

async fn insert(case: Case, seconds: u64) -> pgbench::Timed {
    let sink = sink::start();
    let bed = match case {
        Case::Plain => {
            let database = Database::new().await;
            database.execute(PLAIN).await;
            Bed { database, target: sink }
        }
        _ => Bed::new(&sink).await,
    };
    let asleep = match case {
        Case::Asleep => Some(fall_asleep(&bed.database).await),
        _ => None,
    };
    let engine = (case == Case::AtWork).then(|| bed.builder().start().expect("the settings are valid"));
    let insert = match case {
        Case::InOrder => format!("SELECT fga_outbox_enqueue({PAYLOAD});"),
        _ => format!("INSERT INTO fga_outbox (payload) VALUES ({PAYLOAD});"),
    };
    let script = format!("\\set n random(1, 1000000000)\n{insert}\n");
    let timed = pgbench::run_timed(&bed.database, &script, &["--client=8", "--jobs=2", &format!("--time={seconds}")]);
    if let Some(engine) = engine {
        engine.stop().await;
    }
    drop(asleep);
    timed
}

/// A session that holds the bell, as an engine does that naps, and hears the rings.
async fn fall_asleep(database: &Database) -> Client {
    let client = database.client().await;
    let nap = "LISTEN fga_outbox; SELECT pg_advisory_lock(1179074895, 'fga_outbox'::regclass::oid::int4)";
    client.batch_execute(nap).await.expect("nobody else holds the bell");
    client
}
