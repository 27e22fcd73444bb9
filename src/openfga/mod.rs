//! Everything that is HTTP: writing, reading back and probing one store of one OpenFGA server.

mod auth;
pub(crate) mod size;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use reqwest::{RequestBuilder, StatusCode, header};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use url::Url;

use crate::delivery::plan::{Request, State, Step};
use crate::delivery::verdict::{Answer, Fault, FaultKind, Kind, Verdict, verdict};
use crate::tuple::{Condition, TupleKey};
pub(crate) use auth::{Auth, ClientCredentials};

/// Above the 3 s that OpenFGA gives a request and the 3 s that its gateway adds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Where tuples go, and as whom.
pub(crate) struct Target {
    pub(crate) api_url: Url,
    pub(crate) store_id: String,
    /// Absent: the store's latest, looked up once and pinned.
    pub(crate) model_id: Option<String>,
    pub(crate) auth: Auth,
    /// Certificates to trust besides the system's.
    pub(crate) roots: Vec<reqwest::Certificate>,
}

/// A client of one store. Requests carry the pinned authorization model: without one the server would look up the
/// latest each time.
pub(crate) struct Client {
    wire: Arc<Wire>,
    /// Where requests are sent and connections are driven, whatever becomes of the actor that asks.
    home: Handle,
    store: Url,
    /// Whether the user chose the model; otherwise it is the store's latest.
    fixed: bool,
    model: RwLock<Option<Arc<str>>>,
}

/// How requests reach the server.
struct Wire {
    http: reqwest::Client,
    auth: Auth,
    /// Answers that were logged in full, by status and code.
    logged: Mutex<HashSet<(u16, String)>>,
    /// How many answers were not known.
    unforeseen: AtomicU64,
}

impl Client {
    pub(crate) fn new(target: Target, home: Handle) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .user_agent(concat!("fga-outbox/", env!("CARGO_PKG_VERSION")))
            .timeout(REQUEST_TIMEOUT)
            .connect_timeout(CONNECT_TIMEOUT)
            // Shorter than proxies keep a connection that is not used.
            .pool_idle_timeout(Duration::from_secs(20))
            // A redirect of a write loses its body or its token: the address is wrong, and that is for a human.
            .redirect(reqwest::redirect::Policy::none())
            .tcp_nodelay(true);
        // A machine may have no certificates at all, which matters only to who speaks TLS.
        let http = match target.api_url.scheme() == "http" && !target.auth.needs_tls() {
            true => http.tls_certs_only(target.roots),
            false => http.tls_certs_merge(target.roots),
        };
        let http = http.build()?;
        let mut store = target.api_url;
        store
            .path_segments_mut()
            .expect("http and https addresses have a path")
            .pop_if_empty()
            .extend(["stores", &target.store_id]);
        Ok(Self {
            wire: Arc::new(Wire {
                http,
                auth: target.auth,
                logged: Mutex::default(),
                unforeseen: AtomicU64::default(),
            }),
            home,
            store,
            fixed: target.model_id.is_some(),
            model: RwLock::new(target.model_id.map(Arc::from)),
        })
    }

    fn url(&self, path: &str) -> Url {
        let mut url = self.store.clone();
        url.path_segments_mut().expect("checked in new").extend(path.split('/'));
        url
    }

    /// The pinned model, once it is known.
    pub(crate) fn model(&self) -> Option<Arc<str>> {
        self.model.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// How many answers were not known.
    pub(crate) fn unforeseen(&self) -> u64 {
        self.wire.unforeseen.load(Relaxed)
    }

    /// Asks OpenFGA to carry a request out, once.
    pub(crate) async fn write(&self, request: &Request) -> Verdict {
        let model = match self.pinned_model().await {
            Ok(model) => model,
            Err(fault) => return Verdict::Target(fault),
        };
        self.send(self.wire.http.post(self.url("write")).json(&WriteBody::new(&model, request))).await.0
    }

    /// What OpenFGA holds for this key at this moment, read from its primary.
    pub(crate) async fn read(&self, key: &TupleKey) -> Result<State, Verdict> {
        let body = ReadBody { tuple_key: key, consistency: "HIGHER_CONSISTENCY" };
        let (verdict, answer) = self.send(self.wire.http.post(self.url("read")).json(&body)).await;
        match verdict {
            Verdict::Done => {
                let page: ReadPage = parse(&answer)?;
                Ok(match page.tuples.into_iter().next() {
                    None => State::Absent,
                    Some(tuple) => {
                        State::Present(tuple.key.condition.map(StoredCondition::into_condition).transpose()?)
                    }
                })
            }
            verdict => Err(verdict),
        }
    }

    /// Whether this store can be used: it answers, knows the model, and its datastore can be read.
    pub(crate) async fn probe(&self) -> Result<(), Fault> {
        let model = self.follow_model().await?;
        let url = self.url(&format!("authorization-models/{model}"));
        healthy(self.send(self.wire.http.get(url)).await.0)?;
        // The server keeps models in memory; this asks its datastore.
        let nobody = TupleKey::new("fga-outbox:probe", "probe", "fga-outbox:probe").expect("valid");
        self.read(&nobody).await.map(drop).or_else(healthy)
    }

    async fn pinned_model(&self) -> Result<Arc<str>, Fault> {
        match self.model() {
            Some(model) => Ok(model),
            None => self.follow_model().await,
        }
    }

    /// Pins the store's latest model, unless the user chose one. Gives the one that is pinned now.
    pub(crate) async fn follow_model(&self) -> Result<Arc<str>, Fault> {
        if let Some(chosen) = self.model().filter(|_| self.fixed) {
            return Ok(chosen);
        }
        let mut url = self.url("authorization-models");
        url.set_query(Some("page_size=1"));
        let (verdict, answer) = self.send(self.wire.http.get(url)).await;
        healthy(verdict)?;
        let page: ModelPage = parse(&answer).map_err(unusable)?;
        let Some(latest) = page.authorization_models.into_iter().next() else {
            let reason = format!("No authorization models found for store '{}'", self.store_id());
            return Err(Fault::new(FaultKind::Misconfigured, reason));
        };
        let model: Arc<str> = Arc::from(latest.id);
        let mut pinned = self.model.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if pinned.as_ref() != Some(&model) {
            tracing::info!(%model, "pinned the store's latest authorization model");
            *pinned = Some(model.clone());
        }
        Ok(model)
    }

    fn store_id(&self) -> &str {
        self.store.path_segments().and_then(|mut segments| segments.next_back()).unwrap_or_default()
    }

    /// On the home runtime: a request under way goes on to its end, and a connection does not die with an arbiter.
    async fn send(&self, request: RequestBuilder) -> (Verdict, Vec<u8>) {
        let wire = self.wire.clone();
        let sent = self.home.spawn(async move { wire.send(request).await });
        sent.await.unwrap_or_else(|error| {
            (
                Verdict::Target(Fault::new(FaultKind::Unreachable, format!("the request was given up: {error}"))),
                Vec::new(),
            )
        })
    }
}

impl Wire {
    /// Sends a request, with another token where the first one is refused.
    async fn send(&self, request: RequestBuilder) -> (Verdict, Vec<u8>) {
        let again = request.try_clone();
        let token = match self.auth.token(&self.http).await {
            Ok(token) => token,
            Err(fault) => return (Verdict::Target(fault), Vec::new()),
        };
        let (verdict, answer) = self.send_with(request, token.as_deref()).await;
        let refused = matches!(&verdict, Verdict::Target(Fault { kind: FaultKind::Unauthenticated, .. }));
        if let (true, Some(token), Some(again)) = (refused, token, again)
            && self.auth.was_refused(&token).await
        {
            return match self.auth.token(&self.http).await {
                Ok(token) => self.send_with(again, token.as_deref()).await,
                Err(fault) => (Verdict::Target(fault), Vec::new()),
            };
        }
        (verdict, answer)
    }

    async fn send_with(&self, mut request: RequestBuilder, token: Option<&str>) -> (Verdict, Vec<u8>) {
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = match request.send().await {
            Ok(response) => response,
            Err(error) => return (unreachable(&error), Vec::new()),
        };
        let (status, headers) = (response.status(), response.headers().clone());
        let body = match response.bytes().await {
            Ok(body) => body,
            Err(error) => return (unreachable(&error), Vec::new()),
        };
        // Some servers answer with what they were asked, and an answer may end in a log or in a row.
        let body = match token {
            Some(token) if !status.is_success() => String::from_utf8_lossy(&body).replace(token, "[token]").into(),
            _ => body,
        };
        let retry_after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let verdict = verdict(&Answer { status: status.as_u16(), retry_after, body: &body });
        if let Verdict::Moment { kind: Kind::Unforeseen, .. } = verdict {
            self.unforeseen.fetch_add(1, Relaxed);
            self.log_unforeseen(status, &body);
        }
        (verdict, body.into())
    }

    /// Once for each kind of answer.
    fn log_unforeseen(&self, status: StatusCode, body: &[u8]) {
        let body = String::from_utf8_lossy(body);
        let code = serde_json::from_str::<serde_json::Value>(&body)
            .ok()
            .and_then(|body| Some(body.get("code")?.as_str()?.to_owned()))
            .unwrap_or_default();
        let mut logged = self.logged.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if logged.len() < 100 && logged.insert((status.as_u16(), code)) {
            tracing::warn!(%status, %body, "OpenFGA gave an answer that is not known: it is taken for a passing fault");
        }
    }
}

fn healthy(verdict: Verdict) -> Result<(), Fault> {
    match verdict {
        Verdict::Done => Ok(()),
        verdict => Err(unusable(verdict)),
    }
}

/// What a probe that fails says of the target.
fn unusable(verdict: Verdict) -> Fault {
    match verdict {
        Verdict::Target(fault) => fault,
        Verdict::Moment { reason, .. } => Fault::new(FaultKind::Unreachable, reason),
        Verdict::Row { reason } | Verdict::Tuple { reason } => Fault::new(FaultKind::Misconfigured, reason),
        Verdict::Done | Verdict::Size(_) => Fault::new(FaultKind::Misconfigured, "an answer that is not OpenFGA's"),
    }
}

fn unreachable(error: &reqwest::Error) -> Verdict {
    Verdict::Target(Fault::new(FaultKind::Unreachable, chain(error)))
}

/// An error with its causes: reqwest's own words stop at "error sending request".
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn parse<T: serde::de::DeserializeOwned>(answer: &[u8]) -> Result<T, Verdict> {
    serde_json::from_slice(answer).map_err(|error| Verdict::Moment {
        reason: format!("an answer that is not OpenFGA's: {error}"),
        kind: Kind::Unforeseen,
    })
}

#[derive(Serialize)]
pub(crate) struct WriteBody<'a> {
    authorization_model_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    writes: Option<Writes<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deletes: Option<Deletes<'a>>,
}

#[derive(Serialize)]
struct Writes<'a> {
    tuple_keys: Vec<WrittenTuple<'a>>,
    on_duplicate: &'static str,
}

#[derive(Serialize)]
struct Deletes<'a> {
    tuple_keys: Vec<&'a TupleKey>,
    on_missing: &'static str,
}

#[derive(Serialize)]
struct WrittenTuple<'a> {
    #[serde(flatten)]
    key: &'a TupleKey,
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<&'a Condition>,
}

impl<'a> WriteBody<'a> {
    pub(crate) fn new(model: &'a str, request: &'a Request) -> Self {
        let mut writes = Vec::with_capacity(request.steps.len());
        let mut deletes = Vec::new();
        for Step { key, to, .. } in &request.steps {
            match to {
                State::Present(condition) => writes.push(WrittenTuple { key, condition: condition.as_ref() }),
                State::Absent => deletes.push(&**key),
            }
        }
        // An empty `tuple_keys` is refused.
        Self {
            authorization_model_id: model,
            writes: (!writes.is_empty()).then_some(Writes { tuple_keys: writes, on_duplicate: "ignore" }),
            deletes: (!deletes.is_empty()).then_some(Deletes { tuple_keys: deletes, on_missing: "ignore" }),
        }
    }
}

#[derive(Serialize)]
struct ReadBody<'a> {
    tuple_key: &'a TupleKey,
    consistency: &'static str,
}

#[derive(Deserialize)]
struct ReadPage {
    tuples: Vec<StoredTuple>,
}

#[derive(Deserialize)]
struct StoredTuple {
    key: StoredKey,
}

#[derive(Deserialize)]
struct StoredKey {
    condition: Option<StoredCondition>,
}

#[derive(Deserialize)]
struct StoredCondition {
    name: String,
    context: Option<serde_json::Map<String, serde_json::Value>>,
}

impl StoredCondition {
    fn into_condition(self) -> Result<Condition, Verdict> {
        let condition = Condition::new(self.name).and_then(|it| it.with_context(self.context.unwrap_or_default()));
        condition.map_err(|error| Verdict::Moment {
            reason: format!("OpenFGA holds a condition that can't be read: {error}"),
            kind: Kind::Unforeseen,
        })
    }
}

#[derive(Deserialize)]
struct ModelPage {
    authorization_models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}
