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

/// What an answer is about.
pub(crate) fn verdict(answer: &Answer) -> Verdict {
    look_up(answer).1
}

/// The line of the table that an answer belongs to, and its verdict.
fn look_up(answer: &Answer) -> (&'static str, Verdict) {
    let error = serde_json::from_slice::<ErrorBody>(answer.body).ok();
    let (code, message) = error.as_ref().map_or(("", ""), |error| (&error.code, &error.message));
    judge(&Said { answer, code, message, reason: reason(answer, error.as_ref()) })
}

/// An answer, read.
struct Said<'a> {
    answer: &'a Answer<'a>,
    code: &'a str,
    message: &'a str,
    reason: String,
}

/// A function that tries these lines from top to bottom, and the list of their names: the tests demand a recorded answer
/// for every one.
macro_rules! table {
    ($function:ident($said:ident) by $on:expr; $($name:literal: $pattern:pat $(if $guard:expr)? => $verdict:expr,)*) => {
        fn $function($said: &Said) -> (&'static str, Verdict) {
            match $on {
                $($pattern $(if $guard)? => ($name, $verdict),)*
            }
        }

        #[cfg(test)]
        const LINES: &[&str] = &[$($name),*];
    };
}

// The failure table. Messages may quote what a row holds, white space included (a condition's context): where one is
// compared, it is from its beginning, which is OpenFGA's own.
table! { judge(said) by (said.answer.status, said.code);
    "accepted": (200, "") if is_json_object(said.answer.body) => Verdict::Done,

    "already there, or already gone": (400, "write_failed_due_to_invalid_input") => said.tuple(),
    "another condition": (409, _) if said.begins(OTHER_CONDITION) => said.tuple(),

    // Of the request or of the target, although they share their code with the faults of a row.
    "store or model is no ULID": (400, "validation_error")
        if said.begins("invalid WriteRequest.StoreId") || said.begins("invalid WriteRequest.AuthorizationModelId")
        => said.target(FaultKind::Misconfigured),
    "model of an unknown schema": (400, "validation_error") if said.begins("invalid schema version")
        => said.target(FaultKind::Misconfigured),
    // Nothing that a row holds leads to these: the request was garbled on its way, or this crate is wrong.
    "garbled request": (400, "validation_error") if said.begins("malformed JSON") || said.begins("invalid character ")
        => said.moment(Kind::Unforeseen),
    "empty list": (400, "validation_error")
        if said.begins("invalid WriteRequestWrites.") || said.begins("invalid WriteRequestDeletes.")
        => said.moment(Kind::Unforeseen),
    "unknown option": (400, "validation_error")
        if said.begins("invalid on_duplicate option") || said.begins("invalid on_missing option")
        => said.moment(Kind::Unforeseen),
    "empty request": (400, "invalid_write_input") => said.moment(Kind::Unforeseen),

    "not valid": (400, "validation_error" | "invalid_tuple" | "type_not_found" | "relation_not_found") => said.row(),
    "key twice": (400, "cannot_allow_duplicate_tuples_in_one_request") => said.row(),

    "too many keys": (400, "exceeded_entity_limit") => Verdict::Size(said.limit().map_or(Excess::Bytes, Excess::Keys)),
    "too many bytes": (_, "resource_exhausted") if said.begins("grpc: received message larger than max")
        => Verdict::Size(Excess::Bytes),
    "too many bytes for a proxy": (413, _) => Verdict::Size(Excess::Bytes),

    "race": (409, _) => said.moment(Kind::Race),
    "client went away": (400, "cancelled") => said.moment(Kind::Failure),
    "server failed": (500, "resource_exhausted" | "internal_error" | "deadline_exceeded")
        => said.moment(Kind::Failure),
    "timed out": (408, _) => said.moment(Kind::Failure),

    "no such model": (400, "authorization_model_not_found" | "latest_authorization_model_not_found")
        => said.target(FaultKind::Misconfigured),
    "store id of another length": (400, "store_id_invalid_length") => said.target(FaultKind::Misconfigured),
    "not authorised": (401, "forbidden") | (403, _) => said.target(FaultKind::Misconfigured),
    "not authenticated": (401, _) => said.target(FaultKind::Unauthenticated),
    "no such store or path": (404 | 405, _) => said.target(FaultKind::Misconfigured),
    "redirect": (300..=399, _) => said.target(FaultKind::Misconfigured),
    "rate limit": (429, _) => said.target(FaultKind::Overloaded),
    "backend down": (500, "unavailable") | (502..=504, _) => said.target(FaultKind::Unreachable),

    "unforeseen": _ => said.moment(Kind::Unforeseen),
}

const OTHER_CONDITION: &str = "transactional write failed due to conflict: \
     attempted to write a tuple which already exists with a different condition";

impl Said<'_> {
    fn begins(&self, with: &str) -> bool {
        self.message.starts_with(with)
    }

    /// The number at the end of `exceeds the allowed limit of 100`.
    fn limit(&self) -> Option<usize> {
        self.message.rsplit(' ').next()?.parse().ok()
    }

    fn tuple(&self) -> Verdict {
        Verdict::Tuple { reason: self.reason.clone() }
    }

    fn row(&self) -> Verdict {
        Verdict::Row { reason: self.reason.clone() }
    }

    fn moment(&self, kind: Kind) -> Verdict {
        Verdict::Moment { reason: self.reason.clone(), kind }
    }

    fn target(&self, kind: FaultKind) -> Verdict {
        let retry_after = self.answer.retry_after.and_then(parse_retry_after);
        Verdict::Target(Fault { reason: self.reason.clone(), kind, retry_after })
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// What an answer is expected to be about, and what is expected in the reason.
    #[derive(Clone, Copy)]
    enum About {
        Done,
        Tuple(&'static str),
        Row(&'static str),
        Keys(usize),
        Bytes,
        Moment(Kind, &'static str),
        Target(FaultKind, &'static str),
    }

    impl About {
        fn matches(self, verdict: &Verdict) -> bool {
            match (self, verdict) {
                (Self::Done, Verdict::Done) => true,
                (Self::Tuple(part), Verdict::Tuple { reason }) => reason.contains(part),
                (Self::Row(part), Verdict::Row { reason }) => reason.contains(part),
                (Self::Keys(limit), Verdict::Size(Excess::Keys(found))) => limit == *found,
                (Self::Bytes, Verdict::Size(Excess::Bytes)) => true,
                (Self::Moment(kind, part), Verdict::Moment { reason, kind: found }) => {
                    kind == *found && reason.contains(part)
                }
                (Self::Target(kind, part), Verdict::Target(fault)) => {
                    kind == fault.kind && fault.reason.contains(part) && fault.retry_after.is_none()
                }
                _ => false,
            }
        }
    }

    use About::{Bytes, Done, Keys, Moment, Row, Target, Tuple};
    use FaultKind::{Misconfigured, Overloaded, Unauthenticated, Unreachable};
    use Kind::{Failure, Race, Unforeseen};

    /// Answers as v1.18.1 and v1.9.5 gave them, or as their source, a proxy or a hosted service has them: the line of
    /// the table that each belongs to, its status and body, and what it is about.
    const RECORDED: &[(&str, u16, &str, About)] = &[
        ("accepted", 200, "{}", Done),
        (
            "already there, or already gone",
            400,
            r#"{"code":"write_failed_due_to_invalid_input","message":"cannot write a tuple which already exists: user: 'user:a', relation: 'viewer', object: 'document:1': tuple to be written already existed or the tuple to be deleted did not exist"}"#,
            Tuple("cannot write a tuple which already exists: user: 'user:a'"),
        ),
        (
            "already there, or already gone",
            400,
            r#"{"code":"write_failed_due_to_invalid_input","message":"cannot delete a tuple which does not exist: user: 'user:o'neill,@é', relation: 'viewer', object: 'document:1': tuple to be written already existed or the tuple to be deleted did not exist"}"#,
            Tuple("cannot delete a tuple which does not exist: user: 'user:o'neill,@é'"),
        ),
        (
            "another condition",
            409,
            r#"{"code":"Aborted","message":"transactional write failed due to conflict: attempted to write a tuple which already exists with a different condition: user: 'user:a', relation: 'viewer', object: 'document:1'"}"#,
            Tuple("with a different condition"),
        ),
        (
            "store or model is no ULID",
            400,
            r#"{"code":"validation_error","message":"invalid WriteRequest.StoreId: value does not match regex pattern \"^[ABCDEFGHJKMNPQRSTVWXYZ0-9]{26}$\""}"#,
            Target(Misconfigured, "invalid WriteRequest.StoreId"),
        ),
        (
            "store or model is no ULID",
            400,
            r#"{"code":"validation_error","message":"invalid WriteRequest.AuthorizationModelId: value does not match regex pattern \"^[ABCDEFGHJKMNPQRSTVWXYZ0-9]{26}$\""}"#,
            Target(Misconfigured, "invalid WriteRequest.AuthorizationModelId"),
        ),
        (
            "model of an unknown schema",
            400,
            r#"{"code":"validation_error","message":"invalid schema version"}"#,
            Target(Misconfigured, "invalid schema version"),
        ),
        (
            "garbled request",
            400,
            r#"{"code":"validation_error","message":"malformed JSON"}"#,
            Moment(Unforeseen, "malformed JSON"),
        ),
        (
            "garbled request",
            400,
            r#"{"code":"validation_error","message":"invalid character 'h' looking for beginning of value"}"#,
            Moment(Unforeseen, "invalid character 'h'"),
        ),
        (
            "empty list",
            400,
            r#"{"code":"validation_error","message":"invalid WriteRequestWrites.TupleKeys: value must contain at least 1 item(s)"}"#,
            Moment(Unforeseen, "at least 1 item(s)"),
        ),
        (
            "empty list",
            400,
            r#"{"code":"validation_error","message":"invalid WriteRequestDeletes.TupleKeys: value must contain at least 1 item(s)"}"#,
            Moment(Unforeseen, "at least 1 item(s)"),
        ),
        (
            "unknown option",
            400,
            r#"{"code":"validation_error","message":"invalid on_duplicate option: foo"}"#,
            Moment(Unforeseen, "invalid on_duplicate option: foo"),
        ),
        (
            "unknown option",
            400,
            r#"{"code":"validation_error","message":"invalid on_missing option: foo"}"#,
            Moment(Unforeseen, "invalid on_missing option: foo"),
        ),
        (
            "empty request",
            400,
            r#"{"code":"invalid_write_input","message":"Invalid input. Make sure you provide at least one write, or at least one delete"}"#,
            Moment(Unforeseen, "Make sure"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'planet:1#viewer@user:z'. Reason: type 'planet' not found"}"#,
            Row("type 'planet' not found"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#owner@user:z'. Reason: relation 'document#owner' not found"}"#,
            Row("relation 'document#owner' not found"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#viewer@group:z'. Reason: type 'group' is not an allowed type restriction for 'document#viewer'"}"#,
            Row("not an allowed type restriction"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'group:1#member@group:1#member'. Reason: cannot write a tuple that is implicit"}"#,
            Row("implicit"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#viewer@user:z\u0007'. Reason: the 'user' field is malformed"}"#,
            Row("the 'user' field is malformed"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#viewer@user:z (condition nope)'. Reason: undefined condition"}"#,
            Row("undefined condition"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#viewer@user:z'. Reason: condition context size limit exceeded: 40020 bytes exceeds 32768 bytes"}"#,
            Row("condition context size limit exceeded"),
        ),
        // What a row holds can't pass for another line.
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"Invalid tuple 'document:1#viewer@user:z (condition in_office)'. Reason: parameter type error on condition 'in_office' - failed to convert context parameter 'floor': expected a int64 value, but found invalid string value 'invalid WriteRequest.StoreId: x'"}"#,
            Row("parameter type error"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"invalid TupleKey.Object: value does not match regex pattern \"^[^\\\\s]{2,256}$\""}"#,
            Row("invalid TupleKey.Object"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"validation_error","message":"invalid TupleKeyWithoutCondition.Object: value does not match regex pattern \"^[^\\\\s]{2,256}$\""}"#,
            Row("invalid TupleKeyWithoutCondition.Object"),
        ),
        (
            "not valid",
            400,
            r#"{"code":"type_not_found","message":"type 'planet' not found"}"#,
            Row("type 'planet' not found"),
        ),
        (
            "key twice",
            400,
            r#"{"code":"cannot_allow_duplicate_tuples_in_one_request","message":"duplicate tuple in write: user: 'user:z', relation: 'viewer', object: 'document:1'"}"#,
            Row("duplicate tuple in write"),
        ),
        (
            "too many keys",
            400,
            r#"{"code":"exceeded_entity_limit","message":"The number of write operations exceeds the allowed limit of 10"}"#,
            Keys(10),
        ),
        ("too many keys", 400, r#"{"code":"exceeded_entity_limit","message":"Too many."}"#, Bytes),
        (
            "too many bytes",
            500,
            r#"{"code":"resource_exhausted","message":"grpc: received message larger than max (641482 vs. 616448)"}"#,
            Bytes,
        ),
        (
            "too many bytes",
            429,
            r#"{"code":"resource_exhausted","message":"grpc: received message larger than max (641482 vs. 616448)"}"#,
            Bytes,
        ),
        ("too many bytes for a proxy", 413, "<html><h1>413 Request Entity Too Large</h1></html>", Bytes),
        (
            "race",
            409,
            r#"{"code":"Aborted","message":"transactional write failed due to conflict: one or more tuples to write were inserted by another transaction"}"#,
            Moment(Race, "inserted by another transaction"),
        ),
        (
            "race",
            409,
            r#"{"code":"Aborted","message":"transactional write failed due to conflict: one or more tuples to delete were deleted by another transaction"}"#,
            Moment(Race, "deleted by another transaction"),
        ),
        (
            "client went away",
            400,
            r#"{"code":"cancelled","message":"Request Cancelled"}"#,
            Moment(Failure, "Request Cancelled"),
        ),
        (
            "server failed",
            500,
            r#"{"code":"resource_exhausted","message":"transaction was throttled by the datastore"}"#,
            Moment(Failure, "throttled by the datastore"),
        ),
        (
            "server failed",
            500,
            r#"{"code":"internal_error","message":"Internal Server Error"}"#,
            Moment(Failure, "Internal Server Error"),
        ),
        (
            "server failed",
            500,
            r#"{"code":"deadline_exceeded","message":"Request Deadline Exceeded"}"#,
            Moment(Failure, "Request Deadline Exceeded"),
        ),
        (
            "server failed",
            500,
            r#"{"code":"deadline_exceeded","message":"context deadline exceeded"}"#,
            Moment(Failure, "context deadline exceeded"),
        ),
        ("timed out", 408, "", Moment(Failure, "HTTP 408: no body")),
        (
            "no such model",
            400,
            r#"{"code":"authorization_model_not_found","message":"Authorization Model '01J9W3S5F0Q1G4Z6V8X2Y7B5NC' not found"}"#,
            Target(Misconfigured, "not found"),
        ),
        (
            "no such model",
            400,
            r#"{"code":"latest_authorization_model_not_found","message":"No authorization models found for store '01J9W3S5F0Q1G4Z6V8X2Y7B5NC'"}"#,
            Target(Misconfigured, "No authorization models found"),
        ),
        (
            "store id of another length",
            400,
            r#"{"code":"store_id_invalid_length","message":"Invalid store ID"}"#,
            Target(Misconfigured, "Invalid store ID"),
        ),
        (
            "not authorised",
            401,
            r#"{"code":"forbidden","message":"the principal is not authorized to perform the action"}"#,
            Target(Misconfigured, "the principal is not authorized"),
        ),
        (
            "not authorised",
            403,
            r#"{"code":"forbidden","message":"the principal is not authorized to perform the action"}"#,
            Target(Misconfigured, "the principal is not authorized"),
        ),
        ("not authorised", 403, "<html>Forbidden</html>", Target(Misconfigured, "HTTP 403: <html>Forbidden</html>")),
        (
            "not authenticated",
            401,
            r#"{"code":"bearer_token_missing","message":"missing bearer token"}"#,
            Target(Unauthenticated, "missing bearer token"),
        ),
        (
            "not authenticated",
            401,
            r#"{"code":"unauthenticated","message":"unauthenticated"}"#,
            Target(Unauthenticated, "unauthenticated"),
        ),
        (
            "not authenticated",
            401,
            r#"{"code":"invalid_claims","message":"invalid claims"}"#,
            Target(Unauthenticated, "invalid claims"),
        ),
        ("not authenticated", 401, "", Target(Unauthenticated, "HTTP 401: no body")),
        (
            "no such store or path",
            404,
            r#"{"code":"store_id_not_found","message":"Store ID not found"}"#,
            Target(Misconfigured, "Store ID not found"),
        ),
        (
            "no such store or path",
            404,
            r#"{"code":"undefined_endpoint","message":"Not Found"}"#,
            Target(Misconfigured, "Not Found"),
        ),
        (
            "no such store or path",
            404,
            r#"{"code":"unimplemented","message":"Method Not Allowed"}"#,
            Target(Misconfigured, "Method Not Allowed"),
        ),
        ("no such store or path", 405, "", Target(Misconfigured, "HTTP 405: no body")),
        ("redirect", 301, "", Target(Misconfigured, "HTTP 301: redirects are not followed")),
        ("redirect", 308, "<html>Moved</html>", Target(Misconfigured, "HTTP 308: redirects are not followed")),
        (
            "rate limit",
            429,
            r#"{"code":"rate_limit_exceeded","message":"Rate Limit exceeded"}"#,
            Target(Overloaded, "Rate Limit exceeded"),
        ),
        ("rate limit", 429, "", Target(Overloaded, "HTTP 429: no body")),
        (
            "backend down",
            500,
            r#"{"code":"unavailable","message":"Service Unavailable"}"#,
            Target(Unreachable, "Service Unavailable"),
        ),
        ("backend down", 502, "<html>Bad Gateway</html>", Target(Unreachable, "HTTP 502: <html>Bad Gateway</html>")),
        ("backend down", 503, "upstream connect error", Target(Unreachable, "HTTP 503: upstream connect error")),
        ("backend down", 504, "", Target(Unreachable, "HTTP 504: no body")),
        ("unforeseen", 200, "", Moment(Unforeseen, "HTTP 200: no body")),
        ("unforeseen", 200, "<html>Please log in</html>", Moment(Unforeseen, "HTTP 200: <html>Please log in</html>")),
        ("unforeseen", 200, "[]", Moment(Unforeseen, "HTTP 200: []")),
        ("unforeseen", 200, "{", Moment(Unforeseen, "HTTP 200: {")),
        ("unforeseen", 200, r#"{"code":"internal_error","message":"x"}"#, Moment(Unforeseen, "x")),
        ("unforeseen", 204, "", Moment(Unforeseen, "HTTP 204: no body")),
        ("unforeseen", 400, "", Moment(Unforeseen, "HTTP 400: no body")),
        ("unforeseen", 400, r#"{"code":"brand_new","message":"Something"}"#, Moment(Unforeseen, "Something")),
        ("unforeseen", 400, r#"{"code":"brand_new"}"#, Moment(Unforeseen, "HTTP 400: brand_new")),
        ("unforeseen", 400, r#"{"code":"validation_error","mess"#, Moment(Unforeseen, "HTTP 400: {")),
        ("unforeseen", 418, "\u{fffd}", Moment(Unforeseen, "HTTP 418")),
        ("unforeseen", 500, "<html>nginx</html>", Moment(Unforeseen, "HTTP 500: <html>nginx</html>")),
        ("unforeseen", 500, r#"{"code":5,"message":"x"}"#, Moment(Unforeseen, "HTTP 500: {")),
    ];

    #[test]
    fn every_line_of_the_table_has_an_answer_that_it_judges_rightly() {
        let mut seen = BTreeSet::new();
        for (line, status, body, about) in RECORDED {
            let answer = Answer { status: *status, retry_after: None, body: body.as_bytes() };
            let (found, verdict) = look_up(&answer);
            assert_eq!(found, *line, "{status} {body} gave {verdict:?}");
            assert!(about.matches(&verdict), "{line}: {status} {body} gave {verdict:?}");
            seen.insert(found);
        }
        let lines: BTreeSet<&str> = LINES.iter().copied().collect();
        assert_eq!(lines.len(), LINES.len(), "two lines share a name");
        assert_eq!(seen, lines, "a line has no recorded answer");
    }

    #[test]
    fn retry_after_is_read_as_seconds_or_a_date_and_only_so_far_believed() {
        let asked = |text: &str| {
            let answer = Answer { status: 429, retry_after: Some(text), body: b"" };
            match verdict(&answer) {
                Verdict::Target(Fault { retry_after, kind: Overloaded, .. }) => retry_after,
                verdict => panic!("{text:?} gave {verdict:?}"),
            }
        };
        let minute = Duration::from_secs(60);
        assert_eq!(asked("60"), Some(minute));
        assert_eq!(asked(" 0 "), Some(Duration::ZERO));
        assert_eq!(asked("86400"), Some(Duration::from_secs(1_800)));
        let date = asked(&httpdate::fmt_http_date(SystemTime::now() + minute)).unwrap();
        assert!(date <= minute && date > minute / 2, "{date:?}");
        assert_eq!(asked("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        assert_eq!(asked("Fri, 31 Dec 9999 23:59:59 GMT"), Some(Duration::from_secs(1_800)));
        for nonsense in ["", "soon", "-5", "1.5", "99999999999999999999999", "é"] {
            assert_eq!(asked(nonsense), None, "{nonsense}");
        }
        let answer = Answer { status: 503, retry_after: Some("60"), body: b"" };
        assert!(matches!(verdict(&answer), Verdict::Target(Fault { retry_after: Some(after), .. }) if after == minute));
    }

    #[test]
    fn a_tuple_is_found_in_every_form_of_message() {
        let key = TupleKey::new("user:o'neill,@é", "viewer", "document:1").unwrap();
        for message in [
            "Invalid tuple 'document:1#viewer@user:o'neill,@é'. Reason: type 'document' not found",
            "Invalid tuple 'document:1#viewer@user:o'neill,@é (condition nope)'. Reason: undefined condition",
            "cannot write a tuple which already exists: user: 'user:o'neill,@é', relation: 'viewer', object: 'document:1': tuple to be written already existed or the tuple to be deleted did not exist",
            "duplicate tuple in write: user: 'user:o'neill,@é', relation: 'viewer', object: 'document:1'",
        ] {
            assert!(names(message, &key), "{message}");
            for (user, relation, object) in [
                ("user:o'neill,@", "viewer", "document:1"),
                ("user:o'neill,@éé", "viewer", "document:1"),
                ("user:o'neill,@é'", "viewer", "document:1"),
                ("user:o'neill,@é", "view", "document:1"),
                ("user:o'neill,@é", "viewer", "document:"),
                ("user:o'neill,@é", "viewer", "document:11"),
            ] {
                let other = TupleKey::new(user, relation, object).unwrap();
                assert!(!names(message, &other), "{other}: {message}");
            }
        }
    }

    #[test]
    fn an_id_that_ends_where_another_one_has_a_quote_is_not_named() {
        let named = "user: 'user:a'b', relation: 'viewer', object: 'document:1'2'";
        let key = |user, object| TupleKey::new(user, "viewer", object).unwrap();
        for message in [format!("duplicate tuple in write: {named}"), format!("duplicate tuple in write: {named}: why")]
        {
            assert!(names(&message, &key("user:a'b", "document:1'2")));
            assert!(!names(&message, &key("user:a'b", "document:1")));
            assert!(!names(&message, &key("user:a", "document:1'2")));
        }
    }

    /// What ids are made of, with all that stands around them in messages; without these characters, nor white space.
    fn text(without: &'static [char]) -> impl Strategy<Value = String> {
        let around = vec![
            "',relation:'",
            "',object:'",
            "user:'",
            "'.Reason:",
            "(condition",
            ")'",
            "':",
            "''",
            "\u{a0}",
            "Invalidtuple'",
            "é",
        ];
        let piece = prop_oneof![
            4 => "[a-c'#@:,.()]{1,2}",
            1 => any::<char>().prop_map(String::from),
            1 => prop::sample::select(around).prop_map(str::to_owned),
        ];
        prop::collection::vec(piece, 1..4).prop_map(|pieces| {
            let forbidden = |c: char| without.contains(&c) || c.is_ascii_whitespace() || c == '\0';
            let text = pieces.concat().replace(forbidden, "");
            if text.is_empty() { "x".to_owned() } else { text }
        })
    }

    const IN_USER: &[char] = &[':', '#', '*'];
    const IN_RELATION: &[char] = &[':', '#', '@'];

    fn key() -> impl Strategy<Value = TupleKey> {
        let user = prop_oneof![
            text(IN_USER),
            text(IN_USER).prop_map(|id| format!("user:{id}")),
            (text(IN_USER), text(IN_USER)).prop_map(|(id, relation)| format!("group:{id}#{relation}")),
        ];
        let object = prop_oneof![
            text(&[]).prop_map(|object| format!("{object}x")),
            text(&[':', '#']).prop_map(|id| format!("document:{id}"))
        ];
        (user, text(IN_RELATION), object)
            .prop_map(|(user, relation, object)| TupleKey::new(user, relation, object).expect("made to be valid"))
    }

    /// A key, and another that looks much the same: parts of both, or with something put in front or behind.
    fn two_keys() -> impl Strategy<Value = (TupleKey, TupleKey)> {
        let more = prop_oneof![1 => Just(String::new()), 4 => text(&[':', '#', '@', '*'])];
        let from_other = [prop::bool::weighted(0.15), prop::bool::weighted(0.15), prop::bool::weighted(0.15)];
        let parts = (from_other, more, 0..3usize, any::<bool>(), any::<bool>());
        (key(), key(), parts).prop_filter_map(
            "not valid",
            |(one, other, (from_other, more, place, behind, swapped))| {
                let mut parts = [
                    if from_other[0] { other.user() } else { one.user() }.to_owned(),
                    if from_other[1] { other.relation() } else { one.relation() }.to_owned(),
                    if from_other[2] { other.object() } else { one.object() }.to_owned(),
                ];
                let part = &mut parts[place];
                *part = if behind { format!("{part}{more}") } else { format!("{more}{part}") };
                let [user, relation, object] = parts;
                let other = TupleKey::new(user, relation, object).ok()?;
                Some(if swapped { (other, one) } else { (one, other) })
            },
        )
    }

    fn short(key: &TupleKey) -> String {
        format!("{}#{}@{}", key.object(), key.relation(), key.user())
    }

    fn long(key: &TupleKey) -> String {
        format!("user: '{}', relation: '{}', object: '{}'", key.user(), key.relation(), key.object())
    }

    /// As OpenFGA renders them. `cause` is what may hold anything.
    fn message(key: &TupleKey, form: usize, cause: &str) -> String {
        match form {
            0 => format!("Invalid tuple '{}'. Reason: {cause}", short(key)),
            1 => format!("Invalid tuple '{} (condition {})'. Reason: {cause}", short(key), "in_office"),
            2 => format!(
                "cannot write a tuple which already exists: {}: tuple to be written already existed or the tuple to be \
                 deleted did not exist",
                long(key)
            ),
            3 => format!(
                "cannot delete a tuple which does not exist: {}: tuple to be written already existed or the tuple to \
                 be deleted did not exist",
                long(key)
            ),
            4 => format!("{OTHER_CONDITION}: {}", long(key)),
            _ => format!("duplicate tuple in write: {}", long(key)),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn the_named_tuple_is_found_and_no_other_one((one, other) in two_keys(), form in 0..6usize, cause in any::<String>()) {
            // A cause may even quote another tuple.
            let cause = if cause.len() % 2 == 0 { cause } else { format!("{cause}{}", long(&other)) };
            let message = message(&one, form, &cause);
            prop_assert!(names(&message, &one));
            if one != other && names(&message, &other) {
                // Only two that are written alike, and then neither is the only one.
                prop_assert!(form < 2 && short(&one) == short(&other), "{message} is taken to name {other}");
            }
        }

        #[test]
        fn no_message_whatever_makes_it_panic(
            key in key(), before in any::<String>(), at in any::<prop::sample::Index>(), form in 0..6usize,
        ) {
            names(&before, &key);
            let whole: Vec<char> = message(&key, form, &before).chars().collect();
            let cut: String = whole[..at.index(whole.len())].iter().collect();
            names(&cut, &key);
            names(&format!("Invalid tuple '{before}"), &key);
            names(&format!("{before}user: '{before}"), &key);
        }

        #[test]
        fn no_answer_whatever_makes_it_panic(
            status in 100..600u16, retry_after in any::<Option<String>>(), body in any::<Vec<u8>>(),
            code in "[a-z_]{0,30}", message in any::<String>(),
        ) {
            let retry_after = retry_after.as_deref();
            verdict(&Answer { status, retry_after, body: &body });
            let body = serde_json::json!({"code": code, "message": message}).to_string();
            verdict(&Answer { status, retry_after, body: body.as_bytes() });
        }
    }
}
