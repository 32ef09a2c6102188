//! Into how many chunks a step is cut so that some travel while others are computed, and what is left to those that travel. Pure:
//! from sizes that all ranks have agreed on.
//!
//! Every chunk reads the weights of all experts that it has rows for, so that a cut costs where few rows share them; and the first
//! chunk's dispatch and the last one's combine have nothing to hide behind, so that more chunks hide more. None of the numbers
//! here has been timed between GPUs.

/// Multiprocessors that experts leave to what travels, and the most that NCCL takes: 8 reach 95 % of NVLink's rate.
pub const NUM_TRAVEL_MULTIPROCESSORS: u32 = 8;

/// A step of fewer tokens, of the rank that brings most, is left whole.
const MIN_CUT_TOKENS: usize = 512;

/// A step of so many is cut into [`MAX_CHUNKS`].
const MAX_CUT_TOKENS: usize = 4096;

/// More chunks hide little more.
const MAX_CHUNKS: usize = 4;

/// Rows of an expert in a chunk, on average, that fill tiles.
const MIN_EXPERT_ROWS: usize = 128;

/// How a step is cut that one set of buffers would hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cut {
    /// Not at all.
    #[default]
    Never,
    /// By its tokens.
    ByTokens,
    /// Into as many chunks only as leave experts enough rows.
    ByRows {
        /// Slots of a token.
        num_topk: usize,
        /// Experts of all ranks.
        num_experts: usize,
    },
}

impl Cut {
    /// Chunks of a step in which the ranks bring `total_tokens`, of which one brings `max_tokens`. At least 1.
    #[must_use]
    pub fn num_chunks(self, max_tokens: usize, total_tokens: usize) -> usize {
        let by_tokens = match max_tokens {
            ..MIN_CUT_TOKENS => 1,
            MIN_CUT_TOKENS..MAX_CUT_TOKENS => 2,
            MAX_CUT_TOKENS.. => MAX_CHUNKS,
        };
        match self {
            Self::Never => 1,
            Self::ByTokens => by_tokens,
            Self::ByRows { num_topk, num_experts } => {
                let rows = total_tokens.saturating_mul(num_topk) / num_experts.max(1);
                by_tokens.min(rows / MIN_EXPERT_ROWS).max(1)
            }
        }
    }
}

/// Tokens of a rank that both sets of buffers together hold, where one alone would hold `tokens_at_once`: a whole step may lie in
/// the first, and chunks that it is cut into are half of it at most. Chunks that were `declared` are not cut: there are two of them.
#[must_use]
pub fn tokens_in_buffers(tokens_at_once: usize, declared: bool) -> usize {
    tokens_at_once + if declared { tokens_at_once } else { tokens_at_once.div_ceil(2) }
}

/// Sets of buffers that chunks take turns in.
pub const NUM_SETS: usize = 2;

/// Which of them a chunk has.
#[must_use]
pub fn set_of(chunk: usize) -> usize {
    chunk % NUM_SETS
}

/// What is queued next of a step whose chunks overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// A chunk's tokens, in the lane of what travels.
    Dispatch(usize),
    /// Its experts, in the session's.
    Experts(usize),
    /// Its rows, where its tokens were.
    Combine(usize),
}

/// The order in which hosts queue a step: a chunk's rows go home when the next one's experts are queued.
pub fn turns(num_chunks: usize) -> impl Iterator<Item = Turn> {
    (0..=num_chunks).flat_map(move |chunk| {
        let comes = (chunk < num_chunks).then_some([Turn::Dispatch(chunk), Turn::Experts(chunk)]);
        comes.into_iter().flatten().chain(chunk.checked_sub(1).map(Turn::Combine))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::capacity::Capacity;
    use proptest::prelude::*;

    /// Kimi K3's.
    const BY_ROWS: Cut = Cut::ByRows { num_topk: 16, num_experts: 896 };

    #[test]
    fn few_tokens_are_left_whole_and_many_are_cut() {
        let chunks = |cut: Cut| [0, 1, 511, 512, 1024, 4095, 4096, 8192].map(|most| cut.num_chunks(most, 2 * most));
        assert_eq!(chunks(Cut::Never), [1; 8]);
        assert_eq!(chunks(Cut::ByTokens), [1, 1, 1, 2, 2, 2, 4, 4]);
        assert_eq!(chunks(BY_ROWS), [1, 1, 1, 1, 1, 1, 1, 2], "experts of few rows are read once");
        assert_eq!(BY_ROWS.num_chunks(8192, 16 * 8192), 4);
    }

    #[test]
    fn two_chunks_are_under_way_at_most() {
        use Turn::{Combine, Dispatch, Experts};
        assert_eq!(turns(1).collect::<Vec<_>>(), [Dispatch(0), Experts(0), Combine(0)]);
        let three = [
            [Dispatch(0), Experts(0), Dispatch(1)],
            [Experts(1), Combine(0), Dispatch(2)],
            [Experts(2), Combine(1), Combine(2)],
        ];
        assert_eq!(turns(3).collect::<Vec<_>>(), three.concat());
    }

    proptest! {
        /// Whatever ranks bring: every token goes once, all ranks have as many chunks, no chunk is larger than it would be without,
        /// and what is cut fits in the second set of buffers.
        #[test]
        fn a_cut_step_fits_where_a_whole_one_does(
            num_tokens in prop::collection::vec(0usize..9000, 1..9),
            declared in prop::option::of(1usize..9000),
            cut in prop::sample::select(vec![Cut::Never, Cut::ByTokens, BY_ROWS, Cut::ByRows { num_topk: 8, num_experts: 8 }]),
        ) {
            let whole = Capacity { num_max_tokens_per_rank: 9000, chunk_tokens: declared, cut: Cut::Never };
            let (whole, cut) = (whole.chunks(&num_tokens).unwrap(), Capacity { cut, ..whole }.chunks(&num_tokens).unwrap());
            for &n in &num_tokens {
                let covered: Vec<usize> = (0..cut.num_chunks).flat_map(|chunk| cut.tokens(chunk, n)).collect();
                prop_assert_eq!(covered, (0..n).collect::<Vec<_>>());
            }
            let most = num_tokens.iter().copied().max().unwrap_or(0);
            prop_assert!(cut.chunk_tokens <= whole.chunk_tokens);
            prop_assert_eq!(cut.first_chunk_tokens, num_tokens.iter().map(|n| (*n).min(cut.chunk_tokens)).sum::<usize>());
            if cut.is_one_cut {
                prop_assert_eq!(whole.num_chunks, 1);
                prop_assert!((2..=4).contains(&cut.num_chunks) && most >= 512);
                let at_once = most.min(declared.unwrap_or(9000));
                prop_assert!(at_once + cut.chunk_tokens <= tokens_in_buffers(at_once, false));
            } else {
                prop_assert_eq!(cut, whole);
            }
        }
    }
}
