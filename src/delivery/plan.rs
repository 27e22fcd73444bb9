//! The way from the rows of a lease to requests, and from their answers to an outcome for each row.
//!
//! A key's last claim by a row that is not refused is what the key is to become; earlier claims are folded into it.
//! What the server is known to hold is kept for each key, from accepted requests and from reading back, so a key is
//! either as it should be or has one next step. A row is delivered when all its keys are as they should be.

use std::collections::HashMap;
use std::sync::Arc;

use crate::delivery::verdict;
use crate::openfga::size;
use crate::tuple::{Condition, Intent, InvalidIntent, TupleKey};

/// A row of `fga_outbox`, as leased.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: i64,
    /// Failed deliveries so far.
    pub(crate) attempts: i32,
    pub(crate) intent: Result<Intent, InvalidIntent>,
}

/// What became of a row. Rows that a plan gives no outcome are given back untouched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Delivered,
    /// To be tried again later, with why it failed and how often it has failed by now.
    Waiting {
        reason: String,
        attempts: i32,
    },
    /// Not to be tried again until something changes.
    Refused {
        reason: String,
    },
}

/// How large a request may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) keys: usize,
    /// In protobuf bytes, as OpenFGA counts them.
    pub(crate) bytes: usize,
}

impl Default for Limits {
    /// OpenFGA's own defaults, with some room for what stands around the tuples.
    fn default() -> Self {
        Self { keys: 100, bytes: 616_448 - 1_024 }
    }
}

/// What a key is to become, or is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    Absent,
    Present(Option<Condition>),
}

/// A write request: the keys of some whole rows, or a part of one row that is larger than a request.
#[derive(Debug)]
pub(crate) struct Request {
    /// In the order of their keys, each key once.
    pub(crate) steps: Vec<Step>,
    rows: Vec<usize>,
}

/// One key's part in a request.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) key: Arc<TupleKey>,
    pub(crate) to: State,
    slot: usize,
}

/// The plan of one lease.
#[derive(Debug)]
pub(crate) struct Plan {
    rows: Vec<Planned>,
    slots: Vec<Slot>,
    limits: Limits,
    groups: u32,
}

#[derive(Debug)]
struct Planned {
    id: i64,
    attempts: i32,
    /// One for each key, in the order of the keys.
    claims: Vec<Claim>,
    status: Status,
    /// Only rows of one group share a request: how a refused row is found that the server does not name.
    group: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Status {
    Open,
    InFlight,
    /// Not decided, and not to be tried again in this lease.
    GivenBack,
    Waiting(String),
    Refused(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Claim {
    slot: usize,
    to: State,
    /// The row also deletes the key, so it is deleted before it is written.
    anew: bool,
}

/// A key and what is known of it.
#[derive(Debug)]
struct Slot {
    key: Arc<TupleKey>,
    /// The rows that claim it, in the order of their ids.
    rows: Vec<usize>,
    /// What the server is known to hold.
    stored: Option<State>,
    in_flight: bool,
}

impl Plan {
    /// A plan for these rows, which it puts in the order of their ids.
    pub(crate) fn new(mut rows: Vec<Row>, limits: Limits) -> Self {
        rows.sort_unstable_by_key(|row| row.id);
        let mut plan = Self { rows: Vec::with_capacity(rows.len()), slots: Vec::new(), limits, groups: 0 };
        let mut slots = HashMap::new();
        for row in rows {
            let (claims, status) = match row.intent {
                Ok(intent) => (plan.claims(intent, &mut slots), Status::Open),
                Err(invalid) => (Vec::new(), Status::Refused(invalid.to_string())),
            };
            plan.rows.push(Planned { id: row.id, attempts: row.attempts, claims, status, group: 0 });
        }
        plan
    }

    fn claims(&mut self, intent: Intent, slots: &mut HashMap<Arc<TupleKey>, usize>) -> Vec<Claim> {
        let (writes, deletes) = intent.into_parts();
        let mut claims: Vec<Claim> = Vec::with_capacity(writes.len() + deletes.len());
        for key in deletes {
            let slot = self.slot(key, slots);
            claims.push(Claim { slot, to: State::Absent, anew: false });
        }
        let deleted = claims.len();
        for tuple in writes {
            let (key, condition) = tuple.into_parts();
            let slot = self.slot(key, slots);
            let to = State::Present(condition);
            match claims[..deleted].iter_mut().find(|claim| claim.slot == slot) {
                Some(claim) => *claim = Claim { slot, to, anew: true },
                None => claims.push(Claim { slot, to, anew: false }),
            }
        }
        let row = self.rows.len();
        claims.iter().for_each(|claim| self.slots[claim.slot].rows.push(row));
        claims.sort_unstable_by(|a, b| self.slots[a.slot].key.cmp(&self.slots[b.slot].key));
        claims
    }

    fn slot(&mut self, key: TupleKey, slots: &mut HashMap<Arc<TupleKey>, usize>) -> usize {
        if let Some(slot) = slots.get(&key) {
            return *slot;
        }
        let key = Arc::new(key);
        slots.insert(key.clone(), self.slots.len());
        self.slots.push(Slot { key, rows: Vec::new(), stored: None, in_flight: false });
        self.slots.len() - 1
    }

    /// The next request that may be sent now, beside those in flight: of rows that share no key with any of them.
    /// Its rows are in flight until [`answered`](Self::answered) takes it back.
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let mut packing = Packing::new(self.slots.len());
        for at in 0..self.rows.len() {
            let row = &self.rows[at];
            if row.status != Status::Open || packing.group.is_some_and(|group| group != row.group) {
                continue;
            }
            let mut steps = self.steps(row);
            if steps.is_empty() || steps.iter().any(|step| self.slots[step.slot].in_flight) {
                continue;
            }
            steps.retain(|step| !packing.has[step.slot]);
            let bytes: usize = steps.iter().map(Step::bytes).sum();
            if packing.steps.len() + steps.len() > self.limits.keys || packing.bytes + bytes > self.limits.bytes {
                if !packing.rows.is_empty() {
                    continue;
                }
                self.keep_first_part(&mut steps);
            }
            packing.add(at, row.group, steps, bytes);
            if packing.steps.len() >= self.limits.keys {
                break;
            }
        }
        if packing.rows.is_empty() {
            return None;
        }
        for at in &packing.rows {
            self.rows[*at].status = Status::InFlight;
        }
        for step in &packing.steps {
            self.slots[step.slot].in_flight = true;
        }
        packing.steps.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Some(Request { steps: packing.steps, rows: packing.rows })
    }

    /// What this row still has to send: nothing for keys that are as they should be, or that a later row overrules.
    fn steps(&self, row: &Planned) -> Vec<Step> {
        let mut steps = Vec::with_capacity(row.claims.len());
        let mut first = Vec::new();
        for claim in &row.claims {
            let slot = &self.slots[claim.slot];
            let last = self.last_claim(claim.slot);
            if slot.stored.as_ref() == Some(&last.to) || last.to != claim.to {
                continue;
            }
            let step = |to| Step { key: slot.key.clone(), to, slot: claim.slot };
            match &slot.stored {
                // OpenFGA takes a key once in a request, and never overwrites a condition.
                Some(State::Present(_)) if claim.to != State::Absent => first.push(step(State::Absent)),
                None if claim.anew || last.anew => first.push(step(State::Absent)),
                _ => steps.push(step(claim.to.clone())),
            }
        }
        if first.is_empty() { steps } else { first }
    }

    fn last_claim(&self, slot: usize) -> &Claim {
        let rows = &self.slots[slot].rows;
        let alive = |row: &&usize| !matches!(self.rows[**row].status, Status::Refused(_));
        let row = rows.iter().rev().find(alive).expect("the row that asks is alive and claims it");
        self.rows[*row].claims.iter().find(|claim| claim.slot == slot).expect("slots list only rows that claim them")
    }

    /// As much of one row as a request may hold, deletes first.
    fn keep_first_part(&self, steps: &mut Vec<Step>) {
        steps.sort_by_key(|step| step.to != State::Absent);
        let mut bytes = 0;
        let fitting = steps.iter().take(self.limits.keys).take_while(|step| {
            bytes += step.bytes();
            bytes <= self.limits.bytes
        });
        let fitting = fitting.count().max(1);
        steps.truncate(fitting);
    }

    /// Takes a request back that OpenFGA accepted.
    pub(crate) fn accepted(&mut self, request: Request) {
        self.land(&request);
        for step in request.steps {
            self.slots[step.slot].stored = Some(step.to);
        }
    }

    /// Takes a request back of which nothing was written, because OpenFGA refuses some row of it: the rows with the
    /// tuple that the reason names. Where it names none, the request's rows are halved until one is left.
    pub(crate) fn refused(&mut self, request: Request, reason: &str) {
        self.land(&request);
        let mut named = request.steps.iter().filter(|step| verdict::names(reason, &step.key));
        match (named.next(), named.next(), &request.rows[..]) {
            (Some(step), None, _) => {
                let claimants = self.slots[step.slot].rows.clone();
                let same = |claim: &Claim| claim.slot == step.slot && claim.to == step.to;
                for at in claimants {
                    // A key that was to be deleted first is in the way of whoever writes it, too.
                    if request.rows.contains(&at) && self.rows[at].claims.iter().any(|claim| claim.slot == step.slot)
                        || self.rows[at].claims.iter().any(same)
                    {
                        self.refuse(at, reason);
                    }
                }
            }
            (_, _, [row]) => self.refuse(*row, reason),
            (_, _, rows) => self.halve(rows),
        }
    }

    fn refuse(&mut self, row: usize, reason: &str) {
        if self.rows[row].status == Status::Open {
            self.rows[row].status = Status::Refused(reason.to_owned());
        }
    }

    /// Takes a request back that did not get through for now; its rows wait. Where it has many, they are first halved,
    /// in case it is the fault of one.
    pub(crate) fn failed(&mut self, request: Request, reason: &str) {
        self.forget(&request);
        match &request.rows[..] {
            [row] => self.rows[*row].status = Status::Waiting(reason.to_owned()),
            rows => self.halve(rows),
        }
    }

    /// Takes a request back whose end is not known and that is not to be sent again now: its rows stay as they were.
    pub(crate) fn given_up(&mut self, request: Request) {
        self.forget(&request);
        for row in request.rows {
            self.rows[row].status = Status::GivenBack;
        }
    }

    /// Takes a request back of which nothing was written, with what the server holds for each of its steps, where that
    /// was read.
    pub(crate) fn read_back(&mut self, request: Request, stored: Vec<Option<State>>) {
        self.land(&request);
        for (step, state) in request.steps.iter().zip(stored) {
            self.slots[step.slot].stored = state;
        }
    }

    /// Takes a request back that had too many keys or bytes. A row whose single tuple is too large is refused.
    pub(crate) fn too_large(&mut self, request: Request, excess: verdict::Excess) {
        self.land(&request);
        match (excess, request.steps.len()) {
            (_, 1) => request.rows.iter().for_each(|row| self.refuse(*row, "a tuple is larger than a request may be")),
            (verdict::Excess::Keys(limit), len) => self.limits.keys = limit.clamp(1, len - 1),
            (verdict::Excess::Bytes, _) => {
                self.limits.bytes = request.steps.iter().map(Step::bytes).sum::<usize>() / 2;
            }
        }
    }

    /// The limits as learned so far.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    fn forget(&mut self, request: &Request) {
        self.land(request);
        for step in &request.steps {
            self.slots[step.slot].stored = None;
        }
    }

    fn land(&mut self, request: &Request) {
        for row in &request.rows {
            self.rows[*row].status = Status::Open;
        }
        for step in &request.steps {
            self.slots[step.slot].in_flight = false;
        }
    }

    fn halve(&mut self, rows: &[usize]) {
        for half in rows.chunks(rows.len().div_ceil(2)) {
            self.groups += 1;
            half.iter().for_each(|row| self.rows[*row].group = self.groups);
        }
    }

    /// The outcomes so far. A row without one was not decided: it is given back untouched.
    pub(crate) fn outcomes(&self) -> Vec<(i64, Outcome)> {
        self.rows.iter().filter_map(|row| Some((row.id, self.outcome(row)?))).collect()
    }

    fn outcome(&self, row: &Planned) -> Option<Outcome> {
        match &row.status {
            Status::Refused(reason) => Some(Outcome::Refused { reason: reason.clone() }),
            _ if row.claims.iter().all(|claim| self.is_as_it_should_be(claim.slot)) => Some(Outcome::Delivered),
            Status::Waiting(reason) => {
                Some(Outcome::Waiting { reason: reason.clone(), attempts: row.attempts.saturating_add(1) })
            }
            Status::Open | Status::InFlight | Status::GivenBack => None,
        }
    }

    fn is_as_it_should_be(&self, slot: usize) -> bool {
        self.slots[slot].stored.as_ref() == Some(&self.last_claim(slot).to)
    }
}

impl Step {
    fn bytes(&self) -> usize {
        let condition = match &self.to {
            State::Present(condition) => condition.as_ref(),
            State::Absent => None,
        };
        size::of_tuple(&self.key, condition)
    }
}

impl Request {
    /// The steps that have to be read back after this reason: the one that it names where it can only be one, or all.
    pub(crate) fn in_question(&self, reason: &str) -> Vec<bool> {
        let named: Vec<bool> = self.steps.iter().map(|step| verdict::names(reason, &step.key)).collect();
        let only_one =
            reason.contains("with a different condition") && named.iter().filter(|named| **named).count() == 1;
        if only_one { named } else { vec![true; self.steps.len()] }
    }

    /// Whether what was read back leaves another way than to send the same again.
    pub(crate) fn is_changed_by(&self, stored: &[Option<State>]) -> bool {
        self.steps.iter().zip(stored).any(|(step, stored)| match (&step.to, stored) {
            (State::Absent, Some(State::Absent)) => true,
            (State::Present(_), Some(State::Present(_))) => true,
            _ => false,
        })
    }
}

/// A request in the making.
struct Packing {
    group: Option<u32>,
    rows: Vec<usize>,
    steps: Vec<Step>,
    bytes: usize,
    /// For each slot, whether it is in.
    has: Vec<bool>,
}

impl Packing {
    fn new(slots: usize) -> Self {
        Self { group: None, rows: Vec::new(), steps: Vec::new(), bytes: 0, has: vec![false; slots] }
    }

    fn add(&mut self, row: usize, group: u32, steps: Vec<Step>, bytes: usize) {
        self.group = Some(group);
        self.rows.push(row);
        self.bytes += bytes;
        steps.iter().for_each(|step| self.has[step.slot] = true);
        self.steps.extend(steps);
    }
}
