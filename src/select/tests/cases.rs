//! Faults of other systems, as far as selection is concerned.

use super::super::environment::Fact;
use super::super::fingerprint::diff;
use super::super::*;
use super::worlds::{deployment, gb300, h200, host, hosts, k3, qwen3, registry, small_geometry};
use crate::config::{self, Activations, Device, Levels, Transport};
use crate::exit::{Classify, Exit};
use crate::ids::{LayerIdx, Rank};

fn cpu(num_ranks: usize) -> (DeploymentFacts, Vec<Environment>) {
    (deployment(num_ranks, Device::Cpu, "auto"), vec![host(InstructionSet::Avx2); num_ranks])
}

#[test]
fn case_b4_topk_and_experts_are_checked_before_any_work() {
    let (deployment, ranks) = cpu(1);
    for (num_experts, num_topk) in [(4, 0), (4, 5), (0, 0)] {
        let problem = Problem { num_experts, num_topk, ..qwen3(7) };
        let error = resolve(&[problem], &deployment, &ranks, &hosts()).unwrap_err();
        assert_eq!(error.exit(), Exit::BadInput);
        let wanted = format!("layer 7: top-k is {num_topk} of {num_experts} experts");
        assert!(error.to_string().starts_with(&wanted), "{error}");
    }
    // The CPU backends have no limit of their own; one expert, and more ranks than experts, are served.
    for (num_experts, num_topk, num_ranks) in [(64, 17, 1), (64, 33, 1), (64, 64, 1), (1, 1, 1), (2, 1, 4)] {
        let (deployment, ranks) = cpu(num_ranks);
        let problem = Problem { num_experts, num_topk, ..qwen3(7) };
        let selection = resolve(&[problem], &deployment, &ranks, &hosts()).unwrap();
        assert_eq!(selection.techniques(), ["simd"]);
    }
    // A limit that an implementation has is a clear refusal.
    let (mut deployment, ranks) = (deployment, vec![h200()]);
    (deployment.device, deployment.backend) = (Device::Gpu, "wgmma".to_owned());
    let problem = Problem { num_experts: 65, num_topk: 65, ..qwen3(7) };
    let error = resolve(&[problem], &deployment, &ranks, &registry()).unwrap_err();
    assert!(error.to_string().contains("routing: serves top-k 1 to 64; the layer's is 65"), "{error}");
}

#[test]
fn case_e2_a_setting_of_one_host_is_named_with_each_ranks_value() {
    let (ours, ranks) = cpu(3);
    let mut theirs = ours.clone();
    theirs.backend = "reference".to_owned();
    theirs.chunk_tokens = Some(64);
    let fingerprint = |deployment: &DeploymentFacts, num_topk: usize| {
        let problem = Problem { num_topk, ..k3(1) };
        let selection = resolve(&[problem], deployment, &ranks, &hosts()).unwrap();
        selection.fingerprint(deployment, &ranks, &hosts()).unwrap()
    };
    let (launching, remote) = (fingerprint(&ours, 16), fingerprint(&theirs, 8));
    let differences = diff([(Rank(0), &launching), (Rank(1), &remote), (Rank(2), &remote)]);
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!("case_e2", text.join("\n"));
}

/// `auto` leaves ranks that drive GPUs at one level, and two are theirs to ask for, but not of stores into other ranks' memory, nor
/// of more ranks than what arrives is read from.
#[test]
fn two_levels_are_chosen_only_where_tokens_can_be_passed_on() {
    let world = |transport, device, levels, node_of_rank: Vec<u32>| {
        let num_ranks = node_of_rank.len();
        let facts = deployment(num_ranks, device, "auto");
        let facts = DeploymentFacts { node_of_rank, levels, transport, ..facts };
        let rank = if device == Device::Gpu { h200() } else { host(InstructionSet::Avx2) };
        resolve(&[k3(1)], &facts, &vec![rank; num_ranks], &Registry::builtin())
    };
    let nodes = |device, levels| world(Transport::Auto, device, levels, vec![0, 0, 1, 1]);
    let levels = |device, levels| nodes(device, levels).unwrap().layers[0].levels;
    assert_eq!(levels(Device::Cpu, Levels::Auto), Levels::Two);
    assert_eq!(levels(Device::Cpu, Levels::One), Levels::One);
    assert_eq!(levels(Device::Gpu, Levels::Auto), Levels::One);
    let text = nodes(Device::Gpu, Levels::Two).unwrap().to_string();
    assert!(text.contains(" over nccl in two levels, preferred by backend auto"), "{text}");
    let refused = [
        (
            Transport::Nvlink,
            vec![0, 0, 0],
            "topology: for transport nvlink: stores tokens straight where they are read",
        ),
        (
            Transport::Auto,
            (0..65).map(|rank| rank / 8).collect(),
            "topology: passes tokens on among 1 to 64 ranks; the world has 65",
        ),
    ];
    for (transport, node_of_rank, wanted) in refused {
        let one = world(transport, Device::Gpu, Levels::Auto, node_of_rank.clone()).unwrap();
        assert_eq!(one.layers[0].levels, Levels::One);
        let error = world(transport, Device::Gpu, Levels::Two, node_of_rank).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains("dispatch.levels is two: set it to auto or one"), "{error}");
    }
    let text = nodes(Device::Cpu, Levels::Two).unwrap().to_string();
    assert!(text.contains(" over host in two levels, preferred by backend auto"), "{text}");
}

#[test]
fn a_world_with_and_without_gpus_makes_auto_refuse_unless_a_backend_is_named() {
    let ranks = [h200(), h200(), host(InstructionSet::Avx512)];
    let with = |device, backend| resolve(&[k3(1)], &deployment(3, device, backend), &ranks, &registry());
    let Err(ResolveError::MixedWorld { with: gpus, without }) = with(Device::Auto, "auto") else {
        panic!("auto is ambiguous here")
    };
    assert_eq!((gpus.to_string(), without.to_string()), ("ranks 0-1".to_owned(), "rank 2".to_owned()));
    assert_eq!(with(Device::Auto, "cpu").unwrap().techniques(), ["simd"]);
    assert_eq!(with(Device::Cpu, "auto").unwrap().techniques(), ["simd"]);
    let error = with(Device::Gpu, "auto").unwrap_err();
    assert_eq!(error.exit(), Exit::Environment);
    assert!(error.to_string().contains("device: needs a GPU, found none (rank 2)"), "{error}");
}

#[test]
fn case_e5_an_explicit_backend_that_cannot_run_is_never_replaced() {
    let ranks = vec![h200(); 2];
    let mut deployment = deployment(2, Device::Auto, "tcgen05");
    let error = resolve(&[k3(1)], &deployment, &ranks, &registry()).unwrap_err();
    assert_eq!(error.exit(), Exit::Environment);
    insta::assert_snapshot!("case_e5_native_fp4_on_h200", error.to_string());
    // Only on request does another run, and it says so.
    deployment.allow_fallback = true;
    let selection = resolve(&[k3(1)], &deployment, &ranks, &registry()).unwrap();
    assert_eq!(selection.layers[0].why, Why::Fallback { from: "tcgen05" });
    assert_eq!(selection.layers[0].winner.identity, Identity::grouped_gemm("wgmma", Quant::Nvfp4));
    insta::assert_snapshot!("case_e5_fallback", selection.summary());
    // A pin never falls back.
    deployment.backend = "auto".to_owned();
    deployment.implementation = Some("lockstep.tcgen05.grouped_gemm.nvfp4".to_owned());
    let error = resolve(&[k3(1)], &deployment, &ranks, &registry()).unwrap_err();
    assert!(error.to_string().contains("compute capability: needs 10.0 to 10.3, found 9.0 (NVIDIA H200)"), "{error}");
    // The oracle may always be asked for.
    deployment.implementation = None;
    deployment.backend = "reference".to_owned();
    assert_eq!(resolve(&[k3(1)], &deployment, &ranks, &registry()).unwrap().techniques(), ["reference"]);
}

#[test]
fn case_e5_an_unknown_backend_has_neighbours() {
    let (deployment, ranks) = cpu(1);
    let with = |backend: &str| {
        let deployment = DeploymentFacts { backend: backend.to_owned(), ..deployment.clone() };
        resolve(&[k3(1)], &deployment, &ranks, &hosts()).unwrap_err().to_string()
    };
    assert_eq!(
        with("cutlas"),
        "backend `cutlas` is not in this build of lockstep; valid are auto, cpu, simd, reference"
    );
    assert_eq!(
        with("refernce"),
        "backend `refernce` is not in this build of lockstep; did you mean reference?; valid are auto, cpu, simd, reference"
    );
}

#[test]
fn case_e5_a_capability_hidden_on_one_rank_changes_auto_for_all_and_names_the_rank() {
    let mut ranks = vec![gb300(); 4];
    let auto = deployment(4, Device::Auto, "auto");
    assert_eq!(resolve(&[k3(1)], &auto, &ranks, &registry()).unwrap().techniques(), ["tcgen05"]);
    ranks[1] = h200();
    let hidden = resolve(&[k3(1)], &auto, &ranks, &registry()).unwrap();
    assert_eq!(hidden.techniques(), ["mma_sync"], "the best that every rank can run");
    let tcgen05 = hidden.layers[0].refused.iter().find(|candidate| candidate.identity.technique == "tcgen05").unwrap();
    assert_eq!(tcgen05.refusals.len(), 1);
    assert_eq!(
        tcgen05.refusals[0].to_string(),
        "compute capability: needs 10.0 to 10.3, found 9.0 (NVIDIA H200) (rank 1)"
    );
}

#[test]
fn case_e5_an_activation_that_is_not_computed_is_refused_and_never_replaced() {
    let (deployment, ranks) = cpu(1);
    let problem = Problem { activation: ActivationForm::SwigluAlpha, ..qwen3(1) };
    let error = resolve(&[problem], &deployment, &ranks, &hosts()).unwrap_err().to_string();
    assert!(
        error.contains("activation: computes swiglu, swiglu(limit), situ(beta), situ(beta, linear_beta)"),
        "{error}"
    );
    assert!(error.contains("the layer has swiglu(alpha, limit, offset)"), "{error}");
}

#[test]
fn ranks_of_unlike_cpus_end_in_the_common_variant() {
    let variant = |ranks: &[Environment]| {
        let deployment = deployment(ranks.len(), Device::Cpu, "auto");
        resolve(&[k3(1)], &deployment, ranks, &hosts()).unwrap().instruction_set("simd")
    };
    let [scalar, avx2, avx512] = InstructionSet::ALL.map(host);
    assert_eq!(variant(&[avx512.clone(), avx512.clone()]), Some(InstructionSet::Avx512));
    assert_eq!(variant(&[avx512.clone(), avx2.clone()]), Some(InstructionSet::Avx2));
    assert_eq!(variant(&[avx2.clone(), scalar]), Some(InstructionSet::Scalar));
    let unknown = Environment { instruction_set: Fact::Unknown, ..avx512 };
    assert_eq!(variant(&[unknown.clone(), avx2]), Some(InstructionSet::Avx2));
    assert_eq!(variant(&[unknown]), None);
}

#[test]
fn what_is_unknown_is_not_refused_but_said() {
    let deployment = deployment(2, Device::Gpu, "wgmma");
    let selection = resolve(&[k3(1)], &deployment, &[Environment::default(), h200()], &registry()).unwrap();
    let assumed: Vec<String> = selection.layers[0].winner.assumptions.iter().map(ToString::to_string).collect();
    assert!(assumed.contains(&"device: whether there is a GPU (rank 0)".to_owned()), "{assumed:?}");
    assert!(assumed.iter().any(|text| text.contains("whether there is NVRTC")), "{assumed:?}");
    // But `auto` does not prefer what merely might serve.
    let auto = DeploymentFacts { device: Device::Auto, backend: "auto".to_owned(), ..deployment };
    let selection = resolve(&[k3(1)], &auto, &vec![Environment::default(); 2], &registry()).unwrap();
    assert_eq!(selection.techniques(), ["simd"]);
}

#[test]
fn what_the_checkpoint_keeps_unquantised_outranks_an_override() {
    let geometry = small_geometry();
    let mut deployment = config::Deployment::default();
    deployment.moe.activations = Activations::Quantised;
    let facts = |layer, num_nvfp4, num_bf16| LayerFacts {
        layer: LayerIdx(layer),
        num_nvfp4,
        num_bf16,
        has_input_scales: num_nvfp4 > 0,
        wants_quantised: false,
        shared: None,
    };
    let decide = |facts: &LayerFacts| decide(facts, &geometry, &deployment, true);
    let (quantised, kept) = (facts(1, 8, 0), facts(2, 0, 8));
    let decided = [decide(&quantised).unwrap(), decide(&kept).unwrap()];
    assert_eq!(decided.map(|decision| decision.quant), [Quant::Nvfp4, Quant::None]);
    assert_eq!(decided.map(|decision| decision.kept_unquantised), [false, true]);
    // Some experts kept among quantised ones: one payload serves both, so that the two wishes exclude each other.
    let error = decide(&facts(3, 7, 1)).unwrap_err();
    assert!(error.to_string().contains("layer 3 can't run with quantised activations: it has unquantised experts"));
    // The problems select an implementation each.
    let problems = [(&quantised, &decided[0]), (&kept, &decided[1])]
        .map(|(facts, decision)| Problem::new(facts, decision, &geometry));
    let (deployment, ranks) = cpu(1);
    let selection = resolve(&problems, &deployment, &ranks, &hosts()).unwrap();
    let identities: Vec<String> = selection.layers.iter().map(|layer| layer.winner.identity.to_string()).collect();
    assert_eq!(identities, ["lockstep.simd.grouped_gemm.nvfp4", "lockstep.simd.grouped_gemm.none"]);
}

#[test]
fn a_layer_of_mixed_experts_runs_both_contracts_of_one_technique() {
    let mut mixed = qwen3(1);
    mixed.quantisation.weights.insert(WeightFormat::Bf16);
    let (deployment, ranks) = cpu(2);
    let selection = resolve(&[mixed, k3(2)], &deployment, &ranks, &hosts()).unwrap();
    let identities = |idx: usize| selection.layers[idx].identities();
    let simd = |quant| Identity::grouped_gemm("simd", quant);
    assert_eq!(identities(0), [simd(Quant::W4a16Nvfp4), simd(Quant::None)]);
    assert_eq!(identities(1), [simd(Quant::Nvfp4), simd(Quant::None)]);
}

#[test]
fn what_a_layers_other_experts_need_has_to_be_there_too() {
    let rank = Environment { flags: Some(["LOCKSTEP_EAGER".to_owned()].into()), ..gb300() };
    let deployment = deployment(1, Device::Gpu, "tcgen05_eager");
    let error = resolve(&[k3(1)], &deployment, std::slice::from_ref(&rank), &registry()).unwrap_err().to_string();
    let wanted = "quantisation: for the shared experts, as lockstep.tcgen05_eager.grouped_gemm.none: not in this build";
    assert!(error.contains(wanted), "{error}");
    let routed_only = Problem { shared: None, ..k3(1) };
    assert_eq!(resolve(&[routed_only], &deployment, &[rank], &registry()).unwrap().techniques(), ["tcgen05_eager"]);
    // Their widths count as well as the routed experts'.
    let mut narrow = k3(1);
    narrow.shared = narrow.shared.map(|shared| SharedProblem { intermediate: 100, ..shared });
    let (cpu, ranks) = cpu(1);
    let error = resolve(&[narrow], &cpu, &ranks, &hosts()).unwrap_err().to_string();
    let wanted =
        "shape: for the shared experts, as lockstep.simd.grouped_gemm.none: intermediate 100 of the shared experts";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn a_pin_takes_its_parts_in_any_order() {
    let (deployment, ranks) = cpu(1);
    for query in [
        "lockstep.simd.grouped_gemm.nvfp4",
        "nvfp4.simd",
        "*.simd.*.nvfp4",
        "grouped_gemm.nvfp4.*.simd",
        " simd.nvfp4 ",
    ] {
        let pinned = DeploymentFacts { implementation: Some(query.to_owned()), ..deployment.clone() };
        let selection = resolve(&[k3(1)], &pinned, &ranks, &hosts()).unwrap();
        assert_eq!(selection.layers[0].winner.identity, Identity::grouped_gemm("simd", Quant::Nvfp4), "{query}");
        assert_eq!(selection.layers[0].why, Why::Pinned(query.trim().to_owned()));
    }
}
