//! What a process of `fga-outbox` takes of the machine, as Linux tells.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::bed::Bed;

pub struct Process(Child);

/// What it took in all.
pub struct Taken {
    /// The most memory that it ever had.
    pub mebibytes: f64,
    pub cpu_seconds: f64,
}

impl Process {
    /// Starts the program with this command, on this bed.
    pub fn start(bed: &Bed, command: &str) -> Self {
        let process = Command::new(env!("CARGO_BIN_EXE_fga-outbox"))
            .arg(command)
            .env("DATABASE_URL", bed.database.url())
            .env("FGA_API_URL", &bed.target.api_url)
            .env("FGA_STORE_ID", &bed.target.store_id)
            .env("FGA_MODEL_ID", &bed.target.model_id)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(process.expect("cargo has built it"))
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Taken {
        let mut mebibytes = 0.0;
        // Its memory is gone with it; its times are there until it is waited for.
        loop {
            mebibytes = self.peak_mebibytes().unwrap_or(mebibytes);
            let stat = self.stat();
            if stat[0] == "Z" {
                // utime and stime, in hundredths of a second on every Linux.
                let ticks = |at: usize| stat[at].parse::<f64>().unwrap_or(f64::NAN);
                let cpu_seconds = (ticks(11) + ticks(12)) / 100.0;
                assert!(self.0.wait().is_ok_and(|status| status.success()), "fga-outbox has failed");
                return Taken { mebibytes, cpu_seconds };
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// The most memory that it has had so far.
    pub fn peak_mebibytes(&self) -> Option<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).ok()?;
        let kibibytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().trim_end_matches(" kB");
        Some(kibibytes.parse::<f64>().ok()? / 1024.0)
    }

    /// The columns after its name.
    fn stat(&self) -> Vec<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).expect("nobody has waited for it");
        let (_, columns) = stat.rsplit_once(')').expect("its name is in parentheses");
        columns.split_whitespace().map(String::from).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
