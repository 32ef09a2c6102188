//! Differences between ranks, and what is worth a warning.

use super::super::super::environment::Environment;
use super::super::super::tests::worlds::h200;
use super::super::super::*;
use super::super::*;
use super::{inputs, next_up};
use crate::ids::Rank;

#[test]
fn differences_name_field_values_and_ranks_of_every_side() {
    let fingerprint = |chunk: Option<u64>, beta: f32, note: bool| {
        let mut fields = Fields::new(Kind::Session);
        fields.add("dispatch.chunk_tokens", chunk);
        fields.add("layers.10.activation.beta", beta);
        fields.add("layers.2.activation.beta", beta);
        fields.add("same", "everywhere");
        if note {
            fields.add("note", Value::set(["b", "a", "b"]));
        }
        fields.finish().unwrap()
    };
    let kinds =
        [fingerprint(Some(64), 4.0, false), fingerprint(Some(128), 4.0, false), fingerprint(None, next_up(4.0), true)];
    let of_rank = |rank: u32| {
        &kinds[match rank {
            7 => 1,
            200 => 2,
            _ => 0,
        }]
    };
    let differences = diff((0..256).map(|rank| (Rank(rank), of_rank(rank))));
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(
        text,
        [
            "dispatch.chunk_tokens: 64 on ranks 0-6, 8-199, 201-255; 128 on rank 7; absent on rank 200",
            "layers.2.activation.beta: 4.0 (bits 0x40800000) on ranks 0-199, 201-255; 4.0000005 (bits 0x40800001) on rank 200",
            "layers.10.activation.beta: 4.0 (bits 0x40800000) on ranks 0-199, 201-255; 4.0000005 (bits 0x40800001) on rank 200",
            "note: not there on ranks 0-199, 201-255; {a, b} on rank 200",
        ]
    );
    assert_eq!(diff((0..256).map(|rank| (Rank(rank), &kinds[0]))), []);
}

#[test]
fn what_may_differ_is_sorted_into_warnings_and_the_rest() {
    let base = inputs();
    let selection = resolve(&base.problems, &base.deployment, &base.environments, &base.registry).unwrap();
    let information = |change: &dyn Fn(&mut Environment, &mut Selection)| {
        let (mut environment, mut selection) = (h200(), selection.clone());
        environment.variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
        change(&mut environment, &mut selection);
        let mut information = Information::default();
        information.environment(&environment).trail(&selection).own("rank", 0u32);
        information.finish().unwrap()
    };
    let ours = information(&|_, _| {});
    assert_eq!(ours.field("own.variables.NCCL_ALGO"), None, "that one must match, and is elsewhere");
    let worth = |theirs: &Fingerprint| -> Vec<(String, bool)> {
        let differences = diff([(Rank(0), &ours), (Rank(1), theirs)]);
        differences.iter().map(|difference| (difference.field.clone(), difference.is_worth_a_warning())).collect()
    };
    let driver = information(&|environment, _| environment.libraries.driver = environment::Fact::Absent);
    assert_eq!(worth(&driver), [("compared.driver".to_owned(), true)]);
    let other_host = information(&|environment, _| environment.host = Some("b".to_owned()));
    assert_eq!(worth(&other_host), [("own.host".to_owned(), false)]);
    // The same winner, other rejections.
    let other_reasons = information(&|_, selection| selection.layers[0].refused[0].refusals.clear());
    let path = format!("compared.trail.1.{}.refusals", selection.layers[0].refused[0].identity);
    assert_eq!(worth(&other_reasons), [(path, true)]);
}
