//! A batch that stands for a step's: its values are made up, its experts are the layer's own.

use crate::backend::{BackendError, ExpertBatch, Experts};
use crate::select::tactics::{RowBucket, Tactic};

/// Experts that compute at most: a layer of many costs no more to tune than one of some.
const MAX_EXPERTS: usize = 8;

/// Rows over all experts at most, but for one expert's.
const MAX_ROWS: usize = 256;

/// Rows for the first of a rank's experts.
pub(super) struct MadeUp {
    tokens: Vec<f32>,
    row_token: Vec<u32>,
    expert_offsets: Vec<usize>,
    out: Vec<f32>,
}

impl MadeUp {
    /// As many rows an expert as the bucket has; absent where the rank has no expert.
    pub(super) fn new(hidden: usize, num_local_experts: usize, rows: RowBucket) -> Option<Self> {
        let rows = rows.rows();
        let num_experts = num_local_experts.min((MAX_ROWS / rows).clamp(1, MAX_EXPERTS));
        if num_experts == 0 {
            return None;
        }
        // Small whole numbers of both signs: no value is special to any format.
        let tokens = (0..rows * hidden).map(|idx| (idx * 7 % 13) as f32 - 6.0).collect();
        let all = u32::try_from(rows).unwrap_or(u32::MAX);
        Some(Self {
            tokens,
            row_token: (0..num_experts).flat_map(|_| 0..all).collect(),
            expert_offsets: (0..=num_local_experts).map(|expert| expert.min(num_experts) * rows).collect(),
            out: vec![0.0; num_experts * rows * hidden],
        })
    }

    /// Computes the batch once.
    pub(super) fn run(&mut self, experts: &dyn Experts, tactic: Tactic) -> Result<(), BackendError> {
        let batch = ExpertBatch {
            tokens: &self.tokens,
            token_scale: 1.0,
            row_token: &self.row_token,
            expert_offsets: &self.expert_offsets,
            tactic,
        };
        experts.forward(&batch, &mut self.out).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_bounded_and_whole() {
        for num_local_experts in [1, 3, 8, 200] {
            for rows in RowBucket::of(usize::MAX, 1).up_to() {
                let work = MadeUp::new(32, num_local_experts, rows).expect("there are experts");
                assert_eq!(work.expert_offsets.len(), num_local_experts + 1);
                assert_eq!(work.expert_offsets[num_local_experts], work.row_token.len());
                assert_eq!(work.expert_offsets[1], rows.rows(), "the first expert has the bucket's rows");
                assert!(work.row_token.len() <= MAX_ROWS.max(rows.rows()), "{rows}: {} rows", work.row_token.len());
                assert!(work.row_token.iter().all(|token| (*token as usize) < rows.rows()));
                assert_eq!(work.out.len(), work.row_token.len() * 32);
            }
        }
        assert!(MadeUp::new(32, 0, RowBucket::of(1, 1)).is_none());
    }
}
