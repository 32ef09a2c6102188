//! A rank's share of the input: which rows, their values, and their experts where a file names them.

use super::{Job, JobError};
use crate::checkpoint::{self, Activations, MatrixDtype};
use crate::cli::values::Split;
use crate::layer::{MoeLayer, Session};
use crate::routing::TopK;
use crate::world::World;

/// This rank's share of the input.
pub(super) struct Share {
    /// Its rows, by their place in the input.
    pub rows: Vec<usize>,
    pub width: usize,
    pub hidden: Vec<f32>,
    pub is_bf16: bool,
    /// The most rows of any rank.
    pub most_rows: usize,
}

/// Rows of every rank.
fn deal_rows(split: &Split, rows: usize, num_ranks: usize) -> Result<Vec<usize>, JobError> {
    match split {
        Split::Even => Ok((0..num_ranks).map(|rank| rows / num_ranks + usize::from(rank < rows % num_ranks)).collect()),
        Split::Counts(counts) => {
            let dealt = counts.iter().sum();
            if dealt == rows && counts.len() == num_ranks {
                return Ok(counts.clone());
            }
            Err(JobError::Split { dealt, parts: counts.len(), rows, num_ranks })
        }
    }
}

/// `num_rows` of an input's rows, spread evenly over it; all if there are no more.
#[must_use]
pub fn sampled(num_rows: Option<usize>, num_input_rows: usize) -> Vec<usize> {
    let num_rows = num_rows.unwrap_or(num_input_rows).min(num_input_rows);
    (0..num_rows).map(|row| row * num_input_rows / num_rows).collect()
}

pub(super) fn deal(world: &World, job: &Job<'_>) -> Result<Share, JobError> {
    use crate::config::Payload;

    let input = Activations::open(&job.input.path, job.input.tensor.as_deref())?;
    let is_bf16 = input.dtype == MatrixDtype::Bf16;
    let payload = match job.deployment.dispatch.payload {
        Payload::Bf16 => Some("bf16"),
        Payload::Nvfp4 => Some("nvfp4"),
        Payload::Auto | Payload::F32 => None,
    };
    if let Some(payload) = payload
        && !is_bf16
    {
        return Err(JobError::InputDtype { path: job.input.path.clone(), payload });
    }
    let sample = sampled(job.num_rows, input.num_rows);
    let dealt = deal_rows(job.split, sample.len(), world.size())?;
    let start: usize = dealt[..world.rank().index()].iter().sum();
    let rows = sample[start..start + dealt[world.rank().index()]].to_vec();
    let hidden = input.read(&rows)?;
    Ok(Share {
        rows,
        width: input.num_columns,
        hidden,
        is_bf16,
        most_rows: dealt.iter().copied().max().unwrap_or_default(),
    })
}

pub(super) fn check_width(job: &Job<'_>, session: &Session, share: &Share) -> Result<(), JobError> {
    let wanted = session.geometry().hidden;
    if share.width == wanted {
        return Ok(());
    }
    Err(JobError::Hidden { path: job.input.path.clone(), found: share.width, wanted })
}

/// This rank's rows of `--topk`, for each layer.
pub(super) fn read_topk(job: &Job<'_>, session: &Session, share: &Share) -> Result<Vec<Option<TopK>>, JobError> {
    let Some(path) = job.topk else { return Ok(vec![None; session.layers().len()]) };
    let of_layer = |layer: &MoeLayer| {
        let topk = checkpoint::read_topk(path, Some(layer.decision().layer))?;
        let in_file = |source| JobError::Topk { path: path.to_owned(), source };
        topk.validate(session.geometry().num_experts).map_err(in_file)?;
        let found = topk.idx.len() / topk.num_topk;
        let rows = share.rows.last().map_or(0, |row| row + 1);
        if found < rows {
            return Err(JobError::TopkRows { path: path.to_owned(), found, rows });
        }
        let slots = || share.rows.iter().flat_map(|row| row * topk.num_topk..(row + 1) * topk.num_topk);
        let (idx, weights) = (slots().map(|slot| topk.idx[slot]), slots().map(|slot| topk.weights[slot]));
        Ok(Some(TopK { num_topk: topk.num_topk, idx: idx.collect(), weights: weights.collect() }))
    };
    session.layers().iter().map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_the_input() {
        assert_eq!(sampled(Some(4), 256), [0, 64, 128, 192]);
        assert_eq!(sampled(Some(3), 10), [0, 3, 6]);
        for all in [None, Some(5), Some(6)] {
            assert_eq!(sampled(all, 5), [0, 1, 2, 3, 4]);
        }
        assert_eq!(sampled(Some(3), 0), [0; 0]);
    }

    #[test]
    fn rows_are_dealt_in_contiguous_blocks() {
        assert_eq!(deal_rows(&Split::Even, 37, 4).unwrap(), [10, 9, 9, 9]);
        assert_eq!(deal_rows(&Split::Counts(vec![3, 0, 7, 1]), 11, 4).unwrap(), [3, 0, 7, 1]);
        let message = deal_rows(&Split::Counts(vec![3, 0]), 11, 4).unwrap_err().to_string();
        assert!(message.contains("3 rows to 2 ranks") && message.contains("11 rows"), "{message}");
    }
}
