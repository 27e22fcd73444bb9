//! Every answer has its own consequence: against real servers where they can be made to give it, otherwise against a
//! mock that stands for a proxy, a hosted service, or something that is not OpenFGA at all.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fga_outbox::{DrainError, Engine, EngineBuilder, FaultKind};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use wiremock::matchers::{method, path_regex};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

use crate::bed::{Bed, viewer, write, write_in_office};
use crate::support::{Cluster, Flavor, MODEL, Server, eventually, within_deadline};

const UNTOUCHED: &str = "SELECT bool_and(attempts = 0 AND last_error IS NULL
    AND (processed_at IS NOT NULL OR next_attempt_at IS NULL OR next_attempt_at <= now())) FROM fga_outbox";

/// Something at OpenFGA's place that knows every store and model, holds nothing, and answers writes as it is told.
struct Mocked {
    server: MockServer,
    bed: Bed,
}

impl Mocked {
    async fn new(write: impl Fn(&Request) -> ResponseTemplate + Send + Sync + 'static) -> Self {
        let server = MockServer::start().await;
        let ok = |body: Value| ResponseTemplate::new(200).set_body_json(body);
        Mock::given(method("POST")).and(path_regex("^/stores/[^/]+/write$")).respond_with(write).mount(&server).await;
        Mock::given(method("GET"))
            .and(path_regex("^/stores/[^/]+/authorization-models/[^/]+$"))
            .respond_with(ok(json!({"authorization_model": {}})))
            .mount(&server)
            .await;
        Mock::given(method("POST"))
            .and(path_regex("^/stores/[^/]+/read$"))
            .respond_with(ok(json!({"tuples": [], "continuation_token": ""})))
            .mount(&server)
            .await;
        Self { server, bed: Bed::new(Flavor::Memory).await }
    }

    fn builder(&self) -> EngineBuilder {
        self.bed.builder().api_url(self.server.uri())
    }

    fn engine(&self) -> Engine {
        self.builder().start().unwrap()
    }
}

fn accepted() -> ResponseTemplate {
    ResponseTemplate::new(200).set_body_json(json!({}))
}

fn refusal(status: u16, code: &str, message: &str) -> ResponseTemplate {
    ResponseTemplate::new(status).set_body_json(json!({"code": code, "message": message}))
}

fn page(status: u16, text: &str) -> ResponseTemplate {
    ResponseTemplate::new(status).set_body_raw(format!("<html><h1>{text}</h1></html>"), "text/html")
}

/// Answers this until it is mended.
#[derive(Clone)]
struct Fault(Arc<Mutex<Option<ResponseTemplate>>>);

impl Fault {
    fn new(answer: ResponseTemplate) -> Self {
        Self(Arc::new(Mutex::new(Some(answer))))
    }

    fn answer(&self) -> ResponseTemplate {
        self.0.lock().unwrap().clone().unwrap_or_else(accepted)
    }

    fn mend(&self) {
        *self.0.lock().unwrap() = None;
    }

    async fn mocked(&self) -> Mocked {
        let fault = self.clone();
        Mocked::new(move |_| fault.answer()).await
    }
}

#[tokio::test]
async fn a_fault_of_the_target_pauses_says_why_and_costs_no_row_anything() {
    for (answer, kind, reason) in [
        (page(502, "Bad Gateway"), FaultKind::Unreachable, "HTTP 502: <html><h1>Bad Gateway"),
        (page(503, "Service Unavailable"), FaultKind::Unreachable, "HTTP 503: <html><h1>Service Unavailable"),
        (page(504, "Gateway Time-out"), FaultKind::Unreachable, "HTTP 504: <html><h1>Gateway Time-out"),
        (ResponseTemplate::new(503), FaultKind::Unreachable, "HTTP 503: no body"),
        (ResponseTemplate::new(429), FaultKind::Overloaded, "HTTP 429: no body"),
        (refusal(429, "rate_limit_exceeded", "Rate Limit exceeded"), FaultKind::Overloaded, "Rate Limit exceeded"),
        (
            refusal(403, "forbidden", "the principal is not authorized to perform the action"),
            FaultKind::Misconfigured,
            "the principal is not authorized",
        ),
        (page(403, "Forbidden"), FaultKind::Misconfigured, "HTTP 403: <html><h1>Forbidden"),
        (
            ResponseTemplate::new(301).insert_header("location", "https://elsewhere.example/"),
            FaultKind::Misconfigured,
            "HTTP 301: redirects are not followed",
        ),
        (
            ResponseTemplate::new(307).insert_header("location", "/elsewhere"),
            FaultKind::Misconfigured,
            "HTTP 307: redirects are not followed",
        ),
        (page(404, "Not Found"), FaultKind::Misconfigured, "HTTP 404"),
    ] {
        let fault = Fault::new(answer);
        let mocked = fault.mocked().await;
        for at in 0..10 {
            mocked.bed.insert(&write("anne", &at.to_string())).await;
        }
        let engine = mocked.builder().patience(Duration::ZERO).start().unwrap();
        match within_deadline(engine.drain()).await {
            Err(DrainError::Target(fault)) => {
                assert_eq!(fault.kind, kind, "{reason}");
                assert!(fault.reason.starts_with(reason), "{} is not {reason}", fault.reason);
            }
            other => panic!("{reason}: {other:?}"),
        }
        eventually(|| mocked.bed.database.query_one::<bool>(UNTOUCHED)).await;
        fault.mend();
        eventually(async || engine.stats().delivered == 10).await;
        assert!(mocked.bed.database.query_one::<bool>(UNTOUCHED).await, "{reason}");
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_rate_limit_is_left_alone_as_long_as_it_asks() {
    for as_date in [false, true] {
        let until: Arc<Mutex<Option<SystemTime>>> = Arc::default();
        let early = Arc::new(Mutex::new(0));
        let mocked = Mocked::new({
            let (until, early) = (until.clone(), early.clone());
            move |_| {
                let mut until = until.lock().unwrap();
                match *until {
                    None => {
                        // A date has whole seconds.
                        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(2));
                        let (time, text) = if as_date {
                            (httpdate::parse_http_date(&date).unwrap(), date)
                        } else {
                            (SystemTime::now() + Duration::from_secs(1), "1".to_owned())
                        };
                        *until = Some(time);
                        ResponseTemplate::new(429).insert_header("retry-after", text.as_str())
                    }
                    Some(until) => {
                        *early.lock().unwrap() += usize::from(SystemTime::now() < until);
                        accepted()
                    }
                }
            }
        })
        .await;
        for at in 0..300 {
            mocked.bed.insert(&write("anne", &at.to_string())).await;
        }
        let engine = mocked.engine();
        let drained = within_deadline(engine.drain()).await.unwrap();
        assert_eq!((drained.waiting, drained.refused), (0, 0));
        eventually(async || engine.stats().delivered == 300).await;
        assert!(until.lock().unwrap().is_some());
        // Those that were under way when the first was answered.
        let early = *early.lock().unwrap();
        assert!(early < 4, "{early} requests came early");
        assert!(mocked.bed.database.query_one::<bool>(UNTOUCHED).await);
        engine.stop().await;
    }
}

#[tokio::test]
async fn an_answer_that_nobody_foresaw_lets_the_row_wait_and_is_counted() {
    for (answer, reason) in [
        (page(200, "Please log in"), "HTTP 200: <html><h1>Please log in"),
        (ResponseTemplate::new(200), "HTTP 200: no body"),
        (ResponseTemplate::new(200).set_body_string(r#"{"cod"#), r#"HTTP 200: {"cod"#),
        (ResponseTemplate::new(400), "HTTP 400: no body"),
        (ResponseTemplate::new(400).set_body_string(r#"{"code":"validation_error","mess"#), r#"HTTP 400: {"code""#),
        (refusal(400, "brand_new", "Something else"), "Something else"),
        (refusal(400, "validation_error", "malformed JSON"), "malformed JSON"),
        (page(418, "I'm a teapot"), "HTTP 418: <html><h1>I'm a teapot"),
    ] {
        let fault = Fault::new(answer);
        let mocked = fault.mocked().await;
        let id = mocked.bed.insert(&write("anne", "1")).await;
        let engine = mocked.engine();
        eventually(async || mocked.bed.state(id).await.waiting).await;
        let state = mocked.bed.state(id).await;
        assert!(state.attempts > 0 && !state.refused, "{reason}: {state:?}");
        assert!(state.last_error.starts_with(reason), "{} is not {reason}", state.last_error);
        assert!(engine.stats().unforeseen > 0);
        fault.mend();
        eventually(async || mocked.bed.state(id).await.delivered).await;
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_row_that_nothing_foreseen_happens_to_harms_no_other() {
    let mocked = Mocked::new(|request| {
        if String::from_utf8_lossy(&request.body).contains("poison") { page(418, "I'm a teapot") } else { accepted() }
    })
    .await;
    let mut poisoned = 0;
    for at in 0..60 {
        let user = if at == 30 { "poison".to_owned() } else { format!("u{at}") };
        let id = mocked.bed.insert(&write(&user, "1")).await;
        poisoned = if at == 30 { id } else { poisoned };
    }
    let engine = mocked.engine();
    eventually(async || engine.stats().delivered == 59).await;
    eventually(async || mocked.bed.state(poisoned).await.waiting).await;
    let others =
        format!("SELECT bool_and(processed_at IS NOT NULL AND attempts = 0) FROM fga_outbox WHERE id <> {poisoned}");
    assert!(mocked.bed.database.query_one::<bool>(&others).await);
    engine.stop().await;
}

#[tokio::test]
async fn what_is_too_large_for_a_proxy_is_split_and_a_single_tuple_refused() {
    let largest = Arc::new(Mutex::new(0));
    let mocked = Mocked::new({
        let largest = largest.clone();
        move |request: &Request| {
            if request.body.len() > 3_000 {
                return page(413, "Request Entity Too Large");
            }
            let mut largest = largest.lock().unwrap();
            *largest = request.body.len().max(*largest);
            accepted()
        }
    })
    .await;
    for at in 0..90 {
        mocked.bed.insert(&write("anne", &at.to_string())).await;
    }
    let wide: Vec<_> = (0..60).map(|at| viewer("wide", &at.to_string())).collect();
    let wide = mocked.bed.insert(&json!({"writes": wide})).await;
    let large = mocked.bed.insert(&write_in_office("large", "1", json!({"office": "x".repeat(4_000)}))).await;
    let engine = mocked.engine();
    let drained = within_deadline(engine.drain()).await.unwrap();
    assert_eq!((drained.delivered, drained.waiting, drained.refused), (91, 0, 1));
    assert!(mocked.bed.state(wide).await.delivered);
    let state = mocked.bed.state(large).await;
    assert!(state.refused && state.last_error.contains("larger than a request may be"), "{state:?}");
    assert!(*largest.lock().unwrap() > 1_000, "split more than was needed");
    engine.stop().await;
}

/// One HTTP request of a connection: its first line, once its body is in.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    let mut chunk = [0; 4_096];
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
            if body.len() >= length.unwrap_or(0) {
                return head.lines().next().map(str::to_owned);
            }
        }
        match stream.read(&mut chunk).await {
            Ok(0) | Err(_) => return None,
            Ok(bytes) => read.extend_from_slice(&chunk[..bytes]),
        }
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_pauses_and_costs_no_row_anything() {
    for broken in ["HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "HTTP/1.1 20", ""] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let broken_off = Arc::new(Mutex::new(0));
        let serving = tokio::spawn({
            let broken_off = broken_off.clone();
            async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let Some(line) = read_request(&mut stream).await else { continue };
                    let breaks = line.contains("/write") && {
                        let mut broken_off = broken_off.lock().unwrap();
                        *broken_off += 1;
                        *broken_off <= 2
                    };
                    let body = if line.contains("/read") { r#"{"tuples":[]}"# } else { "{}" };
                    let whole =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
                    let answer = if breaks { broken } else { &whole };
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        });
        let bed = Bed::new(Flavor::Memory).await;
        for at in 0..10 {
            bed.insert(&write("anne", &at.to_string())).await;
        }
        let engine = bed.builder().api_url(url).start().unwrap();
        eventually(async || engine.stats().delivered == 10).await;
        assert!(*broken_off.lock().unwrap() > 2);
        assert!(bed.database.query_one::<bool>(UNTOUCHED).await);
        engine.stop().await;
        serving.abort();
    }
}

#[tokio::test]
async fn what_the_model_does_not_allow_is_refused_in_openfgas_words() {
    let tuple =
        |user: &str, relation: &str, object: &str| json!({"user": user, "relation": relation, "object": object});
    let under = |condition: Value, mut tuple: Value| {
        tuple["condition"] = condition;
        tuple
    };
    // Words of another line of the table, in what a row holds.
    let trap = "invalid WriteRequest.StoreId: grpc: received message larger than max";
    let cases = [
        (tuple("user:a", "viewer", "planet:1"), "Reason: type 'planet' not found"),
        (tuple("user:a", "owner", "document:1"), "Reason: relation 'document#owner' not found"),
        (tuple("group:a", "viewer", "document:1"), "not an allowed type restriction"),
        (tuple("group:1#member", "member", "group:1"), "cannot write a tuple that is implicit"),
        (tuple("user:*", "member", "organization:1"), "Reason: "),
        (under(json!({"name": "nope"}), tuple("user:b", "viewer", "document:1")), "Reason: undefined condition"),
        (under(json!({"name": "in_office"}), tuple("user:b", "editor", "document:1")), "Reason: invalid condition"),
        (
            under(json!({"name": "in_office", "context": {"floor": trap}}), tuple("user:c", "viewer", "document:1")),
            "Reason: parameter type error",
        ),
        (
            under(json!({"name": "in_office", "context": {trap: 1}}), tuple("user:d", "viewer", "document:1")),
            "found invalid context parameter",
        ),
        (
            under(
                json!({"name": "in_office", "context": {"office": "x".repeat(33_000)}}),
                tuple("user:e", "viewer", "document:1"),
            ),
            "condition context size limit exceeded",
        ),
    ];
    for flavor in Flavor::ALL {
        let bed = Bed::new(flavor).await;
        let mut refused = Vec::new();
        for (at, (tuple, reason)) in cases.iter().enumerate() {
            refused.push((bed.insert(&json!({"writes": [tuple]})).await, *reason));
            bed.insert(&write("good", &at.to_string())).await;
        }
        let engine = bed.engine();
        let drained = within_deadline(engine.drain()).await.unwrap();
        assert_eq!((drained.delivered, drained.refused, drained.waiting), (cases.len() as u64, cases.len() as i64, 0));
        for (id, reason) in refused {
            let state = bed.state(id).await;
            assert!(state.refused && state.last_error.starts_with("Invalid tuple '"), "{flavor:?}: {state:?}");
            assert!(state.last_error.contains(reason), "{flavor:?}: {} lacks {reason}", state.last_error);
        }
        assert_eq!(bed.store.read_all().await.len(), cases.len());
        // Each was named: one request for each of them, and one for all others.
        assert!(engine.stats().requests <= cases.len() as u64 + 2, "{flavor:?}: {:?}", engine.stats());
        engine.stop().await;
    }
}

#[tokio::test]
async fn the_servers_own_limit_of_keys_is_learned_and_a_larger_row_goes_in_parts() {
    for flavor in [Flavor::Memory, Flavor::Old] {
        let server = Server::start_private(flavor, &["--max-tuples-per-write", "10"]).await;
        let bed = Bed::on(&server).await;
        for at in 0..30 {
            bed.insert(&write("anne", &at.to_string())).await;
        }
        let large: Vec<_> = (0..25).map(|at| viewer("large", &at.to_string())).collect();
        let large = bed.insert(&json!({"writes": large, "deletes": [viewer("anne", "3"), viewer("anne", "4")]})).await;
        let engine = bed.engine();
        let drained = within_deadline(engine.drain()).await.unwrap();
        assert_eq!((drained.delivered, drained.waiting, drained.refused), (31, 0, 0));
        assert!(bed.state(large).await.delivered);
        assert_eq!(bed.store.read_all().await.len(), 28 + 25);
        // What was learned is not forgotten with the lease.
        let before = engine.stats().requests;
        for at in 0..10 {
            bed.insert(&write("bob", &at.to_string())).await;
        }
        within_deadline(engine.drain()).await.unwrap();
        let more: Vec<_> = (0..20).map(|at| viewer("more", &at.to_string())).collect();
        bed.insert(&json!({"writes": more})).await;
        within_deadline(engine.drain()).await.unwrap();
        assert!(engine.stats().requests - before <= 12, "{} more", engine.stats().requests - before);
        engine.stop().await;
    }
}

#[tokio::test]
async fn requests_are_split_by_their_bytes_before_they_are_sent() {
    for flavor in [Flavor::Memory, Flavor::Old] {
        let bed = Bed::new(flavor).await;
        let office = json!({"office": "x".repeat(30_000)});
        let large = |user: &str, document: usize| write_in_office(user, &document.to_string(), office.clone());
        for at in 0..30 {
            bed.insert(&large("anne", at)).await;
        }
        let tuples: Vec<_> = (0..30).map(|at| large("bob", at)["writes"][0].clone()).collect();
        let row = bed.insert(&json!({"writes": tuples})).await;
        let engine = bed.engine();
        let drained = within_deadline(engine.drain()).await.unwrap();
        assert_eq!((drained.delivered, drained.waiting, drained.refused), (31, 0, 0));
        assert!(bed.state(row).await.delivered);
        assert_eq!(bed.store.read_all().await.len(), 60);
        engine.stop().await;
        // Twenty of them fit; the server refuses more.
        let twenty: Vec<_> = (0..21).map(|at| large("carl", at)["writes"][0].clone()).collect();
        let (status, answer) = bed.store.write_raw(&json!({"writes": {"tuple_keys": twenty}})).await;
        assert_eq!((status, answer["code"].as_str()), (500, Some("resource_exhausted")), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_race_of_many_engines_for_the_same_new_tuples_is_repeated_in_place() {
    const ENGINES: usize = 10;
    let server = Server::shared(Flavor::Postgres).await;
    let shared = server.store().await;
    let mut beds = Vec::new();
    for _ in 0..ENGINES {
        beds.push(Bed::on(server).await);
    }
    // One store, as many tables.
    let start = |bed: &Bed| {
        let builder = bed.builder().store_id(shared.store_id()).model_id(shared.model_id());
        builder.poll_interval(Duration::from_millis(5)).start().unwrap()
    };
    let engines: Vec<Engine> = beds.iter().map(start).collect();
    let requests = || engines.iter().map(|engine| engine.stats().requests).sum::<u64>();
    for round in 1..=20 {
        let before = requests();
        let rows = format!(
            "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(jsonb_build_object(
                'user', 'user:' || n, 'relation', 'viewer', 'object', 'document:{round}'))) FROM generate_series(1, 90) n"
        );
        futures_util::future::join_all(beds.iter().map(|bed| bed.database.execute(&rows))).await;
        let drained = within_deadline(futures_util::future::try_join_all(engines.iter().map(Engine::drain))).await;
        for drained in drained.unwrap() {
            assert_eq!((drained.waiting, drained.refused, drained.held), (0, 0, 0));
        }
        for bed in &beds {
            assert!(bed.database.query_one::<bool>(UNTOUCHED).await);
        }
        assert_eq!(shared.read_all().await.len(), round * 90);
        // One request for each, unless some had to be repeated.
        if requests() - before > ENGINES as u64 {
            break;
        }
        assert!(round < 20, "there was no race: this proves nothing");
    }
    for engine in engines {
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_store_without_a_model_pauses_until_it_has_one() {
    for flavor in [Flavor::Memory, Flavor::Old] {
        let bed = Bed::new(flavor).await;
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let post = async |path: &str, body: &Value| -> Value {
            let url = format!("{}{path}", bed.store.api_url());
            http.post(url).json(body).send().await.unwrap().error_for_status().unwrap().json().await.unwrap()
        };
        let created = post("/stores", &json!({"name": "no model yet"})).await;
        let store = created["id"].as_str().unwrap();
        bed.insert(&write("anne", "1")).await;
        let builder = Engine::builder().database_url(bed.database.url()).api_url(bed.store.api_url()).store_id(store);
        let engine = builder.patience(Duration::ZERO).start().unwrap();
        let error = within_deadline(engine.drain()).await.unwrap_err();
        match &error {
            DrainError::Target(fault) => {
                assert_eq!(fault.kind, FaultKind::Misconfigured);
                assert_eq!(fault.reason, format!("No authorization models found for store '{store}'"));
            }
            error => panic!("{error:?}"),
        }
        assert!(bed.database.query_one::<bool>(UNTOUCHED).await);
        post(&format!("/stores/{store}/authorization-models"), &serde_json::from_str(MODEL).unwrap()).await;
        eventually(async || engine.stats().delivered == 1).await;
        engine.stop().await;
    }
}

/// A connection to the database that holds this store.
async fn datastore_of(store_id: &str) -> tokio_postgres::Client {
    let cluster = Cluster::shared().await;
    let connect = async |name: &str| {
        let (client, connection) = tokio_postgres::connect(&cluster.url(name), tokio_postgres::NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(client)
    };
    let names = "SELECT datname FROM pg_database WHERE datname LIKE 'test\\_%'";
    for row in connect("postgres").await.unwrap().query(names, &[]).await.unwrap() {
        // Others come and go.
        let Some(client) = connect(row.get(0)).await else { continue };
        if let Ok(Some(_)) = client.query_opt("SELECT 1 FROM store WHERE id = $1", &[&store_id]).await {
            return client;
        }
    }
    panic!("no database holds the store {store_id}");
}

#[tokio::test]
async fn a_datastore_that_hangs_pauses_and_costs_no_row_anything() {
    let server = Server::start_private(Flavor::Postgres, &[]).await;
    let bed = Bed::on(&server).await;
    let mut datastore = datastore_of(bed.store.store_id()).await;
    let engine = bed.engine();
    within_deadline(engine.drain()).await.unwrap();
    // Requests end by the server's deadline, after some seconds: 500 `deadline_exceeded`.
    let lock = datastore.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE tuple IN ACCESS EXCLUSIVE MODE").await.unwrap();
    for at in 0..10 {
        bed.insert(&write("anne", &at.to_string())).await;
    }
    eventually(async || engine.stats().paused.is_some()).await;
    assert!(engine.stats().requests > 0 && engine.stats().delivered == 0, "{:?}", engine.stats());
    assert!(bed.database.query_one::<bool>(UNTOUCHED).await);
    lock.rollback().await.unwrap();
    eventually(async || engine.stats().delivered == 10).await;
    assert!(bed.database.query_one::<bool>(UNTOUCHED).await);
    engine.stop().await;
}
