//! The implementations of this build, and everything that they serve.

use std::collections::{BTreeMap, BTreeSet};

use super::super::descriptor::{CapabilityRange, Descriptor, Limits, Target, Width};
use super::super::environment::{ComputeCapability, InstructionSet, Library};
use super::super::identity::{Identity, Quant};
use super::super::problem::{ActivationForm, RoutingKind};
use super::{Registry, TransportDescriptor};
use crate::config::{CombineDtype, Payload, Transport};
use crate::numerics::nvfp4::BLOCK;

impl Registry {
    /// What this build can do.
    ///
    /// # Panics
    /// If the table contradicts itself, which a test rules out.
    #[must_use]
    pub fn builtin() -> Self {
        Self::of_techniques(&["simd", "reference", "wgmma", "mma_sync"])
    }

    /// Those of this build's implementations that are of `techniques`.
    ///
    /// # Panics
    /// If the table contradicts itself, which a test rules out.
    #[must_use]
    pub fn of_techniques(techniques: &[&str]) -> Self {
        let simd = Quant::ALL.map(|quant| cpu("simd", quant, &InstructionSet::ALL));
        let reference = Quant::ALL.map(|quant| cpu("reference", quant, &[InstructionSet::Scalar]));
        let wgmma = Quant::ALL.map(|quant| gpu("wgmma", quant, &[CapabilityRange::only(9, 0)]));
        let mma_sync = Quant::ALL.map(|quant| gpu("mma_sync", quant, &SINCE_AMPERE));
        let transport = |transport, libraries, auto_from_num_ranks| TransportDescriptor {
            transport,
            libraries,
            auto_from_num_ranks,
            // NCCL refuses two ranks of one communicator on one GPU.
            shares_gpus: transport != Transport::Nccl,
            // GPUs map each other's memory on one host.
            max_num_nodes: if transport == Transport::Nvlink { Some(1) } else { None },
            // Tokens are stored where they are read, which is once a rank.
            forwards: transport != Transport::Nvlink,
            reads_node_layout: false,
        };
        let host = transport(Transport::Host, BTreeMap::new(), 1);
        // A rank alone has nobody to send to.
        let nccl = transport(Transport::Nccl, BTreeMap::from([(Library::Nccl, Some(OLDEST_NCCL))]), 2);
        let nvlink = transport(Transport::Nvlink, BTreeMap::new(), NVLINK_UNASKED_FROM);
        let wanted = |descriptor: &Descriptor| techniques.contains(&descriptor.identity.technique);
        match Self::new(
            simd.into_iter().chain(reference).chain(wgmma).chain(mma_sync).filter(wanted).collect(),
            vec![host, nccl, nvlink],
        ) {
            Ok(registry) => registry,
            Err(error) => unreachable!("the table of implementations contradicts itself: {error}"),
        }
    }
}

/// The oldest NCCL whose communicators are made without blocking and read their settings by size.
pub const OLDEST_NCCL: &str = "2.18";

/// The most ranks that pass tokens on between GPUs: what has come through others is read in as many runs.
pub const MAX_FORWARDING_GPUS: usize = 64;

/// `auto` leaves it to those who name it.
const NVLINK_UNASKED_FROM: usize = usize::MAX;

/// What machine code is made for; 8.x runs that of 8.0.
const SINCE_AMPERE: [CapabilityRange; 5] = [
    CapabilityRange { first: ComputeCapability::new(8, 0), last: Some(ComputeCapability::new(8, 9)) },
    CapabilityRange::only(9, 0),
    CapabilityRange::only(10, 0),
    CapabilityRange::only(10, 3),
    CapabilityRange::only(12, 0),
];

/// A CPU technique.
fn cpu(technique: &'static str, quant: Quant, instruction_sets: &[InstructionSet]) -> Descriptor {
    let target = Target::Cpu { instruction_sets: instruction_sets.iter().copied().collect() };
    grouped_gemm(technique, quant, (target, BTreeMap::new()))
}

/// A GPU technique. Its kernels are compiled at the start unless they are cached, so that a compiler is no condition: where
/// one is missed, `jit::prepare` says what for and where it was looked for.
fn gpu(technique: &'static str, quant: Quant, compute_capabilities: &[CapabilityRange]) -> Descriptor {
    let target = Target::Gpu { compute_capabilities: compute_capabilities.to_vec() };
    let libraries = BTreeMap::from([(Library::Driver, None)]);
    // NCCL goes from GPU to GPU: a rank that computes on its cores has none to go through.
    let transports = vec![Transport::Nvlink, Transport::Nccl, Transport::Host];
    let forwards = Some(Limits::between(1, MAX_FORWARDING_GPUS));
    // `auto` leaves two levels between GPUs to those who name them: on no two hosts with GPUs have they been timed, and a chunk
    // has one exchange more.
    let forwards_unasked = false;
    Descriptor { transports, forwards, forwards_unasked, ..grouped_gemm(technique, quant, (target, libraries)) }
}

/// All techniques compute rows alike, so that shapes matter only as far as NVFP4's blocks go.
fn grouped_gemm(
    technique: &'static str,
    quant: Quant,
    (target, libraries): (Target, BTreeMap<Library, Option<&'static str>>),
) -> Descriptor {
    let payloads = match quant {
        Quant::Nvfp4 => vec![Payload::F32, Payload::Bf16, Payload::Nvfp4],
        Quant::W4a16Nvfp4 | Quant::None => vec![Payload::F32, Payload::Bf16],
    };
    Descriptor {
        identity: Identity::grouped_gemm(technique, quant),
        target,
        libraries,
        opt_in: None,
        deprecated: None,
        activations: BTreeSet::from([
            ActivationForm::Swiglu,
            ActivationForm::SwigluClamp,
            ActivationForm::Situ,
            ActivationForm::SituLinear,
        ]),
        bias: false,
        routing: RoutingKind::ALL.into_iter().filter(|kind| *kind != RoutingKind::Hash).collect(),
        num_topk: Limits::from(1),
        hidden: Width::multiple_of(BLOCK),
        intermediate: Width::multiple_of(BLOCK),
        num_local_experts: Limits::from(0),
        uneven_experts: true,
        max_tensor_parallel: 1,
        max_num_nodes: None,
        transports: vec![Transport::Host],
        forwards: Some(Limits::from(1)),
        forwards_unasked: true,
        payloads,
        combine_dtypes: vec![CombineDtype::F32, CombineDtype::Bf16],
        batch_invariant: true,
    }
}
