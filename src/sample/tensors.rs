//! Which tensors a sample holds: names, dtypes and shapes as the model's checkpoints have them, and what is drawn.
//!
//! Pure: made from a [`SampleSpec`] alone.

use super::random::{Content, Stream, nvfp4_sigma};
use super::{Geometry, SampleFormat, SampleSpec};

/// Pre-activations of the experts' FC1, for inputs of deviation 1: where activations differ from each other visibly.
const FC1_SIGMA: f64 = 1.5;
/// Largest input of FC1 that a calibration would see: normal values of deviation 1.
const FC1_INPUT_AMAX: f64 = 5.0;
/// Largest input of FC2: products of two branches of deviation 1.5 stay below.
const FC2_INPUT_AMAX: f64 = 32.0;
/// Scales of experts differ by up to this factor either way, as calibrated ones do.
const SCALE_SPREAD: f64 = 1.2;

/// A tensor of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorPlan {
    /// Its name.
    pub name: String,
    /// Its safetensors dtype.
    pub dtype: Dtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// What it holds.
    pub content: Content,
}

/// The dtypes of a sample, in the order in which a file holds them: larger elements first keeps them aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte.
    F8E4m3,
    /// 1 byte.
    U8,
}

impl Dtype {
    /// The name in a header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F8E4m3 => "F8_E4M3",
            Self::U8 => "U8",
        }
    }

    const fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::F8E4m3 | Self::U8 => 1,
        }
    }
}

impl TensorPlan {
    /// Bytes of its data.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.num_bytes()) as u64
    }

    fn bf16(name: String, shape: [usize; 2], sigma: f64) -> Self {
        Self { name, dtype: Dtype::Bf16, shape: shape.to_vec(), content: Content::Bf16 { mean: 0.0, sigma } }
    }

    fn scalar(name: String, value: f64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "scales are f32 in the file")]
        let value = value as f32;
        Self { name, dtype: Dtype::F32, shape: Vec::new(), content: Content::Scalar(value) }
    }
}

/// A projection to be planned.
struct Linear {
    name: String,
    out_features: usize,
    in_features: usize,
    /// Deviation of its outputs, for inputs of deviation 1.
    sigma: f64,
    input_scale: f64,
}

/// Names of the three projections of a routed expert, gate first.
fn expert_projections(geometry: Geometry) -> [&'static str; 3] {
    match geometry {
        Geometry::KimiK3 => ["w1", "w3", "w2"],
        Geometry::DeepseekV3 | Geometry::Qwen3 => ["gate_proj", "up_proj", "down_proj"],
    }
}

/// The MoE block's name in layer `layer`.
#[must_use]
pub fn block_name(geometry: Geometry, layer: usize) -> String {
    match geometry {
        Geometry::KimiK3 => format!("language_model.model.layers.{layer}.block_sparse_moe"),
        Geometry::DeepseekV3 | Geometry::Qwen3 => format!("model.layers.{layer}.mlp"),
    }
}

/// The tensors of a sample in units that stay in one file: the parts every rank holds, then expert by expert.
pub fn units(spec: &SampleSpec) -> impl Iterator<Item = Vec<TensorPlan>> + '_ {
    spec.layers().flat_map(move |layer| {
        let block = block_name(spec.geometry, layer);
        let replicated = replicated(spec, &block);
        let experts = (0..spec.num_experts).map(move |expert| {
            let name = format!("{block}.experts.{expert}");
            expert_tensors(spec, &name, spec.latent.unwrap_or(spec.hidden), spec.intermediate)
        });
        std::iter::once(replicated).chain(experts)
    })
}

fn replicated(spec: &SampleSpec, block: &str) -> Vec<TensorPlan> {
    let (hidden, num_experts) = (spec.hidden, spec.num_experts);
    let mut tensors = vec![TensorPlan::bf16(format!("{block}.gate.weight"), [num_experts, hidden], unit(hidden))];
    let bias = format!("{block}.gate.e_score_correction_bias");
    match spec.geometry {
        Geometry::KimiK3 => tensors.push(TensorPlan {
            name: bias,
            dtype: Dtype::F32,
            shape: vec![num_experts],
            content: Content::F32 { sigma: 0.05 },
        }),
        Geometry::DeepseekV3 => tensors.push(TensorPlan {
            name: bias,
            dtype: Dtype::Bf16,
            shape: vec![num_experts],
            content: Content::Bf16 { mean: 0.0, sigma: 0.05 },
        }),
        Geometry::Qwen3 => {}
    }
    if let Some(latent) = spec.latent {
        let down = format!("{block}.routed_expert_down_proj.weight");
        let up = format!("{block}.routed_expert_up_proj.weight");
        tensors.push(TensorPlan::bf16(down, [latent, hidden], unit(hidden)));
        tensors.push(TensorPlan::bf16(up, [hidden, latent], unit(latent)));
        tensors.push(TensorPlan {
            name: format!("{block}.routed_expert_norm.weight"),
            dtype: Dtype::Bf16,
            shape: vec![latent],
            content: Content::Bf16 { mean: 1.0, sigma: 0.1 },
        });
    }
    let num_shared = spec.geometry.preset().num_shared;
    if num_shared > 0 {
        let name = format!("{block}.shared_experts");
        let intermediate = num_shared * spec.intermediate;
        for linear in linears(&name, ["gate_proj", "up_proj", "down_proj"], hidden, intermediate, (1.0, 1.0)) {
            // Kimi K3's release keeps the shared experts in bf16.
            let is_quantised = spec.format == SampleFormat::Nvfp4 && spec.geometry != Geometry::KimiK3;
            push(&mut tensors, linear, is_quantised, spec.seed);
        }
    }
    tensors
}

fn expert_tensors(spec: &SampleSpec, name: &str, hidden: usize, intermediate: usize) -> Vec<TensorPlan> {
    let names = expert_projections(spec.geometry);
    // Gate and up read the same rows, so a calibration gives them the same scale.
    let spread = |of: &str| Stream::new(spec.seed, &format!("{name}.{of}")).factor(SCALE_SPREAD);
    let input_factors = (spread("fc1_input"), spread("fc2_input"));
    let mut tensors = Vec::with_capacity(12);
    for mut linear in linears(name, names, hidden, intermediate, input_factors) {
        if spec.geometry == Geometry::KimiK3 {
            // As in all of the NVFP4 release.
            linear.input_scale = 1.0;
        }
        push(&mut tensors, linear, spec.format == SampleFormat::Nvfp4, spec.seed);
    }
    tensors
}

fn linears(
    name: &str,
    projections: [&str; 3],
    hidden: usize,
    intermediate: usize,
    input_factors: (f64, f64),
) -> [Linear; 3] {
    let fc1_scale = FC1_INPUT_AMAX * input_factors.0 / super::random::LARGEST_VALUE;
    let fc2_scale = FC2_INPUT_AMAX * input_factors.1 / super::random::LARGEST_VALUE;
    let linear = |projection: &str, out_features, in_features, sigma, input_scale| Linear {
        name: format!("{name}.{projection}"),
        out_features,
        in_features,
        sigma,
        input_scale,
    };
    [
        linear(projections[0], intermediate, hidden, FC1_SIGMA, fc1_scale),
        linear(projections[1], intermediate, hidden, FC1_SIGMA, fc1_scale),
        linear(projections[2], hidden, intermediate, 1.0, fc2_scale),
    ]
}

/// The deviation of weights that keep a deviation of 1 over `in_features` inputs.
fn unit(in_features: usize) -> f64 {
    1.0 / libm::sqrt(in_features as f64)
}

fn push(tensors: &mut Vec<TensorPlan>, linear: Linear, is_quantised: bool, seed: u64) {
    let Linear { name, out_features, in_features, sigma, input_scale } = linear;
    let sigma = sigma * unit(in_features);
    if !is_quantised {
        tensors.push(TensorPlan::bf16(format!("{name}.weight"), [out_features, in_features], sigma));
        return;
    }
    let global_scale = sigma / nvfp4_sigma() * Stream::new(seed, &name).factor(SCALE_SPREAD);
    tensors.push(TensorPlan {
        name: format!("{name}.weight"),
        dtype: Dtype::U8,
        shape: vec![out_features, in_features / 2],
        content: Content::Codes,
    });
    tensors.push(TensorPlan {
        name: format!("{name}.weight_scale"),
        dtype: Dtype::F8E4m3,
        shape: vec![out_features, in_features / 16],
        content: Content::BlockScales,
    });
    tensors.push(TensorPlan::scalar(format!("{name}.weight_scale_2"), global_scale));
    tensors.push(TensorPlan::scalar(format!("{name}.input_scale"), input_scale));
}
