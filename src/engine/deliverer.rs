//! The Deliverer: turns a lease into requests, sends them, and ends with an outcome for each row.

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
use crate::delivery::order::{self, Ordered};
use crate::delivery::plan::{Plan, Request, State};
use crate::delivery::sending::{End, Next};
use crate::delivery::verdict::{Fault, FaultKind, Kind, Verdict};
use crate::outbox::Lease;
use actix::{Actor, Context, Handler, Message, ResponseFuture};
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt as _, TryStreamExt as _};
use tracing::{Instrument as _, trace_span};

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
            let from = shared.settings.ordered.then(|| shared.horizon.load(Relaxed));
            let rows = lease.take_rows();
            let Ordered { rows, just_delivered, blocked, mut outcomes } =
                match order::put_in_order(&mut lease, rows, from).instrument(trace_span!("look ahead")).await {
                    Ok(ordered) => ordered,
                    Err(error) => return shared.database_fails(error),
                };
            if blocked {
                shared.blocked.store(true, Relaxed);
            }
            shared.stuck.store(blocked && rows.is_empty(), Relaxed);
            let mut plan = Plan::new(rows, limits);
            plan.beware(&just_delivered);
            carry_out(&shared, &mut plan).await;
            shared.limits.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).learn(plan.limits());
            outcomes.extend(plan.outcomes());
            ledger.send(Record { lease, outcomes, model });
        })
    }
}

impl Handler<Crash> for Deliverer {
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("crashed on demand");
    }
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
                plan.take_back(request, end);
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

/// Sends a request until its end is known: again at once where the moment was bad, as long as that may help.
async fn send(shared: &Shared, mut request: Request, permit: Permit) -> (Request, End) {
    let (mut races, mut faults) = (backoff::after_race(), backoff::after_fault());
    let end = loop {
        shared.counters.requests.fetch_add(1, Relaxed);
        let sent = Instant::now();
        let keys = request.steps.len();
        let verdict = shared.client.write(&request).instrument(trace_span!("write", keys)).await;
        permit.answered(answered(&verdict), keys, sent);
        if !matches!(verdict, Verdict::Moment { kind: Kind::Failure | Kind::Unforeseen, .. } | Verdict::Target(_)) {
            shared.failures_in_a_row.store(0, Relaxed);
            shared.gate.open();
        }
        let mut next = request.answered(verdict);
        if let Next::Read { reason } = next {
            next = match read_back(shared, &request, &reason).await {
                Ok(stored) => request.was_read(stored, reason),
                Err(fault) => Next::Pause(fault),
            };
        }
        let wait = match next {
            Next::TakeBack(end) => break end,
            Next::Pause(fault) => {
                shared.gate.close(fault);
                break End::GivenUp;
            }
            Next::Blame { reason } => break after_faults(shared, &request, reason).await,
            Next::AgainAfterFault => faults.next(),
            Next::AgainAfterRace | Next::Read { .. } => races.next(),
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
