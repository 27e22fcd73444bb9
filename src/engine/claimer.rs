//! The Claimer: leases rows while there is room, and knows when there is nothing to lease.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, WrapFuture as _};
use tokio::sync::OwnedSemaphorePermit;

use super::deliverer::{Deliver, Deliverer};
use super::gate::Mode;
use super::keeper::{Alive, Kept};
use super::{Crash, ROOM, Shared};
use crate::delivery::backoff;
use crate::outbox::{Claim, DatabaseError, claim, requeue_older};

/// The rows of a lease: few at first, more while the backlog fills them.
const FEWEST_ROWS: i64 = 100;
const MOST_ROWS: i64 = 1_000;

/// While the backlog is long, how often the cursor goes back to the beginning, for rows whose transactions committed
/// later than those of higher ids.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// How often rows are brought back for a new authorization model, an interval apart.
const REQUEUES: u32 = 3;

pub(crate) struct Claimer {
    shared: Arc<Shared>,
    deliverers: Vec<Kept<Deliverer>>,
    _alive: Alive,
}

impl Claimer {
    pub(crate) fn new(shared: Arc<Shared>, deliverers: Vec<Kept<Deliverer>>, alive: Alive) -> Self {
        Self { shared, deliverers, _alive: alive }
    }
}

impl Actor for Claimer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let claiming = Claiming::new(self.shared.clone(), self.deliverers.clone()).run();
        ctx.spawn(actix::fut::ActorFutureExt::map(claiming.into_actor(self), |(), _, ctx: &mut Self::Context| {
            ctx.stop()
        }));
    }
}

impl Handler<Crash> for Claimer {
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("crashed on demand");
    }
}

struct Claiming {
    shared: Arc<Shared>,
    deliverers: Vec<Kept<Deliverer>>,
    leases: usize,
    rows: i64,
    /// The highest `id` claimed since the last sweep; nothing, and a claim is a sweep.
    cursor: i64,
    swept: Instant,
    models: Models,
}

/// When to look for a newer authorization model, and which one rows were brought back for.
struct Models {
    look_at: Instant,
    followed: Option<Arc<str>>,
    /// Times left to bring rows back: engines that follow a model later may refuse some under the old one meanwhile.
    requeues: u32,
}

impl Claiming {
    fn new(shared: Arc<Shared>, deliverers: Vec<Kept<Deliverer>>) -> Self {
        let models = Models { look_at: Instant::now(), followed: None, requeues: 0 };
        Self { shared, deliverers, leases: 0, rows: FEWEST_ROWS, cursor: 0, swept: Instant::now(), models }
    }

    /// Until the engine stops. A claim that has begun is waited for: cut off, it would hold its rows until Postgres
    /// notices.
    async fn run(mut self) {
        let shared = self.shared.clone();
        let mut outage = backoff::between_restarts();
        while !shared.stopping.is_cancelled() {
            let rows = match shared.gate.mode() {
                Mode::Open => self.rows,
                Mode::HalfOpen => 1,
                Mode::Closed => {
                    self.rows = FEWEST_ROWS;
                    self.unless_stopped(self.probe()).await;
                    continue;
                }
            };
            if shared.gate.mode() == Mode::Open && self.models.look_at <= Instant::now() {
                self.follow_model().await;
            }
            let Some(room) = self.unless_stopped(self.room(rows)).await else { break };
            if shared.gate.mode() == Mode::Closed {
                continue;
            }
            match self.claim(rows, room).await {
                Ok(found) => {
                    shared.database_answers();
                    outage.reset();
                    if !found {
                        self.unless_stopped(self.idle()).await;
                    }
                }
                Err(error) => {
                    shared.database_fails(error);
                    self.unless_stopped(tokio::time::sleep(outage.next())).await;
                }
            }
        }
    }

    async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            output = future => Some(output),
            () = self.shared.stopping.cancelled() => None,
        }
    }

    /// Room for one more lease; for a lease that is to find out about the target, once no other is out.
    async fn room(&self, rows: i64) -> OwnedSemaphorePermit {
        let room = self.shared.room.clone();
        if rows == 1 {
            drop(room.acquire_many(ROOM).await);
        }
        room.acquire_owned().await.expect("never closed")
    }

    /// Claims once and hands the lease over. Says whether there was anything, or may be.
    async fn claim(&mut self, rows: i64, room: OwnedSemaphorePermit) -> Result<bool, DatabaseError> {
        if self.swept.elapsed() >= SWEEP_INTERVAL {
            self.cursor = 0;
        }
        let sweep = self.cursor == 0;
        let number = if sweep {
            self.swept = Instant::now();
            self.shared.sweeps_begun.fetch_add(1, Relaxed) + 1
        } else {
            0
        };
        let claimed = claim(&self.shared.pool, Claim { after: self.cursor, rows }, room).await?;
        self.cursor = if claimed.full { claimed.last_new.unwrap_or(self.cursor) } else { 0 };
        self.rows = if claimed.full { (self.rows * 2).min(MOST_ROWS) } else { FEWEST_ROWS };
        match claimed.lease {
            Some(lease) => {
                self.shared.counters.leases.fetch_add(1, Relaxed);
                self.deliverers[self.leases % self.deliverers.len()].send(Deliver(lease));
                self.leases += 1;
                Ok(true)
            }
            // Behind the cursor there is nothing: look at the beginning.
            None if !sweep => Ok(true),
            None => {
                self.shared.gate.open();
                self.shared.swept_in_vain.send_replace(number);
                Ok(false)
            }
        }
    }

    /// Brings rows back that were refused under an older authorization model, where there is a newer one.
    async fn follow_model(&mut self) {
        let shared = self.shared.clone();
        self.models.look_at = Instant::now() + shared.settings.model_interval;
        // Where it can't be had, requests will find out what is wrong.
        let Some(Ok(model)) = self.unless_stopped(shared.client.follow_model()).await else { return };
        if self.models.followed.as_ref() != Some(&model) {
            self.models = Models { followed: Some(model.clone()), requeues: REQUEUES, ..self.models };
        }
        if self.models.requeues == 0 {
            return;
        }
        let requeued = async { requeue_older(&mut *shared.pool.get().await?, &model).await };
        match requeued.await {
            Ok(rows) => {
                self.models.requeues -= 1;
                if rows > 0 {
                    tracing::info!(rows, %model, "refused rows are tried again under a newer authorization model");
                }
            }
            Err(error) => shared.database_fails(error),
        }
    }

    async fn idle(&self) {
        tokio::select! {
            () = self.shared.wake.notified() => {}
            () = tokio::time::sleep(self.shared.settings.poll_interval) => {}
        }
    }

    async fn probe(&self) {
        tokio::time::sleep(self.shared.gate.until_probe()).await;
        self.shared.gate.probing();
        match self.shared.client.probe().await {
            Ok(()) => self.shared.gate.probed(),
            Err(fault) => self.shared.gate.close(fault),
        }
    }
}
