//! A server's folder, and the shell that keeps both.
//!
//! The shell evaluates the lines that it reads from a pipe, and answers each with its exit status. Only this process
//! holds the pipe's other end, so the pipe closes when the [`Keeper`] is dropped and when the process dies, even by
//! SIGKILL. Then the shell ends the server and removes the folder. It has a process group of its own because an
//! interrupt from the terminal would otherwise end it before it has cleaned up.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
};

use tokio::task::spawn_blocking;

use super::parts;

/// Two signals may reach the shell as this process dies. SIGPIPE, for an answer that nobody is left to read: its trap does
/// nothing instead of ignoring, because the server would inherit that. SIGHUP, which the kernel sends to an orphaned
/// group that has a stopped member, such as a paused server.
const SCRIPT: &str = r#"
trap : PIPE
trap '' HUP
while read -r line; do
    eval "$line" </dev/null >>"$DIR/log" 2>&1
    echo $?
done
[ -z "$pid" ] || kill -s "$LAST_SIGNAL" "$pid" && wait
rm -rf "$DIR"
"#;

/// Who runs the server.
#[derive(Clone, Copy, PartialEq)]
pub enum RunAs {
    Me,
    /// The user `postgres` where this process is root, otherwise this process's user.
    Unprivileged,
}

pub struct Keeper {
    dir: PathBuf,
    shell: Arc<Mutex<Shell>>,
}

struct Shell {
    process: Child,
    lines: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Keeper {
    /// Makes the folder and starts the shell, not yet the server. Lines find the folder as `$DIR` and `args` as `"$@"`;
    /// a line that starts the server leaves its process id in `pid`.
    pub fn new(
        run_as: RunAs,
        last_signal: &str,
        args: &[&str],
        environment: impl FnOnce(&Path) -> Vec<(&'static str, String)>,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("fga-outbox-test-").tempdir().expect("a temporary folder");
        let mut command = Command::new("sh");
        command
            .args(["-c", SCRIPT, "keeper"])
            .args(args)
            .envs(environment(dir.path()))
            .env("DIR", dir.path())
            .env("LAST_SIGNAL", last_signal)
            .env("pid", "")
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        let owner = fs::metadata(&dir).expect("the folder just made").uid();
        if run_as == RunAs::Unprivileged && owner == 0 {
            let (uid, gid) = parts::postgres_user();
            for entry in fs::read_dir(&dir).expect("the folder just made").flatten() {
                chown(entry.path(), Some(uid), Some(gid)).expect("root may change an owner");
            }
            chown(&dir, Some(uid), Some(gid)).expect("root may change an owner");
            command.uid(uid).gid(gid);
        }
        let mut process = command.spawn().expect("sh starts");
        let dir = dir.keep();
        let lines = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("stdout is piped"));
        Self { dir, shell: Arc::new(Mutex::new(Shell { process, lines, answers })) }
    }

    /// Evaluates one line of shell; panics with the server's log when it fails.
    pub async fn run(&self, line: &'static str) {
        let shell = Arc::clone(&self.shell);
        let answered = spawn_blocking(move || shell.lock().expect("no holder panics").run(line)).await;
        match answered.expect("the shell lives as long as its pipe") {
            Ok(()) => {}
            Err(status) => panic!("`{line}` exited with {status}; the server's log:\n{}", self.log()),
        }
    }

    /// What the server and the lines have printed.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Ok(mut shell) = self.shell.lock() {
            shell.lines = None;
            // The port is free and the folder gone when this returns.
            let _ = shell.process.wait();
        }
    }
}

impl Shell {
    fn run(&mut self, line: &str) -> Result<(), String> {
        let lines = self.lines.as_mut().ok_or("the shell has ended")?;
        writeln!(lines, "{line}").map_err(|error| error.to_string())?;
        let mut status = String::new();
        self.answers.read_line(&mut status).map_err(|error| error.to_string())?;
        if status.trim() == "0" { Ok(()) } else { Err(format!("status {}", status.trim())) }
    }
}
