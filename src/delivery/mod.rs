//! Where the decisions are made: pure functions over plain values, without actors and without I/O.
//!
//! [`plan`] turns the rows of a lease into requests and their answers into outcomes; [`verdict`] says what an answer
//! of OpenFGA is about; [`backoff`] says when to try again, and [`flow`] how much to send at once.

pub(crate) mod backoff;
pub(crate) mod flow;
pub(crate) mod order;
pub(crate) mod plan;
#[cfg(test)]
mod simulation;
pub(crate) mod verdict;
