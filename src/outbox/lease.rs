//! The lease: rows held by an open transaction.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use diesel::Queryable;
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
    /// Only new rows up to this `id` that somebody has locked before. Where several engines deliver a backlog, the rows
    /// ahead that are locked are the others'.
    pub(crate) touched_until: i64,
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
    /// To how many rows it was cut down, as more were too large for one lease.
    pub(crate) cut: Option<i64>,
}

/// Whether a row may have been sent by somebody who did not live to record it: its `locker`, who locked it last, did not
/// commit. That is what Postgres leaves in `xmax`, 32 bits of a transaction: the one of this
/// number that is nearest to the next transaction; where that is still to come, the number is that of several lockers.
/// Where it is so old that its end is forgotten, no request of it is on its way. To be asked once the row is locked:
/// before, the locker may not have ended.
macro_rules! doubtful {
    () => {
        "CASE WHEN locker = '0'::xid THEN false ELSE (
            SELECT CASE WHEN it >= next THEN true
                ELSE coalesce(pg_xact_status(greatest(it, 0)::text::xid8) <> 'committed', false) END
            FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS transaction (next),
                LATERAL (SELECT next + ((locker::text::bigint - next + 2147483648) & 4294967295) - 2147483648)
                    AS nearest (it)
        ) END"
    };
}

/// That a row is not delivered, in words by which Postgres finds `fga_outbox_next_attempt_idx`: between that one and
/// `fga_outbox_pending_idx` it would choose by what it knows of the table, which may be from before there was a backlog.
macro_rules! undelivered {
    () => {
        "(processed_at IS NULL)::integer = 1"
    };
}

/// Whether nobody holds the lock that somebody took on a row, as far as can be seen without trying to lock it, which takes
/// ten times as long.
macro_rules! free {
    () => {
        "xmax <> ALL(ARRAY(SELECT it::xid FROM pg_snapshot_xip(pg_current_snapshot()) AS it))"
    };
}

/// What is read of a row as it is locked.
macro_rules! read_as_locked {
    () => {
        "SELECT id, coalesce(payload::text, 'null') AS payload, coalesce(attempts, 0) AS attempts,
            refused_model_id IS NOT NULL AS came_back,
            next_attempt_at IS NOT NULL OR coalesce(attempts, 0) > 0 AS tried, xmax AS locker FROM fga_outbox "
    };
}

/// The columns of a row that was locked.
type Columns = (BigInt, Nullable<Text>, Nullable<Integer>, Integer, Bool, Bool, Bool, Bool, Bool, BigInt);

/// New rows by their own index from `$1` on, those that somebody has locked before only up to `$5`; retries that are due
/// by theirs. What lies in the table beside them (rows delivered, waiting or refused) is not looked at, as long as `$1` is
/// past it. `id + 0` keeps Postgres from looking for retries by their ids. Where payloads come to more than `$3` bytes,
/// their sizes are given in their place.
const CLAIM: &str = concat!(
    "WITH due AS MATERIALIZED (",
    read_as_locked!(),
    "WHERE ",
    undelivered!(),
    " AND next_attempt_at <= now() AND id + 0 > $4 AND (xmax = '0'::xid OR ",
    free!(),
    ") ORDER BY next_attempt_at LIMIT ($2 + 1) / 2 FOR UPDATE SKIP LOCKED
    ), locked AS MATERIALIZED (
        SELECT *, false AS new FROM due UNION ALL SELECT *, true FROM (",
    read_as_locked!(),
    "WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id > $1 AND (xmax = '0'::xid OR id <= $5 AND ",
    free!(),
    ") ORDER BY id
            LIMIT $2 - (SELECT count(*) FROM due) FOR UPDATE SKIP LOCKED
        ) AS new
    ), size AS MATERIALIZED (SELECT sum(octet_length(payload)) <= $3 AS fits FROM locked)
    SELECT id, CASE WHEN (SELECT fits FROM size) THEN payload END,
        CASE WHEN (SELECT NOT fits FROM size) THEN octet_length(payload) END, attempts, came_back, tried, ",
    doubtful!(),
    ", new, locker = '0'::xid, (SELECT pg_current_xact_id_if_assigned()::xid::text::bigint) FROM locked"
);

/// [`CLAIM`] of new rows from the beginning and [`DELIVERED`] of these ids, with values in place of what is bound.
#[cfg(feature = "internals")]
pub(crate) fn claim_and_mark(rows: i64, ids: &str) -> [String; 2] {
    let with = |sql: &str, values: &[&str]| {
        values.iter().enumerate().fold(sql.to_owned(), |sql, (at, value)| sql.replace(&format!("${}", at + 1), value))
    };
    let (rows, bytes, least, most) =
        (rows.to_string(), MAX_LEASE_BYTES.to_string(), (i64::MIN + 1).to_string(), i64::MAX.to_string());
    [with(CLAIM, &[&least, &rows, &bytes, &least, &most]), with(DELIVERED, &[ids, "'{}'::bigint[]", "0"])]
}

#[derive(Queryable)]
struct ClaimedRow {
    id: i64,
    payload: Option<String>,
    /// Of a payload that is not given.
    bytes: Option<i32>,
    attempts: i32,
    came_back: bool,
    /// Whether it was tried before, so that a request of it may be on its way.
    tried: bool,
    /// Whether it may have been sent by somebody who did not live to record it.
    doubtful: bool,
    new: bool,
    /// Whether nobody had ever locked it.
    untouched: bool,
    /// Whose lock it is.
    transaction: i64,
}

/// Leases rows that may be delivered now and that nobody else holds. None where there are none.
pub(crate) async fn claim(
    pool: &Pool,
    footprints: &Arc<Footprints>,
    mut what: Claim,
    room: OwnedSemaphorePermit,
) -> Result<Claimed, DatabaseError> {
    let mut cut = None;
    let (mut connection, claimed) = loop {
        let mut connection = pool.begin().await?;
        let most_bytes = if what.rows == 1 { MAX_PAYLOAD_BYTES } else { MAX_LEASE_BYTES };
        let binds = [what.after, what.rows, most_bytes, what.failed_after, what.touched_until].map(Bind::Number);
        let claimed: Vec<ClaimedRow> = Statement::<Columns>::new(CLAIM, binds).load(&mut connection).await?;
        if what.rows == 1 || claimed.iter().all(|row| row.payload.is_some()) {
            break (connection, claimed);
        }
        // They are too large to be held in memory all at once: anew, as many as are not.
        what.rows = fitting(&claimed);
        cut = Some(what.rows);
        what.touched_until = claimed.iter().map(|row| row.id).max().unwrap_or(i64::MIN).max(what.touched_until);
        give_back(&mut connection, doubtful(&claimed).is_empty()).await?;
    };
    if claimed.is_empty() {
        AnsiTransactionManager::rollback_transaction(&mut *connection).await?;
        return Ok(Claimed { lease: None, last_new: None, last: i64::MIN, untouched: false, full: false, cut });
    }
    let new = || claimed.iter().filter(|row| row.new);
    let last_new = new().map(|row| row.id).max();
    let full = claimed.len() as i64 >= what.rows || new().count() < claimed.len();
    let last = claimed.iter().map(|row| row.id).max().unwrap_or(i64::MIN);
    let untouched = claimed.iter().any(|row| row.untouched);
    let doubtful = doubtful(&claimed);
    let transaction = claimed[0].transaction as u32;
    let rows: Vec<Row> = claimed.into_iter().map(ClaimedRow::read).collect();
    let entry = footprints.enter(transaction, rows.iter().filter_map(|row| Some((row.id, row.intent.as_ref().ok()?))));
    let lease = Lease { connection, rows, doubtful, entry, room };
    Ok(Claimed { lease: Some(lease), last_new, last, untouched, full, cut })
}

/// How many of these rows have room in one lease; one at least.
fn fitting(rows: &[ClaimedRow]) -> i64 {
    let sizes = rows.iter().scan(0, |sum, row| {
        *sum += i64::from(row.bytes.unwrap_or_default());
        Some(*sum)
    });
    sizes.take_while(|sum| *sum <= MAX_LEASE_BYTES).count().max(1) as i64
}

/// Ends the transaction of a lease of which nothing was sent, so that its rows are in no more doubt than before: what
/// their locks tell of doubt is only kept where the transaction is undone.
async fn give_back(connection: &mut AsyncPgConnection, without_doubt: bool) -> Result<(), DatabaseError> {
    match without_doubt {
        true => AnsiTransactionManager::commit_transaction(connection).await?,
        false => AnsiTransactionManager::rollback_transaction(connection).await?,
    }
    Ok(())
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
                problem: format!(
                    "has {} bytes, more than the {MAX_PAYLOAD_BYTES} that are sent",
                    self.bytes.unwrap_or_default()
                ),
            }),
        };
        let Self { id, attempts, came_back, .. } = self;
        Row { id, attempts, doubtful: self.tried || self.doubtful, came_back, intent, note: None }
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
        give_back(&mut self.connection, self.doubtful.is_empty()).await?;
        Ok(self.room)
    }
}

/// The rows that can contradict a lease: those of these that have one of its keys (`$4`). New ones from `$1` to `$2`, and
/// those that were tried before, unless one of the transactions `$3` has them; refused ones lie in neither's way. Besides,
/// delivered ones that are still in doubt: no time beyond the next seconds means that, and where somebody else has marked
/// a row that was waiting or refused, any may stand there.
macro_rules! ahead {
    ($which:expr) => {
        concat!(
            "WITH given AS MATERIALIZED (SELECT $3::text[]::xid[] AS known, $4 AS keys)
            SELECT id, again, delivered, payload::text AS payload FROM (
                (
                    SELECT id, payload, false AS again, false AS delivered FROM fga_outbox
                    WHERE processed_at IS NULL AND next_attempt_at IS NULL AND id >= $1 AND id < $2 AND ",
            others!($which),
            " ORDER BY id LIMIT $5
                )
                UNION ALL
                SELECT id, payload, true, false FROM fga_outbox
                WHERE ",
            undelivered!(),
            " AND next_attempt_at < 'infinity' AND ",
            others!($which),
            " UNION ALL
                SELECT min(id), payload, false, true FROM fga_outbox
                WHERE (processed_at IS NULL)::integer = 0 AND next_attempt_at > now()
                    AND next_attempt_at < now() + interval '10 seconds' AND ",
            shares_a_key!($which),
            " GROUP BY payload
            ) AS ahead"
        )
    };
}

/// Whether a row is in the hands of none of those transactions and can contradict the lease; asked in this order.
macro_rules! others {
    ($which:expr) => {
        concat!(
            "CASE WHEN xmax = ANY((SELECT known FROM given)::xid[]) THEN false ELSE ",
            shares_a_key!($which),
            " END"
        )
    };
}

/// Whether a row is one of these and has one of the lease's keys.
macro_rules! shares_a_key {
    ($which:expr) => {
        concat!(
            $which,
            " AND EXISTS (SELECT FROM jsonb_path_query(payload, '$.*[*]') AS tuple
                WHERE (tuple ->> 'user') || ' ' || (tuple ->> 'relation') || ' ' || (tuple ->> 'object')
                    IN (SELECT unnest(keys) FROM given))"
        )
    };
}

/// Ahead of a lease that only writes, and without conditions, as most do: rows with deletes or conditions.
const AHEAD_OF_WRITES: &str = ahead!(r#"(payload ? 'deletes' OR payload @> '{"writes": [{"condition": {}}]}')"#);

const AHEAD: &str = ahead!("true");

/// With more new rows ahead than this, a lease is too far ahead of the others to be worth the look: it has none, once it
/// is the first.
const MOST_AHEAD: usize = 2_000;

#[derive(Queryable)]
struct AheadRow {
    id: i64,
    again: bool,
    delivered: bool,
    payload: String,
}

type AheadColumns = (BigInt, Bool, Bool, Text);

const ALONG: &str = concat!(
    "WITH locked AS MATERIALIZED (",
    read_as_locked!(),
    "WHERE id = ANY($1) AND processed_at IS NULL ORDER BY id FOR UPDATE SKIP LOCKED)
    SELECT id, payload, NULL::integer, attempts, came_back, tried, ",
    doubtful!(),
    ", false, false, 0::bigint FROM locked"
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
        let only_writes = intents().all(|intent| {
            intent.deletes().is_empty() && intent.writes().iter().all(|tuple| tuple.condition().is_none())
        });
        let others = self.entry.others();
        let known = others.transactions().chain([self.entry.transaction()]).map(|it| it.to_string());
        let known: Vec<String> = known.collect();
        let keys: HashSet<&TupleKey> = intents().flat_map(Intent::keys).collect();
        let ahead: Vec<AheadRow> = Statement::<AheadColumns>::new(
            if only_writes { AHEAD_OF_WRITES } else { AHEAD },
            [
                Bind::Number(from),
                Bind::Number(last),
                Bind::Texts(known),
                Bind::Texts(keys.into_iter().map(ToString::to_string).collect()),
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
        Ok(Some(Sight { rows: ahead.into_iter().filter_map(read).collect(), others }))
    }

    async fn take_along(&mut self, rows: &[&Ahead]) -> Result<Vec<Row>, DatabaseError> {
        self.entry.add(rows.iter().map(|row| (row.id, &row.intent)));
        let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
        let rows: Vec<ClaimedRow> =
            Statement::<Columns>::new(ALONG, [Bind::Numbers(ids)]).load(&mut self.connection).await?;
        self.doubtful.extend(doubtful(&rows));
        Ok(rows.into_iter().map(ClaimedRow::read).collect())
    }

    async fn look_later(&mut self, rows: &[Row]) -> Result<Vec<Later>, DatabaseError> {
        let back = || rows.iter().filter(|row| row.came_back);
        let Some(first) = back().map(|row| row.id).min() else { return Ok(Vec::new()) };
        let later: Vec<AheadRow> = Statement::<AheadColumns>::new(
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
    let mut statements: Vec<Statement> = Vec::new();
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
