//! Putting intents into the table.

use diesel::sql_types::{Array, BigInt, Jsonb, Text};
use diesel::{ExpressionMethods as _, QueryResult, QueryableByName};
use diesel_async::{AsyncPgConnection, RunQueryDsl as _};

use super::schema::fga_outbox;
use crate::tuple::Intent;

impl Intent {
    /// Inserts this intent as a row, on the application's own connection and so in its own transaction: it is there
    /// once that commits, and never was if that rolls back. Gives the row's `id`, the order of intent.
    ///
    /// ```no_run
    /// # use diesel_async::{AsyncConnection, AsyncPgConnection};
    /// # use fga_outbox::{Intent, Tuple};
    /// # async fn example(conn: &mut AsyncPgConnection) -> Result<(), Box<dyn std::error::Error>> {
    /// let intent = Intent::write(Tuple::new("user:anne", "owner", "document:1")?);
    /// conn.transaction(async |conn| {
    ///     // … insert the document's own row here, through the same `conn` …
    ///     intent.enqueue(conn).await
    /// })
    /// .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// diesel's own, as from any other statement of that transaction.
    pub async fn enqueue(&self, connection: &mut AsyncPgConnection) -> QueryResult<i64> {
        diesel::insert_into(fga_outbox::table)
            .values(fga_outbox::payload.eq(self.to_json()))
            .returning(fga_outbox::id)
            .get_result(connection)
            .await
    }

    /// As [`enqueue`](Self::enqueue), and in order: of two transactions that both enqueue a key this way, the one that
    /// commits later has the higher `id`, so that it wins.
    ///
    /// The database takes ids when a row is inserted, not when it is committed. Without this, a transaction that grants
    /// and one that revokes the same tuple at the same time may take their ids in one order and commit in the other.
    /// It is not needed where something else keeps them apart already, such as a lock on the object's own row.
    ///
    /// It takes a transaction-scoped advisory lock for each key, so a transaction waits for others that enqueue one of
    /// its keys, until they end. As with rows, transactions that enqueue several times, in different orders, can run into
    /// a deadlock, which Postgres resolves by an error in one of them. Locks take memory of the server's that is made for
    /// some thousands at a time (`max_locks_per_transaction`).
    ///
    /// Other languages call the same: `SELECT fga_outbox_enqueue('{"writes": [ … ]}')`.
    ///
    /// # Errors
    /// diesel's own, as from any other statement of that transaction.
    pub async fn enqueue_in_order(&self, connection: &mut AsyncPgConnection) -> QueryResult<i64> {
        #[derive(QueryableByName)]
        struct Enqueued {
            #[diesel(sql_type = BigInt)]
            id: i64,
        }
        let query = diesel::sql_query("SELECT fga_outbox_enqueue($1) AS id").bind::<Jsonb, _>(self.to_json());
        Ok(query.get_result::<Enqueued>(connection).await?.id)
    }
}

/// Inserts many payloads as rows, in their order, in one statement. They are not checked.
///
/// # Errors
/// diesel's own, such as where a payload is not JSON.
pub async fn enqueue_all(connection: &mut AsyncPgConnection, payloads: &[String]) -> QueryResult<usize> {
    diesel::sql_query(
        "INSERT INTO fga_outbox (payload)
         SELECT payload::jsonb FROM unnest($1) WITH ORDINALITY AS given (payload, at) ORDER BY at",
    )
    .bind::<Array<Text>, _>(payloads)
    .execute(connection)
    .await
}
