//! The table: created, adopted or left alone.

use std::time::Duration;

use fga_outbox::{DatabaseError, DatabaseUrl, Intent, Tuple, migrate};

use crate::bed::Bed;
use crate::support::{Database, Flavor, eventually, within_deadline};

const COLUMNS: &str = "SELECT string_agg(concat_ws(' ', column_name, data_type, is_nullable, column_default), ', '
    ORDER BY ordinal_position) FROM information_schema.columns WHERE table_name = 'fga_outbox'";
const INDEXES: &str = "SELECT indexdef FROM pg_indexes WHERE tablename = 'fga_outbox' ORDER BY indexname";

/// As another program's own migration makes it.
const FOREIGN: &str = "CREATE TABLE fga_outbox (
    id bigserial PRIMARY KEY,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    last_error text
)";

fn url(database: &Database) -> DatabaseUrl {
    database.url().parse().unwrap()
}

#[tokio::test]
async fn a_new_table_is_exactly_the_contract() {
    let database = Database::new().await;
    assert_eq!(migrate(&url(&database)).await.unwrap().run.len(), 6);
    assert_eq!(
        database.query_one::<String>(COLUMNS).await,
        "id bigint NO nextval('fga_outbox_id_seq'::regclass), payload jsonb NO, \
         created_at timestamp with time zone NO now(), processed_at timestamp with time zone YES, \
         attempts integer NO 0, last_error text YES, next_attempt_at timestamp with time zone YES, \
         refused_model_id text YES"
    );
    assert_eq!(
        database.query_all::<String>(INDEXES).await,
        [
            "CREATE INDEX fga_outbox_next_attempt_idx ON public.fga_outbox USING btree \
             ((((processed_at IS NULL))::integer), next_attempt_at) WHERE (next_attempt_at IS NOT NULL)",
            "CREATE INDEX fga_outbox_pending_idx ON public.fga_outbox USING btree (id) WHERE (processed_at IS NULL)",
            "CREATE UNIQUE INDEX fga_outbox_pkey ON public.fga_outbox USING btree (id)",
        ]
    );
}

#[tokio::test]
async fn a_table_of_another_program_is_adopted_in_place() {
    let database = Database::new().await;
    database.execute(FOREIGN).await;
    database.execute("ALTER TABLE fga_outbox ADD COLUMN tenant text NOT NULL DEFAULT 'a'").await;
    database.execute("INSERT INTO fga_outbox (payload, attempts, last_error) VALUES ('{}', 3, 'old')").await;
    let file = "SELECT pg_relation_filenode('fga_outbox')::bigint";
    let before: i64 = database.query_one(file).await;
    migrate(&url(&database)).await.unwrap();
    assert_eq!(database.query_one::<i64>(file).await, before, "the table was rewritten");
    assert_eq!(database.query_all::<String>(INDEXES).await.len(), 3);
    let row =
        "SELECT row(payload, attempts, last_error, tenant, next_attempt_at, refused_model_id)::text FROM fga_outbox";
    assert_eq!(database.query_one::<String>(row).await, "({},3,old,a,,)");
}

#[tokio::test]
async fn a_table_that_differs_is_left_alone() {
    for (change, expected) in [
        ("DROP COLUMN attempts", "column attempts (integer) is missing"),
        ("ALTER COLUMN payload TYPE text", "column payload is text, not jsonb"),
        ("ALTER COLUMN id TYPE integer", "column id is integer, not bigint"),
        ("ALTER COLUMN processed_at SET NOT NULL", "column processed_at is NOT NULL"),
        ("ADD COLUMN next_attempt_at timestamptz DEFAULT now()", "column next_attempt_at has a default"),
        ("ADD COLUMN refused_model_id text NOT NULL", "column refused_model_id is NOT NULL"),
        ("DROP CONSTRAINT fga_outbox_pkey", "column id is not unique"),
        ("ADD COLUMN next_attempt_at text", "column next_attempt_at is text, not timestamp with time zone"),
    ] {
        let database = Database::new().await;
        database.execute(&format!("{FOREIGN}; ALTER TABLE fga_outbox {change}")).await;
        let columns: String = database.query_one(COLUMNS).await;
        let error = migrate(&url(&database)).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("left alone"), "{error}");
        assert_eq!(database.query_one::<String>(COLUMNS).await, columns);
    }
    let database = Database::new().await;
    database.execute("CREATE VIEW fga_outbox AS SELECT 1 AS id").await;
    let error = migrate(&url(&database)).await.unwrap_err().to_string();
    assert!(error.contains("not an ordinary table"), "{error}");
}

#[tokio::test]
async fn running_them_again_or_at_once_does_nothing() {
    let database = Database::new().await;
    let url = url(&database);
    let (a, b, c) = tokio::join!(migrate(&url), migrate(&url), migrate(&url));
    let mut run: Vec<usize> = [a, b, c].into_iter().map(|migrated| migrated.unwrap().run.len()).collect();
    run.sort_unstable();
    assert_eq!(run, [0, 0, 6]);
    assert!(migrate(&url).await.unwrap().run.is_empty());
}

#[tokio::test]
async fn transactions_do_not_depend_on_the_default_isolation() {
    let bed = Bed::new(Flavor::Memory).await;
    let isolate = "SET default_transaction_isolation = 'repeatable read'";
    bed.database.execute(&format!("ALTER DATABASE {} {isolate}", bed.database.name())).await;
    bed.database.execute("DROP TABLE fga_outbox, __diesel_schema_migrations").await;
    within_deadline(migrate(&url(&bed.database))).await.unwrap();
    bed.insert_many(2_000).await;
    let (a, b) = tokio::join!(bed.drain(), bed.drain());
    assert_eq!((a.delivered + b.delivered, a.waiting + b.waiting), (2_000, 0));
}

#[tokio::test]
async fn a_schema_of_ones_own_works_by_url_and_by_setting() {
    let database = Database::new().await;
    database.execute(r#"CREATE SCHEMA app; CREATE SCHEMA "odd Name""#).await;
    let by_url: DatabaseUrl = format!("{}?search_path=app", database.url()).parse().unwrap();
    migrate(&by_url).await.unwrap();
    let by_setting = url(&database).with_schema("odd Name");
    migrate(&by_setting).await.unwrap();
    let intent = Intent::write(Tuple::new("user:anne", "viewer", "document:1").unwrap());
    intent.enqueue(&mut by_setting.connect().await.unwrap()).await.unwrap();
    let tables = "SELECT schemaname::text FROM pg_tables WHERE tablename = 'fga_outbox' ORDER BY 1";
    assert_eq!(database.query_all::<String>(tables).await, ["app", "odd Name"]);
    assert_eq!(database.query_one::<i64>(r#"SELECT count(*) FROM "odd Name".fga_outbox"#).await, 1);

    let missing = url(&database).with_schema("nowhere");
    let error = migrate(&missing).await.unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
}

#[tokio::test]
async fn a_table_that_the_search_path_finds_elsewhere_is_not_shadowed() {
    let database = Database::new().await;
    database.execute(&format!("{FOREIGN}; CREATE SCHEMA mine")).await;
    let url: DatabaseUrl = format!("{}?search_path=mine,public", database.url()).parse().unwrap();
    migrate(&url).await.unwrap();
    let tables = "SELECT schemaname::text FROM pg_tables WHERE tablename = 'fga_outbox'";
    assert_eq!(database.query_all::<String>(tables).await, ["public"]);
    assert_eq!(database.query_all::<String>(INDEXES).await.len(), 3);
}

#[tokio::test]
async fn an_index_that_was_left_unfinished_is_made_anew() {
    let database = Database::new().await;
    database.execute(FOREIGN).await;
    database.execute("CREATE INDEX fga_outbox_pending_idx ON fga_outbox (id) WHERE processed_at IS NULL").await;
    let invalidate = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'fga_outbox_pending_idx'::regclass";
    database.execute(invalidate).await;
    migrate(&url(&database)).await.unwrap();
    let valid = "SELECT bool_and(indisvalid) FROM pg_index WHERE indrelid = 'fga_outbox'::regclass";
    assert!(database.query_one::<bool>(valid).await);
}

#[tokio::test]
async fn a_busy_table_is_waited_for_without_blocking_its_writers() {
    let database = Database::new().await;
    database.execute(FOREIGN).await;
    let mut other = database.client().await;
    let reader = other.transaction().await.unwrap();
    reader.batch_execute("LOCK TABLE fga_outbox IN ACCESS SHARE MODE").await.unwrap();
    let migrating = tokio::spawn({
        let url = url(&database);
        async move { migrate(&url).await }
    });
    let asked = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'fga_outbox'::regclass
        AND mode = 'AccessExclusiveLock' AND NOT granted";
    eventually(|| database.query_one::<bool>(asked)).await;
    // It queues behind the reader for half a second at most, and so does whoever comes after it.
    database.execute("INSERT INTO fga_outbox (payload) VALUES ('{}')").await;
    assert!(!migrating.is_finished());
    reader.commit().await.unwrap();
    assert_eq!(migrating.await.unwrap().unwrap().run.len(), 6);
}

#[tokio::test]
async fn an_engine_without_its_table_says_what_to_do() {
    let database = Database::new().await;
    let mut connection = url(&database).connect().await.unwrap();
    let error = fga_outbox::status(&mut connection).await.unwrap_err();
    assert!(matches!(error, DatabaseError::NotMigrated(_)), "{error:?}");
    assert!(error.to_string().contains("fga-outbox migrate"), "{error}");
    database.execute(FOREIGN).await;
    let error = fga_outbox::status(&mut connection).await.unwrap_err();
    assert!(matches!(error, DatabaseError::NotMigrated(_)), "{error:?}");
}

#[tokio::test]
async fn an_index_that_is_gone_is_missed_and_made_again() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert_many(1).await;
    bed.database.execute("DROP INDEX fga_outbox_next_attempt_idx").await;
    let engine = bed.builder().patience(Duration::from_secs(1)).start().unwrap();
    let error = within_deadline(engine.drain()).await.unwrap_err().to_string();
    engine.stop().await;
    assert!(error.contains("fga_outbox_next_attempt_idx") && error.contains("fga-outbox migrate"), "{error}");
    let run = migrate(&url(&bed.database)).await.unwrap().run;
    assert_eq!(run, ["2026-11-30-000010_index_next_attempts"]);
    assert_eq!(bed.database.query_all::<String>(INDEXES).await.len(), 3);
    bed.drain().await;
}
