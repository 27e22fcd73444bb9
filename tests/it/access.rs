//! Who the engine is to OpenFGA, and how it gets there.

use fga_outbox::{DrainError, FaultKind};
use serde_json::json;
use std::time::Duration;
use wiremock::matchers::{body_string_contains, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

use crate::bed::{Bed, write};
use crate::command_line::on;
use crate::support::{Cluster, Flavor, Server, eventually, within_deadline};

async fn guarded_server() -> Server {
    Server::start_private(Flavor::Memory, &["--authn-method", "preshared", "--authn-preshared-keys", "key-one"]).await
}

fn token(token: &str) -> ResponseTemplate {
    ResponseTemplate::new(200).set_body_json(json!({"access_token": token, "token_type": "Bearer", "expires_in": 3600}))
}

#[tokio::test]
async fn client_credentials_get_one_token_for_all() {
    let server = guarded_server().await;
    let bed = Bed::on(&server).await;
    for at in 0..500 {
        bed.insert(&write("anne", &at.to_string())).await;
    }
    let issuer = MockServer::start().await;
    Mock::given(method("POST"))
        .and(path("/oauth/token"))
        .and(body_string_contains("grant_type=client_credentials"))
        .and(body_string_contains("client_id=me"))
        .and(body_string_contains("client_secret=hush"))
        .and(body_string_contains("audience=https%3A%2F%2Ffga"))
        .and(body_string_contains("scope=read+write"))
        .respond_with(token("key-one"))
        .expect(1)
        .mount(&issuer)
        .await;
    let builder = bed.builder().client_credentials("me", "hush").token_issuer(issuer.uri());
    let engine = builder.audience("https://fga").scopes("read write").start().unwrap();
    assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 500);
    engine.stop().await;
}

#[tokio::test]
async fn a_refused_token_is_renewed_once_and_then_the_engine_pauses() {
    let server = guarded_server().await;
    let bed = Bed::on(&server).await;
    bed.insert(&write("anne", "1")).await;
    let issuer = MockServer::start().await;
    // The first token has been revoked.
    let first = Mock::given(method("POST")).respond_with(token("key-zero")).up_to_n_times(1);
    first.with_priority(1).expect(1).mount(&issuer).await;
    Mock::given(method("POST")).respond_with(token("key-one")).with_priority(2).expect(1).mount(&issuer).await;
    let engine = bed.builder().client_credentials("me", "hush").token_issuer(issuer.uri()).start().unwrap();
    assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 1);
    engine.stop().await;

    let refusing = MockServer::start().await;
    let error = ResponseTemplate::new(401).set_body_json(json!({"error": "invalid_client"}));
    Mock::given(method("POST")).respond_with(error).mount(&refusing).await;
    let builder = bed.builder().client_credentials("me", "hush").token_issuer(refusing.uri());
    let engine = builder.patience(Duration::ZERO).start().unwrap();
    let error = within_deadline(engine.drain()).await.unwrap_err();
    assert!(matches!(&error, DrainError::Target(fault) if fault.kind == FaultKind::Unauthenticated), "{error:?}");
    assert!(error.to_string().contains("invalid_client"), "{error}");
    assert!(!error.to_string().contains("hush"), "{error}");
    engine.stop().await;
}

#[tokio::test]
async fn a_token_is_renewed_before_it_expires() {
    let server = guarded_server().await;
    let bed = Bed::on(&server).await;
    let issuer = MockServer::start().await;
    let short = json!({"access_token": "key-one", "token_type": "Bearer", "expires_in": 1});
    Mock::given(method("POST")).respond_with(ResponseTemplate::new(200).set_body_json(short)).mount(&issuer).await;
    let engine = bed.builder().client_credentials("me", "hush").token_issuer(issuer.uri()).start().unwrap();
    let mut rows = 0;
    eventually(async || {
        bed.insert(&write("anne", &rows.to_string())).await;
        rows += 1;
        engine.nudge();
        issuer.received_requests().await.unwrap().len() >= 3
    })
    .await;
    within_deadline(engine.drain()).await.unwrap();
    let stats = engine.stats();
    assert_eq!((stats.delivered, stats.failed, stats.refused), (rows, 0, 0));
    engine.stop().await;
}

#[tokio::test]
async fn a_server_that_answers_with_the_token_does_not_get_it_printed() {
    let bed = Bed::new(Flavor::Memory).await;
    let echo = MockServer::start().await;
    let body = json!({"code": "unauthenticated", "message": "you said: Bearer key-sekrit"});
    Mock::given(wiremock::matchers::any())
        .respond_with(ResponseTemplate::new(401).set_body_json(body))
        .mount(&echo)
        .await;
    let output = on(&bed, &["drain", "--api-url", &echo.uri(), "--api-token", "key-sekrit"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("you said: Bearer [token]") && !stderr.contains("sekrit"), "{stderr}");
}

#[tokio::test]
async fn a_proxy_of_the_environment_is_used() {
    let bed = Bed::new(Flavor::Memory).await;
    bed.insert(&write("anne", "1")).await;
    // The server itself takes requests in a proxy's form, for a host that there is not.
    let mut drain = on(&bed, &["drain", "--api-url", "http://openfga.invalid"]);
    drain.env("http_proxy", bed.store.api_url()).env_remove("no_proxy").env_remove("NO_PROXY");
    let output = drain.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(bed.viewer("anne", "1").await.is_some());
}

#[tokio::test]
async fn https_is_verified_by_a_ca_of_ones_own() {
    let ca = Cluster::shared().await.ca_pem();
    let certificates = ca.parent().unwrap();
    // The server runs as another user than the one that owns the key.
    let folder = tempfile::tempdir().unwrap();
    for name in ["server.pem", "server.key"] {
        std::fs::copy(certificates.join(name), folder.path().join(name)).unwrap();
    }
    let (certificate, key) = (folder.path().join("server.pem"), folder.path().join("server.key"));
    let plain = Server::start_private(Flavor::Memory, &[]).await;
    let bed = Bed::on(&plain).await;
    bed.insert(&write("anne", "1")).await;
    let proxy = tls_proxy(&certificate, &key, &plain.api_url()).await;

    let untrusting = bed.builder().api_url(&proxy).patience(Duration::ZERO).start().unwrap();
    let error = within_deadline(untrusting.drain()).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    untrusting.stop().await;
    let engine = bed.builder().api_url(&proxy).ca_cert(&ca).start().unwrap();
    assert_eq!(within_deadline(engine.drain()).await.unwrap().delivered, 1);
    engine.stop().await;
}

/// Ends TLS in front of a server that speaks HTTP.
async fn tls_proxy(certificate: &std::path::Path, key: &std::path::Path, target: &str) -> String {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let chain = CertificateDer::pem_file_iter(certificate).unwrap().collect::<Result<_, _>>().unwrap();
    let config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(key).unwrap())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let target = target.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let (acceptor, target) = (acceptor.clone(), target.clone());
            tokio::spawn(async move {
                let (Ok(mut inside), Ok(mut outside)) =
                    (acceptor.accept(connection).await, tokio::net::TcpStream::connect(target).await)
                else {
                    return;
                };
                let _ = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
            });
        }
    });
    address
}
