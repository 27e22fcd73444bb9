//! An engine that sleeps is woken by a commit, and no wake-up is lost.

use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;

use crate::bed::{Bed, write};
use crate::support::{Flavor, eventually, within_deadline};

const INSERT: &str = "INSERT INTO fga_outbox (payload) VALUES ($1::text::jsonb) RETURNING id";

/// So long that an engine which sleeps hears of a row by the doorbell or not at all.
const NEVER: Duration = Duration::from_secs(3_600);

async fn insert(client: &impl tokio_postgres::GenericClient, payload: &Value) -> i64 {
    client.query_one(INSERT, &[&payload.to_string()]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_commit_wakes_an_engine_that_sleeps() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.builder().poll_interval(NEVER).start().unwrap();
    let client = bed.database.client().await;
    for at in 0..60 {
        let id = insert(&client, &write(&format!("user{at}"), "1")).await;
        eventually(async || bed.state(id).await.delivered).await;
        // Part of what is tested: the next row comes while the engine is awake, falls asleep or sleeps.
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..60))).await;
    }
    let stats = engine.stats();
    assert!(stats.rings > 0 && stats.missed_rings == 0, "{stats:?}");
    engine.stop().await;
}

#[tokio::test]
async fn no_wake_up_is_lost_wherever_an_engine_is_on_its_way_to_sleep() {
    // Steps on the way to sleep before which a row is inserted, and its transaction committed: three, and once more where
    // an open transaction keeps the engine awake, and then in its sleep.
    for inserted in 0..=4 {
        for committed in inserted..=4 {
            let bed = Bed::new(Flavor::Memory).await;
            let (tell, mut steps) = mpsc::unbounded_channel();
            let engine = bed.builder().poll_interval(NEVER).steps(tell).start().unwrap();
            let mut client = bed.database.client().await;
            let mut transaction = Some(client.transaction().await.unwrap());
            let mut id = None;
            for at in 0..=4 {
                // While it sleeps it takes no step.
                let step = tokio::time::timeout(Duration::from_millis(300), steps.recv()).await.ok().flatten();
                if at == inserted {
                    id = Some(insert(transaction.as_ref().unwrap(), &write("anne", "1")).await);
                }
                if at == committed {
                    transaction.take().unwrap().commit().await.unwrap();
                }
                if let Some((_, go_on)) = step {
                    let _ = go_on.send(());
                }
            }
            tokio::spawn(async move {
                while let Some((_, go_on)) = steps.recv().await {
                    let _ = go_on.send(());
                }
            });
            eventually(async || bed.state(id.unwrap()).await.delivered).await;
            assert_eq!(engine.stats().missed_rings, 0, "inserted before step {inserted}, committed before {committed}");
            engine.stop().await;
        }
    }
}

#[tokio::test]
async fn a_transaction_that_stays_open_for_long_is_waited_for_and_others_are_not_held_up() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.builder().poll_interval(NEVER).start().unwrap();
    let (mut slow, quick) = (bed.database.client().await, bed.database.client().await);
    // Awake after this one: what follows is not rung for.
    let first = insert(&quick, &write("first", "1")).await;
    eventually(async || bed.state(first).await.delivered).await;
    let transaction = slow.transaction().await.unwrap();
    let late = insert(&transaction, &write("late", "1")).await;
    for at in 0..5 {
        let id = insert(&quick, &write(&format!("user{at}"), "1")).await;
        eventually(async || bed.state(id).await.delivered).await;
    }
    transaction.commit().await.unwrap();
    eventually(async || bed.state(late).await.delivered).await;
    assert_eq!(engine.stats().missed_rings, 0);
    engine.stop().await;
}

#[tokio::test]
async fn engines_that_sleep_side_by_side_miss_nothing_and_one_may_end() {
    let bed = Bed::new(Flavor::Memory).await;
    let mut engines: Vec<_> = (0..3).map(|_| bed.builder().poll_interval(NEVER).start().unwrap()).collect();
    let client = bed.database.client().await;
    for at in 0..30 {
        let id = insert(&client, &write(&format!("user{at}"), "1")).await;
        eventually(async || bed.state(id).await.delivered).await;
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..40))).await;
        if at % 10 == 9 && engines.len() > 1 {
            engines.pop().unwrap().stop().await;
        }
    }
    for engine in engines {
        engine.stop().await;
    }
}

#[tokio::test]
async fn an_engine_that_sleeps_holds_no_snapshot() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.builder().poll_interval(NEVER).start().unwrap();
    let sleeps = "SELECT count(*) = 1 FROM pg_stat_activity JOIN pg_locks USING (pid)
        WHERE datname = current_database() AND locktype = 'advisory' AND mode = 'ExclusiveLock'
            AND state = 'idle in transaction' AND backend_xmin IS NULL";
    eventually(async || bed.database.query_one::<bool>(sleeps).await).await;
    engine.stop().await;
}

#[tokio::test]
async fn without_the_doorbell_rows_are_found_by_the_clock_and_counted() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.database.execute("ALTER TABLE fga_outbox DISABLE TRIGGER fga_outbox_ring").await;
    let engine = bed.builder().poll_interval(Duration::from_millis(20)).start().unwrap();
    let client = bed.database.client().await;
    eventually(async || {
        insert(&client, &write("anne", "1")).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        engine.stats().missed_rings > 0
    })
    .await;
    assert!(within_deadline(engine.drain()).await.is_ok());
    assert_eq!(engine.stats().rings, 0);
    engine.stop().await;
}

#[tokio::test]
async fn the_doorbell_is_heard_again_after_its_connection_broke_or_its_actor_died() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.builder().poll_interval(Duration::from_millis(50)).start().unwrap();
    for disturb in ["", "connection", "actor"] {
        match disturb {
            "connection" => {
                bed.database
                    .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN fga_outbox'")
                    .await;
            }
            "actor" => engine.crash("listener"),
            _ => {}
        }
        let rings = engine.stats().rings;
        eventually(async || {
            bed.insert(&write("anne", "1")).await;
            tokio::time::sleep(Duration::from_millis(40)).await;
            engine.stats().rings > rings
        })
        .await;
    }
    engine.stop().await;
}
