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
    ConfigError, DatabaseError, DatabaseUrl, DrainError, Engine, EngineBuilder, Fault, FaultKind, Intent, Requeue,
    Tuple, TupleKey, Undelivered, enqueue_all, list, migrate, requeue, status,
};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

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
    /// Exits with 0 where nothing is left, 1 where rows are left waiting, refused or held by somebody else, 2 on bad
    /// usage or configuration, 3 where Postgres or OpenFGA can't be reached.
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
        #[command(flatten)]
        delivery: DeliveryArgs,
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
        #[command(flatten)]
        delivery: DeliveryArgs,
        /// How long a stop waits for requests in flight
        #[arg(long, default_value = "15s", value_parser = humantime::parse_duration)]
        grace: Duration,
    },
    /// Count the rows in each state, say why some are not delivered, and whether OpenFGA can be used
    #[command(after_help = "Example:\n  fga-outbox status --json --database-url postgres://app@localhost/app")]
    Status {
        #[command(flatten)]
        database: DatabaseArgs,
        #[command(flatten)]
        target: TargetArgs,
        /// Print the counts as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show rows that are not delivered, and why
    #[command(after_help = "Example:\n  fga-outbox list --refused --limit 5")]
    List {
        #[command(flatten)]
        state: StateArgs,
        /// Print one JSON object a row
        #[arg(long)]
        json: bool,
        /// How many rows at most
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..))]
        limit: i64,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Make refused or waiting rows ready again
    #[command(after_help = "Example:\n  fga-outbox requeue --reason \"type 'archive' not found\" --dry-run")]
    Requeue {
        #[command(flatten)]
        which: RequeueArgs,
        /// Only say how many rows there are
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct StateArgs {
    /// Rows that OpenFGA refuses
    #[arg(long)]
    refused: bool,
    /// Rows that will be tried again at a later time
    #[arg(long)]
    waiting: bool,
    /// Rows to be delivered now
    #[arg(long)]
    ready: bool,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct RequeueArgs {
    /// All refused rows
    #[arg(long)]
    refused: bool,
    /// These rows, refused or waiting
    #[arg(long, num_args = 1.., value_name = "N")]
    id: Vec<i64>,
    /// Rows, refused or waiting, whose reason contains this text
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Args)]
struct DeliveryArgs {
    /// Count a row as refused after so many failed deliveries [default: try for ever]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: Option<u32>,
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
    /// The authorization model's id [default: the store's latest, followed when there is a newer one]
    #[arg(long, env = "FGA_MODEL_ID", hide_env_values = true, value_name = "ULID")]
    model_id: Option<String>,
    /// A shared token
    #[arg(long, env = "FGA_API_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    api_token: Option<String>,
    /// OAuth 2 client credentials, in place of a shared token: the client's id
    #[arg(long, env = "FGA_CLIENT_ID", hide_env_values = true, value_name = "ID")]
    client_id: Option<String>,
    /// … its secret
    #[arg(long, env = "FGA_CLIENT_SECRET", hide_env_values = true, value_name = "SECRET")]
    client_secret: Option<String>,
    /// … who issues its tokens: a host, or the URL of its token endpoint
    #[arg(long, env = "FGA_API_TOKEN_ISSUER", hide_env_values = true, value_name = "ISSUER")]
    api_token_issuer: Option<String>,
    /// … for which audience
    #[arg(long, env = "FGA_API_AUDIENCE", hide_env_values = true, value_name = "AUDIENCE")]
    api_audience: Option<String>,
    /// … with which scopes, separated by spaces
    #[arg(long, env = "FGA_API_SCOPES", hide_env_values = true, value_name = "SCOPES")]
    api_scopes: Option<String>,
    /// A PEM file of certificates to trust for HTTPS, besides the system's
    #[arg(long, env = "FGA_CA_CERT", hide_env_values = true, value_name = "FILE")]
    ca_cert: Option<String>,
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
            complain(format!("error: {error:#}"));
            ExitCode::from(exit_code(&error))
        }
    }
}

fn log_to_stderr(cli: &Cli) {
    // What the other commands have to say, they print.
    let default = if matches!(cli.command, Command::Run { .. }) { "info" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // Spans are traces: with RUST_LOG=fga_outbox=trace each tells at its end how long it took.
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let logs = logs.with_span_events(FmtSpan::CLOSE);
    match cli.log_format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => logs.json().init(),
    }
}

async fn execute(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Migrate { database } => run_migrations(database).await,
        Command::Enqueue { file, write, delete, database } => enqueue(file, write, delete, database).await,
        Command::Drain { database, target, json, delivery, patience } => {
            drain(&database, delivery.set(builder(&database, &target)).patience(patience), json).await
        }
        Command::Run { database, target, delivery, grace } => {
            run(delivery.set(builder(&database, &target)).grace(grace)).await
        }
        Command::Status { database, target, json } => print_status(&database, &target, json).await,
        Command::List { state, json, limit, database } => print_rows(&state, json, limit, &database).await,
        Command::Requeue { which, dry_run, database } => requeue_rows(which, dry_run, &database).await,
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
    type Set = fn(EngineBuilder, String) -> EngineBuilder;
    let mut builder = Engine::builder();
    let settings: [(&Option<String>, Set); 10] = [
        (&database.database_url, EngineBuilder::database_url),
        (&database.schema, EngineBuilder::schema),
        (&target.api_url, EngineBuilder::api_url),
        (&target.store_id, EngineBuilder::store_id),
        (&target.model_id, EngineBuilder::model_id),
        (&target.api_token, EngineBuilder::api_token),
        (&target.api_token_issuer, EngineBuilder::token_issuer),
        (&target.api_audience, EngineBuilder::audience),
        (&target.api_scopes, EngineBuilder::scopes),
        (&target.ca_cert, EngineBuilder::ca_cert),
    ];
    for (value, set) in settings {
        if let Some(value) = given(value) {
            builder = set(builder, value);
        }
    }
    let (id, secret) = (given(&target.client_id), given(&target.client_secret));
    if id.is_some() || secret.is_some() {
        builder = builder.client_credentials(id.unwrap_or_default(), secret.unwrap_or_default());
    }
    builder
}

impl DeliveryArgs {
    fn set(&self, builder: EngineBuilder) -> EngineBuilder {
        match self.max_attempts {
            Some(attempts) => builder.max_attempts(attempts),
            None => builder,
        }
    }
}

async fn run_migrations(database: DatabaseArgs) -> anyhow::Result<u8> {
    let migrated = migrate(&database.url()?).await?;
    match &migrated.run[..] {
        [] => say("nothing to do: fga_outbox is up to date")?,
        run => run.iter().try_for_each(|name| say(format!("ran {name}")))?,
    }
    Ok(0)
}

/// The engine sends no payload of more than 16 MiB as Postgres writes it, which is with more spaces.
const LONGEST_LINE: usize = 14 << 20;

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
        .await
        // That of BEGIN and COMMIT comes as it is.
        .map_err(|error| match error.downcast::<diesel::result::Error>() {
            Ok(error) => DatabaseError::from(error).into(),
            Err(error) => error,
        })?;
    // They are in, whether or not this can be said.
    if let Err(error) = say(format!("enqueued {rows} {}", if rows == 1 { "row" } else { "rows" })) {
        complain(format!("{error:#}"));
    }
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
        anyhow::ensure!(line.len() <= LONGEST_LINE, "{}: payload: has {} bytes, more than 14 MiB", here(), line.len());
        Intent::from_json(&line).with_context(here)?;
        payloads.push(line);
    }
    Ok(payloads)
}

async fn drain(database: &DatabaseArgs, builder: EngineBuilder, json: bool) -> anyhow::Result<u8> {
    let began = Instant::now();
    // So that what is wrong is told apart from what is out of reach.
    drop(database.connect().await?);
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

    let (delivered, waiting, refused) = (engine.stats().delivered, drained.waiting, drained.refused);
    let seconds = began.elapsed().as_secs_f64();
    if json {
        let result =
            serde_json::json!({"delivered": delivered, "waiting": waiting, "refused": refused, "seconds": seconds});
        say(result)?;
    } else {
        let unit = if delivered == 1 { "row" } else { "rows" };
        say(format!("delivered {delivered} {unit} in {seconds:.1} s; {waiting} waiting, {refused} refused"))?;
    }
    if drained.held > 0 {
        complain(format!("rows that other sessions hold, and that were not waited for any longer: {}", drained.held));
    }
    Ok(if waiting + refused + drained.held == 0 { 0 } else { LEFT })
}

async fn run(builder: EngineBuilder) -> anyhow::Result<u8> {
    let engine = builder.start()?;
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

async fn print_status(database: &DatabaseArgs, target: &TargetArgs, json: bool) -> anyhow::Result<u8> {
    let (status, reasons) = status(&mut database.connect().await?).await?;
    // Only for who says where it is: the counts need no OpenFGA.
    let openfga = match given(&target.api_url).and(given(&target.store_id)) {
        Some(_) => Some(builder(database, target).check_target().await?),
        None => None,
    };
    if json {
        let mut result = serde_json::to_value(&status)?;
        if let Some(openfga) = openfga {
            result["paused"] = openfga.err().map(|fault| fault.reason).into();
        }
        say(result)?;
        return Ok(0);
    }
    say(format!("ready      {}", status.ready))?;
    say(format!("waiting    {}", status.waiting))?;
    say(format!("refused    {}", status.refused))?;
    say(format!("delivered  {}", status.delivered))?;
    if let Some(seconds) = status.oldest_undelivered_seconds {
        say(format!("\nthe oldest row that is not delivered is {} old", age(seconds)))?;
    }
    if !reasons.is_empty() {
        say("\nthe most common reasons:")?;
        for reason in reasons {
            say(format!("{:>9} {}, such as: {}", reason.rows, reason.state, reason.example))?;
        }
    }
    match openfga {
        Some(Ok(())) => say("\nOpenFGA can be used")?,
        Some(Err(fault)) => say(format!("\nOpenFGA can't be used, so engines pause: {fault}"))?,
        None => {}
    }
    Ok(0)
}

fn age(seconds: f64) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(seconds.max(0.0) as u64))
}

async fn print_rows(state: &StateArgs, json: bool, limit: i64, database: &DatabaseArgs) -> anyhow::Result<u8> {
    let state = match state {
        StateArgs { refused: true, .. } => Undelivered::Refused,
        StateArgs { waiting: true, .. } => Undelivered::Waiting,
        StateArgs { .. } => Undelivered::Ready,
    };
    for row in list(&mut database.connect().await?, state, limit).await? {
        if json {
            say(serde_json::to_string(&row)?)?;
            continue;
        }
        let attempts = format!("{} failed {}", row.attempts, if row.attempts == 1 { "attempt" } else { "attempts" });
        say(format!("{}  {} old, {attempts}: {}", row.id, age(row.age_seconds), row.summary))?;
        if let Some(reason) = row.reason {
            say(format!("    {reason}"))?;
        }
        if let Some(seconds) = row.next_attempt_seconds {
            say(format!("    next attempt in {}", age(seconds)))?;
        }
    }
    Ok(0)
}

async fn requeue_rows(which: RequeueArgs, dry_run: bool, database: &DatabaseArgs) -> anyhow::Result<u8> {
    let which = match which {
        RequeueArgs { refused: true, .. } => Requeue::Refused,
        RequeueArgs { reason: Some(reason), .. } => Requeue::Reason(reason),
        RequeueArgs { id, .. } => Requeue::Ids(id),
    };
    let rows = requeue(&mut database.connect().await?, &which, dry_run).await?;
    let unit = if rows == 1 { "row" } else { "rows" };
    match dry_run {
        true => say(format!("would requeue {rows} {unit}"))?,
        false => say(format!("requeued {rows} {unit}"))?,
    }
    Ok(0)
}

/// To stdout. Whoever reads it may have gone, which is no failure.
fn say(line: impl Display) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{}", printable(&line.to_string())) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("stdout"),
    }
}

/// To stderr, if anybody listens.
fn complain(line: String) {
    let _ = writeln!(std::io::stderr(), "{}", printable(&line));
}

/// What rows and servers hold is other people's: none of it controls the terminal.
fn printable(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for char in line.chars() {
        match char {
            '\n' | '\t' => text.push(char),
            char if char.is_control() => text.extend(char.escape_unicode()),
            char => text.push(char),
        }
    }
    text
}
