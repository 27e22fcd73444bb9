#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! ```text
//! INSERT … COMMIT ──▶ Claimer ──Lease──▶ Deliverer ──Lease + outcomes──▶ Ledger ──COMMIT
//!                                          │   ▲
//!                                        plan verdict
//!                                          ▼   │
//!                                         OpenFGA
//! ```
//!
//! A lease is an open transaction that holds its rows with `FOR UPDATE SKIP LOCKED`, as a value that moves from actor to
//! actor: committing it needs the value, and dropping it, wherever and however that happens, gives the rows back. The
//! **Claimer** leases rows, **Deliverers** turn a lease into requests and their answers into an outcome for each row,
//! the **Ledger** records the outcomes in the lease's own transaction, the **Listener** hears commits while the Claimer
//! sleeps, and a keeper brings any of them back that dies.
//! Planning requests and judging answers are pure functions (`src/delivery`); all SQL is in `src/outbox`, all HTTP in
//! `src/openfga`.
#![warn(missing_docs, unreachable_pub)]

mod delivery;
mod engine;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod openfga;
mod outbox;
mod tuple;

pub use delivery::verdict::{Fault, FaultKind};
pub use engine::{ConfigError, DrainError, Drained, Engine, EngineBuilder, Stats};
pub use outbox::{
    DatabaseError, DatabaseUrl, Listed, Migrated, Reason, Requeue, Status, Undelivered, enqueue_all, list, migrate,
    requeue, status,
};
pub use tuple::{
    Condition, Intent, InvalidIntent, MAX_NAME_CHARS, MAX_RELATION_CHARS, MAX_USER_BYTES, Tuple, TupleKey,
};
