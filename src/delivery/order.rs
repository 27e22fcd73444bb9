//! Which rows of a lease may be sent now, so that the last intent wins.
//!
//! Two rows contradict each other where one writes a key and the other deletes it, or both write it under different
//! conditions; the one with the higher `id` wins, so it must reach OpenFGA last. Equal intents need no order.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::delivery::footprints::Others;
use crate::delivery::plan::{Outcome, Row, State};
use crate::tuple::{Intent, TupleKey};

/// How long OpenFGA may still carry a request out whose sender is gone: it gives a request 3 s, and its gateway 3 s more.
pub(crate) const OUTLIVES: Duration = Duration::from_millis(6_500);

/// When a row is sent once more that such a request may undo.
pub(crate) const CONFIRMED_AFTER: Duration = OUTLIVES.saturating_add(Duration::from_millis(500));

/// A lease: what can be seen of the table, and had from it, beside its own rows.
pub(crate) trait Held {
    type Error;

    /// The undelivered rows that are not among these and can contradict one of them: new ones before the last of these,
    /// from this id on, and whichever were tried before. Besides, delivered ones that are still in doubt. None where there
    /// are so many that these rows had better wait.
    async fn look_ahead(&mut self, rows: &[Row], from: i64) -> Result<Option<Sight>, Self::Error>;

    /// Leases these rows, too, as far as nobody else holds them.
    async fn take_along(&mut self, rows: &[&Ahead]) -> Result<Vec<Row>, Self::Error>;

    /// The rows later than the first of these that came back which have to do with one of those, and are not refused.
    async fn look_later(&mut self, rows: &[Row]) -> Result<Vec<Later>, Self::Error>;
}

/// What lies ahead of a lease.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    pub(crate) rows: Vec<Ahead>,
    /// The engine's other leases, whose rows are not among those.
    pub(crate) others: Others,
}

/// A row that is not in a lease and can contradict one of it.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub(crate) id: i64,
    pub(crate) intent: Intent,
    pub(crate) standing: Standing,
}

/// How a row ahead stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// New, and most likely somebody else's.
    New,
    /// It was tried before: waiting for its time, or due.
    Again,
    /// Delivered a moment ago, while an older request of it may still be on its way.
    Doubtful,
}

/// A later row about an object of a row that came back.
#[derive(Debug)]
pub(crate) struct Later {
    pub(crate) id: i64,
    pub(crate) intent: Intent,
    pub(crate) delivered: bool,
}

/// The rows of a lease that may be sent now.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    pub(crate) rows: Vec<Row>,
    /// Rows delivered a moment ago of which an older request may still be on its way.
    pub(crate) just_delivered: Vec<Ahead>,
    /// Whether rows were left out, as they have to wait for rows that somebody else has.
    pub(crate) blocked: bool,
    /// Of rows of which later ones have left nothing to send.
    pub(crate) outcomes: Vec<(i64, Outcome)>,
}

/// Puts the rows of a lease in order: without those that have to wait for one that contradicts them and which somebody
/// else has, with those that merely wait for their time, to be folded, and without what later rows have overruled since a
/// row was refused. Earlier rows are looked for from this id on; with none, they don't matter.
pub(crate) async fn put_in_order<L: Held>(
    lease: &mut L,
    mut rows: Vec<Row>,
    from: Option<i64>,
) -> Result<Ordered, L::Error> {
    let ahead = match from {
        Some(from) => take_along(lease, &mut rows, from).await?,
        None => Some(Sight::default()),
    };
    let Some(Sight { rows: ahead, others }) = ahead else { return Ok(Ordered { blocked: true, ..Ordered::default() }) };
    let later = lease.look_later(&rows).await?;
    let mut ordered = Ordered::default();
    let mut waits = HashSet::new();
    rows.retain_mut(|row| match give_way(row, &later) {
        GaveWay::NotAtAll => true,
        GaveWay::Waits => waits.insert(row.id),
        GaveWay::InPart(rest, note) => {
            (row.intent, row.note) = (Ok(rest), Some(note));
            true
        }
        GaveWay::Wholly(note) => {
            ordered.outcomes.push((row.id, Outcome::Delivered { doubtful: row.doubtful, note: Some(note) }));
            false
        }
    });
    let (just_delivered, ahead): (Vec<_>, Vec<_>) =
        ahead.into_iter().partition(|ahead| ahead.standing == Standing::Doubtful);
    let blocked = blocked(&rows, &ahead, &others, waits);
    rows.retain(|row| !blocked.contains(&row.id));
    Ok(Ordered { rows, just_delivered, blocked: !blocked.is_empty(), ..ordered })
}

/// Leases what merely waits for its time and contradicts one of these rows, too, and gives what is still ahead then.
async fn take_along<L: Held>(lease: &mut L, rows: &mut Vec<Row>, from: i64) -> Result<Option<Sight>, L::Error> {
    loop {
        rows.sort_unstable_by_key(|row| row.id);
        let Some(sight) = lease.look_ahead(rows, from).await? else { return Ok(None) };
        let mut along: Vec<&Ahead> = sight.rows.iter().filter(|ahead| ahead.standing == Standing::Again).collect();
        if !along.is_empty() {
            let wanted = Wanted::by(rows.iter().filter_map(|row| Some((row.id, row.intent.as_ref().ok()?))));
            along.retain(|ahead| wanted.otherwise(&ahead.intent, |_| true));
        }
        let taken = if along.is_empty() { Vec::new() } else { lease.take_along(&along).await? };
        if taken.is_empty() {
            return Ok(Some(sight));
        }
        // What came along may have rows ahead of its own.
        rows.extend(taken);
    }
}

/// The ids of the rows that can't be sent yet: those of `waits`, and those that an earlier row contradicts that is not
/// delivered and is not in this lease, or is but has to wait itself. `ahead` are those earlier ones, besides those of the
/// engine's other leases; rows are in the order of their ids.
fn blocked(rows: &[Row], ahead: &[Ahead], others: &Others, mut waits: HashSet<i64>) -> HashSet<i64> {
    let mut undecided = Wanted::by(ahead.iter().map(|ahead| (ahead.id, &ahead.intent)));
    let contradicted = others.contradicted();
    for row in rows {
        let Ok(intent) = &row.intent else { continue };
        if waits.contains(&row.id) || contradicted.contains(&row.id) || undecided.otherwise(intent, |id| id < row.id) {
            waits.insert(row.id);
            undecided.add(row.id, intent);
        }
    }
    waits
}

/// What some rows want of each key.
#[derive(Default)]
struct Wanted<'a>(HashMap<&'a TupleKey, Vec<(i64, State)>>);

impl<'a> Wanted<'a> {
    fn by(rows: impl Iterator<Item = (i64, &'a Intent)>) -> Self {
        let mut wanted = Self::default();
        rows.for_each(|(id, intent)| wanted.add(id, intent));
        wanted
    }

    fn add(&mut self, id: i64, intent: &'a Intent) {
        claims(intent).for_each(|(key, to)| self.0.entry(key).or_default().push((id, to)));
    }

    /// Whether one of those rows that are meant contradicts this one.
    fn otherwise(&self, intent: &Intent, is_meant: impl Fn(i64) -> bool) -> bool {
        claims(intent).any(|(key, to)| {
            self.0.get(key).is_some_and(|wanted| wanted.iter().any(|(id, other)| is_meant(*id) && *other != to))
        })
    }
}

/// What later rows have made of a row.
#[derive(Debug, PartialEq, Eq)]
enum GaveWay {
    NotAtAll,
    /// A later row that contradicts it is not delivered yet: it has to wait for that one's end.
    Waits,
    /// Rows that are delivered have overruled a part of it: what is left, and a note of what is not.
    InPart(Intent, String),
    /// They have overruled all of it.
    Wholly(String),
}

/// Only a row that was refused and came back can find later ones delivered. `later` are those that are not refused, in the
/// order of their ids.
fn give_way(row: &Row, later: &[Later]) -> GaveWay {
    let Ok(intent) = &row.intent else { return GaveWay::NotAtAll };
    if !row.came_back {
        return GaveWay::NotAtAll;
    }
    let ours: HashMap<&TupleKey, State> = claims(intent).collect();
    let mut last: HashMap<&TupleKey, State> = HashMap::new();
    for other in later.iter().filter(|later| later.id > row.id) {
        for (key, to) in claims(&other.intent) {
            match ours.get(key) {
                Some(own) if *own != to && !other.delivered => return GaveWay::Waits,
                Some(_) => drop(last.insert(key, to)),
                None => {}
            }
        }
    }
    let overruled = ours.iter().filter(|(key, to)| last.get(*key).is_some_and(|last| last != *to));
    let mut overruled: Vec<TupleKey> = overruled.map(|(key, _)| (*key).clone()).collect();
    if overruled.is_empty() {
        return GaveWay::NotAtAll;
    }
    overruled.sort_unstable();
    let keys: Vec<String> = overruled.iter().map(ToString::to_string).collect();
    let note = format!("not sent, as later rows overrule it: {}", keys.join(", "));
    match intent.without(&overruled) {
        Some(rest) => GaveWay::InPart(rest, note),
        None => GaveWay::Wholly(note),
    }
}

/// What each key of an intent is to become. One that it deletes and writes ends written.
pub(crate) fn claims(intent: &Intent) -> impl Iterator<Item = (&TupleKey, State)> {
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

    fn waiting(rows: Vec<(i64, Intent)>, ahead: (i64, Intent), waits: &[i64]) -> Vec<i64> {
        let rows: Vec<Row> = rows.into_iter().map(|(id, intent)| Row::new(id, Ok(intent))).collect();
        let ahead = Ahead { id: ahead.0, intent: ahead.1, standing: Standing::New };
        let mut waiting: Vec<i64> =
            blocked(&rows, &[ahead], &Others::default(), waits.iter().copied().collect()).into_iter().collect();
        waiting.sort_unstable();
        waiting
    }

    #[test]
    fn a_row_waits_for_an_earlier_one_that_contradicts_it_and_for_no_other() {
        let ahead = || (5, write("anne"));
        assert_eq!(waiting(vec![(9, delete("anne"))], ahead(), &[]), [9]);
        assert_eq!(waiting(vec![(9, write("anne"))], ahead(), &[]), [0; 0]);
        assert_eq!(waiting(vec![(9, delete("bob"))], ahead(), &[]), [0; 0]);
        assert_eq!(waiting(vec![(3, delete("anne"))], ahead(), &[]), [0; 0], "the later one waits, not the earlier");
    }

    #[test]
    fn what_contradicts_a_row_that_waits_waits_too() {
        let ahead = || (1, write("anne"));
        // 4 does not contradict the row ahead, but 2, which waits.
        let rows = vec![(2, delete("anne")), (3, write("bob")), (4, write("anne"))];
        assert_eq!(waiting(rows, ahead(), &[]), [2, 4]);
        // 3 shares no key with the row ahead, but with 2, which waits as a whole.
        assert_eq!(waiting(vec![(2, both("bob", "anne")), (3, delete("bob"))], ahead(), &[]), [2, 3]);
        assert_eq!(waiting(vec![(2, write("bob")), (3, delete("bob")), (4, delete("carl"))], ahead(), &[2]), [2, 3]);
    }

    #[test]
    fn a_row_that_comes_back_gives_way_to_what_was_delivered_meanwhile() {
        let gave_way = |later: Vec<(i64, Intent, bool)>| {
            let later: Vec<Later> =
                later.into_iter().map(|(id, intent, delivered)| Later { id, intent, delivered }).collect();
            let mut row = Row::new(5, Ok(both("anne", "bob")));
            assert_eq!(give_way(&row, &later), GaveWay::NotAtAll, "it was not refused");
            row.came_back = true;
            give_way(&row, &later)
        };
        let note = |name: &str| format!("not sent, as later rows overrule it: {}", key(name));
        assert_eq!(gave_way(vec![]), GaveWay::NotAtAll);
        assert_eq!(gave_way(vec![(9, delete("anne"), true)]), GaveWay::InPart(delete("bob"), note("anne")));
        assert_eq!(gave_way(vec![(9, write("bob"), true)]), GaveWay::InPart(write("anne"), note("bob")));
        let both = vec![(8, delete("anne"), true), (9, write("bob"), true)];
        assert!(matches!(gave_way(both), GaveWay::Wholly(_)));
        // Revoked and granted again: it is as this row wants it.
        assert_eq!(gave_way(vec![(7, delete("anne"), true), (9, write("anne"), true)]), GaveWay::NotAtAll);
        assert_eq!(gave_way(vec![(3, delete("anne"), true)]), GaveWay::NotAtAll, "earlier rows don't matter");
        assert_eq!(gave_way(vec![(9, delete("anne"), false)]), GaveWay::Waits);
        assert_eq!(gave_way(vec![(9, write("anne"), false)]), GaveWay::NotAtAll);
    }

    #[test]
    fn another_condition_contradicts_and_a_key_deleted_and_written_is_written() {
        let in_office =
            Intent::write(Tuple::try_from(key("anne")).unwrap().with_condition(Condition::new("ok").unwrap()));
        let contradict = |a: &Intent, b: &Intent| Wanted::by([(1, a)].into_iter()).otherwise(b, |_| true);
        assert!(contradict(&write("anne"), &in_office));
        assert!(!contradict(&in_office, &in_office));
        assert!(!contradict(&both("anne", "anne"), &write("anne")));
        assert!(contradict(&both("anne", "anne"), &delete("anne")));
    }
}
