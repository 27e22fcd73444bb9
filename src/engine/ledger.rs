//! The Ledger: records what became of a lease's rows, in the lease's own transaction.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use actix::{Actor, Context, Handler, Message, ResponseFuture};

use super::keeper::Alive;
use super::{Crash, Shared};
use crate::delivery::plan::Outcome;
use crate::outbox::{Lease, Remarks};

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
    /// What is to be remembered of rows that are delivered.
    pub(crate) remarks: Remarks,
    /// The authorization model that they were reached under; empty where no request was sent.
    pub(crate) model: Arc<str>,
}

impl Handler<Record> for Ledger {
    type Result = ResponseFuture<()>;

    fn handle(
        &mut self,
        Record { lease, mut outcomes, remarks, model }: Record,
        _: &mut Self::Context,
    ) -> Self::Result {
        let shared = self.shared.clone();
        Box::pin(async move {
            give_up(&mut outcomes, shared.settings.max_attempts);
            if shared.client.model().is_some_and(|now| now != model) {
                // A newer model may take them: they are ready still.
                outcomes.retain(|(_, outcome)| !matches!(outcome, Outcome::Refused { .. }));
            }
            match lease.commit(&outcomes, &remarks, &model).await {
                // Whoever waits for the room to be free finds the rows counted.
                Ok(_room) => {
                    shared.database_answers();
                    shared.recorded.notify_waiters();
                    outcomes.retain(|(id, outcome)| *outcome != Outcome::Delivered || !remarks.confirm.contains(id));
                    count(&shared, &outcomes);
                }
                // The rows are ready again, and will be sent again: that is what at-least-once means.
                Err(error) => shared.database_fails(error),
            }
        })
    }
}

/// Rows that have failed this often are not tried again.
fn give_up(outcomes: &mut [(i64, Outcome)], max_attempts: Option<u32>) {
    for (_, outcome) in outcomes {
        if let Outcome::Waiting { reason, attempts } = outcome
            && max_attempts.is_some_and(|max| attempts.unsigned_abs() >= max)
        {
            *outcome = Outcome::Refused { reason: std::mem::take(reason) };
        }
    }
}

fn count(shared: &Shared, outcomes: &[(i64, Outcome)]) {
    let (mut delivered, mut failed, mut refused) = (0, 0, 0);
    for (id, outcome) in outcomes {
        match outcome {
            Outcome::Delivered => delivered += 1,
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
