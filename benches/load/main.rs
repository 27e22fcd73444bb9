//! The engine under load, side by side with what it is measured against, on a Postgres and an OpenFGA of the bench's
//! own:
//!
//!     cargo bench --bench load                                   # lists the scenarios
//!     cargo bench --bench load -- ceiling --rows 20000 --json

#[path = "../../tests/it/support/mod.rs"]
mod support;

mod bed;
mod ceiling;
mod cost;
mod floor;
mod http;
mod latency;
mod order;
mod pgbench;
mod process;
mod proxy;
mod scale;
mod sink;
mod size;
mod table;
mod worker;

use std::time::Instant;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Measures the engine on servers of its own, on this machine.
#[derive(Parser)]
#[command(name = "load")]
struct Cli {
    #[command(subcommand)]
    scenario: Option<Scenario>,
    /// Print a line of JSON for each table
    #[arg(long, global = true)]
    json: bool,
    /// Given by cargo
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Scenario {
    Ceiling(ceiling::Args),
    Floor(floor::Args),
    Worker(worker::Args),
    Latency(latency::Args),
    Cost(cost::Args),
    Size(size::Args),
    Scale(scale::Args),
    Order(order::Args),
    /// All of these, one after the other
    All,
}

#[tokio::main]
async fn main() {
    let Cli { scenario, json, .. } = Cli::parse();
    match scenario {
        // `cargo bench` without arguments runs every bench: these would take a quarter of an hour.
        None => Cli::command().print_help().expect("stdout can be written"),
        Some(Scenario::All) => {
            for name in Cli::command().get_subcommands().map(clap::Command::get_name) {
                if let Some(scenario) = Cli::parse_from(["load", name]).scenario {
                    run(scenario, json).await;
                }
            }
        }
        Some(scenario) => run(scenario, json).await,
    }
}

async fn run(scenario: Scenario, json: bool) {
    let began = Instant::now();
    let tables = match scenario {
        Scenario::Ceiling(args) => ceiling::run(args).await,
        Scenario::Floor(args) => floor::run(args).await,
        Scenario::Worker(args) => worker::run(args).await,
        Scenario::Latency(args) => latency::run(args).await,
        Scenario::Cost(args) => cost::run(args).await,
        Scenario::Size(args) => size::run(args).await,
        Scenario::Scale(args) => scale::run(args).await,
        Scenario::Order(args) => order::run(args).await,
        Scenario::All => return,
    };
    for table in tables {
        table.print(json);
    }
    eprintln!("took {:.0} s", began.elapsed().as_secs_f64());
}
