//! A table of its own, filled, and where its rows are to go.

use std::time::{Duration, Instant};

use fga_outbox::{DatabaseUrl, Engine, EngineBuilder, migrate};
use futures_util::{StreamExt as _, stream};
use serde_json::json;

use crate::support::{Database, Flavor, Store};

/// What a row holds.
#[derive(Clone, Copy)]
pub enum Workload {
    /// One tuple of its own.
    Single,
    /// One tuple of its own, and one that a hundred rows share.
    Archive,
}

impl Workload {
    fn writes(self) -> &'static str {
        match self {
            Self::Single => {
                "jsonb_build_object('user', 'user:' || n, 'relation', 'viewer', 'object', 'document:' || n)"
            }
            Self::Archive => {
                "jsonb_build_object('user', 'capture_job:' || n / 100, 'relation', 'parent', 'object', 'archive:' || n),
                 jsonb_build_object('user', 'organization:acme', 'relation', 'parent', 'object', 'capture_job:' || n / 100)"
            }
        }
    }

    /// The payload of row `n`, in SQL.
    pub fn payload(self) -> String {
        format!("jsonb_build_object('writes', jsonb_build_array({}))", self.writes())
    }

    /// The tuples of so many rows, each once, as user, relation and object.
    fn tuples(self, rows: u32) -> Vec<[String; 3]> {
        let tuple = |user: String, relation: &str, object: String| [user, relation.to_owned(), object];
        let of_row = |n: u32| match self {
            Self::Single => vec![tuple(format!("user:{n}"), "viewer", format!("document:{n}"))],
            Self::Archive => {
                let job = format!("capture_job:{}", n / 100);
                let own = tuple(job.clone(), "parent", format!("archive:{n}"));
                let is_first = n == 1 || n.is_multiple_of(100);
                is_first
                    .then(|| tuple("organization:acme".to_owned(), "parent", job))
                    .into_iter()
                    .chain([own])
                    .collect()
            }
        };
        (1..=rows).flat_map(of_row).collect()
    }

    /// Tuples that are left of a row where those that rows share are sent once.
    pub fn tuples_a_row(self) -> f64 {
        match self {
            Self::Single => 1.0,
            Self::Archive => 1.01,
        }
    }
}

/// A store to deliver to.
#[derive(Clone)]
pub struct Target {
    pub api_url: String,
    pub store_id: String,
    pub model_id: String,
}

impl Target {
    /// A new store of the OpenFGA that keeps its tuples in Postgres.
    pub async fn openfga() -> Self {
        let store = Store::new(Flavor::Postgres).await;
        Self {
            api_url: store.api_url().to_owned(),
            store_id: store.store_id().to_owned(),
            model_id: store.model_id().to_owned(),
        }
    }

    pub fn url(&self, operation: &str) -> String {
        format!("{}/stores/{}/{operation}", self.api_url, self.store_id)
    }

    /// Sends the tuples of so many rows in requests of a hundred, with so many in flight, and does nothing else: how fast
    /// the server is.
    pub async fn send(&self, workload: Workload, rows: u32, in_flight: usize) -> Duration {
        let http = reqwest::Client::builder().no_proxy().build().expect("the settings are valid");
        let body = |tuples: &[[String; 3]]| {
            // In the order of their keys, as the engine sends them.
            let mut keys: Vec<_> = tuples.iter().map(|[user, relation, object]| (object, relation, user)).collect();
            keys.sort();
            let keys: Vec<_> = keys
                .iter()
                .map(|(object, relation, user)| json!({"object": object, "relation": relation, "user": user}))
                .collect();
            let writes = json!({"tuple_keys": keys, "on_duplicate": "ignore"});
            json!({"authorization_model_id": self.model_id, "writes": writes}).to_string()
        };
        let bodies: Vec<String> = workload.tuples(rows).chunks(100).map(body).collect();
        let url = self.url("write");
        let began = Instant::now();
        stream::iter(bodies)
            .for_each_concurrent(in_flight, |body| async {
                let request = http.post(&url).header("content-type", "application/json").body(body);
                let answer = request.send().await.expect("OpenFGA answers");
                assert_eq!(answer.status(), 200);
                answer.bytes().await.expect("OpenFGA's answer ends");
            })
            .await;
        began.elapsed()
    }
}

/// A database with a migrated table.
pub struct Bed {
    pub database: Database,
    pub target: Target,
}

impl Bed {
    pub async fn new(target: &Target) -> Self {
        let database = Database::new().await;
        migrate(&database_url(&database)).await.expect("the database is new");
        Self { database, target: target.clone() }
    }

    /// With so many rows to deliver.
    pub async fn filled(target: &Target, workload: Workload, rows: u32) -> Self {
        let bed = Self::new(target).await;
        bed.insert(workload, rows).await;
        bed.database.execute("VACUUM ANALYZE fga_outbox").await;
        bed
    }

    pub async fn insert(&self, workload: Workload, rows: u32) {
        let payload = workload.payload();
        let insert = format!("INSERT INTO fga_outbox (payload) SELECT {payload} FROM generate_series(1, {rows}) n");
        self.database.execute(&insert).await;
    }

    pub fn builder(&self) -> EngineBuilder {
        Engine::builder()
            .database_url(self.database.url())
            .api_url(&self.target.api_url)
            .store_id(&self.target.store_id)
            .model_id(&self.target.model_id)
    }

    /// How long an engine takes to drain it, from its start on.
    pub async fn drain(&self) -> Duration {
        self.drain_by(self.builder()).await
    }

    pub async fn drain_by(&self, builder: EngineBuilder) -> Duration {
        let began = Instant::now();
        let engine = builder.start().expect("the settings are valid");
        engine.drain().await.expect("both servers are there");
        let took = began.elapsed();
        engine.stop().await;
        self.assert_drained().await;
        took
    }

    pub async fn assert_drained(&self) {
        let left = "SELECT count(*) FROM fga_outbox WHERE processed_at IS NULL";
        assert_eq!(self.database.query_one::<i64>(left).await, 0, "all was delivered");
    }
}

pub fn database_url(database: &Database) -> DatabaseUrl {
    database.url().parse().expect("the address is the bench's own")
}

/// So many a second.
pub fn rate(count: f64, took: Duration) -> f64 {
    count / took.as_secs_f64()
}
