//! The Listener: hears the doorbell, and wakes the Claimer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, WrapFuture as _};

use super::keeper::Alive;
use super::{Crash, Shared};
use crate::delivery::backoff;
use crate::outbox::{self, DatabaseError};

pub(crate) struct Listener {
    shared: Arc<Shared>,
    _alive: Alive,
}

impl Listener {
    pub(crate) fn new(shared: Arc<Shared>, alive: Alive) -> Self {
        Self { shared, _alive: alive }
    }
}

impl Actor for Listener {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let listening = listen(self.shared.clone()).into_actor(self);
        ctx.spawn(actix::fut::ActorFutureExt::map(listening, |(), _, ctx: &mut Self::Context| ctx.stop()));
    }
}

impl Handler<Crash> for Listener {
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("crashed on demand");
    }
}

/// Until the engine stops. While nobody listens the Claimer does not nap: it looks at the table again and again.
async fn listen(shared: Arc<Shared>) {
    let mut backoff = backoff::between_restarts();
    loop {
        let mut heard = false;
        let failed = tokio::select! {
            heard = hear(&shared, &mut heard) => match heard {
                Err(error) => error,
                Ok(()) => return shared.stopping.cancelled().await,
            },
            () = shared.stopping.cancelled() => return,
        };
        if heard {
            backoff.reset();
        }
        // Whether Postgres can be used is for the Claimer to say.
        tracing::debug!(error = %failed, "the doorbell is not heard: trying again");
        tokio::select! {
            () = tokio::time::sleep(backoff.next()) => {}
            () = shared.stopping.cancelled() => return,
        }
    }
}

/// Ends well where there is nothing to be heard.
async fn hear(shared: &Shared, heard: &mut bool) -> Result<(), DatabaseError> {
    let Some(mut listener) = outbox::Listener::connect(&shared.pool).await? else { return Ok(()) };
    *heard = true;
    let _listening = Listening::new(&shared.listening);
    // It may have rung before.
    shared.wake.notify_one();
    loop {
        listener.ring().await?;
        tracing::trace!("the doorbell rings");
        shared.rings.fetch_add(1, Relaxed);
        shared.wake.notify_one();
    }
}

/// True for as long as this lives.
struct Listening<'a>(&'a AtomicBool);

impl<'a> Listening<'a> {
    fn new(flag: &'a AtomicBool) -> Self {
        flag.store(true, Relaxed);
        Self(flag)
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}
