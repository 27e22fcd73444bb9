//! How many requests may be in flight: found at run time from what requests take, after TCP Vegas (Brakmo and Peterson,
//! 1995).
//!
//! A server that is not busy answers in its shortest time; beyond what it can do at once, requests queue in it, and only
//! take longer. How long they take, against the shortest time, tells how many of those in flight are queueing: a few of
//! them keep the server busy, more do no good to anybody, least of all to another engine that uses the same server.

use std::time::{Duration, Instant};

/// Requests that may queue in the server: fewer, and it may be idle at times; more is of no use.
const FEWEST_QUEUED: f64 = 3.0;
const MOST_QUEUED: f64 = 6.0;

const FIRST: f64 = 4.0;
const FEWEST: f64 = 2.0;
const MOST: f64 = 64.0;

/// Requests take this much longer at times for reasons that have nothing to do with the server's load.
const NOISE: Duration = Duration::from_millis(2);

/// How often the shortest time is found anew, with one request in flight at a time.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const PROBES: u32 = 3;

/// Requests are compared with those of about as many keys: classes are powers of two.
const CLASSES: usize = 16;

/// How a request was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answered {
    Done,
    /// The server is overloaded, or had not the time: a sign to send less.
    Overloaded,
    /// Anything else, which says nothing.
    Otherwise,
}

/// Finds the number of requests that may be in flight.
#[derive(Debug)]
pub(crate) struct Flow {
    limit: f64,
    /// The shortest time against the time that requests take: what is usual of late.
    ratio: f64,
    /// The shortest time of each class since the last probe, and between the last two.
    shortest: [Shortest; CLASSES],
    probe_at: Instant,
    probes_left: u32,
    /// Requests sent before this were sent under a limit that proved too high: they are punished once.
    lowered: Instant,
}

#[derive(Debug, Clone, Copy, Default)]
struct Shortest {
    now: Option<Duration>,
    before: Option<Duration>,
}

impl Flow {
    pub(crate) fn new(now: Instant) -> Self {
        let shortest = [Shortest::default(); CLASSES];
        Self { limit: FIRST, ratio: 1.0, shortest, probe_at: now + PROBE_INTERVAL, probes_left: 1, lowered: now }
    }

    /// How many requests may be in flight now: 1 or more.
    pub(crate) fn limit(&self) -> usize {
        if self.probes_left > 0 { 1 } else { self.limit as usize }
    }

    /// Takes note of an answer to a request of so many keys. `full` says whether as many were in flight as may be:
    /// otherwise nothing is to be learned about the limit.
    pub(crate) fn answered(&mut self, how: Answered, keys: usize, sent: Instant, now: Instant, full: bool) {
        match how {
            Answered::Overloaded if sent > self.lowered => {
                self.limit = (self.limit / 2.0).max(FEWEST);
                self.lowered = now;
            }
            Answered::Done => {
                let took = now - sent;
                let shortest = &mut self.shortest[(keys.max(1).ilog2() as usize).min(CLASSES - 1)];
                shortest.now = Some(shortest.now.map_or(took, |it| it.min(took)));
                let least = shortest.before.map_or(took, |it| it.min(took)).min(shortest.now.unwrap_or(took));
                if self.probes_left > 0 {
                    self.probes_left -= 1;
                } else if full {
                    self.adapt(((least + NOISE).as_secs_f64() / took.as_secs_f64().max(f64::EPSILON)).min(1.0));
                    self.probe_if_due(now);
                }
            }
            Answered::Overloaded | Answered::Otherwise => self.probes_left = self.probes_left.saturating_sub(1),
        }
    }

    /// By one for each round of requests. `ratio` is the shortest time against the time that one took.
    fn adapt(&mut self, ratio: f64) {
        self.ratio += (ratio - self.ratio) / self.limit.max(4.0);
        let queued = self.limit * (1.0 - self.ratio);
        if queued < FEWEST_QUEUED {
            self.limit = (self.limit + 1.0 / self.limit).min(MOST);
        } else if queued > MOST_QUEUED {
            self.limit = (self.limit - 1.0 / self.limit).max(FEWEST);
        }
    }

    /// Where requests always queue, the shortest time of a while is too long, and the limit would grow without end.
    fn probe_if_due(&mut self, now: Instant) {
        if now < self.probe_at {
            return;
        }
        for shortest in &mut self.shortest {
            *shortest = Shortest { now: None, before: shortest.now };
        }
        self.probe_at = now + PROBE_INTERVAL;
        self.probes_left = PROBES + self.limit as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A server that works on so many requests at once, each for so long, with a network of so much delay before it; and
    /// a client that has always more to send, for so many requests. Gives the limit in the end.
    fn limit_against(workers: usize, work: Duration, delay: Duration, requests: usize) -> usize {
        let mut now = Instant::now();
        let mut flow = Flow::new(now);
        let mut free: VecDeque<Instant> = std::iter::repeat_n(now, workers).collect();
        let mut in_flight: VecDeque<(Instant, Instant)> = VecDeque::new();
        for _ in 0..requests {
            while in_flight.len() < flow.limit() {
                let begins = free.pop_front().expect("as many as workers").max(now + delay / 2);
                free.push_back(begins + work);
                in_flight.push_back((now, begins + work + delay / 2));
            }
            let full = in_flight.len() >= flow.limit();
            let (sent, ends) = in_flight.pop_front().expect("the limit is 1 or more");
            now = ends;
            flow.answered(Answered::Done, 100, sent, now, full);
        }
        flow.limit()
    }

    #[test]
    fn as_many_are_in_flight_as_keep_the_server_busy_and_few_more() {
        let ms = Duration::from_millis;
        for workers in [1, 2, 4, 16] {
            let limit = limit_against(workers, ms(20), ms(0), 20_000);
            assert!((workers + 2..=workers + 8).contains(&limit), "{limit} for {workers}");
        }
        // Far away, most of those in flight are on the wire.
        let limit = limit_against(2, ms(20), ms(100), 20_000);
        assert!((13..=22).contains(&limit), "{limit}");
    }

    #[test]
    fn an_overloaded_server_gets_less_at_once_and_one_overload_counts_once() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut flow = Flow::new(began);
        (flow.limit, flow.probes_left) = (16.0, 0);
        (0..5).for_each(|_| flow.answered(Answered::Overloaded, 100, at(1), at(20), true));
        assert_eq!(flow.limit(), 8);
        flow.answered(Answered::Overloaded, 100, at(21), at(40), true);
        assert_eq!(flow.limit(), 4);
        (0..20).for_each(|n| flow.answered(Answered::Overloaded, 1, at(50 + n), at(50 + n), true));
        assert_eq!(flow.limit(), FEWEST as usize);
    }

    #[test]
    fn nothing_is_learned_where_little_is_sent() {
        let began = Instant::now();
        let mut flow = Flow::new(began);
        flow.probes_left = 0;
        for n in 1..100 {
            flow.answered(Answered::Done, 1, began, began + Duration::from_millis(n), false);
            flow.answered(Answered::Otherwise, 1, began, began + Duration::from_millis(n), true);
        }
        assert_eq!(flow.limit(), FIRST as usize);
    }
}
