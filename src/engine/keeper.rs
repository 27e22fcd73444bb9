//! Keeps actors alive. actix's own `Supervisor` restarts an actor that stops, but not one that panics.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use actix::{Actor, Addr, Arbiter, Context, Handler, Message};
use tokio::sync::oneshot;

use super::Shared;
use crate::delivery::backoff;

/// Resolves its receiver when the actor that owns it is dropped, for whatever reason.
pub(crate) type Alive = oneshot::Sender<()>;

/// The current address of an actor that is started anew when it dies.
pub(crate) struct Kept<A: Actor>(Arc<RwLock<Option<Addr<A>>>>);

impl<A: Actor> Clone for Kept<A> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<A: Actor<Context = Context<A>>> Kept<A> {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    /// Whether the actor is there now.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner()).as_ref().is_some_and(Addr::connected)
    }

    /// Sends a message to the actor that is there now. Where none is, the message is dropped, and what it owns with it:
    /// a lease gives its rows back.
    pub(crate) fn send<M>(&self, message: M)
    where
        M: Message<Result = ()> + Send + 'static,
        A: Handler<M>,
    {
        if let Some(addr) = &*self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            addr.do_send(message);
        }
    }

    fn set(&self, addr: Option<Addr<A>>) {
        *self.0.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = addr;
    }

    /// Starts the actor on an arbiter of its own, and again whenever it dies, until the engine stops.
    pub(crate) async fn keep(
        self,
        name: &'static str,
        shared: Arc<Shared>,
        make: impl Fn(Alive) -> A + Clone + Send + 'static,
    ) {
        let mut arbiter = Arbiter::new();
        let mut backoff = backoff::between_restarts();
        let mut restarted = false;
        loop {
            let began = Instant::now();
            let (alive, died) = oneshot::channel();
            let make = make.clone();
            self.set(Some(A::start_in_arbiter(&arbiter.handle(), move |_| make(alive))));
            if restarted {
                shared.counters.restarts.fetch_add(1, Relaxed);
            }
            tokio::select! {
                _ = died => {}
                () = shared.ended.cancelled() => break,
            }
            if shared.stopping.is_cancelled() {
                break;
            }
            restarted = true;
            if began.elapsed() > Duration::from_secs(10) {
                backoff.reset();
            }
            let wait = backoff.next();
            tracing::error!(actor = name, ?wait, "an actor died: starting it anew");
            tokio::time::sleep(wait).await;
            if !arbiter.spawn_fn(|| {}) {
                arbiter = Arbiter::new();
            }
        }
        self.set(None);
        arbiter.stop();
    }
}
