//! The lease: rows held by an open transaction.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use diesel::QueryableByName;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text};
use diesel_async::{AnsiTransactionManager, AsyncPgConnection, RunQueryDsl as _, TransactionManager as _};
use tokio::sync::OwnedSemaphorePermit;

use super::statement::{Bind, Statement};
use super::{Connection, DatabaseError, Pool};
use crate::delivery::backoff;
use crate::delivery::footprints::{Entry, Footprints};
use crate::delivery::order::{Ahead, CONFIRMED_AFTER, Held, Later, OUTLIVES, Sight, Standing};
use crate::delivery::plan::{Outcome, Row};
use crate::tuple::{Intent, InvalidIntent, TupleKey};

/// A lease takes no more rows than come to this many bytes of payload (but always one), so that memory is bounded by
/// the leases in flight.
const MAX_LEASE_BYTES: i64 = 4 << 20;
/// A payload above this is refused without being looked at: a hundred tuples with the largest contexts take a fifth.
const MAX_PAYLOAD_BYTES: i64 = 16 << 20;
/// A reason that is recorded on a row is cut after this many characters.
const MAX_REASON_CHARS: usize = 2_000;

/// Rows that no other engine and no foreign drain can lease until this is committed or dropped.
///
/// It is an open transaction that holds them with `FOR UPDATE`. Dropped anywhere, for whatever reason, it gives its rows
/// back: the pool closes a connection whose transaction is still open.
pub(crate) struct Lease {
    connection: Connection,
    rows: Vec<Row>,
    /// The ids of those that may have been sent before, by somebody who did not live to record it; and of such rows that
    /// are locked with them.
    doubtful: HashSet<i64>,
    entry: Entry,
    /// Rows that were locked with the others and for which there was no room, and whether they are new.
    left_out: Vec<(Row, bool)>,
    /// The engine's room for one lease, free again when this is gone.
    room: OwnedSemaphorePermit,
}

/// What to claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    /// Only new rows with a higher `id`; a hint that spares looking at rows that were just leased.
    pub(crate) after: i64,
    /// Only failed rows with a higher `id`.
    pub(crate) failed_after: i64,
    /// How many rows at most.
    pub(crate) rows: i64,
}

/// What was claimed.
pub(crate) struct Claimed {
    pub(crate) lease: Option<Lease>,
    /// The highest `id` that was claimed because it was new.
    pub(crate) last_new: Option<i64>,
    /// The highest `id` that was claimed.
    pub(crate) last: i64,
    /// Whether there are new rows that nobody has had before.
    pub(crate) untouched: bool,
    /// Whether there may be more of the same kind.
    pub(crate) full: bool,
}

/// Whether a row may have been sent by somebody who did not live to record it: it was tried before, or its `locker`, who
/// locked it last, did not commit. That is what Postgres leaves in `xmax`, 32 bits of a transaction: the one of this
/// number that is nearest to the next transaction. Where it is so old that its end is forgotten, no request of it is on
/// its way. To be asked once the row is locked: before, the locker may not have ended.
macro_rules! doubtful {
    () => {
        "(tried OR CASE WHEN locker = '0'::xid THEN false ELSE (
            SELECT coalesce(pg_xact_status(greatest(
                next + ((locker::text::bigint - next + 2147483648) & 4294967295) - 2147483648, 0
            )::text::xid8) <> 'committed', false)
            FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS transaction (next)
        ) END)"
    };
}

/// That a row is not delivered, in words by which Postgres finds only `fga_outbox_waiting_idx`: between that one and
/// `fga_outbox_pending_idx` it would choose by what it knows of the table, which may be from before there was a backlog.
macro_rules! undelivered {
    () => {
        "(processed_at IS NULL)::integer = 1"
    };
}

/// What is read of a row as it is locked.
macro_rules! read_as_locked {
    () => {
        "SELECT id, coalesce(attempts, 0) AS attempts, coalesce(payload::text, 'null') AS payload,
            refused_model_id IS NOT NULL AS came_back,
            next_attempt_at IS NOT NULL OR coalesce(attempts, 0) > 0 AS tried, xmax AS locker FROM fga_outbox "
    };
}

/// New rows by their own index from `$1` on, retries that are due by theirs. What lies in the table beside them (rows
/// delivered, waiting or refused) is not looked at, as long as `$1` is past it. `id + 0` keeps Postgres from looking for
/// retries by their ids.
const CLAIM: &str = concat!(
    "WITH due AS MATERIALIZED (",
    read_as_locked!(),
    "WHERE ",
    undelivered!(),
    " AND next_attempt_at <= now() AND id + 0 > $5 ORDER BY next_attempt_at LIMIT ($2 + 1) / 2 FOR UPDATE SKIP LOCKED
    ), new AS MATERIALIZED (",
    read_as_locked!(),
    "WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id > $1 ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
    ), locked AS (
        SELECT *, false AS new, octet_length(payload)::bigint AS bytes FROM due
        UNION ALL SELECT *, true, octet_length(payload)::bigint FROM new
    ), room AS (
        SELECT *, sum(least(bytes, $4)::integer) OVER nth AS so_far, row_number() OVER nth AS nth FROM locked
        WINDOW nth AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
    )
    SELECT id, attempts, new, came_back, locker = '0'::xid AS untouched, bytes,
        (SELECT pg_current_xact_id_if_assigned()::xid::text::bigint) AS transaction, ",
    doubtful!(),
    " AS doubtful, nth <= $2 AND (so_far <= $3 OR nth = 1) AS fits, CASE WHEN bytes <= $4 THEN payload END AS payload
    FROM room"
);

#[derive(QueryableByName)]
struct ClaimedRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Integer)]
    attempts: i32,
    #[diesel(sql_type = Bool)]
    new: bool,
    #[diesel(sql_type = Bool)]
    came_back: bool,
    /// Whether nobody has ever locked it.
    #[diesel(sql_type = Bool)]
    untouched: bool,
    #[diesel(sql_type = Bool)]
    doubtful: bool,
    /// Whose lock it is.
    #[diesel(sql_type = BigInt)]
    transaction: i64,
    /// Whether there is room for it in the lease.
    #[diesel(sql_type = Bool)]
    fits: bool,
    #[diesel(sql_type = BigInt)]
    bytes: i64,
    #[diesel(sql_type = Nullable<Text>)]
    payload: Option<String>,
}

/// Leases rows that may be delivered now and that nobody else holds. None where there are none.
pub(crate) async fn claim(
    pool: &Pool,
    footprints: &Arc<Footprints>,
    what: Claim,
    room: OwnedSemaphorePermit,
) -> Result<Claimed, DatabaseError> {
    let mut connection = pool.begin().await?;
    let claimed: Vec<ClaimedRow> = Statement::new(
        CLAIM,
        [what.after, what.rows, MAX_LEASE_BYTES, MAX_PAYLOAD_BYTES, what.failed_after].map(Bind::Number),
    )
    .load(&mut connection)
    .await?;
    if claimed.is_empty() {
        AnsiTransactionManager::rollback_transaction(&mut *connection).await?;
        return Ok(Claimed { lease: None, last_new: None, last: i64::MIN, untouched: false, full: false });
    }
    let fitting = || claimed.iter().filter(|row| row.fits);
    let last_new = fitting().filter(|row| row.new).map(|row| row.id).max();
    let new = fitting().filter(|row| row.new).count() as i64;
    let bytes: i64 = fitting().map(|row| row.bytes).sum();
    // Rows left out for their size count, too.
    let full = new >= what.rows || bytes >= MAX_LEASE_BYTES / 2 || claimed.len() as i64 > new;
    let last = fitting().map(|row| row.id).max().unwrap_or(i64::MIN);
    let untouched = claimed.iter().any(|row| row.untouched);
    let doubtful = doubtful(&claimed);
    let transaction = claimed[0].transaction as u32;
    let (mut rows, mut left_out) = (Vec::new(), Vec::new());
    for row in claimed {
        match (row.fits, row.new) {
            (true, _) => rows.push(row.read()),
            (false, new) => left_out.push((row.read(), new)),
        }
    }
    let locked = rows.iter().chain(left_out.iter().map(|(row, _)| row));
    let entry = footprints.enter(transaction, locked.filter_map(|row| Some((row.id, row.intent.as_ref().ok()?))));
    let lease = Lease { connection, rows, doubtful, entry, left_out, room };
    Ok(Claimed { lease: Some(lease), last_new, last, untouched, full })
}

fn doubtful(claimed: &[ClaimedRow]) -> HashSet<i64> {
    claimed.iter().filter(|row| row.doubtful).map(|row| row.id).collect()
}

impl ClaimedRow {
    fn read(self) -> Row {
        let intent = match &self.payload {
            Some(payload) => Intent::from_json(payload),
            None => Err(InvalidIntent {
                field: "payload".to_owned(),
                problem: format!("has {} bytes, more than the {MAX_PAYLOAD_BYTES} that are sent", self.bytes),
            }),
        };
        let Self { id, attempts, came_back, doubtful, .. } = self;
        Row { id, attempts, doubtful, came_back, intent, note: None }
    }
}

impl Lease {
    /// The rows, once.
    pub(crate) fn take_rows(&mut self) -> Vec<Row> {
        std::mem::take(&mut self.rows)
    }

    /// Records these outcomes, reached under this authorization model, and gives the lease's other rows back untouched,
    /// and the room.
    pub(crate) async fn commit(
        mut self,
        outcomes: &[(i64, Outcome)],
        model: &str,
    ) -> Result<OwnedSemaphorePermit, DatabaseError> {
        if outcomes.is_empty() {
            return self.give_back().await;
        }
        record(&mut self.connection, outcomes, &self.doubtful, model).await?;
        AnsiTransactionManager::commit_transaction(&mut *self.connection).await?;
        Ok(self.room)
    }

    /// Gives all rows back untouched, at once, and the room: rows of which nothing was sent, so that they are in no more
    /// doubt than before. Dropping a lease gives its rows back, too, at the cost of the connection and in doubt.
    pub(crate) async fn give_back(mut self) -> Result<OwnedSemaphorePermit, DatabaseError> {
        let connection = &mut *self.connection;
        match self.doubtful.is_empty() {
            true => AnsiTransactionManager::commit_transaction(connection).await?,
            false => AnsiTransactionManager::rollback_transaction(connection).await?,
        }
        Ok(self.room)
    }
}

/// See [`AHEAD`].
macro_rules! contradicts {
    () => {
        "(NOT (SELECT plain FROM given) OR payload ? 'deletes' OR payload @? '$.writes[*].condition') AND EXISTS (
            SELECT FROM jsonb_path_query(payload, '$.*[*].object') AS object
            WHERE object #>> '{}' IN (SELECT unnest(objects) FROM given))"
    };
}

/// New rows from `$1` to `$2`, and those that were tried before, unless one of the transactions `$3` has them; refused
/// ones lie in neither's way. Besides, delivered ones that are still in doubt. Of these, those that can contradict a
/// lease: rows about one of its objects (`$5`), and where it only writes unconditionally (`$4`), as most do, rows with
/// deletes or conditions.
const AHEAD: &str = concat!(
    "WITH given AS MATERIALIZED (SELECT $3::text[]::xid[] AS known, $4 AS plain, $5 AS objects)
    SELECT id, again, delivered, payload::text AS payload FROM (
        (
            SELECT id, payload, false AS again, false AS delivered FROM fga_outbox
            WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id >= $1 AND id < $2
                AND xmax <> ALL((SELECT known FROM given)::xid[]) AND ",
    contradicts!(),
    " LIMIT $6
        )
        UNION ALL
        SELECT id, payload, true, false FROM fga_outbox
        WHERE ",
    undelivered!(),
    " AND next_attempt_at < 'infinity' AND xmax <> ALL((SELECT known FROM given)::xid[]) AND ",
    contradicts!(),
    " UNION ALL
        SELECT min(id), payload, false, true FROM fga_outbox
        WHERE processed_at IS NOT NULL AND next_attempt_at > now() AND ",
    contradicts!(),
    " GROUP BY payload
    ) AS ahead"
);

/// With more new rows ahead than this, a lease is too far ahead of the others to be worth the look: it has none, once it
/// is the first.
const MOST_AHEAD: usize = 2_000;

#[derive(QueryableByName)]
struct AheadRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Bool)]
    again: bool,
    #[diesel(sql_type = Bool)]
    delivered: bool,
    #[diesel(sql_type = Text)]
    payload: String,
}

const ALONG: &str = concat!(
    "WITH locked AS MATERIALIZED (",
    read_as_locked!(),
    "WHERE id = ANY($1) AND processed_at IS NULL ORDER BY id FOR UPDATE SKIP LOCKED)
    SELECT id, attempts, false AS new, came_back, false AS untouched, octet_length(payload)::bigint AS bytes,
        0::bigint AS transaction, ",
    doubtful!(),
    " AS doubtful, true AS fits, payload FROM locked"
);

/// Whatever is later than `$1`, and not refused itself: no index helps, but rows come back seldom.
const LATER: &str = "
    SELECT id, false AS again, processed_at IS NOT NULL AS delivered, payload::text AS payload FROM fga_outbox
    WHERE id > $1 AND id <> ALL($2) AND (processed_at IS NOT NULL OR next_attempt_at IS DISTINCT FROM 'infinity')
        AND EXISTS (SELECT FROM jsonb_path_query(payload, '$.*[*].object') AS object WHERE object #>> '{}' = ANY($3))
    ORDER BY id";

impl Held for Lease {
    type Error = DatabaseError;

    async fn look_ahead(&mut self, rows: &[Row], from: i64) -> Result<Option<Sight>, DatabaseError> {
        let intents = || rows.iter().filter_map(|row| row.intent.as_ref().ok());
        let Some(last) = rows.iter().map(|row| row.id).max() else { return Ok(Some(Sight::default())) };
        let plain = intents().all(|intent| {
            intent.deletes().is_empty() && intent.writes().iter().all(|tuple| tuple.condition().is_none())
        });
        let others = self.entry.others();
        let known = others.transactions().chain([self.entry.transaction()]).map(|it| it.to_string());
        let known: Vec<String> = known.collect();
        let ahead: Vec<AheadRow> = Statement::new(
            AHEAD,
            [
                Bind::Number(from),
                Bind::Number(last),
                Bind::Texts(known),
                Bind::Bool(plain),
                objects(intents()),
                Bind::Number(MOST_AHEAD as i64 + 1),
            ],
        )
        .load(&mut self.connection)
        .await?;
        if ahead.iter().filter(|row| !row.again && !row.delivered).count() > MOST_AHEAD {
            return Ok(None);
        }
        let read = |row: AheadRow| {
            let standing = match (row.delivered, row.again) {
                (true, _) => Standing::Doubtful,
                (false, true) => Standing::Again,
                (false, false) => Standing::New,
            };
            Some(Ahead { id: row.id, intent: Intent::from_json(&row.payload).ok()?, standing })
        };
        // The look passes over what this transaction has locked.
        let left_out = self.left_out.iter().filter(|(left_out, _)| rows.iter().all(|row| row.id != left_out.id));
        let left_out = left_out.filter_map(|(row, new)| {
            let standing = if *new { Standing::New } else { Standing::Again };
            Some(Ahead { id: row.id, intent: row.intent.clone().ok()?, standing })
        });
        Ok(Some(Sight { rows: ahead.into_iter().filter_map(read).chain(left_out).collect(), others }))
    }

    async fn take_along(&mut self, rows: &[&Ahead]) -> Result<Vec<Row>, DatabaseError> {
        self.entry.add(rows.iter().map(|row| (row.id, &row.intent)));
        let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
        let rows: Vec<ClaimedRow> = Statement::new(ALONG, [Bind::Numbers(ids)]).load(&mut self.connection).await?;
        self.doubtful.extend(doubtful(&rows));
        Ok(rows.into_iter().map(ClaimedRow::read).collect())
    }

    async fn look_later(&mut self, rows: &[Row]) -> Result<Vec<Later>, DatabaseError> {
        let back = || rows.iter().filter(|row| row.came_back);
        let Some(first) = back().map(|row| row.id).min() else { return Ok(Vec::new()) };
        let later: Vec<AheadRow> = Statement::new(
            LATER,
            [
                Bind::Number(first),
                Bind::Numbers(rows.iter().map(|row| row.id).collect()),
                objects(back().filter_map(|row| row.intent.as_ref().ok())),
            ],
        )
        .load(&mut self.connection)
        .await?;
        let read = |row: AheadRow| {
            Some(Later { id: row.id, intent: Intent::from_json(&row.payload).ok()?, delivered: row.delivered })
        };
        Ok(later.into_iter().filter_map(read).collect())
    }
}

/// What these rows are about.
fn objects<'a>(intents: impl Iterator<Item = &'a Intent>) -> Bind {
    let objects: HashSet<&str> = intents.flat_map(Intent::keys).map(TupleKey::object).collect();
    Bind::Texts(objects.into_iter().map(Into::into).collect())
}

/// `now()` is when the lease began: what is recorded happened later.
const DELIVERED: &str = "
    UPDATE fga_outbox SET processed_at = clock_timestamp(),
        next_attempt_at = CASE WHEN id = ANY($2) THEN clock_timestamp() + $3 * interval '1 second' END
    WHERE id = ANY($1)";
const CONFIRM: &str = "
    UPDATE fga_outbox SET next_attempt_at = clock_timestamp() + $2 * interval '1 second' WHERE id = ANY($1)";
const NOTED: &str = "UPDATE fga_outbox SET last_error = $2 WHERE id = $1";
const AGAIN: &str = "
    UPDATE fga_outbox SET next_attempt_at = clock_timestamp() WHERE id = ANY($1) AND next_attempt_at IS NULL";
/// A row that was overtaken looks at later rows as one does that was refused, only that no model refused it.
const OVERTAKEN: &str = "
    UPDATE fga_outbox SET refused_model_id = coalesce(refused_model_id, '') WHERE id = ANY($1)";
const FAILED: &str = "
    UPDATE fga_outbox SET attempts = least(coalesce(attempts, 0), 2147483646) + 1, last_error = failed.reason,
        next_attempt_at = coalesce(clock_timestamp() + failed.seconds * interval '1 second', 'infinity'),
        refused_model_id = CASE WHEN failed.seconds IS NULL THEN $4 ELSE refused_model_id END
    FROM unnest($1, $2, $3) AS failed (id, reason, seconds) WHERE fga_outbox.id = failed.id";

/// Records outcomes, and for rows in doubt (`doubtful`) that have none, that they are: their locks will not tell any more.
async fn record(
    connection: &mut AsyncPgConnection,
    outcomes: &[(i64, Outcome)],
    doubtful: &HashSet<i64>,
    model: &str,
) -> Result<(), DatabaseError> {
    let (mut delivered, mut sent_before, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut confirm, mut again, mut overtaken) = (Vec::new(), doubtful.clone(), Vec::new());
    let (mut ids, mut reasons, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
    let mut fails = |id: i64, reason: &str, wait: Option<Duration>| {
        ids.push(id);
        reasons.push(recordable(reason));
        seconds.push(wait.map(|wait| wait.as_secs_f64()));
    };
    for (id, outcome) in outcomes {
        again.remove(id);
        match outcome {
            Outcome::Delivered { doubtful, note } => {
                delivered.push(*id);
                sent_before.extend(doubtful.then_some(*id));
                notes.extend(note.as_ref().map(|note| (*id, note)));
            }
            Outcome::Confirm { .. } | Outcome::Suspect => confirm.push(*id),
            Outcome::Waiting { reason, attempts, .. } => {
                fails(*id, reason, Some(backoff::of_row(attempts.unsigned_abs())));
            }
            Outcome::Again { .. } => drop(again.insert(*id)),
            Outcome::Refused { reason } => fails(*id, reason, None),
        }
        overtaken.extend(outcome.is_overtaken().then_some(*id));
    }
    let mut statements = Vec::new();
    if !delivered.is_empty() {
        let outlives = Bind::Seconds(OUTLIVES.as_secs_f64());
        let binds = [Bind::Numbers(delivered), Bind::Numbers(sent_before), outlives];
        statements.push(Statement::new(DELIVERED, binds));
    }
    let notes = notes.into_iter().map(|(id, note)| [Bind::Number(id), Bind::Text(recordable(note))]);
    statements.extend(notes.map(|binds| Statement::new(NOTED, binds)));
    if !confirm.is_empty() {
        let after = Bind::Seconds(CONFIRMED_AFTER.as_secs_f64());
        statements.push(Statement::new(CONFIRM, [Bind::Numbers(confirm), after]));
    }
    if !again.is_empty() {
        statements.push(Statement::new(AGAIN, [Bind::Numbers(again.into_iter().collect())]));
    }
    if !ids.is_empty() {
        let binds = [Bind::Numbers(ids), Bind::Texts(reasons), Bind::Times(seconds), Bind::Text(model.to_owned())];
        statements.push(Statement::new(FAILED, binds));
    }
    if !overtaken.is_empty() {
        statements.push(Statement::new(OVERTAKEN, [Bind::Numbers(overtaken)]));
    }
    for statement in statements {
        statement.execute(connection).await?;
    }
    Ok(())
}

/// Postgres takes no U+0000 in text, and a message may hold one.
fn recordable(reason: &str) -> String {
    reason.chars().take(MAX_REASON_CHARS).map(|c| if c == '\0' { '\u{fffd}' } else { c }).collect()
}
