//! What to do about the answer to a request: whether its end is known, or it is worth another try at once.

use crate::delivery::plan::{Request, State};
use crate::delivery::verdict::{Excess, Fault, FaultKind, Kind, Verdict};

/// How often a request is sent in all, within a lease, that meets races or faults.
const TRIES_AFTER_RACE: u32 = 8;
const TRIES_AFTER_FAULT: u32 = 3;

/// How a request ended.
#[derive(Debug)]
pub(crate) enum End {
    Accepted,
    /// Nothing was written; what the server holds for each step, where that was read.
    ReadBack(Vec<Option<State>>),
    Refused(String),
    TooLarge(Excess),
    Failed(String),
    GivenUp,
}

/// What to do next about a request.
#[derive(Debug)]
pub(crate) enum Next {
    TakeBack(End),
    /// Read back what the server holds for the steps in question.
    Read {
        reason: String,
    },
    AgainAfterRace,
    AgainAfterFault,
    /// It keeps failing: find out whose fault it is.
    Blame {
        reason: String,
    },
    /// Leave the target alone, and give the request up.
    Pause(Fault),
}

impl Request {
    /// What to do about an answer.
    pub(crate) fn answered(&mut self, verdict: Verdict) -> Next {
        self.tries += 1;
        self.lost |= may_be_on_its_way(&verdict);
        match verdict {
            Verdict::Done => Next::TakeBack(End::Accepted),
            Verdict::Row { reason } => Next::TakeBack(End::Refused(reason)),
            Verdict::Size(excess) => Next::TakeBack(End::TooLarge(excess)),
            Verdict::Target(fault) => Next::Pause(fault),
            Verdict::Tuple { reason } => Next::Read { reason },
            Verdict::Moment { reason, kind: Kind::Race } if self.tries >= TRIES_AFTER_RACE => {
                Next::TakeBack(End::Failed(reason))
            }
            Verdict::Moment { kind: Kind::Race, .. } => Next::AgainAfterRace,
            // Whose fault it is shows sooner in the halves than in another try of the whole.
            Verdict::Moment { reason, .. } if self.tries >= TRIES_AFTER_FAULT || self.rows() > 1 => {
                Next::Blame { reason }
            }
            Verdict::Moment { .. } => Next::AgainAfterFault,
        }
    }

    /// What to do about what was read back for this reason.
    pub(crate) fn was_read(&self, stored: Vec<Option<State>>, reason: String) -> Next {
        if self.is_changed_by(&stored) {
            Next::TakeBack(End::ReadBack(stored))
        } else if self.tries >= TRIES_AFTER_RACE {
            // Somebody else was faster, twice.
            Next::TakeBack(End::Failed(reason))
        } else {
            Next::AgainAfterRace
        }
    }
}

/// Whether the server may still carry a request out after this answer, or the lack of one.
fn may_be_on_its_way(verdict: &Verdict) -> bool {
    match verdict {
        Verdict::Target(fault) => fault.kind == FaultKind::Unreachable,
        Verdict::Moment { kind, .. } => *kind != Kind::Race,
        Verdict::Done | Verdict::Tuple { .. } | Verdict::Row { .. } | Verdict::Size(_) => false,
    }
}
