//! The binary, as its users type it.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::bed::{Bed, write};
use crate::support::{Cluster, Database, Flavor, SECRET_PASSWORD, eventually};

pub fn fga_outbox(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fga-outbox"));
    for name in ["DATABASE_URL", "FGA_API_URL", "FGA_STORE_ID", "FGA_MODEL_ID", "FGA_API_TOKEN", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

pub fn on(bed: &Bed, args: &[&str]) -> Command {
    let mut command = fga_outbox(args);
    command
        .env("DATABASE_URL", bed.database.url())
        .env("FGA_API_URL", bed.store.api_url())
        .env("FGA_STORE_ID", bed.store.store_id());
    command
}

pub fn run(mut command: Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().expect("ended by itself"), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

pub fn run_with_stdin(mut command: Command, stdin: &str) -> (i32, String, String) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[tokio::test]
async fn the_way_of_a_row_by_hand() {
    let bed = Bed::new(Flavor::Memory).await;
    let (code, stdout, _) = run(on(&bed, &["migrate"]));
    assert_eq!((code, &*stdout), (0, "nothing to do: fga_outbox is up to date\n"));

    let args = ["enqueue", "--write", "user:anne viewer document:1", "--delete", "user:bob viewer document:1"];
    assert_eq!(run(on(&bed, &args)).1, "enqueued 1 row\n");
    let lines = format!("{}\n\n{}\n", write("anne", "2"), json!({"deletes": [crate::bed::viewer("bob", "2")]}));
    assert_eq!(run_with_stdin(on(&bed, &["enqueue", "-"]), &lines).1, "enqueued 2 rows\n");
    assert_eq!(run_with_stdin(on(&bed, &["enqueue"]), &lines).1, "enqueued 2 rows\n");

    let (code, stdout, _) = run(on(&bed, &["status", "--json"]));
    let status: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code, 0);
    assert_eq!((&status["ready"], &status["delivered"]), (&json!(5), &json!(0)));
    assert!(status["oldest_undelivered_seconds"].as_f64().unwrap() >= 0.0);

    let (code, stdout, stderr) = run(on(&bed, &["drain", "--json"]));
    assert_eq!((code, &*stderr), (0, ""));
    let drained: Value = serde_json::from_str(&stdout).unwrap();
    let members: Vec<&String> = drained.as_object().unwrap().keys().collect();
    assert_eq!(members, ["delivered", "refused", "seconds", "waiting"]);
    assert_eq!((&drained["delivered"], &drained["waiting"], &drained["refused"]), (&json!(5), &json!(0), &json!(0)));

    bed.insert(&json!({"writes": [{"user": "user:anne", "relation": "viewer", "object": "planet:1"}]})).await;
    let (code, stdout, _) = run(on(&bed, &["drain"]));
    assert_eq!(code, 1);
    assert!(stdout.contains("1 refused"), "{stdout}");
    let (code, stdout, _) = run(on(&bed, &["status"]));
    assert_eq!(code, 0);
    assert!(stdout.contains("refused    1\ndelivered  5\n"), "{stdout}");
    assert!(stdout.contains("1 refused, such as: Invalid tuple 'planet:1#viewer@user:anne'"), "{stdout}");
}

#[tokio::test]
async fn bad_input_is_named_and_inserts_nothing() {
    let bed = Bed::new(Flavor::Memory).await;
    let lines = format!("{}\n{}\n", write("anne", "2"), r#"{"writes": [{"user": 5}]}"#);
    let (code, stdout, stderr) = run_with_stdin(on(&bed, &["enqueue"]), &lines);
    assert_eq!((code, &*stdout), (2, ""));
    assert!(stderr.contains("stdin, line 2: writes[0].user: invalid type: integer"), "{stderr}");
    for (args, expected) in [
        (&["enqueue", "--write", "user:anne viewer"][..], "expected 'user relation object'"),
        (&["enqueue", "--write", "user:anne viewer document"], "object: expected 'type:id'"),
        (&["enqueue", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (&["enqueue", "--write", "user:a viewer document:1", "file"], "cannot be used with"),
        (&["drain", "--store-id", "x"], "FGA_STORE_ID: expected a ULID"),
        (&["drain", "--api-url", "ftp://x"], "FGA_API_URL: expected http:// or https://"),
        (&["frain"], "unrecognized subcommand"),
    ] {
        let (code, stdout, stderr) = run(on(&bed, args));
        assert_eq!((code, &*stdout), (2, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
    assert_eq!(bed.database.query_one::<i64>("SELECT count(*) FROM fga_outbox").await, 0);
    let (code, _, stderr) = run(fga_outbox(&["status"]));
    assert_eq!(code, 2);
    assert!(stderr.contains("DATABASE_URL"), "{stderr}");
}

#[tokio::test]
async fn what_is_out_of_reach_is_told_from_what_is_wrong() {
    let bed = Bed::new(Flavor::Memory).await;
    for (args, expected_code, expected) in [
        (&["drain", "--api-url", "http://127.0.0.1:1"][..], 3, "Connection refused"),
        (&["drain", "--database-url", "postgres://postgres@127.0.0.1:1/x"], 3, "Connection refused"),
        (&["status", "--database-url", "postgres://postgres@127.0.0.1:1/x"], 3, "Connection refused"),
        (&["drain", "--store-id", "01J9W3S5F0Q1G4Z6V8X2Y7B5NC"], 2, "No authorization models found"),
        (&["drain", "--model-id", "01J9W3S5F0Q1G4Z6V8X2Y7B5NC"], 2, "not found"),
        (&["drain", "--schema", "nowhere"], 2, "fga-outbox migrate"),
    ] {
        let (code, stdout, stderr) = run(on(&bed, args));
        assert_eq!((code, &*stdout), (expected_code, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

#[tokio::test]
async fn run_delivers_until_it_is_told_to_stop() {
    let bed = Bed::new(Flavor::Memory).await;
    for signal in ["-INT", "-TERM"] {
        let mut child = on(&bed, &["run", "--log-format", "json"]).stderr(Stdio::piped()).spawn().unwrap();
        let id = bed.insert(&write("anne", signal)).await;
        eventually(async || bed.state(id).await.delivered).await;
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let stopped = tokio::task::spawn_blocking(move || {
            let status = child.wait().unwrap();
            (status, std::io::read_to_string(child.stderr.take().unwrap()).unwrap())
        });
        let (status, log) = stopped.await.unwrap();
        assert_eq!(status.code(), Some(0), "{log}");
        for line in log.lines() {
            serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}

#[tokio::test]
async fn postgres_is_reached_with_tls_and_a_password_that_is_never_shown() {
    let database = Database::new().await;
    database.execute("GRANT ALL ON SCHEMA public TO secret_user").await;
    let ca = Cluster::shared().await.ca_pem();
    let secret = database.secret_url();
    let by_name = secret.replace("127.0.0.1", "localhost");
    for url in [
        format!("{secret}?sslmode=require"),
        format!("{by_name}?sslmode=verify-full&sslrootcert={}", ca.display()),
        format!("{secret}?sslmode=verify-ca&sslrootcert={}", ca.display()),
        format!("{secret}?sslmode=disable"),
    ] {
        let (code, stdout, stderr) = run(fga_outbox(&["migrate", "--database-url", &url]));
        assert_eq!(code, 0, "{url}: {stdout}{stderr}");
    }
    let encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE ssl";
    assert!(database.query_one::<i64>(encrypted).await >= 0);
    // Signed by somebody whom this system does not know.
    let (code, _, stderr) = run(fga_outbox(&["status", "--database-url", &format!("{by_name}?sslmode=verify-full")]));
    assert_eq!(code, 3, "{stderr}");
    assert!(stderr.contains("certificate"), "{stderr}");

    for url in [secret.replace("correct", "wrong"), secret.replace("/test", "/nowhere"), format!("{secret}?x=y")] {
        let (code, stdout, stderr) = run(fga_outbox(&["status", "--database-url", &url]));
        assert_ne!(code, 0);
        let password = SECRET_PASSWORD.split('-').next_back().unwrap();
        assert!(!format!("{stdout}{stderr}").contains(password), "{stderr}");
    }
}

#[tokio::test]
async fn what_rows_hold_does_not_control_the_terminal() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert(&write("\u{1b}[31mred", "1")).await;
    bed.database.execute("UPDATE fga_outbox SET created_at = 'infinity'").await;
    for args in [&["list", "--ready"][..], &["status"]] {
        let (code, stdout, stderr) = run(on(&bed, args));
        assert_eq!(code, 0, "{stderr}");
        assert!(!stdout.contains('\u{1b}'), "{stdout:?}");
    }
    assert!(run(on(&bed, &["list", "--ready"])).1.contains(r"user:\u{1b}[31mred"));
}

#[tokio::test]
async fn a_reader_that_has_gone_is_no_failure() {
    let bed = Bed::new(Flavor::Memory).await;
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut status = on(&bed, &["status"]);
    status.stdout(writer.try_clone().unwrap()).stderr(writer);
    assert_eq!(status.status().unwrap().code(), Some(0));
}

#[test]
fn help_shows_the_environment_and_an_example_and_no_value() {
    for command in ["migrate", "enqueue", "drain", "run", "status"] {
        let mut help = fga_outbox(&[command, "--help"]);
        help.env("DATABASE_URL", "postgres://me:hush@h/db").env("FGA_API_TOKEN", "hush");
        let (code, stdout, _) = run(help);
        assert_eq!(code, 0);
        assert!(stdout.contains("[env: DATABASE_URL]"), "{stdout}");
        assert!(stdout.contains("Example"), "{stdout}");
        assert!(!stdout.contains("hush"), "{stdout}");
    }
}
