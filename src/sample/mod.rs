//! Checkpoints made up to a model's layout: its names, shapes, formats and config files, with random weights.
//!
//! Holds the MoE blocks only; attention, embeddings and dense layers are nobody's business here. Knows no ranks and
//! prints nothing.

mod configs;
mod error;
pub mod presets;
mod random;
mod shards;
mod tensors;

#[cfg(test)]
mod tests;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::checkpoint::{self, Unfinished};
use crate::ids::LayerIdx;
use crate::model::{ConfigTexts, CorrectionBias, ModelDescription, ModelError};
use crate::select::{LayerFacts, SharedFacts};

pub use error::SampleError;
pub use presets::Geometry;
use random::Content;
use tensors::{Dtype, TensorPlan};

/// Data of a shard, at least; the tensors of an expert stay in one file.
const SHARD_BYTES: u64 = 1 << 30;

/// How the experts' weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SampleFormat {
    /// As ModelOpt stores NVFP4.
    Nvfp4,
    /// Unquantised.
    Bf16,
}

/// What a sample is to be.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleSpec {
    /// Whose layout.
    pub geometry: Geometry,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the routed experts' latent, where the model has one.
    pub latent: Option<usize>,
    /// Width between FC1 and FC2 of one expert.
    pub intermediate: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Slots a token.
    pub num_topk: usize,
    /// Routing groups.
    pub num_groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// MoE layers; they follow the model's dense ones.
    pub num_layers: usize,
    /// Rows of the input.
    pub num_tokens: usize,
    /// What the random contents are drawn from.
    pub seed: u64,
    /// How the experts' weights are stored.
    pub format: SampleFormat,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Bytes of tensor data, the input's included.
    pub num_bytes: u64,
    /// Tensors of the checkpoint.
    pub num_tensors: usize,
    /// Files that hold them.
    pub num_shards: usize,
}

/// A sample that has been checked and laid out in files.
#[derive(Debug)]
pub struct Plan {
    spec: SampleSpec,
    shards: Vec<Vec<TensorPlan>>,
    inputs: TensorPlan,
}

impl SampleSpec {
    /// One MoE layer of the published sizes, 64 tokens, seed 0, NVFP4.
    #[must_use]
    pub fn of(geometry: Geometry) -> Self {
        let preset = geometry.preset();
        Self {
            geometry,
            hidden: preset.hidden,
            latent: preset.latent,
            intermediate: preset.intermediate,
            num_experts: preset.num_experts,
            num_topk: preset.num_topk,
            num_groups: preset.num_groups,
            topk_group: preset.topk_group,
            num_layers: 1,
            num_tokens: 64,
            seed: 0,
            format: SampleFormat::Nvfp4,
        }
    }

    /// The numbers of the MoE layers.
    #[must_use]
    pub fn layers(&self) -> Range<usize> {
        let first = self.geometry.preset().num_dense;
        first..first + self.num_layers
    }

    /// The model that the sample's config files describe.
    ///
    /// # Errors
    /// If the sizes are no model's.
    pub fn model(&self) -> Result<ModelDescription, ModelError> {
        let config = configs::config(self).to_string();
        let hf_quant_config = configs::quant_config(self).map(|config| config.to_string());
        let texts = ConfigTexts { config: &config, hf_quant_config: hf_quant_config.as_deref() };
        let bias = if self.geometry == Geometry::Qwen3 { CorrectionBias::Absent } else { CorrectionBias::Present };
        ModelDescription::from_texts(texts, bias)
    }

    /// What the headers of the sample say of its first layer, without writing it.
    #[must_use]
    pub fn layer_facts(&self) -> LayerFacts {
        let is_nvfp4 = self.format == SampleFormat::Nvfp4;
        let of_shared = |is_nvfp4| SharedFacts { is_nvfp4, has_input_scales: is_nvfp4, wants_quantised: is_nvfp4 };
        LayerFacts {
            layer: LayerIdx(u32::try_from(self.layers().start).unwrap_or_default()),
            num_nvfp4: if is_nvfp4 { self.num_experts } else { 0 },
            num_bf16: if is_nvfp4 { 0 } else { self.num_experts },
            has_input_scales: is_nvfp4,
            wants_quantised: is_nvfp4,
            shared: match self.geometry {
                // Its quantisation config leaves the shared experts out.
                Geometry::KimiK3 => Some(of_shared(false)),
                Geometry::DeepseekV3 => Some(of_shared(is_nvfp4)),
                Geometry::Qwen3 => None,
            },
        }
    }

    /// Shrinks the routing groups to what the number of experts allows: groups divide the experts and hold two at
    /// least, and the groups kept hold the top-k.
    pub fn fit_groups(&mut self) {
        let allowed = |groups: &usize| self.num_experts.is_multiple_of(*groups) && self.num_experts / groups >= 2;
        let num_groups = (1..=self.num_groups).rev().find(allowed).unwrap_or(1);
        let in_proportion = (num_groups * self.topk_group).div_ceil(self.num_groups);
        let for_topk = self.num_topk.div_ceil(self.num_experts / num_groups);
        self.topk_group = in_proportion.max(for_topk).min(num_groups);
        self.num_groups = num_groups;
    }

    fn check(&self) -> Result<(), SampleError> {
        let sizes = [
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("latent", self.latent.unwrap_or(16)),
            ("experts", self.num_experts),
            ("topk", self.num_topk),
            ("layers", self.num_layers),
        ];
        for (name, size) in sizes {
            if size == 0 {
                return Err(SampleError::Zero { name });
            }
        }
        for (name, size) in &sizes[..3] {
            if self.format == SampleFormat::Nvfp4 && !size.is_multiple_of(16) {
                return Err(SampleError::NotBlocks { name, size: *size, nearest: size.next_multiple_of(16) });
            }
        }
        if self.num_topk > self.num_experts {
            return Err(SampleError::TopK { num_topk: self.num_topk, num_experts: self.num_experts });
        }
        if self.latent.is_some() != self.geometry.preset().latent.is_some() {
            return Err(SampleError::NoLatent { geometry: self.geometry.name() });
        }
        Ok(())
    }

    /// Checks the sizes and lays the tensors out in files.
    ///
    /// # Errors
    /// If the sizes are no model's.
    pub fn plan(self) -> Result<Plan, SampleError> {
        self.check()?;
        let mut shards: Vec<Vec<TensorPlan>> = vec![Vec::new()];
        let mut filled = 0;
        for unit in tensors::units(&self) {
            if filled >= SHARD_BYTES {
                shards.push(Vec::new());
                filled = 0;
            }
            filled += unit.iter().map(TensorPlan::num_bytes).sum::<u64>();
            if let Some(shard) = shards.last_mut() {
                shard.extend(unit);
            }
        }
        let inputs = TensorPlan {
            name: "hidden".to_owned(),
            dtype: Dtype::Bf16,
            shape: vec![self.num_tokens, self.hidden],
            content: Content::Bf16 { mean: 0.0, sigma: 1.0 },
        };
        let shards = shards.into_iter().map(shards::in_file_order).collect();
        Ok(Plan { spec: self, shards, inputs })
    }
}

impl Plan {
    /// Bytes of tensor data that will be written.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.shards.iter().flatten().chain([&self.inputs]).map(TensorPlan::num_bytes).sum()
    }

    /// Writes the sample: into a temporary directory beside `dir`, renamed to `dir` when it is whole. Calls `written`
    /// with the bytes of each part.
    ///
    /// # Errors
    /// If `dir` exists and is not an empty directory, or something cannot be written; then nothing is left.
    pub fn write(&self, dir: &Path, written: &(dyn Fn(u64) + Sync)) -> Result<Written, SampleError> {
        refuse_existing(dir)?;
        let parent = match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        fs::create_dir_all(&parent).map_err(|source| self.failed(&parent, source))?;
        // Inside, because the temporary directory itself is nobody else's to read.
        let create = || tempfile::Builder::new().prefix(".lockstep-sample-").tempdir_in(&parent);
        let (temporary, _unfinished) =
            Unfinished::create(create, |dir| dir.path()).map_err(|source| self.failed(&parent, source))?;
        let building = temporary.path().join("sample");
        fs::create_dir(&building).map_err(|source| self.failed(&building, source))?;
        self.write_into(&building, written).map_err(|error| error.with_total(self.num_bytes()))?;
        fs::rename(&building, dir).map_err(|source| self.failed(dir, source))?;
        let num_tensors = self.shards.iter().map(Vec::len).sum();
        Ok(Written { num_bytes: self.num_bytes(), num_tensors, num_shards: self.shards.len() })
    }

    fn failed(&self, path: &Path, source: std::io::Error) -> SampleError {
        SampleError::of_write(path, source).with_total(self.num_bytes())
    }

    fn write_into(&self, dir: &Path, written: &(dyn Fn(u64) + Sync)) -> Result<(), SampleError> {
        let mut weight_map = serde_json::Map::new();
        for (idx, shard) in self.shards.iter().enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", idx + 1, self.shards.len());
            shards::write(&dir.join(&file), shard, self.spec.seed, written)?;
            weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(file.clone()))));
        }
        let inputs = std::slice::from_ref(&self.inputs);
        shards::write(&dir.join(checkpoint::INPUTS), inputs, self.spec.seed, written)?;
        let total_size: u64 = self.shards.iter().flatten().map(TensorPlan::num_bytes).sum();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        let mut texts = vec![("model.safetensors.index.json", index), ("config.json", configs::config(&self.spec))];
        texts.extend(configs::quant_config(&self.spec).map(|config| ("hf_quant_config.json", config)));
        for (file, text) in texts {
            let path = dir.join(file);
            fs::write(&path, format!("{text:#}\n")).map_err(|source| SampleError::of_write(&path, source))?;
        }
        Ok(())
    }
}

/// An empty directory may be there already; anything else is somebody's.
fn refuse_existing(dir: &Path) -> Result<(), SampleError> {
    match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(SampleError::NotEmpty { dir: dir.into() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(SampleError::of_write(dir, source)),
    }
}
