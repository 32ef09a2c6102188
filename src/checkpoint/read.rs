//! Reading the tensors of a layer, with every scale checked.

use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::Dtype;

use super::Checkpoint;
use super::error::CheckpointError;
use super::faults::Faults;
use super::manifest::LayerManifest;
use super::map;
use super::projection::{ProjectionEntries, ScaleEntries};
use super::scales::{GlobalScaleSummary, LayerScales, ProjectionScales, ScaleError, check_block_scales};
use super::table::{EntryIdx, TensorTable};
use super::tensors::{ExpertTensors, LatentTensors, Projection, ProjectionData, RouterTensors, TensorBytes};
use crate::ids::ExpertIdx;

/// Tensor bytes that were mapped or read so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct BytesRead {
    /// Of routed experts, which a rank reads its own of.
    pub experts: u64,
    /// Of what every rank reads: router, shared expert, latent projections.
    pub replicated: u64,
}

/// The counters behind [`BytesRead`].
#[derive(Debug, Default)]
pub(super) struct ReadCounters {
    experts: AtomicU64,
    replicated: AtomicU64,
}

impl ReadCounters {
    pub(super) fn get(&self) -> BytesRead {
        BytesRead { experts: self.experts.load(Ordering::Relaxed), replicated: self.replicated.load(Ordering::Relaxed) }
    }
}

/// Whose bytes are read: a routed expert's, or those of everyone.
pub(crate) type Owner = Option<ExpertIdx>;

/// Reads from a checkpoint's files and counts what it reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(super) table: &'a TensorTable,
    pub(super) counters: &'a ReadCounters,
}

/// The scales of a projection, checked.
pub(crate) struct CheckedScales {
    block_scales: TensorBytes,
    global_scale: f32,
    input_scale: Option<f32>,
    pub(crate) summary: ProjectionScales,
}

impl Reader<'_> {
    fn count(&self, entry: EntryIdx, owner: Owner) {
        let counter = if owner.is_some() { &self.counters.experts } else { &self.counters.replicated };
        counter.fetch_add(self.table.entry(entry).num_bytes(), Ordering::Relaxed);
    }

    fn map(&self, idx: EntryIdx, owner: Owner) -> Result<TensorBytes, CheckpointError> {
        let entry = self.table.entry(idx);
        let bytes = map::map(self.table.shard_of(entry), entry)?;
        self.count(idx, owner);
        Ok(bytes)
    }

    /// Values of a tensor whose dtype is known to be BF16 or F32; all must be finite.
    fn floats(&self, idx: EntryIdx, owner: Owner) -> Result<Vec<f32>, CheckpointError> {
        let entry = self.table.entry(idx);
        let shard = self.table.shard_of(entry);
        let values = map::read_floats(shard, entry)?.unwrap_or_default();
        self.count(idx, owner);
        if let Some((position, value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            let (path, tensor) = (shard.path.clone(), entry.name.to_string());
            return Err(CheckpointError::NotFinite { path, tensor, position, value: *value });
        }
        Ok(values)
    }

    fn global_scale(&self, idx: EntryIdx, owner: Owner) -> Result<f32, CheckpointError> {
        let entry = self.table.entry(idx);
        let shard = self.table.shard_of(entry);
        let value = map::read_floats(shard, entry)?.and_then(|values| values.first().copied()).unwrap_or(f32::NAN);
        self.count(idx, owner);
        if value.is_finite() && value > 0.0 {
            return Ok(value);
        }
        let (path, tensor) = (shard.path.clone(), entry.name.to_string());
        Err(ScaleError::Global { expert: owner, path, tensor, value }.into())
    }

    fn block_scales(&self, idx: EntryIdx, owner: Owner) -> Result<(TensorBytes, super::ScaleSummary), CheckpointError> {
        let bytes = self.map(idx, owner)?;
        match check_block_scales(&bytes) {
            Ok(summary) => Ok((bytes, summary)),
            Err(bad) => {
                let entry = self.table.entry(idx);
                let num_blocks = entry.shape.last().copied().unwrap_or(1).max(1);
                Err(ScaleError::Block {
                    expert: owner,
                    path: self.table.shard_of(entry).path.clone(),
                    tensor: entry.name.to_string(),
                    row: bad.position / num_blocks,
                    block: bad.position % num_blocks,
                    bits: bad.bits,
                    what: bad.what,
                    num_bad: bad.num_bad,
                }
                .into())
            }
        }
    }

    /// Reads and checks the scales of a projection; nothing where a fault was noted.
    pub(crate) fn scales(
        &self,
        entries: ScaleEntries,
        owner: Owner,
        faults: &mut Faults,
    ) -> Result<Option<CheckedScales>, CheckpointError> {
        let global = faults.take(self.global_scale(entries.global, owner))?;
        let input = match entries.input {
            None => Some(None),
            Some(input) => faults.take(self.global_scale(input, owner))?.map(Some),
        };
        let blocks = faults.take(self.block_scales(entries.blocks, owner))?;
        let (Some(global_scale), Some(input_scale), Some((block_scales, blocks))) = (global, input, blocks) else {
            return Ok(None);
        };
        let summary = ProjectionScales {
            blocks,
            global: GlobalScaleSummary::of(global_scale),
            input: input_scale.map(GlobalScaleSummary::of).unwrap_or_default(),
        };
        Ok(Some(CheckedScales { block_scales, global_scale, input_scale, summary }))
    }

    fn projection(
        &self,
        entries: &ProjectionEntries,
        owner: Owner,
    ) -> Result<(Projection, Option<ProjectionScales>), CheckpointError> {
        let shape = &self.table.entry(entries.weight).shape;
        let (rows, columns) = (shape[0], shape[1]);
        let Some(scales) = entries.scales else {
            let data = ProjectionData::Bf16(self.map(entries.weight, owner)?);
            return Ok((Projection { out_features: rows, in_features: columns, data }, None));
        };
        // A stopping policy returns the scales or an error.
        let Some(scales) = self.scales(scales, owner, &mut Faults::Stop)? else {
            unreachable!("a fault was not returned")
        };
        let CheckedScales { block_scales, global_scale, input_scale, summary } = scales;
        let packed = self.map(entries.weight, owner)?;
        let data = ProjectionData::Nvfp4 { packed, block_scales, global_scale, input_scale };
        Ok((Projection { out_features: rows, in_features: 2 * columns, data }, Some(summary)))
    }

    fn expert(
        &self,
        entries: &[ProjectionEntries; 3],
        owner: Owner,
        scales: &mut LayerScales,
    ) -> Result<ExpertTensors, CheckpointError> {
        let [gate, up, down] = entries;
        let ((gate, gate_scales), (up, up_scales), (down, down_scales)) =
            (self.projection(gate, owner)?, self.projection(up, owner)?, self.projection(down, owner)?);
        self.note(entries, [gate_scales, up_scales, down_scales], scales);
        Ok(ExpertTensors { gate, up, down })
    }

    /// Adds an expert's scales to those of its layer. Projections without a summary have no scales, or faulty ones.
    pub(crate) fn note(
        &self,
        entries: &[ProjectionEntries; 3],
        summaries: [Option<ProjectionScales>; 3],
        scales: &mut LayerScales,
    ) {
        let mut expert = LayerScales::default();
        if let [Some(gate), Some(up), _] = &summaries {
            expert.num_pairs = 1;
            expert.num_pairs_differing = u64::from(gate.global.largest.to_bits() != up.global.largest.to_bits());
        }
        expert.projections = summaries.map(Option::unwrap_or_default);
        for (projection, summary) in entries.iter().zip(summaries) {
            let (Some(scales), Some(summary)) = (projection.scales, summary) else { continue };
            expert.note_implausible(&self.table.entry(scales.global).name, summary.global.largest);
            if let Some(input) = scales.input {
                expert.note_implausible(&self.table.entry(input).name, summary.input.largest);
            }
        }
        scales.merge(&expert);
    }

    /// A dense projection in bf16 or f32, as checked.
    fn dense(&self, idx: EntryIdx) -> Result<Projection, CheckpointError> {
        let entry = self.table.entry(idx);
        let bytes = self.map(idx, None)?;
        let data = if entry.dtype == Dtype::F32 { ProjectionData::F32(bytes) } else { ProjectionData::Bf16(bytes) };
        Ok(Projection { out_features: entry.shape[0], in_features: entry.shape[1], data })
    }
}

impl Checkpoint {
    fn reader(&self) -> Reader<'_> {
        Reader { table: &self.table, counters: &self.counters }
    }

    /// Reads one routed expert; see [`Checkpoint::read_expert_into`] for its scales' summary.
    ///
    /// # Errors
    /// If the layer has no such expert, a file fails, or a scale is NaN, negative, or (global ones) not above zero.
    pub fn read_expert(&self, manifest: &LayerManifest, expert: ExpertIdx) -> Result<ExpertTensors, CheckpointError> {
        self.read_expert_into(manifest, expert, &mut LayerScales::default())
    }

    /// Reads one routed expert and adds what its scales are to `scales`.
    ///
    /// Only the expert's own bytes are touched. Safe to call from several threads.
    ///
    /// # Errors
    /// As [`Checkpoint::read_expert`].
    pub fn read_expert_into(
        &self,
        manifest: &LayerManifest,
        expert: ExpertIdx,
        scales: &mut LayerScales,
    ) -> Result<ExpertTensors, CheckpointError> {
        self.reader().expert(self.expert_entries(manifest, expert)?, Some(expert), scales)
    }

    /// Maps all tensors of one routed expert as they are, nothing checked: for who asks how fast files are.
    ///
    /// # Errors
    /// If the layer has no such expert, or a file fails.
    pub fn map_expert(&self, manifest: &LayerManifest, expert: ExpertIdx) -> Result<Vec<TensorBytes>, CheckpointError> {
        let entries = self.expert_entries(manifest, expert)?.iter().flat_map(ProjectionEntries::all);
        entries.map(|idx| self.reader().map(idx, Some(expert))).collect()
    }

    /// Reads the layer's shared expert, where it has one.
    ///
    /// # Errors
    /// As [`Checkpoint::read_expert`].
    pub fn read_shared(&self, manifest: &LayerManifest) -> Result<Option<ExpertTensors>, CheckpointError> {
        let shared = manifest.parts.shared.as_ref();
        shared.map(|entries| self.reader().expert(entries, None, &mut LayerScales::default())).transpose()
    }

    /// Reads the layer's router.
    ///
    /// # Errors
    /// If a file fails, or the bias is not finite.
    pub fn read_router(&self, manifest: &LayerManifest) -> Result<RouterTensors, CheckpointError> {
        let reader = self.reader();
        let bias = manifest.parts.router_bias.map(|bias| reader.floats(bias, None)).transpose()?;
        Ok(RouterTensors { weight: reader.dense(manifest.router_weight())?, bias })
    }

    /// Reads the projections and the norm around the layer's routed experts, where it has them.
    ///
    /// # Errors
    /// If a file fails, or the norm's weight is not finite.
    pub fn read_latent(&self, manifest: &LayerManifest) -> Result<Option<LatentTensors>, CheckpointError> {
        let reader = self.reader();
        let (Some(down), Some(up)) = (manifest.parts.latent_down, manifest.parts.latent_up) else { return Ok(None) };
        let norm = manifest.parts.latent_norm.map(|norm| reader.floats(norm, None)).transpose()?;
        Ok(Some(LatentTensors { down: reader.dense(down)?, up: reader.dense(up)?, norm }))
    }

    /// Tensor bytes mapped or read so far, headers not counted.
    #[must_use]
    pub fn bytes_read(&self) -> BytesRead {
        self.counters.get()
    }

    /// Bytes of one routed expert on disk, all its scales counted.
    ///
    /// # Errors
    /// If the layer has no such expert.
    pub fn expert_bytes(&self, manifest: &LayerManifest, expert: ExpertIdx) -> Result<u64, CheckpointError> {
        Ok(self.bytes_of(self.expert_entries(manifest, expert)?))
    }

    /// Bytes on disk of what every rank reads of a layer: router, shared expert, latent projections.
    #[must_use]
    pub fn replicated_bytes(&self, manifest: &LayerManifest) -> u64 {
        let around: u64 = manifest.parts.around().into_iter().map(|idx| self.table.entry(idx).num_bytes()).sum();
        around + manifest.parts.shared.as_ref().map_or(0, |shared| self.bytes_of(shared))
    }

    fn bytes_of(&self, projections: &[ProjectionEntries; 3]) -> u64 {
        projections.iter().flat_map(ProjectionEntries::all).map(|idx| self.table.entry(idx).num_bytes()).sum()
    }

    fn expert_entries<'a>(
        &self,
        manifest: &'a LayerManifest,
        expert: ExpertIdx,
    ) -> Result<&'a [ProjectionEntries; 3], CheckpointError> {
        manifest.expert_entries.get(expert.index()).ok_or(CheckpointError::NoSuchExpert {
            layer: manifest.layer,
            expert,
            num_experts: manifest.expert_entries.len(),
        })
    }
}
