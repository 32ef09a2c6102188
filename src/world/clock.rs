//! How far the ranks' clocks are apart: round trips between rank 0 and every other, of which the fastest tells most.
//!
//! Each process counts from the moment at which it joined, so that clocks differ even on one host. Nothing here runs in a
//! step.

use std::time::Instant;

use mpi::point_to_point::{Destination, Source};
use mpi::traits::Communicator;

use super::World;

/// Keeps these messages apart from a [`super::roll::Roll`]'s.
const CLOCK_TAG: i32 = 0x10c6;

/// Round trips with each rank. On two busy cores most take as long as a time slice, some some 10 us.
const NUM_ROUND_TRIPS: usize = 32;

/// A rank's clock beside rank 0's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClockReading {
    /// When it was read, on rank 0's clock.
    pub at_ns: u64,
    /// How far the rank's clock is ahead of rank 0's.
    pub ahead_ns: i64,
    /// The most by which `ahead_ns` can be wrong: half of the round trip.
    pub uncertainty_ns: u64,
}

/// A question of rank 0 and another rank's answer, each by its own clock.
#[derive(Debug, Clone, Copy)]
struct RoundTrip {
    asked_ns: u64,
    answered_ns: u64,
    heard_ns: u64,
}

impl RoundTrip {
    /// The answer was given somewhere between question and hearing: the middle is taken.
    fn reading(self) -> ClockReading {
        let Self { asked_ns, answered_ns, heard_ns } = self;
        let took_ns = heard_ns.saturating_sub(asked_ns);
        let at_ns = asked_ns + took_ns / 2;
        ClockReading { at_ns, ahead_ns: signed(answered_ns) - signed(at_ns), uncertainty_ns: took_ns.div_ceil(2) }
    }
}

/// The reading that can be wrong by the least.
fn best(round_trips: &[RoundTrip]) -> Option<ClockReading> {
    round_trips.iter().map(|trip| trip.reading()).min_by_key(|reading| reading.uncertainty_ns)
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

impl World {
    /// A moment on this rank's clock, in nanoseconds since it joined.
    #[must_use]
    pub fn clock_ns(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.joined_at).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Compares every rank's clock with rank 0's, which alone gets the readings, its own of zero included; collective.
    /// One rank after another, so that no two disturb each other.
    pub fn read_clocks(&self) -> Option<Vec<ClockReading>> {
        self.barrier();
        if !self.is_root() {
            (0..NUM_ROUND_TRIPS).for_each(|_| self.answer());
            return None;
        }
        let mine = ClockReading { at_ns: self.clock_ns(Instant::now()), ..ClockReading::default() };
        let of_peer = |peer: i32| {
            let round_trips: Vec<RoundTrip> = (0..NUM_ROUND_TRIPS).map(|_| self.ask_clock(peer)).collect();
            best(&round_trips).unwrap_or_default()
        };
        Some(std::iter::once(mine).chain((1..self.comm.size()).map(of_peer)).collect())
    }

    fn ask_clock(&self, peer: i32) -> RoundTrip {
        let asked_ns = self.clock_ns(Instant::now());
        self.tell_clock(peer, asked_ns);
        let answered_ns = self.hear_clock(peer);
        RoundTrip { asked_ns, answered_ns, heard_ns: self.clock_ns(Instant::now()) }
    }

    fn answer(&self) {
        self.hear_clock(0);
        self.tell_clock(0, self.clock_ns(Instant::now()));
    }

    fn tell_clock(&self, peer: i32, ns: u64) {
        mpi::request::scope(|scope| {
            let request = self.comm.process_at_rank(peer).immediate_send_with_tag(scope, &ns, CLOCK_TAG);
            self.wait("clock's round trip", request);
        });
    }

    fn hear_clock(&self, peer: i32) -> u64 {
        let mut ns = 0u64;
        mpi::request::scope(|scope| {
            let process = self.comm.process_at_rank(peer);
            let request = process.immediate_receive_into_with_tag(scope, &mut ns, CLOCK_TAG);
            self.wait("clock's round trip", request);
        });
        ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank 5000 ns ahead, over a way that takes `there` and `back`.
    fn trip(asked_ns: u64, there: u64, back: u64) -> RoundTrip {
        RoundTrip { asked_ns, answered_ns: asked_ns + there + 5000, heard_ns: asked_ns + there + back }
    }

    #[test]
    fn the_fastest_round_trip_counts_and_its_half_bounds_the_error() {
        let trips = [trip(100, 900, 10), trip(2000, 30, 10), trip(3000, 400, 400)];
        let reading = best(&trips).expect("round trips");
        assert_eq!(reading, ClockReading { at_ns: 2020, ahead_ns: 5010, uncertainty_ns: 20 });
        for trip in trips {
            let ClockReading { ahead_ns, uncertainty_ns, .. } = trip.reading();
            assert!((ahead_ns - 5000).unsigned_abs() <= uncertainty_ns, "{trip:?}");
        }
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn a_clock_behind_is_negative() {
        let reading = RoundTrip { asked_ns: 9000, answered_ns: 4000, heard_ns: 9002 }.reading();
        assert_eq!(reading, ClockReading { at_ns: 9001, ahead_ns: -5001, uncertainty_ns: 1 });
    }
}
