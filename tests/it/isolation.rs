//! A row that is refused, or that has nothing to do any more, costs its neighbours next to nothing.

use serde_json::json;

use crate::bed::{Bed, viewer};
use crate::support::{Flavor, within_deadline};

/// Rows of one tuple each; one in `every` is not in the model.
async fn insert(bed: &Bed, rows: i32, every: i32) {
    let sql = format!(
        "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(jsonb_build_object(
            'user', 'user:' || n, 'relation', 'viewer',
            'object', CASE WHEN n % {every} = {every} - 1 THEN 'planet:' ELSE 'document:' END || n)))
        FROM generate_series(1, {rows}) n"
    );
    bed.database.execute(&sql).await;
}

/// Drains, and says in how many requests.
async fn requests(bed: &Bed) -> u64 {
    let engine = bed.engine();
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.waiting, drained.held), (0, 0));
    engine.stop().await;
    engine.stats().requests
}

const REFUSED: &str = "SELECT count(*) FROM fga_outbox WHERE next_attempt_at = 'infinity' AND attempts = 1
    AND last_error = format('Invalid tuple ''planet:%s#viewer@user:%1$s''. Reason: type ''planet'' not found',
        split_part(payload->'writes'->0->>'user', ':', 2))";
const DELIVERED: &str = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NOT NULL AND attempts = 0
    AND payload->'writes'->0->>'object' LIKE 'document:%'";

#[tokio::test]
async fn a_hundred_refused_rows_among_ten_thousand_cost_at_most_two_requests_each() {
    for flavor in [Flavor::Postgres, Flavor::OldPostgres] {
        let good = Bed::new(flavor).await;
        insert(&good, 10_000, 1_000_000).await;
        let without = requests(&good).await;
        let bed = Bed::new(flavor).await;
        insert(&bed, 10_000, 100).await;
        let with = requests(&bed).await;
        assert_eq!(bed.database.query_one::<i64>(REFUSED).await, 100);
        assert_eq!(bed.database.query_one::<i64>(DELIVERED).await, 9_900);
        assert_eq!(bed.store.read_all().await.len(), 9_900);
        assert!(with <= without + 200, "{flavor:?}: {with} requests with refused rows, {without} without");
    }
}

#[tokio::test]
async fn a_thousand_refused_rows_at_the_head_leave_the_rows_behind_them_alone() {
    let bed = Bed::new(Flavor::Postgres).await;
    insert(&bed, 1_000, 1).await;
    insert(&bed, 3_000, 1_000_000).await;
    let requests = requests(&bed).await;
    assert_eq!(bed.database.query_one::<i64>(REFUSED).await, 1_000);
    assert_eq!(bed.database.query_one::<i64>(DELIVERED).await, 3_000);
    assert_eq!(bed.store.read_all().await.len(), 3_000);
    assert!(requests <= 2 * 1_000 + 3_000 / 100, "{requests}");
}

#[tokio::test]
async fn on_an_old_server_what_is_already_there_or_gone_costs_one_more_request() {
    for flavor in [Flavor::Old, Flavor::OldPostgres] {
        let bed = Bed::new(flavor).await;
        let there: Vec<_> = (0..10).map(|at| viewer("there", &at.to_string())).collect();
        assert_eq!(bed.store.write_raw(&json!({"writes": {"tuple_keys": there}})).await.0, 200);
        let rows = (0..90).map(|at| match at {
            0..10 => json!({"writes": [viewer("there", &at.to_string())]}),
            10..20 => json!({"deletes": [viewer("gone", &at.to_string())]}),
            _ => json!({"writes": [viewer("new", &at.to_string())]}),
        });
        // In one statement, so that they are leased together.
        let values: Vec<_> = rows.map(|payload| format!("('{payload}')")).collect();
        bed.database.execute(&format!("INSERT INTO fga_outbox (payload) VALUES {}", values.join(", "))).await;
        let requests = requests(&bed).await;
        assert_eq!(bed.store.read_all().await.len(), 80);
        assert!(requests <= 3, "{flavor:?}: {requests}");
    }
}
