//! What ranks are asked for: which of it is compared, and what is said where it differs.

use std::collections::BTreeSet;

use super::*;
use crate::config::{KEYS, Override, Sources};
use crate::select::InstructionSet;
use crate::select::tests::worlds::host;
use crate::world::Group;
use crate::world::simulated::simulate;

/// Another value than the default for every key; `version` has one value only.
const OTHER_VALUES: [(&str, &str); 34] = [
    ("name", "another"),
    ("cluster.nodes", "2"),
    ("cluster.ranks_per_node", "4"),
    ("cluster.device", "auto"),
    ("cluster.share_gpus", "true"),
    ("cluster.scale_up_ranks", "2"),
    ("links.scale_up_gbyte_per_s", "450"),
    ("links.scale_out_gbyte_per_s", "50"),
    ("links.memory_gbyte_per_s", "4800"),
    ("links.tflops_bf16", "989"),
    ("moe.backend", "simd"),
    ("moe.implementation", "simd.nvfp4"),
    ("moe.allow_fallback", "true"),
    ("moe.activations", "bf16"),
    ("moe.activation", "situ:4,25"),
    ("moe.combine", "rank"),
    ("moe.batch_invariant", "true"),
    ("moe.tuning", "on"),
    ("moe.cuda_graph", "on"),
    ("dispatch.transport", "host"),
    ("dispatch.levels", "two"),
    ("dispatch.payload", "f32"),
    ("dispatch.num_max_tokens_per_rank", "4096"),
    ("dispatch.chunk_tokens", "64"),
    ("dispatch.combine_dtype", "bf16"),
    ("dispatch.overlap", "on"),
    ("jit.cache_dir", "elsewhere"),
    ("jit.layout", "flat"),
    ("jit.require_warm", "true"),
    ("timeouts.start_s", "30"),
    ("timeouts.load_s", "30"),
    ("timeouts.compile_s", "30"),
    ("timeouts.step_s", "30"),
    ("log.level", "warn"),
];

fn effective(settings: &[(&'static str, &str)]) -> Effective {
    let command_line: Vec<Override> =
        settings.iter().map(|(key, value)| Override { key, option: "--set", text: (*value).to_owned() }).collect();
    Effective::resolve(&Sources { command_line: &command_line, ..Sources::default() }).expect("resolves")
}

fn of(settings: &[(&'static str, &str)]) -> Fingerprint {
    fingerprint(&effective(settings), &host(InstructionSet::Avx2), &vec![("steps", "1".to_owned())]).expect("fields")
}

/// Every key but those that are each rank's own business is compared before anything is decided from it.
#[test]
fn every_key_is_compared_unless_it_is_a_ranks_own() {
    let listed: BTreeSet<&str> = OTHER_VALUES.iter().map(|(key, _)| *key).chain(["version", "log.format"]).collect();
    assert_eq!(listed, KEYS.iter().map(|key| key.path).collect(), "left: keys with another value here, right: all");
    let with_format = OTHER_VALUES.into_iter().chain([("log.format", "json")]);
    let compared: BTreeSet<&str> =
        with_format.filter(|setting| of(&[*setting]).digest() != of(&[]).digest()).map(|(key, _)| key).collect();
    // Not asked of the code: who adds a key that need not match adds it here too.
    let of_each_rank = ["version", "name", "jit.cache_dir", "log.level", "log.format"];
    let wanted = listed.into_iter().filter(|key| !of_each_rank.contains(key)).collect();
    assert_eq!(compared, wanted, "left: keys that move the digest, right: those that should");
}

/// The same value from a file in any order of keys, a variable or an option is the same.
#[test]
fn where_a_value_comes_from_does_not_count() {
    let wanted = of(&[("moe.backend", "simd"), ("dispatch.chunk_tokens", "64")]);
    for yaml in [
        "moe: {backend: simd}\ndispatch: {chunk_tokens: 64}\n",
        "# other lines\ndispatch:\n  chunk_tokens: 64 # here\n\nversion: 1\nmoe:\n  backend: \"simd\"\n",
    ] {
        let variables = [("LOCKSTEP_NAME".to_owned(), "another".to_owned())];
        let sources = Sources { file: Some(("x.yaml", yaml.as_bytes())), variables: &variables, command_line: &[] };
        let effective = Effective::resolve(&sources).expect("resolves");
        let asked = vec![("steps", "1".to_owned())];
        assert_eq!(fingerprint(&effective, &host(InstructionSet::Scalar), &asked), Ok(wanted.clone()), "{yaml}");
    }
}

/// The one message that a person reads.
fn message(num_ranks: usize, of_rank: impl Fn(usize) -> Fingerprint + Sync) -> String {
    let ended = simulate(num_ranks, |ranks| agree_on(ranks, START, Ok(of_rank(ranks.rank().index()))));
    let failures = ended.into_iter().map(|(outcome, _)| Failure::from(outcome.expect_err("ranks differ")));
    let spoken: Vec<String> = failures
        .filter(|failure| failure.known() == (Known::Everywhere { speaks: true }))
        .map(|failure| format!("exit {}\n{failure}", failure.exit().code()))
        .collect();
    spoken.join("\n")
}

#[test]
fn ranks_that_were_asked_for_other_things_are_told_once() {
    let (alike, chunks) = (of(&[]), of(&[("dispatch.chunk_tokens", "64"), ("moe.backend", "reference")]));
    insta::assert_snapshot!("asked_for", message(4, |rank| if rank == 3 { chunks.clone() } else { alike.clone() }));
    let of_machine = |variable: Option<&str>, steps: &str| {
        let mut machine = host(InstructionSet::Avx2);
        machine.variables.extend(variable.map(|value| ("NCCL_ALGO".to_owned(), value.to_owned())));
        fingerprint(&effective(&[]), &machine, &vec![("steps", steps.to_owned())]).expect("fields")
    };
    let told = message(1024, |rank| match rank {
        0 => of_machine(Some("Ring"), "1"),
        1000..=1023 => of_machine(None, "3"),
        _ => of_machine(None, "1"),
    });
    insta::assert_snapshot!("variable_and_option_at_1024_ranks", told);
}
