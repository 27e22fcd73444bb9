//! The command line: parses, calls the library, and says what came of it.

use std::fmt::Display;
use std::io::{BufRead, BufReader, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand, ValueEnum};
use diesel_async::{AsyncConnection as _, AsyncPgConnection};
use fga_outbox::{
    ConfigError, DatabaseError, DatabaseUrl, DrainError, Engine, EngineBuilder, Fault, FaultKind, Intent, Tuple,
    TupleKey, enqueue_all, migrate, status,
};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Delivers the relationship tuples that applications commit to the table fga_outbox in Postgres to OpenFGA.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    /// How logs are written, to stderr. Which ones: RUST_LOG, such as RUST_LOG=fga_outbox=debug
    #[arg(long, global = true, value_enum, default_value = "text")]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Create the table, or adopt the one that is there
    #[command(after_help = "Example:\n  DATABASE_URL=postgres://app@localhost/app fga-outbox migrate")]
    Migrate {
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Insert intents as rows, all in one transaction
    #[command(after_help = "Examples:\n  fga-outbox enqueue intents.jsonl\n  \
        fga-outbox enqueue --write 'user:anne viewer document:1' --delete 'user:bob viewer document:1'\n\n\
        A line of FILE is one row's payload:\n  \
        {\"writes\": [{\"user\": \"user:anne\", \"relation\": \"viewer\", \"object\": \"document:1\"}]}")]
    Enqueue {
        /// JSON Lines, one payload a line; '-', or nothing where stdin is not a terminal: stdin
        #[arg(conflicts_with_all = ["write", "delete"])]
        file: Option<PathBuf>,
        /// A tuple to write, as 'user relation object'; all --write and --delete together make one row
        #[arg(long, value_name = "TUPLE")]
        write: Vec<Tuple>,
        /// A tuple to delete, as 'user relation object'
        #[arg(long, value_name = "TUPLE")]
        delete: Vec<TupleKey>,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Deliver all that can be delivered now, then end
    ///
    /// Exits with 0 where nothing is left, 1 where rows are left waiting or refused, 2 on bad usage or configuration,
    /// 3 where Postgres or OpenFGA can't be reached.
    #[command(after_help = "Example:\n  \
        fga-outbox drain --database-url postgres://app@localhost/app \\\n    \
        --api-url http://localhost:8080 --store-id 01J9W3S5F0Q1G4Z6V8X2Y7B5NC")]
    Drain {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        target: TargetArgs,
        /// Print the result as one JSON object
        #[arg(long)]
        json: bool,
        /// How long to go on without Postgres or OpenFGA, once begun
        #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
        patience: Duration,
    },
    /// Deliver rows as they come, until SIGINT or SIGTERM
    #[command(after_help = "Example:\n  \
        DATABASE_URL=postgres://app@localhost/app FGA_API_URL=http://localhost:8080 \\\n    \
        FGA_STORE_ID=01J9W3S5F0Q1G4Z6V8X2Y7B5NC fga-outbox run --log-format json")]
    Run {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        target: TargetArgs,
        /// How long a stop waits for requests in flight
        #[arg(long, default_value = "15s", value_parser = humantime::parse_duration)]
        grace: Duration,
    },
    /// Count the rows in each state, and say why some are not delivered
    #[command(after_help = "Example:\n  fga-outbox status --json --database-url postgres://app@localhost/app")]
    Status {
        #[command(flatten)]
        database: DatabaseArgs,
        /// Print the counts as one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct DatabaseArgs {
    /// Where the table is: postgres://user:password@host:port/database?sslmode=verify-full
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
    /// The table's schema [default: the first of the connection's search_path]
    #[arg(long, env = "FGA_OUTBOX_SCHEMA", hide_env_values = true)]
    schema: Option<String>,
}

#[derive(Args)]
struct TargetArgs {
    /// OpenFGA's address, such as http://localhost:8080
    #[arg(long, env = "FGA_API_URL", hide_env_values = true, value_name = "URL")]
    api_url: Option<String>,
    /// The store's id
    #[arg(long, env = "FGA_STORE_ID", hide_env_values = true, value_name = "ULID")]
    store_id: Option<String>,
    /// The authorization model's id [default: the store's latest, looked up once and pinned]
    #[arg(long, env = "FGA_MODEL_ID", hide_env_values = true, value_name = "ULID")]
    model_id: Option<String>,
    /// A shared token
    #[arg(long, env = "FGA_API_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    api_token: Option<String>,
}

/// The exit codes that say more than "failed".
const LEFT: u8 = 1;
const BAD_CONFIGURATION: u8 = 2;
const UNREACHABLE: u8 = 3;

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr(&cli);
    match actix_rt::System::new().block_on(execute(cli.command)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn log_to_stderr(cli: &Cli) {
    // What the other commands have to say, they print.
    let default = if matches!(cli.command, Command::Run { .. }) { "info" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match cli.log_format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => logs.json().init(),
    }
}

async fn execute(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Migrate { database } => run_migrations(database).await,
        Command::Enqueue { file, write, delete, database } => enqueue(file, write, delete, database).await,
        Command::Drain { database, target, json, patience } => drain(database, target, json, patience).await,
        Command::Run { database, target, grace } => run(database, target, grace).await,
        Command::Status { database, json } => print_status(database, json).await,
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<DatabaseError>() {
            return database_exit_code(error);
        }
        match cause.downcast_ref::<DrainError>() {
            Some(DrainError::Target(fault)) => return target_exit_code(fault),
            Some(DrainError::Database(error)) => return database_exit_code(error),
            _ => {}
        }
        if let Some(fault) = cause.downcast_ref::<Fault>() {
            return target_exit_code(fault);
        }
    }
    BAD_CONFIGURATION
}

fn database_exit_code(error: &DatabaseError) -> u8 {
    if matches!(error, DatabaseError::Unreachable(_)) { UNREACHABLE } else { BAD_CONFIGURATION }
}

fn target_exit_code(fault: &Fault) -> u8 {
    match fault.kind {
        FaultKind::Unauthenticated | FaultKind::Misconfigured => BAD_CONFIGURATION,
        _ => UNREACHABLE,
    }
}

impl DatabaseArgs {
    fn url(&self) -> anyhow::Result<DatabaseUrl> {
        let text = given(&self.database_url).ok_or(ConfigError::Missing("DATABASE_URL (or --database-url)"))?;
        let url: DatabaseUrl = text.parse()?;
        Ok(match given(&self.schema) {
            Some(schema) => url.with_schema(&schema),
            None => url,
        })
    }

    async fn connect(&self) -> anyhow::Result<AsyncPgConnection> {
        Ok(self.url()?.connect().await?)
    }
}

/// A variable that is set to nothing counts as not set.
fn given(value: &Option<String>) -> Option<String> {
    value.clone().filter(|value| !value.is_empty())
}

fn builder(database: &DatabaseArgs, target: &TargetArgs) -> EngineBuilder {
    let mut builder = Engine::builder();
    let settings: [(&Option<String>, fn(EngineBuilder, String) -> EngineBuilder); 6] = [
        (&database.database_url, EngineBuilder::database_url),
        (&database.schema, EngineBuilder::schema),
        (&target.api_url, EngineBuilder::api_url),
        (&target.store_id, EngineBuilder::store_id),
        (&target.model_id, EngineBuilder::model_id),
        (&target.api_token, EngineBuilder::api_token),
    ];
    for (value, set) in settings {
        if let Some(value) = given(value) {
            builder = set(builder, value);
        }
    }
    builder
}

async fn run_migrations(database: DatabaseArgs) -> anyhow::Result<u8> {
    let migrated = migrate(&database.url()?).await?;
    match &migrated.run[..] {
        [] => say("nothing to do: fga_outbox is up to date")?,
        run => run.iter().try_for_each(|name| say(format!("ran {name}")))?,
    }
    Ok(0)
}

/// Payloads go to Postgres in statements of this many.
const ROWS_A_STATEMENT: usize = 1_000;

async fn enqueue(
    file: Option<PathBuf>,
    write: Vec<Tuple>,
    delete: Vec<TupleKey>,
    database: DatabaseArgs,
) -> anyhow::Result<u8> {
    let (mut lines, name): (Box<dyn BufRead + Send>, String) = match file {
        Some(path) if path.as_os_str() != "-" => {
            let file = std::fs::File::open(&path).with_context(|| path.display().to_string())?;
            (Box::new(BufReader::new(file)), path.display().to_string())
        }
        None if !write.is_empty() || !delete.is_empty() => {
            let line = Intent::new(write, delete)?.to_json().to_string();
            (Box::new(std::io::Cursor::new(line)), "arguments".to_owned())
        }
        None if std::io::stdin().is_terminal() => {
            anyhow::bail!("nothing to enqueue: give a FILE, --write or --delete, or payloads on stdin")
        }
        _ => (Box::new(BufReader::new(std::io::stdin())), "stdin".to_owned()),
    };
    let mut connection = database.connect().await?;
    let rows = connection
        .transaction(async |connection| {
            let (mut rows, mut number) = (0, 0);
            loop {
                let payloads = next_payloads(&mut lines, &name, &mut number)?;
                if payloads.is_empty() {
                    return anyhow::Ok(rows);
                }
                rows += enqueue_all(connection, &payloads).await.map_err(DatabaseError::from)?;
            }
        })
        .await?;
    say(format!("enqueued {rows} {}", if rows == 1 { "row" } else { "rows" }))?;
    Ok(0)
}

/// Some more lines, each checked. Empty ones are passed over.
fn next_payloads(lines: &mut (dyn BufRead + Send), name: &str, number: &mut usize) -> anyhow::Result<Vec<String>> {
    let mut payloads = Vec::new();
    while payloads.len() < ROWS_A_STATEMENT {
        let mut line = String::new();
        *number += 1;
        let here = || format!("{name}, line {number}");
        if lines.read_line(&mut line).with_context(here)? == 0 {
            break;
        }
        if line.trim().is_empty() {
            continue;
        }
        Intent::from_json(&line).with_context(here)?;
        payloads.push(line);
    }
    Ok(payloads)
}

async fn drain(database: DatabaseArgs, target: TargetArgs, json: bool, patience: Duration) -> anyhow::Result<u8> {
    let began = Instant::now();
    let builder = builder(&database, &target).patience(patience);
    builder.check_target().await?.context("OpenFGA")?;
    let engine = builder.start()?;
    let ready = engine.ready().await?;

    let bar = ProgressBar::new(ready.unsigned_abs());
    let style = "{bar:40} {pos}/{len} rows, {per_sec}, {eta} left";
    bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
    let draining = engine.drain();
    tokio::pin!(draining);
    let drained = loop {
        tokio::select! {
            drained = &mut draining => break drained,
            () = tokio::time::sleep(Duration::from_millis(100)) => {
                let stats = engine.stats();
                bar.set_position(stats.delivered + stats.failed + stats.refused);
            }
        }
    };
    bar.finish_and_clear();
    engine.stop().await;
    let drained = drained?;

    let (delivered, waiting, refused) = (drained.delivered, drained.waiting, drained.refused);
    let seconds = began.elapsed().as_secs_f64();
    if json {
        let result =
            serde_json::json!({"delivered": delivered, "waiting": waiting, "refused": refused, "seconds": seconds});
        say(result)?;
    } else {
        say(format!("delivered {delivered} rows in {seconds:.1} s; {waiting} are waiting, {refused} are refused"))?;
    }
    if drained.held > 0 {
        eprintln!("{} rows are held by other sessions and were not waited for any longer", drained.held);
    }
    Ok(if waiting + refused + drained.held == 0 { 0 } else { LEFT })
}

async fn run(database: DatabaseArgs, target: TargetArgs, grace: Duration) -> anyhow::Result<u8> {
    let engine = builder(&database, &target).grace(grace).start()?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tracing::info!("running: stop with SIGINT or SIGTERM");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping: waiting for requests in flight");
    engine.stop().await;
    let stats = engine.stats();
    tracing::info!(delivered = stats.delivered, refused = stats.refused, failed = stats.failed, "stopped");
    Ok(0)
}

async fn print_status(database: DatabaseArgs, json: bool) -> anyhow::Result<u8> {
    let (status, reasons) = status(&mut database.connect().await?).await?;
    if json {
        say(serde_json::to_string(&status)?)?;
        return Ok(0);
    }
    say(format!("ready      {}", status.ready))?;
    say(format!("waiting    {}", status.waiting))?;
    say(format!("refused    {}", status.refused))?;
    say(format!("delivered  {}", status.delivered))?;
    if let Some(seconds) = status.oldest_undelivered_seconds {
        let age = Duration::from_secs(seconds.max(0.0) as u64);
        say(format!("\nthe oldest row that is not delivered is {} old", humantime::format_duration(age)))?;
    }
    if !reasons.is_empty() {
        say("\nthe most common reasons:")?;
        for reason in reasons {
            say(format!("{:>9} {}, such as: {}", reason.rows, reason.state, reason.example))?;
        }
    }
    Ok(0)
}

/// To stdout. Whoever reads it may have gone, which is no reason to panic.
fn say(line: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("stdout")
}
