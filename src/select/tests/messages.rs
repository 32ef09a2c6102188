//! What people read, as snapshots.

use super::super::*;
use super::worlds::{a100, deployment, gb300, h200, host, k3, qwen3, registry};
use crate::config::{Device, Transport};
use crate::exit::Classify;
use crate::ids::LayerIdx;

fn refused(problems: &[Problem], deployment: &DeploymentFacts, ranks: &[Environment]) -> ResolveError {
    resolve(problems, deployment, ranks, &registry()).unwrap_err()
}

#[test]
fn a_selection_shows_winner_others_and_every_refusal() {
    let ranks = vec![h200(); 8];
    let problems = [k3(1), k3(2), Problem { quantisation: qwen3(3).quantisation, ..k3(3) }];
    let selection = resolve(&problems, &deployment(8, Device::Auto, "auto"), &ranks, &registry()).unwrap();
    insta::assert_snapshot!("selection", selection.to_string());
    insta::assert_snapshot!("selection_summary", selection.summary());
    insta::assert_snapshot!("selection_json", serde_json::to_string_pretty(&selection.layers[2]).unwrap());
}

#[test]
fn refusals_say_what_would_work_and_the_cure() {
    let mut one_old = vec![h200(); 4];
    one_old[1] = a100();
    one_old[2].libraries.nvrtc = environment::Fact::Absent;
    let mxfp4 = Problem { quantisation: Quantisation::uniform(WeightFormat::Mxfp4, false), ..qwen3(4) };
    let gpus = |backend| deployment(4, Device::Auto, backend);
    let pinned = DeploymentFacts { implementation: Some("wgmma_fixed".to_owned()), ..gpus("auto") };
    let nccl = DeploymentFacts { transport: Transport::Nccl, ..deployment(1, Device::Cpu, "simd") };
    let fallback = DeploymentFacts { allow_fallback: true, ..gpus("wgmma") };
    let odd = Problem { hidden: 4000, num_topk: 65, num_experts: 65, has_bias: true, ..qwen3(5) };
    let messages = [
        ("family_on_one_rank", refused(&[k3(1), k3(2)], &gpus("wgmma"), &one_old)),
        ("format_nobody_serves", refused(&[mxfp4], &gpus("auto"), &one_old)),
        ("pin_that_refuses", refused(&[qwen3(1)], &pinned, &one_old)),
        ("transport", refused(&[qwen3(1)], &nccl, &[host(InstructionSet::Avx2)])),
        ("fallback_finds_nothing", refused(&[Problem { has_bias: true, ..k3(1) }], &fallback, &one_old)),
        ("many_reasons", refused(&[odd, k3(6)], &gpus("mma_sync"), &one_old)),
        ("device", refused(&[k3(1)], &deployment(1, Device::Cpu, "tcgen05"), &[gb300()])),
    ];
    for (name, error) in messages {
        insta::assert_snapshot!(name, format!("exit {}\n{error}", error.exit().code()));
    }
}

#[test]
fn short_errors_are_a_line_with_a_cure() {
    let ranks = |n| vec![host(InstructionSet::Avx2); n];
    let cpu = deployment(2, Device::Cpu, "auto");
    let with_query = |query: &str| DeploymentFacts { implementation: Some(query.to_owned()), ..cpu.clone() };
    let contradiction = DeploymentFacts { backend: "wgmma".to_owned(), ..with_query("simd.none") };
    let mut differing = vec![k3(1), k3(1)];
    differing[1].hidden = 128;
    let mut lines = vec![
        refused(&[k3(1)], &deployment(2, Device::Cpu, "cutlas"), &ranks(2)),
        refused(&[k3(1)], &deployment(2, Device::Cpu, "wgma"), &ranks(2)),
        refused(&[k3(1)], &cpu, &ranks(3)),
        refused(&[k3(1)], &deployment(2, Device::Auto, "auto"), &[h200(), host(InstructionSet::Avx2)]),
        refused(&differing, &cpu, &ranks(2)),
        refused(&[k3(1)], &contradiction, &ranks(2)),
    ];
    for query in [
        "",
        "simd..nvfp4",
        "lockstep.simd.grouped_gemm.nvfp4.extra",
        "simd nvfp4",
        "simd.w4*",
        "smid.nvfp4",
        "w4a16.simd",
        "simd.reference",
        "*.*.*.*",
        "wgmma_fixed.nvfp4",
        "nvfp4",
        "*.grouped_gemm.simd.*",
    ] {
        lines.push(refused(&[k3(1)], &with_query(query), &ranks(2)));
    }
    let text: Vec<String> = lines.iter().map(|error| format!("exit {}: {error}", error.exit().code())).collect();
    insta::assert_snapshot!("short_errors", text.join("\n"));
}

#[test]
fn a_format_that_moved_names_layer_and_both_formats() {
    let cpu = deployment(1, Device::Cpu, "auto");
    let selection = resolve(&[k3(1), k3(2)], &cpu, &[host(InstructionSet::Avx2)], &registry()).unwrap();
    let selected = k3(2).quantisation;
    assert_eq!(check_format(&selection, LayerIdx(2), &selected), Ok(()));
    let moved = Quantisation::uniform(WeightFormat::Bf16, false);
    let messages = [
        check_format(&selection, LayerIdx(2), &moved).unwrap_err(),
        check_format(&selection, LayerIdx(2), &Quantisation { quantised_activations: false, ..selected }).unwrap_err(),
        check_format(&selection, LayerIdx(3), &moved).unwrap_err(),
    ];
    insta::assert_snapshot!("format_moved", messages.map(|error| error.to_string()).join("\n"));
}
