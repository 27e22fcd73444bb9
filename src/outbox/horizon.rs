//! From which id on an undelivered row may lie that is not refused: so that a look at the rows ahead of a lease does not
//! pass over the refused ones before it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use diesel::sql_types::{BigInt, Nullable};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncPgConnection, RunQueryDsl as _};

use super::DatabaseError;

/// The trigger `fga_outbox_ring` makes a transaction known before it draws an id. Where it is not on, a row takes its id an
/// instant before its transaction shows; this is far more than that.
const SLACK: Duration = Duration::from_secs(1);

/// How often it is looked up. Looks ahead pass over what was delivered since.
const INTERVAL: Duration = Duration::from_millis(100);

/// Rows commit in another order than that of their ids. A row that is not yet to be seen has an id above the highest one
/// at a time when its transaction had not begun; so once all transactions of a moment have ended, the highest id of
/// that moment is a bound for whatever commits later. Rows that are requeued are found by their own index.
#[derive(Debug)]
pub(crate) struct Horizon {
    moments: VecDeque<Moment>,
    bound: i64,
    looked: Option<Instant>,
    /// What it was, and since when it has only been moved on.
    last: i64,
    since: Instant,
    /// How long the last look from the beginning took.
    took: Duration,
}

/// How often it is looked up from the beginning, for rows that somebody made ready by hand; but it must not take more than
/// this part of the time, where dead rows pile up that a forgotten snapshot keeps.
const FROM_BEGINNING: Duration = Duration::from_secs(5);
const PART: u32 = 100;

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
    at: Instant,
    /// The first transaction that had not begun.
    next_transaction: i64,
    highest_id: i64,
}

#[derive(QueryableByName)]
struct Seen {
    #[diesel(sql_type = BigInt)]
    oldest_transaction: i64,
    #[diesel(sql_type = BigInt)]
    next_transaction: i64,
    #[diesel(sql_type = BigInt)]
    highest_id: i64,
    #[diesel(sql_type = Nullable<BigInt>)]
    lowest_new: Option<i64>,
}

impl Horizon {
    /// Whether it has been for so long.
    pub(crate) fn is_due(&self, overdue: Duration) -> bool {
        self.looked.is_none_or(|looked| looked.elapsed() >= INTERVAL + overdue)
    }

    /// Looks again, and gives the bound.
    pub(crate) async fn look(&mut self, connection: &mut AsyncPgConnection) -> Result<i64, DatabaseError> {
        let from_beginning = self.since.elapsed() >= FROM_BEGINNING.max(self.took * PART);
        if from_beginning {
            (self.last, self.since) = (i64::MIN, Instant::now());
        }
        let seen: Seen = sql_query(
            "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS oldest_transaction,
                 pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next_transaction,
                 coalesce((SELECT max(id) FROM fga_outbox), $1) AS highest_id,
                 (SELECT id FROM fga_outbox WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id >= $1
                  ORDER BY id LIMIT 1) AS lowest_new",
        )
        .bind::<BigInt, _>(self.last)
        .get_result(connection)
        .await?;
        let now = Instant::now();
        if from_beginning {
            self.took = now - self.since;
        }
        self.looked = Some(now);
        while let Some(moment) = self.moments.front() {
            if moment.next_transaction > seen.oldest_transaction || now - moment.at < SLACK {
                break;
            }
            self.bound = moment.highest_id;
            self.moments.pop_front();
        }
        let Seen { next_transaction, highest_id, .. } = seen;
        self.moments.push_back(Moment { at: now, next_transaction, highest_id });
        let seen_from = seen.lowest_new.unwrap_or(i64::MAX).min(self.bound);
        self.last = seen_from;
        Ok(seen_from)
    }
}
