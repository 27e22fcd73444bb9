//! Postgres' own load generator.

use std::fs;
use std::process::Command;

use crate::support::{Database, postgres_bin};

/// Runs a script, with these arguments besides; its transactions a second, the time to connect left out.
pub fn run(database: &Database, script: &str, args: &[&str]) -> f64 {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("script.sql");
    fs::write(&file, script).expect("the folder can be written");
    let output = Command::new(postgres_bin().join("pgbench"))
        .current_dir(&dir)
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
