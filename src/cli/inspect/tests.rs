//! Reports on the fixtures, whole and with faults planted in a copy.

use std::path::PathBuf;

use super::*;

const INDEX: &str = "model.safetensors.index.json";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A copy of a fixture to plant faults in.
struct Copy(tempfile::TempDir);

impl Copy {
    fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for item in std::fs::read_dir(fixture(name)).unwrap() {
            let item = item.unwrap();
            std::fs::copy(item.path(), dir.path().join(item.file_name())).unwrap();
        }
        Self(dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// Rewrites a file's bytes.
    fn change(&self, file: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(self.path(file)).unwrap();
        change(&mut bytes);
        std::fs::write(self.path(file), bytes).unwrap();
    }

    /// Overwrites the first bytes of a tensor of the single-file fixture.
    fn plant(&self, tensor: &str, at: usize, planted: &[u8]) {
        self.change("model.safetensors", |bytes| {
            let header_bytes = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
            let begin = header[tensor]["data_offsets"][0].as_u64().unwrap_or_else(|| panic!("no {tensor}"));
            let begin = 8 + header_bytes + usize::try_from(begin).unwrap() + at;
            bytes[begin..begin + planted.len()].copy_from_slice(planted);
        });
    }

    /// Replaces text of the header by text of the same length.
    fn rename(&self, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        self.change("model.safetensors", |bytes| {
            let at = bytes
                .windows(from.len())
                .position(|window| window == from.as_bytes())
                .unwrap_or_else(|| panic!("no {from}"));
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        });
    }

    fn report(&self) -> InspectReport {
        report(self.0.path(), &mut |_, _| {}).unwrap()
    }
}

/// Each list of words is found in one problem of its own, and there are no other problems.
#[track_caller]
fn problems(report: &InspectReport, wanted: &[&[&str]]) {
    for words in wanted {
        let found = report.problems.iter().any(|problem| words.iter().all(|word| problem.contains(word)));
        assert!(found, "no problem names {words:?}: {:#?}", report.problems);
    }
    assert_eq!(report.problems.len(), wanted.len(), "{:#?}", report.problems);
}

fn expert(expert: u32, rest: &str) -> String {
    format!("model.layers.1.mlp.experts.{expert}.{rest}")
}

#[test]
fn a_fixture_is_reported_whole() {
    let mut calls = Vec::new();
    let report = report(&fixture("modelopt-dsv3-mixed"), &mut |done, total| calls.push((done, total))).unwrap();
    assert_eq!(calls, [(16, 32), (32, 32)]);
    assert_eq!((&report.problems[..], &report.warnings[..]), (&[][..], &[][..]));
    let model = report.model.as_ref().unwrap();
    assert_eq!(
        (model.model_type.as_str(), model.num_experts, model.shared_intermediate),
        ("deepseek_v3", 16, Some(128))
    );
    let layer = &report.layers[1];
    assert_eq!((layer.layer, layer.num_nvfp4, layer.num_bf16, layer.num_faulty), (2, 16, 0, 0));
    assert_eq!((layer.num_pairs, layer.num_pairs_differing), (16, 10));
    assert_eq!((layer.expert_bytes, layer.replicated_bytes), (885_120, 63_544));
    // From a separate script over the same bytes.
    let down = &layer.scales[2];
    assert_eq!(down.projection, ProjectionKind::Down);
    assert_eq!(
        (down.weight_scale.smallest, down.weight_scale.largest, down.weight_scale.num_saturated),
        (72.0, 448.0, 33)
    );
    assert_eq!((down.input_scale.smallest.to_bits(), down.input_scale.largest.to_bits()), (0x3B82_4925, 0x3C82_4925));
    let shared_up = &layer.shared_scales[1];
    assert_eq!(
        (shared_up.weight_scale.count, shared_up.weight_scale.largest, shared_up.weight_scale.num_saturated),
        (2048, 416.0, 0)
    );
    assert_eq!(layer.shapes[0].tensor, "experts.0.gate_proj.weight");
    assert_eq!((layer.shapes[0].dtype.as_str(), &layer.shapes[0].shape[..]), ("U8", &[128, 128][..]));
}

#[test]
fn the_report_reads_well_and_serialises() {
    for name in ["k3-tiny", "modelopt-dsv3-tiny", "modelopt-qwen3-tiny"] {
        let report = report(&fixture(name), &mut |_, _| {}).unwrap();
        let text = report.to_string();
        for word in ["weight_scale_2", "saturated", "no problem found", "NVFP4", "shapes of layers"] {
            assert!(text.contains(word), "{name}: {text} lacks {word}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["layers"].as_array().unwrap().len(), 2);
        assert!(json["layers"][0]["scales"][0]["weight_scale"]["smallest"].is_number());
        assert_eq!(json["layers"][0]["scales"][0]["projection"], "gate");
    }
    let k3 = report(&fixture("k3-tiny"), &mut |_, _| {}).unwrap();
    let model = k3.model.as_ref().unwrap();
    assert_eq!((model.routing.as_str(), model.activation.as_str()), ("kimi_k3, scaling 1", "SiTU 4 / 25"));
    assert!(k3.to_string().contains("latent 128") && k3.to_string().contains("1.0000e0 (2^n)"), "{k3}");
    assert!(k3.warnings.iter().any(|warning| warning.contains("lm_head")), "{:?}", k3.warnings);
}

#[test]
fn every_planted_scale_is_found_in_one_run() {
    let copy = Copy::of("modelopt-qwen3-tiny");
    copy.plant(&expert(3, "up_proj.input_scale"), 0, &0.0_f32.to_le_bytes());
    copy.plant(&expert(4, "down_proj.input_scale"), 0, &f32::NAN.to_le_bytes());
    copy.plant(&expert(5, "gate_proj.input_scale"), 0, &(-1.0_f32).to_le_bytes());
    copy.plant(&expert(5, "gate_proj.weight_scale"), 17, &[0xFF, 0x81]);
    copy.plant(&expert(6, "gate_proj.weight_scale_2"), 0, &3584.0_f32.to_le_bytes());
    let report = copy.report();
    let names =
        [expert(3, "up_proj.input_scale"), expert(4, "down_proj.input_scale"), expert(5, "gate_proj.input_scale")];
    let scales = expert(5, "gate_proj.weight_scale");
    problems(
        &report,
        &[
            &[&names[0], "expert 3", "is 0"],
            &[&names[1], "NaN"],
            &[&names[2], "-1"],
            &[&scales, "row 1, block 1", "0xFF", "2 of its scales"],
        ],
    );
    let implausible = expert(6, "gate_proj.weight_scale_2");
    assert!(report.warnings.iter().any(|w| w.contains(&implausible) && w.contains("3584")), "{:?}", report.warnings);
    // Gate and up of expert 4 have no fault: they are compared as those of the experts without any.
    assert_eq!((report.layers[1].num_pairs, report.layers[0].num_pairs), (6, 8));
    assert!(report.to_string().contains("4 problems"), "{report}");
}

#[test]
fn every_planted_layout_is_found_in_one_run() {
    let copy = Copy::of("modelopt-qwen3-tiny");
    copy.rename("model.layers.0.mlp.experts.1.up_proj.input_scale", "model.layers.0.mlp.experts.1.up_proj.inpXt_scale");
    copy.rename(
        "model.layers.1.mlp.experts.2.up_proj.weight_scale_2",
        "model.layers.1.mlp.experts.2.up_proj.weight_global_",
    );
    copy.rename("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weighX");
    let report = copy.report();
    problems(
        &report,
        &[
            &["layer 0", "inpXt_scale", "no meaning"],
            &["layer 0", "expert 1", "experts.1.up_proj.input_scale", "1 of 24"],
            &["layer 1", "weight_global_", "no meaning"],
            &["layer 1", "experts.2.up_proj.weight_scale_2 is missing"],
            &["layer 1", "gate.weighX", "quantised router"],
            &["layer 1", "gate.weight is missing"],
        ],
    );
    assert_eq!((report.layers[1].num_nvfp4, report.layers[1].num_faulty), (7, 1));
}

#[test]
fn faulty_files_do_not_hide_the_others() {
    let copy = Copy::of("modelopt-dsv3-tiny");
    copy.change("model-00002-of-00002.safetensors", |bytes| bytes.truncate(bytes.len() - 1));
    let report = copy.report();
    let cut = ["model-00002-of-00002.safetensors", "cut short", "1056364", "1056363"];
    problems(&report, &[&cut, &["layers 2 are MoE layers"]]);
    assert_eq!((report.files.len(), report.layers.len(), report.layers[0].num_pairs), (1, 1, 16));

    let copy = Copy::of("modelopt-dsv3-tiny");
    std::fs::remove_file(copy.path("model-00002-of-00002.safetensors")).unwrap();
    copy.change(INDEX, |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        *bytes =
            text.replacen("model-00001-of-00002.safetensors", "../model-00001-of-00002.safetensors", 1).into_bytes();
    });
    let report = copy.report();
    problems(
        &report,
        &[
            &["model-00002-of-00002.safetensors", "missing"],
            &["`../model-00001-of-00002.safetensors`"],
            &["layers 2 are MoE layers"],
        ],
    );
}

#[test]
fn a_refused_config_still_shows_the_files() {
    let copy = Copy::of("modelopt-qwen3-tiny");
    copy.change("config.json", |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        *bytes = text.replace("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9").into_bytes();
    });
    let report = copy.report();
    problems(&report, &[&["top-k", "9", "8 experts"]]);
    assert_eq!((report.model.is_none(), report.files.len(), report.modules.nvfp4), (true, 1, 56));
    std::fs::remove_file(copy.path("model.safetensors")).unwrap();
    problems(&copy.report(), &[&["no *.safetensors"], &["top-k"]]);
    assert!(matches!(super::report(&copy.path("none"), &mut |_, _| {}), Err(CheckpointError::List { .. })));
}
