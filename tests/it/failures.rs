//! What outages and crashes cost: nothing.

use std::process::{Command, Stdio};
use std::time::Duration;

use fga_outbox::{DrainError, Engine, FaultKind};
use serde_json::json;

use crate::bed::{Bed, write};
use crate::command_line::on;
use crate::support::{Cluster, Flavor, Server, eventually, within_deadline};

const UNTOUCHED: &str = "SELECT count(*) FROM fga_outbox WHERE attempts = 0 AND last_error IS NULL
    AND (processed_at IS NOT NULL OR next_attempt_at IS NULL OR next_attempt_at <= now())";

#[tokio::test]
async fn an_unreachable_server_costs_no_row_an_attempt() {
    let server = Server::start_private(Flavor::Memory, &[]).await;
    let bed = Bed::on(&server).await;
    bed.insert_many(500).await;
    server.kill().await;
    let engine = bed.engine();
    eventually(async || engine.stats().paused.is_some()).await;
    let idle = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()
        AND application_name = 'fga-outbox' AND state <> 'idle'";
    assert!(bed.database.query_one::<bool>(idle).await, "no transaction is open while the target is away");
    assert_eq!(bed.database.query_one::<i64>(UNTOUCHED).await, 500);
    engine.stop().await;
}

#[tokio::test]
async fn delivery_goes_on_by_itself_when_the_server_is_back() {
    let server = Server::start_private(Flavor::Postgres, &[]).await;
    let bed = Bed::on(&server).await;
    bed.insert_many(5_000).await;
    let engine = bed.engine();
    eventually(async || engine.stats().delivered > 0).await;
    server.kill().await;
    eventually(async || engine.stats().paused.is_some()).await;
    server.restart().await;
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.waiting, drained.refused, drained.held), (0, 0, 0));
    assert_eq!(bed.database.query_one::<i64>(UNTOUCHED).await, 5_000);
    assert_eq!(bed.store.read_all().await.len(), 5_000);
    assert!(engine.stats().paused.is_none());
    engine.stop().await;
}

#[tokio::test]
async fn an_outage_is_a_few_lines_in_the_log() {
    let server = Server::start_private(Flavor::Postgres, &[]).await;
    let bed = Bed::on(&server).await;
    bed.insert_many(20_000).await;
    let mut running = on(&bed, &["run"]).stderr(Stdio::piped()).spawn().unwrap();
    let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
    for outage in 1..=3 {
        let enough = 20_000 - outage * 2_000;
        eventually(async || bed.database.query_one::<i64>(left).await < enough).await;
        server.kill().await;
        server.restart().await;
    }
    eventually(async || bed.database.query_one::<i64>(left).await == 0).await;
    assert!(Command::new("kill").arg(running.id().to_string()).status().unwrap().success());
    let log = std::io::read_to_string(running.stderr.take().unwrap()).unwrap();
    running.wait().unwrap();
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    // Those that follow at once upon another count as one.
    assert!((1..=3).contains(&lines("pausing and probing")), "{log}");
    assert_eq!(lines("OpenFGA can be used again"), lines("pausing and probing"), "{log}");
    assert!(log.lines().count() < 20, "{log}");
    assert_eq!(bed.database.query_one::<i64>(UNTOUCHED).await, 20_000);
    assert_eq!(bed.store.read_all().await.len(), 20_000);
}

#[tokio::test]
async fn a_row_that_cannot_be_recorded_does_not_keep_the_others() {
    a_veto_keeps_one_row(&Bed::new(Flavor::Memory).await).await;
}

#[tokio::test]
async fn nor_does_one_that_is_tried_again() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.database.execute("ALTER TABLE fga_outbox ALTER COLUMN attempts SET DEFAULT 1").await;
    bed.database.execute("ALTER TABLE fga_outbox ALTER COLUMN next_attempt_at SET DEFAULT now()").await;
    a_veto_keeps_one_row(&bed).await;
}

/// Fifty rows, of which one can't be changed: the others are delivered, and that one in the end.
async fn a_veto_keeps_one_row(bed: &Bed) {
    bed.insert_many(50).await;
    let veto = "CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF NEW.id = 7 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER veto BEFORE UPDATE ON fga_outbox FOR EACH ROW EXECUTE FUNCTION veto()";
    bed.database.execute(veto).await;
    let engine = bed.engine();
    eventually(async || engine.stats().delivered == 49).await;
    bed.database.execute("DROP TRIGGER veto ON fga_outbox").await;
    eventually(async || engine.stats().delivered == 50).await;
    engine.stop().await;
}

#[tokio::test]
async fn a_drain_gives_up_when_its_patience_ends() {
    let server = Server::start_private(Flavor::Memory, &[]).await;
    let bed = Bed::on(&server).await;
    server.kill().await;
    bed.insert(&write("anne", "1")).await;
    let engine = bed.builder().patience(Duration::ZERO).start().unwrap();
    let error = within_deadline(engine.drain()).await.unwrap_err();
    assert!(matches!(&error, DrainError::Target(fault) if fault.kind == FaultKind::Unreachable), "{error:?}");
    engine.stop().await;
}

#[tokio::test]
async fn a_wrong_store_model_or_token_pauses_and_says_why() {
    let server =
        Server::start_private(Flavor::Memory, &["--authn-method", "preshared", "--authn-preshared-keys", "key-one"])
            .await;
    let bed = Bed::on(&server).await;
    bed.insert(&write("anne", "1")).await;
    let nowhere = "01J9W3S5F0Q1G4Z6V8X2Y7B5NC";
    let right = || bed.builder().api_token("key-one");
    for (builder, kind) in [
        (bed.builder().api_token("key-two"), FaultKind::Unauthenticated),
        (bed.builder(), FaultKind::Unauthenticated),
        (right().model_id(nowhere), FaultKind::Misconfigured),
        (right().store_id(nowhere), FaultKind::Misconfigured),
    ] {
        let engine = builder.patience(Duration::ZERO).start().unwrap();
        let error = within_deadline(engine.drain()).await.unwrap_err();
        assert!(matches!(&error, DrainError::Target(fault) if fault.kind == kind), "{error:?}");
        assert!(engine.stats().paused.is_some());
        engine.stop().await;
    }
    assert_eq!(bed.database.query_one::<i64>(UNTOUCHED).await, 1);
    let engine = right().start().unwrap();
    assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 1);
    engine.stop().await;
}

#[tokio::test]
async fn every_actor_comes_back_after_a_panic() {
    let bed = Bed::new(Flavor::Postgres).await;
    bed.insert_many(3_000).await;
    let engine = bed.engine();
    for actor in ["claimer", "deliverer", "ledger", "claimer", "deliverer", "ledger"] {
        let before = engine.stats().restarts;
        // Again and again: an actor that is not there yet does not hear of it.
        eventually(async || {
            engine.crash(actor);
            engine.stats().restarts > before
        })
        .await;
    }
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.waiting, drained.refused, drained.held), (0, 0, 0));
    assert_eq!(bed.store.read_all().await.len(), 3_000);
    engine.stop().await;
}

#[tokio::test]
async fn postgres_may_restart() {
    let cluster = Cluster::start_private().await;
    let store = crate::support::Store::new(Flavor::Postgres).await;
    let bed = Bed { database: cluster.database().await, store };
    fga_outbox::migrate(&bed.database.url().parse().unwrap()).await.unwrap();
    bed.insert_many(5_000).await;
    let engine = bed.engine();
    eventually(async || engine.stats().delivered > 0).await;
    cluster.stop_immediate().await;
    cluster.start().await;
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.waiting, drained.refused, drained.held), (0, 0, 0));
    assert_eq!(bed.store.read_all().await.len(), 5_000);
    engine.stop().await;
}

#[tokio::test]
async fn the_engine_waits_for_a_database_and_a_table_that_are_not_there_yet() {
    let bed = Bed::new(Flavor::Memory).await;
    let database = crate::support::Database::new().await;
    let engine = bed.builder().database_url(database.url()).start().unwrap();
    let draining = tokio::spawn({
        let engine: Engine = engine.clone();
        async move { engine.drain().await }
    });
    fga_outbox::migrate(&database.url().parse().unwrap()).await.unwrap();
    database.execute(&format!("INSERT INTO fga_outbox (payload) VALUES ('{}')", json!(write("anne", "1")))).await;
    within_deadline(draining).await.unwrap().unwrap();
    eventually(async || engine.stats().delivered == 1).await;
    engine.stop().await;
}
