//! What lies in the table, and how large rows are, does not make a lease larger or slower.

use fga_outbox::internals::Claims;
use fga_outbox::{DatabaseUrl, migrate};

use crate::bed::Bed;
use crate::support::{Database, Flavor, eventually, within_deadline};

/// More than this of payloads is not held by one lease.
const MOST_BYTES: usize = 4 << 20;

#[tokio::test]
async fn a_lease_holds_no_more_than_four_mebibytes_and_leaves_the_rest_to_others() {
    let database = Database::new().await;
    let url: DatabaseUrl = database.url().parse().unwrap();
    migrate(&url).await.unwrap();
    let rows = |rows: i32, bytes: usize| {
        format!(
            "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('pad', repeat('x', {bytes}))
             FROM generate_series(1, {rows})"
        )
    };
    for (count, bytes) in [(20, 1 << 20), (1, MOST_BYTES + 1), (10, 1), (1, 17 << 20), (10, 1)] {
        database.execute(&rows(count, bytes)).await;
    }
    let (one, other) = (Claims::new(&url), Claims::new(&url));
    let (mut last, mut leases) = (0, Vec::new());
    loop {
        // The other one is not kept from what the first one could not hold.
        let claims = if leases.len() % 2 == 0 { &one } else { &other };
        let Some(held) = claims.claim(last, 1_000).await.unwrap() else { break };
        let ids: Vec<i64> = held.ids().collect();
        last = ids.iter().copied().max().unwrap();
        held.deliver().await.unwrap();
        leases.push(ids);
    }
    assert_eq!(leases.concat(), (1..=42).collect::<Vec<_>>(), "each row once, in order: {leases:?}");
    // Those of one mebibyte three by three, with what JSON adds; larger ones alone.
    let sizes: Vec<usize> = leases.iter().map(Vec::len).collect();
    assert_eq!(sizes, [3, 3, 3, 3, 3, 3, 2, 1, 10, 1, 10]);
}

#[tokio::test]
async fn rows_that_wait_are_not_read_by_leases_that_have_nothing_to_do_with_them() {
    let bed = Bed::new(Flavor::Memory).await;
    let waiting = "INSERT INTO fga_outbox (payload, next_attempt_at)
        SELECT jsonb_build_object('deletes', jsonb_build_array(jsonb_build_object(
            'user', 'user:' || n, 'relation', 'viewer', 'object', 'document:old' || n))), now() + interval '1 hour'
        FROM generate_series(1, 10000) n";
    bed.database.execute(waiting).await;
    bed.database.execute("VACUUM ANALYZE fga_outbox").await;
    let read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'fga_outbox'";
    let read = async || {
        // What a session has counted is to be seen once it has ended, or after a moment.
        let mut before = -1;
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
            match bed.database.query_one::<i64>(read).await {
                now if now == before => break now,
                now => before = now,
            }
        }
    };
    let before = read().await;
    bed.insert_many(4_000).await;
    let drained = bed.drain().await;
    assert_eq!((drained.delivered, drained.waiting), (4_000, 10_000));
    let more = read().await - before;
    // Claimed, looked at and marked, and those that wait counted in the end: but not again for each lease.
    assert!(more < 60_000, "{more} rows were read");
}

#[tokio::test]
async fn rows_that_several_sessions_hold_a_share_of_are_delivered_once_these_are_gone() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert_many(10).await;
    let (mut one, mut other) = (bed.database.client().await, bed.database.client().await);
    let shares = "SELECT FROM fga_outbox WHERE id % 2 = 0 FOR KEY SHARE";
    let (one, other) = (one.transaction().await.unwrap(), other.transaction().await.unwrap());
    assert_eq!(one.execute(shares, &[]).await.unwrap(), 5);
    assert_eq!(other.execute(shares, &[]).await.unwrap(), 5);
    let engine = bed.engine();
    eventually(async || engine.stats().delivered == 5).await;
    one.commit().await.unwrap();
    other.rollback().await.unwrap();
    let drained = within_deadline(engine.drain()).await.unwrap();
    engine.stop().await;
    assert_eq!((engine.stats().delivered, drained.held), (10, 0));
}

#[tokio::test]
async fn what_transactions_elsewhere_do_keeps_nobody_from_leaving_delivered_rows_behind() {
    let database = Database::new().await;
    let url: DatabaseUrl = database.url().parse().unwrap();
    migrate(&url).await.unwrap();
    let delivered = "INSERT INTO fga_outbox (payload, processed_at) VALUES ('{}', now())";
    let mut elsewhere = database.client().await;
    let elsewhere = elsewhere.transaction().await.unwrap();
    elsewhere.execute("SELECT pg_current_xact_id()", &[]).await.unwrap();
    let mut claims = Claims::new(&url);
    let mut look = async || {
        // What is seen once counts the next time.
        for _ in 0..2 {
            claims.look().await.unwrap();
        }
        claims.look().await.unwrap()
    };

    database.execute(delivered).await;
    assert_eq!(look().await, 1);
    let mut writer = database.client().await;
    let writer = writer.transaction().await.unwrap();
    writer.execute("INSERT INTO fga_outbox (payload) VALUES ('{}')", &[]).await.unwrap();
    database.execute(delivered).await;
    assert_eq!(look().await, 1, "the row in between may still come to light");
    writer.commit().await.unwrap();
    assert_eq!(look().await, 2);
    database.execute("UPDATE fga_outbox SET processed_at = now()").await;
    assert_eq!(look().await, 3);
    elsewhere.commit().await.unwrap();
}
