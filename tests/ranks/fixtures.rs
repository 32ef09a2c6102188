//! Every layer of the fixture checkpoints against values computed outside this project, in every mode, activation and part
//! that they hold, on both backends, with one to four ranks.

use serde_json::Value;

use crate::support::compare::assert_close;
use crate::support::fixtures::{self, Expectation, Fixture, Layer};
use crate::support::launch::{Job, mpirun};
use crate::support::run::{BACKENDS, Run, Work};
use crate::support::safetensors;
use crate::support::tensor::Tensor;

const RANKS: [usize; 4] = [1, 2, 3, 4];

/// Runs both layers on the rows of both at once, and compares the rows that belong to each.
fn run_against_expected(name: &str) {
    let work = Work::new();
    let fixture = fixtures::named(name);
    let inputs: Vec<Tensor> =
        fixture.layers.iter().map(|layer| safetensors::read(&layer.file)[&layer.tensor("x")].clone()).collect();
    let input = Tensor::stack(&inputs.iter().collect::<Vec<_>>());
    let layers: Vec<String> = fixture.layers.iter().map(|layer| layer.layer.to_string()).collect();
    for expectation in &fixture.expectations {
        let run = Run::new(&work, &fixtures::checkpoint(name), &input)
            .option("layers", &layers.join(","))
            .option("part", expectation.part)
            .activations(expectation.activations);
        let run = match expectation.activation {
            Some(activation) => run.activation(activation),
            None => run.without("activation"),
        };
        for backend in BACKENDS {
            for ranks in RANKS {
                let done = run.clone().backend(backend).ranks(ranks).succeed();
                let mut start = 0;
                for (layer, input) in fixture.layers.iter().zip(&inputs) {
                    let end = start + input.shape[0];
                    let wanted = &safetensors::read(&layer.file)[&layer.tensor(&expectation.tensor)];
                    let found = done.layer(layer.layer).rows(start, end);
                    let what = format!("{name} layer {} {} {backend} R={ranks}", layer.layer, expectation.tensor);
                    assert_close(&found, wanted, expectation.bound, &what);
                    start = end;
                }
            }
        }
    }
}

#[test]
fn run_dsv3_tiny() {
    run_against_expected("modelopt-dsv3-tiny");
}

#[test]
fn run_dsv3_mixed() {
    run_against_expected("modelopt-dsv3-mixed");
}

#[test]
fn run_qwen3_tiny() {
    run_against_expected("modelopt-qwen3-tiny");
}

#[test]
fn run_k3_tiny() {
    run_against_expected("k3-tiny");
}

/// `lockstep verify` of one tensor of an expected file.
pub(crate) fn verify(fixture: &Fixture, layer: &Layer, expectation: &Expectation) -> Job {
    let of_file = |tensor: &str| format!("{}:{}", layer.file.display(), layer.tensor(tensor));
    let job = mpirun(1).args([
        "verify".to_string(),
        format!("--checkpoint={}", fixtures::checkpoint(fixture.name).display()),
        format!("--layer={}", layer.layer),
        format!("--input={}", of_file("x")),
        format!("--expected={}", of_file(&expectation.tensor)),
        format!("--part={}", expectation.part),
        format!("--activations={}", expectation.activations),
        "--json".to_string(),
    ]);
    match expectation.activation {
        Some(activation) => job.args([format!("--activation={activation}")]),
        None => job,
    }
}

/// The JSON that `verify --json` prints.
#[track_caller]
pub(crate) fn verdict(stdout: &str) -> Value {
    let start = stdout.find('{').unwrap_or_else(|| panic!("no JSON in {stdout:?}"));
    serde_json::from_str(&stdout[start..]).unwrap_or_else(|error| panic!("{error} in {stdout:?}"))
}

#[track_caller]
pub(crate) fn figure(verdict: &Value, name: &str) -> f64 {
    verdict[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {verdict}"))
}

/// `verify` reaches the same judgement, and holds each part to no looser a bound than DESIGN.md allows.
fn verify_against_expected(name: &str) {
    let fixture = fixtures::named(name);
    for (position, expectation) in fixture.expectations.iter().enumerate() {
        for layer in &fixture.layers {
            for (backend_idx, backend) in BACKENDS.into_iter().enumerate() {
                let ranks = RANKS[(position + layer.layer + 2 * backend_idx) % RANKS.len()];
                let job = verify(&fixture, layer, expectation).ranks(ranks).args([format!("--backend={backend}")]);
                let outcome = job.run().expect_code(0);
                let verdict = verdict(&outcome.stdout);
                let printed = outcome.printed();
                let (rel_l2, bound) = (figure(&verdict, "rel_l2"), figure(&verdict, "bound"));
                assert_eq!(verdict["pass"], true, "{printed}");
                // The terms of a bound add up: K3's 1 % comes on top of the order of sums.
                assert!(rel_l2 <= bound && bound <= expectation.bound + 1e-5, "{printed}");
                assert!((figure(&verdict, "norm_ratio") - 1.0).abs() <= 0.01, "{printed}");
                assert!(figure(&verdict, "cosine") > 0.999_9, "{printed}");
                assert!(figure(&verdict, "max_abs").is_finite(), "{printed}");
            }
        }
    }
}

#[test]
fn verify_dsv3_tiny() {
    verify_against_expected("modelopt-dsv3-tiny");
}

#[test]
fn verify_dsv3_mixed() {
    verify_against_expected("modelopt-dsv3-mixed");
}

#[test]
fn verify_qwen3_tiny() {
    verify_against_expected("modelopt-qwen3-tiny");
}

#[test]
fn verify_k3_tiny() {
    verify_against_expected("k3-tiny");
}

/// The router's choice: ids equal, weights within 2e-6 relative.
#[test]
fn routers_choose_as_expected() {
    let work = Work::new();
    for fixture in fixtures::all() {
        for layer in &fixture.layers {
            let expected = safetensors::read(&layer.file);
            let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &expected[&layer.tensor("x")])
                .option("layers", &layer.layer.to_string())
                .without("activation")
                .ranks(2)
                .export_topk();
            let done = run.succeed();
            let what = format!("{} layer {}", fixture.name, layer.layer);
            let (ids, weights) = (&expected[&layer.tensor("topk_idx")], &expected[&layer.tensor("topk_weights")]);
            let found = |name: &str| &done.exported[&format!("layers.{}.{name}", layer.layer)];
            let num_topk = ids.shape[1];
            let pairs = found("topk_idx").integers().into_iter().zip(ids.integers()).enumerate();
            for (position, (found, wanted)) in pairs {
                let (row, slot) = (position / num_topk, position % num_topk);
                assert_eq!(found, wanted, "{what}: id at [{row}, {slot}]");
            }
            let pairs = found("topk_weights").floats().into_iter().zip(weights.floats()).enumerate();
            for (position, (found, wanted)) in pairs {
                let (row, slot) = (position / num_topk, position % num_topk);
                let good = (found - wanted).abs() <= 2e-6 * wanted.abs();
                assert!(good, "{what}: weight at [{row}, {slot}] is {found}, want {wanted}");
            }
        }
    }
}

/// The expected file's own choice, as an engine with its own router would give it.
#[test]
fn topk_from_the_expected_file() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    for layer in &fixture.layers {
        let expected = safetensors::read(&layer.file);
        let choice = ["topk_idx", "topk_weights"].map(|name| (name.to_string(), expected[name].clone())).into();
        let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &expected["x"])
            .option("layers", &layer.layer.to_string())
            .activation("swiglu")
            .activations("quantised")
            .ranks(3)
            .choice_tensors(&choice);
        let what = format!("layer {}", layer.layer);
        assert_close(run.succeed().layer(layer.layer), &expected["routed.w4a4.swiglu"], 1e-5, &what);
    }
}
