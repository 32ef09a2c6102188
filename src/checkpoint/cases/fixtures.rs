//! The four checkpoints of the fixtures; the figures were computed from their bytes by a separate script.

use std::path::{Path, PathBuf};

use super::super::tensors::ProjectionData;
use super::super::testing::chain;
use super::super::{BytesRead, Checkpoint, ExpertFormat, LayerScales, ModuleCounts, ProjectionKind, Warning, scan};
use crate::ids::{ExpertIdx, LayerIdx};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Of one kind of projection: scale count, smallest, largest, saturated; bits of the global scales' range and of the inputs'.
type Figures = (u64, f32, f32, u64, [u32; 2], [u32; 2]);

struct Layer {
    layer: u32,
    experts: usize,
    expert_bytes: u64,
    replicated_bytes: u64,
    pairs_differing: u64,
    projections: [Figures; 3],
}

#[track_caller]
fn check(name: &str, modules: ModuleCounts, layers: &[Layer]) {
    let checkpoint = Checkpoint::open(&fixture(name)).unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(checkpoint.module_counts(), modules);
    assert_eq!(checkpoint.moe_layers(), layers.iter().map(|layer| LayerIdx(layer.layer)).collect::<Vec<_>>());
    let mut total = BytesRead::default();
    for wanted in layers {
        let manifest = checkpoint.layer(LayerIdx(wanted.layer)).unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(manifest.experts, vec![ExpertFormat::Nvfp4; wanted.experts]);
        assert!(manifest.quantise_activations && manifest.has_input_scales);
        assert_eq!(manifest.warnings, []);
        let mut scales = LayerScales::default();
        for expert in 0..wanted.experts {
            checkpoint.read_expert_into(&manifest, ExpertIdx::from_index(expert), &mut scales).unwrap();
        }
        checkpoint.read_router(&manifest).unwrap();
        checkpoint.read_shared(&manifest).unwrap();
        checkpoint.read_latent(&manifest).unwrap();
        total.experts += wanted.expert_bytes;
        total.replicated += wanted.replicated_bytes;
        check_scales(&scales, wanted);
    }
    assert_eq!(checkpoint.bytes_read(), total);
    check_scan(name, modules, layers);
}

#[track_caller]
fn check_scales(scales: &LayerScales, wanted: &Layer) {
    for (kind, figures) in ProjectionKind::ALL.into_iter().zip(&wanted.projections) {
        let &(count, smallest, largest, num_saturated, [global_least, global_most], [input_least, input_most]) =
            figures;
        let found = scales.of(kind);
        let place = format!("layer {} {}", wanted.layer, kind.name());
        assert_eq!(
            (found.blocks.count, found.blocks.num_saturated, found.blocks.num_zero),
            (count, num_saturated, 0),
            "{place}"
        );
        assert_eq!((found.blocks.smallest, found.blocks.largest), (smallest, largest), "{place}");
        assert!(!found.blocks.powers_of_two, "{place}");
        let global = [found.global.smallest.to_bits(), found.global.largest.to_bits()];
        assert_eq!(global, [global_least, global_most], "{place}");
        assert_eq!(
            [found.input.smallest.to_bits(), found.input.largest.to_bits()],
            [input_least, input_most],
            "{place}"
        );
        assert_eq!((found.global.count, found.input.count), (wanted.experts as u64, wanted.experts as u64), "{place}");
    }
    assert_eq!((scales.num_pairs, scales.num_pairs_differing), (wanted.experts as u64, wanted.pairs_differing));
    assert_eq!(scales.warning(), None);
}

/// The examination that goes on past faults finds the same, and no fault.
#[track_caller]
fn check_scan(name: &str, modules: ModuleCounts, layers: &[Layer]) {
    let mut last = (0, 0);
    let scan = scan(&fixture(name), &mut |done, total| last = (done, total)).unwrap();
    assert!(scan.problems.is_empty(), "{:?}", scan.problems);
    assert_eq!(scan.modules, modules);
    let total: usize = layers.iter().map(|layer| layer.experts).sum();
    assert_eq!(last, (total as u64, total as u64));
    for (found, wanted) in scan.layers.iter().zip(layers) {
        check_scales(&found.scales, wanted);
        assert_eq!((found.num_nvfp4, found.num_bf16, found.num_faulty), (wanted.experts, 0, 0));
        assert_eq!((found.expert_bytes, found.replicated_bytes), (wanted.expert_bytes, wanted.replicated_bytes));
    }
    assert_eq!(scan.layers.len(), layers.len());
}

#[test]
fn k3_tiny() {
    let layer = |layer, projections| Layer {
        layer,
        experts: 24,
        expert_bytes: 498_240,
        replicated_bytes: 438_624,
        pairs_differing: 24,
        projections,
    };
    let ones = [0x3F80_0000; 2];
    let layers = [
        layer(
            1,
            [
                (18_432, 64.0, 448.0, 44, [0x390E_CCD3, 0x3930_D436], ones),
                (18_432, 72.0, 448.0, 38, [0x3911_C560, 0x3978_A5F8], ones),
                (18_432, 72.0, 448.0, 46, [0x390C_01EA, 0x3937_7AD9], ones),
            ],
        ),
        layer(
            2,
            [
                (18_432, 72.0, 448.0, 50, [0x3908_6735, 0x3949_7B5D], ones),
                (18_432, 72.0, 448.0, 39, [0x3927_B04B, 0x3970_C91D], ones),
                (18_432, 88.0, 448.0, 43, [0x390B_FEF9, 0x392F_2C0C], ones),
            ],
        ),
    ];
    check("k3-tiny", ModuleCounts { nvfp4: 144, bf16: 12, other: 0 }, &layers);

    let checkpoint = Checkpoint::open(&fixture("k3-tiny")).unwrap();
    assert_eq!(checkpoint.warnings(), [Warning::UnmatchedPatterns { patterns: vec!["lm_head".to_owned()] }]);
    let manifest = checkpoint.layer(LayerIdx(2)).unwrap();
    assert_eq!(manifest.block, "language_model.model.layers.2.block_sparse_moe");
    assert_eq!((manifest.shared, manifest.quantise_shared), (Some(ExpertFormat::Bf16), false));
    let latent = checkpoint.read_latent(&manifest).unwrap().unwrap();
    assert_eq!((latent.down.out_features, latent.down.in_features), (128, 256));
    assert_eq!((latent.up.out_features, latent.up.in_features), (256, 128));
    assert_eq!(latent.norm.unwrap().len(), 128);
    let router = checkpoint.read_router(&manifest).unwrap();
    assert_eq!((router.weight.out_features, router.weight.in_features, router.bias.unwrap().len()), (24, 256, 24));
    let shared = checkpoint.read_shared(&manifest).unwrap().unwrap();
    assert_eq!((shared.gate.out_features, shared.gate.in_features), (192, 256));
}

#[test]
fn modelopt_dsv3_tiny() {
    let layer = |layer, projections| Layer {
        layer,
        experts: 16,
        expert_bytes: 885_120,
        replicated_bytes: 63_544,
        pairs_differing: 0,
        projections,
    };
    let (fc1, fc2) = ([0x3AD5_5555; 2], [0x3B4A_AAAB; 2]);
    let (later_fc1, later_fc2) = ([0x3ACC_30C3; 2], [0x3B82_4925; 2]);
    let layers = [
        layer(
            1,
            [
                (32_768, 64.0, 448.0, 18, [0x38C1_8618, 0x38E1_8618], fc1),
                (32_768, 64.0, 448.0, 16, [0x38C1_8618, 0x38E1_8618], fc1),
                (32_768, 72.0, 448.0, 24, [0x38B0_0000, 0x38D8_6186], fc2),
            ],
        ),
        layer(
            2,
            [
                (32_768, 72.0, 448.0, 15, [0x38BE_79E8, 0x38E3_0C31], later_fc1),
                (32_768, 64.0, 448.0, 14, [0x38BE_79E8, 0x38E3_0C31], later_fc1),
                (32_768, 72.0, 448.0, 33, [0x38B3_0C31, 0x38D9_E79E], later_fc2),
            ],
        ),
    ];
    check("modelopt-dsv3-tiny", ModuleCounts { nvfp4: 120, bf16: 4, other: 0 }, &layers);
    let checkpoint = Checkpoint::open(&fixture("modelopt-dsv3-tiny")).unwrap();
    assert_eq!(checkpoint.warnings(), []);
    let manifest = checkpoint.layer(LayerIdx(1)).unwrap();
    assert_eq!((manifest.shared, manifest.quantise_shared), (Some(ExpertFormat::Nvfp4), true));
    assert_eq!(checkpoint.read_router(&manifest).unwrap().bias.unwrap().len(), 16);
}

#[test]
fn modelopt_dsv3_mixed() {
    let layer = |layer, projections| Layer {
        layer,
        experts: 16,
        expert_bytes: 885_120,
        replicated_bytes: 63_544,
        pairs_differing: 10,
        projections,
    };
    let layers = [
        layer(
            1,
            [
                (32_768, 64.0, 448.0, 18, [0x38C1_8618, 0x38E1_8618], [0x3AD5_5555, 0x3BD5_5555]),
                (32_768, 64.0, 448.0, 16, [0x3846_1862, 0x3955_5555], [0x3AD5_5555, 0x3BD5_5555]),
                (32_768, 72.0, 448.0, 24, [0x38B0_0000, 0x38D8_6186], [0x3B4A_AAAB, 0x3C4A_AAAB]),
            ],
        ),
        layer(
            2,
            [
                (32_768, 72.0, 448.0, 15, [0x38BE_79E8, 0x38E3_0C31], [0x3ACC_30C3, 0x3BCC_30C3]),
                (32_768, 64.0, 448.0, 14, [0x383E_79E8, 0x3963_0C31], [0x3ACC_30C3, 0x3BCC_30C3]),
                (32_768, 72.0, 448.0, 33, [0x38B3_0C31, 0x38D9_E79E], [0x3B82_4925, 0x3C82_4925]),
            ],
        ),
    ];
    check("modelopt-dsv3-mixed", ModuleCounts { nvfp4: 120, bf16: 4, other: 0 }, &layers);
}

#[test]
fn modelopt_qwen3_tiny() {
    let layer = |layer, projections| Layer {
        layer,
        experts: 8,
        expert_bytes: 442_560,
        replicated_bytes: 4_096,
        pairs_differing: 0,
        projections,
    };
    let layers = [
        layer(
            0,
            [
                (16_384, 48.0, 448.0, 8, [0x38C0_C30C, 0x38EA_AAAB], [0x3AE9_2492; 2]),
                (16_384, 64.0, 448.0, 11, [0x38C0_C30C, 0x38EA_AAAB], [0x3AE9_2492; 2]),
                (16_384, 72.0, 448.0, 12, [0x38B9_E79E, 0x38D9_E79E], [0x3B80_0000; 2]),
            ],
        ),
        layer(
            1,
            [
                (16_384, 80.0, 448.0, 8, [0x38C3_0C31, 0x38E9_2492], [0x3AF3_CF3D; 2]),
                (16_384, 80.0, 448.0, 4, [0x38C3_0C31, 0x38E9_2492], [0x3AF3_CF3D; 2]),
                (16_384, 64.0, 448.0, 14, [0x38BA_AAAB, 0x38D9_E79E], [0x3B49_2492; 2]),
            ],
        ),
    ];
    check("modelopt-qwen3-tiny", ModuleCounts { nvfp4: 56, bf16: 4, other: 0 }, &layers);
}

/// The bytes handed out are the file's own, by the format's own library.
#[test]
fn tensors_are_the_files_bytes() {
    let dir = fixture("modelopt-qwen3-tiny");
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let manifest = checkpoint.layer(LayerIdx(1)).unwrap();
    for expert in 0..8 {
        let tensors = checkpoint.read_expert(&manifest, ExpertIdx(expert)).unwrap();
        for (name, projection) in [("gate", &tensors.gate), ("up", &tensors.up), ("down", &tensors.down)] {
            let raw = |part: &str| {
                file.tensor(&format!("model.layers.1.mlp.experts.{expert}.{name}_proj.{part}")).unwrap().data().to_vec()
            };
            let ProjectionData::Nvfp4 { packed, block_scales, global_scale, input_scale } = &projection.data else {
                panic!("{name}")
            };
            assert!(packed[..] == raw("weight")[..], "expert {expert} {name}");
            assert!(block_scales[..] == raw("weight_scale")[..], "expert {expert} {name}");
            assert_eq!(global_scale.to_le_bytes()[..], raw("weight_scale_2")[..]);
            assert_eq!(input_scale.unwrap().to_le_bytes()[..], raw("input_scale")[..]);
        }
    }
}
