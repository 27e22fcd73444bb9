//! How an engine lives in an application: started, nudged, shared, stopped.

use std::time::Duration;

use fga_outbox::{Engine, Intent, Tuple};

use crate::bed::{Bed, write};
use crate::support::{Flavor, Server, eventually, within_deadline};

fn is_a_handle<T: Clone + Send + Sync + 'static>(_: &T) {}

#[tokio::test]
async fn it_runs_on_threads_of_its_own_where_there_is_no_system() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.engine();
    is_a_handle(&engine);
    bed.insert(&write("anne", "1")).await;
    engine.nudge();
    eventually(async || engine.stats().delivered == 1).await;
    engine.stop().await;
}

#[test]
fn it_starts_where_there_is_no_runtime_at_all() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let bed = runtime.block_on(Bed::new(Flavor::Memory));
    let engine = bed.engine();
    runtime.block_on(async {
        bed.insert(&write("anne", "1")).await;
        within_deadline(engine.drain()).await.unwrap();
        engine.stop().await;
    });
    assert_eq!(engine.stats().delivered, 1);
}

#[actix_rt::test]
async fn it_runs_in_the_applications_own_system() {
    let bed = Bed::new(Flavor::Memory).await;
    let engine = bed.engine();
    bed.insert(&write("anne", "1")).await;
    assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 1);
    engine.crash("claimer");
    engine.crash("ledger");
    bed.insert(&write("anne", "2")).await;
    eventually(async || engine.stats().delivered == 2).await;
    engine.stop().await;
}

#[tokio::test]
async fn an_intent_is_enqueued_in_the_applications_own_transaction() {
    use diesel_async::{AsyncConnection as _, SimpleAsyncConnection as _};
    let bed = Bed::new(Flavor::Memory).await;
    bed.database.execute("CREATE TABLE archives (id text PRIMARY KEY)").await;
    let mut connection = bed.database.url().parse::<fga_outbox::DatabaseUrl>().unwrap().connect().await.unwrap();
    let register = async |connection: &mut diesel_async::AsyncPgConnection, id: &str, fail: bool| {
        connection
            .transaction(async |connection| {
                connection.batch_execute(&format!("INSERT INTO archives VALUES ('{id}')")).await?;
                let tuple = Tuple::new("user:anne", "viewer", format!("document:{id}")).expect("valid");
                Intent::write(tuple).enqueue(connection).await?;
                if fail { Err(diesel::result::Error::RollbackTransaction) } else { Ok(()) }
            })
            .await
    };
    register(&mut connection, "kept", false).await.unwrap();
    register(&mut connection, "lost", true).await.unwrap_err();
    assert_eq!(bed.database.query_all::<String>("SELECT id FROM archives").await, ["kept"]);
    assert_eq!(bed.drain().await.delivered, 1);
    assert!(bed.viewer("anne", "kept").await.is_some());
    assert!(bed.viewer("anne", "lost").await.is_none());
}

#[tokio::test]
async fn stopping_waits_for_requests_in_flight_and_gives_the_rest_back() {
    let server = Server::start_private(Flavor::Memory, &[]).await;
    let bed = Bed::on(&server).await;
    let engine = bed.engine();
    within_deadline(engine.drain()).await.unwrap();
    server.pause().await;
    bed.insert_many(300).await;
    engine.nudge();
    eventually(async || engine.stats().requests > 0).await;
    let stopping = tokio::spawn({
        let engine = engine.clone();
        async move { engine.stop().await }
    });
    server.resume().await;
    within_deadline(stopping).await.unwrap();
    let requests = engine.stats().requests;
    // What was accepted is recorded, what was not sent is free.
    assert!(requests > 0);
    let delivered: i64 = bed.database.query_one("SELECT count(*) FROM fga_outbox WHERE processed_at IS NOT NULL").await;
    assert_eq!(bed.store.read_all().await.len() as i64, delivered);
    let free = "SELECT count(*) FROM (SELECT 1 FROM fga_outbox WHERE processed_at IS NULL FOR UPDATE SKIP LOCKED) f";
    assert_eq!(bed.database.query_one::<i64>(free).await, 300 - delivered);
    assert_eq!(engine.stats().requests, requests, "nothing is sent after a stop");
    engine.stop().await;
    assert!(engine.drain().await.is_err());
}

#[tokio::test]
async fn a_stop_does_not_wait_longer_than_its_grace() {
    let server = Server::start_private(Flavor::Memory, &[]).await;
    let bed = Bed::on(&server).await;
    let engine = bed.builder().grace(Duration::from_millis(50)).start().unwrap();
    within_deadline(engine.drain()).await.unwrap();
    server.pause().await;
    let id = bed.insert(&write("anne", "1")).await;
    let before = engine.stats().requests;
    engine.nudge();
    eventually(async || engine.stats().requests > before).await;
    engine.stop().await;
    // The row is free at once, and untouched.
    let free = "SELECT count(*) = 1 FROM (SELECT 1 FROM fga_outbox FOR UPDATE SKIP LOCKED) f";
    eventually(|| bed.database.query_one::<bool>(free)).await;
    assert_eq!(bed.state(id).await.attempts, 0);
}

#[tokio::test]
async fn settings_that_cannot_be_used_are_named() {
    let ok =
        || Engine::builder().database_url("postgres://h/db").api_url("http://h").store_id("01J9W3S5F0Q1G4Z6V8X2Y7B5NC");
    for (builder, expected) in [
        (Engine::builder(), "FGA_API_URL is not set"),
        (ok().api_url("localhost:8080"), "FGA_API_URL: expected http:// or https://, got localhost:"),
        (ok().api_url("http://me:hush@h"), "FGA_API_URL: must not hold a user or a password"),
        (ok().store_id("my-store"), "FGA_STORE_ID: expected a ULID of 26 characters, got \"my-store\""),
        (ok().model_id("x"), "FGA_MODEL_ID: expected a ULID"),
        (ok().api_token("a\nb"), "FGA_API_TOKEN: expected printable ASCII"),
        (ok().database_url("h:5432"), "DATABASE_URL: expected postgres://"),
    ] {
        let error = builder.start().err().expect(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
        assert!(!error.contains("hush"), "{error}");
    }
}
