//! Case D5: modules kept in bf16, exclusions with wildcards, and prefixes that move.

use super::super::testing::{Sample, Size, load_all};
use super::super::{Checkpoint, ExpertFormat, LayerManifest, ModuleCounts, Warning};
use crate::ids::LayerIdx;

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// `layers` MoE layers under `prefix`, the experts of layer 1 in bf16 with the same values.
fn sample(layers: usize, prefix: &str) -> Sample {
    let mut sample = Sample::of(Size { layers, experts: 4, hidden: 64, intermediate: 32 }, prefix);
    for expert in 0..4 {
        for name in PROJECTIONS {
            sample.make_bf16(&format!("{prefix}layers.1.mlp.experts.{expert}.{name}"));
        }
    }
    sample
}

#[track_caller]
fn layers(sample: &Sample) -> (Checkpoint, Vec<LayerManifest>) {
    load_all(sample.write().path()).unwrap_or_else(|error| panic!("{}", super::super::testing::chain(&error)))
}

#[track_caller]
fn only_layer_1_is_bf16(sample: &Sample) {
    let (checkpoint, manifests) = layers(sample);
    for manifest in manifests {
        let is_bf16 = manifest.layer == LayerIdx(1);
        let wanted = if is_bf16 { ExpertFormat::Bf16 } else { ExpertFormat::Nvfp4 };
        assert_eq!(manifest.experts, [wanted; 4], "{}", manifest.layer);
        assert_eq!(
            (manifest.quantise_activations, manifest.has_input_scales),
            (!is_bf16, !is_bf16),
            "{}",
            manifest.layer
        );
        assert_eq!(manifest.warnings, [], "{}", manifest.layer);
    }
    assert_eq!(checkpoint.warnings(), []);
}

#[test]
fn case_d5_i_a_glob_on_the_experts() {
    let mut sample = sample(2, "model.");
    sample.exclude("model.layers.1.mlp.experts*");
    only_layer_1_is_bf16(&sample);
}

#[test]
fn case_d5_ii_a_glob_on_both_sides() {
    for prefix in ["model.", "model.language_model.", ""] {
        let mut sample = sample(2, prefix);
        sample.exclude("*.layers.1.*");
        only_layer_1_is_bf16(&sample);
    }
}

#[test]
fn case_d5_iii_another_prefix_than_the_tensors() {
    for prefix in ["model.language_model.", "language_model.model.", "model.", ""] {
        for excluded in ["language_model.model.", "model.language_model.", "model.", ""] {
            let mut sample = sample(2, prefix);
            sample.exclude(&format!("{excluded}layers.1.mlp.experts"));
            only_layer_1_is_bf16(&sample);
        }
    }
}

#[test]
fn case_d5_iv_layer_1_is_not_layer_10() {
    let mut sample = sample(11, "model.");
    sample.exclude("model.layers.1");
    only_layer_1_is_bf16(&sample);
}

#[test]
fn case_d5_v_one_expert_in_bf16() {
    let mut sample = Sample::of(Size { layers: 2, experts: 4, hidden: 64, intermediate: 32 }, "model.");
    for name in PROJECTIONS {
        sample.make_bf16(&format!("model.layers.1.mlp.experts.2.{name}"));
    }
    sample.exclude("model.layers.1.mlp.experts.2");
    let (checkpoint, manifests) = layers(&sample);
    use ExpertFormat::{Bf16, Nvfp4};
    assert_eq!(manifests[0].experts, [Nvfp4; 4]);
    assert_eq!(manifests[1].experts, [Nvfp4, Nvfp4, Bf16, Nvfp4]);
    assert!(manifests[0].quantise_activations && !manifests[1].quantise_activations);
    assert!(manifests[1].has_input_scales);
    assert_eq!(manifests[1].warnings, []);
    // 3 of the expert and 2 routers; 8 experts less that one.
    assert_eq!(checkpoint.module_counts(), ModuleCounts { nvfp4: 21, bf16: 5, other: 0 });
}

#[test]
fn case_d5_a_pattern_that_matches_nothing_is_reported() {
    let mut sample = sample(2, "model.");
    for pattern in ["model.layers.1.mlp.experts*", "model.layers.7", "*.vision*", "lm_head", "re:.*gate"] {
        sample.exclude(pattern);
    }
    let (checkpoint, _) = layers(&sample);
    let unmatched =
        Warning::UnmatchedPatterns { patterns: ["model.layers.7", "*.vision*", "lm_head"].map(str::to_owned).to_vec() };
    let [Warning::Model(regex), second] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!(*second, unmatched);
    assert!(regex.to_string().contains("re:.*gate"));
}

#[test]
fn an_excluded_module_that_is_packed_stays_packed_and_is_reported() {
    let mut sample = sample(2, "model.");
    sample.exclude("model.layers.*.mlp.experts");
    let (_, manifests) = layers(&sample);
    assert_eq!(manifests[0].experts, [ExpertFormat::Nvfp4; 4]);
    assert!(!manifests[0].quantise_activations, "an excluded layer's algorithm is not NVFP4");
    let [Warning::ExcludedButQuantised { count: 12, first, pattern }] = &manifests[0].warnings[..] else {
        panic!("{:?}", manifests[0].warnings)
    };
    assert_eq!(
        (first.as_str(), pattern.as_str()),
        ("model.layers.0.mlp.experts.0.gate_proj", "model.layers.*.mlp.experts")
    );
}

#[test]
fn an_unquantised_model_has_no_scales() {
    let mut sample = Sample::of(Size { layers: 1, experts: 2, hidden: 24, intermediate: 40 }, "model.");
    sample.remove(".experts.");
    for expert in 0..2 {
        for (name, shape) in [("gate_proj", [40, 24]), ("up_proj", [40, 24]), ("down_proj", [24, 40])] {
            let weight = super::super::testing::Tensor::bf16(&shape, 0.5);
            sample.tensors.insert(format!("model.layers.0.mlp.experts.{expert}.{name}.weight"), weight);
        }
    }
    sample.quant = None;
    let (checkpoint, manifests) = layers(&sample);
    assert_eq!(manifests[0].experts, [ExpertFormat::Bf16; 2]);
    assert!(!manifests[0].quantise_activations && manifests[0].warnings.is_empty());
    assert!(!checkpoint.model().quantisation.is_quantised());
}
