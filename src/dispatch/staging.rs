//! How runs of bytes go through buffers of a fixed size, in rounds, where a carrier has to stage them. Pure.

use std::ops::Range;

/// Bytes of the buffer of one direction, at most: a GPU's memory is for weights, and rounds of this size cost a few percent.
const MAX_BYTES: usize = 64 << 20;

/// Pieces begin at multiples of this, so that GPUs copy whole words of theirs.
const ALIGN: usize = 16;

/// The buffers of one direction: a piece for every other rank. Equal on all ranks, or rounds would not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staging {
    num_ranks: usize,
    piece_bytes: usize,
}

/// A piece of a run, and its place in the buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The other rank.
    pub peer: usize,
    /// Where it lies among the bytes of all runs.
    pub bytes: Range<usize>,
    /// Where it lies in the buffer.
    pub staged: Range<usize>,
}

impl Staging {
    /// Buffers for runs of up to `max_run_bytes` between any two of `num_ranks` ranks, which go in several rounds where
    /// they would take too much.
    #[must_use]
    pub fn new(num_ranks: usize, max_run_bytes: usize) -> Self {
        let most = MAX_BYTES / num_ranks.saturating_sub(1).max(1);
        let piece_bytes = max_run_bytes.next_multiple_of(ALIGN).min(most / ALIGN * ALIGN).max(ALIGN);
        Self { num_ranks, piece_bytes }
    }

    /// The most that goes to one rank in one round.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// The buffer of one direction.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.num_ranks.saturating_sub(1) * self.piece_bytes
    }

    /// Rounds in which `rank` sends or receives anything. Others may need more: two ranks meet in the rounds of their own
    /// runs, whose lengths both know.
    #[must_use]
    pub fn num_rounds(&self, rank: usize, counts: [&[usize]; 2]) -> usize {
        let longest = |counts: &[usize]| {
            let others = counts.iter().enumerate().filter(|(peer, _)| *peer != rank);
            others.map(|(_, count)| *count).max().unwrap_or(0)
        };
        counts.map(longest).into_iter().max().unwrap_or(0).div_ceil(self.piece_bytes)
    }

    /// The pieces that `rank` sends in a round, or those that it receives, by the lengths of its runs.
    #[must_use]
    pub fn pieces(&self, rank: usize, counts: &[usize], round: usize) -> Vec<Piece> {
        let (mut run_start, mut staged) = (0, 0);
        let mut pieces = Vec::new();
        for (peer, &count) in counts.iter().enumerate() {
            let start = (round * self.piece_bytes).min(count);
            let len = (count - start).min(self.piece_bytes);
            if peer != rank && len > 0 {
                let at = run_start + start;
                pieces.push(Piece { peer, bytes: at..at + len, staged: staged..staged + len });
                staged += len.next_multiple_of(ALIGN);
            }
            run_start += count;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buffers_hold_what_was_planned_or_the_limit() {
        assert_eq!(Staging::new(2, 1000), Staging { num_ranks: 2, piece_bytes: 1008 });
        assert_eq!(Staging::new(2, 1000).buffer_bytes(), 1008);
        assert_eq!(Staging::new(1, 1000).buffer_bytes(), 0, "nobody to send to");
        for num_ranks in [2, 3, 16, 1000] {
            let staging = Staging::new(num_ranks, usize::MAX / 2);
            assert!(staging.buffer_bytes() <= MAX_BYTES && staging.piece_bytes().is_multiple_of(ALIGN), "{staging:?}");
        }
    }

    /// All pieces that go from one rank to another, round by round, as the sender sees them or as the receiver does.
    fn lengths(staging: Staging, (rank, peer): (usize, usize), counts: &[usize], num_rounds: usize) -> Vec<usize> {
        let of_round = |round| staging.pieces(rank, counts, round).into_iter().filter(move |piece| piece.peer == peer);
        (0..num_rounds).flat_map(of_round).map(|piece| piece.bytes.len()).collect()
    }

    proptest! {
        #[test]
        fn pieces_cover_every_run_of_another_rank_once(counts in prop::collection::vec(0usize..200, 1..5), max in 1usize..300) {
            let staging = Staging { num_ranks: counts.len(), piece_bytes: max.next_multiple_of(ALIGN).min(48) };
            let rank = counts.len() / 2;
            let mut seen = vec![0; counts.iter().sum()];
            for round in 0..staging.num_rounds(rank, [&counts, &[]]) {
                let mut end = 0;
                for piece in staging.pieces(rank, &counts, round) {
                    prop_assert_eq!(piece.bytes.len(), piece.staged.len());
                    prop_assert!(piece.staged.start >= end && piece.staged.start.is_multiple_of(ALIGN));
                    end = piece.staged.end;
                    seen[piece.bytes].iter_mut().for_each(|times| *times += 1);
                }
                prop_assert!(end <= staging.buffer_bytes());
            }
            let own: usize = counts[..rank].iter().sum();
            for (at, times) in seen.into_iter().enumerate() {
                prop_assert_eq!(times, usize::from(!(own..own + counts[rank]).contains(&at)), "byte {}", at);
            }
        }

        #[test]
        fn both_sides_of_a_run_count_the_same_pieces(sizes in prop::collection::vec(prop::collection::vec(0usize..200, 3), 3)) {
            let staging = Staging { num_ranks: 3, piece_bytes: 32 };
            let received = |rank: usize| -> Vec<usize> { sizes.iter().map(|row| row[rank]).collect() };
            for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 1)] {
                let rounds = |rank: usize| staging.num_rounds(rank, [&sizes[rank], &received(rank)]);
                let sent = lengths(staging, (from, to), &sizes[from], rounds(from));
                prop_assert_eq!(sent, lengths(staging, (to, from), &received(to), rounds(to)));
            }
        }
    }
}
