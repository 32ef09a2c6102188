//! One backend gives one file: over ranks, splits, chunks and threads.

use std::collections::BTreeMap;

use crate::support::compare::assert_same_bits;
use crate::support::fixtures;
use crate::support::run::{ACTIVATIONS, BACKENDS, Done, Run, Work};
use crate::support::safetensors;
use crate::support::tensor::Tensor;

/// How a run is spread: ranks, tokens of each (empty: even), `chunk_tokens`, threads a rank.
#[derive(Debug, Clone, Copy)]
struct Spread {
    ranks: usize,
    split: &'static [usize],
    chunk_tokens: Option<usize>,
    threads: usize,
}

const fn spread(ranks: usize, split: &'static [usize], chunk_tokens: Option<usize>, threads: usize) -> Spread {
    Spread { ranks, split, chunk_tokens, threads }
}

/// Of 37 tokens.
const SPREADS: [Spread; 14] = [
    spread(1, &[], None, 1),
    spread(2, &[], None, 1),
    spread(3, &[], None, 1),
    spread(4, &[], None, 1),
    spread(3, &[37, 0, 0], None, 1),
    spread(3, &[0, 0, 37], None, 1),
    spread(3, &[1, 35, 1], None, 1),
    spread(4, &[0, 7, 0, 30], None, 1),
    spread(3, &[], Some(1), 1),
    spread(2, &[30, 7], Some(7), 1),
    spread(4, &[], Some(16), 1),
    spread(1, &[], Some(5), 2),
    spread(2, &[], None, 2),
    spread(1, &[], None, 3),
];

fn apply<'a>(run: &Run<'a>, spread: Spread) -> Run<'a> {
    let mut run = run.clone().ranks(spread.ranks).env("LOCKSTEP_THREADS", &spread.threads.to_string());
    if !spread.split.is_empty() {
        run = run.split(spread.split);
    }
    if let Some(chunk_tokens) = spread.chunk_tokens {
        run = run.key("dispatch", "chunk_tokens", &chunk_tokens.to_string());
    }
    run
}

/// 37 tokens for a fixture: the first layer's, K3's 29 filled up with the first of them.
pub(crate) fn tokens(fixture: &fixtures::Fixture) -> Tensor {
    let layer = &fixture.layers[0];
    let x = safetensors::read(&layer.file)[&layer.tensor("x")].clone();
    if x.shape[0] == 37 { x } else { Tensor::stack(&[&x, &x.rows(0, 37 - x.shape[0])]) }
}

#[track_caller]
pub(crate) fn assert_same_file(found: &Done, wanted: &Done, what: &str) {
    for (name, tensor) in &wanted.output {
        assert_same_bits(&found.output[name], tensor, &format!("{what}: {name}"));
    }
    assert_eq!(found.sha256, wanted.sha256, "{what}: the tensors are equal but the files are not");
}

/// All spreads of the whole block of all layers, in both modes.
fn every_spread_gives_one_file(name: &str, backend: &str) {
    let work = Work::new();
    let fixture = fixtures::named(name);
    let base = Run::new(&work, &fixtures::checkpoint(name), &tokens(&fixture))
        .option("part", "block")
        .without("activation")
        .backend(backend)
        .key("moe", "combine", "slot");
    let mut files = BTreeMap::new();
    for activations in ACTIVATIONS {
        let run = base.clone().activations(activations);
        let first = apply(&run, SPREADS[0]).succeed();
        for spread in &SPREADS[1..] {
            let done = apply(&run, *spread).succeed();
            assert_same_file(&done, &first, &format!("{name} {backend} {activations} {spread:?}"));
        }
        files.insert(first.sha256.clone(), activations);
    }
    assert_eq!(files.len(), ACTIVATIONS.len(), "the modes differ, or this test sees nothing");
}

#[test]
fn dsv3_mixed_reference() {
    every_spread_gives_one_file("modelopt-dsv3-mixed", "reference");
}

#[test]
fn dsv3_mixed_simd() {
    every_spread_gives_one_file("modelopt-dsv3-mixed", "simd");
}

#[test]
fn qwen3_tiny_simd() {
    every_spread_gives_one_file("modelopt-qwen3-tiny", "simd");
}

#[test]
fn k3_tiny_reference() {
    every_spread_gives_one_file("k3-tiny", "reference");
}

#[test]
fn k3_tiny_simd() {
    every_spread_gives_one_file("k3-tiny", "simd");
}

/// bf16 output of the default combine, and the payloads that carry a value exactly, change nothing either.
#[test]
fn output_dtype_and_exact_payloads() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &tokens(&fixture)).without("activation");
    for backend in BACKENDS {
        for activations in ACTIVATIONS {
            let run = run.clone().backend(backend).activations(activations).output_dtype("bf16");
            let first = run.clone().succeed();
            let payloads: &[&str] = if activations == "bf16" { &["f32", "bf16"] } else { &["f32", "bf16", "nvfp4"] };
            for payload in payloads {
                let done = run.clone().ranks(3).key("dispatch", "payload", payload).succeed();
                assert_same_file(&done, &first, &format!("{backend} {activations} payload {payload}"));
            }
        }
    }
}

/// `combine: rank` has fixed bits for a placement, and agrees with `slot` to rounding.
#[test]
fn combine_rank_is_fixed_for_a_placement() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &tokens(&fixture)).without("activation").ranks(3);
    let slot = run.clone().key("moe", "combine", "slot").succeed();
    let rank = run.key("moe", "combine", "rank");
    let first = rank.succeed();
    let moved = rank.clone().split(&[1, 35, 1]).key("dispatch", "chunk_tokens", "4").succeed();
    assert_same_file(&moved, &first, "combine rank, tokens elsewhere");
    for (name, wanted) in &slot.output {
        crate::support::compare::assert_close(&first.output[name], wanted, 1e-6, &format!("combine rank: {name}"));
    }
    let bytes = |done: &Done| done.report.by_rank("dispatch_bytes_sent").iter().sum::<u64>();
    assert!(bytes(&first) < bytes(&slot), "combine rank is there to send less");
}

#[test]
fn poisoned_workspaces_change_nothing() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let base = Run::new(&work, &fixtures::checkpoint("modelopt-dsv3-mixed"), &tokens(&fixture))
        .option("part", "block")
        .without("activation")
        .ranks(2);
    for backend in BACKENDS {
        let run = base.clone().backend(backend);
        let poisoned = run.clone().env("LOCKSTEP_FAULT", "*:experts:poison").succeed();
        assert_same_file(&poisoned, &run.succeed(), backend);
    }
}
