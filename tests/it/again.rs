//! Rows that are not delivered: looked at, given up, and brought back.

use std::process::Command;
use std::time::Duration;

use fga_outbox::{DatabaseUrl, Engine, Requeue, Undelivered, list, requeue};
use serde_json::{Value, json};

use crate::bed::{Bed, viewer, write};
use crate::command_line::on;
use crate::support::{Flavor, MODEL, eventually, within_deadline};

fn on_planet(user: &str) -> Value {
    json!({"writes": [{"user": format!("user:{user}"), "relation": "viewer", "object": "planet:1"}]})
}

pub fn model_with_planets() -> Value {
    let mut model: Value = serde_json::from_str(MODEL).unwrap();
    let planet = json!({"type": "planet", "relations": {"viewer": {"this": {}}}, "metadata": {"relations": {
        "viewer": {"directly_related_user_types": [{"type": "user"}]}}}});
    model["type_definitions"].as_array_mut().unwrap().push(planet);
    model
}

/// An engine that follows the store's latest model, and looks for it again at once.
fn following(bed: &Bed, model_interval: Duration) -> Engine {
    Engine::builder()
        .database_url(bed.database.url())
        .api_url(bed.store.api_url())
        .store_id(bed.store.store_id())
        .model_interval(model_interval)
        .poll_interval(Duration::from_millis(20))
        .start()
        .unwrap()
}

#[tokio::test]
async fn a_new_model_brings_refused_rows_back_by_itself() {
    let bed = Bed::new(Flavor::Memory).await;
    let id = bed.insert(&on_planet("anne")).await;
    let engine = following(&bed, Duration::from_millis(50));
    eventually(async || bed.state(id).await.refused).await;
    bed.store.write_model(&model_with_planets()).await;
    eventually(async || bed.state(id).await.delivered).await;
    engine.stop().await;
}

#[tokio::test]
async fn a_new_model_is_noticed_on_start_and_the_same_one_changes_nothing() {
    let bed = Bed::new(Flavor::Memory).await;
    let id = bed.insert(&on_planet("anne")).await;
    assert_eq!(bed.drain().await.refused, 1);
    // Under the model that refused it, it is not tried again.
    assert_eq!(bed.drain().await.refused, 1);
    assert_eq!(bed.state(id).await.attempts, 1);
    let newer = bed.store.write_model(&model_with_planets()).await;
    let engine = bed.builder().model_id(newer).start().unwrap();
    eventually(async || bed.state(id).await.delivered).await;
    engine.stop().await;
}

#[tokio::test]
async fn an_engine_that_follows_a_new_model_later_does_not_undo_it() {
    let bed = Bed::new(Flavor::Memory).await;
    let id = bed.insert(&on_planet("anne")).await;
    let slow = following(&bed, Duration::from_millis(80));
    eventually(async || bed.state(id).await.refused).await;
    bed.store.write_model(&model_with_planets()).await;
    let quick = following(&bed, Duration::from_millis(50));
    eventually(async || bed.state(id).await.delivered).await;
    slow.stop().await;
    quick.stop().await;
}

#[tokio::test]
async fn rows_are_requeued_by_state_id_and_reason() {
    let bed = Bed::new(Flavor::Memory).await;
    let delivered = bed.insert(&write("anne", "1")).await;
    let on_planet = bed.insert(&on_planet("anne")).await;
    let malformed = bed.insert(&json!({"writes": [{"user": 5}]})).await;
    let waiting = bed.insert(&write("anne", "2")).await;
    let later =
        "UPDATE fga_outbox SET next_attempt_at = now() + '1 hour', attempts = 4, last_error = 'busy' WHERE id =";
    bed.database.execute(&format!("{later} {waiting}")).await;
    assert_eq!(bed.drain().await.refused, 2);

    let mut connection = bed.database.url().parse::<DatabaseUrl>().unwrap().connect().await.unwrap();
    for (which, rows) in [
        (Requeue::Refused, 2),
        (Requeue::Ids(vec![waiting, malformed, delivered, 999]), 2),
        (Requeue::Reason("type 'planet' not found".to_owned()), 1),
        (Requeue::Reason("nothing like it".to_owned()), 0),
    ] {
        assert_eq!(requeue(&mut connection, &which, true).await.unwrap(), rows, "{which:?}");
    }
    assert_eq!(list(&mut connection, Undelivered::Ready, 10).await.unwrap(), []);

    // A row in somebody's hands is left to them.
    let mut other = bed.database.client().await;
    let holder = other.transaction().await.unwrap();
    holder.execute("SELECT 1 FROM fga_outbox WHERE id = $1 FOR UPDATE", &[&on_planet]).await.unwrap();
    assert_eq!(requeue(&mut connection, &Requeue::Refused, false).await.unwrap(), 1);
    holder.rollback().await.unwrap();
    let state = bed.state(malformed).await;
    assert!(!state.refused && state.attempts == 1 && !state.last_error.is_empty(), "{state:?}");
    assert_eq!(requeue(&mut connection, &Requeue::Ids(vec![waiting]), false).await.unwrap(), 1);
    assert_eq!(bed.drain().await.delivered, 1);
    assert!(bed.state(waiting).await.delivered);
}

#[tokio::test]
async fn rows_are_listed_with_their_reasons() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert(&on_planet("anne")).await;
    bed.insert(&json!({"writes": [{"user": 5}]})).await;
    bed.drain().await;
    let tuples: Vec<Value> = (0..5).map(|at| viewer("anne", &at.to_string())).collect();
    bed.insert(&json!({"writes": tuples, "deletes": [viewer("bob", "1")]})).await;

    let stdout = |mut command: Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let refused = stdout(on(&bed, &["list", "--refused"]));
    assert!(
        refused.contains("1 failed attempt: + user:anne viewer planet:1\n    Invalid tuple 'planet:1"),
        "{refused}"
    );
    assert!(refused.contains("writes[0].user: invalid type: integer"), "{refused}");
    let one = stdout(on(&bed, &["list", "--refused", "--json", "--limit", "1"]));
    let row: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(
        (&row["id"], &row["attempts"], &row["summary"]),
        (&json!(1), &json!(1), &json!("+ user:anne viewer planet:1"))
    );
    let ready = stdout(on(&bed, &["list", "--ready"]));
    assert!(ready.contains("+ user:anne viewer document:2, and 3 more"), "{ready}");
    assert_eq!(stdout(on(&bed, &["list", "--waiting"])), "");
    assert_eq!(stdout(on(&bed, &["requeue", "--refused", "--dry-run"])), "would requeue 2 rows\n");
    assert_eq!(stdout(on(&bed, &["requeue", "--id", "1", "2"])), "requeued 2 rows\n");
    assert_eq!(stdout(on(&bed, &["requeue", "--reason", "x"])), "requeued 0 rows\n");
    let usage = on(&bed, &["requeue"]).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

#[tokio::test]
async fn a_row_is_given_up_only_where_that_was_asked_for() {
    let bed = Bed::new(Flavor::Memory).await;
    // A server that fails at writing while it can be read: the fault is the row's.
    let mock = wiremock::MockServer::start().await;
    let answer = |status: u16, body: Value| wiremock::ResponseTemplate::new(status).set_body_json(body);
    let mount = async |method: &str, path: String, answer| {
        let matched = wiremock::Mock::given(wiremock::matchers::method(method));
        matched.and(wiremock::matchers::path(path)).respond_with(answer).mount(&mock).await;
    };
    let store = format!("/stores/{}", bed.store.store_id());
    let failure = json!({"code": "internal_error", "message": "Internal Server Error"});
    mount("POST", format!("{store}/write"), answer(500, failure)).await;
    mount("POST", format!("{store}/read"), answer(200, json!({"tuples": []}))).await;
    mount("GET", format!("{store}/authorization-models/{}", bed.store.model_id()), answer(200, json!({}))).await;

    let id = bed.insert(&write("anne", "1")).await;
    let engine = bed.builder().api_url(mock.uri()).start().unwrap();
    within_deadline(engine.drain()).await.unwrap();
    engine.stop().await;
    let state = bed.state(id).await;
    assert!(state.waiting && state.attempts >= 1, "{state:?}");
    assert_eq!(state.last_error, "Internal Server Error");

    let engine = bed.builder().api_url(mock.uri()).max_attempts(3).poll_interval(Duration::from_millis(20)).start();
    let engine = engine.unwrap();
    eventually(async || bed.state(id).await.refused).await;
    engine.stop().await;
    assert!(bed.state(id).await.attempts >= 3);
}
