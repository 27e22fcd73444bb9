//! Looking at rows that are not delivered, and making them ready again.

use diesel::sql_types::{Array, BigInt, Bool, Double, Integer, Nullable, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};
use serde::Serialize;

use super::DatabaseError;
use crate::tuple::Intent;

/// Which rows to make ready again. Rows that are delivered, ready, or in some engine's hands are never among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Requeue {
    /// All that are refused.
    Refused,
    /// These, waiting or refused.
    Ids(Vec<i64>),
    /// Those, waiting or refused, whose `last_error` contains this text.
    Reason(String),
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    rows: i64,
}

/// `$1`: only refused ones; `$2`: only these ids; `$3`: only with this in their reason; `$4`: only those refused under
/// an older model than this. In the words of `fga_outbox_next_attempt_idx`.
const STUCK: &str = "
    SELECT id FROM fga_outbox
    WHERE (processed_at IS NULL)::integer = 1
        AND next_attempt_at >= CASE WHEN $1 THEN 'infinity' ELSE clock_timestamp() END
        AND ($2 IS NULL OR id = ANY($2))
        AND ($3 IS NULL OR strpos(last_error, $3) > 0)
        AND ($4 IS NULL OR coalesce(refused_model_id, '') COLLATE \"C\" < $4)";

/// Makes rows ready again, due now, in one statement, safe beside running engines. Their `attempts` and `last_error` stay. Gives
/// how many; with `dry_run`, how many there are, and changes nothing.
///
/// # Errors
/// [`DatabaseError::NotMigrated`] where the table is not there or not complete.
pub async fn requeue(connection: &mut AsyncPgConnection, which: &Requeue, dry_run: bool) -> Result<u64, DatabaseError> {
    let (refused, ids, reason) = match which {
        Requeue::Refused => (true, None, None),
        Requeue::Ids(ids) => (false, Some(&ids[..]), None),
        Requeue::Reason(reason) => (false, None, Some(&**reason)),
    };
    // For poolers: what is prepared in a transaction is executed on the same server connection.
    connection
        .transaction(async |connection| requeue_stuck(connection, refused, ids, reason, None, dry_run).await)
        .await
}

/// Makes rows ready again that were refused under an older authorization model than this. Models' ids are ULIDs, so
/// their order is that of their making, and engines that follow it one after the other do not undo each other's work.
pub(crate) async fn requeue_older(connection: &mut AsyncPgConnection, model: &str) -> Result<u64, DatabaseError> {
    requeue_stuck(connection, true, None, None, Some(model), false).await
}

async fn requeue_stuck(
    connection: &mut AsyncPgConnection,
    refused: bool,
    ids: Option<&[i64]>,
    reason: Option<&str>,
    model: Option<&str>,
    dry_run: bool,
) -> Result<u64, DatabaseError> {
    let sql = if dry_run {
        format!("SELECT count(*) AS rows FROM ({STUCK}) AS stuck")
    } else {
        format!(
            "WITH requeued AS (
                 UPDATE fga_outbox SET next_attempt_at = now()
                 WHERE id IN ({STUCK} FOR UPDATE SKIP LOCKED) RETURNING 1
             ) SELECT count(*) AS rows FROM requeued"
        )
    };
    let count: Count = sql_query(sql)
        .bind::<Bool, _>(refused)
        .bind::<Nullable<Array<BigInt>>, _>(ids)
        .bind::<Nullable<Text>, _>(reason)
        .bind::<Nullable<Text>, _>(model)
        .get_result(connection)
        .await?;
    Ok(count.rows.unsigned_abs())
}

/// A state in which a row is not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undelivered {
    /// To be delivered now.
    Ready,
    /// To be tried again at a later time.
    Waiting,
    /// Not to be tried again until something changes.
    Refused,
}

/// A row that is not delivered.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// Its `id`.
    pub id: i64,
    /// How long ago it was inserted.
    pub age_seconds: f64,
    /// Failed deliveries so far.
    pub attempts: i32,
    /// Why the last one failed.
    pub reason: Option<String>,
    /// In how many seconds it will be tried again; absent for rows that are ready or refused.
    pub next_attempt_seconds: Option<f64>,
    /// What its payload asks for, in short.
    pub summary: String,
}

#[derive(QueryableByName)]
struct ListedRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Double)]
    age_seconds: f64,
    #[diesel(sql_type = Integer)]
    attempts: i32,
    #[diesel(sql_type = Nullable<Text>)]
    reason: Option<String>,
    #[diesel(sql_type = Nullable<Double>)]
    next_attempt_seconds: Option<f64>,
    #[diesel(sql_type = Text)]
    payload: String,
}

/// A payload is read up to this many characters for its summary.
const SUMMARISED_CHARS: i32 = 100_000;

/// The rows in this state, in the order of their ids, at most `limit`.
///
/// # Errors
/// [`DatabaseError::NotMigrated`] where the table is not there or not complete.
pub async fn list(
    connection: &mut AsyncPgConnection,
    state: Undelivered,
    limit: i64,
) -> Result<Vec<Listed>, DatabaseError> {
    let condition = match state {
        Undelivered::Ready => "(next_attempt_at IS NULL OR next_attempt_at <= now())",
        Undelivered::Waiting => "next_attempt_at > now() AND next_attempt_at < 'infinity'",
        Undelivered::Refused => "next_attempt_at = 'infinity'",
    };
    let query = sql_query(format!(
        "SELECT id, coalesce(attempts, 0) AS attempts, last_error AS reason,
             coalesce(left(payload::text, $2), 'null') AS payload,
             CASE WHEN isfinite(created_at) THEN extract(epoch FROM now() - created_at)::float8 ELSE 0 END
                 AS age_seconds,
             CASE WHEN next_attempt_at > now() AND next_attempt_at < 'infinity'
                 THEN extract(epoch FROM next_attempt_at - now())::float8 END AS next_attempt_seconds
         FROM fga_outbox WHERE processed_at IS NULL AND {condition} ORDER BY id LIMIT $1"
    ))
    .bind::<BigInt, _>(limit)
    .bind::<Integer, _>(SUMMARISED_CHARS);
    // As above.
    let load = async |connection: &mut AsyncPgConnection| query.load::<ListedRow>(connection).await;
    let rows = connection.transaction(load).await?;
    Ok(rows.into_iter().map(ListedRow::read).collect())
}

impl ListedRow {
    fn read(self) -> Listed {
        let summary = match Intent::from_json(&self.payload) {
            Ok(intent) => summary(&intent),
            Err(_) => {
                let start: String = self.payload.chars().take(80).collect();
                if start.len() < self.payload.len() { format!("{start}…") } else { start }
            }
        };
        Listed {
            id: self.id,
            age_seconds: self.age_seconds,
            attempts: self.attempts,
            reason: self.reason,
            next_attempt_seconds: self.next_attempt_seconds,
            summary,
        }
    }
}

/// The first tuples, `+` for a write and `-` for a delete, and how many more there are.
fn summary(intent: &Intent) -> String {
    let writes = intent.writes().iter().map(|tuple| match tuple.condition() {
        Some(condition) => format!("+ {} with {}", tuple.key(), condition.name()),
        None => format!("+ {}", tuple.key()),
    });
    let all: Vec<String> = writes.chain(intent.deletes().iter().map(|key| format!("- {key}"))).collect();
    let shown = &all[..all.len().min(3)];
    match all.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{}, and {more} more", shown.join(", ")),
    }
}
