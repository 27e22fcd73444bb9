//! Addresses of databases, TLS, and the pool.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use diesel::{ConnectionError, ConnectionResult};
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, PoolError, RecyclingMethod};
use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use futures_util::FutureExt as _;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_postgres::NoTls;
use tokio_postgres_rustls::MakeRustlsConnect;
use url::form_urlencoded;

use super::DatabaseError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

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
                "sslrootcert" => roots = Some(value.into_owned()).filter(|path| path != "system"),
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
        let roots = roots.map(|path| read_roots(Path::new(path))).transpose()?;
        let (mode, tls) = match (sslmode, roots) {
            ("disable", _) => (SslMode::Disable, None),
            ("allow" | "prefer", _) => (SslMode::Prefer, Some(unverified())),
            // With a root given, `require` verifies it, as libpq does.
            ("require", None) => (SslMode::Require, Some(unverified())),
            ("require" | "verify-ca", Some(roots)) => (SslMode::Require, Some(verified_by(roots, false)?)),
            ("verify-full", Some(roots)) => (SslMode::Require, Some(verified_by(roots, true)?)),
            ("verify-ca" | "verify-full", None) => {
                let config = ClientConfig::with_platform_verifier().map_err(|error| invalid(error.to_string()))?;
                (SslMode::Require, Some(config))
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
    /// # Errors
    /// [`DatabaseError::Unreachable`] with the reason.
    pub async fn connect(&self) -> Result<AsyncPgConnection, DatabaseError> {
        self.establish().await.map_err(|error| match error {
            ConnectionError::BadConnection(reason) => DatabaseError::Unreachable(reason),
            error => DatabaseError::Unreachable(error.to_string()),
        })
    }

    async fn establish(&self) -> ConnectionResult<AsyncPgConnection> {
        match &self.tls {
            None => {
                let (client, connection) = self.config.connect(NoTls).await.map_err(bad_connection)?;
                AsyncPgConnection::try_from_client_and_connection(client, connection).await
            }
            Some(tls) => {
                let tls = MakeRustlsConnect::new(tls.clone());
                let (client, connection) = self.config.connect(tls).await.map_err(bad_connection)?;
                AsyncPgConnection::try_from_client_and_connection(client, connection).await
            }
        }
    }
}

/// A pool of connections of one database.
pub(crate) struct Pool {
    connections: bb8::Pool<Manager>,
    home: Handle,
    /// Why the last connection could not be made.
    failure: watch::Sender<String>,
}

type Manager = AsyncDieselConnectionManager<AsyncPgConnection>;

/// A connection that goes back to its pool when dropped, or is closed where a transaction is still open.
pub(crate) type Connection = bb8::PooledConnection<'static, Manager>;

impl Pool {
    /// Up to this many connections. They are made and driven by the runtime of `home`, which has to outlive the actors:
    /// a connection dies with the runtime that it was made on.
    pub(crate) fn new(url: &DatabaseUrl, home: Handle, size: u32) -> Self {
        let url = url.clone();
        let mut config = ManagerConfig::default();
        // A statement is about to be sent anyway, and finds out about a broken connection.
        config.recycling_method = RecyclingMethod::Fast;
        config.custom_setup = Box::new(move |_| {
            let url = url.clone();
            async move {
                let mut connection = url.establish().await?;
                connection.batch_execute(SESSION).await.map_err(ConnectionError::CouldntSetupConfiguration)?;
                Ok(connection)
            }
            .boxed()
        });
        let failure = watch::Sender::default();
        let connections = bb8::Pool::builder()
            .max_size(size)
            .connection_timeout(CONNECT_TIMEOUT + Duration::from_secs(1))
            .idle_timeout(Some(Duration::from_secs(60)))
            // Whoever wants the connection hears of the failure, and tries again in its own time.
            .retry_connection(false)
            .error_sink(Box::new(Failures(failure.clone())))
            .build_unchecked(Manager::new_with_config("", config));
        Self { connections, home, failure }
    }

    /// # Errors
    /// [`DatabaseError::Unreachable`], as soon as it is known that no connection can be made.
    pub(crate) async fn get(&self) -> Result<Connection, DatabaseError> {
        let mut failure = self.failure.subscribe();
        let connections = self.connections.clone();
        // On the home runtime, where bb8 makes connections in tasks of its own.
        let got = self.home.spawn(async move { connections.get_owned().await });
        tokio::select! {
            biased;
            got = got => match got {
                Ok(Ok(connection)) => Ok(connection),
                Ok(Err(bb8::RunError::User(error))) => Err(DatabaseError::Unreachable(error.to_string())),
                Ok(Err(bb8::RunError::TimedOut)) => Err(DatabaseError::Unreachable("no answer in time".to_owned())),
                Err(error) => Err(DatabaseError::Unreachable(error.to_string())),
            },
            Ok(()) = failure.changed() => Err(DatabaseError::Unreachable(failure.borrow().clone())),
        }
    }
}

#[derive(Debug, Clone)]
struct Failures(watch::Sender<String>);

impl bb8::ErrorSink<PoolError> for Failures {
    fn sink(&self, error: PoolError) {
        self.0.send_replace(match error {
            PoolError::ConnectionError(ConnectionError::BadConnection(reason)) => reason,
            error => error.to_string(),
        });
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<PoolError>> {
        Box::new(self.clone())
    }
}

/// A lost network must not hold rows for ever, nor a query whose client is gone go on. The first is above the longest
/// delivery of a lease.
const SESSION: &str = "SET idle_in_transaction_session_timeout = '120s'; SET client_connection_check_interval = '1s'";

fn invalid(problem: impl Into<String>) -> DatabaseError {
    DatabaseError::InvalidUrl(problem.into())
}

/// With the causes: tokio-postgres' own words stop at "error connecting to server".
fn bad_connection(error: tokio_postgres::Error) -> ConnectionError {
    let mut reason = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        reason = format!("{reason}: {error}");
        cause = error.source();
    }
    ConnectionError::BadConnection(reason)
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
    let chain = WebPkiServerVerifier::builder(Arc::new(roots)).build().map_err(|error| invalid(error.to_string()))?;
    Ok(with_verifier(Verifier { chain: Some(chain), name }))
}

fn with_verifier(verifier: Verifier) -> ClientConfig {
    ClientConfig::builder().dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
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
        let algorithms = rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
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
