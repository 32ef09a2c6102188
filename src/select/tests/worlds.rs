//! Registries, environments, deployments and problems for tests.

use std::collections::{BTreeMap, BTreeSet};

use super::super::descriptor::{CapabilityRange, Descriptor, Limits, Target, Width};
use super::super::environment::{ComputeCapability, Environment, Fact, Gpu, Libraries, Library};
use super::super::registry::TransportDescriptor;
use super::super::*;
use crate::config::{self, CombineDtype, Device, Payload, Transport};
use crate::ids::LayerIdx;
use crate::model::MoeGeometry;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// A small model without latent and shared experts.
pub(crate) fn small_geometry() -> MoeGeometry {
    MoeGeometry {
        hidden: 128,
        expert_hidden: 128,
        intermediate: 64,
        num_experts: 8,
        num_topk: 2,
        shared: None,
        latent: None,
        routing: RoutingMethod::Renormalize,
        activation: Activation::Swiglu,
    }
}

/// What of this build runs on hosts: the GPU techniques of these worlds are made up, so that they refuse for more reasons.
pub(crate) fn hosts() -> Registry {
    Registry::of_techniques(&["simd", "reference"])
}

/// This build's implementations for hosts after GPU ones that exist in tests alone.
pub(crate) fn registry() -> Registry {
    let up_to = |first: (u32, u32), last: Option<(u32, u32)>| CapabilityRange {
        first: ComputeCapability::new(first.0, first.1),
        last: last.map(|(major, minor)| ComputeCapability::new(major, minor)),
    };
    let blackwell = vec![up_to((10, 0), Some((10, 3)))];
    let unquantised = gpu("tcgen05", Quant::None, blackwell.clone());
    let mut tcgen05 = gpu("tcgen05", Quant::Nvfp4, blackwell.clone());
    tcgen05.num_topk = Limits::between(1, 32);
    tcgen05.batch_invariant = false;
    tcgen05.payloads.push(Payload::Nvfp4);
    let mut eager = gpu("tcgen05_eager", Quant::Nvfp4, blackwell);
    eager.opt_in = Some("LOCKSTEP_EAGER");
    let hopper = |quant| gpu("wgmma", quant, vec![CapabilityRange::only(9, 0)]);
    let mut fixed = gpu("wgmma_fixed", Quant::W4a16Nvfp4, vec![CapabilityRange::only(9, 0)]);
    fixed.num_local_experts = Limits::between(1, 128);
    fixed.uneven_experts = false;
    fixed.max_num_nodes = Some(1);
    let mut old = gpu("wgmma_old", Quant::W4a16Nvfp4, vec![CapabilityRange::only(9, 0)]);
    old.deprecated = Some("wgmma does the same faster");
    let portable = Quant::ALL.map(|quant| gpu("mma_sync", quant, vec![up_to((8, 0), None)]));
    let mut vectors = hosts().descriptors()[1].clone();
    vectors.identity.technique = "vectors";
    vectors.target = Target::Cpu { instruction_sets: BTreeSet::from([InstructionSet::Avx2, InstructionSet::Avx512]) };
    let mut descriptors = vec![tcgen05, unquantised, eager, hopper(Quant::Nvfp4), hopper(Quant::W4a16Nvfp4)];
    descriptors.extend([hopper(Quant::None), fixed, old]);
    descriptors.extend(portable);
    descriptors.extend(hosts().descriptors().iter().cloned());
    descriptors.push(vectors);
    let mut transports = hosts().transports().to_vec();
    transports.retain(|known| known.transport == Transport::Host);
    transports.push(TransportDescriptor {
        transport: Transport::Nccl,
        libraries: BTreeMap::from([(Library::Nccl, Some("2.20"))]),
        auto_from_num_ranks: 1,
        shares_gpus: true,
        max_num_nodes: None,
        forwards: true,
        reads_node_layout: true,
    });
    Registry::new(descriptors, transports).unwrap()
}

fn gpu(technique: &'static str, quant: Quant, compute_capabilities: Vec<CapabilityRange>) -> Descriptor {
    Descriptor {
        identity: Identity::grouped_gemm(technique, quant),
        target: Target::Gpu { compute_capabilities },
        libraries: BTreeMap::from([(Library::Driver, Some("575")), (Library::Nvrtc, Some("13.0"))]),
        opt_in: None,
        deprecated: None,
        activations: BTreeSet::from([ActivationForm::Swiglu, ActivationForm::Situ, ActivationForm::SituLinear]),
        bias: false,
        routing: RoutingKind::ALL.into_iter().filter(|kind| *kind != RoutingKind::Hash).collect(),
        num_topk: Limits::between(1, 64),
        hidden: Width::multiple_of(128),
        intermediate: Width::multiple_of(64),
        num_local_experts: Limits::from(0),
        uneven_experts: true,
        max_tensor_parallel: 1,
        max_num_nodes: None,
        transports: vec![Transport::Nccl, Transport::Host],
        forwards: None,
        forwards_unasked: false,
        payloads: vec![Payload::Bf16],
        combine_dtypes: vec![CombineDtype::Bf16],
        batch_invariant: true,
    }
}

fn gpu_rank(name: &str, compute_capability: (u32, u32), instruction_set: InstructionSet) -> Environment {
    Environment {
        instruction_set: Fact::Present(instruction_set),
        gpu: Fact::Present(Gpu {
            name: name.to_owned(),
            uuid: None,
            compute_capability: ComputeCapability::new(compute_capability.0, compute_capability.1),
        }),
        libraries: Libraries {
            mpi: Fact::Present("4.1.6".to_owned()),
            driver: Fact::Present("580.65.06".to_owned()),
            nccl: Fact::Present("2.28.3".to_owned()),
            nvrtc: Fact::Present("13.0.88".to_owned()),
            cublaslt: Fact::Present("13.0.2".to_owned()),
        },
        flags: Some(BTreeSet::new()),
        ..Environment::default()
    }
}

/// A rank with an H200.
pub(crate) fn h200() -> Environment {
    gpu_rank("NVIDIA H200", (9, 0), InstructionSet::Avx512)
}

/// A rank with a GB300, on a CPU without x86's instruction sets.
pub(crate) fn gb300() -> Environment {
    gpu_rank("NVIDIA GB300", (10, 3), InstructionSet::Scalar)
}

/// A rank with an A100.
pub(crate) fn a100() -> Environment {
    gpu_rank("NVIDIA A100", (8, 0), InstructionSet::Avx2)
}

/// A rank without a GPU.
pub(crate) fn host(instruction_set: InstructionSet) -> Environment {
    Environment {
        instruction_set: Fact::Present(instruction_set),
        gpu: Fact::Absent,
        libraries: Libraries {
            mpi: Fact::Present("4.1.6".to_owned()),
            driver: Fact::Absent,
            nccl: Fact::Absent,
            nvrtc: Fact::Absent,
            cublaslt: Fact::Absent,
        },
        flags: Some(BTreeSet::new()),
        ..Environment::default()
    }
}

/// A deployment of `num_ranks` on one node.
pub(crate) fn deployment(num_ranks: usize, device: Device, backend: &str) -> DeploymentFacts {
    let facts = DeploymentFacts::new(&config::Deployment::default(), vec![0; num_ranks]).unwrap();
    DeploymentFacts { device, backend: backend.to_owned(), ..facts }
}

/// Shared experts in bf16.
pub(crate) fn unquantised_shared(hidden: usize, intermediate: usize) -> SharedProblem {
    SharedProblem { weights: WeightFormat::Bf16, quantised_activations: false, hidden, intermediate }
}

/// A layer of Kimi K3, with its shared experts in bf16.
pub(crate) fn k3(layer: u32) -> Problem {
    Problem {
        layer: LayerIdx(layer),
        quantisation: Quantisation::uniform(WeightFormat::Nvfp4, true),
        activation: ActivationForm::SituLinear,
        hidden: 3584,
        intermediate: 3072,
        num_experts: 896,
        num_topk: 16,
        routing: RoutingKind::KimiK3,
        has_bias: false,
        shared: Some(unquantised_shared(7168, 6144)),
    }
}

/// A layer of Qwen3-235B, weights only.
pub(crate) fn qwen3(layer: u32) -> Problem {
    Problem {
        layer: LayerIdx(layer),
        quantisation: Quantisation::uniform(WeightFormat::Nvfp4, false),
        activation: ActivationForm::Swiglu,
        hidden: 4096,
        intermediate: 1536,
        num_experts: 128,
        num_topk: 8,
        routing: RoutingKind::Renormalize,
        has_bias: false,
        shared: None,
    }
}
