//! What every backend checks before it packs or runs, and counts afterwards.

use std::sync::OnceLock;

use super::{BackendError, ExpertBatch, ExpertsSpec, ForwardStats};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::numerics::nvfp4::{BLOCK, QuantCounts};
use crate::select::{Identity, Quant};

/// Refuses widths that blocks do not divide.
pub(super) fn spec(spec: &ExpertsSpec) -> Result<(), BackendError> {
    for (width, found) in [("hidden", spec.hidden), ("intermediate", spec.intermediate)] {
        if found == 0 || !found.is_multiple_of(BLOCK) {
            return Err(BackendError::Width { width, found });
        }
    }
    Ok(())
}

/// Refuses an expert whose projections are not the layer's, or that lacks what the layer's mode needs.
pub(super) fn expert(spec: &ExpertsSpec, expert: &ExpertTensors) -> Result<(), BackendError> {
    projection("gate", &expert.gate, spec.intermediate, spec.hidden)?;
    projection("up", &expert.up, spec.intermediate, spec.hidden)?;
    projection("down", &expert.down, spec.hidden, spec.intermediate)?;
    let down_is_quantised = matches!(expert.down.data, ProjectionData::Nvfp4 { input_scale: Some(_), .. });
    if spec.quantise_activations && !down_is_quantised {
        return Err(BackendError::InputScale { projection: "down" });
    }
    Ok(())
}

/// Refuses a shape that is not the wanted one, and data of another length than the shape's.
fn projection(name: &'static str, found: &Projection, out: usize, in_features: usize) -> Result<(), BackendError> {
    if (found.out_features, found.in_features) != (out, in_features) {
        return Err(BackendError::Shape {
            projection: name,
            found_out: found.out_features,
            found_in: found.in_features,
            wanted_out: out,
            wanted_in: in_features,
        });
    }
    data(name, found)
}

/// Refuses a dense projection without outputs or inputs, or with data of another length than its shape's.
pub(super) fn linear(weight: &Projection) -> Result<(), BackendError> {
    for (width, found) in [("out_features", weight.out_features), ("in_features", weight.in_features)] {
        if found == 0 {
            return Err(BackendError::Width { width, found });
        }
    }
    data("linear", weight)
}

/// Refuses data of another length than the shape's.
fn data(name: &'static str, found: &Projection) -> Result<(), BackendError> {
    let elements = found.out_features * found.in_features;
    let lengths = match &found.data {
        ProjectionData::Nvfp4 { packed, block_scales, .. } => {
            if !found.in_features.is_multiple_of(BLOCK) {
                return Err(BackendError::Width { width: "in_features", found: found.in_features });
            }
            [(packed.len(), elements / 2), (block_scales.len(), elements / BLOCK)]
        }
        ProjectionData::Bf16(bytes) => [(bytes.len(), elements * 2); 2],
        ProjectionData::F32(bytes) => [(bytes.len(), elements * 4); 2],
    };
    match lengths.into_iter().find(|(found, wanted)| found != wanted) {
        Some((found, wanted)) => Err(BackendError::Bytes { projection: name, found, wanted }),
        None => Ok(()),
    }
}

/// Keeps an expert that was packed.
pub(super) fn put<T>(experts: &[OnceLock<T>], local: usize, expert: T) {
    assert!(experts[local].set(expert).is_ok(), "local expert {local} was put twice");
}

/// All experts of a builder.
pub(super) fn all<T>(experts: Vec<OnceLock<T>>) -> Vec<T> {
    let taken = |(local, expert): (usize, OnceLock<T>)| {
        expert.into_inner().unwrap_or_else(|| panic!("local expert {local} was not put"))
    };
    experts.into_iter().enumerate().map(taken).collect()
}

/// The identity that an expert runs under.
pub(super) fn identity(technique: &'static str, spec: &ExpertsSpec, expert: &ExpertTensors) -> Identity {
    let is_nvfp4 = |projection: &Projection| matches!(projection.data, ProjectionData::Nvfp4 { .. });
    let quant = if spec.quantise_activations {
        Quant::Nvfp4
    } else if [&expert.gate, &expert.up, &expert.down].into_iter().any(is_nvfp4) {
        Quant::W4a16Nvfp4
    } else {
        Quant::None
    };
    super::identity(technique, quant)
}

/// Checks a batch against the packed experts.
///
/// # Panics
/// If the batch or `out` does not fit: a bug of the caller, which made the plan.
pub(super) fn batch(spec: &ExpertsSpec, num_experts: usize, batch: &ExpertBatch<'_>, out: &[f32]) {
    offsets(num_experts, batch.expert_offsets);
    assert_eq!(batch.expert_offsets[num_experts], batch.num_rows(), "the last of expert_offsets is the number of rows");
    assert_eq!(out.len(), batch.num_rows() * spec.hidden, "out is [num_rows, hidden]");
    assert!(batch.tokens.len().is_multiple_of(spec.hidden), "tokens is [num_tokens, hidden]");
    let num_tokens = batch.tokens.len() / spec.hidden;
    let strange = batch.row_token.iter().position(|token| *token as usize >= num_tokens);
    assert_eq!(strange, None, "a row reads a token that is not there: {num_tokens} tokens");
}

/// Checks where experts' rows start.
///
/// # Panics
/// If they are not those of so many experts.
pub(super) fn offsets(num_experts: usize, offsets: &[usize]) {
    assert_eq!(offsets.len(), num_experts + 1, "expert_offsets has an entry an expert and one");
    assert!(offsets.is_sorted() && offsets[0] == 0, "expert_offsets ascend from 0: {offsets:?}");
}

/// Counts the rows of every identity, in the order in which identities first occur.
pub(super) fn count_rows(stats: &mut ForwardStats, batch: &ExpertBatch<'_>, identity: impl Fn(usize) -> Identity) {
    for (expert, offsets) in batch.expert_offsets.windows(2).enumerate() {
        let num_rows = (offsets[1] - offsets[0]) as u64;
        if num_rows == 0 {
            continue;
        }
        let identity = identity(expert);
        match stats.rows_by_identity.iter_mut().find(|(found, _)| *found == identity) {
            Some((_, count)) => *count += num_rows,
            None => stats.rows_by_identity.push((identity, num_rows)),
        }
    }
}

/// Adds what happened to other blocks.
pub(super) fn add_counts(total: &mut QuantCounts, counts: QuantCounts) {
    total.num_blocks += counts.num_blocks;
    total.num_saturated += counts.num_saturated;
    total.num_zeroed += counts.num_zeroed;
}
