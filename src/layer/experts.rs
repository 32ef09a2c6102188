//! Routed experts from a checkpoint into a backend, a few at a time: read, checked and packed by all of its threads.

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use rayon::ThreadPool;
use rayon::prelude::*;

use super::LayerError;
use super::abreast::abreast;
use crate::backend::{Backend, BackendError, ExpertsBuilder, ExpertsSpec};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::checkpoint::{Checkpoint, CheckpointError, LayerManifest, LayerScales};
use crate::ids::{ExpertIdx, LayerIdx};

/// Where experts come from, and where they go.
pub(crate) struct ExpertsLoader<'a> {
    pub checkpoint: &'a Checkpoint,
    pub backend: &'a dyn Backend,
    /// Told the checkpoint's bytes of every expert that is packed, by whichever thread has done it.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// Experts that were packed, whose kernels are not there yet.
pub(crate) struct LoadedExperts {
    pub builder: Box<dyn ExpertsBuilder>,
    pub scales: LayerScales,
    /// The largest FC1 `input_scale`; 0 where there is none.
    pub largest_input_scale: f32,
    /// What reading and packing took.
    pub elapsed: Duration,
}

impl ExpertsLoader<'_> {
    /// Reads and packs some experts of a layer.
    ///
    /// # Errors
    /// What reading or packing them one by one would have met first.
    pub fn load(
        &self,
        manifest: &LayerManifest,
        spec: ExpertsSpec,
        experts: Range<usize>,
    ) -> Result<LoadedExperts, LayerError> {
        let start = Instant::now();
        let prepared = |source| prepare_error(self.checkpoint.dir(), manifest.layer, source);
        let builder = self.backend.experts(spec, experts.len()).map_err(prepared)?;
        let of_experts = abreast(self.backend.pool(), experts.len(), |local| -> Result<_, LayerError> {
            let (expert, mut scales) = (ExpertIdx::from_index(experts.start + local), LayerScales::default());
            let tensors = self.checkpoint.read_expert_into(manifest, expert, &mut scales)?;
            builder.put(local, &tensors).map_err(prepared)?;
            (self.progress)(self.checkpoint.expert_bytes(manifest, expert)?);
            Ok((fc1_input_scale(&tensors).unwrap_or(0.0), scales))
        })?;
        builder.wait().map_err(prepared)?;
        let mut largest_input_scale = 0f32;
        let mut scales = LayerScales::default();
        for (input_scale, of_expert) in &of_experts {
            largest_input_scale = largest_input_scale.max(*input_scale);
            scales.merge(of_expert);
        }
        Ok(LoadedExperts { builder, scales, largest_input_scale, elapsed: start.elapsed() })
    }
}

/// Hands all bytes of some experts to `sink`, in pieces, on the threads of `pool`: what loading reads, for who asks how fast
/// that can be.
///
/// # Errors
/// If a file fails.
pub(crate) fn read_experts(
    (checkpoint, manifest): (&Checkpoint, &LayerManifest),
    pool: &ThreadPool,
    experts: Range<usize>,
    piece_bytes: usize,
    sink: impl Fn(&[u8]) + Sync,
) -> Result<(), CheckpointError> {
    abreast(pool, experts.len(), |local| -> Result<(), CheckpointError> {
        let tensors = checkpoint.map_expert(manifest, ExpertIdx::from_index(experts.start + local))?;
        let pieces: Vec<&[u8]> = tensors.iter().flat_map(|bytes| bytes.chunks(piece_bytes)).collect();
        pieces.into_par_iter().with_max_len(1).for_each(&sink);
        Ok(())
    })?;
    Ok(())
}

pub(super) fn prepare_error(checkpoint: &Path, layer: LayerIdx, source: BackendError) -> LayerError {
    LayerError::Prepare { layer, checkpoint: checkpoint.to_owned(), source }
}

/// The larger of gate's and up's `input_scale`, which describe the same input; absent unless both are there.
pub(super) fn fc1_input_scale(expert: &ExpertTensors) -> Option<f32> {
    Some(input_scale(&expert.gate)?.max(input_scale(&expert.up)?))
}

fn input_scale(projection: &Projection) -> Option<f32> {
    match projection.data {
        ProjectionData::Nvfp4 { input_scale, .. } => input_scale,
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Classify, Exit};

    /// Memory that a machine has not is no fault of the checkpoint's.
    #[test]
    fn what_can_not_be_packed_ends_as_its_cause_does() {
        let memory = BackendError::Memory { bytes: 1 << 40, source: std::io::ErrorKind::OutOfMemory.into() };
        let exit = |source| prepare_error(Path::new("k3"), LayerIdx(1), source).exit();
        assert_eq!([exit(memory), exit(BackendError::MixedExpert)], [Exit::Environment, Exit::BadInput]);
    }
}
