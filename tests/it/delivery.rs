//! From a committed row to a tuple.

use serde_json::{Value, json};

use crate::bed::{Bed, delete, viewer, write, write_in_office};
use crate::support::{Flavor, within_deadline};

async fn on_every_server<F: Future<Output = ()>>(test: impl Fn(Bed) -> F) {
    for flavor in Flavor::ALL {
        test(Bed::new(flavor).await).await;
    }
}

#[tokio::test]
async fn writes_and_deletes_arrive() {
    on_every_server(async |bed| {
        bed.insert(&write("anne", "1")).await;
        bed.insert(&json!({"writes": [viewer("bob", "1"), viewer("bob", "2")], "deletes": [viewer("carl", "1")]}))
            .await;
        assert_eq!(bed.drain().await.delivered, 2);
        bed.insert(&delete("bob", "2")).await;
        assert_eq!(bed.drain().await.delivered, 1);
        assert!(bed.viewer("anne", "1").await.is_some());
        assert!(bed.viewer("bob", "1").await.is_some());
        assert!(bed.viewer("bob", "2").await.is_none());
    })
    .await;
}

#[tokio::test]
async fn what_is_already_there_or_already_gone_counts_as_delivered() {
    on_every_server(async |bed| {
        let written = json!({"writes": {"tuple_keys": [viewer("anne", "1"), viewer("bob", "3")]}});
        assert_eq!(bed.store.write_raw(&written).await.0, 200);
        // Beside ten that are there, others arrive: nothing of a request is lost to its duplicates.
        for at in 0..20 {
            bed.insert(&json!({"writes": [viewer("anne", "1"), viewer("new", &at.to_string())]})).await;
        }
        bed.insert(&delete("nobody", "9")).await;
        bed.insert(&json!({"writes": [viewer("bob", "3")], "deletes": [viewer("nobody", "8")]})).await;
        let drained = bed.drain().await;
        assert_eq!((drained.delivered, drained.waiting, drained.refused), (22, 0, 0));
        assert_eq!(bed.store.read_all().await.len(), 22);
    })
    .await;
}

#[tokio::test]
async fn a_refused_row_is_recorded_and_its_neighbours_are_delivered() {
    on_every_server(async |bed| {
        let mut good = Vec::new();
        for at in 0..30 {
            good.push(bed.insert(&write("anne", &at.to_string())).await);
        }
        let unknown_type = json!({"writes": [
            viewer("anne", "fine"),
            {"user": "user:anne", "relation": "viewer", "object": "planet:1"},
        ]});
        let unknown_type = bed.insert(&unknown_type).await;
        let not_allowed =
            bed.insert(&json!({"writes": [{"user": "group:x", "relation": "viewer", "object": "document:1"}]})).await;
        let drained = bed.drain().await;
        assert_eq!((drained.delivered, drained.refused), (30, 2));
        let state = bed.state(unknown_type).await;
        assert!(state.refused && !state.delivered && state.attempts == 1, "{state:?}");
        assert!(state.last_error.contains("type 'planet' not found"), "{}", state.last_error);
        assert!(bed.viewer("anne", "fine").await.is_none(), "a row is delivered whole");
        let state = bed.state(not_allowed).await;
        assert!(state.last_error.starts_with("Invalid tuple 'document:1#viewer@group:x'. Reason: "), "{state:?}");
        for id in good {
            assert!(bed.state(id).await.delivered);
        }
    })
    .await;
}

#[tokio::test]
async fn bad_payloads_end_refused_with_the_field_and_stop_nothing() {
    let bed = Bed::new(Flavor::Memory).await;
    let tuples = |n: usize| (0..n).map(|at| viewer("many", &at.to_string())).collect::<Vec<_>>();
    let cases = [
        (json!({}), "payload: has no tuples"),
        (json!([]), "payload: invalid type: sequence"),
        (json!("x"), "payload: invalid type: string"),
        (Value::Null, "payload: invalid type: null"),
        (json!({"writes": []}), "payload: has no tuples"),
        (
            json!({"writes": [{"user": 7, "relation": "viewer", "object": "document:1"}]}),
            "writes[0].user: invalid type: integer",
        ),
        (
            json!({"writes": [{"user": "user:a", "relation": "viewer", "object": "document:1", "conditon": {}}]}),
            "writes[0].conditon: unknown field",
        ),
        (write("an ne", "1"), "writes[0].user: must not contain white space"),
        (write("an\u{7}ne", "1"), "Invalid tuple"),
        (write_in_office("big", "1", json!({"office": "x".repeat(40_000)})), "condition context size limit exceeded"),
    ];
    let mut refused = Vec::new();
    for (payload, expected) in &cases {
        refused.push((bed.insert(payload).await, expected));
        bed.insert(&write("anne", &refused.len().to_string())).await;
    }
    let large = bed.insert(&json!({"writes": tuples(250)})).await;
    let drained = bed.drain().await;
    assert_eq!((drained.delivered, drained.refused), (cases.len() as u64 + 1, cases.len() as i64));
    for (id, expected) in refused {
        let state = bed.state(id).await;
        assert!(state.refused && state.attempts == 1, "{expected}: {state:?}");
        assert!(state.last_error.contains(expected), "{expected}: {}", state.last_error);
    }
    assert!(bed.state(large).await.delivered);
    assert_eq!(bed.store.read_all().await.len(), cases.len() + 250);
}

#[tokio::test]
async fn a_payload_too_large_to_look_at_is_refused_and_stops_nothing() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.database
        .execute("INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', repeat('x', 17000000))")
        .await;
    for at in 0..12 {
        bed.insert(&json!({"writes": [viewer("anne", &at.to_string())], "deletes": []})).await;
    }
    let drained = bed.drain().await;
    assert_eq!((drained.delivered, drained.refused), (12, 1));
    assert!(bed.state(1).await.last_error.contains("17000014 bytes"), "{:?}", bed.state(1).await);
}

#[tokio::test]
async fn another_condition_replaces_the_stored_one() {
    on_every_server(async |bed| {
        for (stored, wanted) in [
            (Value::Null, json!({"office": "north"})),
            (json!({"office": "north"}), json!({"office": "south", "floor": 3})),
            (json!({"office": "south", "floor": 3}), Value::Null),
        ] {
            bed.insert(&write_in_office("anne", "1", stored)).await;
            assert_eq!(bed.drain().await.delivered, 1);
            bed.insert(&write_in_office("anne", "1", wanted.clone())).await;
            let drained = bed.drain().await;
            assert_eq!((drained.delivered, drained.waiting, drained.refused), (1, 0, 0), "{wanted}");
            let condition = bed.viewer("anne", "1").await.unwrap()["condition"].clone();
            let context = condition["context"].as_object().cloned().unwrap_or_default();
            assert_eq!(context, wanted.as_object().cloned().unwrap_or_default());
        }
        // And back to none at all.
        bed.insert(&write("anne", "1")).await;
        assert_eq!(bed.drain().await.delivered, 1);
        assert!(bed.viewer("anne", "1").await.unwrap()["condition"].is_null());
    })
    .await;
}

#[tokio::test]
async fn no_context_and_an_empty_one_are_the_same() {
    on_every_server(async |bed| {
        for (at, (first, second)) in [(Value::Null, json!({})), (json!({}), Value::Null)].into_iter().enumerate() {
            let document = at.to_string();
            bed.insert(&write_in_office("anne", &document, first)).await;
            assert_eq!(bed.drain().await.delivered, 1);
            bed.insert(&write_in_office("anne", &document, second)).await;
            let engine = bed.engine();
            assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 1);
            // Neither deleted nor written again.
            assert!(engine.stats().requests <= 1, "{:?}", engine.stats());
            engine.stop().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_row_that_deletes_and_writes_one_key_ends_with_it_written() {
    on_every_server(async |bed| {
        bed.insert(&write_in_office("anne", "1", json!({"office": "north"}))).await;
        bed.drain().await;
        let both = json!({"deletes": [viewer("anne", "1")], "writes": [viewer("anne", "1"), viewer("bob", "1")]});
        let id = bed.insert(&both).await;
        bed.drain().await;
        assert!(bed.state(id).await.delivered);
        assert!(bed.viewer("anne", "1").await.unwrap()["condition"].is_null());
        assert!(bed.viewer("bob", "1").await.is_some());
    })
    .await;
}

#[tokio::test]
async fn within_a_lease_the_last_intent_wins() {
    on_every_server(async |bed| {
        for payload in [
            write("anne", "1"),
            delete("anne", "1"),
            write("anne", "1"),
            delete("bob", "1"),
            write("bob", "1"),
            delete("bob", "1"),
            write("carl", "1"),
            write_in_office("carl", "1", json!({"office": "north"})),
        ] {
            bed.insert(&payload).await;
        }
        assert_eq!(bed.drain().await.delivered, 8);
        assert!(bed.viewer("anne", "1").await.is_some());
        assert!(bed.viewer("bob", "1").await.is_none());
        assert_eq!(bed.viewer("carl", "1").await.unwrap()["condition"]["name"], "in_office");
    })
    .await;
}

#[tokio::test]
async fn ids_with_quotes_commas_and_other_letters_are_told_apart() {
    on_every_server(async |bed| {
        let mut refused = Vec::new();
        for id in ["o'neill", "a,b", "é", "x\u{200b}y", "a@b", "it's', relation: 'viewer"] {
            bed.insert(&write(&id.replace([' ', ':'], ""), "quoted")).await;
            let bad = json!({"writes": [{"user": format!("user:{}", id.replace([' ', ':'], "")), "relation": "owner",
                "object": "document:quoted"}]});
            refused.push(bed.insert(&bad).await);
        }
        let drained = bed.drain().await;
        assert_eq!((drained.delivered, drained.refused), (6, 6));
        for id in refused {
            assert!(bed.state(id).await.refused);
        }
    })
    .await;
}

#[tokio::test]
async fn the_latest_model_is_looked_up_and_pinned() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert(&write("anne", "1")).await;
    let engine = fga_outbox::Engine::builder()
        .database_url(bed.database.url())
        .api_url(bed.store.api_url())
        .store_id(bed.store.store_id())
        .start()
        .unwrap();
    within_deadline(engine.drain()).await.unwrap();
    assert_eq!(engine.stats().model_id.as_deref(), Some(bed.store.model_id()));
    engine.stop().await;
}
