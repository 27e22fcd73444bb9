//! The promises, each against real Postgres and real OpenFGA.

mod bed;
mod command_line;
mod crowd;
mod delivery;
mod failures;
mod life;
mod migrations;
mod support;
