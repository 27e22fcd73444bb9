//! Who the engine is to OpenFGA.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oauth2::basic::{BasicClient, BasicErrorResponse};
use oauth2::{AuthType, ClientId, ClientSecret, RequestTokenError, Scope, TokenResponse as _, TokenUrl};
use tokio::sync::Mutex;

use super::chain;
use crate::delivery::verdict::{Fault, FaultKind};

/// A token that does not say when it expires is renewed after this time, or when it is refused.
const LIFETIME_UNLESS_SAID: Duration = Duration::from_secs(3_600);

/// What is believed of a token's lifetime.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

/// How requests are authenticated. Never printed.
pub(crate) enum Auth {
    None,
    /// A shared token.
    Token(Arc<str>),
    /// OAuth 2 client credentials.
    ClientCredentials(Box<ClientCredentials>),
}

pub(crate) struct ClientCredentials {
    pub(crate) client_id: String,
    pub(crate) client_secret: String,
    pub(crate) token_url: TokenUrl,
    pub(crate) audience: Option<String>,
    pub(crate) scopes: Vec<String>,
    /// Locked while it is renewed, so that it is renewed once for all who need it.
    pub(crate) held: Mutex<Option<Held>>,
}

pub(crate) struct Held {
    token: Arc<str>,
    renew_at: Instant,
}

impl Auth {
    /// The bearer token to send, if any, renewed where its time is nearly up.
    pub(crate) async fn token(&self, http: &reqwest::Client) -> Result<Option<Arc<str>>, Fault> {
        match self {
            Self::None => Ok(None),
            Self::Token(token) => Ok(Some(token.clone())),
            Self::ClientCredentials(credentials) => credentials.token(http).await.map(Some),
        }
    }

    pub(crate) fn needs_tls(&self) -> bool {
        matches!(self, Self::ClientCredentials(credentials) if credentials.token_url.url().scheme() == "https")
    }

    /// Takes note that this token was refused. Says whether another one can be had.
    pub(crate) async fn was_refused(&self, token: &str) -> bool {
        let Self::ClientCredentials(credentials) = self else { return false };
        let mut held = credentials.held.lock().await;
        // Somebody else may have renewed it meanwhile.
        if held.as_ref().is_some_and(|held| *held.token == *token) {
            *held = None;
        }
        true
    }
}

impl ClientCredentials {
    async fn token(&self, http: &reqwest::Client) -> Result<Arc<str>, Fault> {
        let mut held = self.held.lock().await;
        if let Some(held) = held.as_ref().filter(|held| held.renew_at > Instant::now()) {
            return Ok(held.token.clone());
        }
        let (token, lifetime) = self.fetch(http.clone()).await?;
        // With a fifth of its life to spare, so that it does not expire on its way.
        let renew_at = Instant::now() + lifetime.mul_f64(0.8);
        *held = Some(Held { token: token.clone(), renew_at });
        Ok(token)
    }

    async fn fetch(&self, http: reqwest::Client) -> Result<(Arc<str>, Duration), Fault> {
        let client = BasicClient::new(ClientId::new(self.client_id.clone()))
            .set_client_secret(ClientSecret::new(self.client_secret.clone()))
            .set_token_uri(self.token_url.clone())
            .set_auth_type(AuthType::RequestBody);
        let mut request = client.exchange_client_credentials();
        for scope in &self.scopes {
            request = request.add_scope(Scope::new(scope.clone()));
        }
        if let Some(audience) = &self.audience {
            request = request.add_extra_param("audience", audience);
        }
        let send = move |request: oauth2::HttpRequest| {
            let http = http.clone();
            async move {
                let response = http.execute(request.try_into()?).await?;
                let mut answer = oauth2::HttpResponse::new(Vec::new());
                *answer.status_mut() = response.status();
                *answer.headers_mut() = response.headers().clone();
                *answer.body_mut() = response.bytes().await?.into();
                Ok::<_, reqwest::Error>(answer)
            }
        };
        let response = request.request_async(&send).await.map_err(|error| self.fault(&error))?;
        let lifetime = response.expires_in().unwrap_or(LIFETIME_UNLESS_SAID).clamp(SHORTEST, LONGEST);
        Ok((Arc::from(response.access_token().secret().as_str()), lifetime))
    }

    fn fault(&self, error: &RequestTokenError<reqwest::Error, BasicErrorResponse>) -> Fault {
        let kind = match error {
            RequestTokenError::ServerResponse(_) => FaultKind::Unauthenticated,
            _ => FaultKind::Unreachable,
        };
        Fault::new(kind, format!("no access token from {}: {}", *self.token_url, chain(error)))
    }
}
