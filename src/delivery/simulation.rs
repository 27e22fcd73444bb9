//! The plan and the verdicts against a simulated OpenFGA: for any rows, and whatever the server does.
//!
//! The server is a map that carries requests out as OpenFGA does (all or nothing, in both duplicate modes, with limits
//! and a model) and answers in OpenFGA's words; what it answers goes through the real [`verdict`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, json};

use super::plan::{Limits, Outcome, Plan, Request, Row, State, Step};
use super::sending::{End, Next};
use super::verdict::{Answer, Excess, Fault, FaultKind, Verdict, verdict};
use crate::openfga::size;
use crate::tuple::{Condition, Intent, Tuple, TupleKey};

/// How many requests may be in flight.
const FLOW: usize = 4;

/// A server: what it is, and what it holds.
#[derive(Debug, Clone)]
pub(super) struct Server {
    /// How many planets the model knows that requests are made under.
    pub(super) planets: u32,
    /// Whether it knows `on_duplicate` and `on_missing`.
    ignores: bool,
    /// Whether it says which tuple it means.
    names: bool,
    /// Whether it takes a condition without a context for another one than with an empty one.
    minds_empty_contexts: bool,
    max_keys: usize,
    max_bytes: usize,
    store: BTreeMap<TupleKey, Stored>,
    /// What befalls the next requests; then all is well.
    weather: VecDeque<Weather>,
}

#[derive(Debug, Clone, PartialEq)]
struct Stored {
    condition: Option<Condition>,
    /// Written by somebody who writes `{}` where this crate leaves the context out.
    empty_context: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Weather {
    Fine,
    Race,
    InternalError,
    Unforeseen,
    /// The server's deadline: whether it had carried the request out by then.
    Deadline(bool),
    /// No answer came: whether the request had been carried out by then.
    NoAnswer(bool),
    Overloaded,
    NoSuchStore,
}

impl Default for Server {
    /// One that is new, and empty.
    fn default() -> Self {
        Self {
            planets: 0,
            ignores: true,
            names: true,
            minds_empty_contexts: false,
            max_keys: 100,
            max_bytes: 616_448,
            store: BTreeMap::new(),
            weather: VecDeque::new(),
        }
    }
}

impl Server {
    /// The answer; none where the connection broke.
    fn write(&mut self, request: &Request) -> Option<(u16, String)> {
        match self.weather.pop_front().unwrap_or(Weather::Fine) {
            Weather::Fine => Some(self.carry_out(&request.steps)),
            Weather::Race => Some(error(
                409,
                "Aborted",
                "transactional write failed due to conflict: one or more tuples to write were inserted by another \
                 transaction",
            )),
            Weather::InternalError => Some(error(500, "internal_error", "Internal Server Error")),
            Weather::Unforeseen => Some((418, "<html>short and stout</html>".to_owned())),
            Weather::Deadline(committed) => {
                committed.then(|| self.carry_out(&request.steps));
                Some(error(500, "deadline_exceeded", "Request Deadline Exceeded"))
            }
            Weather::NoAnswer(committed) => {
                committed.then(|| self.carry_out(&request.steps));
                None
            }
            Weather::Overloaded => Some((429, String::new())),
            Weather::NoSuchStore => Some(error(404, "store_id_not_found", "Store ID not found")),
        }
    }

    pub(super) fn carry_out(&mut self, steps: &[Step]) -> (u16, String) {
        let bytes = bytes(steps);
        if bytes > self.max_bytes {
            let message = format!("grpc: received message larger than max ({bytes} vs. {})", self.max_bytes);
            return error(500, "resource_exhausted", &message);
        }
        if let Some(step) = steps.iter().find(|step| !self.in_model(&step.key, &step.to)) {
            return error(400, "validation_error", &self.invalid(&step.key, &step.to));
        }
        if steps.len() > self.max_keys {
            let message = format!("The number of write operations exceeds the allowed limit of {}", self.max_keys);
            return error(400, "exceeded_entity_limit", &message);
        }
        let mut after = self.store.clone();
        for step in steps.iter().filter(|step| step.to == State::Absent) {
            if after.remove(&*step.key).is_none() && !self.ignores {
                return self.not_as_expected("cannot delete a tuple which does not exist", &step.key);
            }
        }
        for step in steps {
            let State::Present(condition) = &step.to else { continue };
            match after.get(&*step.key) {
                None => {
                    let stored = Stored { condition: condition.clone(), empty_context: false };
                    after.insert((*step.key).clone(), stored);
                }
                Some(_) if !self.ignores => {
                    return self.not_as_expected("cannot write a tuple which already exists", &step.key);
                }
                Some(stored)
                    if stored.condition == *condition && !(self.minds_empty_contexts && stored.empty_context) => {}
                Some(_) => {
                    let what = "transactional write failed due to conflict: \
                        attempted to write a tuple which already exists with a different condition";
                    return error(409, "Aborted", &format!("{what}{}", self.long(&step.key)));
                }
            }
        }
        self.store = after;
        (200, "{}".to_owned())
    }

    fn invalid(&self, key: &TupleKey, to: &State) -> String {
        if !self.names {
            return r#"invalid TupleKey.Object: value does not match regex pattern "^[^\\s]{2,256}$""#.to_owned();
        }
        let condition = match to {
            State::Present(Some(condition)) => format!(" (condition {})", condition.name()),
            _ => String::new(),
        };
        let tuple = format!("{}#{}@{}{condition}", key.object(), key.relation(), key.user());
        format!("Invalid tuple '{tuple}'. Reason: it is not in the model")
    }

    fn not_as_expected(&self, what: &str, key: &TupleKey) -> (u16, String) {
        let message = format!("{what}{}: tuple to be written already existed or …", self.long(key));
        error(400, "write_failed_due_to_invalid_input", &message)
    }

    fn long(&self, key: &TupleKey) -> String {
        if self.names {
            format!(": user: '{}', relation: '{}', object: '{}'", key.user(), key.relation(), key.object())
        } else {
            String::new()
        }
    }

    pub(super) fn read(&self, key: &TupleKey) -> State {
        match self.store.get(key) {
            None => State::Absent,
            Some(stored) => State::Present(stored.condition.clone()),
        }
    }

    /// Whether it takes this alone, from anybody.
    fn takes(&self, key: &TupleKey, to: &State) -> bool {
        self.in_model(key, to) && bytes_of(key, to) <= self.max_bytes
    }

    /// The model knows documents, some planets, and every condition but one; even in a delete it knows a malformed user.
    fn in_model(&self, key: &TupleKey, to: &State) -> bool {
        let user = !key.user().contains("malformed");
        let object = match key.object().strip_prefix("planet:").map(str::parse::<u32>) {
            Some(planet) => planet.is_ok_and(|planet| planet <= self.planets),
            None => key.object().starts_with("document:"),
        };
        match to {
            State::Absent => user,
            State::Present(condition) => {
                user && object && condition.as_ref().is_none_or(|condition| condition.name() != "unknown")
            }
        }
    }
}

pub(super) fn error(status: u16, code: &str, message: &str) -> (u16, String) {
    (status, json!({"code": code, "message": message}).to_string())
}

fn bytes_of(key: &TupleKey, to: &State) -> usize {
    match to {
        State::Absent => size::of_tuple(key, None),
        State::Present(condition) => size::of_tuple(key, condition.as_ref()),
    }
}

fn bytes(steps: &[Step]) -> usize {
    steps.iter().map(|step| bytes_of(&step.key, &step.to)).sum()
}

/// What a row wants of a key, after its own deletes and writes are folded.
type Wanted = BTreeMap<TupleKey, State>;

/// A table, a server, and the order in which things happen.
#[derive(Clone)]
struct Case {
    /// Their ids are their places.
    rows: Vec<Intent>,
    server: Server,
    limits: Limits,
    /// Which of the requests in flight ends next, or whether another one is sent first.
    choices: Vec<u8>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.iter().try_for_each(|row| writeln!(f, "    {}", row.to_json()))?;
        write!(f, "    {:?}\n    {:?}\n    choices {:?}", self.server, self.limits, self.choices)
    }
}

/// How a case goes on.
struct Run {
    rows: Vec<Intent>,
    wanted: Vec<Wanted>,
    /// The rows that want something invalid that no other row overrules.
    hopeless: BTreeSet<usize>,
    /// What the server held in the beginning.
    initial: BTreeSet<TupleKey>,
    server: Server,
    limits: Limits,
    choices: VecDeque<u8>,
    faults: u32,
    requests: u32,
}

impl Run {
    fn new(case: Case) -> Self {
        let wanted = case.rows.iter().map(wanted).collect();
        let mut run = Self {
            rows: case.rows,
            wanted,
            hopeless: BTreeSet::new(),
            initial: case.server.store.keys().cloned().collect(),
            server: case.server,
            limits: case.limits,
            choices: case.choices.into(),
            faults: 0,
            requests: 0,
        };
        for at in (0..run.rows.len()).rev() {
            if run.stands(at, &run.hopeless).any(|(key, to)| !run.server.takes(key, to)) {
                run.hopeless.insert(at);
            }
        }
        run
    }

    /// Delivers these rows as the Deliverer does.
    fn deliver(&mut self, leased: &BTreeSet<usize>) -> Result<BTreeMap<usize, Outcome>, TestCaseError> {
        let rows = leased.iter().map(|at| Row::new(*at as i64, Ok(self.rows[*at].clone()))).collect();
        let mut plan = Plan::new(rows, self.limits);
        let mut in_flight: Vec<Request> = Vec::new();
        let mut open = true;
        loop {
            let choice = usize::from(self.choices.pop_front().unwrap_or_default());
            let may_send = open && in_flight.len() < FLOW && (choice == 0 || in_flight.is_empty());
            match may_send.then(|| plan.next_request()).flatten() {
                Some(request) => {
                    self.check_sent(&plan, &request, &in_flight)?;
                    in_flight.push(request);
                }
                None if in_flight.is_empty() => break,
                None => {
                    let request = in_flight.remove(choice % in_flight.len());
                    open &= self.send(&mut plan, request)?;
                }
            }
        }
        self.limits = plan.limits();
        Ok(plan.outcomes().into_iter().map(|(id, outcome)| (id as usize, outcome)).collect())
    }

    fn check_sent(&mut self, plan: &Plan, request: &Request, in_flight: &[Request]) -> Result<(), TestCaseError> {
        self.requests += 1;
        prop_assert!(self.requests < 2_000, "there is no end to it");
        prop_assert!(!request.steps.is_empty());
        prop_assert!(request.steps.is_sorted_by(|a, b| a.key < b.key), "a key twice, or not in order: {:?}", request);
        for other in in_flight {
            let shared = request.steps.iter().any(|a| other.steps.iter().any(|b| a.key == b.key));
            prop_assert!(!shared, "{:?} shares a key with {:?}", request, other);
        }
        prop_assert!(request.steps.len() <= plan.limits().keys);
        prop_assert!(
            bytes(&request.steps) <= plan.limits().bytes || request.rows() == 1,
            "{} bytes",
            bytes(&request.steps)
        );
        Ok(())
    }

    /// Sends a request until its end is known. Whether another one may be sent.
    fn send(&mut self, plan: &mut Plan, mut request: Request) -> Result<bool, TestCaseError> {
        let end = loop {
            let before = self.server.store.clone();
            let answer = self.server.write(&request);
            self.check_whole_rows(&before)?;
            let verdict = match answer {
                Some((status, body)) => verdict(&Answer { status, retry_after: None, body: body.as_bytes() }),
                None => Verdict::Target(Fault::new(FaultKind::Unreachable, "no answer")),
            };
            let mut next = request.answered(verdict);
            if let Next::Read { reason } = next {
                let read = request.steps.iter().zip(request.in_question(&reason));
                let stored: Vec<_> = read.map(|(step, asked)| asked.then(|| self.server.read(&step.key))).collect();
                prop_assert!(request.is_changed_by(&stored), "{} is no news of {:?}", reason, request);
                next = request.was_read(stored, reason);
            }
            match next {
                Next::TakeBack(end) => break end,
                Next::Pause(_) => break End::GivenUp,
                Next::Blame { reason } => break End::Failed(reason),
                Next::AgainAfterRace | Next::AgainAfterFault | Next::Read { .. } => {}
            }
        };
        self.faults += u32::from(matches!(end, End::GivenUp | End::Failed(_)));
        if let End::TooLarge(excess) = end {
            prop_assert!(matches!(excess, Excess::Bytes) || request.steps.len() > self.server.max_keys);
        }
        let may_send = !matches!(end, End::GivenUp);
        let before = plan.limits();
        plan.take_back(request, end);
        let Limits { keys, bytes, row_bytes } = plan.limits();
        prop_assert!(keys <= before.keys && bytes <= before.bytes && row_bytes <= before.row_bytes);
        Ok(may_send)
    }

    /// What a row alone wants (or besides only rows that are refused, and so do nothing) comes true at once, unless the
    /// row is larger than a request may be.
    fn check_whole_rows(&self, before: &BTreeMap<TupleKey, Stored>) -> Result<(), TestCaseError> {
        if *before == self.server.store {
            return Ok(());
        }
        let is = |store: &BTreeMap<TupleKey, Stored>, key: &TupleKey, to: &State| match (store.get(key), to) {
            (None, State::Absent) => true,
            (Some(stored), State::Present(condition)) => stored.condition == *condition,
            _ => false,
        };
        for (at, wanted) in self.wanted.iter().enumerate() {
            if self.is_large(at) {
                continue;
            }
            let alone = |key: &TupleKey, to: &State| {
                let mut others =
                    (0..self.rows.len()).filter(|other| *other != at && self.wanted[*other].contains_key(key));
                others.all(|other| self.hopeless.contains(&other) && !self.is_large(other) && *to != State::Absent)
            };
            let own: Vec<_> = wanted.iter().filter(|(key, to)| alone(key, to)).collect();
            if own.iter().any(|(key, to)| !is(before, key, to) && is(&self.server.store, key, to)) {
                let whole = own.iter().all(|(key, to)| is(&self.server.store, key, to));
                prop_assert!(whole, "row {} took effect in parts", at);
            }
        }
        Ok(())
    }

    fn is_large(&self, row: usize) -> bool {
        let wanted = &self.wanted[row];
        let bytes: usize = wanted.iter().map(|(key, to)| bytes_of(key, to)).sum();
        wanted.len() > self.server.max_keys.min(self.limits.keys)
            || bytes > self.server.max_bytes.min(self.limits.bytes)
    }

    /// Whether something of this row may be done about a key of it before all is: the row is large, or the key has to be
    /// deleted before it is written.
    fn may_begin_with(&self, row: usize, key: &TupleKey) -> bool {
        let others = self.wanted.iter().filter(|wanted| wanted.contains_key(key)).count() > 1;
        let may_be_there = others || self.initial.contains(key);
        self.is_large(row) || self.wanted[row][key] != State::Absent && may_be_there
    }

    /// Whether the server refuses something that this row wants.
    fn is_invalid(&self, row: usize) -> bool {
        self.wanted[row].iter().any(|(key, to)| !self.server.takes(key, to))
    }

    /// What this row wants and no later one overrules, among those that are not refused.
    fn stands<'a>(
        &'a self,
        row: usize,
        refused: &'a BTreeSet<usize>,
    ) -> impl Iterator<Item = (&'a TupleKey, &'a State)> {
        self.wanted[row].iter().filter(move |(key, to)| {
            let mut later = (row + 1..self.rows.len()).rev().filter(|later| !refused.contains(later));
            later.find_map(|later| self.wanted[later].get(*key)).is_none_or(|last| last == *to)
        })
    }

    /// What the store is to hold in the end.
    fn fold(&self, mut store: BTreeMap<TupleKey, Stored>, refused: &BTreeSet<usize>) -> BTreeMap<TupleKey, Stored> {
        for (_, wanted) in self.wanted.iter().enumerate().filter(|(at, _)| !refused.contains(at)) {
            for (key, to) in wanted {
                match to {
                    State::Absent => drop(store.remove(key)),
                    State::Present(condition) => {
                        let stored = Stored { condition: condition.clone(), empty_context: false };
                        store.insert(key.clone(), stored);
                    }
                }
            }
        }
        store
    }
}

fn wanted(intent: &Intent) -> Wanted {
    let deletes = intent.deletes().iter().map(|key| (key.clone(), State::Absent));
    let writes = intent.writes().iter().map(|tuple| (tuple.key().clone(), State::Present(tuple.condition().cloned())));
    deletes.chain(writes).collect()
}

fn check(case: Case) -> Result<(), TestCaseError> {
    let before = case.server.store.clone();
    let leases = case.server.weather.len() + 2;
    let mut run = Run::new(case);
    let mut undecided: BTreeSet<usize> = (0..run.rows.len()).collect();
    let (mut delivered, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..leases {
        let Some(first) = undecided.first() else { break };
        // A row that comes back is not alone: later rows that overrule it have their say.
        let leased: BTreeSet<usize> = undecided.union(&delivered.range(first..).copied().collect()).copied().collect();
        let faults = run.faults;
        let outcomes = run.deliver(&leased)?;
        for at in leased {
            match outcomes.get(&at) {
                Some(Outcome::Delivered { .. } | Outcome::Confirm { .. }) => {
                    undecided.remove(&at);
                    delivered.insert(at);
                }
                Some(Outcome::Suspect) => prop_assert!(run.is_invalid(at), "row {} is valid", at),
                Some(Outcome::Refused { reason }) => {
                    prop_assert!(run.is_invalid(at), "row {} is valid and was refused: {}", at, reason);
                    prop_assert!(undecided.remove(&at), "row {} was delivered before", at);
                    refused.insert(at);
                }
                Some(Outcome::Waiting { attempts, .. }) => {
                    prop_assert_eq!(*attempts, 1);
                    prop_assert!(run.faults > faults, "row {} waits for no reason", at);
                }
                Some(Outcome::Again { .. }) | None => {
                    prop_assert!(run.faults > faults, "row {} was given back for no reason", at);
                }
            }
        }
        for (at, key, to) in delivered.iter().flat_map(|at| run.wanted[*at].iter().map(move |(key, to)| (*at, key, to)))
        {
            let later = |later: &usize| *later > at && run.wanted[*later].contains_key(key);
            let overruled = delivered.iter().any(later);
            // A later row that replaces the tuple may have deleted it by now, and not written it yet.
            let begun = (0..run.rows.len()).filter(later).any(|later| run.may_begin_with(later, key));
            let holds = run.server.read(key) == *to;
            prop_assert!(overruled || begun || holds, "row {} counts as delivered, but not its {}", at, key);
        }
    }
    prop_assert!(undecided.is_empty(), "never decided: {:?}", undecided);
    for at in &delivered {
        let invalid = run.stands(*at, &refused).find(|(key, to)| !run.server.takes(key, to));
        prop_assert_eq!(invalid, None, "row {} was delivered", at);
    }

    // What a refused row had to do in parts, or had to delete before it could write it, may have been done.
    let begun =
        |key: &TupleKey| refused.iter().any(|at| run.wanted[*at].contains_key(key) && run.may_begin_with(*at, key));
    let expected = run.fold(before, &refused);
    for key in expected.keys().chain(run.server.store.keys()).filter(|key| !begun(key)) {
        let expected = expected.get(key).map(|stored| &stored.condition);
        let found = run.server.store.get(key).map(|stored| &stored.condition);
        prop_assert_eq!(found, expected, "{}", key);
    }
    Ok(())
}

fn key() -> impl Strategy<Value = TupleKey> {
    let user = prop_oneof![
        20 => select(vec!["user:a", "user:b", "user:o'neill,@é", "group:g#member"]),
        1 => Just("malformed"),
    ];
    let object = prop_oneof![
        20 => select(vec!["document:1", "document:2", "document:3", "document:4", "document:5"]),
        1 => Just("planet:1"),
    ];
    (user, object).prop_map(|(user, object)| TupleKey::new(user, "viewer", object).expect("valid"))
}

fn condition() -> impl Strategy<Value = Option<Condition>> {
    let context = prop_oneof![
        2 => Just(Map::new()),
        2 => (1..3u8).prop_map(|floor| Map::from_iter([("floor".to_owned(), json!(floor))])),
        1 => (10..900usize).prop_map(|size| Map::from_iter([("pad".to_owned(), json!("x".repeat(size)))])),
    ];
    let condition = (prop_oneof![12 => Just("in_office"), 1 => Just("unknown")], context);
    let condition =
        condition.prop_map(|(name, context)| Condition::new(name).unwrap().with_context(context).expect("no U+0000"));
    prop_oneof![3 => Just(None), 2 => condition.prop_map(Some)]
}

/// A key, a condition for it, and whether it is written and whether it is deleted.
fn part() -> impl Strategy<Value = (TupleKey, Option<Condition>, (bool, bool))> {
    (key(), condition(), prop_oneof![6 => Just((true, false)), 3 => Just((false, true)), 1 => Just((true, true))])
}

fn intent() -> impl Strategy<Value = Intent> {
    let parts = prop_oneof![6 => vec(part(), 1..4), 1 => vec(part(), 4..9)];
    parts.prop_filter_map("nothing in it", |parts| {
        let (mut writes, mut deletes, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (key, condition, (written, deleted)) in parts {
            if !seen.insert(key.clone()) {
                continue;
            }
            if deleted {
                deletes.push(key.clone());
            }
            if written && let Ok(tuple) = Tuple::try_from(key) {
                writes.push(match condition {
                    Some(condition) => tuple.with_condition(condition),
                    None => tuple,
                });
            }
        }
        Intent::new(writes, deletes).ok()
    })
}

fn weather() -> impl Strategy<Value = VecDeque<Weather>> {
    let one = prop_oneof![
        6 => Just(Weather::Fine),
        2 => Just(Weather::Race),
        2 => Just(Weather::InternalError),
        1 => Just(Weather::Unforeseen),
        2 => any::<bool>().prop_map(Weather::Deadline),
        1 => any::<bool>().prop_map(Weather::NoAnswer),
        1 => Just(Weather::Overloaded),
        1 => Just(Weather::NoSuchStore),
    ];
    let spell = (one, prop_oneof![3 => Just(1), 1 => Just(3), 1 => Just(8)]);
    vec(spell, 0..8)
        .prop_map(|spells| spells.into_iter().flat_map(|(one, times)| std::iter::repeat_n(one, times)).collect())
}

fn server() -> impl Strategy<Value = Server> {
    let stored = (condition(), any::<bool>()).prop_map(|(condition, empty)| {
        let empty_context = empty && condition.as_ref().is_some_and(|condition| condition.context().is_empty());
        Stored { condition, empty_context }
    });
    let max_keys = prop_oneof![1..6usize, Just(100)];
    let max_bytes = prop_oneof![1 => 200..3_000usize, 1 => Just(616_448)];
    (any::<[bool; 3]>(), max_keys, max_bytes, vec((key(), stored), 0..8), weather()).prop_map(
        |([ignores, names, minds_empty_contexts], max_keys, max_bytes, store, weather)| {
            let mut server =
                Server { ignores, names, minds_empty_contexts, max_keys, max_bytes, weather, ..Server::default() };
            let valid =
                |(key, stored): &(TupleKey, Stored)| server.in_model(key, &State::Present(stored.condition.clone()));
            server.store = store.into_iter().filter(valid).collect();
            server
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let limits = (prop_oneof![1..8usize, Just(100)], prop_oneof![1 => 200..3_000usize, 3 => Just(615_424)]);
    let rows = prop_oneof![4 => vec(intent(), 1..6), 1 => vec(intent(), 6..24)];
    (rows, server(), limits, vec(0..5u8, 0..40)).prop_map(|(rows, server, (keys, bytes), choices)| Case {
        rows,
        server,
        limits: Limits { keys, bytes, row_bytes: bytes },
        choices,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn every_valid_row_is_delivered_and_every_invalid_one_refused_whatever_the_server_does(case in case()) {
        check(case)?;
    }
}
