//! Which rows of a lease have to wait for rows that somebody else has, so that the last intent wins.
//!
//! Two rows contradict each other where one writes a key and the other deletes it, or both write it under different
//! conditions; the one with the higher `id` wins, so it must reach OpenFGA last. Equal intents need no order.

use std::collections::{HashMap, HashSet};

use crate::delivery::plan::{Row, State};
use crate::tuple::{Intent, TupleKey};

/// The ids of the rows that can't be sent yet, because an earlier row contradicts them that is not delivered and is not
/// in this lease, or is but has to wait itself. `ahead` are those earlier ones; rows are in the order of their ids.
pub(crate) fn blocked(rows: &[Row], ahead: &[(i64, Intent)]) -> HashSet<i64> {
    let mut undecided: HashMap<&TupleKey, Vec<(i64, State)>> = HashMap::new();
    for (id, intent) in ahead {
        claims(intent).for_each(|(key, to)| undecided.entry(key).or_default().push((*id, to)));
    }
    let mut blocked = HashSet::new();
    for row in rows {
        let Ok(intent) = &row.intent else { continue };
        let waits = claims(intent).any(|(key, to)| {
            undecided.get(key).is_some_and(|earlier| earlier.iter().any(|(id, other)| *id < row.id && *other != to))
        });
        if waits {
            blocked.insert(row.id);
            claims(intent).for_each(|(key, to)| undecided.entry(key).or_default().push((row.id, to)));
        }
    }
    blocked
}

/// The ids of the rows whose tuples may be undone by a request that outlived its sender: those that decide a key (the
/// last of `rows` to claim it) which an earlier row wanted otherwise that may have been sent before by somebody who did
/// not live to record it, be it one of `rows` (`doubtful`) or `delivered` a moment ago.
pub(crate) fn in_doubt(rows: &[(i64, Intent)], doubtful: &HashSet<i64>, delivered: &[(i64, Intent)]) -> HashSet<i64> {
    let mut sent: HashMap<&TupleKey, Vec<(i64, State)>> = HashMap::new();
    for (id, intent) in rows.iter().filter(|(id, _)| doubtful.contains(id)).chain(delivered) {
        claims(intent).for_each(|(key, to)| sent.entry(key).or_default().push((*id, to)));
    }
    let mut last: HashMap<&TupleKey, (i64, State)> = HashMap::new();
    for (id, intent) in rows {
        claims(intent).for_each(|(key, to)| drop(last.insert(key, (*id, to))));
    }
    let in_doubt = last.into_iter().filter(|(key, (id, to))| {
        sent.get(*key).is_some_and(|earlier| earlier.iter().any(|(other, was)| other < id && was != to))
    });
    in_doubt.map(|(_, (id, _))| id).collect()
}

/// What later rows have made of a row that was refused and came back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// A later row that contradicts it is not delivered yet: it has to wait for that one's end.
    Waits,
    /// These keys of it were overruled by rows that are delivered; the others are still to be sent.
    Overruled(Vec<TupleKey>),
}

/// `later` are the later rows that are not refused, in the order of their ids, each with whether it is delivered.
pub(crate) fn on_return(row: i64, intent: &Intent, later: &[(i64, Intent, bool)]) -> Return {
    let ours: HashMap<&TupleKey, State> = claims(intent).collect();
    let mut last: HashMap<&TupleKey, State> = HashMap::new();
    for (_, other, delivered) in later.iter().filter(|(id, ..)| *id > row) {
        for (key, to) in claims(other) {
            match ours.get(key) {
                Some(own) if *own != to && !delivered => return Return::Waits,
                Some(_) => drop(last.insert(key, to)),
                None => {}
            }
        }
    }
    let overruled = ours.iter().filter(|(key, to)| last.get(*key).is_some_and(|last| last != *to));
    let mut overruled: Vec<TupleKey> = overruled.map(|(key, _)| (*key).clone()).collect();
    overruled.sort_unstable();
    Return::Overruled(overruled)
}

/// Whether these two rows contradict each other.
pub(crate) fn contradict(a: &Intent, b: &Intent) -> bool {
    let ours: HashMap<&TupleKey, State> = claims(a).collect();
    claims(b).any(|(key, to)| ours.get(key).is_some_and(|other| *other != to))
}

/// What each key of an intent is to become. One that it deletes and writes ends written.
fn claims(intent: &Intent) -> impl Iterator<Item = (&TupleKey, State)> {
    let writes = intent.writes().iter().map(|tuple| (tuple.key(), State::Present(tuple.condition().cloned())));
    let deletes = intent.deletes().iter().filter(|key| intent.writes().iter().all(|tuple| tuple.key() != *key));
    writes.chain(deletes.map(|key| (key, State::Absent)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuple::{Condition, Tuple};

    fn key(name: &str) -> TupleKey {
        TupleKey::new(format!("user:{name}"), "viewer", "document:1").unwrap()
    }

    fn write(name: &str) -> Intent {
        Intent::write(key(name).try_into().unwrap())
    }

    fn delete(name: &str) -> Intent {
        Intent::delete(key(name))
    }

    fn both(written: &str, deleted: &str) -> Intent {
        Intent::new(vec![Tuple::try_from(key(written)).unwrap()], vec![key(deleted)]).unwrap()
    }

    fn waiting(rows: Vec<(i64, Intent)>, ahead: &[(i64, Intent)]) -> Vec<i64> {
        let rows: Vec<Row> = rows.into_iter().map(|(id, intent)| Row { id, attempts: 0, intent: Ok(intent) }).collect();
        let mut waiting: Vec<i64> = blocked(&rows, ahead).into_iter().collect();
        waiting.sort_unstable();
        waiting
    }

    #[test]
    fn a_row_waits_for_an_earlier_one_that_contradicts_it_and_for_no_other() {
        let ahead = [(5, write("anne"))];
        assert_eq!(waiting(vec![(9, delete("anne"))], &ahead), [9]);
        assert_eq!(waiting(vec![(9, write("anne"))], &ahead), [0; 0]);
        assert_eq!(waiting(vec![(9, delete("bob"))], &ahead), [0; 0]);
        assert_eq!(waiting(vec![(3, delete("anne"))], &ahead), [0; 0], "the later one waits, not the earlier");
    }

    #[test]
    fn what_contradicts_a_row_that_waits_waits_too() {
        let ahead = [(1, write("anne"))];
        // 4 does not contradict the row ahead, but 2, which waits.
        let rows = vec![(2, delete("anne")), (3, write("bob")), (4, write("anne"))];
        assert_eq!(waiting(rows, &ahead), [2, 4]);
        // 3 shares no key with the row ahead, but with 2, which waits as a whole.
        assert_eq!(waiting(vec![(2, both("bob", "anne")), (3, delete("bob"))], &ahead), [2, 3]);
    }

    #[test]
    fn a_row_is_in_doubt_while_what_it_contradicts_may_still_arrive() {
        let doubted = |list: &[(i64, Intent)], doubtful: &[i64], delivered: &[(i64, Intent)]| {
            let mut ids: Vec<i64> =
                in_doubt(list, &doubtful.iter().copied().collect(), delivered).into_iter().collect();
            ids.sort_unstable();
            ids
        };
        let pair = [(1, write("anne")), (2, delete("anne")), (3, write("bob"))];
        assert_eq!(doubted(&pair, &[], &[]), [0; 0], "never leased before");
        assert_eq!(doubted(&pair, &[1], &[]), [2]);
        assert_eq!(doubted(&pair, &[2, 3], &[]), [0; 0], "only what came earlier");
        let thrice = [(1, write("anne")), (2, delete("anne")), (3, write("anne")), (4, delete("anne"))];
        assert_eq!(doubted(&thrice, &[1, 2, 3], &[]), [4], "only what decides");
        assert_eq!(doubted(&[(5, delete("anne"))], &[], &[(1, write("anne"))]), [5]);
        assert_eq!(doubted(&[(5, write("anne"))], &[], &[(1, write("anne"))]), [0; 0]);
    }

    #[test]
    fn a_row_that_comes_back_gives_way_to_what_was_delivered_meanwhile() {
        let overruled = |names: &[&str]| Return::Overruled(names.iter().map(|name| key(name)).collect());
        let grant = both("anne", "bob");
        assert_eq!(on_return(5, &grant, &[]), overruled(&[]));
        assert_eq!(on_return(5, &grant, &[(9, delete("anne"), true)]), overruled(&["anne"]));
        assert_eq!(on_return(5, &grant, &[(9, write("bob"), true)]), overruled(&["bob"]));
        // Revoked and granted again: it is as this row wants it.
        let again = [(7, delete("anne"), true), (9, write("anne"), true)];
        assert_eq!(on_return(5, &grant, &again), overruled(&[]));
        assert_eq!(on_return(5, &grant, &[(3, delete("anne"), true)]), overruled(&[]), "earlier rows don't matter");
        assert_eq!(on_return(5, &grant, &[(9, delete("anne"), false)]), Return::Waits);
        assert_eq!(on_return(5, &grant, &[(9, write("anne"), false)]), overruled(&[]));
    }

    #[test]
    fn another_condition_contradicts_and_a_key_deleted_and_written_is_written() {
        let in_office =
            Intent::write(Tuple::try_from(key("anne")).unwrap().with_condition(Condition::new("ok").unwrap()));
        assert!(contradict(&write("anne"), &in_office));
        assert!(!contradict(&in_office, &in_office));
        assert!(!contradict(&both("anne", "anne"), &write("anne")));
        assert!(contradict(&both("anne", "anne"), &delete("anne")));
    }
}
