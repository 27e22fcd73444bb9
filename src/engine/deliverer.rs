//! The Deliverer: turns a lease into requests, sends them, and ends with an outcome for each row.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Crash;
use super::Shared;
use super::flow::Permit;
use super::gate::Mode;
use super::keeper::{Alive, Kept};
use super::ledger::{Ledger, Record};
use crate::delivery::backoff;
use crate::delivery::flow::Answered;
use crate::delivery::order::{self, Return};
use crate::delivery::plan::{Outcome, Plan, Request, Row, State};
use crate::delivery::verdict::{Excess, Fault, FaultKind, Kind, Verdict};
use crate::outbox::{Ahead, DatabaseError, Later, Lease, Remarks, Standing};
use crate::tuple::Intent;
use actix::{Actor, Context, Handler, Message, ResponseFuture};
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt as _, TryStreamExt as _};

/// How often a request is sent in all, within a lease, that meets races or faults.
const TRIES_AFTER_RACE: u32 = 8;
const TRIES_AFTER_FAULT: u32 = 3;

/// How many requests may fail one after the other, while reading works, until writing as such is taken to be broken.
const FAILURES_IN_A_ROW: u32 = 5;

/// After this time a lease sends nothing new: what is left of it is better leased anew. Well below the time-out of an
/// idle transaction.
const LONGEST_LEASE: Duration = Duration::from_secs(60);

/// How many keys of one request are read back at a time.
const READS_AT_ONCE: usize = 8;

pub(crate) struct Deliverer {
    shared: Arc<Shared>,
    ledger: Kept<Ledger>,
    _alive: Alive,
}

impl Deliverer {
    pub(crate) fn new(shared: Arc<Shared>, ledger: Kept<Ledger>, alive: Alive) -> Self {
        Self { shared, ledger, _alive: alive }
    }
}

impl Actor for Deliverer {
    type Context = Context<Self>;
}

/// Delivers the rows of this lease.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Deliver(pub(crate) Lease);

impl Handler<Deliver> for Deliverer {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Deliver(mut lease): Deliver, _: &mut Self::Context) -> Self::Result {
        let (shared, ledger) = (self.shared.clone(), self.ledger.clone());
        Box::pin(async move {
            let limits = *shared.limits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            // Whatever becomes of the rows, they were tried with this model or a newer one.
            let model = shared.client.model().unwrap_or_default();
            let (mut rows, just_delivered) = match in_order(&shared, &mut lease).await {
                Ok(in_order) => in_order,
                Err(error) => return shared.database_fails(error),
            };
            let Returned { notes, mut outcomes } = match on_return(&shared, &mut lease, &mut rows).await {
                Ok(returned) => returned,
                Err(error) => return shared.database_fails(error),
            };
            let doubtful: HashSet<i64> = rows.iter().filter(|row| lease.is_doubtful(row)).map(|row| row.id).collect();
            let doubts = Doubts::new(&rows, doubtful, just_delivered);
            let mut plan = Plan::new(rows, limits);
            carry_out(&shared, &mut plan).await;
            shared.limits.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).learn(plan.limits());
            outcomes.extend(plan.outcomes());
            let remarks = doubts.settle(&outcomes, notes);
            ledger.send(Record { lease, outcomes, remarks, model });
        })
    }
}

impl Handler<Crash> for Deliverer {
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("crashed on demand");
    }
}

/// The rows of this lease that may be sent: without those that have to wait for an earlier one which contradicts them
/// and which somebody else has, and with those that merely wait for their time, to be folded. Besides, rows delivered a
/// moment ago of which an older request may still be on its way.
async fn in_order(shared: &Shared, lease: &mut Lease) -> Result<(Vec<Row>, Vec<(i64, Intent)>), DatabaseError> {
    let mut rows = lease.take_rows();
    if !shared.settings.ordered {
        return Ok((rows, Vec::new()));
    }
    loop {
        rows.sort_unstable_by_key(|row| row.id);
        let Some(ahead) = lease.look_ahead(&rows, shared.horizon.load(Relaxed)).await? else {
            shared.blocked.store(true, Relaxed);
            return Ok((Vec::new(), Vec::new()));
        };
        let contradicts =
            |row: &Row, ahead: &Ahead| row.intent.as_ref().is_ok_and(|intent| order::contradict(intent, &ahead.intent));
        let along = ahead
            .iter()
            .filter(|ahead| ahead.standing == Standing::Again && rows.iter().any(|row| contradicts(row, ahead)));
        let along: Vec<i64> = along.map(|ahead| ahead.id).collect();
        let taken = if along.is_empty() { Vec::new() } else { lease.take_along(&along).await? };
        if taken.is_empty() {
            let (delivered, ahead): (Vec<_>, Vec<_>) =
                ahead.into_iter().partition(|ahead| ahead.standing == Standing::Doubtful);
            let ahead: Vec<_> = ahead.into_iter().map(|ahead| (ahead.id, ahead.intent)).collect();
            let blocked = order::blocked(&rows, &ahead);
            if !blocked.is_empty() {
                shared.blocked.store(true, Relaxed);
                rows.retain(|row| !blocked.contains(&row.id));
            }
            return Ok((rows, delivered.into_iter().map(|ahead| (ahead.id, ahead.intent)).collect()));
        }
        // What came along may have rows ahead of its own.
        rows.extend(taken);
    }
}

/// What is needed to tell which rows to send once more: nothing in the common case, where no row was leased before.
struct Doubts {
    rows: Vec<(i64, Intent)>,
    doubtful: HashSet<i64>,
    just_delivered: Vec<(i64, Intent)>,
}

impl Doubts {
    fn new(rows: &[Row], doubtful: HashSet<i64>, just_delivered: Vec<(i64, Intent)>) -> Self {
        let rows = match doubtful.is_empty() && just_delivered.is_empty() {
            true => Vec::new(),
            false => rows.iter().filter_map(|row| Some((row.id, row.intent.clone().ok()?))).collect(),
        };
        Self { rows, doubtful, just_delivered }
    }

    fn settle(mut self, outcomes: &[(i64, Outcome)], notes: HashMap<i64, String>) -> Remarks {
        if self.rows.is_empty() {
            return Remarks { notes, ..Remarks::default() };
        }
        let refused = outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Refused { .. }));
        let refused: HashSet<i64> = refused.map(|(id, _)| *id).collect();
        self.rows.retain(|(id, _)| !refused.contains(id));
        let confirm = order::in_doubt(&self.rows, &self.doubtful, &self.just_delivered);
        Remarks { notes, doubtful: self.doubtful, confirm }
    }
}

/// What later rows have made of those that came back.
#[derive(Default)]
struct Returned {
    notes: HashMap<i64, String>,
    /// Of rows of which nothing is left to send.
    outcomes: Vec<(i64, Outcome)>,
}

/// Takes from rows that were refused once what later rows have overruled since, so that it is not sent.
async fn on_return(shared: &Shared, lease: &mut Lease, rows: &mut Vec<Row>) -> Result<Returned, DatabaseError> {
    let later = lease.look_later(rows).await?;
    let later: Vec<_> = later.into_iter().map(|Later { id, intent, delivered }| (id, intent, delivered)).collect();
    let mut returned = Returned::default();
    if later.is_empty() {
        return Ok(returned);
    }
    rows.retain_mut(|row| {
        let Ok(intent) = &row.intent else { return true };
        if !lease.came_back(row) {
            return true;
        }
        let overruled = match order::on_return(row.id, intent, &later) {
            Return::Overruled(keys) if keys.is_empty() => return true,
            Return::Overruled(keys) => keys,
            Return::Waits => {
                shared.blocked.store(true, Relaxed);
                return false;
            }
        };
        let keys: Vec<String> = overruled.iter().map(ToString::to_string).collect();
        returned.notes.insert(row.id, format!("not sent, as later rows overrule it: {}", keys.join(", ")));
        match intent.without(&overruled) {
            Some(rest) => {
                row.intent = Ok(rest);
                true
            }
            None => {
                returned.outcomes.push((row.id, Outcome::Delivered));
                false
            }
        }
    });
    Ok(returned)
}

/// Sends what the plan has to send, until it has nothing more, the target is closed or the engine stops. Requests that
/// are under way are always waited for.
async fn carry_out(shared: &Shared, plan: &mut Plan) {
    let began = Instant::now();
    let mut in_flight = FuturesUnordered::new();
    let mut next = plan.next_request();
    loop {
        let may_send = shared.may_send() && began.elapsed() < LONGEST_LEASE;
        if !may_send && let Some(unsent) = next.take() {
            plan.given_up(unsent);
        }
        tokio::select! {
            biased;
            Some((request, end)) = in_flight.next(), if !in_flight.is_empty() => {
                take_back(plan, request, end);
            }
            permit = shared.flow.clone().acquire(), if next.is_some() => {
                let request = next.take().expect("checked before");
                match shared.may_send() {
                    true => in_flight.push(send(shared, request, permit)),
                    false => plan.given_up(request),
                }
            }
            else => return,
        }
        if next.is_none() && may_send {
            next = plan.next_request();
        }
    }
}

/// How a request ended.
enum End {
    Accepted,
    ReadBack(Vec<Option<State>>),
    Refused(String),
    TooLarge(Excess),
    Failed(String),
    GivenUp,
}

fn take_back(plan: &mut Plan, request: Request, end: End) {
    match end {
        End::Accepted => plan.accepted(request),
        End::ReadBack(stored) => plan.read_back(request, stored),
        End::Refused(reason) => plan.refused(request, &reason),
        End::TooLarge(excess) => plan.too_large(request, excess),
        End::Failed(reason) => plan.failed(request, &reason),
        End::GivenUp => plan.given_up(request),
    }
}

/// Sends a request until its end is known: again at once where the moment was bad, as long as that may help.
async fn send(shared: &Shared, request: Request, permit: Permit) -> (Request, End) {
    let (mut races, mut faults) = (backoff::after_race(), backoff::after_fault());
    let mut tries = 0;
    let end = loop {
        tries += 1;
        shared.counters.requests.fetch_add(1, Relaxed);
        let sent = Instant::now();
        let verdict = shared.client.write(&request).await;
        permit.answered(answered(&verdict), request.steps.len(), sent);
        if !matches!(verdict, Verdict::Moment { kind: Kind::Failure | Kind::Unforeseen, .. } | Verdict::Target(_)) {
            shared.failures_in_a_row.store(0, Relaxed);
            shared.gate.open();
        }
        let wait = match verdict {
            Verdict::Done => break End::Accepted,
            Verdict::Row { reason } => break End::Refused(reason),
            Verdict::Size(excess) => break End::TooLarge(excess),
            Verdict::Target(fault) => {
                shared.gate.close(fault);
                break End::GivenUp;
            }
            Verdict::Tuple { reason } => match read_back(shared, &request, &reason).await {
                Ok(stored) if request.is_changed_by(&stored) => break End::ReadBack(stored),
                // Somebody else was faster, twice.
                Ok(_) if tries >= TRIES_AFTER_RACE => break End::Failed(reason),
                Ok(_) => races.next(),
                Err(fault) => {
                    shared.gate.close(fault);
                    break End::GivenUp;
                }
            },
            Verdict::Moment { reason, kind: Kind::Race } if tries >= TRIES_AFTER_RACE => break End::Failed(reason),
            Verdict::Moment { kind: Kind::Race, .. } => races.next(),
            // Whose fault it is shows sooner in the halves than in another try of the whole.
            Verdict::Moment { reason, .. } if tries >= TRIES_AFTER_FAULT || request.rows() > 1 => {
                break after_faults(shared, &request, reason).await;
            }
            Verdict::Moment { .. } => faults.next(),
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shared.stopping.cancelled() => {}
        }
        if !shared.may_send() {
            break End::GivenUp;
        }
    };
    (request, end)
}

/// What a verdict tells of the server's load.
fn answered(verdict: &Verdict) -> Answered {
    match verdict {
        Verdict::Done => Answered::Done,
        Verdict::Target(_) | Verdict::Moment { kind: Kind::Failure | Kind::Unforeseen, .. } => Answered::Overloaded,
        Verdict::Moment { kind: Kind::Race, .. } | Verdict::Row { .. } | Verdict::Tuple { .. } | Verdict::Size(_) => {
            Answered::Otherwise
        }
    }
}

/// Whose fault it is that a request keeps failing: the target's where it can't even be read, or where nothing else gets
/// through either; otherwise the request's own.
async fn after_faults(shared: &Shared, request: &Request, reason: String) -> End {
    if let Err(fault) = shared.client.probe().await {
        shared.gate.close(fault);
        return End::GivenUp;
    }
    match shared.gate.mode() {
        // The one row of a half-open target pays with an attempt, so that it can't be in the way for ever. Where it is
        // not alone, it is found first.
        Mode::HalfOpen if request.rows() == 1 => shared.gate.close(Fault::new(FaultKind::Unreachable, reason.clone())),
        Mode::HalfOpen => {}
        Mode::Open if shared.failures_in_a_row.fetch_add(1, Relaxed) < FAILURES_IN_A_ROW => {}
        Mode::Open | Mode::Closed => {
            shared.gate.close(Fault::new(FaultKind::Unreachable, reason));
            return End::GivenUp;
        }
    }
    End::Failed(reason)
}

/// What OpenFGA holds for the keys in question; nothing for the others.
async fn read_back(shared: &Shared, request: &Request, reason: &str) -> Result<Vec<Option<State>>, Fault> {
    let reads = request.steps.iter().zip(request.in_question(reason)).map(|(step, in_question)| async move {
        if !in_question {
            return Ok(None);
        }
        match shared.client.read(&step.key).await {
            Ok(state) => Ok(Some(state)),
            Err(Verdict::Target(fault)) => Err(fault),
            // Not known: the request is sent again.
            Err(_) => Ok(None),
        }
    });
    futures_util::stream::iter(reads).buffered(READS_AT_ONCE).try_collect().await
}
