//! The actors, and the handle that the application holds.

mod builder;
mod claimer;
mod deliverer;
mod flow;
mod gate;
mod keeper;
mod ledger;
mod listener;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;

pub use builder::{ConfigError, EngineBuilder};
use claimer::Claimer;
use deliverer::Deliverer;
use flow::Permits;
use gate::{Gate, Mode, Pause};
use keeper::Kept;
use ledger::Ledger;
use listener::Listener;

use crate::delivery::footprints::Footprints;
use crate::delivery::plan::Limits;
use crate::delivery::verdict::Fault;
use crate::openfga::Client;
use crate::outbox::{DatabaseError, Left, Pool, is_any_ready, last_id, left};

/// Leases that may be out at once: one is delivered while the next is claimed and the last is recorded.
const ROOM: u32 = 4;
const DELIVERERS: usize = 2;

/// A running engine: a cheap handle that can be cloned and shared between threads, such as in actix-web's `web::Data`.
///
/// The engine runs until [`stop`](Self::stop), whether or not a handle is left.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use fga_outbox::Engine;
///
/// let engine = Engine::builder()
///     .database_url("postgres://app@localhost/app")
///     .api_url("http://localhost:8080")
///     .store_id("01J9W3S5F0Q1G4Z6V8X2Y7B5NC")
///     .start()?;
/// // … the application enqueues rows …
/// engine.nudge();
/// engine.stop().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
    #[cfg_attr(not(feature = "internals"), expect(dead_code))]
    kept: KeptActors,
}

#[derive(Clone)]
struct KeptActors {
    claimer: Kept<Claimer>,
    deliverers: Vec<Kept<Deliverer>>,
    ledger: Kept<Ledger>,
    listener: Kept<Listener>,
}

/// What all actors share.
pub(crate) struct Shared {
    settings: Settings,
    pool: Pool,
    client: Client,
    gate: Gate,
    limits: Mutex<Limits>,
    /// A permit for each lease.
    room: Arc<Semaphore>,
    /// A permit for each request in flight.
    flow: Arc<Permits>,
    /// What the leases that are out want.
    footprints: Arc<Footprints>,
    failures_in_a_row: AtomicU32,
    /// There may be something to claim.
    wake: Notify,
    /// Whether the doorbell is heard, how often it rang, and how often it should have.
    listening: AtomicBool,
    rings: AtomicU64,
    missed_rings: AtomicU64,
    /// From which id on undelivered rows may lie that are neither refused nor failed.
    horizon: AtomicI64,
    /// Rows were given back because they have to wait for rows that somebody else has.
    blocked: AtomicBool,
    /// Of the last lease, all were.
    stuck: AtomicBool,
    /// A lease was recorded, so that what waited for it may go on.
    recorded: Notify,
    sweeps_begun: AtomicU64,
    /// The number of the last sweep that found nothing to lease.
    swept_in_vain: watch::Sender<u64>,
    database: watch::Sender<Option<Outage>>,
    counters: Counters,
    /// Nothing new is begun.
    stopping: CancellationToken,
    /// The actors are gone, or have to go.
    ended: CancellationToken,
    /// Last, so that it is there for all that is dropped before.
    _home: Home,
}

#[derive(Debug, Clone)]
struct Settings {
    poll_interval: Duration,
    grace: Duration,
    patience: Duration,
    max_attempts: Option<u32>,
    model_interval: Duration,
    ordered: bool,
    #[cfg(feature = "internals")]
    steps: Option<Steps>,
}

/// Takes each step of the engine that a test may want to see, and waits until the test lets it go on.
#[cfg(feature = "internals")]
pub(crate) type Steps = tokio::sync::mpsc::UnboundedSender<(&'static str, tokio::sync::oneshot::Sender<()>)>;

/// That Postgres can't be used, since when and why.
#[derive(Debug, Clone)]
struct Outage {
    error: Arc<DatabaseError>,
    since: Instant,
}

#[derive(Debug, Default)]
struct Counters {
    delivered: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    requests: AtomicU64,
    leases: AtomicU64,
    restarts: AtomicU64,
}

/// The runtime that makes and drives all connections, so that they outlive any actor.
struct Home(Option<tokio::runtime::Runtime>);

impl Home {
    fn handle(&self) -> Handle {
        self.0.as_ref().expect("only taken when dropped").handle().clone()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // An ordinary drop would block, which a runtime does not allow on its own threads.
            runtime.shutdown_background();
        }
    }
}

/// Panics the actor that receives it, so that tests can see it come back.
#[derive(actix::Message)]
#[rtype(result = "()")]
pub(crate) struct Crash;

impl Shared {
    fn may_send(&self) -> bool {
        !self.stopping.is_cancelled() && self.gate.mode() != Mode::Closed
    }

    /// A place where a test may hold the engine.
    #[cfg_attr(not(feature = "internals"), expect(clippy::unused_async))]
    async fn step(&self, _name: &'static str) {
        #[cfg(feature = "internals")]
        if let Some(steps) = &self.settings.steps {
            let (go_on, told) = tokio::sync::oneshot::channel();
            if steps.send((_name, go_on)).is_ok() {
                let _ = told.await;
            }
        }
    }

    /// Says so once, however often it fails.
    fn database_fails(&self, error: DatabaseError) {
        self.database.send_if_modified(|outage| {
            let first = outage.is_none();
            if first {
                tracing::warn!(%error, "Postgres can't be used: trying again");
            }
            let since = outage.as_ref().map_or_else(Instant::now, |outage| outage.since);
            *outage = Some(Outage { error: Arc::new(error), since });
            first
        });
    }

    fn database_answers(&self) {
        self.database.send_if_modified(|outage| match outage.take() {
            Some(outage) => {
                tracing::info!(seconds = outage.since.elapsed().as_secs_f64(), "Postgres can be used again: going on");
                true
            }
            None => false,
        });
    }
}

/// What a [`drain`](Engine::drain) did, and left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Drained {
    /// Rows that this engine delivered during the drain.
    pub delivered: u64,
    /// Rows left that will be tried again at a later time.
    pub waiting: i64,
    /// Rows left that OpenFGA refuses.
    pub refused: i64,
    /// Rows left that other sessions hold.
    pub held: i64,
}

/// Why a drain ended before all was delivered that can be.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// OpenFGA could not be used for as long as the drain is patient.
    #[error("OpenFGA: {0}")]
    Target(Fault),
    /// Postgres could not be used for as long as the drain is patient.
    #[error("{0}")]
    Database(Arc<DatabaseError>),
    /// The engine was stopped meanwhile.
    #[error("the engine was stopped")]
    Stopped,
}

/// What an engine did since it was started.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Rows delivered.
    pub delivered: u64,
    /// Deliveries that failed and will be tried again.
    pub failed: u64,
    /// Rows that OpenFGA refused.
    pub refused: u64,
    /// Write requests sent.
    pub requests: u64,
    /// Leases taken.
    pub leases: u64,
    /// Times that the doorbell woke the engine.
    pub rings: u64,
    /// Times that a look by the clock found rows that the doorbell should have told of: none, where it is heard and
    /// every program inserts its rows into the table with its trigger on.
    pub missed_rings: u64,
    /// Actors that died and were started anew.
    pub restarts: u64,
    /// Answers of OpenFGA that are not known, and were taken for passing faults; each kind is logged in full once.
    pub unforeseen: u64,
    /// Why OpenFGA can't be used at the moment, if it can't.
    pub paused: Option<String>,
    /// The authorization model that requests are pinned to, once it is known.
    pub model_id: Option<String>,
}

impl Engine {
    /// Where an engine begins.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// Has the engine look at the table at once. A commit that inserts rows wakes it anyway; this is for where that does not
    /// reach it, such as behind a pooler. Costs nothing; forgetting it loses nothing.
    pub fn nudge(&self) {
        self.shared.wake.notify_one();
    }

    /// What the engine did since it was started.
    pub fn stats(&self) -> Stats {
        let counters = &self.shared.counters;
        Stats {
            delivered: counters.delivered.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            refused: counters.refused.load(Relaxed),
            requests: counters.requests.load(Relaxed),
            leases: counters.leases.load(Relaxed),
            rings: self.shared.rings.load(Relaxed),
            missed_rings: self.shared.missed_rings.load(Relaxed),
            restarts: counters.restarts.load(Relaxed),
            unforeseen: self.shared.client.unforeseen(),
            paused: self.shared.gate.watch().borrow().as_ref().map(|pause| pause.fault.reason.clone()),
            model_id: self.shared.client.model().map(|model| model.to_string()),
        }
    }

    /// Waits until every row is delivered that can be delivered now: what is left is waiting for its time, refused, or
    /// held by another session that has not moved for ten seconds.
    ///
    /// # Errors
    /// [`DrainError`] where OpenFGA or Postgres can't be used for longer than the engine's
    /// [`patience`](EngineBuilder::patience).
    pub async fn drain(&self) -> Result<Drained, DrainError> {
        let delivered_before = self.shared.counters.delivered.load(Relaxed);
        // Rows that come later are not waited for: there may be no end of them.
        let until = loop {
            match self.last_id().await {
                Ok(id) => break id,
                Err(error) => self.shared.database_fails(error),
            }
            self.check_patience()?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let mut held: Option<(i64, Instant)> = None;
        let mut pause = Duration::from_millis(20);
        loop {
            self.sweep_in_vain(until).await?;
            let left = match self.left(until).await {
                Ok(left) => left,
                Err(error) => {
                    self.shared.database_fails(error);
                    continue;
                }
            };
            let since = match held {
                Some((ready, since)) if ready == left.ready => since,
                _ => Instant::now(),
            };
            held = Some((left.ready, since));
            if left.ready == 0 || since.elapsed() > HELD_PATIENCE {
                return Ok(Drained {
                    delivered: self.shared.counters.delivered.load(Relaxed) - delivered_before,
                    waiting: left.waiting,
                    refused: left.refused,
                    held: left.ready,
                });
            }
            // Somebody else has them; to count them is not for nothing.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Waits for a sweep, begun from now on, that finds nothing, and for the leases that are out.
    async fn sweep_in_vain(&self, until: i64) -> Result<(), DrainError> {
        let shared = &self.shared;
        let begun = shared.sweeps_begun.load(Relaxed);
        let mut in_vain = shared.swept_in_vain.subscribe();
        let (mut decided, mut since) = (self.decided(), Instant::now());
        let mut looked = Instant::now();
        let mut counted: (Option<i64>, _) = (None, Instant::now());
        loop {
            let swept = *in_vain.borrow_and_update() > begun;
            if !swept {
                self.nudge();
            }
            let out = shared.gate.mode() != Mode::Open || shared.database.borrow().is_some();
            if out || self.decided() != decided {
                (decided, since) = (self.decided(), Instant::now());
            }
            if out {
                counted = (None, Instant::now());
            }
            // Rows that are leased only to be given back, since they have to wait for rows that somebody else holds.
            if since.elapsed() > HELD_PATIENCE {
                return Ok(());
            }
            if swept && shared.room.available_permits() == ROOM as usize {
                return Ok(());
            }
            // Under a steady stream of new rows no sweep is ever in vain.
            if looked.elapsed() > Duration::from_secs(1) {
                if self.is_any_ready(until).await.is_ok_and(|any| !any) {
                    return Ok(());
                }
                looked = Instant::now();
            }
            // Nor does the engine ever come to rest then.
            let (before, at) = counted;
            if at.elapsed() > if before.is_some() { HELD_PATIENCE } else { Duration::from_secs(1) } {
                let ready = self.left(until).await.ok().map(|left| left.ready);
                if before.is_some() && ready == before {
                    return Ok(());
                }
                counted = (ready, Instant::now());
            }
            self.check_patience()?;
            tokio::select! {
                _ = in_vain.changed() => {}
                () = shared.stopping.cancelled() => return Err(DrainError::Stopped),
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
        }
    }

    /// Grows with every outcome that is recorded.
    fn decided(&self) -> u64 {
        let counters = &self.shared.counters;
        [&counters.delivered, &counters.failed, &counters.refused].iter().map(|counter| counter.load(Relaxed)).sum()
    }

    fn check_patience(&self) -> Result<(), DrainError> {
        let patience = self.shared.settings.patience;
        match &*self.shared.gate.watch().borrow() {
            Some(Pause { fault, since }) if since.elapsed() > patience => {
                return Err(DrainError::Target(fault.clone()));
            }
            _ => {}
        }
        match &*self.shared.database.borrow() {
            Some(outage) if outage.since.elapsed() > patience => Err(DrainError::Database(outage.error.clone())),
            _ => Ok(()),
        }
    }

    async fn left(&self, until: i64) -> Result<Left, DatabaseError> {
        self.shared.pool.ask(async |connection| left(connection, until).await).await
    }

    async fn is_any_ready(&self, until: i64) -> Result<bool, DatabaseError> {
        let from = self.shared.horizon.load(Relaxed);
        self.shared.pool.ask(async |connection| is_any_ready(connection, from, until).await).await
    }

    async fn last_id(&self) -> Result<i64, DatabaseError> {
        self.shared.pool.ask(last_id).await
    }

    /// How many rows could be delivered now.
    ///
    /// # Errors
    /// [`DatabaseError`] where Postgres can't be asked.
    pub async fn ready(&self) -> Result<i64, DatabaseError> {
        Ok(self.left(i64::MAX).await?.ready)
    }

    /// Stops: sends nothing new, waits up to the grace period for the requests in flight, records what became of them,
    /// and gives every other row back. May be called again, and from any clone.
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        let all_home = self.shared.room.acquire_many(ROOM);
        if tokio::time::timeout(self.shared.settings.grace, all_home).await.is_err() {
            tracing::warn!(
                "requests were still in flight at the end of the grace period: their rows will be sent again"
            );
        }
        self.shared.ended.cancel();
    }

    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn crash(&self, actor: &str) {
        match actor {
            "claimer" => self.kept.claimer.send(Crash),
            "deliverer" => self.kept.deliverers[0].send(Crash),
            "ledger" => self.kept.ledger.send(Crash),
            "listener" => self.kept.listener.send(Crash),
            _ => panic!("no such actor: {actor}"),
        }
    }
}

/// How long a drain waits for rows that other sessions hold and that do not get fewer.
const HELD_PATIENCE: Duration = Duration::from_secs(10);
