//! The promises, each against real Postgres and real OpenFGA.

mod access;
mod again;
mod answers;
mod bed;
mod command_line;
mod crowd;
mod delivery;
mod doorbell;
mod failures;
mod isolation;
mod life;
mod migrations;
mod ordering;
mod pooler;
mod size;
mod support;
