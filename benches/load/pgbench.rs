//! Postgres' own load generator.

use std::fs;
use std::path::Path;
use std::process::Command;

use hdrhistogram::Histogram;

use crate::support::{Database, postgres_bin};

/// Runs a script, with these arguments besides; its transactions a second, the time to connect left out.
pub fn run(database: &Database, script: &str, args: &[&str]) -> f64 {
    run_in(tempfile::tempdir().expect("a temporary folder").path(), database, script, args)
}

pub struct Timed {
    pub tps: f64,
    /// Of each transaction, in microseconds.
    pub latencies: Histogram<u64>,
}

/// As [`run`], with the time that each transaction took.
pub fn run_timed(database: &Database, script: &str, args: &[&str]) -> Timed {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let args = [args, &["--log", "--log-prefix=times"]].concat();
    let tps = run_in(dir.path(), database, script, &args);
    let mut latencies = Histogram::new(3).expect("three digits are few enough");
    let entries = dir.path().read_dir().expect("the folder just made").flatten();
    for log in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("times")) {
        for line in fs::read_to_string(log.path()).expect("pgbench writes text").lines() {
            let time = line.split(' ').nth(2).and_then(|time| time.parse().ok()).expect("the third column is the time");
            latencies.record(time).expect("it grows");
        }
    }
    Timed { tps, latencies }
}

fn run_in(dir: &Path, database: &Database, script: &str, args: &[&str]) -> f64 {
    let file = dir.join("script.sql");
    fs::write(&file, script).expect("the folder can be written");
    let output = Command::new(postgres_bin().join("pgbench"))
        .current_dir(dir)
        .args(["--no-vacuum", "--protocol=prepared", "--file"])
        .arg(&file)
        .args(args)
        .arg(database.url())
        .output()
        .expect("pgbench is beside the server");
    let text = String::from_utf8_lossy(&output.stdout);
    let tps = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
    tps.filter(|_| output.status.success())
        .unwrap_or_else(|| panic!("pgbench: {text}{}", String::from_utf8_lossy(&output.stderr)))
}
