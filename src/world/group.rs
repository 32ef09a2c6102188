//! What agreement needs of a world: ranks that gather and broadcast bytes. MPI is one such world; tests make others of
//! hundreds of ranks in one process, so that the code that compares is the code that is tried.
//!
//! Knows nothing of what the bytes mean.

use super::agree::{self, Refusal};
use super::compare::{self, Compared, Sheet};
use crate::exit::Classify;
use crate::ids::Rank;

/// A rank among others. Everything but [`Group::rank`] and [`Group::size`] is collective: called by all ranks, in the
/// same order.
pub trait Group: Sized {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// The lowest rank on this rank's host.
    fn first_on_host(&self) -> Rank;

    /// Every rank's `mine`, one behind the other in rank order. All are of one length. `operation` is what a message
    /// calls it where a rank is missing.
    fn all_gather(&self, operation: &str, mine: &[u8]) -> Vec<u8>;

    /// Overwrites `bytes` with those of `root`. All are of one length.
    fn broadcast(&self, root: Rank, bytes: &mut [u8]);

    /// The most bytes that go to one peer in one collective; the same on all ranks.
    fn round_bytes(&self) -> usize;

    /// Every rank's `mine`, in rank order.
    fn all_gather_u64<const N: usize>(&self, mine: [u64; N]) -> Vec<[u64; N]> {
        let bytes: Vec<u8> = mine.iter().flat_map(|word| word.to_le_bytes()).collect();
        let all = self.all_gather("all-gather", &bytes);
        let (words, _) = all.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        words.chunks_exact(N).map(|chunk| chunk.try_into().unwrap_or([0; N])).collect()
    }

    /// Every rank's bytes, of whatever length, in rank order.
    ///
    /// For records of some kilobytes: shorter ones are padded to the longest.
    fn all_gather_bytes(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        let lengths = self.lengths(mine);
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|&length| Vec::with_capacity(length)).collect();
        for at in (0..longest).step_by(self.round_bytes()) {
            let piece = Piece { at, len: self.round_bytes().min(longest - at) };
            let mut padded = piece.of(mine).to_vec();
            padded.resize(piece.len, 0);
            let arrived = self.all_gather("all-gather of records", &padded);
            for (whole, (run, &length)) in all.iter_mut().zip(arrived.chunks_exact(piece.len).zip(&lengths)) {
                whole.extend_from_slice(&run[..piece.len_of(length)]);
            }
        }
        all
    }

    /// The length of every rank's `mine`.
    fn lengths(&self, mine: &[u8]) -> Vec<usize> {
        let length = |[n]: [u64; 1]| usize::try_from(n).unwrap_or(usize::MAX);
        self.all_gather_u64([mine.len() as u64]).into_iter().map(length).collect()
    }

    /// Gives `local`'s value if every rank succeeded, else the same [`Refusal`] on all of them.
    ///
    /// # Errors
    /// If any rank's `local` is an error.
    fn agree<T, E: Classify + Send + Sync + 'static>(&self, local: Result<T, E>) -> Result<T, Refusal> {
        agree::agree(self, local)
    }

    /// The refusal of an error that every rank has come to, from numbers that all know.
    fn refuse<E: Classify + Send + Sync + 'static>(&self, error: E) -> Refusal {
        agree::refuse(self, error)
    }

    /// Compares what the ranks bring. One all-gather of 48 bytes a rank where it is alike.
    ///
    /// A rank that has nothing to bring because it failed takes part all the same.
    ///
    /// # Errors
    /// If any rank failed: the same on all of them.
    fn compare<E: Classify + Send + Sync + 'static>(&self, local: Result<Sheet, E>) -> Result<Compared, Refusal> {
        compare::compare(self, local)
    }

    /// A number for the host of every rank: that of its first rank.
    fn nodes(&self) -> Vec<u32> {
        self.all_gather_u64([u64::from(self.first_on_host().0)])
            .into_iter()
            .map(|[first]| u32::try_from(first).unwrap_or_default())
            .collect()
    }
}

/// A window of every run: bytes `at..at + len`.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub at: usize,
    pub len: usize,
}

impl Piece {
    pub fn len_of(self, run: usize) -> usize {
        run.saturating_sub(self.at).min(self.len)
    }

    pub fn of(self, run: &[u8]) -> &[u8] {
        let at = self.at.min(run.len());
        &run[at..at + self.len_of(run.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulated::SimulatedWorld;
    use super::*;

    #[test]
    fn pieces_of_a_run_join_to_the_run() {
        let run: Vec<u8> = (0..23).collect();
        let joined: Vec<u8> = (0..4).flat_map(|round| Piece { at: round * 7, len: 7 }.of(&run).to_vec()).collect();
        assert_eq!(joined, run);
    }

    #[test]
    fn bytes_of_every_length_are_gathered_in_rounds() {
        let record = |rank: usize| vec![u8::try_from(rank).expect("few ranks"); rank * 3 % 11];
        let world = SimulatedWorld { round_bytes: 4, ..SimulatedWorld::new(13) };
        let gathered = world.run(|ranks| ranks.all_gather_bytes(&record(ranks.rank().index())));
        let wanted: Vec<Vec<u8>> = (0..13).map(record).collect();
        for (all, traffic) in gathered {
            assert_eq!(all, wanted);
            // Lengths, then the longest record of 10 bytes in rounds of 4.
            assert_eq!(traffic.collectives, 1 + 3);
        }
    }
}
