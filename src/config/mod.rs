//! The deployment: what a person decides about a run, as typed and validated values.
//!
//! Pure: text comes in, values go out; which file it was and what the environment holds is the caller's business.
//! Start at [`Effective::resolve`]. The keys stand once, in `keys.rs`; how a scalar is read stands once, in
//! [`scalar`], and is the same through the file, the environment and the command line.
//!
//! YAML is read through `serde-saphyr`, and through the events of its parser rather than through serde. Tried side by
//! side on the inputs of this module's tests, both it and `yaml_serde` read `0x10` as 16, `0o10` as 8 and `.inf` as a
//! number where the type fits, and `serde-saphyr` also `"4"` as 4 and `yes` as true: serde hands over a value, not how
//! it was written, and strictness needs the latter. Both name line and column; only `serde-saphyr` hands out its
//! parser, whose events carry position and quoting, and it names a tab where the other finds a "character that cannot
//! start any token".

mod choices;
mod error;
mod keys;
mod layers;
pub mod scalar;
mod tree;
mod walk;

#[cfg(test)]
mod tests;

pub use choices::Choice;
pub use error::{ConfigError, Place};
pub use keys::{KEYS, Key, key_named};
pub use layers::{Effective, Origin, Override, Sources};

use crate::numerics::activation::Activation;

/// A deployment file with defaults, environment and command line applied.
#[derive(Debug, Clone, PartialEq)]
pub struct Deployment {
    /// Free text.
    pub name: String,
    /// The machines.
    pub cluster: Cluster,
    /// Link and device rates, for `plan`.
    pub links: Links,
    /// How experts are computed.
    pub moe: Moe,
    /// How tokens travel.
    pub dispatch: Dispatch,
    /// Where kernels are compiled.
    pub jit: Jit,
    /// Limits of every wait, in seconds.
    pub timeouts: Timeouts,
    /// What is logged.
    pub log: Log,
}

/// The machines of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Hosts.
    pub nodes: u32,
    /// Ranks of a host; absent: the world's size over `nodes`.
    pub ranks_per_node: Option<u32>,
    /// What a rank drives.
    pub device: Device,
    /// Several ranks may drive one GPU: for tests, where ranks are more than GPUs.
    pub share_gpus: bool,
    /// Ranks in a row that stand for a node, whatever hosts they are on; absent: the ranks of a host.
    pub scale_up_ranks: Option<u32>,
}

/// What a rank drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The host's cores.
    Cpu,
    /// One GPU.
    Gpu,
    /// A GPU where every rank has one, else the host's cores.
    Auto,
}

/// Rates of the machine, for `plan`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Links {
    /// Between ranks of a scale-up domain.
    pub scale_up_gbyte_per_s: Option<f64>,
    /// Between hosts.
    pub scale_out_gbyte_per_s: Option<f64>,
    /// Device memory.
    pub memory_gbyte_per_s: Option<f64>,
    /// Dense bf16.
    pub tflops_bf16: Option<f64>,
}

/// How experts are computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Moe {
    /// The family that may run.
    pub backend: BackendFamily,
    /// A pinned identity.
    pub implementation: Option<String>,
    /// Whether a named family may be replaced.
    pub allow_fallback: bool,
    /// Whether activations are quantised.
    pub activations: Activations,
    /// The gated activation; absent: the checkpoint's.
    pub activation: Option<Activation>,
    /// Where weights are applied.
    pub combine: Combine,
    /// One order over K for every row count and chunking (always so on CPUs).
    pub batch_invariant: bool,
    /// Whether kernels' tactics are timed when a session opens, and the fastest over all ranks runs.
    pub tuning: Tuning,
    /// Whether a layer's steps on GPUs are recorded once and replayed.
    pub cuda_graph: CudaGraph,
}

/// Families of `backend:`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendFamily {
    /// The best that every rank can run.
    Auto,
    /// `simd`, then `reference`.
    Cpu,
    /// The oracle.
    Reference,
    /// Vectorised CPU kernels.
    Simd,
    /// Portable tensor-core kernels (sm_80 and up).
    MmaSync,
    /// Hopper kernels (sm_90a).
    Wgmma,
}

/// Whether FC1 and FC2 inputs go through NVFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// As the checkpoint says.
    Checkpoint,
    /// Never.
    Bf16,
    /// Always; refused where a scale is missing.
    Quantised,
}

/// Where the routing weights are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// `slot` on hosts, `rank` between GPUs.
    Auto,
    /// At the token's home, slot by slot: bits do not depend on the placement.
    Slot,
    /// At the experts' rank: fewer bytes.
    Rank,
}

/// Whether steps are replayed as CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudaGraph {
    /// Hosts follow every step.
    Off,
    /// Where transport and layer allow it.
    Auto,
    /// Or the run is refused.
    On,
}

/// Whether tactics are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tuning {
    /// Each implementation's first tactic runs.
    Off,
    /// When a session opens.
    On,
}

/// How tokens travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// What carries them.
    pub transport: Transport,
    /// Where they go once.
    pub levels: Levels,
    /// The form of a travelling token.
    pub payload: Payload,
    /// Tokens of a rank that buffers are planned for.
    pub num_max_tokens_per_rank: usize,
    /// Tokens of a rank that are dispatched at once; absent: all.
    pub chunk_tokens: Option<usize>,
    /// The form of a row that comes back.
    pub combine_dtype: CombineDtype,
    /// Whether chunks travel while others are computed.
    pub overlap: Overlap,
}

/// Whether chunks travel while others are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    /// One after the other.
    Off,
    /// Where transport and layer allow it; steps are cut where experts keep enough rows.
    Auto,
    /// Or the run is refused; steps are cut by their tokens alone.
    On,
}

/// What carries tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// The best that every rank can build.
    Auto,
    /// MPI alltoallv.
    Host,
    /// NCCL send and receive.
    Nccl,
    /// Stores into the memory of the other ranks' GPUs.
    Nvlink,
}

/// Where a token goes once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// To each node where there are several with several ranks and what runs can pass tokens on; else to each rank.
    Auto,
    /// To each rank that hosts one of its experts.
    One,
    /// To each node, whose ranks pass it on to each other.
    Two,
}

/// The form of a travelling token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// `f32` on hosts where the value is not bf16, else `bf16`.
    Auto,
    /// As computed.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Quantised by the sender; only for quantised activations.
    Nvfp4,
}

/// The form of a row that comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombineDtype {
    /// f32 on hosts, bf16 on GPUs.
    Auto,
    /// Exact.
    F32,
    /// Rounded, also where the row stays local.
    Bf16,
}

/// Where kernels are compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jit {
    /// The cache; absent: the user's cache directory.
    pub cache_dir: Option<String>,
    /// How ranks share it.
    pub layout: CacheLayout,
    /// Fail rather than compile.
    pub require_warm: bool,
}

/// How ranks share a cache directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheLayout {
    /// A directory a rank.
    PerRank,
    /// One for all.
    Flat,
}

/// Limits of every wait, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From launch to the first agreement.
    pub start_s: u64,
    /// Reading and packing weights.
    pub load_s: u64,
    /// Compiling kernels.
    pub compile_s: u64,
    /// One step.
    pub step_s: u64,
}

/// What is logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// A level or a tracing filter.
    pub level: String,
    /// How a line looks.
    pub format: LogFormat,
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
