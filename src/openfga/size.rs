//! How many bytes a tuple takes in a write request, as OpenFGA counts them: in protobuf.
//!
//! Source: the messages `TupleKey` and `RelationshipCondition` of OpenFGA's API, and `google.protobuf.Struct`.

use serde_json::{Map, Value};

use crate::tuple::{Condition, TupleKey};

/// The bytes that this tuple adds to a request.
pub(crate) fn of_tuple(key: &TupleKey, condition: Option<&Condition>) -> usize {
    let condition =
        condition.map_or(0, |condition| field(field(condition.name().len()) + field(of_struct(condition.context()))));
    field(field(key.user().len()) + field(key.relation().len()) + field(key.object().len()) + condition)
}

/// A length-delimited field: its tag, its length and its content.
fn field(content: usize) -> usize {
    1 + of_varint(content) + content
}

fn of_varint(value: usize) -> usize {
    (value.checked_ilog2().unwrap_or(0) as usize) / 7 + 1
}

fn of_struct(members: &Map<String, Value>) -> usize {
    members.iter().map(|(name, value)| field(field(name.len()) + field(of_value(value)))).sum()
}

fn of_value(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 2,
        Value::Number(_) => 9,
        Value::String(text) => field(text.len()),
        Value::Array(items) => field(items.iter().map(|item| field(of_value(item))).sum()),
        Value::Object(members) => field(of_struct(members)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuple_counts_as_it_does_on_the_wire() {
        let key = TupleKey::new("user:anne", "viewer", "document:1").unwrap();
        // Three strings with two bytes each around them, and the tuple's own two.
        assert_eq!(of_tuple(&key, None), 2 + (2 + 9) + (2 + 6) + (2 + 10));
        let context = serde_json::json!({"floor": 3, "ok": true}).as_object().unwrap().clone();
        let condition = Condition::new("in_office").unwrap().with_context(context).unwrap();
        // name: 2 + 9; floor: 2 + (2 + 5) + (2 + 9) = 20; ok: 2 + (2 + 2) + (2 + 2) = 10; context: 2 + 30
        assert_eq!(of_tuple(&key, Some(&condition)), 2 + 31 + (2 + (2 + 9) + (2 + 30)));
        assert_eq!([of_varint(0), of_varint(127), of_varint(128), of_varint(16_384)], [1, 1, 2, 3]);
    }
}
