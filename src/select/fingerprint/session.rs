//! The digest that a run compares: a selection, and everything else that decides what is computed or exchanged.

use super::super::environment::{Environment, Fact, Library};
use super::super::problem::RoutingKind;
use super::{Digest, Fields, Fingerprint, FingerprintError, Kind, Value};
use crate::ids::LayerIdx;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// Variables of libraries that change what ranks exchange or compute: a rank that has another one is not like the others.
const MUST_MATCH: [&str; 14] = [
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NVCC_APPEND_FLAGS",
    "NVIDIA_TF32_OVERRIDE",
];

/// Whether a variable belongs to what must match.
pub(super) fn must_match(variable: &str) -> bool {
    MUST_MATCH.contains(&variable)
}

/// Beginnings of NCCL's settings that hosts have their own of: what to log and where, names of their interfaces and cards.
const OF_HOSTS: [&str; 6] =
    ["NCCL_DEBUG", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_", "NCCL_CONF_FILE"];

/// Whether a variable that need not match is worth a warning where it does not: a setting of NCCL that reached one host.
pub(super) fn should_match(variable: &str) -> bool {
    variable.starts_with("NCCL_") && !OF_HOSTS.iter().any(|of_host| variable.starts_with(of_host))
}

/// Which build a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildFacts<'a> {
    /// The crate's version.
    pub version: &'a str,
    /// What tells builds of one version apart: a revision, or a digest of the sources.
    pub revision: &'a str,
    /// The target triple.
    pub target: &'a str,
    /// `release` or `debug`.
    pub profile: &'a str,
}

impl Fields {
    /// Of an environment what must match.
    pub(super) fn add_environment(&mut self, environment: &Environment) {
        for library in Library::ALL.into_iter().filter(|library| library.must_match()) {
            self.add(format!("versions.{}", library.name()), Value::text(environment.libraries.get(library)));
        }
        if let Fact::Present(gpu) = &environment.gpu {
            self.add("versions.compute_capability", Value::text(gpu.compute_capability));
        }
        for (name, value) in environment.variables.iter().filter(|(name, _)| must_match(name)) {
            self.add(format!("variables.{name}"), value.as_str());
        }
    }
}

/// Collects what must be equal on all ranks, in any order.
#[derive(Debug, Clone)]
pub struct SessionBuilder {
    fields: Fields,
}

impl SessionBuilder {
    /// Starts from what was selected.
    #[must_use]
    pub fn new(selection: &Fingerprint) -> Self {
        let mut fields = Fields::new(Kind::Session);
        fields.fields = selection.fields.clone();
        fields.add("selection", selection.digest);
        Self { fields }
    }

    /// The build.
    pub fn build(&mut self, build: BuildFacts<'_>) -> &mut Self {
        self.fields.add_build(build);
        self
    }

    /// Of this rank's environment what must match: versions that change numbers, the GPU's machine code, variables.
    pub fn environment(&mut self, environment: &Environment) -> &mut Self {
        self.fields.add_environment(environment);
        self
    }

    /// What belongs to one layer.
    pub fn layer(&mut self, layer: LayerIdx) -> LayerFields<'_> {
        LayerFields { fields: &mut self.fields, layer }
    }

    /// A size that buffers or messages are planned by.
    pub fn capacity(&mut self, name: &str, size: u64) -> &mut Self {
        self.fields.add(format!("capacity.{name}"), size);
        self
    }

    /// How something lies in memory or in a message.
    pub fn layout(&mut self, name: &str, layout: impl Into<Value>) -> &mut Self {
        self.fields.add(format!("layout.{name}"), layout);
        self
    }

    /// The tactic that was tuned for a shape.
    pub fn tactic(&mut self, shape: &str, tactic: &str) -> &mut Self {
        self.fields.add(format!("tactics.{shape}"), tactic);
        self
    }

    /// The sources of a kernel, headers included.
    pub fn kernel_source(&mut self, name: &str, source: Digest) -> &mut Self {
        self.fields.add(format!("kernels.{name}.source"), source);
        self
    }

    /// The key of a compiled artefact.
    pub fn artefact(&mut self, kernel: &str, key: &str) -> &mut Self {
        self.fields.add(format!("kernels.{kernel}.artefact"), key);
        self
    }

    /// The version of something that changes numbers.
    pub fn version(&mut self, name: &str, version: impl std::fmt::Display) -> &mut Self {
        self.fields.add(format!("versions.{name}"), Value::text(version));
        self
    }

    /// A setting that changes what is computed or exchanged and has no place of its own.
    pub fn flag(&mut self, name: &str, value: impl Into<Value>) -> &mut Self {
        self.fields.add(format!("flags.{name}"), value);
        self
    }

    /// The fingerprint of what was collected.
    ///
    /// # Errors
    /// If one path was fed two values.
    pub fn finish(self) -> Result<Fingerprint, FingerprintError> {
        self.fields.finish()
    }
}

/// Collects what belongs to one layer.
#[derive(Debug)]
pub struct LayerFields<'a> {
    fields: &'a mut Fields,
    layer: LayerIdx,
}

impl LayerFields<'_> {
    fn add(&mut self, field: &str, value: impl Into<Value>) -> &mut Self {
        self.fields.add(format!("layers.{}.{field}", self.layer.0), value);
        self
    }

    /// The activation, its constants by their bits.
    pub fn activation(&mut self, activation: Activation) -> &mut Self {
        self.fields.add_activation(&format!("layers.{}.activation", self.layer.0), activation);
        self
    }

    /// How experts are chosen, with every constant of it.
    pub fn routing(&mut self, method: RoutingMethod) -> &mut Self {
        self.add("routing", Value::text(RoutingKind::from(method)));
        match method {
            RoutingMethod::DeepseekV3 { num_groups, topk_group, scaling } => self
                .add("routing.num_groups", num_groups)
                .add("routing.topk_group", topk_group)
                .add("routing.scaling", scaling),
            RoutingMethod::KimiK3 { scaling } | RoutingMethod::DeepseekV4 { scaling } => {
                self.add("routing.scaling", scaling)
            }
            RoutingMethod::Default
            | RoutingMethod::Renormalize
            | RoutingMethod::MinimaxM2
            | RoutingMethod::SigmoidRenorm
            | RoutingMethod::Llama4 => self,
        }
    }

    /// Another constant of the layer, by its bits: a norm's epsilon.
    pub fn constant(&mut self, name: &str, value: impl Into<Option<f32>>) -> &mut Self {
        self.add(&format!("constants.{name}"), value.into())
    }

    /// A scale, by its bits: one that all ranks have, as FC1's after it was reduced over the world.
    pub fn scale(&mut self, name: &str, value: impl Into<Option<f32>>) -> &mut Self {
        self.add(&format!("scales.{name}"), value.into())
    }

    /// Many scales, by the digest of their bits, in an order that all ranks share.
    pub fn scales(&mut self, name: &str, values: impl IntoIterator<Item = f32>) -> &mut Self {
        self.add(&format!("scales.{name}"), Digest::of_f32s(values))
    }

    /// How the layer's tokens and rows travel: `payload`, `combine`, `combine_dtype`, ...
    pub fn travel(&mut self, name: &str, value: impl Into<Value>) -> &mut Self {
        self.add(&format!("travel.{name}"), value)
    }
}
