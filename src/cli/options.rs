//! The options of `run` and `verify`, and what they have in common.

use std::path::{Path, PathBuf};

use clap::Args;

use super::values::{
    InputRef, IsaChoice, KeyValue, LayerChoice, OutputDtype, Part, ProgressChoice, Split, layer, positive,
};
use crate::config::{ConfigError, Effective, Override, Sources};
use crate::env::{EnvError, EnvVars};
use crate::ids::LayerIdx;

/// Applies the MoE layers of a checkpoint to the rows of a tensor, over all ranks.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Where tokens come from and go.
    #[command(flatten)]
    pub work: WorkArgs,
    /// Layers to apply to the input, each on its own: `all`, or a list as in 1,2.
    #[arg(long, value_name = "all|N,N,...", default_value = "all")]
    pub layers: LayerChoice,
    /// Where the output tensors `layers.N.output` are written; appears whole or not at all.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// The dtype of the output.
    #[arg(long, value_enum, default_value = "bf16")]
    pub output_dtype: OutputDtype,
    /// Repeats the whole so often, for soak and timing.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
    pub steps: usize,
    /// Writes the report to this file: as a page to open in a browser where it ends in .html or .htm, else as JSON. May be
    /// repeated.
    #[arg(long, value_name = "FILE")]
    pub report: Vec<PathBuf>,
    /// Writes when every rank was in which phase to this file, on one clock, as a trace that Perfetto (ui.perfetto.dev) and
    /// chrome://tracing open.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Writes the router's choice (`layers.N.topk_idx`, `layers.N.topk_weights`) to this file, in the form of --topk.
    #[arg(long, value_name = "FILE")]
    pub export_topk: Option<PathBuf>,
    /// Deployment, kernels and printing.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Runs one layer and compares it with the reference or with expected values; exit code 0 or 1.
#[derive(Debug, Clone, Args)]
pub struct VerifyArgs {
    /// Where tokens come from.
    #[command(flatten)]
    pub work: WorkArgs,
    /// The layer.
    #[arg(long, value_name = "N", value_parser = layer)]
    pub layer: LayerIdx,
    /// The expected values; without them the reference is computed.
    #[arg(long, value_name = "FILE[:TENSOR]")]
    pub expected: Option<InputRef>,
    /// Compares so many rows, spread evenly over the input, and computes the reference of no others; default: all.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub rows: Option<usize>,
    /// The dtype of the output that is compared.
    #[arg(long, value_enum, default_value = "f32")]
    pub output_dtype: OutputDtype,
    /// Deployment, kernels and printing.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What a layer is applied to.
#[derive(Debug, Clone, Args)]
pub struct WorkArgs {
    /// The checkpoint's directory.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// The input rows, [num_tokens, hidden] in BF16 (F32 where the payload is f32).
    #[arg(long, value_name = "FILE[:TENSOR]")]
    pub input: InputRef,
    /// How rows are dealt to the ranks, in contiguous blocks: `even`, or the rows of each rank.
    #[arg(long, value_name = "even|N,N,...", default_value = "even")]
    pub split: Split,
    /// What is computed: the routed experts (of a latent model the sum before its norm), the shared ones, or all.
    #[arg(long, value_enum, default_value = "block")]
    pub part: Part,
    /// Takes `topk_idx` (I32 or I64) and `topk_weights` (F32), optionally under `layers.N.`, from this file instead
    /// of the router.
    #[arg(long, value_name = "FILE")]
    pub topk: Option<PathBuf>,
}

/// Deployment overrides, kernels and printing.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// What overrides the deployment.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// Threads of each rank; default: LOCKSTEP_THREADS, else this host's cores over its ranks.
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Machine")]
    pub threads: Option<usize>,
    /// The instruction set of the CPU kernels.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Machine")]
    pub isa: IsaChoice,
    /// Prints one JSON object instead of tables.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Prints the effective deployment with the origin of each value, and ends.
    #[arg(long, help_heading = "Printing")]
    pub print_config: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Logs and progress, of every command that takes long.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct LogArgs {
    /// Logs more: -v debug, -vv trace. LOCKSTEP_LOG takes a filter such as lockstep::dispatch=trace,info.
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Printing")]
    pub verbose: u8,
    /// When progress bars are drawn.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Printing")]
    pub progress: ProgressChoice,
}

/// The deployment and what overrides it; each option is one key.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Deployment (command line over LOCKSTEP_* over file over defaults)")]
pub struct DeploymentArgs {
    /// The deployment file; without one the defaults hold.
    #[arg(long, value_name = "FILE")]
    pub deployment: Option<PathBuf>,
    /// The family of kernels: auto, cpu, reference, simd, mma_sync or wgmma.
    #[arg(long, visible_alias = "moe-backend", value_name = "FAMILY")]
    pub backend: Option<String>,
    /// Pins one implementation, as in lockstep.simd.grouped_gemm.nvfp4; never falls back.
    #[arg(long, value_name = "QUERY")]
    pub implementation: Option<String>,
    /// Lets a named family be replaced where it cannot serve a layer.
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_fallback: Option<String>,
    /// Whether activations are quantised: checkpoint, bf16 or quantised.
    #[arg(long, value_name = "MODE")]
    pub activations: Option<String>,
    /// The gated activation: checkpoint, swiglu or `situ:BETA[,LINEAR_BETA]`.
    #[arg(long, value_name = "ACTIVATION")]
    pub activation: Option<String>,
    /// Where routing weights are applied: auto, slot or rank.
    #[arg(long, value_name = "MODE")]
    pub combine: Option<String>,
    /// One summation order whatever the number of rows and chunks.
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub batch_invariant: Option<String>,
    /// Whether kernels' tactics are timed first, over all ranks: off or on.
    #[arg(long, value_name = "off|on")]
    pub tuning: Option<String>,
    /// What carries tokens: auto, host, nccl or nvlink.
    #[arg(long, value_name = "TRANSPORT")]
    pub transport: Option<String>,
    /// The form of travelling tokens: auto, f32, bf16 or nvfp4.
    #[arg(long, value_name = "FORM")]
    pub payload: Option<String>,
    /// The form of rows that come back: auto, f32 or bf16.
    #[arg(long, value_name = "DTYPE")]
    pub combine_dtype: Option<String>,
    /// Tokens of a rank that buffers are planned for.
    #[arg(long, value_name = "N")]
    pub num_max_tokens_per_rank: Option<String>,
    /// Tokens of a rank that are dispatched at once; null: all.
    #[arg(long, value_name = "N")]
    pub chunk_tokens: Option<String>,
    /// Where compiled kernels are kept; default: lockstep in the user's cache directory.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<String>,
    /// How ranks share that directory: per-rank or flat.
    #[arg(long, value_name = "LAYOUT")]
    pub cache_layout: Option<String>,
    /// Fails where a kernel would have to be compiled.
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub require_warm: Option<String>,
    /// Sets any other key, as in timeouts.step_s=30; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<KeyValue>,
}

/// The text of a file that the command line names.
///
/// # Errors
/// If it can't be read or is not UTF-8.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    std::fs::read_to_string(path)
}

impl WorkArgs {
    /// What every rank must be asked alike: `asked`, and what these options say without paths, which differ by host.
    #[must_use]
    pub fn asked(&self, mut asked: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
        asked.push(("split", self.split.to_string()));
        asked.push(("part", format!("{:?}", self.part).to_lowercase()));
        asked.push(("topk", self.topk.is_some().to_string()));
        asked
    }
}

impl DeploymentArgs {
    /// What the command line sets, in the order in which it is applied: `--set` first, then the options of one key.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let of_options: [(&str, &str, &Option<String>); 16] = [
            ("moe.backend", "--backend", &self.backend),
            ("moe.implementation", "--implementation", &self.implementation),
            ("moe.allow_fallback", "--allow-fallback", &self.allow_fallback),
            ("moe.activations", "--activations", &self.activations),
            ("moe.activation", "--activation", &self.activation),
            ("moe.combine", "--combine", &self.combine),
            ("moe.batch_invariant", "--batch-invariant", &self.batch_invariant),
            ("moe.tuning", "--tuning", &self.tuning),
            ("dispatch.transport", "--transport", &self.transport),
            ("dispatch.payload", "--payload", &self.payload),
            ("dispatch.combine_dtype", "--combine-dtype", &self.combine_dtype),
            ("dispatch.num_max_tokens_per_rank", "--num-max-tokens-per-rank", &self.num_max_tokens_per_rank),
            ("dispatch.chunk_tokens", "--chunk-tokens", &self.chunk_tokens),
            ("jit.cache_dir", "--cache-dir", &self.cache_dir),
            ("jit.layout", "--cache-layout", &self.cache_layout),
            ("jit.require_warm", "--require-warm", &self.require_warm),
        ];
        let set = self.set.iter().map(|set| Override { key: set.key, option: "--set", text: set.text.clone() });
        let given = of_options
            .into_iter()
            .filter_map(|(key, option, text)| text.as_ref().map(|text| Override { key, option, text: text.clone() }));
        set.chain(given).collect()
    }

    /// The deployment with environment and command line applied.
    ///
    /// # Errors
    /// If the file cannot be read, or a value is refused.
    pub fn effective(&self, env: &EnvVars) -> Result<Effective, ConfigError> {
        let file = self.deployment.as_ref().map(|path| path.display().to_string());
        let bytes = match (&self.deployment, &file) {
            (Some(path), Some(file)) => Some(std::fs::read(path).map_err(|source| ConfigError::of_read(file, source))?),
            _ => None,
        };
        Effective::resolve(&Sources {
            file: file.as_deref().zip(bytes.as_deref()),
            variables: &env.lockstep,
            command_line: &self.overrides(),
        })
    }
}

impl CommonArgs {
    /// Threads that the person asked for: the option, else `LOCKSTEP_THREADS`.
    ///
    /// # Errors
    /// If the variable holds no count.
    pub fn threads(&self, env: &EnvVars) -> Result<Option<usize>, EnvError> {
        self.threads.map_or_else(|| env.threads(), |threads| Ok(Some(threads)))
    }
}
