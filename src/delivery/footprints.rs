//! What the leases of one engine want of each key, so that its leases need not be looked up in the table for one another.
//!
//! A lease is known by its transaction, which Postgres leaves on the rows that it locked: a look at the table passes over
//! the rows of those that are known here. Keys and states are kept as hashes: where two are taken for the same by chance,
//! a row waits that need not.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use crate::delivery::order::claims;
use crate::delivery::plan::State;
use crate::tuple::Intent;

/// The leases that are out.
#[derive(Debug, Default)]
pub(crate) struct Footprints {
    hasher: RandomState,
    leases: Mutex<Vec<Footprint>>,
}

#[derive(Debug, Clone)]
struct Footprint {
    transaction: u32,
    /// Sorted. They grow, and are still there for whoever saw this lease when it is no more.
    claims: Arc<RwLock<Vec<Claim>>>,
}

/// The hash of a key, the row that wants something of it, and the hash of what.
type Claim = (u64, i64, u64);

/// That a lease is out: until this is dropped, which must not be before its rows are free.
#[derive(Debug)]
pub(crate) struct Entry {
    footprints: Arc<Footprints>,
    transaction: u32,
}

/// The leases besides one's own that were out at one moment.
#[derive(Debug, Default)]
pub(crate) struct Others {
    own: Option<Footprint>,
    leases: Vec<Footprint>,
}

impl Footprints {
    /// Enters a lease with all rows that its transaction has locked.
    pub(crate) fn enter<'a>(
        self: &Arc<Self>,
        transaction: u32,
        rows: impl Iterator<Item = (i64, &'a Intent)>,
    ) -> Entry {
        let claims = Arc::new(RwLock::new(hashed(&self.hasher, rows)));
        self.lock().push(Footprint { transaction, claims });
        Entry { footprints: self.clone(), transaction }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Footprint>> {
        self.leases.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Entry {
    pub(crate) fn transaction(&self) -> u32 {
        self.transaction
    }

    /// Adds rows that are about to be locked, too.
    pub(crate) fn add<'a>(&self, rows: impl Iterator<Item = (i64, &'a Intent)>) {
        let added = hashed(&self.footprints.hasher, rows);
        if let Some(own) = self.footprints.lock().iter().find(|lease| lease.transaction == self.transaction) {
            let mut claims = own.claims.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            claims.extend(added);
            claims.sort_unstable();
        }
    }

    /// The other leases. To be asked before the look at the table that passes over their rows, and asked themselves after
    /// it: then they know of all rows that it passed over, also where a lease has locked more of them meanwhile, or ended.
    pub(crate) fn others(&self) -> Others {
        let leases = self.footprints.lock();
        let (mut own, leases): (Vec<_>, Vec<_>) =
            leases.iter().cloned().partition(|lease| lease.transaction == self.transaction);
        Others { own: own.pop(), leases }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.footprints.lock().retain(|lease| lease.transaction != self.transaction);
    }
}

impl Others {
    pub(crate) fn transactions(&self) -> impl Iterator<Item = u32> {
        self.leases.iter().map(|lease| lease.transaction)
    }

    /// The rows of one's own lease that contradict an earlier one of the others.
    pub(crate) fn contradicted(&self) -> HashSet<i64> {
        let read = |lease: &Footprint| lease.claims.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let mut contradicted = HashSet::new();
        let own = self.own.as_ref().filter(|_| !self.leases.is_empty()).map(read).unwrap_or_default();
        for lease in &self.leases {
            let theirs = lease.claims.read().unwrap_or_else(|poisoned| poisoned.into_inner());
            let mut rest = theirs.iter().peekable();
            for (key, id, wants) in &own {
                while rest.next_if(|(other, ..)| other < key).is_some() {}
                let mut same = rest.clone().take_while(|(other, ..)| other == key);
                if same.any(|(_, earlier, to)| earlier < id && to != wants) {
                    contradicted.insert(*id);
                }
            }
        }
        contradicted
    }
}

fn hashed<'a>(hasher: &RandomState, rows: impl Iterator<Item = (i64, &'a Intent)>) -> Vec<Claim> {
    let mut hashed: Vec<Claim> = Vec::with_capacity(rows.size_hint().0);
    for (id, intent) in rows {
        hashed.extend(claims(intent).map(|(key, to)| {
            let to = match to {
                State::Absent => 0,
                State::Present(None) => 1,
                State::Present(Some(condition)) => {
                    hasher.hash_one((condition.name(), format!("{:?}", condition.context())))
                }
            };
            (hasher.hash_one(key), id, to)
        }));
    }
    hashed.sort_unstable();
    hashed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuple::{Condition, Tuple, TupleKey};

    #[test]
    fn a_row_waits_for_earlier_ones_of_other_leases_that_contradict_it_while_these_are_out() {
        let key = |name: &str| TupleKey::new(format!("user:{name}"), "viewer", "document:1").unwrap();
        let write = |name: &str| Intent::write(key(name).try_into().unwrap());
        let delete = |name: &str| Intent::delete(key(name));
        let in_office =
            Intent::write(Tuple::try_from(key("anne")).unwrap().with_condition(Condition::new("in_office").unwrap()));

        let footprints = Arc::<Footprints>::default();
        let first = footprints.enter(1, [(5, &write("anne")), (6, &write("bob"))].into_iter());
        let rows =
            [(3, delete("anne")), (8, delete("anne")), (9, in_office), (10, write("anne")), (11, delete("carl"))];
        let second = footprints.enter(2, rows.iter().map(|(id, intent)| (*id, intent)));
        assert_eq!(second.others().transactions().collect::<Vec<_>>(), [1]);
        let contradicted = |others: &Others| {
            let mut ids: Vec<_> = others.contradicted().into_iter().collect();
            ids.sort_unstable();
            ids
        };
        assert_eq!(contradicted(&second.others()), [8, 9]);
        assert_eq!(contradicted(&first.others()), [5], "the earlier row is the other lease's");

        first.add([(2, &write("carl")), (7, &delete("anne"))].into_iter());
        assert_eq!(contradicted(&second.others()), [8, 9, 10, 11]);
        let before = second.others();
        first.add([(1, &write("anne"))].into_iter());
        drop(first);
        assert_eq!(contradicted(&second.others()), [0; 0]);
        assert_eq!(contradicted(&before), [3, 8, 9, 10, 11]);
    }
}
