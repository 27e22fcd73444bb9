//! Relationship tuples and a row's payload: what an application intends, parsed and checked before anything is sent.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The longest `user` that OpenFGA takes, in bytes.
pub const MAX_USER_BYTES: usize = 512;
/// The longest `relation` that OpenFGA takes, in characters.
pub const MAX_RELATION_CHARS: usize = 50;
/// The longest `object`, and the longest condition name, that OpenFGA takes, in characters.
pub const MAX_NAME_CHARS: usize = 256;

/// Why a tuple or a payload can't be sent: the field, as a path into the payload, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidIntent {
    /// Where the problem is, such as `writes[2].user`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl InvalidIntent {
    fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }

    /// The same problem, one level up in the payload.
    fn within(self, parent: &str) -> Self {
        Self { field: format!("{parent}.{}", self.field), ..self }
    }
}

/// Who has which relation to what: the identity of a tuple in OpenFGA, without its condition.
///
/// Holds only what every OpenFGA server takes: `user` of 1 to 512 bytes, `relation` of 1 to 50 characters without
/// `:`, `#`, `@` or white space, `object` of 2 to 256 characters without white space, and no U+0000 anywhere. Whether
/// the authorization model knows the types and the relation is for the server to say.
///
/// ```
/// use fga_outbox::TupleKey;
///
/// let key: TupleKey = "user:anne viewer document:1".parse()?;
/// assert_eq!(key, TupleKey::new("user:anne", "viewer", "document:1")?);
/// assert!(TupleKey::new("user:anne", "can view", "document:1").is_err());
/// # Ok::<_, fga_outbox::InvalidIntent>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct TupleKey {
    object: String,
    relation: String,
    user: String,
}

impl TupleKey {
    /// A key of three valid parts.
    ///
    /// # Errors
    /// [`InvalidIntent`] names the part that OpenFGA would refuse.
    pub fn new(
        user: impl Into<String>,
        relation: impl Into<String>,
        object: impl Into<String>,
    ) -> Result<Self, InvalidIntent> {
        let (user, relation, object) = (user.into(), relation.into(), object.into());
        check_user(&user)?;
        check_relation(&relation)?;
        check_object(&object)?;
        Ok(Self { object, relation, user })
    }

    /// The user, such as `user:anne`, `group:eng#member` or `user:*`.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The relation, such as `viewer`.
    pub fn relation(&self) -> &str {
        &self.relation
    }

    /// The object, such as `document:1`.
    pub fn object(&self) -> &str {
        &self.object
    }
}

/// `user relation object`, the form that [`FromStr`] reads.
impl fmt::Display for TupleKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.user, self.relation, self.object)
    }
}

impl FromStr for TupleKey {
    type Err = InvalidIntent;

    fn from_str(text: &str) -> Result<Self, InvalidIntent> {
        let parts: Vec<&str> = text.split_ascii_whitespace().collect();
        let [user, relation, object] = parts[..] else {
            return Err(InvalidIntent::new(
                "tuple",
                format!("expected 'user relation object', such as 'user:anne viewer document:1', got {text:?}"),
            ));
        };
        Self::new(user, relation, object)
    }
}

fn check_user(user: &str) -> Result<(), InvalidIntent> {
    let invalid = |problem: String| Err(InvalidIntent::new("user", problem));
    if user.is_empty() || user.len() > MAX_USER_BYTES {
        return invalid(format!("expected 1 to {MAX_USER_BYTES} bytes, got {}", user.len()));
    }
    check_characters("user", user)?;
    let well_formed = match user.split_once('#') {
        Some((object, relation)) => {
            is_object(object) && !relation.is_empty() && !relation.contains(['#', ':', '*']) && !object.contains('*')
        }
        None => is_object(user) || !user.contains(':'),
    };
    if well_formed {
        Ok(())
    } else {
        invalid(format!("expected 'type:id', 'type:id#relation' or 'type:*', got {user:?}"))
    }
}

fn check_relation(relation: &str) -> Result<(), InvalidIntent> {
    check_length("relation", relation, 1, MAX_RELATION_CHARS)?;
    check_characters("relation", relation)?;
    if relation.contains([':', '#', '@']) {
        return Err(InvalidIntent::new("relation", format!("must not contain ':', '#' or '@', got {relation:?}")));
    }
    Ok(())
}

fn check_object(object: &str) -> Result<(), InvalidIntent> {
    check_length("object", object, 2, MAX_NAME_CHARS)?;
    check_characters("object", object)
}

fn check_length(field: &str, text: &str, min: usize, max: usize) -> Result<(), InvalidIntent> {
    // OpenFGA's patterns count characters, not bytes.
    let chars = text.chars().count();
    if (min..=max).contains(&chars) {
        Ok(())
    } else {
        Err(InvalidIntent::new(field, format!("expected {min} to {max} characters, got {chars}")))
    }
}

/// White space as Go's `\s` has it, and U+0000, which Postgres-backed servers can't store. Other control characters
/// are left to the server, whose versions differ.
fn check_characters(field: &str, text: &str) -> Result<(), InvalidIntent> {
    match text.chars().find(|c| c.is_ascii_whitespace() || *c == '\0') {
        None => Ok(()),
        Some('\0') => Err(InvalidIntent::new(field, "must not contain U+0000")),
        Some(_) => Err(InvalidIntent::new(field, format!("must not contain white space, got {text:?}"))),
    }
}

/// `type:id`, with one colon and without `#`.
fn is_object(text: &str) -> bool {
    text.split_once(':')
        .is_some_and(|(kind, id)| !kind.is_empty() && !id.is_empty() && !kind.contains('#') && !id.contains([':', '#']))
}

/// The condition of a tuple: the name of one in the authorization model, and the part of its context that is stored.
///
/// Two conditions are equal where they mean the same to OpenFGA: without a context is the same as with `{}`, and
/// numbers compare as doubles, which is how OpenFGA keeps them.
#[derive(Debug, Clone, Serialize)]
pub struct Condition {
    name: String,
    #[serde(skip_serializing_if = "Map::is_empty")]
    context: Map<String, Value>,
}

impl Condition {
    /// A condition by its name, with an empty context.
    ///
    /// # Errors
    /// [`InvalidIntent`] where the name is not 2 to 256 characters without white space.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidIntent> {
        let name = name.into();
        check_length("name", &name, 2, MAX_NAME_CHARS)?;
        check_characters("name", &name)?;
        Ok(Self { name, context: Map::new() })
    }

    /// The same condition with this context stored on the tuple. OpenFGA takes up to 32,768 bytes of it in its
    /// protobuf form.
    ///
    /// # Errors
    /// [`InvalidIntent`] where a string in it contains U+0000, which OpenFGA on Postgres can't store.
    pub fn with_context(self, context: Map<String, Value>) -> Result<Self, InvalidIntent> {
        match context.iter().any(|(name, value)| name.contains('\0') || contains_nul(value)) {
            true => Err(InvalidIntent::new("context", "must not contain U+0000")),
            false => Ok(Self { context, ..self }),
        }
    }

    /// Its name in the authorization model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The stored part of its context; empty where there is none.
    pub fn context(&self) -> &Map<String, Value> {
        &self.context
    }
}

impl PartialEq for Condition {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && same_object(&self.context, &other.context)
    }
}

impl Eq for Condition {}

fn contains_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(contains_nul),
        Value::Object(members) => members.iter().any(|(name, value)| name.contains('\0') || contains_nul(value)),
        _ => false,
    }
}

fn same_object(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    a.len() == b.len() && a.iter().all(|(name, value)| b.get(name).is_some_and(|other| same_value(value, other)))
}

fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b)),
        (Value::Object(a), Value::Object(b)) => same_object(a, b),
        _ => a == b,
    }
}

/// A tuple to write: a key, and a condition where the relation asks for one.
///
/// ```
/// use fga_outbox::{Condition, Tuple};
///
/// let tuple = Tuple::new("user:anne", "viewer", "document:1")?.with_condition(Condition::new("in_office")?);
/// assert_eq!(tuple.key().object(), "document:1");
/// # Ok::<_, fga_outbox::InvalidIntent>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tuple {
    #[serde(flatten)]
    key: TupleKey,
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<Condition>,
}

impl Tuple {
    /// A tuple without a condition.
    ///
    /// # Errors
    /// As [`TupleKey::new`]; besides, what is written needs an `object` of the form `type:id`.
    pub fn new(
        user: impl Into<String>,
        relation: impl Into<String>,
        object: impl Into<String>,
    ) -> Result<Self, InvalidIntent> {
        TupleKey::new(user, relation, object)?.try_into()
    }

    /// The same tuple under this condition.
    pub fn with_condition(self, condition: Condition) -> Self {
        Self { condition: Some(condition), ..self }
    }

    /// Its identity.
    pub fn key(&self) -> &TupleKey {
        &self.key
    }

    /// Its condition, if any.
    pub fn condition(&self) -> Option<&Condition> {
        self.condition.as_ref()
    }

    pub(crate) fn into_parts(self) -> (TupleKey, Option<Condition>) {
        (self.key, self.condition)
    }
}

impl TryFrom<TupleKey> for Tuple {
    type Error = InvalidIntent;

    fn try_from(key: TupleKey) -> Result<Self, InvalidIntent> {
        if is_object(&key.object) {
            Ok(Self { key, condition: None })
        } else {
            Err(InvalidIntent::new("object", format!("expected 'type:id', got {:?}", key.object)))
        }
    }
}

impl FromStr for Tuple {
    type Err = InvalidIntent;

    fn from_str(text: &str) -> Result<Self, InvalidIntent> {
        text.parse::<TupleKey>()?.try_into()
    }
}

/// What a row of `fga_outbox` asks for: tuples to write and tuples to delete, which take effect together.
///
/// At least one tuple; no key twice among the writes or among the deletes. A key in both is deleted, then written.
/// Its JSON form is the row's `payload`.
///
/// ```
/// use fga_outbox::{Intent, Tuple, TupleKey};
///
/// let intent = Intent::new(
///     vec![Tuple::new("user:anne", "viewer", "document:1")?],
///     vec![TupleKey::new("user:bob", "viewer", "document:1")?],
/// )?;
/// let payload = r#"{"writes":[{"object":"document:1","relation":"viewer","user":"user:anne"}],
///                   "deletes":[{"object":"document:1","relation":"viewer","user":"user:bob"}]}"#;
/// assert_eq!(Intent::from_json(payload)?, intent);
/// # Ok::<_, fga_outbox::InvalidIntent>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Intent {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    writes: Vec<Tuple>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deletes: Vec<TupleKey>,
}

impl Intent {
    /// An intent of these tuples.
    ///
    /// # Errors
    /// [`InvalidIntent`] where there is no tuple at all, or a key stands twice among the writes or the deletes.
    pub fn new(writes: Vec<Tuple>, deletes: Vec<TupleKey>) -> Result<Self, InvalidIntent> {
        if writes.is_empty() && deletes.is_empty() {
            return Err(InvalidIntent::new("payload", "has no tuples: expected some in 'writes' or 'deletes'"));
        }
        check_repeats("writes", writes.iter().map(Tuple::key))?;
        check_repeats("deletes", deletes.iter())?;
        Ok(Self { writes, deletes })
    }

    /// An intent that writes one tuple.
    pub fn write(tuple: Tuple) -> Self {
        Self { writes: vec![tuple], deletes: Vec::new() }
    }

    /// An intent that deletes one tuple.
    pub fn delete(key: TupleKey) -> Self {
        Self { writes: Vec::new(), deletes: vec![key] }
    }

    /// Reads a row's payload. Members that OpenFGA would ignore are refused: a misspelt `condition` would grant
    /// unconditionally, a misspelt `deletes` would revoke nothing.
    ///
    /// # Errors
    /// [`InvalidIntent`] names the field, such as `writes[0].user`.
    pub fn from_json(payload: &str) -> Result<Self, InvalidIntent> {
        let Object(raw): Object<RawPayload> = serde_json::from_str(payload).or_else(|_| explain(payload))?;
        let writes = raw.writes.unwrap_or_default().into_iter().enumerate();
        let writes =
            writes.map(|(at, Object(raw))| raw.check().map_err(|error| error.within(&format!("writes[{at}]"))));
        let deletes = raw.deletes.unwrap_or_default().into_iter().enumerate();
        let deletes =
            deletes.map(|(at, Object(raw))| raw.check().map_err(|error| error.within(&format!("deletes[{at}]"))));
        Self::new(writes.collect::<Result<_, _>>()?, deletes.collect::<Result<_, _>>()?)
    }

    /// The row's payload.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("strings, maps and JSON values always serialise")
    }

    /// The tuples to write.
    pub fn writes(&self) -> &[Tuple] {
        &self.writes
    }

    /// The tuples to delete.
    pub fn deletes(&self) -> &[TupleKey] {
        &self.deletes
    }

    /// The keys of all its tuples; one that it deletes and writes comes twice.
    pub fn keys(&self) -> impl Iterator<Item = &TupleKey> {
        self.writes.iter().map(Tuple::key).chain(&self.deletes)
    }

    /// What is left of it without these keys, if anything.
    pub(crate) fn without(&self, keys: &[TupleKey]) -> Option<Self> {
        let writes: Vec<_> = self.writes.iter().filter(|tuple| !keys.contains(tuple.key())).cloned().collect();
        let deletes: Vec<_> = self.deletes.iter().filter(|key| !keys.contains(key)).cloned().collect();
        (!writes.is_empty() || !deletes.is_empty()).then_some(Self { writes, deletes })
    }

    pub(crate) fn into_parts(self) -> (Vec<Tuple>, Vec<TupleKey>) {
        (self.writes, self.deletes)
    }
}

fn check_repeats<'a>(list: &str, keys: impl Iterator<Item = &'a TupleKey>) -> Result<(), InvalidIntent> {
    if keys.size_hint().1 == Some(1) {
        return Ok(());
    }
    let mut seen = HashMap::new();
    for (at, key) in keys.enumerate() {
        if let Some(first) = seen.insert(key, at) {
            return Err(InvalidIntent::new(format!("{list}[{at}]"), format!("repeats the tuple of {list}[{first}]")));
        }
    }
    Ok(())
}

/// A JSON object and nothing else: serde's derived types would also take their members in an array, by position.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyMap<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyMap<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_map(OnlyMap(PhantomData)).map(Object)
    }
}

/// Reads a payload once more that can't be read, now for the path of what is wrong with it.
fn explain(payload: &str) -> Result<Object<RawPayload>, InvalidIntent> {
    let mut json = serde_json::Deserializer::from_str(payload);
    let raw = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." || path.is_empty() { "payload".to_owned() } else { path };
        InvalidIntent::new(field, error.into_inner().to_string())
    })?;
    json.end().map_err(|error| InvalidIntent::new("payload", error.to_string()))?;
    Ok(raw)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPayload {
    writes: Option<Vec<Object<RawTuple>>>,
    deletes: Option<Vec<Object<RawKey>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTuple {
    user: String,
    relation: String,
    object: String,
    condition: Option<Object<RawCondition>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawKey {
    user: String,
    relation: String,
    object: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCondition {
    name: String,
    context: Option<Map<String, Value>>,
}

impl RawTuple {
    fn check(self) -> Result<Tuple, InvalidIntent> {
        let tuple = Tuple::new(self.user, self.relation, self.object)?;
        match self.condition {
            None => Ok(tuple),
            Some(Object(condition)) => {
                let condition = condition.check().map_err(|error| error.within("condition"))?;
                Ok(tuple.with_condition(condition))
            }
        }
    }
}

impl RawKey {
    fn check(self) -> Result<TupleKey, InvalidIntent> {
        TupleKey::new(self.user, self.relation, self.object)
    }
}

impl RawCondition {
    fn check(self) -> Result<Condition, InvalidIntent> {
        Condition::new(self.name)?.with_context(self.context.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bad_payload_names_the_field() {
        let cases = [
            ("{}", "payload: has no tuples: expected some in 'writes' or 'deletes'"),
            ("[]", "payload: invalid type: sequence, expected an object"),
            (r#"[[["u:a", "viewer", "d:1"]]]"#, "payload: invalid type: sequence, expected an object"),
            (r#"{"writes": [["u:a", "viewer", "d:1"]]}"#, "writes[0]: invalid type: sequence, expected an object"),
            (r#""x""#, "payload: invalid type: string"),
            ("null", "payload: invalid type: null"),
            (r#"{"writes": []}"#, "payload: has no tuples"),
            (r#"{"writes": {"tuple_keys": []}}"#, "writes: invalid type: map, expected a sequence"),
            (
                r#"{"writes": [{"user": 5, "relation": "viewer", "object": "d:1"}]}"#,
                "writes[0].user: invalid type: integer",
            ),
            (r#"{"writes": [{"user": "u:a", "object": "d:1"}]}"#, "writes[0]: missing field `relation`"),
            (r#"{"write": []}"#, "write: unknown field `write`"),
            (
                r#"{"writes": [{"user": "u:a", "relation": "viewer", "object": "d:1", "conditon": {}}]}"#,
                "writes[0].conditon: unknown field `conditon`",
            ),
            (
                r#"{"deletes": [{"user": "u:a", "relation": "viewer", "object": "d:1", "condition": {"name": "xx"}}]}"#,
                "deletes[0].condition: unknown field",
            ),
            (
                r#"{"writes": [{"user": "u:a b", "relation": "viewer", "object": "d:1"}]}"#,
                "writes[0].user: must not contain white space",
            ),
            (
                r#"{"writes": [{"user": "u:a", "relation": "viewer", "object": "d1"}]}"#,
                "writes[0].object: expected 'type:id'",
            ),
            (
                r#"{"writes": [{"user": "u:a", "relation": "viewer", "object": "d:1", "condition": {"name": "x"}}]}"#,
                "writes[0].condition.name: expected 2 to 256 characters, got 1",
            ),
            (
                r#"{"writes": [{"user": "u:a", "relation": "viewer", "object": "d:1", "condition": {"name": "xx", "context": []}}]}"#,
                "writes[0].condition.context: invalid type: sequence",
            ),
            (
                r#"{"writes": [{"user": "u:a", "relation": "r", "object": "d:1"}, {"user": "u:a", "relation": "r", "object": "d:1"}]}"#,
                "writes[1]: repeats the tuple of writes[0]",
            ),
            (
                r#"{"writes": [{"user": "u:a\u0000", "relation": "r", "object": "d:1"}]}"#,
                "writes[0].user: must not contain U+0000",
            ),
        ];
        for (payload, expected) in cases {
            let error = Intent::from_json(payload).expect_err(payload).to_string();
            assert!(error.starts_with(expected), "{payload}\n  gave     {error}\n  expected {expected}");
        }
    }

    #[test]
    fn a_user_has_one_of_the_forms_that_openfga_takes() {
        for user in ["anne", "*", "user:anne", "user:*", "group:eng#member", "user:o'neill,@é\u{200b}"] {
            assert!(TupleKey::new(user, "viewer", "d:1").is_ok(), "{user}");
        }
        for user in ["", "user:", ":anne", "a:b:c", "group:eng#", "group:eng#a#b", "group:*#member", "a b", "#x"] {
            assert!(TupleKey::new(user, "viewer", "d:1").is_err(), "{user}");
        }
        assert!(TupleKey::new(format!("u:{}", "é".repeat(255)), "viewer", "d:1").is_ok());
        assert!(TupleKey::new(format!("u:{}", "é".repeat(256)), "viewer", "d:1").is_err());
        assert!(TupleKey::new("u:a", "v".repeat(51), "d:1").is_err());
        assert!(TupleKey::new("u:a", "é".repeat(50), format!("d:{}", "é".repeat(254))).is_ok());
    }

    #[test]
    fn conditions_are_equal_where_they_mean_the_same() {
        let condition = |json: &str| serde_json::from_str::<RawCondition>(json).unwrap().check().unwrap();
        let plain = condition(r#"{"name": "in_office"}"#);
        assert_eq!(plain, condition(r#"{"name": "in_office", "context": {}}"#));
        assert_eq!(plain, condition(r#"{"name": "in_office", "context": null}"#));
        let one = condition(r#"{"name": "in_office", "context": {"floor": 1, "x": [{"y": 2}]}}"#);
        assert_eq!(one, condition(r#"{"name": "in_office", "context": {"x": [{"y": 2.0}], "floor": 1.0}}"#));
        assert_ne!(one, condition(r#"{"name": "in_office", "context": {"floor": 2, "x": [{"y": 2}]}}"#));
        assert_ne!(one, plain);
    }

    /// JSON that is near to a payload: its members' names and values, nested in any way.
    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<i32>().prop_map(|number| Value::from(f64::from(number) / 8.0)),
            ".{0,8}".prop_map(Value::from),
            prop::sample::select(vec!["user:anne", "viewer", "document:1", "in_office", "group:eng#member", "user:*"])
                .prop_map(Value::from),
        ];
        let names = vec!["writes", "deletes", "user", "relation", "object", "condition", "name", "context", "more"];
        leaf.prop_recursive(6, 40, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((prop::sample::select(names.clone()), inner), 0..5)
                    .prop_map(|members| members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
            ]
        })
    }

    /// A payload that is mostly valid, in keys and conditions of all kinds.
    fn payload() -> impl Strategy<Value = Value> {
        let key = ("(user|group):[a-c']{1,2}(#member)?|[*]|é", "viewer|owner", "document:[a-cé,]{1,2}|x{1,3}");
        let key = key.prop_map(
            |(user, relation, object)| serde_json::json!({"user": user, "relation": relation, "object": object}),
        );
        let context = prop::collection::vec(("[a-c]{1,2}|\0", json()), 0..3)
            .prop_map(|members| members.into_iter().collect::<Map<String, Value>>());
        let condition = ("in_office|x|xx", prop::option::of(context))
            .prop_map(|(name, context)| serde_json::json!({"name": name, "context": context}));
        let tuple = (key.clone(), prop::option::of(condition)).prop_map(|(mut key, condition)| {
            if let Some(condition) = condition {
                key["condition"] = condition;
            }
            key
        });
        (prop::collection::vec(tuple, 0..3), prop::collection::vec(key, 0..3))
            .prop_map(|(writes, deletes)| serde_json::json!({"writes": writes, "deletes": deletes}))
    }

    fn what_is_accepted_means_the_same_when_written_again(payload: &str) -> Result<bool, TestCaseError> {
        match Intent::from_json(payload) {
            Ok(intent) => {
                let again = Intent::from_json(&intent.to_json().to_string());
                prop_assert_eq!(again, Ok(intent), "{}", payload);
                Ok(true)
            }
            Err(invalid) => {
                prop_assert!(!invalid.problem.is_empty(), "{}: {:?}", payload, invalid);
                Ok(false)
            }
        }
    }

    #[test]
    fn payloads_that_are_accepted_mean_the_same_when_written_again() {
        let accepted = std::cell::Cell::new(0);
        let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(1_000) };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        runner
            .run(&payload(), |payload| {
                if what_is_accepted_means_the_same_when_written_again(&payload.to_string())? {
                    accepted.set(accepted.get() + 1);
                }
                Ok(())
            })
            .unwrap();
        let accepted = accepted.get();
        assert!(accepted > 150, "only {accepted} were valid: this proves little");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn no_json_whatever_makes_it_panic(json in json(), text in any::<String>()) {
            what_is_accepted_means_the_same_when_written_again(&json.to_string())?;
            what_is_accepted_means_the_same_when_written_again(&text)?;
        }

        #[test]
        fn no_damage_to_a_payload_makes_it_panic(
            payload in payload(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), 0..3u8, r#"[\[\]{}":,0-9eE.\\u-]|."#), 1..4),
        ) {
            let mut text: Vec<char> = payload.to_string().chars().collect();
            for (at, kind, put) in damage {
                let at = at.index(text.len());
                let removed = usize::from(kind != 0);
                let put: Vec<char> = if kind == 1 { Vec::new() } else { put.chars().collect() };
                text.splice(at..at + removed, put);
            }
            what_is_accepted_means_the_same_when_written_again(&text.into_iter().collect::<String>())?;
        }
    }
}
