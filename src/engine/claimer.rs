//! The Claimer: leases rows while there is room, and knows when there is nothing to lease.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, WrapFuture as _};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, trace_span};

use super::deliverer::{Deliver, Deliverer};
use super::gate::Mode;
use super::keeper::{Alive, Kept};
use super::{Crash, ROOM, Shared};
use crate::delivery::backoff::{self, Backoff};
use crate::outbox::{Bell, Claim, Claimed, DatabaseError, Horizon, Nap, claim, requeue_older};

/// The rows of a lease: few at first, more while the backlog fills them.
const FEWEST_ROWS: i64 = 100;
const MOST_ROWS: i64 = 1_000;

/// While the backlog is long, how often the cursor goes back to the beginning, for rows whose transactions committed
/// later than those of higher ids, and for those that were given back.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// How many leases are delivered one at a time after one of them had rows that were blocked.
const LEASES_ONE_AT_A_TIME: u32 = 8;

/// How long Postgres may take over a claim.
const LONGEST_CLAIM: Duration = Duration::from_secs(30);

/// Between looks for a deliverer, while all are being started anew.
const DELIVERER_PAUSE: Duration = Duration::from_millis(10);

/// After there was something to do, how long the engine stays awake, and how often it looks: where rows come one after
/// the other, ringing for each would cost their transactions more than the looks cost the engine.
const STAYS_AWAKE: Duration = Duration::from_millis(20);
const LOOKS: Duration = Duration::from_millis(2);

/// How often an engine looks at least that relies on another one's nap.
const LOOKS_BESIDE_OTHERS: Duration = Duration::from_millis(500);

/// How often an engine looks that can't nap, because a transaction is open that will not ring.
const LOOKS_WHILE_IN_USE: Duration = Duration::from_millis(10);

/// A nap is begun anew after this time, well before Postgres ends a transaction that does nothing.
const LONGEST_NAP: Duration = Duration::from_secs(60);

/// A ring may be on its way for this long.
const RING_IS_LATE: Duration = Duration::from_secs(1);

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
    /// The highest `id` claimed since the last sweep, at first the lowest there is; nothing, and a claim is a sweep.
    cursor: Option<i64>,
    /// Where the cursor was when the last sweep began, or anywhere where there was none: rows that were given back are
    /// looked for up to there.
    touched_until: i64,
    swept: Instant,
    /// The row that was last sent to find out about the target, or leased while nothing could be recorded.
    tried: Option<i64>,
    /// How long to leave rows alone that are blocked, and for how many leases to come only one is out at a time: most
    /// rows contradict each other, and what is leased early only gets in the way.
    blocked: Backoff,
    one_at_a_time: u32,
    models: Models,
    horizon: Horizon,
    rest: Rest,
}

enum Step {
    /// There is more to do.
    Found,
    /// There is nothing to lease.
    Nothing,
}

/// How the engine waits for something to do.
struct Rest {
    /// When there was something to do.
    busy: Instant,
    nap: Option<(Nap, Instant)>,
    /// Where the clock ended the last wait of a nap, and no ring: the rings before that wait.
    by_clock: Option<u64>,
    /// When a look by the clock found new rows, and the rings until then.
    unannounced: Option<(Instant, u64)>,
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
        Self {
            shared,
            deliverers,
            leases: 0,
            rows: FEWEST_ROWS,
            cursor: Some(i64::MIN),
            touched_until: i64::MIN,
            swept: Instant::now(),
            tried: None,
            blocked: backoff::between_restarts(),
            one_at_a_time: 0,
            models,
            horizon: Horizon::default(),
            rest: Rest { busy: Instant::now(), nap: None, by_clock: None, unannounced: None },
        }
    }

    /// Until the engine stops. A claim that has begun is waited for: cut off, it would hold its rows until Postgres
    /// notices.
    async fn run(mut self) {
        let shared = self.shared.clone();
        let mut outage = backoff::between_restarts();
        let mut was_out = false;
        while !shared.stopping.is_cancelled() {
            let out = shared.database.borrow().is_some();
            if out {
                self.unless_stopped(tokio::time::sleep(outage.next())).await;
                // Where it is one row that can't be recorded, the others are spared: they go one by one, past it.
                self.rows = 1;
                if !was_out {
                    self.cursor = None;
                }
            } else {
                outage.reset();
            }
            was_out = out;
            match self.step().await {
                Ok(Step::Found) => {
                    self.rest.busy = Instant::now();
                    self.rest.by_clock = None;
                    self.wake_up().await;
                }
                Ok(Step::Nothing) => {
                    if let Err(error) = self.rest().await {
                        self.give_up_nap(error);
                    }
                }
                Err(error) => self.give_up_nap(error),
            }
        }
    }

    /// Probes where the target is away; otherwise claims, once there is room.
    async fn step(&mut self) -> Result<Step, DatabaseError> {
        let shared = self.shared.clone();
        let mode = shared.gate.mode();
        if mode == Mode::Closed {
            self.rows = FEWEST_ROWS;
            self.unless_stopped(self.probe()).await;
            return Ok(Step::Found);
        }
        // Not while somebody waits who has just rung.
        let overdue = if self.rest.nap.is_some() { Duration::from_secs(1) } else { Duration::ZERO };
        self.keep_house(overdue).await?;
        let Some(room) = self.unless_stopped(self.room(mode)).await else { return Ok(Step::Found) };
        // Meanwhile it may have changed.
        match shared.gate.mode() {
            now if now != mode => Ok(Step::Found),
            Mode::HalfOpen => self.claim_one(room).await,
            _ => self.claim(room).await,
        }
    }

    async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            output = future => Some(output),
            () = self.shared.stopping.cancelled() => None,
        }
    }

    /// Room for one more lease, and somebody to deliver it; for a lease that is to find out about the target, once no
    /// other is out.
    async fn room(&self, mode: Mode) -> OwnedSemaphorePermit {
        while !self.deliverers.iter().any(Kept::is_alive) {
            tokio::time::sleep(DELIVERER_PAUSE).await;
        }
        let room = self.shared.room.clone();
        if mode == Mode::HalfOpen || self.one_at_a_time > 0 {
            drop(room.acquire_many(ROOM).await);
        }
        room.acquire_owned().await.expect("never closed")
    }

    /// Claims rows behind the cursor, or from the beginning: a sweep.
    async fn claim(&mut self, room: OwnedSemaphorePermit) -> Result<Step, DatabaseError> {
        let mut sweep = None;
        // Where all of a lease has to wait, what is behind it has its turn before the next look at it.
        let stuck = self.shared.stuck.swap(false, Relaxed);
        let due = self.swept.elapsed() >= SWEEP_INTERVAL || self.shared.blocked.load(Relaxed);
        if self.cursor.is_none() || due && !stuck {
            self.touched_until = self.cursor.take().unwrap_or(i64::MAX);
            self.pause_if_blocked().await;
            self.swept = Instant::now();
            sweep = Some(self.shared.sweeps_begun.fetch_add(1, Relaxed) + 1);
        }
        // A sweep begins before the first row that may be new. What was made new by hand before that is found by the
        // horizon's next look from the very beginning.
        let begin = self.shared.horizon.load(Relaxed).saturating_sub(1);
        let after = self.cursor.unwrap_or(begin).max(begin);
        let touched_until = self.touched_until;
        // While nothing can be recorded, that may be one row's fault: past it also where it is due.
        let out = self.shared.database.borrow().is_some();
        let failed_after = self.tried.filter(|_| out).unwrap_or(i64::MIN);
        let claimed = self.lease(Claim { after, failed_after, touched_until, rows: self.rows }, room).await?;
        if out {
            self.tried = claimed.as_ref().map(|claimed| claimed.last);
        }
        if let (None, Some(number), i64::MAX) = (&claimed, sweep, touched_until) {
            self.shared.database_answers();
            self.shared.swept_in_vain.send_replace(number);
            return Ok(Step::Nothing);
        }
        let full = claimed.filter(|claimed| claimed.full);
        self.rows = match &full {
            Some(Claimed { cut: Some(rows), .. }) => *rows,
            Some(_) => (self.rows * 2).min(MOST_ROWS),
            None => FEWEST_ROWS,
        };
        self.cursor = full.and_then(|claimed| claimed.last_new.or(self.cursor));
        Ok(Step::Found)
    }

    /// Claims the next row after the one that was tried last, so that no row can keep the target's gate from opening.
    async fn claim_one(&mut self, room: OwnedSemaphorePermit) -> Result<Step, DatabaseError> {
        let after = self.tried.unwrap_or(i64::MIN);
        match self.lease(Claim { after, failed_after: after, touched_until: i64::MAX, rows: 1 }, room).await? {
            Some(claimed) => self.tried = Some(claimed.last),
            None if self.tried.is_some() => {
                self.tried = None;
                self.pause_if_blocked().await;
            }
            // There is nothing to try.
            None => self.shared.gate.open(),
        }
        Ok(Step::Found)
    }

    /// Claims, and hands the lease over.
    async fn lease(&mut self, what: Claim, room: OwnedSemaphorePermit) -> Result<Option<Claimed>, DatabaseError> {
        let claiming = claim(&self.shared.pool, &self.shared.footprints, what, room).instrument(trace_span!("claim"));
        let Ok(claimed) = tokio::time::timeout(LONGEST_CLAIM, claiming).await else {
            return Err(DatabaseError::Unreachable("no answer in time".to_owned()));
        };
        let mut claimed = claimed?;
        let Some(lease) = claimed.lease.take() else { return Ok(None) };
        if let Some(rings) = self.rest.by_clock
            && claimed.untouched
        {
            self.rest.unannounced.get_or_insert((Instant::now(), rings));
        }
        self.shared.counters.leases.fetch_add(1, Relaxed);
        self.one_at_a_time = self.one_at_a_time.saturating_sub(1);
        // In turn, past those that are being started anew; where all are, the lease gives its rows back.
        for _ in 0..self.deliverers.len() {
            self.leases += 1;
            if self.deliverers[self.leases % self.deliverers.len()].is_alive() {
                break;
            }
        }
        self.deliverers[self.leases % self.deliverers.len()].send(Deliver(lease));
        Ok(Some(claimed))
    }

    /// What blocks rows is in somebody's hands: asking again at once would only get in the way.
    async fn pause_if_blocked(&mut self) {
        if self.shared.blocked.swap(false, Relaxed) {
            self.one_at_a_time = LEASES_ONE_AT_A_TIME;
            let pause = tokio::time::sleep(self.blocked.next());
            let either = async {
                tokio::select! {
                    () = pause => {}
                    () = self.shared.recorded.notified() => {}
                }
            };
            self.unless_stopped(either).await;
        } else {
            self.blocked.reset();
        }
    }

    /// Does what has been due for so long: best while there is nothing else to do.
    async fn keep_house(&mut self, overdue: Duration) -> Result<(), DatabaseError> {
        if self.shared.gate.mode() == Mode::Open && self.models.look_at + overdue <= Instant::now() {
            self.follow_model().await?;
        }
        if self.horizon.is_due(overdue) {
            self.look_at_horizon().await?;
        }
        Ok(())
    }

    async fn look_at_horizon(&mut self) -> Result<(), DatabaseError> {
        let horizon = self.shared.pool.ask(async |connection| self.horizon.look(connection).await).await?;
        self.shared.horizon.store(horizon, Relaxed);
        Ok(())
    }

    /// Brings rows back that were refused under an older authorization model, where there is a newer one.
    async fn follow_model(&mut self) -> Result<(), DatabaseError> {
        let shared = self.shared.clone();
        self.models.look_at = Instant::now() + shared.settings.model_interval;
        // Where it can't be had, requests will find out what is wrong.
        let Some(Ok(model)) = self.unless_stopped(shared.client.follow_model()).await else { return Ok(()) };
        if self.models.followed.as_ref() != Some(&model) {
            self.models = Models { followed: Some(model.clone()), requeues: REQUEUES, ..self.models };
        }
        if self.models.requeues > 0 {
            let rows = shared.pool.ask(async |connection| requeue_older(connection, &model).await).await?;
            self.models.requeues -= 1;
            if rows > 0 {
                tracing::info!(rows, %model, "refused rows are tried again under a newer authorization model");
            }
        }
        Ok(())
    }

    /// Waits where a sweep found nothing. A nap that is to begin needs one more.
    async fn rest(&mut self) -> Result<(), DatabaseError> {
        let shared = self.shared.clone();
        let poll = shared.settings.poll_interval;
        self.notice_missed_ring();
        self.keep_house(Duration::ZERO).await?;
        if !shared.listening.load(Relaxed) {
            self.wake_up().await;
            self.wait(poll).await;
        } else if self.rest.busy.elapsed() < STAYS_AWAKE {
            self.wait(LOOKS.min(poll)).await;
        } else if let Some((_, since)) = &self.rest.nap {
            shared.step("falls asleep").await;
            let long = since.elapsed() > LONGEST_NAP;
            let rings = shared.rings.load(Relaxed);
            let woken = self.wait(poll.min(LONGEST_NAP)).await;
            self.rest.by_clock = (!woken && !long).then_some(rings);
            if long {
                self.wake_up().await;
            }
        } else {
            shared.step("takes the bell").await;
            match Nap::take(&shared.pool).await? {
                Bell::Taken(nap) => {
                    shared.step("looks once more").await;
                    self.rest.nap = Some((nap, Instant::now()));
                    self.rest.by_clock = None;
                }
                // Where that one ends or wakes, nobody rings for this one.
                Bell::TakenByOther => drop(self.wait(poll.min(LOOKS_BESIDE_OTHERS)).await),
                Bell::InUse => drop(self.wait(LOOKS_WHILE_IN_USE.min(poll)).await),
            }
        }
        Ok(())
    }

    /// Until the engine is woken, or for so long. Whether it was woken.
    async fn wait(&self, long: Duration) -> bool {
        tokio::select! {
            biased;
            () = self.shared.wake.notified() => true,
            () = self.shared.stopping.cancelled() => true,
            () = tokio::time::sleep(long) => false,
        }
    }

    /// Postgres can't be used, and so has let go of the bell, or will.
    fn give_up_nap(&mut self, error: DatabaseError) {
        self.rest.nap = None;
        self.shared.database_fails(error);
    }

    /// From now on nobody needs to ring.
    async fn wake_up(&mut self) {
        if let Some((nap, _)) = self.rest.nap.take() {
            // A connection that fails lets go of the bell, too.
            let _ = nap.end().await;
        }
    }

    /// Counts a look by the clock that found new rows, unless the ring was only late.
    fn notice_missed_ring(&mut self) {
        if let Some((_, rings)) = self.rest.unannounced.take_if(|(found, _)| found.elapsed() > RING_IS_LATE)
            && self.shared.rings.load(Relaxed) == rings
            && self.shared.missed_rings.fetch_add(1, Relaxed) == 0
        {
            tracing::warn!(
                "new rows were found that no doorbell told of: is the trigger fga_outbox_ring missing or disabled? They \
                 are delivered, up to the poll interval later"
            );
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
