//! Addresses of databases, TLS, and connections.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use diesel::ConnectionError;
use diesel::connection::CacheSize;
use diesel_async::{AsyncConnection as _, AsyncPgConnection, SimpleAsyncConnection as _};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, RootCertStore, SignatureScheme, WantsVerifier,
};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio_postgres::tls::TlsStream;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;
use url::form_urlencoded;

use super::DatabaseError;
use super::pooler::named_process;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a peer may leave what was sent unacknowledged, or a question whether it is there unanswered.
const SILENCE: Duration = Duration::from_secs(10);

/// Where the table is: `postgres://user:password@host:port/database`, with libpq's parameters.
///
/// Besides those of the `tokio-postgres` crate it takes `sslmode=verify-ca` and `verify-full`, `sslrootcert` (a PEM
/// file; absent or `system`: the system's roots), and `search_path` (the table's schema). As with libpq,
/// `sslmode=require` encrypts without looking at the certificate. Printing it shows no password.
#[derive(Clone)]
pub struct DatabaseUrl {
    config: tokio_postgres::Config,
    tls: Option<ClientConfig>,
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.config.get_dbname().unwrap_or_default();
        f.debug_tuple("DatabaseUrl").field(&self.config.get_hosts()).field(&name).finish()
    }
}

impl FromStr for DatabaseUrl {
    type Err = DatabaseError;

    /// # Errors
    /// [`DatabaseError::InvalidUrl`] says which part can't be used; it never repeats the address.
    fn from_str(text: &str) -> Result<Self, DatabaseError> {
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(invalid("expected postgres://user:password@host:port/database"));
        }
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let mut rest = form_urlencoded::Serializer::new(String::new());
        let (mut sslmode, mut roots, mut search_path) = ("prefer".to_owned(), None, None);
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sslmode" => sslmode = value.into_owned(),
                "sslrootcert" => roots = Some(value.into_owned()),
                "search_path" => search_path = Some(value.into_owned()),
                _ => drop(rest.append_pair(&name, &value)),
            }
        }
        // Form encoding writes a space as '+', which an address does not decode.
        let rest = rest.finish().replace('+', "%20");
        let mut config: tokio_postgres::Config =
            format!("{address}?{rest}").parse().map_err(|error: tokio_postgres::Error| {
                // The cause says what is wrong; neither repeats the password.
                let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                invalid(cause)
            })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(invalid("names no host: expected postgres://user:password@host:port/database"));
        }
        config.connect_timeout(CONNECT_TIMEOUT);
        // A network that is gone without a word must not hold a lease for hours.
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(SILENCE);
        }
        if !query.contains("keepalives") {
            config.keepalives_idle(SILENCE).keepalives_interval(SILENCE / 4).keepalives_retries(3);
        }
        if config.get_application_name().is_none() {
            config.application_name("fga-outbox");
        }
        let url = Self { config, tls: None }.with_tls(&sslmode, roots.as_deref())?;
        Ok(match search_path {
            Some(schema) => url.with_search_path(&schema),
            None => url,
        })
    }
}

impl DatabaseUrl {
    /// The same database with the table in this schema.
    pub fn with_schema(self, schema: &str) -> Self {
        self.with_search_path(&format!("\"{}\"", schema.replace('"', "\"\"")))
    }

    fn with_search_path(mut self, search_path: &str) -> Self {
        // In `options`, white space and backslashes are escaped by a backslash.
        let mut value = String::new();
        for char in search_path.chars() {
            if char.is_whitespace() || char == '\\' {
                value.push('\\');
            }
            value.push(char);
        }
        let options = format!("{} -c search_path={value}", self.config.get_options().unwrap_or_default());
        self.config.options(options.trim());
        self
    }

    fn with_tls(mut self, sslmode: &str, roots: Option<&str>) -> Result<Self, DatabaseError> {
        use tokio_postgres::config::SslMode;
        if roots == Some("system") && sslmode != "verify-full" {
            return Err(invalid("sslrootcert=system needs sslmode=verify-full"));
        }
        let roots = roots.filter(|path| *path != "system").map(|path| read_roots(Path::new(path))).transpose()?;
        let (mode, tls) = match (sslmode, roots) {
            ("disable", _) => (SslMode::Disable, None),
            ("allow" | "prefer", _) => (SslMode::Prefer, Some(unverified())),
            // With a root given, `require` verifies it, as libpq does.
            ("require", None) => (SslMode::Require, Some(unverified())),
            ("require" | "verify-ca", Some(roots)) => (SslMode::Require, Some(verified_by(roots, false)?)),
            ("verify-full", Some(roots)) => (SslMode::Require, Some(verified_by(roots, true)?)),
            ("verify-ca" | "verify-full", None) => {
                let config = tls_builder().with_platform_verifier().map_err(|error| invalid(error.to_string()))?;
                (SslMode::Require, Some(config.with_no_client_auth()))
            }
            _ => {
                return Err(invalid(format!(
                    "sslmode={sslmode} is not one of disable, allow, prefer, require, verify-ca, verify-full"
                )));
            }
        };
        self.config.ssl_mode(mode);
        self.tls = tls;
        Ok(self)
    }

    /// A connection of one's own, driven by the runtime that this runs on.
    ///
    /// Behind a pooler it keeps no prepared statements: use it in transactions there.
    ///
    /// # Errors
    /// [`DatabaseError::Unreachable`] with the reason.
    /// [`DatabaseError::Rejected`] where the server does not let us in.
    pub async fn connect(&self) -> Result<AsyncPgConnection, DatabaseError> {
        Ok(self.open().await?.connection)
    }

    pub(super) async fn open(&self) -> Result<Opened, DatabaseError> {
        let opening = async {
            match &self.tls {
                None => {
                    let (client, connection) = self.config.connect(NoTls).await.map_err(bad_connection)?;
                    Opened::new(client, connection).await
                }
                Some(tls) => {
                    let tls = MakeRustlsConnect::new(tls.clone());
                    let (client, connection) = self.config.connect(tls).await.map_err(bad_connection)?;
                    Opened::new(client, connection).await
                }
            }
        };
        // The limit of the address is for the socket alone; a server may accept it and never say a word.
        match tokio::time::timeout(CONNECT_TIMEOUT, opening).await {
            Ok(opened) => opened,
            Err(_) => Err(DatabaseError::Unreachable("no answer in time".to_owned())),
        }
    }
}

/// A connection that was just made.
pub(super) struct Opened {
    pub(super) connection: AsyncPgConnection,
    /// The process of Postgres's that answered.
    pub(super) process: i32,
    /// Whether there is no pooler before it.
    pub(super) direct: bool,
    /// As `server_version_num`.
    pub(super) version: i32,
}

impl Opened {
    async fn new<S>(
        client: Client,
        mut connection: tokio_postgres::Connection<Socket, S>,
    ) -> Result<Self, DatabaseError>
    where
        S: TlsStream + Unpin + Send + 'static,
    {
        let named = named_process(&client.cancel_token());
        // diesel-async prepares and executes what it begins a session with, which takes a pooler two transactions unless
        // they are in one.
        let answer = tokio::select! {
            answer = client.simple_query("BEGIN; SELECT pg_backend_pid(), current_setting('server_version_num')") => {
                answer.map_err(bad_connection)?
            }
            ended = &mut connection => {
                ended.map_err(bad_connection)?;
                return Err(DatabaseError::Unreachable("the connection was closed".to_owned()));
            }
        };
        let row = answer.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((row.get(0)?.parse().ok()?, row.get(1)?.parse().ok()?)),
            _ => None,
        });
        let (process, version) = row.ok_or_else(|| DatabaseError::Unreachable("this is no Postgres".to_owned()))?;
        let direct = named == Some(process);
        let mut connection =
            AsyncPgConnection::try_from_client_and_connection(client, connection).await.map_err(unusable)?;
        if direct {
            connection.batch_execute("COMMIT").await?;
        } else {
            connection.set_prepared_statement_cache_size(CacheSize::Disabled);
            connection.batch_execute("ROLLBACK").await?;
        }
        Ok(Self { connection, process, direct, version })
    }
}

fn invalid(problem: impl Into<String>) -> DatabaseError {
    DatabaseError::InvalidUrl(problem.into())
}

fn unusable(error: ConnectionError) -> DatabaseError {
    DatabaseError::Unreachable(error.to_string())
}

/// With the causes: tokio-postgres' own words stop at "error connecting to server".
fn bad_connection(error: tokio_postgres::Error) -> DatabaseError {
    // Classes of SQLSTATE: 28, invalid authorization; 3D, no such database.
    let rejected = error.code().is_some_and(|code| code.code().starts_with("28") || code.code().starts_with("3D"));
    let mut reason = crate::openfga::chain(&error);
    if reason.contains("unsupported startup parameter") {
        reason.push_str(" (a pooler takes no search_path and no options: set them by ALTER ROLE or ALTER DATABASE)");
    }
    if rejected { DatabaseError::Rejected(reason) } else { DatabaseError::Unreachable(reason) }
}

fn read_roots(path: &Path) -> Result<RootCertStore, DatabaseError> {
    let problem = |error: String| invalid(format!("sslrootcert {}: {error}", path.display()));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| problem(error.to_string()))? {
        let certificate = certificate.map_err(|error| problem(error.to_string()))?;
        roots.add(certificate).map_err(|error| problem(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(problem("holds no certificate".to_owned()));
    }
    Ok(roots)
}

fn unverified() -> ClientConfig {
    with_verifier(Verifier { chain: None, name: false })
}

fn verified_by(roots: RootCertStore, name: bool) -> Result<ClientConfig, DatabaseError> {
    let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .map_err(|error| invalid(error.to_string()))?;
    Ok(with_verifier(Verifier { chain: Some(chain), name }))
}

fn with_verifier(verifier: Verifier) -> ClientConfig {
    tls_builder().dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
}

/// With the provider named: where an application has two, rustls does not choose between them.
fn tls_builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("the provider knows the default versions")
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// libpq's levels below `verify-full`, which rustls does not have: no look at the certificate, or none at its name.
#[derive(Debug)]
struct Verifier {
    chain: Option<Arc<WebPkiServerVerifier>>,
    name: bool,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.name => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<DatabaseUrl, String> {
        text.parse().map_err(|error: DatabaseError| error.to_string())
    }

    #[test]
    fn a_search_path_and_other_options_go_to_the_server() {
        let url = parse("postgres://me@h/db?options=-c%20geqo%3Doff&search_path=a%20b,public").unwrap();
        assert_eq!(url.config.get_options(), Some("-c geqo=off -c search_path=a\\ b,public"));
        let url = parse("postgres://me@h/db").unwrap().with_schema("o\"x");
        assert_eq!(url.config.get_options(), Some("-c search_path=\"o\"\"x\""));
    }

    #[test]
    fn an_address_that_cannot_be_used_says_why_and_never_shows_the_password() {
        for (text, expected) in [
            ("mysql://me:hush@h/db", "expected postgres://"),
            ("postgres://me:hush@h:port/db", "invalid"),
            ("postgres:///db", "names no host"),
            ("postgres://me:hush@h/db?sslmode=full", "sslmode=full is not one of"),
            ("postgres://me:hush@h/db?sslrootcert=/nowhere.pem&sslmode=verify-full", "sslrootcert /nowhere.pem"),
            ("postgres://me:hush@h/db?sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
            ("postgres://me:hush@h/db?fallback=yes", "fallback"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("hush"), "{text}: {error}");
        }
        let url = parse("postgres://me:hush@h/db").unwrap();
        assert!(!format!("{url:?}").contains("hush"));
    }
}
