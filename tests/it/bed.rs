//! A database with the table and a store of OpenFGA: what nearly every test begins with.

use fga_outbox::{DatabaseUrl, Drained, Engine, EngineBuilder, migrate};
use serde_json::{Value, json};

use crate::support::{Database, Flavor, Server, Store, within_deadline};

pub struct Bed {
    pub database: Database,
    pub store: Store,
}

impl Bed {
    pub async fn new(flavor: Flavor) -> Self {
        Self::with_store(Store::new(flavor).await).await
    }

    pub async fn on(server: &Server) -> Self {
        Self::with_store(server.store().await).await
    }

    async fn with_store(store: Store) -> Self {
        let database = Database::new().await;
        migrate(&database.url().parse::<DatabaseUrl>().unwrap()).await.unwrap();
        Self { database, store }
    }

    pub fn builder(&self) -> EngineBuilder {
        Engine::builder()
            .database_url(self.database.url())
            .api_url(self.store.api_url())
            .store_id(self.store.store_id())
            .model_id(self.store.model_id())
    }

    pub fn engine(&self) -> Engine {
        self.builder().start().unwrap()
    }

    /// Inserts a payload as any other program would.
    pub async fn insert(&self, payload: &Value) -> i64 {
        let client = self.database.client().await;
        let sql = "INSERT INTO fga_outbox (payload) VALUES ($1::text::jsonb) RETURNING id";
        client.query_one(sql, &[&payload.to_string()]).await.unwrap().get(0)
    }

    /// Inserts this many rows, each with a tuple of its own, in one statement.
    pub async fn insert_many(&self, rows: i32) {
        let sql = format!(
            "INSERT INTO fga_outbox (payload) SELECT jsonb_build_object('writes', jsonb_build_array(jsonb_build_object(
                'user', 'user:' || n, 'relation', 'viewer', 'object', 'document:' || n)))
             FROM generate_series(1, {rows}) n"
        );
        self.database.execute(&sql).await;
    }

    /// Drains with an engine of its own.
    pub async fn drain(&self) -> Drained {
        let engine = self.engine();
        let drained = within_deadline(engine.drain()).await.unwrap();
        engine.stop().await;
        drained
    }

    /// A row's state, by the table's own terms.
    pub async fn state(&self, id: i64) -> RowState {
        let client = self.database.client().await;
        let sql = "SELECT processed_at IS NOT NULL, attempts, last_error, next_attempt_at = 'infinity',
                       next_attempt_at IS NOT NULL FROM fga_outbox WHERE id = $1";
        let row = client.query_one(sql, &[&id]).await.unwrap();
        RowState {
            delivered: row.get(0),
            attempts: row.get(1),
            last_error: row.get::<_, Option<String>>(2).unwrap_or_default(),
            refused: row.get::<_, Option<bool>>(3).unwrap_or_default(),
            waiting: row.get::<_, bool>(4) && !row.get::<_, Option<bool>>(3).unwrap_or_default(),
        }
    }

    /// The stored tuple `viewer` of this user on this document.
    pub async fn viewer(&self, user: &str, document: &str) -> Option<Value> {
        self.store.has(&format!("user:{user}"), "viewer", &format!("document:{document}")).await
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowState {
    pub delivered: bool,
    pub attempts: i32,
    pub last_error: String,
    pub refused: bool,
    pub waiting: bool,
}

pub fn viewer(user: &str, document: &str) -> Value {
    json!({"user": format!("user:{user}"), "relation": "viewer", "object": format!("document:{document}")})
}

pub fn write(user: &str, document: &str) -> Value {
    json!({"writes": [viewer(user, document)]})
}

pub fn delete(user: &str, document: &str) -> Value {
    json!({"deletes": [viewer(user, document)]})
}

/// A write under the condition `in_office`, with this context where it is not null.
pub fn write_in_office(user: &str, document: &str, context: Value) -> Value {
    let mut tuple = viewer(user, document);
    tuple["condition"] = match context {
        Value::Null => json!({"name": "in_office"}),
        context => json!({"name": "in_office", "context": context}),
    };
    json!({"writes": [tuple]})
}
