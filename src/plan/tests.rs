//! Plans of made-up layers.

use super::*;
use crate::ids::LayerIdx;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

fn geometry(num_experts: usize) -> MoeGeometry {
    MoeGeometry {
        hidden: 128,
        expert_hidden: 128,
        intermediate: 64,
        num_experts,
        num_topk: 2,
        shared: None,
        latent: None,
        routing: RoutingMethod::Renormalize,
        activation: Activation::Swiglu,
    }
}

/// A layer of these experts, calibrated where all are NVFP4.
fn layer(number: u32, is_nvfp4: Vec<bool>) -> StoredLayer {
    let num_nvfp4 = is_nvfp4.iter().filter(|is_nvfp4| **is_nvfp4).count();
    let is_calibrated = num_nvfp4 == is_nvfp4.len();
    let facts = LayerFacts {
        layer: LayerIdx(number),
        num_nvfp4,
        num_bf16: is_nvfp4.len() - num_nvfp4,
        has_input_scales: is_calibrated,
        wants_quantised: is_calibrated,
        shared: None,
    };
    StoredLayer { facts, dense_bytes: 128 * is_nvfp4.len() as u64 * 2, is_nvfp4 }
}

fn deployment(nodes: u32, ranks_per_node: u32) -> Deployment {
    let mut deployment = Deployment::default();
    (deployment.cluster.nodes, deployment.cluster.ranks_per_node) = (nodes, Some(ranks_per_node));
    deployment
}

fn plan(deployment: &Deployment, geometry: &MoeGeometry, layers: &[StoredLayer]) -> Plan {
    let asked = Asked { model: "made", geometry, layers, deployment, num_tokens: Some(100), device_memory_bytes: None };
    Plan::new(&asked).expect("a plan")
}

#[test]
fn uneven_ranks_stand_apart() {
    let layers = [layer(3, vec![true; 10]), layer(4, vec![true; 10])];
    let plan = plan(&deployment(1, 4), &geometry(10), &layers);
    let groups: Vec<_> =
        plan.ranks.iter().map(|group| (group.first_rank, group.last_rank, group.num_experts)).collect();
    assert_eq!(groups, [(0, 1, 3), (2, 3, 2)]);
    let expert = weights::expert_bytes(128, 64, true);
    assert_eq!(plan.ranks[0].expert_weight_bytes, 2 * 3 * expert);
    assert_eq!(plan.ranks[1].expert_weight_bytes, 2 * 2 * expert);
    assert_eq!(plan.layers.len(), 1, "layers that are stored alike are one group");
    assert_eq!(plan.layers[0].layers, [3, 4]);
}

#[test]
fn mixed_formats_are_counted_where_they_are() {
    let mut mixed = vec![true; 4];
    mixed[3] = false;
    let plan = plan(&deployment(1, 2), &geometry(4), &[layer(0, vec![true; 4]), layer(1, mixed)]);
    let (nvfp4, bf16) = (weights::expert_bytes(128, 64, true), weights::expert_bytes(128, 64, false));
    assert_eq!(plan.ranks[0].expert_weight_bytes, 4 * nvfp4);
    assert_eq!(plan.ranks[1].expert_weight_bytes, 3 * nvfp4 + bf16);
    let payloads = |at: usize| plan.layers[at].ways.iter().map(|way| way.payload).collect::<Vec<_>>();
    assert_eq!(payloads(0), ["bf16", "nvfp4"]);
    assert_eq!(payloads(1), ["bf16"], "a layer with bf16 activations sends no NVFP4");
    // 128 values as codes and scales, or as bf16; two ids and weights; whole 16 bytes; the second layer sends bf16 either way.
    let [bf16, nvfp4] = &plan.ranks[0].step[..] else { panic!("two payloads") };
    let share = bf16.dispatch_scale_up_bytes as f64 / (2.0 * (256.0 + 16.0));
    assert!((nvfp4.dispatch_scale_up_bytes as f64 / share - (96.0 + 256.0 + 16.0)).abs() < 0.1);
}

/// A step by hand: two ranks of two experts each, top-2, 100 tokens each.
#[test]
fn bytes_of_a_step() {
    let geometry = geometry(4);
    let layers = [layer(0, vec![true; 4])];
    let mut deployment = deployment(2, 1);
    let of = |deployment: &Deployment| plan(deployment, &geometry, &layers).ranks[0].step[0].clone();
    // A token misses the other rank where both slots are at home: 1 of the 6 pairs.
    let tokens = 100.0 * 5.0 / 6.0_f64;
    let step = of(&deployment);
    assert_eq!(step.payload, "bf16");
    assert_eq!(step.dispatch_scale_up_bytes, 0);
    assert_eq!(step.dispatch_scale_out_bytes as f64, (tokens * (2.0 * 128.0 + 16.0)).round());
    // On hosts each slot's row comes back in f32: one of two slots is remote.
    assert_eq!(step.combine_scale_out_bytes, 100 * 128 * 4);
    assert_eq!(step.sent_bytes, step.dispatch_scale_out_bytes + step.combine_scale_out_bytes);
    // Between GPUs one bf16 row a token.
    deployment.cluster.device = Device::Gpu;
    assert_eq!(of(&deployment).combine_scale_out_bytes as f64, (tokens * 256.0).round());
    // The same ranks in one node.
    (deployment.cluster.nodes, deployment.cluster.ranks_per_node) = (1, Some(2));
    assert_eq!(of(&deployment).dispatch_scale_up_bytes, step.dispatch_scale_out_bytes);
    assert_eq!(of(&deployment).dispatch_scale_out_bytes, 0);
}

#[test]
fn floors_by_hand() {
    let mut deployment = deployment(2, 1);
    deployment.links = Links {
        scale_up_gbyte_per_s: None,
        scale_out_gbyte_per_s: Some(1.0),
        memory_gbyte_per_s: Some(10.0),
        tflops_bf16: None,
    };
    let plan = plan(&deployment, &geometry(4), &[layer(0, vec![true; 4])]);
    let floors = plan.layers[0].ways[0].floors;
    let dispatch = 100.0 * 5.0 / 6.0 * 272.0;
    assert!((floors.scale_out_us.unwrap() - (dispatch + 51_200.0) / 1e3).abs() < 0.01, "{floors:?}");
    assert_eq!((floors.scale_up_us, floors.compute_us), (Some(0.0), None), "no link inside a node is used");
    // All experts have rows; what travels is touched on both sides, what stays as well.
    let travelling = 2.0 * (100.0 * 2.0 * 5.0 / 6.0 * 272.0 + 100.0 * 2.0 * 512.0);
    let weights = 2.0 * weights::expert_bytes(128, 64, true) as f64 + 1024.0;
    assert!((floors.memory_us.unwrap() - (travelling + weights) / 1e4).abs() < 0.01, "{floors:?}");
    assert_eq!(floors.dominant, Some("scale-out"));
    assert_eq!(plan.missing, ["links.tflops_bf16"]);
}

#[test]
fn chunks_read_the_weights_again() {
    let memory_us = |chunk_tokens| {
        let mut deployment = deployment(1, 2);
        deployment.links.memory_gbyte_per_s = Some(1e-3);
        deployment.dispatch.chunk_tokens = chunk_tokens;
        plan(&deployment, &geometry(4), &[layer(0, vec![true; 4])]).layers[0].ways[0].floors.memory_us.unwrap()
    };
    // In units of bytes; chunks of 30 tokens: 30, 30, 30 and 10.
    let again = memory_us(Some(30)) - memory_us(None);
    let weights = 2.0 * weights::expert_bytes(128, 64, true) as f64;
    assert!((again / (3.0 * weights) - 1.0).abs() < 1e-4, "{again}, {weights} of weights");
}

#[test]
fn a_model_without_moe_layers_is_refused() {
    let (deployment, geometry) = (deployment(1, 2), geometry(4));
    let asked = Asked {
        model: "dense",
        geometry: &geometry,
        layers: &[],
        deployment: &deployment,
        num_tokens: None,
        device_memory_bytes: None,
    };
    assert!(matches!(Plan::new(&asked), Err(PlanError::NoLayers { .. })));
}
