//! Layers on GPUs against values that were not computed there: every fixture, and samples of the models that it is all for.

use super::backends_and_modes;
use crate::fixtures::{figure, verdict, verify};
use crate::support::compare::{Distance, assert_close};
use crate::support::fixtures::{self, Expectation};
use crate::support::gpu::{GPU_BACKENDS, job_with_cache, on_gpus};
use crate::support::launch::alone;
use crate::support::report::Report;
use crate::support::run::{Run, Work};
use crate::support::safetensors;
use crate::support::tensor::Tensor;

/// The relative L2 that DESIGN.md section 11 allows on GPUs.
fn bound(expectation: &Expectation) -> f64 {
    if expectation.activations == "quantised" { 1e-2 } else { 4e-3 }
}

/// Every layer, part, mode and activation of a fixture that has expected values.
fn every_layer(name: &str, ranks: usize, shared_gpu: bool) {
    let (work, fixture) = (Work::new(), fixtures::named(name));
    let inputs: Vec<Tensor> =
        fixture.layers.iter().map(|layer| safetensors::read(&layer.file)[&layer.tensor("x")].clone()).collect();
    let input = Tensor::stack(&inputs.iter().collect::<Vec<_>>());
    // What ranks that share a GPU are for is the way of tokens between them.
    let travels = |expectation: &&Expectation| !shared_gpu || expectation.part != "shared";
    for expectation in fixture.expectations.iter().filter(travels) {
        let run = Run::new(&work, &fixtures::checkpoint(name), &input)
            .option("part", expectation.part)
            .activations(expectation.activations)
            .key("cluster", "share_gpus", &shared_gpu.to_string())
            .ranks(ranks);
        let run = match expectation.activation {
            Some(activation) => run.activation(activation),
            None => run.without("activation"),
        };
        for backend in GPU_BACKENDS {
            let done = on_gpus(&run, backend).succeed();
            let mut start = 0;
            for (layer, input) in fixture.layers.iter().zip(&inputs) {
                let end = start + input.shape[0];
                let wanted = &safetensors::read(&layer.file)[&layer.tensor(&expectation.tensor)];
                let what = format!("{name} layer {} {} {backend} R={ranks}", layer.layer, expectation.tensor);
                assert_close(&done.layer(layer.layer).rows(start, end), wanted, bound(expectation), &what);
                start = end;
            }
        }
    }
}

/// A test for each number of ranks, of each fixture by itself: all in one would take minutes.
macro_rules! every_layer_of {
    ($($fixture:ident: $name:literal,)+) => { $(mod $fixture {
        use super::every_layer;

        #[test]
        #[ignore = "needs a GPU and NVRTC"]
        fn one_gpu_every_layer() {
            every_layer($name, 1, false);
        }

        #[test]
        #[ignore = "needs a GPU and NVRTC"]
        fn one_gpu_every_layer_of_3_ranks() {
            every_layer($name, 3, true);
        }

        #[test]
        #[ignore = "needs a GPU and NVRTC"]
        fn one_gpu_every_layer_of_8_ranks() {
            every_layer($name, 8, true);
        }

        #[test]
        #[ignore = "needs a GPU and NVRTC"]
        fn one_gpu_every_layer_of_16_ranks() {
            every_layer($name, 16, true);
        }

        #[test]
        #[ignore = "needs two GPUs, NVRTC and NCCL"]
        fn two_gpus_every_layer() {
            every_layer($name, 2, false);
        }
    })+

    #[test]
    fn every_fixture_has_tests_on_gpus() {
        assert_eq!(fixtures::all().iter().map(|fixture| fixture.name).collect::<Vec<_>>(), [$($name),+]);
    } };
}

every_layer_of! {
    dsv3_tiny: "modelopt-dsv3-tiny",
    dsv3_mixed: "modelopt-dsv3-mixed",
    qwen3_tiny: "modelopt-qwen3-tiny",
    k3_tiny: "k3-tiny",
}

/// SiTU is right, and SwiGLU or a beta that is 5 % off is not: `verify` says so in both modes on both backends.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_another_activation_or_beta_is_told_apart() {
    let fixture = fixtures::named("modelopt-dsv3-tiny");
    let layer = &fixture.layers[0];
    let of_situ = |expectation: &&Expectation| {
        expectation.part == "routed" && expectation.activation.is_some_and(|activation| activation.starts_with("situ"))
    };
    for expectation in fixture.expectations.iter().filter(of_situ) {
        for backend in GPU_BACKENDS {
            for (activation, code) in [("situ:4,25", 0), ("situ:4.2,25", 1), ("situ:3.8,25", 1), ("swiglu", 1)] {
                let asked = Expectation { activation: Some(activation), ..expectation.clone() };
                let job = verify(&fixture, layer, &asked).args([format!("--backend={backend}")]);
                let outcome = job_with_cache(job).run().expect_code(code);
                let verdict = verdict(&outcome.stdout);
                assert_eq!(verdict["pass"], code == 0, "{backend} {activation}: {}", outcome.printed());
            }
        }
    }
}

/// A layer of a model's widths and top-k with as many experts as fit, and its reference on a sample of rows.
fn sampled_model(geometry: &str, experts: &str) {
    let work = Work::new();
    let dir = work.path("model");
    let sample = alone().args(["sample", "--geometry", geometry, "--experts", experts, "--tokens", "512", "--json"]);
    let outcome = sample.args(["--out".into(), dir.clone()]).run().expect_code(0);
    let written: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let layer = written["layers"][0].as_u64().expect("a layer");
    for (backend, activations) in backends_and_modes() {
        let job = alone().args([
            "verify".to_owned(),
            format!("--checkpoint={}", dir.display()),
            format!("--layer={layer}"),
            format!("--input={}/inputs.safetensors:hidden", dir.display()),
            format!("--backend={backend}"),
            format!("--activations={activations}"),
            "--rows=16".to_owned(),
            "--part=block".to_owned(),
            "--json".to_owned(),
        ]);
        let outcome = job_with_cache(job).without_env("LOCKSTEP_THREADS").run().expect_code(0);
        let verdict = verdict(&outcome.stdout);
        let what = format!("{geometry} {backend} {activations}");
        assert_eq!(
            (&verdict["pass"], &verdict["num_rows"]),
            (&true.into(), &16.into()),
            "{what}: {}",
            outcome.printed()
        );
        say(&format!(
            "{what}: rel_l2 {:.3e}, norm ratio {:.6}",
            figure(&verdict, "rel_l2"),
            figure(&verdict, "norm_ratio")
        ));
    }
}

/// What a person who runs these by name wants to write down.
#[expect(clippy::print_stderr, reason = "figures of tests that are run by name")]
fn say(line: &str) {
    eprintln!("{line}");
}

#[test]
#[ignore = "needs a GPU, NVRTC, and 3 GB of disk"]
fn one_gpu_a_layer_of_kimi_k3() {
    sampled_model("kimi-k3", "112");
}

#[test]
#[ignore = "needs a GPU, NVRTC, and 2 GB of disk"]
fn one_gpu_a_layer_of_deepseek_v3() {
    sampled_model("deepseek-v3", "64");
}

/// Per rank, which identity ran how often, and the fingerprint that all ranks have compared.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_the_report_says_what_ran_where() {
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let work = Work::new();
    let input = crate::bits::tokens(&fixture);
    for (backend, activations) in backends_and_modes() {
        let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &input).without("activation").ranks(2);
        let done = on_gpus(&run.option("part", "block"), backend).activations(activations).steps(3).succeed();
        let report: &Report = &done.report;
        let what = format!("{backend} {activations}: {}", report.0);
        for digest in ["/decided/selection", "/decided/session"] {
            let digest = report.at(digest).as_str().expect("text");
            assert_eq!(digest.len(), 64, "{what}");
            assert!(done.outcome.stdout.contains(digest), "a person sees it: {}", done.outcome.printed());
        }
        for rank in 0..2 {
            let launches = report.at(&format!("/ranks/{rank}/launches")).as_array().expect("a list");
            for layer in &fixture.layers {
                let routed =
                    launches.iter().filter(|launch| launch["layer"] == layer.layer && launch["part"] == "routed");
                let rows: u64 = routed.map(|launch| launch["rows"].as_u64().expect("a count")).sum();
                let held = report.at(&format!("/ranks/{rank}/layers")).as_array().expect("a list");
                let held = held.iter().find(|held| held["layer"] == layer.layer).expect("the layer");
                let counted: u64 = held["rows_per_expert"]
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(|rows| rows.as_u64().expect("rows"))
                    .sum();
                assert_eq!(rows, counted, "rank {rank} layer {}: {what}", layer.layer);
                assert!(rows > 0, "rank {rank} layer {} computed nothing: {what}", layer.layer);
            }
            let identity = launches[0]["identity"].as_str().expect("a name");
            assert!(identity.starts_with(&format!("lockstep.{backend}.grouped_gemm.")), "{what}");
            assert_eq!(launches[0]["calls"], 3, "{what}");
        }
    }
    let same = Distance::of(&[1.0], &[1.0]);
    assert_eq!(same.rel_l2, 0.0);
}
