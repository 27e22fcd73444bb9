//! The test bed: a private Postgres cluster and real OpenFGA servers, shared by the tests of one process and started by
//! the first test that asks. [`Database::new`] gives a test its own database and [`Store::new`] its own store, so tests
//! run side by side; a test that stops or kills a server starts one of its own with `start_private`. Each server lives
//! in a temporary folder under a [keeper] that ends it and removes the folder once the test process is gone, however it
//! went. The binaries are found as `scripts/lib.sh` finds them, on the machine or in the cache that
//! `scripts/fetch-parts` fills.
// A kit: not every part of it is in use at all times.
#![allow(dead_code, unused_imports)]

mod keeper;
mod openfga;
mod parts;
mod pgbouncer;
mod postgres;

use std::{future::Future, panic::Location, time::Duration};

use tokio::time::{Instant, sleep, timeout};

pub use openfga::{Flavor, MODEL, Server, Store};
pub use parts::postgres_bin;
pub use pgbouncer::Pooler;
pub use postgres::{Cluster, Database, SECRET_PASSWORD, SECRET_USER};

/// So long that only a hang or a lost wake-up reaches it, even with every test at once on a slow machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Polls `condition` every 20 ms until it holds; panics, naming the caller, when it does not within [`DEADLINE`].
#[track_caller]
pub fn eventually(mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let caller = Location::caller();
    async move {
        let deadline = Instant::now() + DEADLINE;
        while !condition().await {
            assert!(Instant::now() < deadline, "the condition at {caller} did not hold within {DEADLINE:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Awaits `future`; panics, naming the caller, when it is not ready within [`DEADLINE`].
#[track_caller]
pub fn within_deadline<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match timeout(DEADLINE, future).await {
            Ok(output) => output,
            Err(_) => panic!("the future at {caller} was not ready within {DEADLINE:?}"),
        }
    }
}
