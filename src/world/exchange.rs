//! Exchanges of plain bytes and counts. MPI counts in i32: larger exchanges go in rounds that every rank counts alike.

use mpi::datatype::{Partition, PartitionMut};
use mpi::traits::{Communicator, CommunicatorCollectives, Root};

use super::cost::Traffic;
use super::group::{Group, Piece};
use super::{Exchanged, World};
use crate::ids::Rank;

/// Bytes for every rank, one run a rank, in rank order.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// All runs, one behind the other.
    pub bytes: &'a [u8],
    /// `[num_ranks]` length of each rank's run.
    pub counts: &'a [usize],
}

/// Largest piece a peer: all peers' pieces together must have i32 offsets.
pub(super) fn default_round_bytes(num_ranks: usize) -> usize {
    (i32::MAX as usize) / num_ranks.max(1)
}

/// Rounds of an exchange whose largest run is `max_run_bytes`, in pieces of `round_bytes`.
///
/// Both arguments must be equal on all ranks: a rank that counted other rounds would hang the rest.
#[must_use]
pub fn num_rounds(max_run_bytes: usize, round_bytes: usize) -> usize {
    max_run_bytes.div_ceil(round_bytes.max(1))
}

impl Group for World {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn first_on_host(&self) -> Rank {
        self.first_on_host
    }

    fn all_gather(&self, operation: &str, mine: &[u8]) -> Vec<u8> {
        let mut all = vec![0u8; mine.len() * self.size];
        // An empty slice is never handed over, see `exchange_round`. All are empty, so that nobody waits.
        if !mine.is_empty() {
            mpi::request::scope(|scope| {
                let request = self.comm.immediate_all_gather_into(scope, mine, &mut all[..]);
                self.wait(operation, request);
            });
            self.count(Traffic::all_gather(self.size as u64, mine.len() as u64));
        }
        all
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let len = bytes.len() as u64;
        mpi::request::scope(|scope| {
            let process = self.comm.process_at_rank(i32::try_from(root.0).unwrap_or_default());
            let request = process.immediate_broadcast_into(scope, bytes);
            self.wait("broadcast of a record", request);
        });
        self.count(Traffic::broadcast(len, root == self.rank));
    }

    fn round_bytes(&self) -> usize {
        self.round_bytes
    }
}

impl World {
    /// Every rank's `mine`, in rank order; collective.
    pub fn all_gather_u64<const N: usize>(&self, mine: [u64; N]) -> Vec<[u64; N]> {
        Group::all_gather_u64(self, mine)
    }

    /// Every rank's bytes, of whatever length, in rank order; collective. See [`Group::all_gather_bytes`].
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        Group::all_gather_bytes(self, mine)
    }

    /// Sends `to[r]` to rank `r` and returns what each rank sent here; collective.
    pub fn all_to_all_u64(&self, to: &[u64]) -> Vec<u64> {
        debug_assert_eq!(to.len(), self.size);
        let mut from = vec![0u64; self.size];
        mpi::request::scope(|scope| {
            let request = self.comm.immediate_all_to_all_into(scope, to, &mut from[..]);
            self.wait("all-to-all of sizes", request);
        });
        let others = 8 * (self.size as u64 - 1);
        self.count(Traffic { collectives: 1, brought_bytes: others, received_bytes: others });
        from
    }

    /// Sends each rank its run of `to` and returns what each sent here, in rank order; collective. For records of some
    /// kilobytes whose lengths every rank knows: they go in one exchange.
    ///
    /// # Panics
    /// If the counts don't cover `to`, a bug of the caller.
    pub fn all_to_all_u32(&self, to: &[u32], to_counts: &[usize], from_counts: &[usize]) -> Vec<u32> {
        assert_eq!(to_counts.iter().sum::<usize>(), to.len(), "counts must cover the words");
        let in_bytes = |counts: &[usize]| -> Vec<usize> { counts.iter().map(|&n| n * size_of::<u32>()).collect() };
        let bytes: Vec<u8> = to.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (counts, from_counts) = (in_bytes(to_counts), in_bytes(from_counts));
        let mut received = vec![0; from_counts.iter().sum()];
        self.exchange_round(Parts { bytes: &bytes, counts: &counts }, &mut received, &from_counts);
        let (brought_bytes, received_bytes) = (self.of_others(&counts), self.of_others(&from_counts));
        self.count(Traffic { collectives: 1, brought_bytes, received_bytes });
        received.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    /// The largest value of all ranks; collective. NaN loses to any number.
    pub fn max_f32(&self, mine: f32) -> f32 {
        let all = self.all_gather_u64([u64::from(mine.to_bits())]);
        all.iter().map(|[bits]| f32::from_bits((*bits & 0xffff_ffff) as u32)).fold(f32::NEG_INFINITY, f32::max)
    }

    /// Sends each rank its run and returns the runs received, in rank order; collective.
    ///
    /// `max_run_bytes` bounds every run between any two ranks and must be the same on all of them: it decides the
    /// number of rounds.
    ///
    /// # Panics
    /// If a run is longer than `max_run_bytes` or the counts don't add up, a bug of the caller.
    pub fn all_to_all_bytes(&self, send: Parts<'_>, recv_counts: &[usize], max_run_bytes: usize) -> Vec<u8> {
        let mut received = vec![0u8; recv_counts.iter().sum()];
        self.all_to_all_bytes_into(send, (&mut received, recv_counts), max_run_bytes);
        received
    }

    /// [`World::all_to_all_bytes`] into memory that is there, such as a GPU copies from.
    ///
    /// # Panics
    /// As it, and if `received` has not the length of its runs.
    pub fn all_to_all_bytes_into(
        &self,
        send: Parts<'_>,
        (received, recv_counts): (&mut [u8], &[usize]),
        max_run_bytes: usize,
    ) {
        assert_eq!(send.counts.iter().sum::<usize>(), send.bytes.len(), "send counts must cover the bytes");
        assert!(
            send.counts.iter().chain(recv_counts).all(|&count| count <= max_run_bytes),
            "no run may be longer than max_run_bytes"
        );
        let piece = self.round_bytes;
        let rounds = num_rounds(max_run_bytes, piece);
        assert_eq!(recv_counts.iter().sum::<usize>(), received.len(), "receive counts must cover the bytes");
        if rounds == 1 {
            self.exchange_round(send, received, recv_counts);
        } else {
            for round in 0..rounds {
                self.exchange_piece(send, received, recv_counts, Piece { at: round * piece, len: piece });
            }
        }
        self.count_exchange(send.counts, recv_counts, rounds);
    }

    /// All ranks' bytes at rank 0, which alone gets a value; collective. `max_run_bytes` as in
    /// [`World::all_to_all_bytes`].
    pub fn gather_bytes(&self, mine: &[u8], max_run_bytes: usize) -> Option<Vec<Vec<u8>>> {
        let length = |[n]: &[u64; 1]| usize::try_from(*n).unwrap_or(usize::MAX);
        let lengths: Vec<usize> = self.all_gather_u64([mine.len() as u64]).iter().map(length).collect();
        let mut counts = vec![0; self.size];
        counts[0] = mine.len();
        let recv_counts = if self.is_root() { lengths.clone() } else { vec![0; self.size] };
        let all = self.all_to_all_bytes(Parts { bytes: mine, counts: &counts }, &recv_counts, max_run_bytes);
        self.is_root().then(|| split_runs(&all, &lengths).map(<[u8]>::to_vec).collect())
    }

    /// One piece of every run, staged so that offsets stay within i32.
    fn exchange_piece(&self, send: Parts<'_>, received: &mut [u8], recv_counts: &[usize], piece: Piece) {
        let cut = |counts: &[usize]| -> Vec<usize> { counts.iter().map(|&n| piece.len_of(n)).collect() };
        let (send_cut, recv_cut) = (cut(send.counts), cut(recv_counts));
        let mut staged = Vec::with_capacity(send_cut.iter().sum());
        for run in split_runs(send.bytes, send.counts) {
            staged.extend_from_slice(piece.of(run));
        }
        let mut arrived = vec![0u8; recv_cut.iter().sum()];
        self.exchange_round(Parts { bytes: &staged, counts: &send_cut }, &mut arrived, &recv_cut);
        let mut run_start = 0;
        for (source, &count) in split_runs(&arrived, &recv_cut).zip(recv_counts) {
            let at = run_start + piece.at.min(count);
            received[at..at + source.len()].copy_from_slice(source);
            run_start += count;
        }
    }

    /// One alltoallv whose counts and offsets fit in i32.
    fn exchange_round(&self, send: Parts<'_>, received: &mut [u8], recv_counts: &[usize]) {
        let (send_counts, send_offsets) = mpi_counts(send.counts);
        let (recv_counts, recv_offsets) = mpi_counts(recv_counts);
        // An empty slice of bytes may lie at address 1, which is Open MPI's MPI_IN_PLACE: never hand one over.
        let mut nothing = [0u8];
        let bytes = if send.bytes.is_empty() { &[0u8][..] } else { send.bytes };
        let received = if received.is_empty() { &mut nothing[..] } else { received };
        let send = Partition::new(bytes, send_counts, send_offsets);
        let mut recv = PartitionMut::new(received, recv_counts, recv_offsets);
        mpi::request::scope(|scope| {
            let request = self.comm.immediate_all_to_all_varcount_into(scope, &send, &mut recv);
            self.wait("all-to-all of rows", request);
        });
    }

    fn count(&self, traffic: Traffic) {
        self.traffic.set(self.traffic.get() + traffic);
    }

    /// What of a count a rank is not this rank's own.
    fn of_others(&self, counts: &[usize]) -> u64 {
        let of_peer = |(rank, &count): (usize, &usize)| {
            if Rank::from_index(rank) == self.rank { 0 } else { count as u64 }
        };
        counts.iter().enumerate().map(of_peer).sum()
    }

    fn count_exchange(&self, send_counts: &[usize], recv_counts: &[usize], rounds: usize) {
        let (sent_bytes, received_bytes) = (self.of_others(send_counts), self.of_others(recv_counts));
        let rounds = rounds as u64;
        self.count(Traffic { collectives: rounds, brought_bytes: sent_bytes, received_bytes });
        self.count_carried(Exchanged { sent_bytes, received_bytes, rounds });
    }
}

/// The runs of `bytes` by their lengths.
fn split_runs<'a>(bytes: &'a [u8], counts: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = bytes;
    counts.iter().map(move |&count| {
        let (run, tail) = rest.split_at(count);
        rest = tail;
        run
    })
}

/// Counts and offsets as MPI wants them.
fn mpi_counts(counts: &[usize]) -> (Vec<i32>, Vec<i32>) {
    let as_i32 = |n: usize| i32::try_from(n).expect("a round's bytes fit in i32: see default_round_bytes");
    let mut offset = 0;
    let offsets = counts
        .iter()
        .map(|&count| {
            let at = as_i32(offset);
            offset += count;
            at
        })
        .collect();
    (counts.iter().map(|&count| as_i32(count)).collect(), offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_cover_the_largest_run_and_nothing_more() {
        assert_eq!(num_rounds(0, 8), 0);
        assert_eq!(num_rounds(8, 8), 1);
        assert_eq!(num_rounds(9, 8), 2);
        assert!(default_round_bytes(4096) * 4096 <= i32::MAX as usize);
    }
}
