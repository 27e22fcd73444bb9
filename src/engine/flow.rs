//! Hands out the permits to send, as many as the flow control finds right.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::delivery::flow::{Answered, Flow};

/// Shared by all deliverers.
#[derive(Debug)]
pub(crate) struct Permits {
    free: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    flow: Flow,
    /// Permits that there are, free or not.
    all: usize,
}

/// To have one request in flight. Free again when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    permits: Arc<Permits>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Permits {
    pub(crate) fn new() -> Arc<Self> {
        let flow = Flow::new(Instant::now());
        let all = flow.limit();
        Arc::new(Self { free: Arc::new(Semaphore::new(all)), state: Mutex::new(State { flow, all }) })
    }

    pub(crate) async fn acquire(self: Arc<Self>) -> Permit {
        let permit = self.free.clone().acquire_owned().await.expect("never closed");
        Permit { permits: self, permit: Some(permit) }
    }

    #[cfg(test)]
    fn limit(&self) -> usize {
        self.lock().flow.limit()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Permit {
    /// Takes note of the answer to a request of so many keys.
    pub(crate) fn answered(&self, how: Answered, keys: usize, sent: Instant) {
        let mut state = self.permits.lock();
        let full = self.permits.free.available_permits() == 0;
        state.flow.answered(how, keys, sent, Instant::now(), full);
        let limit = state.flow.limit();
        if state.all < limit {
            self.permits.free.add_permits(limit - state.all);
            state.all = limit;
        } else {
            // Those in flight go as they come back.
            state.all -= self.permits.free.forget_permits(state.all - limit);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.permits.lock();
        if let Some(permit) = self.permit.take()
            && state.all > state.flow.limit()
        {
            permit.forget();
            state.all -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[actix_rt::test]
    async fn there_are_as_many_permits_as_the_flow_control_says_however_they_come_back() {
        let permits = Permits::new();
        let mut out = Vec::new();
        for round in 0..2_000_u64 {
            while permits.free.available_permits() > 0 {
                out.push(permits.clone().acquire().await);
            }
            let how = if round % 50 == 49 { Answered::Overloaded } else { Answered::Done };
            let permit = out.remove(0);
            // Without any queue, so that the limit grows in between.
            permit.answered(how, 100, Instant::now() - Duration::from_millis(10));
            drop(permit);
            let (limit, all) = (permits.limit(), permits.lock().all);
            assert!(limit <= all && all == out.len() + permits.free.available_permits());
        }
        let grown = permits.limit();
        assert!(grown > 1, "{grown}");
        drop(out);
        assert_eq!(permits.free.available_permits(), grown);
    }
}
