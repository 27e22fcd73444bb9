//! What an answer of OpenFGA to a write is about. The only place that knows OpenFGA's error codes and messages.
//!
//! Source: OpenFGA v1.18.1 and v1.9.5 (`pkg/server/errors`, `pkg/storage/errors.go`, `pkg/tuple/tuple_errors.go`),
//! and what those servers answered when run.

use std::time::{Duration, SystemTime};

use serde::Deserialize;

use crate::tuple::TupleKey;

/// The subject of an answer, and so its consequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// About nothing: every tuple of the request is in the desired state.
    Done,
    /// About a tuple: what is stored is not what the request took for granted, and nothing was written. Read it back.
    Tuple { reason: String },
    /// About a row: it will not be accepted as it is. The message may name the tuple, see [`names`].
    Row { reason: String },
    /// About the request's size: nothing was written, smaller ones will do.
    Size(Excess),
    /// About the moment: the same request may well succeed later. It may have been carried out.
    Moment { reason: String, kind: Kind },
    /// About the target as a whole: no row is at fault, and none will get through. It may have been carried out.
    Target(Fault),
}

/// In what a request was too large.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Excess {
    /// More keys than this server's own limit, which it named.
    Keys(usize),
    /// More bytes than the server, or something before it, takes.
    Bytes,
}

/// What kind of bad moment it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A race with another writer: the server is well.
    Race,
    /// The server failed: it may be this request, or everything.
    Failure,
    /// An answer that is not known: worth a look by a human, once.
    Unforeseen,
}

/// Why a target can't be used, in words for an operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Fault {
    /// What was seen, in OpenFGA's words where it answered.
    pub reason: String,
    /// Whether it passes by itself.
    pub kind: FaultKind,
    /// How long the target asked to be left alone.
    pub retry_after: Option<Duration>,
}

/// Whether a fault of the target passes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// Not reachable, or failing: expected to come back.
    Unreachable,
    /// Overloaded: expected to recover when left alone.
    Overloaded,
    /// Not authenticated: the token is wrong or has expired.
    Unauthenticated,
    /// Answers, but is not what it should be (store, model, address, authorization): someone has to mend it.
    Misconfigured,
}

impl Fault {
    pub(crate) fn new(kind: FaultKind, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), kind, retry_after: None }
    }
}

/// An answer, as far as a verdict needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer<'a> {
    pub(crate) status: u16,
    /// The header `Retry-After`: seconds, or a date.
    pub(crate) retry_after: Option<&'a str>,
    pub(crate) body: &'a [u8],
}

#[derive(Deserialize)]
struct ErrorBody {
    code: String,
    #[serde(default)]
    message: String,
}

/// The failure table.
pub(crate) fn verdict(answer: &Answer) -> Verdict {
    let error = serde_json::from_slice::<ErrorBody>(answer.body).ok();
    let (code, message) = error.as_ref().map_or(("", ""), |error| (&error.code, &error.message));
    let has = |part: &str| message.contains(part);
    let reason = || reason(answer, error.as_ref());
    let tuple = || Verdict::Tuple { reason: reason() };
    let row = || Verdict::Row { reason: reason() };
    let moment = |kind| Verdict::Moment { reason: reason(), kind };
    let target = |kind| {
        Verdict::Target(Fault { reason: reason(), kind, retry_after: answer.retry_after.and_then(parse_retry_after) })
    };
    use FaultKind::{Misconfigured, Overloaded, Unauthenticated, Unreachable};

    match (answer.status, code) {
        (200, "") if is_json_object(answer.body) => Verdict::Done,

        (400, "write_failed_due_to_invalid_input") => tuple(),
        (409, _) if has("already exists with a different condition") => tuple(),

        (400, "validation_error") if has("invalid WriteRequest.StoreId") => target(Misconfigured),
        (400, "validation_error") if has("invalid WriteRequest.AuthorizationModelId") => target(Misconfigured),
        (400, "validation_error" | "invalid_tuple" | "type_not_found" | "relation_not_found") => row(),
        (400, "invalid_write_input" | "cannot_allow_duplicate_tuples_in_one_request") => row(),

        (400, "exceeded_entity_limit") => match message.rsplit(' ').next().and_then(|last| last.parse().ok()) {
            Some(limit) => Verdict::Size(Excess::Keys(limit)),
            None => row(),
        },
        (413, _) => Verdict::Size(Excess::Bytes),
        (_, "resource_exhausted") if has("received message larger than max") => Verdict::Size(Excess::Bytes),

        (409, _) => moment(Kind::Race),
        (400, "cancelled") => moment(Kind::Failure),
        (500, "resource_exhausted" | "internal_error" | "deadline_exceeded") => moment(Kind::Failure),
        (408, _) => moment(Kind::Failure),

        (400, "authorization_model_not_found" | "latest_authorization_model_not_found") => target(Misconfigured),
        (400, "store_id_invalid_length") => target(Misconfigured),
        (401, "forbidden") | (403, _) => target(Misconfigured),
        (401, _) => target(Unauthenticated),
        (404 | 405, _) => target(Misconfigured),
        (300..=399, _) => target(Misconfigured),
        (429, _) => target(Overloaded),
        (500, "unavailable") | (502..=504, _) => target(Unreachable),

        _ => moment(Kind::Unforeseen),
    }
}

/// In OpenFGA's words where there are any; otherwise the status and the beginning of the body.
fn reason(answer: &Answer, error: Option<&ErrorBody>) -> String {
    match error {
        Some(error) if !error.message.is_empty() => error.message.clone(),
        Some(error) => format!("HTTP {}: {}", answer.status, error.code),
        None => {
            let text: String = String::from_utf8_lossy(answer.body).trim().chars().take(200).collect();
            let note = if text.is_empty() { "no body" } else { &text };
            match answer.status {
                300..=399 => format!("HTTP {}: redirects are not followed, give OpenFGA's own address", answer.status),
                status => format!("HTTP {status}: {note}"),
            }
        }
    }
}

fn is_json_object(body: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(body).is_ok()
}

/// Seconds or an HTTP date; at most half an hour is believed, as OpenFGA's own clients do.
fn parse_retry_after(text: &str) -> Option<Duration> {
    let asked = match text.trim().parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let date = httpdate::parse_http_date(text.trim()).ok()?;
            date.duration_since(SystemTime::now()).unwrap_or_default()
        }
    };
    Some(asked.min(Duration::from_secs(1_800)))
}

/// Whether an error message of OpenFGA names this tuple.
///
/// Keys contain no spaces, and every form of message has one right behind the tuple or between its parts, so that no
/// key is found within another one's name. Two keys may still be written alike (`a:b#c` in an object's id): a caller
/// that finds more than one named has found none.
pub(crate) fn names(message: &str, key: &TupleKey) -> bool {
    if let Some(rest) = message.strip_prefix("Invalid tuple '") {
        return rest
            .strip_prefix(key.object())
            .and_then(|rest| rest.strip_prefix('#')?.strip_prefix(key.relation()))
            .and_then(|rest| rest.strip_prefix('@')?.strip_prefix(key.user()))
            .is_some_and(|rest| rest.starts_with("'. Reason: ") || rest.starts_with(" (condition "));
    }
    message
        .split_once("user: '")
        .and_then(|(_, rest)| rest.strip_prefix(key.user())?.strip_prefix("', relation: '"))
        .and_then(|rest| rest.strip_prefix(key.relation())?.strip_prefix("', object: '"))
        .and_then(|rest| rest.strip_prefix(key.object())?.strip_prefix('\''))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(": "))
}
