//! The engine's parts one by one, for this crate's own benches.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::delivery::footprints::Footprints;
use crate::delivery::plan::{self, Limits, Outcome, Plan, Row};
use crate::delivery::sending::End;
use crate::delivery::verdict::{self, Answer};
use crate::openfga::WriteBody;
use crate::outbox::{self, Claim, DatabaseError, DatabaseUrl, Horizon, Pool};
use crate::tuple::Intent;

const DELIVERED: Outcome = Outcome::Delivered { doubtful: false, note: None };

/// Rows as they are leased.
pub struct Rows(Vec<Row>);

/// Rows of these payloads, in this order.
pub fn rows(payloads: &[String]) -> Rows {
    let row = |(id, payload): (i64, &String)| {
        let intent = Intent::from_json(payload);
        Row { id, attempts: 0, doubtful: false, came_back: false, intent, note: None }
    };
    Rows((1..).zip(payloads).map(row).collect())
}

/// Plans a lease of these rows, with so many requests in flight, of which OpenFGA accepts each; how many there were.
pub fn plan_and_answer(rows: Rows, in_flight: usize) -> usize {
    let mut plan = Plan::new(rows.0, Limits::default());
    let (mut sent, mut requests) = (VecDeque::new(), 0);
    loop {
        while sent.len() < in_flight
            && let Some(request) = plan.next_request()
        {
            sent.push_back(request);
            requests += 1;
        }
        match sent.pop_front() {
            Some(request) => plan.take_back(request, End::Accepted),
            None => break,
        }
    }
    assert!(plan.outcomes().iter().all(|(_, outcome)| *outcome == DELIVERED));
    requests
}

/// A write request.
pub struct Request(plan::Request);

/// The first request of these rows.
pub fn request(rows: Rows) -> Option<Request> {
    Plan::new(rows.0, Limits::default()).next_request().map(Request)
}

/// What is sent.
pub fn body_of(request: &Request) -> Vec<u8> {
    serde_json::to_vec(&WriteBody::new("01ARZ3NDEKTSV4RRFFQ69G5FAV", &request.0)).expect("strings and maps of strings")
}

/// What an answer is about.
pub fn verdict(status: u16, body: &[u8]) -> impl Debug + use<> {
    verdict::verdict(&Answer { status, retry_after: None, body })
}

/// The statements by which a lease of so many rows is claimed from the beginning, and by which rows with these ids, an
/// SQL array, are marked as delivered.
pub fn claim_and_mark(rows: i64, ids: &str) -> [String; 2] {
    outbox::claim_and_mark(rows, ids)
}

/// Claims as an engine makes them, one at a time.
pub struct Claims {
    pool: Pool,
    horizon: Horizon,
    footprints: Arc<Footprints>,
    room: Arc<Semaphore>,
}

impl Claims {
    /// Connects when it is first needed, on the runtime that this runs on.
    pub fn new(url: &DatabaseUrl) -> Self {
        let room = Arc::new(Semaphore::new(1));
        let pool = Pool::new(url, Handle::current(), 2);
        Self { pool, horizon: Horizon::default(), footprints: Arc::default(), room }
    }

    /// Looks from which id on rows may be new, as an engine does again and again.
    pub async fn look(&mut self) -> Result<i64, DatabaseError> {
        self.pool.ask(async |connection| self.horizon.look(connection).await).await
    }

    /// Claims up to so many rows whose ids are higher than this one, if there are any.
    pub async fn claim(&self, after: i64, rows: i64) -> Result<Option<Held>, DatabaseError> {
        let room = self.room.clone().acquire_owned().await.expect("never closed");
        let what = Claim { after, failed_after: i64::MIN, touched_until: i64::MAX, rows };
        let claimed = outbox::claim(&self.pool, &self.footprints, what, room).await?;
        Ok(claimed.lease.map(|mut lease| Held { rows: Rows(lease.take_rows()), lease }))
    }
}

/// What was claimed.
pub struct Held {
    rows: Rows,
    lease: outbox::Lease,
}

impl Held {
    /// The ids of the rows.
    pub fn ids(&self) -> impl Iterator<Item = i64> {
        self.rows.0.iter().map(|row| row.id)
    }

    /// Gives the rows back.
    pub async fn give_back(self) -> Result<(), DatabaseError> {
        self.lease.give_back().await.map(drop)
    }

    /// Records that they are delivered.
    pub async fn deliver(self) -> Result<(), DatabaseError> {
        let outcomes: Vec<_> = self.ids().map(|id| (id, DELIVERED)).collect();
        self.lease.commit(&outcomes, "").await.map(drop)
    }
}
