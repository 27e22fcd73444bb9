//! The engine's parts, one by one:
//!
//!     cargo bench --bench micro
//!     cargo bench --bench micro -- planning

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fga_outbox::internals::{Claims, body_of, plan_and_answer, request, rows, verdict};
use fga_outbox::{DatabaseUrl, Intent, migrate};
use serde_json::json;
use tokio::runtime::Runtime;

use support::Database;

/// As an engine has them at best.
const ROWS: usize = 1_000;
const IN_FLIGHT: usize = 4;

criterion_group!(benches, payloads, planning, requests, verdicts, claims);
criterion_main!(benches);

fn tuple(user: usize, object: usize) -> serde_json::Value {
    json!({"user": format!("user:{user}"), "relation": "viewer", "object": format!("document:{object}")})
}

fn single(n: usize) -> String {
    json!({"writes": [tuple(n, n)]}).to_string()
}

/// A tuple of its own, and one that a hundred rows share.
fn archive(n: usize) -> String {
    let job = format!("capture_job:{}", n / 100);
    let own = json!({"user": job, "relation": "parent", "object": format!("archive:{n}")});
    let shared = json!({"user": "organization:acme", "relation": "parent", "object": job});
    json!({"writes": [own, shared]}).to_string()
}

/// Grants and revocations of 200 tuples.
fn contradicting(n: usize) -> String {
    let verb = if (n / 200).is_multiple_of(2) { "writes" } else { "deletes" };
    json!({verb: [tuple(n % 200, 1)]}).to_string()
}

fn payloads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parsing");
    for (name, payload) in [("single", single(1)), ("archive", archive(1))] {
        group.bench_function(name, |bencher| bencher.iter(|| Intent::from_json(&payload)));
    }
    group.finish();
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("planning");
    group.throughput(Throughput::Elements(ROWS as u64));
    let mut plan = |name: &str, payload: fn(usize) -> String| {
        let payloads: Vec<String> = (0..ROWS).map(payload).collect();
        group.bench_function(name, |bencher| {
            bencher.iter_batched(|| rows(&payloads), |rows| plan_and_answer(rows, IN_FLIGHT), BatchSize::LargeInput)
        });
    };
    plan("single", single);
    plan("archive", archive);
    plan("contradicting", contradicting);
    group.finish();
}

fn requests(criterion: &mut Criterion) {
    let payloads: Vec<String> = (0..100).map(single).collect();
    let request = request(rows(&payloads)).expect("there is something to send");
    criterion.bench_function("serialising/100 tuples", |bencher| bencher.iter(|| body_of(&request)));
}

fn verdicts(criterion: &mut Criterion) {
    let answers = [
        ("done", 200, "{}"),
        (
            "another condition",
            409,
            r#"{"code":"Aborted","message":"transactional write failed due to conflict: attempted to write a tuple which already exists with a different condition: user: 'user:anne', relation: 'viewer', object: 'document:1'"}"#,
        ),
        (
            "refused",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'folder:1#viewer@user:anne'. Reason: type 'folder' not found"}"#,
        ),
        ("overloaded", 503, "upstream connect error"),
    ];
    let mut group = criterion.benchmark_group("verdict");
    for (name, status, body) in answers {
        group.bench_function(name, |bencher| bencher.iter(|| verdict(status, body.as_bytes())));
    }
    group.finish();
}

/// The statements of a lease, on the tests' own Postgres.
fn claims(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("threads can be started");
    let database = runtime.block_on(Database::new());
    let url: DatabaseUrl = database.url().parse().expect("the address is the kit's own");
    runtime.block_on(migrate(&url)).expect("the database is new");
    let claims = {
        let _entered = runtime.enter();
        Claims::new(&url)
    };
    let fill = async |rows: u64| {
        let insert = format!(
            "TRUNCATE fga_outbox;
             INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(jsonb_build_object(
                 'user', 'user:' || n, 'relation', 'viewer', 'object', 'document:' || n)))
             FROM generate_series(1, {rows}) n"
        );
        database.execute(&insert).await;
        database.execute("VACUUM ANALYZE fga_outbox").await;
    };
    let claim = async |rows| claims.claim(0, rows as i64).await.expect("the table is there").expect("there are rows");

    let mut group = criterion.benchmark_group("postgres");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for rows in [100, 1_000] {
        group.throughput(Throughput::Elements(rows));
        runtime.block_on(fill(10_000));
        group.bench_with_input(BenchmarkId::new("claim and give back", rows), &rows, |bencher, rows| {
            bencher.iter(|| runtime.block_on(async { claim(*rows).await.give_back().await }))
        });
        group.bench_with_input(BenchmarkId::new("mark and commit", rows), &rows, |bencher, rows| {
            bencher.iter_custom(|times| {
                runtime.block_on(async {
                    fill(times * rows).await;
                    let mut took = Duration::ZERO;
                    for _ in 0..times {
                        let held = claim(*rows).await;
                        let began = Instant::now();
                        held.deliver().await.expect("the lease is good");
                        took += began.elapsed();
                    }
                    took
                })
            })
        });
    }
    group.finish();
}
