//! When to try again: exponential, with full jitter and a cap. The only place that knows the `backoff` crate.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// A series of growing random waits: the n-th is uniform between nothing and `first × 2ⁿ`, at most `cap`.
#[derive(Debug)]
pub(crate) struct Backoff(ExponentialBackoff);

impl Backoff {
    pub(crate) fn new(first: Duration, cap: Duration) -> Self {
        // The crate draws from interval ± randomization_factor × interval: a factor of 1 around the half of a step is
        // uniform over the whole step.
        Self(ExponentialBackoff {
            current_interval: first / 2,
            initial_interval: first / 2,
            randomization_factor: 1.0,
            multiplier: 2.0,
            max_interval: cap / 2,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        })
    }

    /// How long to wait before the next try.
    pub(crate) fn next(&mut self) -> Duration {
        self.0.next_backoff().unwrap_or(self.0.max_interval)
    }

    pub(crate) fn reset(&mut self) {
        self.0.reset();
    }
}

/// In place, within a lease: for a race with another writer, which is over in milliseconds.
pub(crate) fn after_race() -> Backoff {
    Backoff::new(Duration::from_millis(10), Duration::from_millis(500))
}

/// In place, within a lease: for a fault of the server that may pass.
pub(crate) fn after_fault() -> Backoff {
    Backoff::new(Duration::from_millis(100), Duration::from_secs(1))
}

/// Between probes of a target that does not answer.
pub(crate) fn between_probes() -> Backoff {
    Backoff::new(Duration::from_millis(100), Duration::from_millis(1_500))
}

/// Between probes of a target that answers that it is misconfigured: somebody has to mend that.
pub(crate) fn between_slow_probes() -> Backoff {
    Backoff::new(Duration::from_secs(1), Duration::from_secs(15))
}

/// Between the restarts of an actor that dies, and between tries of a database that does not answer.
pub(crate) fn between_restarts() -> Backoff {
    Backoff::new(Duration::from_millis(10), Duration::from_secs(1))
}

/// How long a row waits after its `failures`-th failed delivery in a row (1 or more): 1 s at first, 10 minutes at most.
pub(crate) fn of_row(failures: u32) -> Duration {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(600));
    // After ten steps the cap is reached.
    for _ in 1..failures.min(12) {
        backoff.next();
    }
    backoff.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_cap_and_spread_over_the_whole_step() {
        let longest = |n: u32| (0..2_000).map(|_| of_row(n)).max().unwrap().as_secs_f64();
        let shortest = |n: u32| (0..2_000).map(|_| of_row(n)).min().unwrap().as_secs_f64();
        assert!((0.9..=1.0).contains(&longest(1)), "{}", longest(1));
        assert!((3.6..=4.0).contains(&longest(3)), "{}", longest(3));
        assert!((540.0..=600.0).contains(&longest(4_000_000)), "{}", longest(4_000_000));
        assert!(shortest(12) < 60.0, "{}", shortest(12));
    }
}
