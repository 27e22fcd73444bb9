//! The way from the rows of a lease to requests, and from their answers to an outcome for each row.
//!
//! A key's last claim by a row that is not refused is what the key is to become; earlier claims are folded into it.
//! What the server is known to hold is kept for each key, from accepted requests and from reading back, so a key is
//! either as it should be or has one next step. A row is delivered when all its keys are as they should be.

use std::collections::HashMap;
use std::sync::Arc;

use crate::delivery::order::{Ahead, claims};
use crate::delivery::sending::End;
use crate::delivery::verdict;
use crate::openfga::size;
use crate::tuple::{Condition, Intent, InvalidIntent, TupleKey};

/// A row of `fga_outbox`, as leased.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: i64,
    /// Failed deliveries so far.
    pub(crate) attempts: i32,
    /// A request of it may still be on its way, of somebody who did not live to record it, or does not know its end.
    pub(crate) doubtful: bool,
    /// It was refused once, or overtaken: later rows that contradict it may be delivered.
    pub(crate) came_back: bool,
    pub(crate) intent: Result<Intent, InvalidIntent>,
    /// To be recorded when it is delivered: what of it was not sent.
    pub(crate) note: Option<String>,
}

#[cfg(test)]
impl Row {
    /// A row that is new.
    pub(crate) fn new(id: i64, intent: Result<Intent, InvalidIntent>) -> Self {
        Self { id, attempts: 0, doubtful: false, came_back: false, intent, note: None }
    }
}

/// What became of a row. Rows that a plan gives no outcome are given back untouched. One that is still to be delivered was
/// overtaken where a later row that contradicts it was delivered, or will be without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// OpenFGA accepted all of it. While an older request of it may still be on its way, a later row that contradicts it
    /// is not safe.
    Delivered { doubtful: bool, note: Option<String> },
    /// OpenFGA accepted all of it, but a request that contradicts it may still be on its way: it is sent once more when
    /// that can't be any longer, and is delivered only then.
    Confirm { overtaken: bool },
    /// OpenFGA refuses it, but an older request may still carry out a part of it: until that can't be any longer, rows that
    /// contradict it have to see it.
    Suspect,
    /// To be tried again later, with why it failed and how often it has failed by now.
    Waiting { reason: String, attempts: i32, overtaken: bool },
    /// To be tried again at once, but not as a new row: a request of it may be on its way, or it was overtaken.
    Again { overtaken: bool },
    /// Not to be tried again until something changes.
    Refused { reason: String },
}

impl Outcome {
    /// Whether a row that is still to be delivered was overtaken by a later one that contradicts it.
    pub(crate) fn is_overtaken(&self) -> bool {
        match self {
            Self::Confirm { overtaken } | Self::Waiting { overtaken, .. } | Self::Again { overtaken } => *overtaken,
            Self::Suspect => true,
            Self::Delivered { .. } | Self::Refused { .. } => false,
        }
    }
}

/// What is made of outcomes when they are to be recorded. Rows that have failed `max_attempts` times are not tried again;
/// rows that were refused under a model that is not the newest any more are: later rows, which did not heed them, are
/// delivered by then.
pub(crate) fn revise(outcomes: &mut [(i64, Outcome)], max_attempts: Option<u32>, newer_model: bool) {
    for (_, outcome) in outcomes {
        match outcome {
            Outcome::Refused { .. } if newer_model => *outcome = Outcome::Again { overtaken: true },
            Outcome::Waiting { reason, attempts, .. }
                if max_attempts.is_some_and(|max| attempts.unsigned_abs() >= max) =>
            {
                *outcome = Outcome::Refused { reason: std::mem::take(reason) };
            }
            _ => {}
        }
    }
}

/// A request of fewer keys than this part of the most waits for others to be back that keep rows from going with it.
const SMALL: usize = 4;

/// How large a request may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) keys: usize,
    /// In protobuf bytes, as OpenFGA counts them: of several rows.
    pub(crate) bytes: usize,
    /// The same of a single row: one above this goes in parts. Learned apart, as a row is only taken apart where it is
    /// known to be too large, while requests of many rows may be smaller than they have to be.
    pub(crate) row_bytes: usize,
}

impl Default for Limits {
    /// OpenFGA's own defaults, with some room for what stands around the tuples.
    fn default() -> Self {
        let bytes = 616_448 - 1_024;
        Self { keys: 100, bytes, row_bytes: bytes }
    }
}

impl Limits {
    /// Takes over what another plan found out.
    pub(crate) fn learn(&mut self, other: Limits) {
        self.keys = self.keys.min(other.keys);
        self.bytes = self.bytes.min(other.bytes);
        self.row_bytes = self.row_bytes.min(other.row_bytes);
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
    /// How often it was sent.
    pub(super) tries: u32,
    /// Whether the end of a try is not known, so that it may still be on its way.
    pub(super) lost: bool,
}

/// One key's part in a request.
#[derive(Debug, Clone)]
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
    doubtful: bool,
    came_back: bool,
    note: Option<String>,
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
}

/// A key and what is known of it.
#[derive(Debug)]
struct Slot {
    key: Arc<TupleKey>,
    /// The rows that claim it, in the order of their ids, and where among their claims.
    rows: Vec<(usize, usize)>,
    /// What the server is known to hold.
    stored: Option<State>,
    in_flight: bool,
    /// What requests make of it that may still be on their way, with the ids of their rows.
    may_become: Vec<(i64, State)>,
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
            let Row { id, attempts, doubtful, came_back, note, .. } = row;
            for claim in claims.iter().filter(|_| doubtful) {
                plan.slots[claim.slot].may_become.push((id, claim.to.clone()));
            }
            plan.rows.push(Planned { id, attempts, doubtful, came_back, note, claims, status, group: 0 });
        }
        plan
    }

    /// Takes into account that a request of these rows, which are delivered, may still be on its way.
    pub(crate) fn beware(&mut self, delivered: &[Ahead]) {
        for Ahead { id, intent, .. } in delivered {
            for (key, to) in claims(intent) {
                let slots = self.slots.iter_mut().filter(|slot| *slot.key == *key);
                slots.for_each(|slot| slot.may_become.push((*id, to.clone())));
            }
        }
    }

    fn claims(&mut self, intent: Intent, slots: &mut HashMap<Arc<TupleKey>, usize>) -> Vec<Claim> {
        let (writes, deletes) = intent.into_parts();
        let mut claims: Vec<Claim> = Vec::with_capacity(writes.len() + deletes.len());
        for key in deletes {
            let slot = self.slot(key, slots);
            claims.push(Claim { slot, to: State::Absent });
        }
        let deleted = claims.len();
        for tuple in writes {
            let (key, condition) = tuple.into_parts();
            let slot = self.slot(key, slots);
            let to = State::Present(condition);
            match claims[..deleted].iter_mut().find(|claim| claim.slot == slot) {
                // It ends written, and is deleted first where it has to be.
                Some(claim) => claim.to = to,
                None => claims.push(Claim { slot, to }),
            }
        }
        claims.sort_unstable_by(|a, b| self.slots[a.slot].key.cmp(&self.slots[b.slot].key));
        let row = self.rows.len();
        for (at, claim) in claims.iter().enumerate() {
            self.slots[claim.slot].rows.push((row, at));
        }
        claims
    }

    fn slot(&mut self, key: TupleKey, slots: &mut HashMap<Arc<TupleKey>, usize>) -> usize {
        if let Some(slot) = slots.get(&key) {
            return *slot;
        }
        let key = Arc::new(key);
        slots.insert(key.clone(), self.slots.len());
        self.slots.push(Slot { key, rows: Vec::new(), stored: None, in_flight: false, may_become: Vec::new() });
        self.slots.len() - 1
    }

    /// The next request that may be sent now, beside those in flight: of rows that share no key with any of them.
    /// Its rows are in flight until it is taken back.
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let mut packing = Packing::new(self.rows.len(), self.slots.len());
        for at in 0..self.rows.len() {
            self.pack(at, &mut packing);
            if packing.steps.len() >= self.limits.keys {
                break;
            }
        }
        // What shares a key with a request in flight can go with this once that one is back, instead of in one more.
        let is_small = packing.steps.len() * SMALL < self.limits.keys;
        if packing.rows.is_empty() || is_small && packing.is_not_all {
            return None;
        }
        for at in &packing.rows {
            self.rows[*at].status = Status::InFlight;
        }
        for step in &packing.steps {
            self.slots[step.slot].in_flight = true;
        }
        packing.steps.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Some(Request { steps: packing.steps, rows: packing.rows, tries: 0, lost: false })
    }

    /// Adds a row to a request where it may travel in it. Says whether all is then in it that the row has to send.
    fn pack(&self, at: usize, packing: &mut Packing) -> bool {
        if let Some(whole) = packing.tried[at] {
            return whole;
        }
        packing.tried[at] = Some(false);
        let row = &self.rows[at];
        if row.status != Status::Open {
            return false;
        }
        let Steps { mut steps, last } = self.steps(row);
        if steps.iter().any(|step| self.slots[step.slot].in_flight) {
            packing.is_not_all = true;
            return false;
        }
        if steps.is_empty() {
            return false;
        }
        // A later row that overrules a part of this one may still be refused: if it went after it, the part would
        // follow then, and the row would have taken effect piece by piece.
        if !row.claims.iter().all(|claim| self.is_free_of_later_rows(claim, packing)) {
            return false;
        }
        if packing.group.is_some_and(|group| group != row.group) {
            return false;
        }
        steps.retain(|step| !packing.has[step.slot]);
        let bytes: usize = steps.iter().map(Step::bytes).sum();
        let mut whole = last;
        if packing.steps.len() + steps.len() > self.limits.keys || packing.bytes + bytes > self.limits.bytes {
            if !packing.rows.is_empty() {
                return false;
            }
            if steps.len() > self.limits.keys || bytes > self.limits.row_bytes {
                self.keep_first_part(&mut steps);
                whole = false;
            }
        }
        packing.add(at, row.group, steps, bytes);
        packing.tried[at] = Some(whole);
        whole
    }

    /// Whether no later row overrules this claim, or only one that is done or travels along.
    fn is_free_of_later_rows(&self, claim: &Claim, packing: &mut Packing) -> bool {
        let (later, last) = self.last_claim(claim.slot);
        last.to == claim.to || self.is_sent(later) || self.pack(later, packing)
    }

    /// Whether a row has nothing to send any more.
    fn is_sent(&self, row: usize) -> bool {
        let row = &self.rows[row];
        row.status == Status::Open && self.steps(row).steps.is_empty()
    }

    /// What this row has to send now: nothing for keys that are as they should be, or that a later row overrules.
    fn steps(&self, row: &Planned) -> Steps {
        let mut steps = Vec::with_capacity(row.claims.len());
        let mut first = Vec::new();
        for claim in &row.claims {
            let slot = &self.slots[claim.slot];
            let (_, last) = self.last_claim(claim.slot);
            if slot.stored.as_ref() == Some(&last.to) || last.to != claim.to {
                continue;
            }
            let step = |to| Step { key: slot.key.clone(), to, slot: claim.slot };
            match &slot.stored {
                // OpenFGA takes a key once in a request, and never overwrites a condition.
                Some(State::Present(_)) if claim.to != State::Absent => first.push(step(State::Absent)),
                _ => steps.push(step(claim.to.clone())),
            }
        }
        if first.is_empty() { Steps { steps, last: true } } else { Steps { steps: first, last: false } }
    }

    /// The claim by which a key's state is decided, and its row.
    fn last_claim(&self, slot: usize) -> (usize, &Claim) {
        let alive = |(row, _): &&(usize, usize)| !matches!(self.rows[*row].status, Status::Refused(_));
        let last = self.slots[slot].rows.iter().rev().find(alive);
        let (row, at) = *last.expect("the row that asks is alive and claims it");
        (row, &self.rows[row].claims[at])
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

    /// Takes a request back.
    pub(crate) fn take_back(&mut self, request: Request, end: End) {
        match end {
            End::Accepted => self.accepted(request),
            End::ReadBack(stored) => self.read_back(request, stored),
            End::Refused(reason) => self.refused(request, &reason),
            End::TooLarge(excess) => self.too_large(request, excess),
            End::Failed(reason) => self.failed(request, &reason),
            End::GivenUp => self.given_up(request),
        }
    }

    /// Takes a request back that OpenFGA accepted.
    fn accepted(&mut self, request: Request) {
        self.land(&request);
        for step in request.steps {
            self.slots[step.slot].stored = Some(step.to);
        }
    }

    /// Takes a request back of which nothing was written, because OpenFGA refuses some row of it: the rows with the
    /// tuple that the reason names. Where it names none, the request's rows are halved until one is left.
    fn refused(&mut self, request: Request, reason: &str) {
        self.land(&request);
        let mut named = request.steps.iter().filter(|step| verdict::names(reason, &step.key));
        match (named.next(), named.next(), &request.rows[..]) {
            (Some(step), None, _) => {
                // A key that was to be deleted first is in the way of whoever writes it. What is overruled was not sent.
                let wanted = self.last_claim(step.slot).1.to.clone();
                for (row, at) in self.slots[step.slot].rows.clone() {
                    let to = &self.rows[row].claims[at].to;
                    if *to == step.to || *to == wanted {
                        self.refuse(row, reason);
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
    fn failed(&mut self, request: Request, reason: &str) {
        self.forget(&request);
        match &request.rows[..] {
            [row] => self.rows[*row].status = Status::Waiting(reason.to_owned()),
            rows => self.halve(rows),
        }
    }

    /// Takes a request back that is not to be sent, or not again now.
    pub(crate) fn given_up(&mut self, request: Request) {
        self.forget(&request);
        for row in request.rows {
            self.rows[row].status = Status::GivenBack;
        }
    }

    /// Takes a request back of which nothing was written, with what the server holds for each of its steps, where that
    /// was read.
    fn read_back(&mut self, request: Request, stored: Vec<Option<State>>) {
        self.land(&request);
        for (step, state) in request.steps.iter().zip(stored) {
            let Some(state) = state else { continue };
            if state != State::Absent {
                self.suspect_replacement(step.slot);
            }
            self.slots[step.slot].stored = Some(state);
        }
    }

    /// A row in doubt that writes what is there under another condition may have had it deleted when it was sent before.
    fn suspect_replacement(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        let may_become = slot.rows.iter().map(|(row, at)| (&self.rows[*row], *at)).filter_map(|(row, at)| {
            (row.doubtful && row.claims[at].to != State::Absent).then_some((row.id, State::Absent))
        });
        slot.may_become.extend(may_become);
    }

    /// Takes a request back that had too many keys or bytes. A row whose single tuple is too large is refused.
    fn too_large(&mut self, request: Request, excess: verdict::Excess) {
        self.land(&request);
        match (excess, request.steps.len()) {
            (_, 1) => request.rows.iter().for_each(|row| self.refuse(*row, "a tuple is larger than a request may be")),
            // Requests come back in any order: one that was sent before less was known teaches nothing.
            (verdict::Excess::Keys(limit), len) => self.limits.keys = limit.clamp(1, len - 1).min(self.limits.keys),
            (verdict::Excess::Bytes, _) => {
                let bytes: usize = request.steps.iter().map(Step::bytes).sum();
                self.limits.bytes = self.limits.bytes.min(bytes / 2);
                self.limits.row_bytes = self.limits.row_bytes.min(bytes - 1);
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
            self.rows[*row].doubtful |= request.lost;
        }
        for step in &request.steps {
            let slot = &mut self.slots[step.slot];
            slot.in_flight = false;
            // Whichever row decides the key in the end.
            slot.may_become.extend(request.lost.then(|| (i64::MIN, step.to.clone())));
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
        let mut delivered = vec![false; self.rows.len()];
        // From the last one on, as a row that is overruled depends on the one that overrules it.
        for at in (0..self.rows.len()).rev() {
            let row = &self.rows[at];
            delivered[at] = !matches!(row.status, Status::Refused(_))
                && row.claims.iter().all(|claim| self.is_settled(at, claim, &delivered));
        }
        (0..self.rows.len()).filter_map(|at| Some((self.rows[at].id, self.outcome(at, &delivered)?))).collect()
    }

    fn outcome(&self, at: usize, delivered: &[bool]) -> Option<Outcome> {
        let row = &self.rows[at];
        let overtaken = || row.claims.iter().any(|claim| self.is_overtaken(at, claim, delivered));
        match &row.status {
            // Some of it may have been sent along with a later row that overruled the rest: rows that contradict it have to
            // see it until that can't arrive any longer.
            Status::Refused(_) if row.doubtful && row.attempts == 0 && !row.came_back && row.claims.len() > 1 => {
                Some(Outcome::Suspect)
            }
            Status::Refused(reason) => Some(Outcome::Refused { reason: reason.clone() }),
            _ if delivered[at] && row.claims.iter().any(|claim| self.is_in_doubt(at, claim, delivered)) => {
                Some(Outcome::Confirm { overtaken: overtaken() })
            }
            _ if delivered[at] => Some(Outcome::Delivered { doubtful: row.doubtful, note: row.note.clone() }),
            Status::Waiting(reason) => {
                let (reason, attempts) = (reason.clone(), row.attempts.saturating_add(1));
                Some(Outcome::Waiting { reason, attempts, overtaken: overtaken() })
            }
            Status::Open | Status::InFlight | Status::GivenBack => {
                let overtaken = overtaken();
                (row.doubtful || overtaken).then_some(Outcome::Again { overtaken })
            }
        }
    }

    /// Whether a later row that contradicts this claim is delivered.
    fn is_overtaken(&self, row: usize, claim: &Claim, delivered: &[bool]) -> bool {
        let mut later = self.slots[claim.slot].rows.iter().rev().take_while(|(later, _)| *later > row);
        later.any(|(later, at)| delivered[*later] && self.rows[*later].claims[*at].to != claim.to)
    }

    /// Whether this claim of a delivered row may be undone by a request that is still on its way: of an earlier row that
    /// wanted the key otherwise, or to delete what had to be replaced. What a later row overrules is that one's concern.
    fn is_in_doubt(&self, row: usize, claim: &Claim, delivered: &[bool]) -> bool {
        let slot = &self.slots[claim.slot];
        let may_be_undone = slot.may_become.iter().any(|(id, to)| *id <= self.rows[row].id && *to != claim.to);
        may_be_undone && !self.is_overtaken(row, claim, delivered)
    }

    /// Whether nothing is left to do for a row's claim: its key is as the claim wants it, or as a later row wants it that
    /// is itself delivered. One that is not may still be refused, and then the claim stands again.
    fn is_settled(&self, row: usize, claim: &Claim, delivered: &[bool]) -> bool {
        let slot = &self.slots[claim.slot];
        let (_, last) = self.last_claim(claim.slot);
        let mut later = slot.rows.iter().rev().map(|(later, _)| *later).take_while(|later| *later > row);
        slot.stored.as_ref() == Some(&last.to) && (last.to == claim.to || later.any(|later| delivered[later]))
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
    /// How many rows it carries.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The steps that have to be read back after this reason: the one that it names where it can only be one, or all.
    pub(crate) fn in_question(&self, reason: &str) -> Vec<bool> {
        let named: Vec<bool> = self.steps.iter().map(|step| verdict::names(reason, &step.key)).collect();
        let only_one =
            reason.contains("with a different condition") && named.iter().filter(|named| **named).count() == 1;
        if only_one { named } else { vec![true; self.steps.len()] }
    }

    /// Whether what was read back leaves another way than to send the same again.
    pub(crate) fn is_changed_by(&self, stored: &[Option<State>]) -> bool {
        use State::{Absent, Present};
        let is_as_wanted = |(step, stored): (&Step, &Option<State>)| {
            matches!((&step.to, stored), (Absent, Some(Absent)) | (Present(_), Some(Present(_))))
        };
        self.steps.iter().zip(stored).any(is_as_wanted)
    }
}

/// What a row has to send now.
struct Steps {
    steps: Vec<Step>,
    /// Whether nothing is to follow: keys that are deleted before they are written are sent ahead.
    last: bool,
}

/// A request in the making.
struct Packing {
    group: Option<u32>,
    rows: Vec<usize>,
    steps: Vec<Step>,
    bytes: usize,
    /// Whether there are rows that share a key with a request in flight.
    is_not_all: bool,
    /// For each slot, whether it is in.
    has: Vec<bool>,
    /// For each row that was looked at, whether all is in that it has to send.
    tried: Vec<Option<bool>>,
}

impl Packing {
    fn new(rows: usize, slots: usize) -> Self {
        Self {
            group: None,
            rows: Vec::new(),
            steps: Vec::new(),
            bytes: 0,
            is_not_all: false,
            has: vec![false; slots],
            tried: vec![None; rows],
        }
    }

    fn add(&mut self, row: usize, group: u32, steps: Vec<Step>, bytes: usize) {
        self.group = Some(group);
        self.rows.push(row);
        self.bytes += bytes;
        steps.iter().for_each(|step| self.has[step.slot] = true);
        self.steps.extend(steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::order::Standing;
    use crate::delivery::verdict::Excess;
    use crate::tuple::Tuple;

    fn key(name: &str) -> TupleKey {
        TupleKey::new(format!("user:{name}"), "viewer", "document:1").unwrap()
    }

    fn tuple(name: &str) -> Tuple {
        Tuple::try_from(key(name)).unwrap()
    }

    /// A row that writes and deletes what its words say: `+anne -bob`.
    fn row(id: i64, words: &str) -> Row {
        let mut writes = Vec::new();
        let mut deletes = Vec::new();
        for word in words.split(' ') {
            match word.split_at(1) {
                ("+", name) => writes.push(tuple(name)),
                (_, name) => deletes.push(key(name)),
            }
        }
        Row::new(id, Intent::new(writes, deletes))
    }

    fn plan(rows: &[&str], limits: Limits) -> Plan {
        Plan::new(rows.iter().enumerate().map(|(at, words)| row(at as i64, words)).collect(), limits)
    }

    fn of_keys(keys: usize) -> Limits {
        Limits { keys, ..Limits::default() }
    }

    /// What it does, in the words of a row.
    fn words(request: &Request) -> String {
        let word = |step: &Step| {
            let sign = if step.to == State::Absent { '-' } else { '+' };
            format!("{sign}{}", step.key.user().trim_start_matches("user:"))
        };
        request.steps.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    fn invalid(name: &str) -> String {
        format!("Invalid tuple 'document:1#viewer@user:{name}'. Reason: not in the model")
    }

    /// The outcomes, by the rows' places: delivered, waiting, refused, or given back.
    fn ends(plan: &Plan) -> String {
        let mut ends = vec!['-'; plan.rows.len()];
        for (id, outcome) in plan.outcomes() {
            ends[id as usize] = match outcome {
                Outcome::Delivered { .. } => 'd',
                Outcome::Confirm { .. } => 'c',
                Outcome::Suspect => 's',
                Outcome::Waiting { .. } => 'w',
                Outcome::Again { .. } => 'a',
                Outcome::Refused { .. } => 'r',
            };
        }
        ends.into_iter().collect()
    }

    #[test]
    fn rows_are_packed_whole_and_equal_tuples_are_sent_once() {
        let mut plan = plan(&["+a +shared", "+b +shared", "+c +d", "+e"], of_keys(4));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a +b +e +shared");
        let other = plan.next_request().unwrap();
        assert_eq!(words(&other), "+c +d");
        assert!(plan.next_request().is_none());
        plan.accepted(request);
        assert_eq!(ends(&plan), "dd-d");
        plan.accepted(other);
        assert_eq!(ends(&plan), "dddd");
    }

    #[test]
    fn rows_that_share_a_key_are_never_in_flight_at_once() {
        let mut plan = plan(&["+a +b", "+b +c"], of_keys(2));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a +b");
        assert!(plan.next_request().is_none());
        plan.accepted(request);
        assert_eq!(words(&plan.next_request().unwrap()), "+c");
    }

    #[test]
    fn a_named_row_is_refused_alone() {
        let mut plan = plan(&["+a", "+bad +b", "+c", "+bad"], Limits::default());
        let request = plan.next_request().unwrap();
        plan.refused(request, &invalid("bad"));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a +c");
        plan.accepted(request);
        assert_eq!(ends(&plan), "drdr");
    }

    #[test]
    fn a_row_that_is_not_named_is_found_by_halving() {
        let names: Vec<String> = (0..100).map(|at| format!("+{at}")).collect();
        let mut plan = plan(&names.iter().map(String::as_str).collect::<Vec<_>>(), Limits::default());
        let mut requests = 0;
        while let Some(request) = plan.next_request() {
            requests += 1;
            match words(&request).split(' ').any(|word| word == "+70") {
                true => plan.refused(request, "invalid TupleKey.Object: value does not match"),
                false => plan.accepted(request),
            }
        }
        assert_eq!(ends(&plan).find('r'), Some(70));
        assert_eq!(ends(&plan).matches('d').count(), 99);
        assert!(requests <= 15, "{requests}");
    }

    #[test]
    fn a_row_is_not_refused_for_a_tuple_that_a_later_row_overrules() {
        let mut plan = plan(&["-x +a", "+x"], Limits::default());
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a +x");
        plan.refused(request, &invalid("x"));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a -x");
        plan.accepted(request);
        assert_eq!(ends(&plan), "dr");
    }

    #[test]
    fn a_row_travels_with_the_one_that_overrules_it_or_after_it() {
        let mut plan = plan(&["+x +a", "-x +bad +b"], of_keys(3));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+b +bad -x");
        assert!(plan.next_request().is_none());
        plan.refused(request, &invalid("bad"));
        // Whole, as nobody overrules it any more.
        assert_eq!(words(&plan.next_request().unwrap()), "+a +x");
    }

    #[test]
    fn a_row_counts_as_delivered_only_with_the_one_that_overrules_it() {
        let mut plan = plan(&["+x", "-x +a"], Limits::default());
        let request = plan.next_request().unwrap();
        // Another writer has deleted it already, and then the server is gone.
        let read = request.steps.iter().map(|step| (step.to == State::Absent).then_some(State::Absent)).collect();
        plan.read_back(request, read);
        assert_eq!(ends(&plan), "--");
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a");
        plan.given_up(request);
        assert_eq!(ends(&plan), "--");
    }

    #[test]
    fn what_is_known_of_a_key_outlives_reading_another_one() {
        let mut plan = plan(&["+a +x"], Limits::default());
        let other = || Some(State::Present(Some(Condition::new("in_office").unwrap())));
        let request = plan.next_request().unwrap();
        plan.read_back(request, vec![None, other()]);
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "-x");
        plan.accepted(request);
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a +x");
        plan.read_back(request, vec![other(), None]);
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "-a", "and not -x again");
        plan.accepted(request);
        assert_eq!(words(&plan.next_request().unwrap()), "+a +x");
    }

    #[test]
    fn a_key_that_a_row_deletes_and_writes_is_written() {
        let mut plan = plan(&["-x +x"], Limits::default());
        assert_eq!(words(&plan.next_request().unwrap()), "+x");
    }

    #[test]
    fn a_row_of_more_tuples_than_a_request_may_hold_goes_in_parts_deletes_first() {
        let mut plan = plan(&["+a +b +c -d -e"], of_keys(100));
        let request = plan.next_request().unwrap();
        plan.too_large(request, Excess::Keys(2));
        for expected in ["-d -e", "+a +b", "+c"] {
            assert_eq!(ends(&plan), "-");
            let request = plan.next_request().unwrap();
            assert_eq!(words(&request), expected);
            plan.accepted(request);
        }
        assert_eq!(ends(&plan), "d");
    }

    #[test]
    fn limits_are_learned_from_the_smallest_request_that_was_too_large() {
        let mut plan = plan(&["+a +b +c +d", "+e +f +g +h", "+i +j"], of_keys(4));
        let (first, second) = (plan.next_request().unwrap(), plan.next_request().unwrap());
        let bytes: usize = first.steps.iter().map(Step::bytes).sum();
        let third = plan.next_request().unwrap();
        let least: usize = third.steps.iter().map(Step::bytes).sum();
        plan.too_large(third, Excess::Bytes);
        plan.too_large(first, Excess::Bytes);
        assert_eq!((plan.limits().bytes, plan.limits().row_bytes), (least / 2, least - 1));
        assert!(least < bytes);
        plan.too_large(second, Excess::Keys(2));
        assert_eq!(plan.limits().keys, 2);
    }

    #[test]
    fn a_row_is_only_taken_apart_where_it_is_known_to_be_too_large_by_itself() {
        let mut plan = plan(&["+a +b +c +d", "+e"], Limits::default());
        for (expected, next) in [("+a +b +c +d +e", "+a +b +c +d"), ("+a +b +c +d", "+a +b")] {
            let request = plan.next_request().unwrap();
            assert_eq!(words(&request), expected);
            plan.too_large(request, Excess::Bytes);
            let request = plan.next_request().unwrap();
            assert_eq!(words(&request), next);
            plan.read_back(request, vec![None; next.split(' ').count()]);
        }
    }

    #[test]
    fn a_tuple_that_is_too_large_by_itself_is_refused() {
        let mut plan = plan(&["+a", "+b"], of_keys(1));
        let request = plan.next_request().unwrap();
        plan.too_large(request, Excess::Bytes);
        assert_eq!(ends(&plan), "r-");
        assert_eq!(words(&plan.next_request().unwrap()), "+b");
    }

    #[test]
    fn a_request_that_keeps_failing_is_halved_and_its_single_rows_wait() {
        let mut plan = plan(&["+a", "+b", "+c"], Limits::default());
        let mut requests = Vec::new();
        while let Some(request) = plan.next_request() {
            requests.push(words(&request));
            match words(&request).contains("+b") {
                true => plan.failed(request, "Internal Server Error"),
                false => plan.accepted(request),
            }
        }
        assert_eq!(requests, ["+a +b +c", "+a +b", "+a", "+b", "+c"]);
        assert_eq!(ends(&plan), "dwd");
        let (_, waiting) = plan.outcomes().swap_remove(1);
        let reason = "Internal Server Error".to_owned();
        assert_eq!(waiting, Outcome::Waiting { reason, attempts: 1, overtaken: false });
    }
    /// The ends, after all is accepted, of rows of which some were sent before, and beside one delivered a moment ago.
    fn ends_with_doubt(rows: &[&str], doubtful: &[usize], just_delivered: Option<(i64, &str)>) -> String {
        let rows = rows.iter().enumerate();
        let rows = rows.map(|(at, words)| Row { doubtful: doubtful.contains(&at), ..row(at as i64, words) });
        let mut plan = Plan::new(rows.collect(), Limits::default());
        let just_delivered = just_delivered.map(|(id, words)| {
            let intent = row(id, words).intent.unwrap();
            Ahead { id, intent, standing: Standing::Doubtful }
        });
        plan.beware(just_delivered.as_slice());
        while let Some(request) = plan.next_request() {
            plan.accepted(request);
        }
        ends(&plan)
    }

    #[test]
    fn a_row_is_in_doubt_while_what_it_contradicts_may_still_arrive() {
        let pair = ["+x", "-x", "+b"];
        assert_eq!(ends_with_doubt(&pair, &[], None), "ddd", "never leased before");
        assert_eq!(ends_with_doubt(&pair, &[0], None), "dcd");
        assert_eq!(ends_with_doubt(&pair, &[1, 2], None), "ddd", "only what came earlier");
        assert_eq!(ends_with_doubt(&["+x", "-x", "+x", "-x"], &[0, 1, 2], None), "dddc", "only what decides");
        assert_eq!(ends_with_doubt(&["-x"], &[], Some((-1, "+x"))), "c");
        assert_eq!(ends_with_doubt(&["-x"], &[], Some((1, "+x"))), "d");
        assert_eq!(ends_with_doubt(&["+x"], &[], Some((-1, "+x"))), "d");
    }

    #[test]
    fn a_row_that_replaces_a_condition_is_in_doubt_while_its_own_delete_may_still_arrive() {
        for doubtful in [false, true] {
            let mut plan = Plan::new(vec![Row { doubtful, ..row(0, "+x") }], Limits::default());
            let request = plan.next_request().unwrap();
            plan.read_back(request, vec![Some(State::Present(Some(Condition::new("in_office").unwrap())))]);
            while let Some(request) = plan.next_request() {
                plan.accepted(request);
            }
            assert_eq!(ends(&plan), if doubtful { "c" } else { "d" });
        }
    }

    #[test]
    fn a_row_whose_request_may_be_on_its_way_is_not_given_back_as_new() {
        let mut plan = plan(&["+a", "+b"], of_keys(1));
        let (mut first, second) = (plan.next_request().unwrap(), plan.next_request().unwrap());
        first.lost = true;
        plan.given_up(first);
        plan.given_up(second);
        assert_eq!(plan.outcomes(), [(0, Outcome::Again { overtaken: false })], "the second one was never sent");
    }

    #[test]
    fn a_row_that_failed_while_a_later_one_went_through_is_known_to_be_overtaken() {
        let mut plan = plan(&["+x +a", "-x"], of_keys(1));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "-x");
        plan.accepted(request);
        assert_eq!(plan.outcomes()[0], (0, Outcome::Again { overtaken: true }));
        let request = plan.next_request().unwrap();
        assert_eq!(words(&request), "+a");
        plan.failed(request, "busy");
        let waiting = Outcome::Waiting { reason: "busy".to_owned(), attempts: 1, overtaken: true };
        assert_eq!(plan.outcomes()[0], (0, waiting));
        assert_eq!(ends(&plan), "wd");
    }
}
