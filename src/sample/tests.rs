//! Samples as files: the layout of the fixtures that real tools wrote, the same bytes for any number of threads.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::SafeTensors;

use super::*;

fn tiny(geometry: Geometry) -> SampleSpec {
    let mut spec = SampleSpec {
        hidden: 64,
        latent: geometry.preset().latent.map(|_| 48),
        intermediate: 32,
        num_experts: 8,
        num_topk: 2,
        num_layers: 2,
        num_tokens: 5,
        ..SampleSpec::of(geometry)
    };
    spec.fit_groups();
    spec
}

fn written(spec: SampleSpec) -> (tempfile::TempDir, PathBuf) {
    let outer = tempfile::tempdir().expect("a directory");
    let dir = outer.path().join("sample");
    spec.plan().expect("sizes of a model").write(&dir, &|_| {}).expect("written");
    (outer, dir)
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.expect("an entry");
        (entry.file_name().into_string().expect("text"), fs::read(entry.path()).expect("read"))
    };
    fs::read_dir(dir).expect("a directory").map(read).collect()
}

/// Name without numbers, dtype and rank of every tensor under an MoE block.
fn kinds(dir: &Path) -> BTreeSet<(String, String, usize)> {
    let mut kinds = BTreeSet::new();
    for (file, bytes) in files(dir) {
        if !file.starts_with("model") || !file.ends_with(".safetensors") {
            continue;
        }
        for (name, view) in SafeTensors::deserialize(&bytes).expect("a safetensors file").tensors() {
            let parts = name.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part });
            let name = parts.collect::<Vec<_>>().join(".");
            if name.contains(".block_sparse_moe.")
                || name.contains(".mlp.experts.")
                || name.contains(".mlp.gate.")
                || name.contains(".mlp.shared_experts.")
            {
                kinds.insert((name, view.dtype().to_string(), view.shape().len()));
            }
        }
    }
    kinds
}

#[test]
fn names_and_dtypes_are_those_of_the_fixtures() {
    for (geometry, fixture) in [
        (Geometry::KimiK3, "k3-tiny"),
        (Geometry::DeepseekV3, "modelopt-dsv3-tiny"),
        (Geometry::Qwen3, "modelopt-qwen3-tiny"),
    ] {
        let (_outer, dir) = written(tiny(geometry));
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
        assert_eq!(kinds(&dir), kinds(&fixture), "{geometry:?}");
    }
}

#[test]
fn config_keys_are_those_of_the_fixtures() {
    let keys =
        |config: &Value| -> BTreeSet<String> { config.as_object().expect("an object").keys().cloned().collect() };
    let fixture = |name: &str, file: &str| -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).join(file);
        serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON")
    };
    let k3 = fixture("k3-tiny", "config.json");
    let ours = configs::config(&tiny(Geometry::KimiK3));
    assert_eq!(keys(&ours["text_config"]), keys(&k3["text_config"]));
    for (geometry, name) in [
        (Geometry::KimiK3, "k3-tiny"),
        (Geometry::DeepseekV3, "modelopt-dsv3-tiny"),
        (Geometry::Qwen3, "modelopt-qwen3-tiny"),
    ] {
        let ours = configs::quant_config(&tiny(geometry)).expect("quantised");
        let theirs = fixture(name, "hf_quant_config.json");
        assert_eq!(keys(&ours), keys(&theirs), "{name}");
        assert_eq!(keys(&ours["quantization"]), keys(&theirs["quantization"]), "{name}");
    }
    for (geometry, name) in [(Geometry::DeepseekV3, "modelopt-dsv3-tiny"), (Geometry::Qwen3, "modelopt-qwen3-tiny")] {
        let ours = configs::config(&tiny(geometry));
        let theirs = fixture(name, "config.json");
        assert_eq!(keys(&ours["quantization_config"]), keys(&theirs["quantization_config"]), "{name}");
        for key in ["model_type", "hidden_act", "norm_topk_prob", "architectures"] {
            assert_eq!(ours[key], theirs[key], "{name}: {key}");
        }
    }
}

#[test]
fn index_and_headers_agree() {
    let (_outer, dir) = written(tiny(Geometry::DeepseekV3));
    let files = files(&dir);
    let index: Value = serde_json::from_slice(&files["model.safetensors.index.json"]).expect("JSON");
    let weight_map = index["weight_map"].as_object().expect("a map");
    let mut total = 0;
    for (file, bytes) in files.iter().filter(|(file, _)| file.starts_with("model-")) {
        let (_, metadata) = SafeTensors::read_metadata(bytes).expect("a header");
        for (name, info) in metadata.tensors() {
            assert_eq!(weight_map[&name], file.as_str(), "{name}");
            total += (info.data_offsets.1 - info.data_offsets.0) as u64;
        }
    }
    assert_eq!(index["metadata"]["total_size"], total);
    let inputs = SafeTensors::deserialize(&files["inputs.safetensors"]).expect("inputs");
    assert_eq!(inputs.tensor("hidden").expect("hidden").shape(), [5, 64]);
}

#[test]
fn bits_depend_on_the_seed_and_not_on_threads() {
    // Large enough for several chunks.
    let spec = |seed| SampleSpec { hidden: 512, intermediate: 4112, num_experts: 2, seed, ..tiny(Geometry::Qwen3) };
    let with_threads = |num_threads, seed| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().expect("a pool");
        let (_outer, dir) = pool.install(|| written(spec(seed)));
        files(&dir)
    };
    let one = with_threads(1, 3);
    assert!(one == with_threads(4, 3), "four threads write what one does");
    let other = with_threads(1, 4);
    for file in ["model-00001-of-00001.safetensors", "inputs.safetensors"] {
        assert!(one[file] != other[file], "{file}");
    }
}

#[test]
fn shards_split_between_experts() {
    let spec = SampleSpec { num_experts: 256, ..SampleSpec::of(Geometry::DeepseekV3) };
    let plan = spec.plan().expect("a plan");
    assert!(plan.shards.len() > 4, "{} shards", plan.shards.len());
    let mut file_of = BTreeMap::new();
    for (idx, shard) in plan.shards.iter().enumerate() {
        let bytes: u64 = shard.iter().map(TensorPlan::num_bytes).sum();
        assert!(bytes < SHARD_BYTES + SHARD_BYTES / 8, "shard {idx} has {bytes} bytes");
        for tensor in shard {
            if let Some((expert, _)) = tensor.name.split_once("_proj").filter(|(name, _)| name.contains(".experts.")) {
                let expert = expert.rsplit_once('.').expect("a name").0.to_owned();
                assert_eq!(*file_of.entry(expert).or_insert(idx), idx, "{}", tensor.name);
            }
        }
    }
    // One expert: 3 * 7168 * 2048 values of 4.5 bits, and 6 scalars.
    assert_eq!(
        plan.shards
            .iter()
            .flatten()
            .filter(|tensor| tensor.name.contains(".experts.7."))
            .map(TensorPlan::num_bytes)
            .sum::<u64>(),
        3 * 7168 * 2048 * 9 / 16 + 24
    );
}

/// Half the weights' products with the input: what the deviation at FC1 is for is to be seen at FC1.
#[test]
fn preactivations_have_the_promised_deviation() {
    let spec = SampleSpec {
        hidden: 1024,
        intermediate: 64,
        num_experts: 1,
        num_topk: 1,
        num_layers: 1,
        num_tokens: 16,
        ..tiny(Geometry::Qwen3)
    };
    let (_outer, dir) = written(spec);
    let files = files(&dir);
    let model = SafeTensors::deserialize(&files["model-00001-of-00001.safetensors"]).expect("a file");
    let inputs = SafeTensors::deserialize(&files["inputs.safetensors"]).expect("a file");
    let tensor = |name: &str| {
        model.tensor(&format!("model.layers.0.mlp.experts.0.gate_proj.{name}")).expect(name).data().to_vec()
    };
    let (codes, scales, global) = (tensor("weight"), tensor("weight_scale"), tensor("weight_scale_2"));
    let global = f64::from(f32::from_le_bytes(global.try_into().expect("one f32")));
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let scale = |bits: u8| f64::from(8 + (bits & 7)) * f64::powi(2.0, i32::from(bits >> 3) - 10);
    let weight = |row: usize, col: usize| {
        let code = codes[row * 512 + col / 2] >> (4 * (col % 2)) & 15;
        let value = magnitudes[usize::from(code & 7)] * scale(scales[row * 64 + col / 16]) * global;
        if code < 8 { value } else { -value }
    };
    let x: Vec<f64> = inputs
        .tensor("hidden")
        .expect("hidden")
        .data()
        .chunks_exact(2)
        .map(|b| f64::from(half::bf16::from_le_bytes([b[0], b[1]])))
        .collect();
    let mut squares = 0.0;
    for row in 0..64 {
        let weights: Vec<f64> = (0..1024).map(|col| weight(row, col)).collect();
        for token in x.chunks_exact(1024) {
            squares += weights.iter().zip(token).map(|(w, x)| w * x).sum::<f64>().powi(2);
        }
    }
    let sigma = (squares / (64.0 * 16.0)).sqrt();
    // A global scale may be a factor of 1.2 off either way.
    assert!((1.5 / 1.3..1.5 * 1.3).contains(&sigma), "sigma {sigma}");
}

#[test]
fn bf16_samples_have_no_quantisation() {
    let (_outer, dir) = written(SampleSpec { format: SampleFormat::Bf16, hidden: 40, ..tiny(Geometry::DeepseekV3) });
    let files = files(&dir);
    assert!(!files.contains_key("hf_quant_config.json"));
    assert!(kinds(&dir).iter().all(|(_, dtype, _)| dtype == "BF16"));
    let config: Value = serde_json::from_slice(&files["config.json"]).expect("JSON");
    assert!(config.get("quantization_config").is_none());
}

#[test]
fn groups_fit_the_experts() {
    let groups = |num_experts, num_topk| {
        let mut spec = SampleSpec { num_experts, num_topk, ..SampleSpec::of(Geometry::DeepseekV3) };
        spec.fit_groups();
        (spec.num_groups, spec.topk_group)
    };
    assert_eq!(groups(256, 8), (8, 4), "the model's own");
    assert_eq!(groups(16, 8), (8, 4));
    assert_eq!(groups(16, 16), (8, 8), "groups kept hold the top-k");
    assert_eq!(groups(12, 4), (6, 3));
    assert_eq!(groups(7, 2), (1, 1));
    assert_eq!(groups(1, 1), (1, 1));
}

#[test]
fn sizes_that_are_no_models_are_refused() {
    let refused = |spec: SampleSpec| spec.plan().expect_err("refused").to_string();
    let tiny = || tiny(Geometry::DeepseekV3);
    insta::assert_snapshot!(refused(SampleSpec { hidden: 136, ..tiny() }), @"hidden is 136, which is no multiple of NVFP4's blocks of 16; use 144, or --format bf16");
    insta::assert_snapshot!(refused(SampleSpec { num_topk: 9, ..tiny() }), @"top-k is 9 but there are 8 experts; lower --topk, or ask for more experts");
    insta::assert_snapshot!(refused(SampleSpec { num_layers: 0, ..tiny() }), @"layers is 0; a model has at least 1");
    insta::assert_snapshot!(refused(SampleSpec { latent: Some(16), ..tiny() }), @"deepseek-v3 has no latent; leave out --latent, or choose --geometry kimi-k3");
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left() {
    let outer = tempfile::tempdir().expect("a directory");
    let plan = tiny(Geometry::Qwen3).plan().expect("a plan");
    let taken = outer.path().join("taken");
    fs::create_dir(&taken).expect("made");
    fs::write(taken.join("mine"), "mine").expect("written");
    let error = plan.write(&taken, &|_| {}).expect_err("refused");
    assert!(matches!(error, SampleError::NotEmpty { .. }), "{error}");
    let file = outer.path().join("file");
    fs::write(&file, "mine").expect("written");
    assert!(plan.write(&file, &|_| {}).is_err());
    let empty = outer.path().join("empty");
    fs::create_dir(&empty).expect("made");
    let bytes = std::sync::atomic::AtomicU64::new(0);
    let done = plan
        .write(&empty, &|more| {
            bytes.fetch_add(more, std::sync::atomic::Ordering::Relaxed);
        })
        .expect("an empty directory may be filled");
    assert_eq!(bytes.into_inner(), done.num_bytes, "progress adds up");
    plan.write(&outer.path().join("new/below"), &|_| {}).expect("parents are made");
    let left: BTreeSet<String> = fs::read_dir(outer.path())
        .expect("read")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    assert_eq!(left, ["taken", "file", "empty", "new"].map(str::to_owned).into());
}

/// `/dev/full` takes no byte: the error of a full disk, without one.
#[test]
fn a_full_disk_is_one_message_with_the_size() {
    let plan = tiny(Geometry::Qwen3).plan().expect("a plan");
    let error = shards::write(Path::new("/dev/full"), &plan.shards[0], 0, &|_| {}).expect_err("full").with_total(123);
    let message = error.to_string();
    assert!(message.starts_with("no space left for /dev/full: the sample takes 123 bytes"), "{message}");
    assert_eq!(crate::exit::Classify::exit(&error), crate::exit::Exit::Environment);
}
