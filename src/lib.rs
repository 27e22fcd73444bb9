mod delivery;
mod engine;
mod openfga;
mod outbox;
mod tuple;
pub use delivery::verdict::{Fault, FaultKind};
pub use engine::*;
pub use outbox::*;
pub use tuple::{Condition, Intent, InvalidIntent, Tuple, TupleKey};
