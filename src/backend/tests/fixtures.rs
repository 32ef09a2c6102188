//! Experts written by ModelOpt, against layers computed outside this project in f64.

use std::sync::Arc;

use super::super::{Backend, ExpertsSpec};
use super::{Case, ExpertTensors, Projection, ProjectionData, SITU, isas, owned, reference, simd};
use crate::numerics::activation::Activation;
use crate::numerics::fixtures::Tensors;
use crate::numerics::metrics::compare;
use crate::numerics::nvfp4::quantise_unscaled;

/// A layer of a checkpoint: its shards, the prefix of its experts, and the expected values.
struct Layer {
    name: &'static str,
    shards: Vec<Tensors<'static>>,
    prefix: &'static str,
    num_experts: usize,
    expected: Tensors<'static>,
}

macro_rules! fixture {
    ($path:literal) => {
        Tensors::new(include_bytes!(concat!("../../../tests/fixtures/", $path)))
    };
}

fn layers() -> Vec<Layer> {
    let mixed = || {
        vec![
            fixture!("modelopt-dsv3-mixed/model-00001-of-00002.safetensors"),
            fixture!("modelopt-dsv3-mixed/model-00002-of-00002.safetensors"),
        ]
    };
    let qwen3 = || vec![fixture!("modelopt-qwen3-tiny/model.safetensors")];
    vec![
        Layer {
            name: "qwen3, layer 0",
            shards: qwen3(),
            prefix: "model.layers.0.mlp.experts",
            num_experts: 8,
            expected: fixture!("expected/modelopt-qwen3-tiny.layer0.safetensors"),
        },
        Layer {
            name: "qwen3, layer 1",
            shards: qwen3(),
            prefix: "model.layers.1.mlp.experts",
            num_experts: 8,
            expected: fixture!("expected/modelopt-qwen3-tiny.layer1.safetensors"),
        },
        Layer {
            name: "dsv3 mixed, layer 1",
            shards: mixed(),
            prefix: "model.layers.1.mlp.experts",
            num_experts: 16,
            expected: fixture!("expected/modelopt-dsv3-mixed.layer1.safetensors"),
        },
        Layer {
            name: "dsv3 mixed, layer 2",
            shards: mixed(),
            prefix: "model.layers.2.mlp.experts",
            num_experts: 16,
            expected: fixture!("expected/modelopt-dsv3-mixed.layer2.safetensors"),
        },
    ]
}

impl Layer {
    fn shard(&self, tensor: &str) -> &Tensors<'static> {
        self.shards.iter().find(|shard| shard.has(tensor)).unwrap_or_else(|| panic!("{tensor} is in no shard"))
    }

    fn projection(&self, expert: usize, projection: &str) -> Projection {
        let name = |part: &str| format!("{}.{expert}.{projection}_proj.{part}", self.prefix);
        let bytes = |part: &str| self.shard(&name(part)).bytes(&name(part));
        let scalar = |part: &str| self.shard(&name(part)).f32(&name(part))[0];
        let shape = self.shard(&name("weight")).shape(&name("weight"));
        Projection {
            out_features: shape[0],
            in_features: shape[1] * 2,
            data: ProjectionData::Nvfp4 {
                packed: owned(bytes("weight")),
                block_scales: owned(bytes("weight_scale")),
                global_scale: scalar("weight_scale_2"),
                input_scale: Some(scalar("input_scale")),
            },
        }
    }

    /// The rows of all tokens, by expert, and the token and weight of each.
    fn case(&self, activation: Activation, quantise_activations: bool) -> (Case, Vec<f32>) {
        let experts: Vec<ExpertTensors> = (0..self.num_experts)
            .map(|expert| ExpertTensors {
                gate: self.projection(expert, "gate"),
                up: self.projection(expert, "up"),
                down: self.projection(expert, "down"),
            })
            .collect();
        let spec = ExpertsSpec {
            hidden: experts[0].gate.in_features,
            intermediate: experts[0].gate.out_features,
            activation,
            quantise_activations,
            batch_invariant: true,
        };
        let mut tokens = self.expected.bf16("x");
        let mut token_scale = 1.0;
        if quantise_activations {
            let scales = experts.iter().flat_map(|expert| [&expert.gate, &expert.up]);
            token_scale = scales.filter_map(|p| super::oracle::scales(p).1).fold(0.0, f32::max);
            let values = tokens.clone();
            quantise_unscaled(&values, token_scale, &mut tokens);
        }
        let topk_idx = self.expected.i32("topk_idx");
        let topk_weights = self.expected.f32("topk_weights");
        let num_topk = topk_idx.len() / (tokens.len() / spec.hidden);
        let (mut row_token, mut weights, mut expert_offsets) = (Vec::new(), Vec::new(), vec![0]);
        for expert in 0..self.num_experts {
            for (slot, (idx, weight)) in topk_idx.iter().zip(&topk_weights).enumerate() {
                if usize::try_from(*idx) == Ok(expert) {
                    row_token.push((slot / num_topk) as u32);
                    weights.push(*weight);
                }
            }
            expert_offsets.push(row_token.len());
        }
        (Case { spec, experts, tokens, token_scale, row_token, expert_offsets }, weights)
    }

    /// `bounds`: relative L2 with unquantised activations, and with quantised ones.
    fn check(&self, backend: &Arc<dyn Backend>, what: &str, bounds: (f64, f64)) {
        for (quantise, activation, name) in [
            (false, SITU, "routed.w4a16.situ"),
            (false, Activation::Swiglu, "routed.w4a16.swiglu"),
            (true, SITU, "routed.w4a4.situ"),
            (true, Activation::Swiglu, "routed.w4a4.swiglu"),
        ] {
            let (case, weights) = self.case(activation, quantise);
            let (rows, _) = case.run(backend);
            let width = case.spec.hidden;
            let mut sums = vec![0.0_f32; case.tokens.len()];
            for ((row, token), weight) in rows.chunks(width).zip(&case.row_token).zip(&weights) {
                for (sum, value) in sums[*token as usize * width..].iter_mut().zip(row) {
                    *sum += weight * value;
                }
            }
            let expected = self.expected.f32(name);
            let found = compare(&sums, &expected);
            let at = found.max_abs_at;
            assert!(
                found.within(if quantise { bounds.1 } else { bounds.0 }),
                "{}, {name}, {what}: {:.2e} off; token {}, column {} is {}, expected {}",
                self.name,
                found.rel_l2,
                at / width,
                at % width,
                sums[at],
                expected[at]
            );
        }
    }
}

/// For GPUs, which round to bf16 what CPUs keep in f32.
pub(super) fn check_on_gpu(backend: &Arc<dyn Backend>) {
    for layer in layers() {
        layer.check(backend, backend.technique(), (4e-3, 1e-2));
    }
}

#[test]
fn modelopt_layers_are_met_by_reference() {
    for layer in layers() {
        layer.check(&reference(), "reference", (1e-5, 1e-5));
    }
}

#[test]
fn modelopt_layers_are_met_by_simd() {
    for layer in layers() {
        for isa in isas() {
            layer.check(&simd(2, isa), isa.name(), (1e-5, 1e-5));
        }
    }
}
