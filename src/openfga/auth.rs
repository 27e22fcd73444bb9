//! Who the engine is to OpenFGA.

use reqwest::RequestBuilder;

/// How requests are authenticated. Never printed.
pub(crate) enum Auth {
    None,
    Token(String),
}

impl Auth {
    pub(crate) fn apply(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::None => request,
            Self::Token(token) => request.bearer_auth(token),
        }
    }
}
