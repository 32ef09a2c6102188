//! Checkpoint files that are cut, padded, missing, or somewhere else than the index says.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::assert_answers;
use crate::support::checkpoint::{Checkpoint, delete_index, edit_index, expert_tensor, shard_name};
use crate::support::compare::assert_same_bits;
use crate::support::made::{Choice, S};
use crate::support::run::{Run, Work, files_in};
use crate::support::safetensors::{self, encode_with};

/// S(4, 128, 128) in two shards: the second holds experts 2 and 3, which only rank 1 of 2 reads.
pub(crate) struct Sharded {
    pub s: S,
    pub checkpoint: Checkpoint,
    pub dir: PathBuf,
}

impl Sharded {
    pub(crate) fn new(work: &Work) -> Self {
        let s = S::new(4, 128, 128);
        let checkpoint = s.checkpoint();
        let dir = work.sharded(&checkpoint, 2);
        Self { s, checkpoint, dir }
    }

    pub(crate) fn second(&self) -> PathBuf {
        self.dir.join(shard_name(1, 2))
    }

    fn run<'a>(&self, work: &'a Work) -> Run<'a> {
        run_s4(work, &self.dir, self.s)
    }
}

fn run_s4<'a>(work: &'a Work, dir: &Path, s: S) -> Run<'a> {
    Run::new(work, dir, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).activations("bf16").ranks(2)
}

const ANSWERS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

/// A way to spoil a shard, and what the message has to say of the spoilt file of so many bytes besides its name.
pub(crate) struct Spoilt {
    pub name: &'static str,
    pub bytes: Vec<u8>,
    pub says: Vec<String>,
}

/// D1 (i) to (v) and (vii), made from the bytes of a good shard.
pub(crate) fn spoilt_shards(good: &[u8]) -> Vec<Spoilt> {
    let cut = |name, len: usize| Spoilt {
        name,
        bytes: good[..len].to_vec(),
        // What the header promises, and what there is.
        says: vec![good.len().to_string(), len.to_string()],
    };
    let header_end = 8 + usize::try_from(u64::from_le_bytes(good[..8].try_into().expect("eight"))).expect("small");
    let mut longer = good.to_vec();
    longer.push(0);
    let mut endless = good.to_vec();
    endless[..8].fill(0xFF);
    vec![
        cut("the last byte cut", good.len() - 1),
        cut("cut in the middle of a tensor", header_end + 5000),
        Spoilt {
            name: "cut inside the header",
            bytes: good[..header_end / 2].to_vec(),
            // The header that was promised, and what lies behind its length.
            says: vec![(header_end - 8).to_string(), (header_end / 2 - 8).to_string()],
        },
        Spoilt { name: "empty", bytes: Vec::new(), says: vec!["0".into()] },
        Spoilt { name: "seven bytes", bytes: good[..7].to_vec(), says: vec!["7".into(), "8".into()] },
        Spoilt { name: "a header of 2^64 - 1 bytes", bytes: endless, says: vec![u64::MAX.to_string()] },
        Spoilt {
            name: "a trailing byte",
            bytes: longer,
            says: vec![good.len().to_string(), (good.len() + 1).to_string()],
        },
    ]
}

/// A shard that is shorter or longer than its header says is refused on all ranks, with its name and both sizes.
#[test]
fn d1_cut_and_padded_shards() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let good = fs::read(sharded.second()).expect("the second shard");
    for Spoilt { name, bytes, says } in spoilt_shards(&good) {
        safetensors::write_bytes(&sharded.second(), &bytes);
        let mut needles = vec![shard_name(1, 2)];
        needles.extend(says);
        let needles: Vec<&str> = needles.iter().map(String::as_str).collect();
        let outcome = sharded.run(&work).watch_memory().fails(&needles);
        assert!(outcome.peak_rss_bytes < 1 << 30, "{name}: {} bytes resident", outcome.peak_rss_bytes);
    }
    safetensors::write_bytes(&sharded.second(), &good);
    assert_answers(sharded.run(&work).succeed().layer(0), 0, "bf16", &ANSWERS, "the shard restored");
}

/// Tensors that share bytes, leave a gap, or whose size contradicts their shape are refused by name.
#[test]
fn d1_lying_headers() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let tensors = sharded.checkpoint.shard(1, 2);
    let name = expert_tensor(0, 3, "up_proj", "weight");
    for (what, field, value) in [
        ("overlap", "data_offsets", serde_json::json!([0, 8192])),
        ("shape", "shape", serde_json::json!([128, 65])),
        ("overflow", "shape", serde_json::json!([1u64 << 62, 64])),
        ("backwards", "data_offsets", serde_json::json!([8192, 0])),
        ("far", "data_offsets", serde_json::json!([u64::MAX - 8192, u64::MAX])),
    ] {
        let lie = encode_with(&tensors, |header| header[&name][field] = value, None);
        safetensors::write_bytes(&sharded.second(), &lie);
        let outcome = sharded.run(&work).fails(&[&shard_name(1, 2)]);
        assert!(outcome.stderr.contains(&name) || what == "overlap", "{what}: {}", outcome.printed());
    }
}

/// Header lengths around 100,000 bytes load, at any alignment of the data.
#[test]
fn d1_header_lengths() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let tensors = sharded.checkpoint.shard(1, 2);
    for header_len in [99_993, 99_994, 100_000, 100_001] {
        safetensors::write_bytes(&sharded.second(), &encode_with(&tensors, |_| {}, Some(header_len)));
        for (backend, activations) in super::backends_and_modes() {
            let done = sharded.run(&work).backend(backend).activations(activations).succeed();
            let what = format!("a header of {header_len} bytes, {backend}");
            assert_answers(done.layer(0), 0, activations, &ANSWERS, &what);
        }
    }
}

/// A shard or a tensor that the index promises and the disk lacks fails on every rank, also those that own other experts.
#[test]
fn d2_index_promises_what_is_missing() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let good = fs::read(sharded.second()).expect("the second shard");
    fs::remove_file(sharded.second()).expect("the second shard");
    sharded.run(&work).fails(&[&shard_name(1, 2)]);

    let mut tensors = sharded.checkpoint.shard(1, 2);
    let name = expert_tensor(0, 3, "gate_proj", "weight_scale");
    tensors.remove(&name).expect("the tensor");
    safetensors::write(&sharded.second(), &tensors);
    sharded.run(&work).fails(&[&name, &shard_name(1, 2)]);

    safetensors::write_bytes(&sharded.second(), &good);
    edit_index(&sharded.dir, |index| {
        index["weight_map"].as_object_mut().expect("a map").remove(&name).expect("the tensor");
    });
    sharded.run(&work).fails(&[&name]);
}

/// A stray shard beside the indexed ones is not read, and mentioned once.
#[test]
fn d2_stray_shard() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let mut other = sharded.checkpoint.clone();
    other.set_scalar(0, "down_proj", "weight_scale_2", 64.0);
    let stray = other.tensors.into_iter().filter(|(name, _)| name.contains("experts.0.")).collect();
    safetensors::write(&sharded.dir.join("model-extra.safetensors"), &stray);
    let done = sharded.run(&work).succeed();
    assert_answers(done.layer(0), 0, "bf16", &ANSWERS, "a stray shard");
    let warnings = done.outcome.stderr.matches("model-extra.safetensors").count();
    assert_eq!(warnings, 1, "one warning: {}", done.outcome.printed());
}

/// Without an index, shards are found and read by their headers: the same bits.
#[test]
fn d2_no_index() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let indexed = sharded.run(&work).succeed();
    delete_index(&sharded.dir);
    let single = work.checkpoint(&sharded.checkpoint);
    let by_name = work.path("checkpoint");
    sharded.checkpoint.write_configs(&by_name);
    for (shard, file) in ["layer-0-experts-0-1.safetensors", "layer-0-experts-2-3.safetensors"].iter().enumerate() {
        safetensors::write(&by_name.join(file), &sharded.checkpoint.shard(shard, 2));
    }
    for (what, dir) in [("index deleted", &sharded.dir), ("single file", &single), ("other names", &by_name)] {
        let done = run_s4(&work, dir, sharded.s).succeed();
        assert_same_bits(done.layer(0), indexed.layer(0), what);
    }
    // Two files that hold one tensor leave open which is meant.
    safetensors::write(&by_name.join("more.safetensors"), &sharded.checkpoint.shard(1, 2));
    run_s4(&work, &by_name, sharded.s).fails(&["more.safetensors", "layer-0-experts-2-3.safetensors"]);
}

/// An index that points out of its directory is refused; the hub cache's links to a sibling directory load.
#[test]
fn d2_outside_the_directory() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let outside = sharded.dir.parent().expect("a parent").join("outside.safetensors");
    fs::copy(sharded.second(), &outside).expect("a copy outside");
    let name = expert_tensor(0, 3, "up_proj", "weight");
    let absolute = outside.display().to_string();
    for path in ["../outside.safetensors", absolute.as_str(), "sub/../../outside.safetensors"] {
        edit_index(&sharded.dir, |index| index["weight_map"][&name] = path.into());
        sharded.run(&work).fails(&[path]);
    }

    let cache = work.path("cache");
    let (blobs, snapshot) = (cache.join("blobs"), cache.join("snapshots/0123abcd"));
    fs::create_dir_all(&blobs).expect("blobs");
    fs::create_dir_all(&snapshot).expect("a snapshot");
    sharded.checkpoint.write_shards(&blobs, 2);
    for (number, file) in files_in(&blobs).iter().enumerate() {
        let blob = format!("blob{number}");
        fs::rename(blobs.join(file), blobs.join(&blob)).expect("a blob");
        symlink(Path::new("../../blobs").join(&blob), snapshot.join(file)).expect("a link");
    }
    let done = run_s4(&work, &snapshot, sharded.s).succeed();
    assert_answers(done.layer(0), 0, "bf16", &ANSWERS, "a hub cache");
}

/// A failing run leaves an existing output as it was, and no temporary file beside it.
#[test]
fn d1_outputs_appear_whole_or_not_at_all() {
    let work = Work::new();
    let sharded = Sharded::new(&work);
    let results = work.path("results");
    fs::create_dir_all(&results).expect("a directory");
    let output = results.join("output.safetensors");
    safetensors::write_bytes(&output, b"older");
    let run = sharded.run(&work).output_at(&output);
    run.clone().choice(&Choice::single([0, 1, 2, 9])).fails(&["9"]);
    assert_eq!(fs::read(&output).expect("still there"), b"older");
    assert_eq!(files_in(&results), ["output.safetensors"]);
    assert_answers(run.succeed().layer(0), 0, "bf16", &ANSWERS, "over an older output");
    assert_eq!(files_in(&results), ["output.safetensors"]);
}
