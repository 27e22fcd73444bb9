//! An actix-web application that registers archives: the rows are in Postgres, who may view them is in OpenFGA.
//!
//! An archive belongs to a capture job, and the job to an organization, whose members may view the archive. So each
//! registration needs one row and two tuples. The row and the intent to write the tuples are committed together; the
//! engine, which runs in this same process, delivers the tuples.
//!
//! ```sh
//! export DATABASE_URL=postgres://app@localhost/app
//! export FGA_API_URL=http://localhost:8080 FGA_STORE_ID=01J9W3S5F0Q1G4Z6V8X2Y7B5NC
//! cargo run --example archive
//! curl -H 'Content-Type: application/json' http://127.0.0.1:8090/archives \
//!     -d '{"id": "a1", "job": "j1", "organization": "acme"}'
//! ```
//!
//! The store's model needs the types `organization`, `capture_job` and `archive`, the last two with a relation
//! `parent`: scripts/demo has one.

use std::env;
use std::io::IsTerminal as _;

use actix_web::http::StatusCode;
use actix_web::{App, HttpResponse, HttpServer, ResponseError, get, post, web};
use anyhow::Context as _;
use diesel::Insertable;
use diesel_async::pooled_connection::bb8::{Pool, RunError};
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, ManagerConfig};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _};
use fga_outbox::{DatabaseUrl, Engine, Intent, InvalidIntent, Tuple, migrate};
use serde::{Deserialize, Serialize};

const CREATE_ARCHIVES: &str = "
    CREATE TABLE IF NOT EXISTS archives (
        id text PRIMARY KEY,
        job text NOT NULL,
        organization text NOT NULL
    )";

diesel::table! {
    archives (id) {
        id -> Text,
        job -> Text,
        organization -> Text,
    }
}

#[derive(Debug, Deserialize, Serialize, Insertable)]
struct Archive {
    id: String,
    job: String,
    organization: String,
}

impl Archive {
    /// What has to be in OpenFGA once this archive is registered.
    fn intent(&self) -> Result<Intent, RegisterError> {
        let archive = object("archive", &self.id)?;
        let job = object("capture_job", &self.job)?;
        let organization = object("organization", &self.organization)?;
        let writes = vec![Tuple::new(&job, "parent", archive)?, Tuple::new(organization, "parent", job)?];
        Ok(Intent::new(writes, Vec::new())?)
    }
}

/// An object of OpenFGA's. Ids come from outside: one like `x#member` or `*` would name something else.
fn object(kind: &str, id: &str) -> Result<String, RegisterError> {
    if !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        Ok(format!("{kind}:{id}"))
    } else {
        Err(RegisterError::InvalidId(format!("{kind}: expected letters, digits, '-' and '_', got {id:?}")))
    }
}

#[actix_web::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init();
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8090".to_owned());
    let url: DatabaseUrl = env::var("DATABASE_URL").context("DATABASE_URL")?.parse()?;

    migrate(&url).await?;
    url.connect().await?.batch_execute(CREATE_ARCHIVES).await?;
    let pool = web::Data::new(connect(url).await?);
    let engine = Engine::builder().from_env().start()?;

    let shared = web::Data::new(engine.clone());
    let app = move || {
        App::new().app_data(pool.clone()).app_data(shared.clone()).service(register_archive).service(show_health)
    };
    // Until SIGTERM, or Ctrl-C.
    HttpServer::new(app).bind(&listen).with_context(|| format!("can't listen on {listen}"))?.run().await?;

    // Only now, so that the last registrations are delivered, too.
    engine.stop().await;
    Ok(())
}

/// The application's own pool. Its connections are made by [`DatabaseUrl`], so that they understand the same address.
async fn connect(url: DatabaseUrl) -> anyhow::Result<Pool<AsyncPgConnection>> {
    let mut config = ManagerConfig::default();
    config.custom_setup = Box::new(move |_| {
        let url = url.clone();
        Box::pin(async move {
            url.connect().await.map_err(|error| diesel::ConnectionError::BadConnection(error.to_string()))
        })
    });
    let manager = AsyncDieselConnectionManager::new_with_config("", config);
    Ok(Pool::builder().build(manager).await?)
}

/// Registers an archive, and what has to be in OpenFGA for it, in one transaction: either both are there or neither.
#[post("/archives")]
async fn register_archive(
    archive: web::Json<Archive>,
    pool: web::Data<Pool<AsyncPgConnection>>,
    engine: web::Data<Engine>,
) -> Result<HttpResponse, RegisterError> {
    let archive = archive.into_inner();
    let mut connection = pool.get().await?;
    connection
        .transaction(async |connection| {
            let inserted = diesel::insert_into(archives::table)
                .values(&archive)
                .on_conflict_do_nothing()
                .execute(connection)
                .await?;
            if inserted == 0 {
                return Err(RegisterError::AlreadyThere);
            }
            archive.intent()?.enqueue(connection).await?;
            Ok(())
        })
        .await?;

    engine.nudge();
    Ok(HttpResponse::Created().json(archive))
}

/// What the engine did since it was started, and why it pauses, if it does.
#[get("/healthz")]
async fn show_health(engine: web::Data<Engine>) -> HttpResponse {
    HttpResponse::Ok().json(engine.stats())
}

/// Why an archive was not registered. Whatever it is, the transaction was rolled back.
#[derive(Debug, thiserror::Error)]
enum RegisterError {
    #[error("this archive is already registered")]
    AlreadyThere,
    #[error("{0}")]
    InvalidId(String),
    #[error(transparent)]
    InvalidIntent(#[from] InvalidIntent),
    #[error("the database can't be reached")]
    NoConnection(#[from] RunError),
    #[error("the database failed")]
    Database(#[from] diesel::result::Error),
}

impl ResponseError for RegisterError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::AlreadyThere => StatusCode::CONFLICT,
            Self::InvalidId(_) | Self::InvalidIntent(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NoConnection(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Database(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn error_response(&self) -> HttpResponse {
        if self.status_code().is_server_error() {
            tracing::error!(error = ?self, "an archive could not be registered");
        }
        HttpResponse::build(self.status_code()).json(serde_json::json!({ "error": self.to_string() }))
    }
}
