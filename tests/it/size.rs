//! What lies in the table, and how large rows are, does not make a lease larger or slower.

use std::time::Duration;

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
async fn claims_do_not_read_rows_that_wait_are_refused_or_delivered() {
    let bed = Bed::new(Flavor::Memory).await;
    let others = "INSERT INTO fga_outbox (payload, processed_at, next_attempt_at)
        SELECT '{}', CASE WHEN n % 3 = 0 THEN now() END,
            CASE n % 3 WHEN 1 THEN now() + interval '1 hour' WHEN 2 THEN 'infinity' END
        FROM generate_series(1, 9000) n";
    bed.database.execute(others).await;
    bed.insert_many(4_000).await;
    bed.database.execute("VACUUM ANALYZE fga_outbox").await;
    let read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'fga_outbox'";
    let before = settled(&bed, read).await;
    {
        let mut claims = Claims::new(&bed.database.url().parse().unwrap());
        let mut last = claims.look().await.unwrap() - 1;
        for _ in 0..40 {
            let held = claims.claim(last, 100).await.unwrap().unwrap();
            last = held.ids().max().unwrap();
            held.deliver().await.unwrap();
        }
        assert!(claims.claim(last, 100).await.unwrap().is_none());
    }
    let more = settled(&bed, read).await - before;
    // The first look passes over those that are not delivered; each claim and each mark reads its own rows.
    assert!(more < 6_000 + 2 * 4_000 + 2_000, "{more} rows were read");
}

/// What a session has counted is to be seen once it has ended, or after a moment.
async fn settled(bed: &Bed, count: &str) -> i64 {
    let mut before = -1;
    loop {
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        match bed.database.query_one::<i64>(count).await {
            now if now == before => return now,
            now => before = now,
        }
    }
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
