//! The commands that judge and make: `verify` tells right from wrong, `sample` writes what runs.

use std::path::Path;

use serde_json::json;

use crate::fixtures::{figure, verdict, verify};
use crate::inspect::inspect;
use crate::support::fixtures::{self, Layer};
use crate::support::launch::{FAILURE_LIMIT, Job, alone, mpirun};
use crate::support::run::{Run, Work, files_in};
use crate::support::safetensors;
use crate::support::tensor::Tensor;

/// What is wrong makes `verify` exit 1 and say so; what cannot be compared is bad input.
#[test]
fn verify_tells_wrong_from_right() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let (layer, right) = (&fixture.layers[0], &fixture.expectations[0]);
    assert_eq!(right.tensor, "routed.w4a16.swiglu");
    for wrong in ["routed.w4a16.situ", "routed.w4a4.swiglu", "shared.w4a16.swiglu"] {
        let mut expectation = right.clone();
        expectation.tensor = wrong.into();
        let outcome = verify(&fixture, layer, &expectation).ranks(2).run().expect_code(1);
        let verdict = verdict(&outcome.stdout);
        assert_eq!(verdict["pass"], false, "{wrong}: {}", outcome.printed());
        assert!(figure(&verdict, "rel_l2") > figure(&verdict, "bound"), "{wrong}: {}", outcome.printed());
    }

    let good = safetensors::read(&layer.file);
    type Edit = fn(&mut Tensor);
    let edits: [(&str, i32, Edit); 4] = [
        ("a value of 1,000 more", 1, |tensor| {
            let value = tensor.floats()[5000] + 1000.0;
            tensor.bytes[20_000..20_004].copy_from_slice(&value.to_le_bytes());
        }),
        ("a NaN", 1, |tensor| tensor.bytes[20_000..20_004].copy_from_slice(&f32::NAN.to_le_bytes())),
        ("two rows exchanged", 1, |tensor| tensor.bytes.rotate_left(256 * 4)),
        ("a row short", 2, |tensor| *tensor = tensor.rows(0, 36)),
    ];
    for (what, code, edit) in edits {
        let mut tensors = good.clone();
        edit(tensors.get_mut(&right.tensor).expect("the tensor"));
        let file = work.tensors("expected", &tensors);
        let mut moved = layer.clone();
        moved.file = file;
        let outcome = verify(&fixture, &moved, right).ranks(2).limit(FAILURE_LIMIT).run();
        assert_eq!(outcome.code, code, "{what}: {}", outcome.printed());
        if code == 2 {
            outcome.fails_clearly(2, &["36", "37"]);
        }
    }
}

/// Without `--expected` the reference is computed, and another backend meets it.
#[test]
fn verify_computes_the_reference() {
    let layer = &fixtures::named("modelopt-qwen3-tiny").layers[1];
    let input = format!("--input={}:x", layer.file.display());
    let checkpoint = format!("--checkpoint={}", fixtures::checkpoint("modelopt-qwen3-tiny").display());
    let args = ["verify", "--layer=1", "--part=routed", "--backend=simd", "--json", &input, &checkpoint];
    let outcome = mpirun(3).args(args).run().expect_code(0);
    assert_eq!(verdict(&outcome.stdout)["pass"], true, "{}", outcome.printed());
}

/// A sample of rows is judged and nothing else, under the rows' own numbers, against values and against the reference.
#[test]
fn verify_compares_a_sample_of_rows() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-qwen3-tiny");
    let (layer, right) = (&fixture.layers[0], &fixture.expectations[0]);
    let rows = |job: Job| job.args(["--rows=4"]).ranks(2).limit(FAILURE_LIMIT).run();
    // Of 37 rows these are 0, 9, 18 and 27.
    for (row, code) in [(17, 0), (18, 1)] {
        let mut tensors = safetensors::read(&layer.file);
        let tensor = tensors.get_mut(&right.tensor).expect("the tensor");
        let at = row * tensor.shape[1] * 4;
        tensor.bytes[at..at + 4].copy_from_slice(&1000f32.to_le_bytes());
        let moved = Layer { file: work.tensors("expected", &tensors), ..layer.clone() };
        let verdict = verdict(&rows(verify(&fixture, &moved, right)).expect_code(code).stdout);
        assert_eq!(verdict["num_rows"], 4);
        assert!(code == 0 || verdict["max_abs_at"] == json!([18, 0]), "{verdict}");
    }
    let [input, checkpoint] =
        [layer.file.display().to_string(), fixtures::checkpoint(fixture.name).display().to_string()];
    for split in ["even", "0,37", "30,7"] {
        let job = mpirun(2).args(["verify", "--layer=0", "--part=routed", "--backend=simd", "--json"]);
        let job =
            job.args([format!("--input={input}:x"), format!("--checkpoint={checkpoint}"), format!("--split={split}")]);
        let verdict = verdict(&rows(job).expect_code(0).stdout);
        assert_eq!((&verdict["pass"], &verdict["num_rows"]), (&json!(true), &json!(4)), "{split}: {verdict}");
    }
    // A choice from a file follows its tokens.
    let expected = safetensors::read(&layer.file);
    let choice = ["topk_idx", "topk_weights"].map(|name| (name.to_owned(), expected[name].clone())).into();
    let job = mpirun(1).args(["verify", "--layer=0", "--part=routed", "--backend=simd", "--json"]);
    let topk = work.tensors("choice", &choice).display().to_string();
    let job = job.args([format!("--input={input}:x"), format!("--checkpoint={checkpoint}"), format!("--topk={topk}")]);
    rows(job).expect_code(0);
}

/// A person who does not ask for JSON gets the same figures in words.
#[test]
fn verify_prints_for_people() {
    let layer = &fixtures::named("modelopt-qwen3-tiny").layers[0];
    let input = format!("--input={}:x", layer.file.display());
    let expected = format!("--expected={}:routed.w4a16.swiglu", layer.file.display());
    let checkpoint = format!("--checkpoint={}", fixtures::checkpoint("modelopt-qwen3-tiny").display());
    let args = ["verify", "--layer=0", "--part=routed", "--activations=bf16", &input, &expected, &checkpoint];
    let outcome = mpirun(2).args(args).run().expect_code(0);
    let text = outcome.stdout.to_lowercase();
    for word in ["relative l2", "norm ratio", "cosine", "largest"] {
        assert!(text.contains(word), "no {word:?}: {}", outcome.printed());
        assert_eq!(text.matches(word).count(), 1, "{word:?} once and not once a rank: {}", outcome.printed());
    }
}

/// The sha256 of every file of a directory, by name.
fn hashes(dir: &Path) -> Vec<(String, String)> {
    files_in(dir).into_iter().map(|name| (name.clone(), safetensors::sha256(&dir.join(name)))).collect()
}

/// A sample of each geometry runs, verifies and inspects clean; a seed gives the same bytes, another one others.
#[test]
fn samples_run_and_verify() {
    let work = Work::new();
    for (geometry, layer) in [("kimi-k3", 1), ("deepseek-v3", 3), ("qwen3-235b", 0)] {
        let sample = |seed: &str| {
            let dir = work.path(geometry);
            let size = ["--experts=24", "--hidden=256", "--intermediate=128", "--layers=1"];
            let rest = [format!("--geometry={geometry}"), format!("--seed={seed}"), format!("--out={}", dir.display())];
            let latent = (geometry == "kimi-k3").then_some("--latent=128");
            alone().args(["sample"]).args(size).args(latent).args(rest).run().expect_code(0);
            dir
        };
        let dir = sample("1");
        assert_eq!(hashes(&sample("1")), hashes(&dir), "{geometry}: one seed, one sample");
        assert_ne!(hashes(&sample("2")), hashes(&dir), "{geometry}: another seed, another sample");
        inspect(&dir).expect_code(0);
        let input = dir.join("inputs.safetensors");
        let outcome = mpirun(2)
            .args(["verify", "--part=block", "--backend=simd", "--json"])
            .args([
                format!("--checkpoint={}", dir.display()),
                format!("--layer={layer}"),
                format!("--input={}", input.display()),
            ])
            .run()
            .expect_code(0);
        assert_eq!(verdict(&outcome.stdout)["pass"], true, "{geometry}: {}", outcome.printed());
    }
}

/// On hosts no layer is recorded: that is refused where it was asked for, and otherwise said.
#[test]
fn cuda_graphs_are_refused_on_hosts_and_auto_says_why_there_are_none() {
    let work = Work::new();
    let input = crate::bits::tokens(&fixtures::named("k3-tiny"));
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &input).without("activation").ranks(2);
    let asked = |word: &str| run.clone().key("moe", "cuda_graph", word);
    asked("on").fails_with(2, &["moe.cuda_graph: on", "can't be recorded: it runs on hosts", "cluster.device: gpu"]);
    let done = asked("auto").succeed();
    let why = done.report.at("/decided/layers/0/no_cuda_graph").as_str().expect("a reason");
    assert!(why.contains("it runs on hosts"), "{why}");
    assert!(done.outcome.stdout.contains("no CUDA graph: it runs on hosts"), "{}", done.outcome.printed());
    assert!(!asked("off").succeed().outcome.stdout.contains("CUDA graph"));
}

/// Likewise.
#[test]
fn overlap_is_refused_on_hosts_and_auto_says_why_there_is_none() {
    let work = Work::new();
    let input = crate::bits::tokens(&fixtures::named("k3-tiny"));
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &input).without("activation").ranks(2);
    let asked = |word: &str| run.clone().key("dispatch", "overlap", word);
    asked("on").fails_with(2, &["dispatch.overlap: on", "can't overlap: it runs on hosts", "cluster.device: gpu"]);
    let done = asked("auto").succeed();
    let why = done.report.at("/decided/layers/0/no_overlap").as_str().expect("a reason");
    assert!(why.contains("it runs on hosts"), "{why}");
    assert!(done.outcome.stdout.contains("no overlap: it runs on hosts"), "{}", done.outcome.printed());
    assert!(!asked("off").succeed().outcome.stdout.contains("no overlap"));
}
