//! Settings, checked before anything is started.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use actix::{ArbiterHandle, System};
use oauth2::TokenUrl;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::claimer::Claimer;
use super::deliverer::Deliverer;
use super::flow::Permits;
use super::gate::Gate;
use super::keeper::Kept;
use super::ledger::Ledger;
use super::listener::Listener;
use super::{DELIVERERS, Engine, Home, KeptActors, ROOM, Settings, Shared};
use crate::delivery::verdict::Fault;
use crate::openfga::{Auth, Client, ClientCredentials, Target, chain};
use crate::outbox::{DatabaseError, DatabaseUrl, Pool};

/// A setting that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting that is needed was not given.
    #[error("{0} is not set")]
    Missing(&'static str),
    /// A setting that was given is not what it should be.
    #[error("{setting}: {problem}")]
    Invalid {
        /// Its environment name, such as `FGA_STORE_ID`.
        setting: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The database's address can't be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The HTTP client or a thread could not be made.
    #[error("the engine could not be started: {0}")]
    Start(String),
}

/// Settings of an [`Engine`]. The database, the API's address and the store are needed.
#[derive(Clone)]
pub struct EngineBuilder {
    database_url: Option<String>,
    schema: Option<String>,
    api_url: Option<String>,
    store_id: Option<String>,
    model_id: Option<String>,
    api_token: Option<String>,
    client_id: Option<String>,
    client_secret: Option<String>,
    token_issuer: Option<String>,
    audience: Option<String>,
    scopes: Option<String>,
    ca_cert: Option<PathBuf>,
    settings: Settings,
}

impl Default for EngineBuilder {
    fn default() -> Self {
        Self {
            database_url: None,
            schema: None,
            api_url: None,
            store_id: None,
            model_id: None,
            api_token: None,
            client_id: None,
            client_secret: None,
            token_issuer: None,
            audience: None,
            scopes: None,
            ca_cert: None,
            settings: Settings {
                poll_interval: Duration::from_millis(500),
                grace: Duration::from_secs(15),
                patience: Duration::from_secs(60),
                max_attempts: None,
                model_interval: Duration::from_secs(10),
                ordered: true,
                #[cfg(feature = "internals")]
                steps: None,
            },
        }
    }
}

impl EngineBuilder {
    /// Takes what is set of `DATABASE_URL`, `FGA_OUTBOX_SCHEMA`, `FGA_API_URL`, `FGA_STORE_ID`, `FGA_MODEL_ID`,
    /// `FGA_API_TOKEN`, `FGA_CLIENT_ID`, `FGA_CLIENT_SECRET`, `FGA_API_TOKEN_ISSUER`, `FGA_API_AUDIENCE`,
    /// `FGA_API_SCOPES` and `FGA_CA_CERT`. A variable that is set to nothing counts as not set.
    pub fn from_env(self) -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            database_url: var("DATABASE_URL").or(self.database_url),
            schema: var("FGA_OUTBOX_SCHEMA").or(self.schema),
            api_url: var("FGA_API_URL").or(self.api_url),
            store_id: var("FGA_STORE_ID").or(self.store_id),
            model_id: var("FGA_MODEL_ID").or(self.model_id),
            api_token: var("FGA_API_TOKEN").or(self.api_token),
            client_id: var("FGA_CLIENT_ID").or(self.client_id),
            client_secret: var("FGA_CLIENT_SECRET").or(self.client_secret),
            token_issuer: var("FGA_API_TOKEN_ISSUER").or(self.token_issuer),
            audience: var("FGA_API_AUDIENCE").or(self.audience),
            scopes: var("FGA_API_SCOPES").or(self.scopes),
            ca_cert: var("FGA_CA_CERT").map(PathBuf::from).or(self.ca_cert),
            ..self
        }
    }

    /// Where the table is: see [`DatabaseUrl`].
    pub fn database_url(self, url: impl Into<String>) -> Self {
        Self { database_url: Some(url.into()), ..self }
    }

    /// The table's schema. Absent: the first of the connection's `search_path`.
    pub fn schema(self, schema: impl Into<String>) -> Self {
        Self { schema: Some(schema.into()), ..self }
    }

    /// OpenFGA's address, such as `http://localhost:8080`.
    pub fn api_url(self, url: impl Into<String>) -> Self {
        Self { api_url: Some(url.into()), ..self }
    }

    /// The store's id, a ULID.
    pub fn store_id(self, id: impl Into<String>) -> Self {
        Self { store_id: Some(id.into()), ..self }
    }

    /// The authorization model's id, a ULID. Absent: the store's latest, pinned in every request, and followed when
    /// there is a newer one.
    pub fn model_id(self, id: impl Into<String>) -> Self {
        Self { model_id: Some(id.into()), ..self }
    }

    /// A shared token, sent as `Authorization: Bearer …`.
    pub fn api_token(self, token: impl Into<String>) -> Self {
        Self { api_token: Some(token.into()), ..self }
    }

    /// OAuth 2 client credentials: the client's id and secret, in place of a shared token. The issuer is needed, too.
    pub fn client_credentials(self, id: impl Into<String>, secret: impl Into<String>) -> Self {
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        Self { client_id: given(id.into()), client_secret: given(secret.into()), ..self }
    }

    /// Who issues access tokens: the URL of its token endpoint, or a host, whose endpoint is then
    /// `https://host/oauth/token`.
    pub fn token_issuer(self, issuer: impl Into<String>) -> Self {
        Self { token_issuer: Some(issuer.into()), ..self }
    }

    /// The audience to ask an access token for, where the issuer wants one.
    pub fn audience(self, audience: impl Into<String>) -> Self {
        Self { audience: Some(audience.into()), ..self }
    }

    /// The scopes to ask an access token for, separated by spaces.
    pub fn scopes(self, scopes: impl Into<String>) -> Self {
        Self { scopes: Some(scopes.into()), ..self }
    }

    /// A PEM file of certificates to trust for HTTPS, besides the system's.
    pub fn ca_cert(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_cert: Some(path.into()), ..self }
    }

    /// After how many failed deliveries a row that is tried again and again counts as refused. Never unless set.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = Some(attempts);
        self
    }

    /// How often to look for a new authorization model, unless one is chosen. 10 s unless set.
    pub fn model_interval(mut self, interval: Duration) -> Self {
        // An instant can't be as far away as a duration may be long.
        self.settings.model_interval = interval.min(Duration::from_secs(365 * 86_400));
        self
    }

    /// How often an idle engine looks at the table although nothing has woken it: for rows whose time has come, and where
    /// the doorbell is not heard. 500 ms unless set.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.settings.poll_interval = interval;
        self
    }

    /// How long [`Engine::stop`] waits for requests in flight. 15 s unless set, above the longest time of a request.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// How long [`Engine::drain`] goes on without OpenFGA or Postgres before it gives up. 60 s unless set.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// Leaves out what keeps rows of several leases in order, so that a bench can tell what that costs.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn without_order(mut self) -> Self {
        self.settings.ordered = false;
        self
    }

    /// Has the engine's steps told, and waits at each until it may go on.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn steps(mut self, steps: super::Steps) -> Self {
        self.settings.steps = Some(steps);
        self
    }

    /// Whether OpenFGA can be used with these settings: it answers, lets us in, and knows the store and the model.
    ///
    /// # Errors
    /// [`ConfigError`] for the settings; the [`Fault`] within for what OpenFGA says.
    pub async fn check_target(&self) -> Result<Result<(), Fault>, ConfigError> {
        Ok(self.client(Handle::current())?.probe().await)
    }

    /// Starts the engine: on arbiters of the actix `System` that this runs in, such as an actix-web application's, or
    /// on threads of its own where there is none.
    ///
    /// Neither Postgres nor OpenFGA has to be there yet: the engine waits for them.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting that is missing or can't be used.
    pub fn start(self) -> Result<Engine, ConfigError> {
        let home = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fga-outbox-net")
            .enable_all()
            .build()
            .map_err(|error| ConfigError::Start(error.to_string()))?;
        let home = Home(Some(home));
        let client = self.client(home.handle())?;
        let url: DatabaseUrl = self.database_url.as_deref().ok_or(ConfigError::Missing("DATABASE_URL"))?.parse()?;
        let url = match &self.schema {
            Some(schema) => url.with_schema(schema),
            None => url,
        };
        let shared = Arc::new(Shared {
            settings: self.settings,
            // One for each lease, one that is claimed meanwhile, one for questions, one for a nap.
            pool: Pool::new(&url, home.handle(), ROOM + 3),
            client,
            gate: Gate::new(),
            limits: Default::default(),
            room: Arc::new(Semaphore::new(ROOM as usize)),
            flow: Permits::new(),
            footprints: Default::default(),
            failures_in_a_row: Default::default(),
            wake: Notify::new(),
            listening: Default::default(),
            rings: Default::default(),
            missed_rings: Default::default(),
            horizon: Default::default(),
            blocked: Default::default(),
            stuck: Default::default(),
            recorded: Notify::new(),
            sweeps_begun: Default::default(),
            swept_in_vain: watch::Sender::new(0),
            database: watch::Sender::new(None),
            counters: Default::default(),
            stopping: CancellationToken::new(),
            ended: CancellationToken::new(),
            _home: home,
        });
        let kept = KeptActors {
            claimer: Kept::new(),
            deliverers: (0..DELIVERERS).map(|_| Kept::new()).collect(),
            ledger: Kept::new(),
            listener: Kept::new(),
        };
        keep_all(&system(&shared)?, &shared, &kept);
        Ok(Engine { shared, kept })
    }

    fn client(&self, home: Handle) -> Result<Client, ConfigError> {
        let api_url = self.api_url.as_deref().ok_or(ConfigError::Missing("FGA_API_URL"))?;
        let target = Target {
            api_url: parse_http_url("FGA_API_URL", api_url)?,
            store_id: parse_ulid(
                "FGA_STORE_ID",
                self.store_id.as_deref().ok_or(ConfigError::Missing("FGA_STORE_ID"))?,
            )?,
            model_id: self.model_id.as_deref().map(|id| parse_ulid("FGA_MODEL_ID", id)).transpose()?,
            auth: self.auth()?,
            roots: self.ca_cert.as_deref().map(read_roots).transpose()?.unwrap_or_default(),
        };
        Client::new(target, home).map_err(|error| ConfigError::Start(chain(&error)))
    }

    fn auth(&self) -> Result<Auth, ConfigError> {
        match (&self.api_token, &self.client_id, &self.client_secret) {
            (None, None, None) => Ok(Auth::None),
            (Some(token), None, None) if token.chars().all(|c| c.is_ascii_graphic()) => {
                Ok(Auth::Token(token.as_str().into()))
            }
            (Some(_), None, None) => Err(invalid("FGA_API_TOKEN", "expected printable ASCII without white space")),
            (Some(_), _, _) => Err(invalid("FGA_API_TOKEN", "can't be used together with client credentials")),
            (None, None, Some(_)) => Err(ConfigError::Missing("FGA_CLIENT_ID")),
            (None, Some(_), None) => Err(ConfigError::Missing("FGA_CLIENT_SECRET")),
            (None, Some(id), Some(secret)) => {
                let issuer = self.token_issuer.as_deref().ok_or(ConfigError::Missing("FGA_API_TOKEN_ISSUER"))?;
                Ok(Auth::ClientCredentials(Box::new(ClientCredentials {
                    client_id: id.clone(),
                    client_secret: secret.clone(),
                    token_url: parse_issuer(issuer)?,
                    audience: self.audience.clone(),
                    scopes: self.scopes.iter().flat_map(|scopes| scopes.split_whitespace()).map(Into::into).collect(),
                    held: Default::default(),
                })))
            }
        }
    }
}

/// The arbiter that keepers run on: the application's, or that of a `System` on a thread of its own, which ends with
/// the engine.
fn system(shared: &Arc<Shared>) -> Result<ArbiterHandle, ConfigError> {
    if let Some(system) = System::try_current() {
        return Ok(system.arbiter().clone());
    }
    let (started, arbiter) = std::sync::mpsc::channel();
    let ended = shared.ended.clone();
    std::thread::Builder::new()
        .name("fga-outbox".to_owned())
        .spawn(move || {
            let runner = System::new();
            let system = System::current();
            system.arbiter().spawn(async move {
                ended.cancelled().await;
                System::current().stop();
            });
            // Nobody is there to hear of it only where the engine could not be started.
            let _ = started.send(system.arbiter().clone());
            if let Err(error) = runner.run() {
                tracing::error!(%error, "the engine's threads could not be ended");
            }
        })
        .map_err(|error| ConfigError::Start(error.to_string()))?;
    arbiter.recv().map_err(|error| ConfigError::Start(error.to_string()))
}

fn keep_all(arbiter: &ArbiterHandle, shared: &Arc<Shared>, kept: &KeptActors) {
    let for_ledger = shared.clone();
    let ledger = move |alive| Ledger::new(for_ledger.clone(), alive);
    arbiter.spawn(kept.ledger.clone().keep("ledger", shared.clone(), ledger));
    let for_listener = shared.clone();
    let listener = move |alive| Listener::new(for_listener.clone(), alive);
    arbiter.spawn(kept.listener.clone().keep("listener", shared.clone(), listener));
    for deliverer in &kept.deliverers {
        let (for_deliverer, ledger) = (shared.clone(), kept.ledger.clone());
        let make = move |alive| Deliverer::new(for_deliverer.clone(), ledger.clone(), alive);
        arbiter.spawn(deliverer.clone().keep("deliverer", shared.clone(), make));
    }
    let (for_claimer, deliverers) = (shared.clone(), kept.deliverers.clone());
    let claimer = move |alive| Claimer::new(for_claimer.clone(), deliverers.clone(), alive);
    arbiter.spawn(kept.claimer.clone().keep("claimer", shared.clone(), claimer));
}

fn invalid(setting: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { setting, problem: problem.into() }
}

fn parse_http_url(setting: &'static str, text: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(text).map_err(|error| invalid(setting, format!("{error}: expected http(s)://host:port")))?;
    match url.scheme() {
        "http" | "https" if url.username().is_empty() && url.password().is_none() => Ok(url),
        "http" | "https" => Err(invalid(setting, "must not hold a user or a password")),
        scheme => Err(invalid(setting, format!("expected http:// or https://, got {scheme}:"))),
    }
}

/// As OpenFGA's own clients do: a host, or an address without a path, stands for `/oauth/token` there.
fn parse_issuer(text: &str) -> Result<TokenUrl, ConfigError> {
    let full = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let mut url = parse_http_url("FGA_API_TOKEN_ISSUER", &full)?;
    if url.path() == "/" {
        url.set_path("/oauth/token");
    }
    Ok(TokenUrl::from_url(url))
}

fn read_roots(path: &Path) -> Result<Vec<reqwest::Certificate>, ConfigError> {
    let problem = |error: String| invalid("FGA_CA_CERT", format!("{}: {error}", path.display()));
    let pem = std::fs::read(path).map_err(|error| problem(error.to_string()))?;
    match reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| problem(error.to_string()))? {
        roots if roots.is_empty() => Err(problem("holds no certificate in PEM".to_owned())),
        roots => Ok(roots),
    }
}

fn parse_ulid(setting: &'static str, text: &str) -> Result<String, ConfigError> {
    match ulid::Ulid::from_string(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(invalid(setting, format!("expected a ULID of 26 characters, got {text:?} ({error})"))),
    }
}
