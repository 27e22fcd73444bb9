//! Putting intents into the table.

use diesel::sql_types::{Array, Text};
use diesel::{ExpressionMethods as _, QueryResult};
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
