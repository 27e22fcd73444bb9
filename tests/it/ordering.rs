//! The last intent wins, whoever delivers it.

use std::collections::BTreeSet;
use std::pin::pin;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::again::model_with_planets;
use crate::bed::{Bed, delete, viewer, write};
use crate::command_line::on;
use crate::support::{Flavor, eventually, within_deadline};

const LEFT: &str = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";

/// Grants and revocations, each contradicted a few milliseconds later, while deliverers are at work.
async fn contradict_many(bed: &Bed, pairs: usize) {
    let client = bed.database.client().await;
    let insert = "INSERT INTO fga_outbox (payload) VALUES ($1::text::jsonb)";
    let insert = client.prepare(insert).await.unwrap();
    let enqueue = async |payload: Value| {
        client.execute(&insert, &[&payload.to_string()]).await.unwrap();
    };
    for at in 0..pairs {
        let (granted, revoked) = (format!("granted{at}"), format!("revoked{at}"));
        enqueue(delete(&granted, "1")).await;
        enqueue(write(&revoked, "1")).await;
        // Part of what is tested: the second intent comes while the first one is on its way.
        tokio::time::sleep(Duration::from_micros(rand::random_range(0..8_000))).await;
        enqueue(write(&granted, "1")).await;
        enqueue(delete(&revoked, "1")).await;
    }
}

async fn all_are_as_last_intended(bed: &Bed, pairs: usize) {
    let users: Vec<String> =
        bed.store.read_all().await.iter().map(|key| key["user"].as_str().unwrap().to_owned()).collect();
    let back: Vec<&String> = users.iter().filter(|user| user.starts_with("user:revoked")).collect();
    assert_eq!(back, Vec::<&String>::new(), "revoked permissions came back");
    assert_eq!(users.len(), pairs, "granted permissions are missing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_side_by_side_never_bring_a_revoked_permission_back() {
    let bed = Bed::new(Flavor::Postgres).await;
    let engines: Vec<_> =
        (0..3).map(|_| bed.builder().poll_interval(Duration::from_millis(1)).start().unwrap()).collect();
    contradict_many(&bed, 300).await;
    eventually(async || bed.database.query_one::<i64>(LEFT).await == 0).await;
    for engine in engines {
        engine.stop().await;
    }
    all_are_as_last_intended(&bed, 300).await;
}

#[tokio::test]
async fn processes_side_by_side_never_bring_a_revoked_permission_back() {
    let bed = Bed::new(Flavor::Postgres).await;
    let mut processes: Vec<_> = (0..2).map(|_| on(&bed, &["run"]).stderr(Stdio::null()).spawn().unwrap()).collect();
    contradict_many(&bed, 300).await;
    eventually(async || bed.database.query_one::<i64>(LEFT).await == 0).await;
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    all_are_as_last_intended(&bed, 300).await;
}

/// As the ledger says: each key by its last row.
async fn fold(bed: &Bed) -> BTreeSet<String> {
    let payloads: Vec<String> = bed.database.query_all("SELECT payload::text FROM fga_outbox ORDER BY id").await;
    let mut users = BTreeSet::new();
    for payload in payloads {
        let payload: Value = serde_json::from_str(&payload).unwrap();
        for tuple in payload["deletes"].as_array().into_iter().flatten() {
            users.remove(tuple["user"].as_str().unwrap());
        }
        for tuple in payload["writes"].as_array().into_iter().flatten() {
            users.insert(tuple["user"].as_str().unwrap().to_owned());
        }
    }
    users
}

#[tokio::test]
async fn processes_that_are_killed_again_and_again_leave_what_the_ledger_says() {
    const ROWS: i32 = 50_000;
    const KEYS: i32 = 200;
    let bed = Bed::new(Flavor::Postgres).await;
    let seed = std::env::var("FGA_OUTBOX_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    eprintln!("FGA_OUTBOX_TEST_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let start = || on(&bed, &["run"]).stderr(Stdio::null()).spawn().unwrap();
    let mut processes: Vec<_> = (0..3).map(|_| start()).collect();
    let client = bed.database.client().await;
    let insert = "INSERT INTO fga_outbox (payload) SELECT p::jsonb FROM unnest($1::text[]) WITH ORDINALITY AS t (p, n)
        ORDER BY n";
    let mut inserted = 0;
    let mut killed = Instant::now();
    while inserted < ROWS || bed.database.query_one::<i64>(LEFT).await > 2_000 {
        if inserted < ROWS {
            let payloads: Vec<String> = (0..500)
                .map(|_| {
                    let user = format!("key{}", random.random_range(0..KEYS));
                    let payload = if random.random() { write(&user, "1") } else { delete(&user, "1") };
                    payload.to_string()
                })
                .collect();
            client.execute(insert, &[&payloads]).await.unwrap();
            inserted += 500;
        }
        if killed.elapsed() > Duration::from_millis(random.random_range(500..1_500)) {
            let victim = random.random_range(0..processes.len());
            processes[victim].kill().unwrap();
            processes[victim].wait().unwrap();
            processes[victim] = start();
            killed = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..50))).await;
    }
    eventually(async || bed.database.query_one::<i64>(LEFT).await == 0).await;
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    let stored = bed.store.read_all().await;
    let stored: BTreeSet<String> = stored.iter().map(|key| key["user"].as_str().unwrap().to_owned()).collect();
    assert_eq!(stored, fold(&bed).await, "FGA_OUTBOX_TEST_SEED={seed}");
}

#[tokio::test]
async fn a_row_waits_for_an_earlier_one_that_somebody_else_holds() {
    let bed = Bed::new(Flavor::Memory).await;
    let grant = bed.insert(&write("anne", "1")).await;
    let revocation = bed.insert(&delete("anne", "1")).await;
    let other = bed.insert(&write("bob", "1")).await;
    let mut foreign = bed.database.client().await;
    let holder = foreign.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&grant]).await.unwrap();
    let engine = bed.engine();
    eventually(async || bed.state(other).await.delivered).await;
    // The foreign drain is about to send the grant: a revocation sent now would be undone.
    assert!(!bed.state(revocation).await.delivered);
    holder.execute("UPDATE fga_outbox SET processed_at = now() WHERE id = $1", &[&grant]).await.unwrap();
    holder.commit().await.unwrap();
    within_deadline(engine.drain()).await.unwrap();
    assert!(bed.state(revocation).await.delivered);
    engine.stop().await;
}

#[tokio::test]
async fn rows_behind_many_that_have_to_wait_do_not_wait_with_them() {
    let bed = Bed::new(Flavor::Memory).await;
    let held = bed.insert(&delete("anne", "shared")).await;
    let waiting = "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(
            jsonb_build_object('user', 'user:anne', 'relation', 'viewer', 'object', 'document:shared'),
            jsonb_build_object('user', 'user:' || n, 'relation', 'viewer', 'object', 'document:1')))
        FROM generate_series(1, 2500) n";
    bed.database.execute(waiting).await;
    bed.insert_many(1_500).await;
    let mut foreign = bed.database.client().await;
    let holder = foreign.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&held]).await.unwrap();
    let engine = bed.engine();
    eventually(async || engine.stats().delivered == 1_500).await;
    holder.commit().await.unwrap();
    within_deadline(engine.drain()).await.unwrap();
    engine.stop().await;
    assert_eq!(engine.stats().delivered, 4_001);
}

#[tokio::test]
async fn a_revocation_does_not_wait_for_a_grant_that_keeps_failing() {
    let bed = Bed::new(Flavor::Memory).await;
    let grant = bed.insert(&write("anne", "1")).await;
    let later = "UPDATE fga_outbox SET next_attempt_at = now() + '1 hour', attempts = 9, last_error = 'busy'";
    bed.database.execute(later).await;
    let written = json!({"writes": {"tuple_keys": [viewer("anne", "1")]}});
    assert_eq!(bed.store.write_raw(&written).await.0, 200);
    let revocation = bed.insert(&delete("anne", "1")).await;
    let engine = bed.engine();
    within_deadline(engine.drain()).await.unwrap();
    assert!(bed.viewer("anne", "1").await.is_none(), "revoked at once");
    assert!(bed.state(grant).await.delivered);
    // The grant may have been sent by somebody who died: the revocation is sent once more when that can't arrive any
    // longer, and counts only then.
    assert!(bed.state(revocation).await.waiting);
    eventually(async || bed.state(revocation).await.delivered).await;
    assert_eq!(bed.state(revocation).await.attempts, 0);
    assert!(bed.viewer("anne", "1").await.is_none());
    engine.stop().await;
}

#[tokio::test]
async fn enqueueing_in_order_takes_ids_as_transactions_commit() {
    let bed = Bed::new(Flavor::Memory).await;
    let enqueue = "SELECT fga_outbox_enqueue($1::text::jsonb)";
    let (mut first, mut second) = (bed.database.client().await, bed.database.client().await);
    let grant = first.transaction().await.unwrap();
    let granted: i64 = grant.query_one(enqueue, &[&write("anne", "1").to_string()]).await.unwrap().get(0);
    let revoking = tokio::spawn(async move {
        let revocation = second.transaction().await.unwrap();
        // Another key is nobody's business.
        revocation.query_one(enqueue, &[&write("bob", "1").to_string()]).await.unwrap();
        let revoked: i64 = revocation.query_one(enqueue, &[&delete("anne", "1").to_string()]).await.unwrap().get(0);
        revocation.commit().await.unwrap();
        revoked
    });
    let waits = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    eventually(|| bed.database.query_one::<bool>(waits)).await;
    // Meanwhile others take ids.
    bed.insert(&write("carl", "1")).await;
    grant.commit().await.unwrap();
    assert!(within_deadline(revoking).await.unwrap() > granted + 1);

    let mut connection = bed.database.url().parse::<fga_outbox::DatabaseUrl>().unwrap().connect().await.unwrap();
    let intent = fga_outbox::Intent::delete(fga_outbox::TupleKey::new("user:bob", "viewer", "document:1").unwrap());
    let id = intent.enqueue_in_order(&mut connection).await.unwrap();
    assert_eq!(bed.drain().await.delivered, 5);
    assert!(bed.state(id).await.delivered);
    assert!(bed.viewer("anne", "1").await.is_none() && bed.viewer("bob", "1").await.is_none());
}

#[tokio::test]
async fn a_foreign_session_that_never_lets_go_ends_a_drain_in_the_end() {
    let bed = Bed::new(Flavor::Memory).await;
    let grant = bed.insert(&write("anne", "1")).await;
    bed.insert(&delete("anne", "1")).await;
    let mut foreign = bed.database.client().await;
    let holder = foreign.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&grant]).await.unwrap();
    let drained = bed.drain().await;
    assert_eq!((drained.delivered, drained.held), (0, 2));
    holder.rollback().await.unwrap();
}

#[tokio::test]
async fn nor_does_a_stream_of_new_rows_keep_it_from_its_end() {
    let bed = Bed::new(Flavor::Memory).await;
    let held = bed.insert(&write("anne", "1")).await;
    let mut foreign = bed.database.client().await;
    let holder = foreign.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&held]).await.unwrap();
    let engine = bed.engine();
    let mut draining = pin!(within_deadline(engine.drain()));
    let drained = loop {
        tokio::select! {
            drained = &mut draining => break drained.unwrap(),
            () = bed.insert_many(1) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    engine.stop().await;
    assert_eq!(drained.held, 1);
}

#[tokio::test]
async fn a_refused_row_that_comes_back_does_not_undo_what_later_rows_did() {
    let bed = Bed::new(Flavor::Memory).await;
    let refused = json!({"writes": [
        {"user": "user:anne", "relation": "viewer", "object": "planet:1"}, viewer("anne", "1"), viewer("bob", "1"),
    ]});
    let refused = bed.insert(&refused).await;
    let only_overruled = bed.insert(&json!({"writes": [viewer("carl", "1")]})).await;
    let refuse = "UPDATE fga_outbox SET next_attempt_at = 'infinity', refused_model_id = '' WHERE id =";
    bed.database.execute(&format!("{refuse} {only_overruled}")).await;
    // Both stay refused under this model, which an engine has to have seen first.
    bed.database.execute(&format!("UPDATE fga_outbox SET refused_model_id = '{}'", bed.store.model_id())).await;
    bed.drain().await;
    bed.insert(&json!({"deletes": [viewer("anne", "1"), viewer("carl", "1")]})).await;
    assert_eq!(bed.drain().await.delivered, 1);

    let model = model_with_planets();
    let engine = bed.builder().model_id(bed.store.write_model(&model).await).start().unwrap();
    eventually(async || bed.state(refused).await.delivered && bed.state(only_overruled).await.delivered).await;
    engine.stop().await;
    assert!(bed.viewer("anne", "1").await.is_none(), "a revoked permission came back");
    assert!(bed.viewer("carl", "1").await.is_none(), "a revoked permission came back");
    assert!(bed.viewer("bob", "1").await.is_some());
    let note = bed.state(refused).await.last_error;
    assert_eq!(note, "not sent, as later rows overrule it: user:anne viewer document:1");
}

#[tokio::test]
async fn rows_that_do_not_contradict_each_other_do_not_wait() {
    let bed = Bed::new(Flavor::Memory).await;
    let held = bed.insert(&write("anne", "1")).await;
    let same = bed.insert(&write("anne", "1")).await;
    let mut foreign = bed.database.client().await;
    let holder = foreign.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&held]).await.unwrap();
    let engine = bed.engine();
    eventually(async || bed.state(same).await.delivered).await;
    holder.rollback().await.unwrap();
    engine.stop().await;
}

#[tokio::test]
async fn a_refused_row_that_somebody_marks_as_delivered_is_in_nobodys_way() {
    let bed = Bed::new(Flavor::Memory).await;
    let granted = bed.insert(&write("anne", "1")).await;
    let given_up =
        format!("UPDATE fga_outbox SET processed_at = now(), next_attempt_at = 'infinity' WHERE id = {granted}");
    bed.database.execute(&given_up).await;
    bed.insert(&delete("anne", "1")).await;
    assert_eq!(bed.drain().await.delivered, 1);
}
