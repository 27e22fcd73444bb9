//! How many rows are in which state.

use diesel::sql_types::{BigInt, Bool, Double, Nullable, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};
use serde::Serialize;

use super::DatabaseError;

/// How many rows the table holds in each state, committed ones only.
#[derive(Debug, Clone, PartialEq, Serialize, QueryableByName)]
pub struct Status {
    /// To be delivered now.
    #[diesel(sql_type = BigInt)]
    pub ready: i64,
    /// To be tried again at a later time, after a failure that may pass.
    #[diesel(sql_type = BigInt)]
    pub waiting: i64,
    /// Refused by OpenFGA: not tried again until something changes.
    #[diesel(sql_type = BigInt)]
    pub refused: i64,
    /// Accepted by OpenFGA.
    #[diesel(sql_type = BigInt)]
    pub delivered: i64,
    /// How long ago the oldest row that is not delivered was inserted; absent where all are.
    #[diesel(sql_type = Nullable<Double>)]
    pub oldest_undelivered_seconds: Option<f64>,
}

/// Why rows are not delivered. Texts that differ only in what they quote count as one.
#[derive(Debug, Clone, PartialEq, Eq, QueryableByName)]
pub struct Reason {
    /// `waiting` or `refused`.
    #[diesel(sql_type = Text)]
    pub state: String,
    /// An example of `last_error`.
    #[diesel(sql_type = Text)]
    pub example: String,
    /// How many rows have it.
    #[diesel(sql_type = BigInt)]
    pub rows: i64,
}

/// Counts the rows, and the five most common reasons why some are not delivered. Reads the whole table.
///
/// # Errors
/// [`DatabaseError::NotMigrated`] where the table is not there or not complete.
pub async fn status(connection: &mut AsyncPgConnection) -> Result<(Status, Vec<Reason>), DatabaseError> {
    // For poolers: what is prepared in a transaction is executed on the same server connection.
    connection.transaction(count).await
}

async fn count(connection: &mut AsyncPgConnection) -> Result<(Status, Vec<Reason>), DatabaseError> {
    let status = sql_query(
        "SELECT ready, waiting, refused, oldest_undelivered_seconds,
             (SELECT count(*) FROM fga_outbox WHERE processed_at IS NOT NULL) AS delivered
         FROM (
             SELECT count(*) FILTER (WHERE next_attempt_at IS NULL OR next_attempt_at <= now()) AS ready,
                 count(*) FILTER (WHERE next_attempt_at > now() AND next_attempt_at < 'infinity') AS waiting,
                 count(*) FILTER (WHERE next_attempt_at = 'infinity') AS refused,
                 extract(epoch FROM now() - min(created_at) FILTER (WHERE isfinite(created_at)))::float8
                     AS oldest_undelivered_seconds
             FROM fga_outbox WHERE processed_at IS NULL
         ) AS pending",
    );
    let status = status.get_result(connection).await?;
    let reasons = sql_query(
        "SELECT state, min(last_error) AS example, count(*) AS rows
         FROM (
             SELECT last_error, CASE WHEN next_attempt_at = 'infinity' THEN 'refused' ELSE 'waiting' END AS state
             FROM fga_outbox WHERE processed_at IS NULL AND next_attempt_at IS NOT NULL AND last_error IS NOT NULL
         ) AS failed
         GROUP BY state, regexp_replace(last_error, '''[^'']*''|[0-9]+', '', 'g')
         ORDER BY rows DESC, state, example LIMIT 5",
    );
    Ok((status, reasons.load(connection).await?))
}

/// How many rows are not delivered, by state; ready ones up to some `id`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, QueryableByName)]
pub(crate) struct Left {
    #[diesel(sql_type = BigInt)]
    pub(crate) ready: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) waiting: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) refused: i64,
}

/// As [`status`], without what grows with the delivered rows, and with the ready rows only up to this `id`.
pub(crate) async fn left(connection: &mut AsyncPgConnection, until: i64) -> Result<Left, DatabaseError> {
    let left = sql_query(
        "SELECT count(*) FILTER (WHERE (next_attempt_at IS NULL OR next_attempt_at <= now()) AND id <= $1) AS ready,
             count(*) FILTER (WHERE next_attempt_at > now() AND next_attempt_at < 'infinity') AS waiting,
             count(*) FILTER (WHERE next_attempt_at = 'infinity') AS refused
         FROM fga_outbox WHERE processed_at IS NULL",
    );
    Ok(left.bind::<BigInt, _>(until).get_result(connection).await?)
}

/// Whether a row is ready, up to this `id`; a new one from this `id` on.
pub(crate) async fn is_any_ready(
    connection: &mut AsyncPgConnection,
    from: i64,
    until: i64,
) -> Result<bool, DatabaseError> {
    #[derive(QueryableByName)]
    struct Answer {
        #[diesel(sql_type = Bool)]
        any: bool,
    }
    let any = sql_query(
        "SELECT EXISTS (SELECT FROM fga_outbox WHERE processed_at IS NULL AND next_attempt_at IS NULL
                 AND id >= $1 AND id <= $2)
             OR EXISTS (SELECT FROM fga_outbox
                 WHERE (processed_at IS NULL)::integer = 1 AND next_attempt_at <= now() AND id + 0 <= $2) AS any",
    );
    Ok(any.bind::<BigInt, _>(from).bind::<BigInt, _>(until).get_result::<Answer>(connection).await?.any)
}

/// The highest `id` of the table, delivered or not.
pub(crate) async fn last_id(connection: &mut AsyncPgConnection) -> Result<i64, DatabaseError> {
    #[derive(QueryableByName)]
    struct Last {
        #[diesel(sql_type = Nullable<BigInt>)]
        id: Option<i64>,
    }
    let last: Last = sql_query("SELECT max(id) AS id FROM fga_outbox").get_result(connection).await?;
    Ok(last.id.unwrap_or(i64::MIN))
}
