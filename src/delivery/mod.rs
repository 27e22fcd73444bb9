//! Where the decisions are made: pure functions over plain values, without actors and without I/O.
//!
//! [`order`] says which rows of a lease may be sent now; [`plan`] turns them into requests and their ends into outcomes;
//! [`verdict`] says what an answer of OpenFGA is about, and [`sending`] what to do about it; [`backoff`] says when to try
//! again, and [`flow`] how much to send at once.

pub(crate) mod backoff;
pub(crate) mod flow;
pub(crate) mod footprints;
#[cfg(test)]
mod history;
pub(crate) mod order;
pub(crate) mod plan;
pub(crate) mod sending;
#[cfg(test)]
mod simulation;
pub(crate) mod verdict;
