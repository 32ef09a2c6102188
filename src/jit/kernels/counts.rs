//! What batches of any numbers of rows run, against what is requested for their layer before its weights are read.

use std::collections::BTreeSet;

use super::*;
use crate::config::{Activations, Deployment};
use crate::ids::LayerIdx;
use crate::sample::{Geometry, SampleSpec};
use crate::select::{LayerFacts, decide};
use grouped_gemm::Schedule;

/// Rows of 56 experts of which `num_tokens` tokens choose eight each: evenly, all alike, most of them alike, and with every
/// third expert left out.
fn forms(num_tokens: usize) -> [Vec<usize>; 4] {
    const NUM_EXPERTS: usize = 56;
    let num_rows = 8 * num_tokens;
    let even = |expert: usize, of: usize| num_rows / of + usize::from(expert < num_rows % of);
    let hot = (0..NUM_EXPERTS).map(|expert| if expert == 5 { num_tokens } else { (num_rows - num_tokens) / 55 });
    let thirds = (0..NUM_EXPERTS).map(|expert| if expert % 3 == 0 { 0 } else { even(expert, 37) });
    [
        (0..NUM_EXPERTS).map(|expert| even(expert, NUM_EXPERTS)).collect(),
        (0..NUM_EXPERTS).map(|expert| if expert < 8 { num_tokens } else { 0 }).collect(),
        hot.collect(),
        thirds.collect(),
    ]
}

/// A thousand numbers of tokens, and some that fill buffers: of every family, with and without one order of sums, each batch
/// of the routed and of the shared experts is served by kernels on the list.
#[test]
fn a_thousand_token_counts_need_nothing_beyond_what_is_requested() {
    let arch = Arch::Sm90a;
    for geometry in [Geometry::KimiK3, Geometry::DeepseekV3, Geometry::Qwen3] {
        for activations in [Activations::Bf16, Activations::Quantised] {
            let spec = SampleSpec::of(geometry);
            let mut deployment = Deployment::default();
            deployment.moe.activations = activations;
            let geometry = spec.model().unwrap().geometry;
            let facts = LayerFacts { layer: LayerIdx(1), ..spec.layer_facts() };
            let decision = decide(&facts, &geometry, &deployment, true).unwrap();
            let problem = Problem::new(&facts, &decision, &geometry);
            for (family, batch_invariant) in
                [(Family::Wgmma, false), (Family::Wgmma, true), (Family::MmaSync, false), (Family::MmaSync, true)]
            {
                let chooser = Chooser { family, batch_invariant };
                let requested = products(&problem, decision.activation, chooser, arch);
                assert!(requested.len() < 40, "{} kernels", requested.len());
                for group in problem.groups() {
                    let Some(quant) = group.quant else { continue };
                    let gemm = GroupedGemm {
                        hidden: u32::try_from(group.hidden).unwrap(),
                        intermediate: u32::try_from(group.intermediate).unwrap(),
                        activation: decision.activation,
                        weights: if quant == Quant::None { Weights::Bf16 } else { Weights::Nvfp4 },
                        quantise: quant == Quant::Nvfp4,
                    };
                    let is_shared = group.members == Members::Shared;
                    let chooser = Chooser { batch_invariant: batch_invariant || is_shared, ..chooser };
                    let mut used: BTreeSet<Schedule> = BTreeSet::new();
                    for num_tokens in (1..=1000).chain([4096, 8191, 1 << 20]) {
                        let batches = if is_shared { vec![vec![num_tokens]] } else { forms(num_tokens).to_vec() };
                        for counts in batches {
                            let schedules = chooser.batch(&gemm, &counts);
                            used.extend(counts.iter().filter(|rows| **rows > 0).map(|rows| schedules.of(*rows)));
                        }
                    }
                    for schedule in used {
                        assert!(requested.contains(&schedule.request(&gemm, arch)), "{schedule} of {quant}");
                    }
                }
            }
        }
    }
}
