//! From which id on an undelivered row may lie that is not refused: so that a look at the rows ahead of a lease does not
//! pass over the refused ones before it.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncPgConnection, RunQueryDsl as _};

use super::DatabaseError;

/// How often it is looked up. Looks ahead pass over what was delivered since.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often it is looked up from the beginning, for rows that somebody made ready by hand; but it must not take more than
/// this part of the time, where dead rows pile up that a forgotten snapshot keeps.
const FROM_BEGINNING: Duration = Duration::from_secs(5);
const PART: u32 = 100;

/// While a writer stays, so many moments are kept.
const MOST_MOMENTS: usize = 64;

/// Rows commit in another order than that of their ids. Whoever inserts a row locks the table, as Postgres says in
/// `pg_locks`, before the row draws its id, and to the end of his transaction. So a row that is not yet to be seen has
/// either an id above the highest one of a moment, or its transaction was among the writers of that moment and is one
/// still; once all of these have ended, the highest id of that moment is a bound for whatever is seen later. Rows that are
/// requeued are found by their own index.
#[derive(Debug)]
pub(crate) struct Horizon {
    moments: VecDeque<Moment>,
    /// The highest id of the last moment whose writers had all ended before now.
    bound: i64,
    looked: Option<Instant>,
    /// What it was, and since when it has only been moved on.
    last: i64,
    since: Instant,
    /// How long the last look from the beginning took.
    took: Duration,
}

impl Default for Horizon {
    fn default() -> Self {
        Self {
            moments: VecDeque::new(),
            bound: i64::MIN,
            looked: None,
            last: i64::MIN,
            since: Instant::now(),
            took: Duration::ZERO,
        }
    }
}

#[derive(Debug)]
struct Moment {
    highest_id: i64,
    /// The transactions that had the table locked for writing, and have since.
    writers: HashSet<String>,
}

#[derive(QueryableByName)]
struct Seen {
    #[diesel(sql_type = BigInt)]
    highest_id: i64,
    #[diesel(sql_type = Nullable<BigInt>)]
    lowest_new: Option<i64>,
    #[diesel(sql_type = Array<Text>)]
    writers: Vec<String>,
}

impl Horizon {
    /// Whether it has been for so long.
    pub(crate) fn is_due(&self, overdue: Duration) -> bool {
        self.looked.is_none_or(|looked| looked.elapsed() >= INTERVAL + overdue)
    }

    /// Looks again, and gives the bound.
    pub(crate) async fn look(&mut self, connection: &mut AsyncPgConnection) -> Result<i64, DatabaseError> {
        if self.looked.is_none() {
            check_index(connection).await?;
            // A first moment, and who of its writers is still there.
            for _ in 0..2 {
                let seen = see(connection, i64::MAX).await?;
                self.note(seen);
            }
        }
        let from_beginning = self.since.elapsed() >= FROM_BEGINNING.max(self.took * PART);
        if from_beginning {
            (self.last, self.since) = (i64::MIN, Instant::now());
        }
        // Whoever is found to have ended may have done so after what is seen with it.
        let bound = self.bound;
        let seen = see(connection, self.last).await?;
        if from_beginning {
            self.took = self.since.elapsed();
        }
        self.last = seen.lowest_new.unwrap_or(i64::MAX).min(bound);
        self.note(seen);
        self.looked = Some(Instant::now());
        Ok(self.last)
    }

    /// Lets go of the moments whose writers have all ended, and adds this one.
    fn note(&mut self, seen: Seen) {
        let writers: HashSet<String> = seen.writers.into_iter().collect();
        if seen.highest_id < self.bound {
            // Rows are gone, or Postgres went back in time: ids may be drawn anew.
            (self.bound, self.last) = (i64::MIN, i64::MIN);
            self.moments.clear();
        }
        for moment in &mut self.moments {
            moment.writers.retain(|it| writers.contains(it));
            // A transaction that is prepared may have had another name.
            moment.writers.extend(writers.iter().filter(|it| it.starts_with("-1/")).cloned());
        }
        while self.moments.front().is_some_and(|moment| moment.writers.is_empty()) {
            self.bound = self.moments.pop_front().map_or(self.bound, |moment| moment.highest_id);
        }
        if self.moments.len() == MOST_MOMENTS {
            self.moments.pop_back();
        }
        self.moments.push_back(Moment { highest_id: seen.highest_id, writers });
    }
}

/// Without it, looks would read the whole table, and nothing else would tell.
async fn check_index(connection: &mut AsyncPgConnection) -> Result<(), DatabaseError> {
    #[derive(QueryableByName)]
    struct Answer {
        #[diesel(sql_type = Bool)]
        is_there: bool,
    }
    let answer: Answer = sql_query(
        "SELECT EXISTS (SELECT FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
             WHERE i.indrelid = 'fga_outbox'::regclass AND c.relname = 'fga_outbox_next_attempt_idx' AND i.indisvalid
         ) AS is_there",
    )
    .get_result(connection)
    .await?;
    match answer.is_there {
        true => Ok(()),
        false => Err(DatabaseError::NotMigrated("the index fga_outbox_next_attempt_idx is not there".to_owned())),
    }
}

/// What is to be seen now, of new rows from this id on.
async fn see(connection: &mut AsyncPgConnection, from: i64) -> Result<Seen, DatabaseError> {
    let seen = sql_query(
        "SELECT coalesce((SELECT max(id) FROM fga_outbox), -9223372036854775808) AS highest_id,
             (SELECT id FROM fga_outbox WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id >= $1
              ORDER BY id LIMIT 1) AS lowest_new,
             ARRAY(SELECT virtualtransaction FROM pg_locks
                 WHERE locktype = 'relation' AND relation = 'fga_outbox'::regclass
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                     AND mode = 'RowExclusiveLock' AND granted) AS writers",
    );
    Ok(seen.bind::<BigInt, _>(from).get_result(connection).await?)
}
