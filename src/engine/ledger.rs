//! The Ledger: records what became of a lease's rows, in the lease's own transaction.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use actix::{Actor, Context, Handler, Message, ResponseFuture};
use tracing::{Instrument as _, trace_span};

use super::keeper::Alive;
use super::{Crash, Shared};
use crate::delivery::plan::{Outcome, revise};
use crate::outbox::Lease;

pub(crate) struct Ledger {
    shared: Arc<Shared>,
    _alive: Alive,
}

impl Ledger {
    pub(crate) fn new(shared: Arc<Shared>, alive: Alive) -> Self {
        Self { shared, _alive: alive }
    }
}

impl Actor for Ledger {
    type Context = Context<Self>;
}

/// Records these outcomes; rows of the lease without one are given back untouched.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Record {
    pub(crate) lease: Lease,
    pub(crate) outcomes: Vec<(i64, Outcome)>,
    /// The authorization model that they were reached under; empty where no request was sent.
    pub(crate) model: Arc<str>,
}

impl Handler<Record> for Ledger {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Record { lease, mut outcomes, model }: Record, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared.clone();
        Box::pin(async move {
            let newer_model = shared.client.model().is_some_and(|now| now != model);
            revise(&mut outcomes, shared.settings.max_attempts, newer_model);
            let record = trace_span!("record", rows = outcomes.len());
            match lease.commit(&outcomes, &model).instrument(record).await {
                // Whoever waits for the room to be free finds the rows counted.
                Ok(_room) => {
                    shared.database_answers();
                    shared.recorded.notify_waiters();
                    count(&shared, &outcomes);
                }
                // The rows are ready again, and will be sent again: that is what at-least-once means.
                Err(error) => shared.database_fails(error),
            }
        })
    }
}

fn count(shared: &Shared, outcomes: &[(i64, Outcome)]) {
    let (mut delivered, mut failed, mut refused) = (0, 0, 0);
    for (id, outcome) in outcomes {
        match outcome {
            Outcome::Delivered { .. } => delivered += 1,
            Outcome::Confirm { .. } | Outcome::Suspect | Outcome::Again { .. } => {}
            Outcome::Waiting { attempts, .. } => {
                failed += 1;
                tracing::debug!(id, attempts, "not delivered for now");
            }
            Outcome::Refused { .. } => {
                refused += 1;
                tracing::debug!(id, "refused");
            }
        }
    }
    if refused > 0 {
        tracing::warn!(rows = refused, "rows were refused: 'fga-outbox list --refused' has the reasons");
    }
    let counters = &shared.counters;
    counters.delivered.fetch_add(delivered, Relaxed);
    counters.failed.fetch_add(failed, Relaxed);
    counters.refused.fetch_add(refused, Relaxed);
}

impl Handler<Crash> for Ledger {
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("crashed on demand");
    }
}
