//! Where the servers' binaries are, and ports for them to listen on.

use std::{
    env,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU16, Ordering},
};

const OPENFGA: &str = "openfga-v1.18.1";
const OPENFGA_OLD: &str = "openfga-v1.9.5";

/// The current OpenFGA: `OPENFGA_BIN`, one on the `PATH`, or the cached one.
pub fn openfga() -> PathBuf {
    from_env("OPENFGA_BIN").or_else(|| on_path("openfga")).unwrap_or_else(|| cached(OPENFGA))
}

/// The last OpenFGA without `on_duplicate`: `OPENFGA_OLD_BIN` or the cached one.
pub fn openfga_old() -> PathBuf {
    from_env("OPENFGA_OLD_BIN").unwrap_or_else(|| cached(OPENFGA_OLD))
}

/// The folder of Postgres's server binaries: `PG_BIN`, what `pg_config` says, one on the `PATH`, or the newest where
/// packages put them.
pub fn postgres_bin() -> PathBuf {
    from_env("PG_BIN")
        .or_else(|| pg_config().filter(|bin| has_server(bin)))
        .or_else(|| path_folders().find(|folder| has_server(folder)))
        .or_else(|| newest("/usr/lib/postgresql", ""))
        .or_else(|| newest("/opt/homebrew/opt", "postgresql"))
        .or_else(|| newest("/usr/local/opt", "postgresql"))
        .unwrap_or_else(|| missing("Postgres's server binaries"))
}

/// `PGBOUNCER_BIN`, one on the `PATH`, or where Debian puts it.
pub fn pgbouncer() -> PathBuf {
    let in_sbin = || Some(PathBuf::from("/usr/sbin/pgbouncer")).filter(|bin| bin.is_file());
    let found = from_env("PGBOUNCER_BIN").or_else(|| on_path("pgbouncer")).or_else(in_sbin);
    found.unwrap_or_else(|| missing("pgbouncer"))
}

/// The user and the group `postgres`: root must not run Postgres.
pub fn postgres_user() -> (u32, u32) {
    let id = |flag| first_line(Command::new("id").args([flag, "postgres"]))?.parse().ok();
    id("-u").zip(id("-g")).unwrap_or_else(|| missing("the system user postgres"))
}

/// A port that nobody listens on. It lies below the range that outgoing connections take theirs from, so that a server
/// finds it free again after a restart.
pub fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    const COUNT: u16 = 20_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);

    // A prime stride keeps test processes of neighbouring pids apart.
    let start = process::id().wrapping_mul(7_919);
    loop {
        let offset = (start + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
        let port = FIRST + offset as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

fn from_env(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn on_path(name: &str) -> Option<PathBuf> {
    path_folders().map(|folder| folder.join(name)).find(|bin| bin.is_file())
}

fn path_folders() -> impl Iterator<Item = PathBuf> {
    env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default().into_iter()
}

fn cached(name: &str) -> PathBuf {
    let cache = from_env("FGA_OUTBOX_CACHE")
        .or_else(|| Some(from_env("XDG_CACHE_HOME")?.join("fga-outbox")))
        .or_else(|| Some(from_env("HOME")?.join(".cache/fga-outbox")));
    cache.map(|cache| cache.join("bin").join(name)).filter(|bin| bin.is_file()).unwrap_or_else(|| missing(name))
}

fn pg_config() -> Option<PathBuf> {
    first_line(Command::new("pg_config").arg("--bindir")).map(PathBuf::from)
}

/// The `bin` folder of the highest version among the installations in `parent` whose name is `prefix` and a version.
fn newest(parent: &str, prefix: &str) -> Option<PathBuf> {
    let installation = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let version = entry.file_name().to_str()?.strip_prefix(prefix)?.trim_start_matches('@').parse::<u32>().ok()?;
        let bin = entry.path().join("bin");
        has_server(&bin).then_some((version, bin))
    };
    let newest = Path::new(parent).read_dir().ok()?.filter_map(installation).max()?;
    Some(newest.1)
}

fn has_server(bin: &Path) -> bool {
    bin.join("postgres").is_file() && bin.join("initdb").is_file()
}

fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}

fn missing(part: &str) -> ! {
    panic!("run scripts/fetch-parts first: {part} not found")
}
