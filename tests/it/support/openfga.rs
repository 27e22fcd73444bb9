//! OpenFGA: servers and stores.

use std::time::Duration;

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep},
};

use super::{
    DEADLINE, Database,
    keeper::{Keeper, RunAs},
    parts,
};

/// Which server, on which datastore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    Memory,
    Postgres,
    /// The last version without `on_duplicate` and `on_missing`, in memory.
    Old,
    /// The same on Postgres.
    OldPostgres,
}

impl Flavor {
    pub const ALL: [Flavor; 4] = [Flavor::Memory, Flavor::Postgres, Flavor::Old, Flavor::OldPostgres];

    fn is_old(self) -> bool {
        matches!(self, Flavor::Old | Flavor::OldPostgres)
    }

    fn is_on_postgres(self) -> bool {
        matches!(self, Flavor::Postgres | Flavor::OldPostgres)
    }
}

/// The model of every new [`Store`]:
///
/// ```text
/// type user
/// type group
///   define member: [user, group#member]
/// type organization
///   define member: [user]
/// type capture_job
///   define parent: [organization]
///   define viewer: member from parent
/// type archive
///   define parent: [capture_job]
///   define viewer: viewer from parent
/// type document
///   define viewer: [user, user:*, group#member, user with in_office]
///   define editor: [user]
/// condition in_office(office: string, floor: int) { office == "north" && floor < 10 }
/// ```
pub const MODEL: &str = r#"{
  "schema_version": "1.1",
  "type_definitions": [
    {"type": "user"},
    {
      "type": "group",
      "relations": {"member": {"this": {}}},
      "metadata": {"relations": {"member": {"directly_related_user_types": [
        {"type": "user"}, {"type": "group", "relation": "member"}
      ]}}}
    },
    {
      "type": "organization",
      "relations": {"member": {"this": {}}},
      "metadata": {"relations": {"member": {"directly_related_user_types": [{"type": "user"}]}}}
    },
    {
      "type": "capture_job",
      "relations": {
        "parent": {"this": {}},
        "viewer": {"tupleToUserset": {"tupleset": {"relation": "parent"}, "computedUserset": {"relation": "member"}}}
      },
      "metadata": {"relations": {"parent": {"directly_related_user_types": [{"type": "organization"}]}}}
    },
    {
      "type": "archive",
      "relations": {
        "parent": {"this": {}},
        "viewer": {"tupleToUserset": {"tupleset": {"relation": "parent"}, "computedUserset": {"relation": "viewer"}}}
      },
      "metadata": {"relations": {"parent": {"directly_related_user_types": [{"type": "capture_job"}]}}}
    },
    {
      "type": "document",
      "relations": {"viewer": {"this": {}}, "editor": {"this": {}}},
      "metadata": {"relations": {
        "viewer": {"directly_related_user_types": [
          {"type": "user"},
          {"type": "user", "wildcard": {}},
          {"type": "group", "relation": "member"},
          {"type": "user", "condition": "in_office"}
        ]},
        "editor": {"directly_related_user_types": [{"type": "user"}]}
      }}
    }
  ],
  "conditions": {
    "in_office": {
      "name": "in_office",
      "expression": "office == \"north\" && floor < 10",
      "parameters": {"office": {"type_name": "TYPE_NAME_STRING"}, "floor": {"type_name": "TYPE_NAME_INT"}}
    }
  }
}"#;

/// As `openfga run` reads its settings from the environment, so does `openfga migrate`.
const MIGRATE: &str = r#""$OPENFGA" migrate"#;

const START: &str = r#""$OPENFGA" run "$@" & pid=$!"#;

const KILL: &str = r#"kill -s KILL "$pid"; wait "$pid"; pid="#;

/// The signal is sent before it has stopped every thread; Linux tells when it has.
const PAUSE: &str = r#"kill -s STOP "$pid"; while [ -d /proc/self ] && grep -L "^State:.T" /proc/"$pid"/task/*/status | grep -q .; do :; done"#;

const RESUME: &str = r#"kill -s CONT "$pid""#;

/// An OpenFGA server on ports of its own.
pub struct Server {
    keeper: Keeper,
    port: u16,
    token: Option<String>,
    /// The datastore, unless it is memory.
    _database: Option<Database>,
}

impl Server {
    /// The one of this flavor that this process's tests share.
    pub async fn shared(flavor: Flavor) -> &'static Server {
        static SHARED: [OnceCell<Server>; 4] = [const { OnceCell::const_new() }; 4];
        SHARED[flavor as usize].get_or_init(|| Server::start_private(flavor, &[])).await
    }

    /// One of a test's own, with further arguments for `openfga run`. Its stores authenticate themselves by the first
    /// key of `--authn-preshared-keys`, where that is among them. It is gone when dropped.
    pub async fn start_private(flavor: Flavor, extra_args: &[&str]) -> Server {
        let port = parts::free_port();
        let database = if flavor.is_on_postgres() { Some(Database::new().await) } else { None };
        let keeper = Keeper::new(RunAs::Me, "KILL", extra_args, |dir| {
            let binary = if flavor.is_old() { parts::openfga_old() } else { parts::openfga() };
            let mut environment = vec![
                ("OPENFGA", binary.display().to_string()),
                // For its socket, which it leaves behind where it is killed.
                ("TMPDIR", dir.display().to_string()),
                ("OPENFGA_HTTP_ADDR", format!("127.0.0.1:{port}")),
                ("OPENFGA_GRPC_ADDR", format!("127.0.0.1:{}", parts::free_port())),
                ("OPENFGA_PLAYGROUND_ENABLED", "false".into()),
                ("OPENFGA_METRICS_ENABLED", "false".into()),
                ("OPENFGA_LOG_LEVEL", "none".into()),
            ];
            if let Some(database) = &database {
                environment.push(("OPENFGA_DATASTORE_ENGINE", "postgres".into()));
                environment.push(("OPENFGA_DATASTORE_URI", database.url()));
            }
            environment
        });
        let mut args = extra_args.iter().skip_while(|arg| **arg != "--authn-preshared-keys");
        let token = args.nth(1).and_then(|keys| keys.split(',').next()).map(String::from);
        let server = Server { keeper, port, token, _database: database };
        if flavor.is_on_postgres() {
            server.keeper.run(MIGRATE).await;
        }
        server.restart().await;
        server
    }

    pub fn api_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Ends the server at once. What it holds in memory is lost.
    pub async fn kill(&self) {
        self.keeper.run(KILL).await;
    }

    /// Starts the killed server on the same port and datastore, and waits until it is healthy.
    pub async fn restart(&self) {
        self.keeper.run(START).await;
        let health = format!("{}/healthz", self.api_url());
        let client = http_client();
        let deadline = Instant::now() + DEADLINE;
        loop {
            let answer = client.get(&health).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return;
            }
            assert!(Instant::now() < deadline, "OpenFGA does not start; its log:\n{}", self.keeper.log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Makes the server hang: connections are still accepted, by the kernel, and nothing is answered.
    pub async fn pause(&self) {
        self.keeper.run(PAUSE).await;
    }

    pub async fn resume(&self) {
        self.keeper.run(RESUME).await;
    }

    /// A new store with [`MODEL`].
    pub async fn store(&self) -> Store {
        let mut store = Store {
            client: http_client(),
            api_url: self.api_url(),
            token: self.token.clone(),
            store_id: String::new(),
            model_id: String::new(),
        };
        let created = store.call(Method::POST, "/stores", &json!({"name": "test store"})).await;
        store.store_id = string(&created, "id");
        store.model_id = store.write_model(&serde_json::from_str(MODEL).expect("MODEL is JSON")).await;
        store
    }
}

/// A store of one test's own.
pub struct Store {
    client: Client,
    api_url: String,
    token: Option<String>,
    store_id: String,
    model_id: String,
}

impl Store {
    /// A new one with [`MODEL`] on the shared server of this flavor.
    pub async fn new(flavor: Flavor) -> Store {
        Server::shared(flavor).await.store().await
    }

    pub fn api_url(&self) -> &str {
        &self.api_url
    }

    pub fn store_id(&self) -> &str {
        &self.store_id
    }

    /// That of [`MODEL`], also after [`Store::write_model`].
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// Whether the user has the relation, derived or direct, by [`MODEL`].
    pub async fn check(&self, user: &str, relation: &str, object: &str) -> bool {
        let body = json!({
            "tuple_key": {"user": user, "relation": relation, "object": object},
            "authorization_model_id": self.model_id,
            "consistency": "HIGHER_CONSISTENCY",
        });
        let answer = self.call(Method::POST, &self.path("check"), &body).await;
        answer["allowed"].as_bool().unwrap_or_else(|| panic!("check answered {answer}"))
    }

    /// Every tuple's key, with its condition (`null` where it has none), oldest first.
    pub async fn read_all(&self) -> Vec<Value> {
        let mut keys = Vec::new();
        let mut token = String::new();
        loop {
            let page = self.read(json!({"page_size": 100, "continuation_token": token})).await;
            keys.extend(page.keys);
            token = page.continuation_token;
            if token.is_empty() {
                return keys;
            }
        }
    }

    /// The stored tuple's key with its condition, or `None` where there is no such tuple.
    pub async fn has(&self, user: &str, relation: &str, object: &str) -> Option<Value> {
        let key = json!({"user": user, "relation": relation, "object": object});
        self.read(json!({"tuple_key": key})).await.keys.pop()
    }

    /// The status and the body of a write request with this body.
    pub async fn write_raw(&self, body: &Value) -> (u16, Value) {
        let (status, answer) = self.send(Method::POST, &self.path("write"), body).await;
        (status.as_u16(), answer)
    }

    /// Adds a model, which becomes the latest; its id.
    pub async fn write_model(&self, model: &Value) -> String {
        string(&self.call(Method::POST, &self.path("authorization-models"), model).await, "authorization_model_id")
    }

    /// Deletes the store itself.
    pub async fn delete(&self) {
        self.call(Method::DELETE, &format!("/stores/{}", self.store_id), &Value::Null).await;
    }

    async fn read(&self, mut body: Value) -> Page {
        body["consistency"] = "HIGHER_CONSISTENCY".into();
        let mut answer = self.call(Method::POST, &self.path("read"), &body).await;
        let tuples = answer["tuples"].as_array_mut().expect("a page has tuples");
        let keys = tuples.iter_mut().map(|tuple| tuple["key"].take()).collect();
        Page { keys, continuation_token: string(&answer, "continuation_token") }
    }

    fn path(&self, operation: &str) -> String {
        format!("/stores/{}/{operation}", self.store_id)
    }

    /// As [`Store::send`], for what has to succeed.
    async fn call(&self, method: Method, path: &str, body: &Value) -> Value {
        let (status, answer) = self.send(method, path, body).await;
        assert!(status.is_success(), "{path} answered {status}: {answer}");
        answer
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> (StatusCode, Value) {
        let mut request = self.client.request(method, format!("{}{path}", self.api_url)).json(body);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await.unwrap_or_else(|error| panic!("{path}: {error:?}"));
        let status = answer.status();
        let text = answer.text().await.unwrap_or_else(|error| panic!("{path}: {error:?}"));
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }
}

struct Page {
    keys: Vec<Value>,
    continuation_token: String,
}

/// One for each store: a client's connections belong to the runtime that opened them, and each test has its own.
fn http_client() -> Client {
    Client::builder().no_proxy().timeout(DEADLINE).build().expect("the settings are valid")
}

fn string(object: &Value, member: &str) -> String {
    object[member].as_str().unwrap_or_else(|| panic!("no {member} in {object}")).to_owned()
}
