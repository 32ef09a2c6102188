//! `inspect` finds what is planted, and prints the ranges that are there.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::cases::d_files::{Sharded, spoilt_shards};
use crate::support::checkpoint::{Checkpoint, delete_index, edit_index, expert_of, expert_tensor, shard_name};
use crate::support::fixtures;
use crate::support::launch::{FAILURE_LIMIT, Outcome, alone};
use crate::support::made::S;
use crate::support::run::{Work, files_in};
use crate::support::safetensors::{self, Tensors};
use crate::support::tensor::{Dtype, Tensor, e4m3};

pub(crate) fn inspect(dir: &Path) -> Outcome {
    alone().limit(FAILURE_LIMIT).args(["inspect".to_string(), dir.display().to_string()]).run()
}

/// Everything wrong with a checkpoint is on stdout or stderr, with a non-zero exit code and no panic.
#[track_caller]
fn assert_inspect_finds(dir: &Path, needles: &[&str], what: &str) {
    let outcome = inspect(dir);
    assert_ne!(outcome.code, 0, "{what}: {}", outcome.printed());
    for needle in needles {
        let said = outcome.stdout.contains(needle) || outcome.stderr.contains(needle);
        assert!(said, "{what}: no {needle:?}: {}", outcome.printed());
    }
    assert!(!outcome.stderr.contains("panicked"), "{what}: {}", outcome.printed());
}

#[test]
fn inspect_finds_d1() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let good = fs::read(sharded.second()).expect("the second shard");
    for spoilt in spoilt_shards(&good) {
        safetensors::write_bytes(&sharded.second(), &spoilt.bytes);
        let mut needles = vec![shard_name(1, 2)];
        needles.extend(spoilt.says);
        assert_inspect_finds(&sharded.dir, &needles.iter().map(String::as_str).collect::<Vec<_>>(), spoilt.name);
    }
}

#[test]
fn inspect_finds_d2() {
    let work = Work::new();
    let gone = Sharded::new(&work);
    fs::remove_file(gone.second()).expect("the second shard");
    assert_inspect_finds(&gone.dir, &[&shard_name(1, 2)], "a shard missing");

    let lacking = Sharded::new(&work);
    let name = expert_tensor(0, 3, "up_proj", "weight");
    let mut tensors = lacking.checkpoint.shard(1, 2);
    tensors.remove(&name).expect("the tensor");
    safetensors::write(&lacking.second(), &tensors);
    assert_inspect_finds(&lacking.dir, &[&name], "a tensor missing");
    delete_index(&lacking.dir);
    assert_inspect_finds(&lacking.dir, &["up_proj"], "a tensor missing, no index");

    let outside = Sharded::new(&work);
    edit_index(&outside.dir, |index| index["weight_map"][&name] = "../x.safetensors".into());
    assert_inspect_finds(&outside.dir, &["../x.safetensors"], "a path outside");

    let stray = Sharded::new(&work);
    safetensors::write(&stray.dir.join("model-extra.safetensors"), &stray.checkpoint.shard(1, 2));
    let outcome = inspect(&stray.dir).expect_code(0);
    let text = format!("{}{}", outcome.stdout, outcome.stderr);
    assert!(text.contains("model-extra.safetensors"), "a stray shard: {}", outcome.printed());
}

/// Faults of single tensors, planted one at a time and then all at once: every one is reported.
#[test]
fn inspect_finds_c2_c5_d4() {
    type Plant = fn(&mut Checkpoint, &str);
    let plants: [(String, Plant); 7] = [
        (expert_tensor(0, 0, "gate_proj", "input_scale"), |c, name| *c.tensor(name) = Tensor::scalar(0.0)),
        (expert_tensor(0, 0, "up_proj", "input_scale"), |c, name| *c.tensor(name) = Tensor::scalar(f32::NAN)),
        (expert_tensor(0, 1, "down_proj", "input_scale"), |c, name| *c.tensor(name) = Tensor::scalar(-1.0)),
        (expert_tensor(0, 1, "up_proj", "weight_scale_2"), |c, name| *c.tensor(name) = Tensor::scalar(3584.0)),
        (expert_tensor(0, 2, "gate_proj", "weight"), |c, name| c.tensor(name).shape.reverse()),
        // Beside an expert of faulty layout, whose scales are not read: nobody knows where they begin.
        (expert_tensor(0, 1, "gate_proj", "weight_scale"), |c, name| c.tensor(name).bytes[77] = 0x7F),
        (expert_tensor(0, 3, "up_proj", "weight"), |c, name| c.tensor(name).dtype = Dtype::F8E4M3),
    ];
    let work = Work::new();
    let s = S::new(4, 128, 256);
    let mut all = s.checkpoint();
    for (name, plant) in &plants {
        let mut one = s.checkpoint();
        plant(&mut one, name);
        plant(&mut all, name);
        let outcome = inspect(&work.checkpoint(&one));
        let text = format!("{}{}", outcome.stdout, outcome.stderr);
        assert!(text.contains(name.as_str()), "{name} is not reported: {}", outcome.printed());
    }
    let names: Vec<&str> = plants.iter().map(|(name, _)| name.as_str()).collect();
    assert_inspect_finds(&work.checkpoint(&all), &names, "all faults at once");

    let mut renamed = s.checkpoint();
    renamed.rename("weight_scale_2", "weight_global_scale");
    assert_inspect_finds(&work.checkpoint(&renamed), &["weight_global_scale"], "compressed-tensors names");
}

#[test]
fn inspect_accepts_the_fixtures() {
    for fixture in fixtures::all() {
        let outcome = inspect(&fixtures::checkpoint(fixture.name)).expect_code(0);
        for layer in &fixture.layers {
            assert!(outcome.stdout.contains(&layer.layer.to_string()), "{}", outcome.printed());
        }
        assert!(outcome.stdout.to_lowercase().contains("nvfp4"), "{}", outcome.printed());
    }
}

/// What `inspect` says of the scales of one kind of projection, from the tensors themselves.
#[derive(Debug, Clone, PartialEq)]
struct Range {
    count: usize,
    /// That is not zero.
    smallest: f32,
    largest: f32,
    powers_of_two: bool,
}

impl Range {
    fn of(values: &[f32]) -> Self {
        let nonzero = || values.iter().copied().filter(|&value| value != 0.0);
        Self {
            count: values.len(),
            smallest: nonzero().reduce(f32::min).unwrap_or(0.0),
            largest: values.iter().copied().fold(0.0, f32::max),
            powers_of_two: nonzero().all(|value| value.log2().fract() == 0.0),
        }
    }

    fn of_json(json: &Value) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the report holds f32 values")]
        let value = |name: &str| json[name].as_f64().unwrap_or_else(|| panic!("no {name} in {json}")) as f32;
        let count = json["count"].as_u64().and_then(|count| usize::try_from(count).ok());
        Self {
            count: count.unwrap_or_else(|| panic!("no count in {json}")),
            smallest: value("smallest"),
            largest: value("largest"),
            powers_of_two: json["powers_of_two"].as_bool().unwrap_or_else(|| panic!("no powers_of_two in {json}")),
        }
    }
}

fn inspect_json(dir: &Path) -> Value {
    let outcome = alone().args(["inspect".to_string(), "--json".into(), dir.display().to_string()]).run();
    let outcome = outcome.expect_code(0);
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {}", outcome.printed()))
}

/// The names of gate, up and down under the two schemes.
const KINDS: [(&str, [&str; 2]); 3] =
    [("gate", ["gate_proj", "w1"]), ("up", ["up_proj", "w3"]), ("down", ["down_proj", "w2"])];

/// Compares every range of a layer's routed experts with the tensors'.
#[track_caller]
fn assert_ranges(report: &Value, layer: usize, tensors: &Tensors, what: &str) {
    let layers = report["layers"].as_array().expect("layers");
    let found = layers.iter().find(|entry| entry["layer"] == layer).unwrap_or_else(|| panic!("no layer {layer}"));
    for (kind, spellings) in KINDS {
        let values = |suffix: &str| -> Vec<f32> {
            let wanted = |name: &str| {
                let of_layer = name.contains(&format!(".layers.{layer}.")) && expert_of(name).is_some();
                of_layer && spellings.iter().any(|kind| name.ends_with(&format!(".{kind}.{suffix}")))
            };
            let chosen = tensors.iter().filter(|(name, _)| wanted(name)).map(|(_, tensor)| tensor);
            chosen
                .flat_map(|tensor| match tensor.dtype {
                    Dtype::F8E4M3 => tensor.bytes.iter().map(|&bits| e4m3(bits)).collect(),
                    _ => tensor.floats(),
                })
                .collect()
        };
        let scales = found["scales"].as_array().expect("scales");
        let of_kind = scales.iter().find(|entry| entry["projection"] == kind);
        let of_kind = of_kind.unwrap_or_else(|| panic!("{what}: no {kind} in {found}"));
        for suffix in ["weight_scale", "weight_scale_2", "input_scale"] {
            let (found, wanted) = (Range::of_json(&of_kind[suffix]), Range::of(&values(suffix)));
            assert!(wanted.count > 0, "{what}: no tensor ends with {suffix}");
            assert_eq!(found, wanted, "{what}: layer {layer}, {kind} {suffix}");
        }
        let blocks = values("weight_scale");
        let number = |wanted: f32| blocks.iter().filter(|&&scale| scale == wanted).count();
        assert_eq!(of_kind["weight_scale"]["num_saturated"], number(448.0), "{what}: {kind} saturated");
        assert_eq!(of_kind["weight_scale"]["num_zero"], number(0.0), "{what}: {kind} zero");
    }
}

#[test]
fn inspect_prints_the_ranges_of_the_fixtures() {
    for fixture in fixtures::all() {
        let dir = fixtures::checkpoint(fixture.name);
        let report = inspect_json(&dir);
        let shards = files_in(&dir).into_iter().filter(|name| name.ends_with(".safetensors"));
        let tensors: Tensors = shards.flat_map(|name| safetensors::read(&dir.join(name))).collect();
        for layer in &fixture.layers {
            assert_ranges(&report, layer.layer, &tensors, fixture.name);
        }
    }
}

#[test]
fn inspect_counts_saturated_and_zero_scales() {
    let work = Work::new();
    let mut checkpoint = S::new(4, 128, 128).checkpoint();
    let scales = checkpoint.of_expert(2, "up_proj", "weight_scale");
    scales.bytes[..5].copy_from_slice(&[0x7E, 0x7E, 0x00, 0x7D, 0x01]);
    let report = inspect_json(&work.checkpoint(&checkpoint));
    assert_ranges(&report, 0, &checkpoint.tensors, "planted scales");
    let up = &report["layers"][0]["scales"][1]["weight_scale"];
    assert_eq!((&up["num_saturated"], &up["num_zero"]), (&Value::from(2), &Value::from(1)), "{up}");
    assert_eq!(up["powers_of_two"], false, "{up}");
}
