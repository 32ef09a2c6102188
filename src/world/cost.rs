//! What agreement moves: a model in closed form, and what a rank counts. `docs/agreement-cost.md` puts times to it.

use std::ops::{Add, AddAssign, Sub};

/// Collectives that a rank took part in and the bytes that it brought to them and got from them, its own left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    /// Collectives: each is one wait for the other ranks.
    pub collectives: u64,
    /// Bytes that this rank brought for others to have.
    pub brought_bytes: u64,
    /// Bytes of other ranks that came here.
    pub received_bytes: u64,
}

/// Bytes of a rank's outcome in [`World::agree`](super::World::agree): exit code and digest of the message.
pub const OUTCOME_BYTES: u64 = 16;
/// Bytes of a rank's record in a comparison: its outcome and a digest of 32 bytes.
pub const RECORD_BYTES: u64 = OUTCOME_BYTES + 32;
/// Bytes that say how long something is.
const LENGTH_BYTES: u64 = 8;

impl Traffic {
    /// An all-gather in which each of `num_ranks` ranks brings `bytes`.
    #[must_use]
    pub const fn all_gather(num_ranks: u64, bytes: u64) -> Self {
        let brought_bytes = if num_ranks > 1 { bytes } else { 0 };
        Self { collectives: 1, brought_bytes, received_bytes: num_ranks.saturating_sub(1) * bytes }
    }

    /// A broadcast of `bytes`, seen from its root or from another rank.
    #[must_use]
    pub const fn broadcast(bytes: u64, is_root: bool) -> Self {
        match is_root {
            true => Self { collectives: 1, brought_bytes: bytes, received_bytes: 0 },
            false => Self { collectives: 1, brought_bytes: 0, received_bytes: bytes },
        }
    }

    /// A comparison of `num_ranks` ranks that are alike, or of which some have failed.
    #[must_use]
    pub const fn of_alike(num_ranks: u64) -> Self {
        Self::all_gather(num_ranks, RECORD_BYTES)
    }

    /// A comparison of `num_ranks` ranks that bring encodings of `lengths`, each distinct one once, and the refusal that
    /// follows; seen from the rank whose encoding is the `mine`-th of them, or from one that sends none.
    #[must_use]
    pub fn of_differing(num_ranks: u64, lengths: &[u64], mine: Option<usize>) -> Self {
        let broadcasts = lengths.iter().enumerate().map(|(idx, bytes)| Self::broadcast(*bytes, mine == Some(idx)));
        Self::of_alike(num_ranks)
            + Self::all_gather(num_ranks, LENGTH_BYTES)
            + broadcasts.fold(Self::default(), Add::add)
            + Self::all_gather(num_ranks, OUTCOME_BYTES)
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            collectives: self.collectives + other.collectives,
            brought_bytes: self.brought_bytes + other.brought_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Traffic {
    type Output = Self;

    /// What was moved since `earlier` was counted.
    fn sub(self, earlier: Self) -> Self {
        Self {
            collectives: self.collectives - earlier.collectives,
            brought_bytes: self.brought_bytes - earlier.brought_bytes,
            received_bytes: self.received_bytes - earlier.received_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A network: what a round takes, and what a rank takes in.
    struct Network {
        round_us: f64,
        gbyte_per_s: f64,
    }

    impl Network {
        /// `ceil(log2 ranks)` rounds a collective, and the bytes that come in.
        fn time_us(&self, num_ranks: u64, traffic: Traffic) -> f64 {
            let rounds = f64::from(num_ranks.next_power_of_two().trailing_zeros()) * traffic.collectives as f64;
            rounds * self.round_us + traffic.received_bytes as f64 / self.gbyte_per_s / 1e3
        }
    }

    const TCP: Network = Network { round_us: 50.0, gbyte_per_s: 1.0 };
    const FABRIC: Network = Network { round_us: 5.0, gbyte_per_s: 10.0 };

    fn grouped(number: u64) -> String {
        let digits = number.to_string();
        let runs: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|run| std::str::from_utf8(run).unwrap()).collect();
        runs.join(",")
    }

    /// The tables of `docs/agreement-cost.md` are the model's.
    #[test]
    fn the_documentation_shows_the_model() {
        let text = include_str!("../../docs/agreement-cost.md");
        const ENCODING_BYTES: u64 = 150_000;
        for num_ranks in [2, 4, 16, 64, 256, 1024] {
            let alike = Traffic::of_alike(num_ranks);
            let differing = Traffic::of_differing(num_ranks, &[ENCODING_BYTES; 2], None);
            for traffic in [alike, differing] {
                let row = format!(
                    "| {} | {} | {} | {:.2} ms | {:.2} ms |",
                    grouped(num_ranks),
                    traffic.collectives,
                    grouped(traffic.received_bytes),
                    FABRIC.time_us(num_ranks, traffic) / 1e3,
                    TCP.time_us(num_ranks, traffic) / 1e3
                );
                assert!(text.contains(&row), "docs/agreement-cost.md lacks\n{row}");
            }
        }
    }

    #[test]
    fn a_world_of_one_moves_nothing() {
        let Traffic { brought_bytes, received_bytes, collectives } = Traffic::of_alike(1);
        assert_eq!((collectives, brought_bytes, received_bytes), (1, 0, 0));
    }
}
