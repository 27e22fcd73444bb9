//! Statements that Postgres plans once for each connection, and not each time as those of diesel's `sql_query`: for a
//! lease of few rows, planning takes longer than all else.

use std::marker::PhantomData;

use diesel::pg::Pg;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Double, Nullable, Text};

/// SQL with `$1`, `$2` … for what is bound. One that stands in several places is sent for each. Its rows, where it gives
/// some, have columns of these SQL types.
pub(crate) struct Statement<Columns = ()> {
    sql: &'static str,
    binds: Vec<Bind>,
    columns: PhantomData<fn() -> Columns>,
}

/// A value of a statement.
pub(crate) enum Bind {
    Number(i64),
    Seconds(f64),
    Text(String),
    Numbers(Vec<i64>),
    Texts(Vec<String>),
    Times(Vec<Option<f64>>),
}

impl<Columns> Statement<Columns> {
    pub(crate) fn new<const N: usize>(sql: &'static str, binds: [Bind; N]) -> Self {
        Self { sql, binds: binds.into(), columns: PhantomData }
    }
}

impl<Columns> QueryFragment<Pg> for Statement<Columns> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        // A dollar without a number belongs to a path within JSON.
        let mut pieces = self.sql.split('$');
        out.push_sql(pieces.next().unwrap_or_default());
        for piece in pieces {
            let digits = piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len());
            match piece[..digits].parse::<usize>() {
                Ok(number @ 1..) if number <= self.binds.len() => {
                    self.binds[number - 1].push(&mut out)?;
                    out.push_sql(&piece[digits..]);
                }
                _ => {
                    out.push_sql("$");
                    out.push_sql(piece);
                }
            }
        }
        Ok(())
    }
}

impl Bind {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        match self {
            Self::Number(value) => out.push_bind_param::<BigInt, _>(value),
            Self::Seconds(value) => out.push_bind_param::<Double, _>(value),
            Self::Text(value) => out.push_bind_param::<Text, _>(value),
            Self::Numbers(values) => out.push_bind_param::<Array<BigInt>, _>(values),
            Self::Texts(values) => out.push_bind_param::<Array<Text>, _>(values),
            Self::Times(values) => out.push_bind_param::<Array<Nullable<Double>>, _>(values),
        }
    }
}

impl<Columns> QueryId for Statement<Columns> {
    type QueryId = ();

    // It is known by its SQL.
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<Columns> Query for Statement<Columns> {
    type SqlType = Columns;
}

impl<Columns, C> diesel::query_dsl::RunQueryDsl<C> for Statement<Columns> {}
