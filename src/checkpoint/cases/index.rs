//! Case D2: the index and the files disagree, or there is no index.

use serde_json::{Value, json};

use super::super::testing::{FIRST, INDEX, SECOND, Sample, Size, loads, refused, safetensors};
use super::super::{Checkpoint, CheckpointError, Warning};
use crate::ids::ExpertIdx;

const EXPERT_3: &str = "model.layers.0.mlp.experts.3.down_proj.weight_scale";

fn sample() -> Sample {
    Sample::s(4, 128, 128)
}

/// The global scale of an expert's down projection, which is 2^e in S.
#[track_caller]
fn down_scale(dir: &std::path::Path, expert: u32) -> f32 {
    let (checkpoint, manifest) = loads(dir);
    match checkpoint.read_expert(&manifest, ExpertIdx(expert)).unwrap().down.data {
        super::super::tensors::ProjectionData::Nvfp4 { global_scale, .. } => global_scale,
        other => panic!("not NVFP4: {other:?}"),
    }
}

fn with_file(dir: &super::super::testing::Dir, tensor: &str, file: &str) {
    let mut index: Value = serde_json::from_slice(&dir.bytes(INDEX)).unwrap();
    index["weight_map"][tensor] = json!(file);
    dir.put(INDEX, index.to_string().as_bytes());
}

#[test]
fn two_shards_load() {
    let dir = sample().write_two_shards();
    for expert in 0..4_u8 {
        assert_eq!(down_scale(dir.path(), expert.into()), 2.0_f32.powi(expert.into()));
    }
    assert_eq!(Checkpoint::open(dir.path()).unwrap().warnings(), []);
}

#[test]
fn case_d2_i_a_missing_shard() {
    let dir = sample().write_two_shards();
    std::fs::remove_file(dir.file(SECOND)).unwrap();
    let error = refused(dir.path(), &[SECOND, INDEX, "24 tensors", "download"]);
    assert!(matches!(error, CheckpointError::MissingShard { .. }));
}

#[test]
fn case_d2_ii_a_missing_tensor() {
    let dir = sample().write_two_shards();
    let second: std::collections::BTreeMap<_, _> = sample()
        .tensors
        .into_iter()
        .filter(|(name, _)| (name.contains("experts.1.") || name.contains("experts.3.")) && name != EXPERT_3)
        .collect();
    dir.put(SECOND, &safetensors(&second));
    // Any rank finds it, whichever experts are its own: opening is enough.
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains(EXPERT_3) && error.to_string().contains(SECOND), "{error}");
    assert!(matches!(error, CheckpointError::MissingIndexed { num_missing: 1, .. }));
}

#[test]
fn case_d2_iii_the_index_wins_over_an_extra_shard() {
    let dir = sample().write_two_shards();
    let mut other = sample();
    other.tensor("model.layers.0.mlp.experts.0.down_proj.weight_scale_2").bytes = 77.0_f32.to_le_bytes().to_vec();
    dir.put("extra.safetensors", &safetensors(other.tensors.iter().filter(|(name, _)| name.contains("experts.0."))));
    assert_eq!(down_scale(dir.path(), 0), 1.0);
    let warnings = Checkpoint::open(dir.path()).unwrap().warnings().to_vec();
    assert_eq!(warnings, [Warning::ExtraShards { files: vec!["extra.safetensors".to_owned()] }]);
    assert!(warnings[0].to_string().contains("extra.safetensors"));
}

#[test]
fn case_d2_iii_the_index_wins_over_a_copy_in_another_indexed_shard() {
    let dir = sample().write_two_shards();
    let name = "model.layers.0.mlp.experts.1.down_proj.weight_scale_2";
    let mut first: std::collections::BTreeMap<_, _> = sample()
        .tensors
        .into_iter()
        .filter(|(name, _)| !name.contains("experts.1.") && !name.contains("experts.3."))
        .collect();
    first.insert(name.to_owned(), super::super::testing::Tensor::scalar(77.0));
    dir.put(FIRST, &safetensors(&first));
    assert_eq!(down_scale(dir.path(), 1), 2.0);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let [Warning::ExtraTensors { count: 1, first, path }] = checkpoint.warnings() else {
        panic!("{:?}", checkpoint.warnings())
    };
    assert_eq!((first.as_str(), path), (name, &dir.file(FIRST)));
}

#[test]
fn case_d2_iv_without_the_index_headers_tell() {
    let dir = sample().write_two_shards();
    std::fs::remove_file(dir.file(INDEX)).unwrap();
    for expert in 0..4_u8 {
        assert_eq!(down_scale(dir.path(), expert.into()), 2.0_f32.powi(expert.into()));
    }
    std::fs::remove_file(dir.file(SECOND)).unwrap();
    refused(dir.path(), &["layer 0", "2 experts", "missing: 1, 3", "4"]);
}

#[test]
fn without_the_index_two_copies_are_refused() {
    let dir = sample().write_two_shards();
    std::fs::remove_file(dir.file(INDEX)).unwrap();
    dir.put("copy.safetensors", &dir.bytes(SECOND));
    let error = refused(dir.path(), &["experts.1.", "copy.safetensors", SECOND]);
    assert!(matches!(error, CheckpointError::TensorInTwoFiles { .. }));
}

#[test]
fn case_d2_v_a_single_file() {
    let dir = sample().write();
    assert_eq!(down_scale(dir.path(), 3), 8.0);
}

#[test]
fn case_d2_vi_shards_named_by_layer_and_experts() {
    let sample = Sample::of(Size { layers: 2, experts: 4, hidden: 128, intermediate: 128 }, "model.");
    let dir = sample.write();
    std::fs::remove_file(dir.file("model.safetensors")).unwrap();
    for layer in 0..2 {
        for (half, experts) in [("0-1", [0, 1]), ("2-3", [2, 3])] {
            let block = format!("model.layers.{layer}.mlp.");
            let inside = |name: &str| experts.iter().any(|e| name.starts_with(&format!("{block}experts.{e}.")));
            let gate = |name: &str| half == "0-1" && name.starts_with(&format!("{block}gate"));
            let tensors = sample.tensors.iter().filter(|(name, _)| inside(name) || gate(name));
            dir.put(&format!("layer{layer}.experts{half}.safetensors"), &safetensors(tensors));
        }
    }
    assert_eq!(down_scale(dir.path(), 3), 8.0);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().moe_layers().len(), 2);
}

#[test]
fn case_d2_vii_an_index_that_points_outside() {
    for file in [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        ".",
        "a\\b.safetensors",
        "C:x.safetensors",
    ] {
        let dir = sample().write_two_shards();
        with_file(&dir, EXPERT_3, file);
        let error = refused(dir.path(), &[INDEX, &format!("`{file}`")]);
        assert!(matches!(error, CheckpointError::IndexEscapes { .. }), "{file}");
    }
}

#[test]
fn case_d2_viii_links_into_a_hub_cache() {
    let plain = sample().write_two_shards();
    let hub = super::super::testing::Dir::new();
    let (blobs, snapshot) = (hub.file("blobs"), hub.file("snapshots/0123abcd"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    for (number, name) in [FIRST, SECOND, INDEX, "config.json", "hf_quant_config.json"].iter().enumerate() {
        let blob = format!("{number:064x}");
        std::fs::copy(plain.file(name), blobs.join(&blob)).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    assert_eq!(down_scale(&snapshot, 3), 8.0);
    // The cache's own directory is not a checkpoint; the message says which directory is.
    refused(hub.path(), &["config.json", "0123abcd"]);
    std::fs::remove_file(blobs.join(format!("{:064x}", 1))).unwrap();
    refused(&snapshot, &[SECOND, "link"]);
}

#[test]
fn a_malformed_index_is_refused() {
    let dir = sample().write_two_shards();
    for text in ["", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 3}}"] {
        dir.put(INDEX, text.as_bytes());
        assert!(matches!(refused(dir.path(), &[INDEX]), CheckpointError::IndexJson { .. }), "{text}");
    }
    let (one, two) = (format!("\"a\":\"{FIRST}\""), format!("\"a\":\"{SECOND}\""));
    dir.put(INDEX, format!("{{\"weight_map\":{{{one},{two}}}}}").as_bytes());
    assert!(matches!(refused(dir.path(), &["twice"]), CheckpointError::IndexDoubled { .. }));
}

#[test]
fn what_is_not_a_checkpoint_says_what_is_missing() {
    let dir = super::super::testing::Dir::new();
    refused(dir.path(), &["config.json"]);
    refused(&dir.file("none"), &["none"]);
    sample().write_configs(dir.path());
    assert!(matches!(refused(dir.path(), &["safetensors"]), CheckpointError::NoShards { .. }));
    let dir = sample().write();
    dir.put("config.json", b"{");
    refused(dir.path(), &["config.json", "JSON"]);
    dir.put("config.json", &[0xFF]);
    refused(dir.path(), &["config.json"]);
}
