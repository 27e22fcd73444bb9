//! Whether the target takes requests: open, closed while it does not answer, or half open to find out.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::delivery::backoff::{self, Backoff};
use crate::delivery::verdict::{Fault, FaultKind};

/// A target that comes and goes is not worth a line each time, nor a quick probe; unless it stays away.
const AGAIN: Duration = Duration::from_secs(30);
const WORTH_A_LINE: Duration = Duration::from_secs(5);

/// Shared by all actors: whoever sees a fault of the target closes it for all, and whoever sees it answer opens it.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// Why it is closed, for whoever waits.
    fault: watch::Sender<Option<Pause>>,
}

/// That the target can't be used, since when and why.
#[derive(Debug, Clone)]
pub(crate) struct Pause {
    pub(crate) fault: Fault,
    pub(crate) since: Instant,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    pause: Option<Pause>,
    kind: Option<FaultKind>,
    /// When the last pause ended; and whether this one is so soon after it that they count as one.
    ended: Option<Instant>,
    again: bool,
    /// Whether this pause was logged.
    said: bool,
    /// Probes of this pause, and when the next one may be sent.
    probes: u32,
    next_probe: Instant,
    backoff: Backoff,
}

/// What may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Anything.
    Open,
    /// One small lease at a time, until one is answered: the probe got through, a write may still not.
    HalfOpen,
    /// Nothing but a probe.
    Closed,
}

impl Gate {
    /// Closed, with a probe to be sent at once: nothing is known of the target.
    pub(crate) fn new() -> Self {
        let state = State {
            mode: Mode::Closed,
            pause: None,
            kind: None,
            ended: None,
            again: false,
            said: false,
            probes: 0,
            next_probe: Instant::now(),
            backoff: backoff::between_probes(),
        };
        Self { state: Mutex::new(state), fault: watch::Sender::new(None) }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.lock().mode
    }

    /// How long to wait before the next probe.
    pub(crate) fn until_probe(&self) -> Duration {
        self.lock().next_probe.saturating_duration_since(Instant::now())
    }

    /// Closes it, or keeps it closed for another, longer while.
    pub(crate) fn close(&self, fault: Fault) {
        let mut state = self.lock();
        if state.pause.is_none() {
            state.again = state.ended.is_some_and(|ended| ended.elapsed() < AGAIN);
            state.said = false;
            state.probes = 0;
        }
        let lasts = state.pause.as_ref().is_some_and(|pause| pause.since.elapsed() > WORTH_A_LINE);
        if !state.said && (!state.again || lasts) {
            state.said = true;
            tracing::warn!(reason = %fault.reason, kind = ?fault.kind, "OpenFGA can't be used: pausing and probing");
        }
        let kind = Some(fault.kind);
        if state.kind != kind || state.pause.is_none() && !state.again {
            state.kind = kind;
            state.backoff = match fault.kind {
                FaultKind::Unreachable | FaultKind::Overloaded => backoff::between_probes(),
                FaultKind::Unauthenticated | FaultKind::Misconfigured => backoff::between_slow_probes(),
            };
        } else if state.mode == Mode::Closed && state.next_probe > Instant::now() {
            // One of several requests that failed together: the next probe is set, if not too early for this one.
            if let Some(asked) = fault.retry_after {
                state.next_probe = state.next_probe.max(Instant::now() + asked);
            }
            return;
        }
        let wait = fault.retry_after.unwrap_or_default().max(state.backoff.next());
        state.next_probe = Instant::now() + wait;
        state.mode = Mode::Closed;
        let since = state.pause.as_ref().map_or_else(Instant::now, |pause| pause.since);
        state.pause = Some(Pause { fault, since });
        self.fault.send_replace(state.pause.clone());
    }

    /// A probe is about to be sent.
    pub(crate) fn probing(&self) {
        self.lock().probes += 1;
    }

    /// A probe got through: a write may be tried.
    pub(crate) fn probed(&self) {
        let mut state = self.lock();
        state.mode = if state.pause.is_some() { Mode::HalfOpen } else { Mode::Open };
    }

    /// A write was answered, whatever it said of its rows; or there is nothing to write.
    pub(crate) fn open(&self) {
        let mut state = self.lock();
        if state.mode != Mode::HalfOpen {
            return;
        }
        state.mode = Mode::Open;
        if let Some(pause) = state.pause.take() {
            let seconds = pause.since.elapsed().as_secs_f64();
            if state.said {
                tracing::info!(seconds, probes = state.probes, "OpenFGA can be used again: going on");
            }
            state.ended = Some(Instant::now());
        }
        self.fault.send_replace(None);
    }

    /// The fault that it is closed for, if any, and its changes.
    pub(crate) fn watch(&self) -> watch::Receiver<Option<Pause>> {
        self.fault.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
