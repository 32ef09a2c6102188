//! Every key of a deployment, once: its path, what it takes, how it is set and shown.
//!
//! A key's environment variable is `LOCKSTEP_` and the last segment of its path in capitals. `version` has none: it
//! says how the file is to be read.

use super::scalar::{Scalar, ScalarError};
use super::{
    Activations, BackendFamily, CacheLayout, Choice, Cluster, Combine, CombineDtype, CudaGraph, Deployment, Device,
    Dispatch, Jit, Levels, Links, Log, LogFormat, Moe, Overlap, Payload, Timeouts, Transport, Tuning,
};
use crate::near::{nearest, normalised};
use crate::numerics::activation::Activation;

/// The form of the file that this build reads.
const VERSION: u32 = 1;

/// A key of a deployment.
#[derive(Debug)]
pub struct Key {
    /// Its section and name, as in `moe.backend`.
    pub path: &'static str,
    /// Sets it.
    pub(super) set: fn(&mut Deployment, &Scalar) -> Result<(), ScalarError>,
    /// Its value as a YAML scalar.
    pub(super) show: fn(&Deployment) -> String,
}

impl Key {
    /// The section; empty at the top level.
    #[must_use]
    pub fn section(&self) -> &'static str {
        self.path.split_once('.').map_or("", |(section, _)| section)
    }

    /// The name inside its section.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    /// The environment variable that sets it.
    #[must_use]
    pub fn variable(&self) -> Option<String> {
        (self.path != "version").then(|| format!("LOCKSTEP_{}", self.name().to_uppercase()))
    }

    /// The key of a path.
    #[must_use]
    pub fn of_path(path: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.path == path)
    }
}

/// The key of a path, or what to write in its place.
///
/// # Errors
/// If there is none: the nearest path, or where the paths are listed.
pub fn key_named(path: &str) -> Result<&'static Key, String> {
    if let Some(key) = Key::of_path(path) {
        return Ok(key);
    }
    let of_name = KEYS.iter().find(|key| key.name() == path).map(|key| key.path);
    match of_name.or_else(|| nearest(&normalised(path), KEYS.iter().map(|key| key.path))) {
        Some(path) => Err(format!("did you mean {path}?")),
        None => Err("--print-config lists the keys".to_owned()),
    }
}

impl Default for Deployment {
    fn default() -> Self {
        Self {
            name: "laptop".to_owned(),
            cluster: Cluster {
                nodes: 1,
                ranks_per_node: None,
                device: Device::Cpu,
                share_gpus: false,
                scale_up_ranks: None,
            },
            links: Links::default(),
            moe: Moe {
                backend: BackendFamily::Auto,
                implementation: None,
                allow_fallback: false,
                activations: Activations::Checkpoint,
                activation: None,
                combine: Combine::Auto,
                batch_invariant: false,
                tuning: Tuning::Off,
                cuda_graph: CudaGraph::Off,
            },
            dispatch: Dispatch {
                transport: Transport::Auto,
                levels: Levels::Auto,
                payload: Payload::Auto,
                num_max_tokens_per_rank: 8192,
                chunk_tokens: None,
                combine_dtype: CombineDtype::Auto,
                overlap: Overlap::Off,
            },
            jit: Jit { cache_dir: None, layout: CacheLayout::PerRank, require_warm: false },
            timeouts: Timeouts { start_s: 120, load_s: 3600, compile_s: 1800, step_s: 60 },
            log: Log { level: "info".to_owned(), format: LogFormat::Text },
        }
    }
}

macro_rules! keys {
    ($($path:literal: $field:ident $(. $member:ident)* = |$scalar:ident| $read:expr, |$value:ident| $show:expr;)+) => {
        /// Every key, in the order of the file.
        pub static KEYS: &[Key] = &[
            Key {
                path: "version",
                set: |_, scalar| scalar.version(VERSION),
                show: |_| VERSION.to_string(),
            },
            $(Key {
                path: $path,
                set: |deployment, $scalar| {
                    deployment.$field $(. $member)* = $read?;
                    Ok(())
                },
                show: |deployment| {
                    let $value = &deployment.$field $(. $member)*;
                    $show
                },
            }),+
        ];
    };
}

keys! {
    "name": name = |s| s.text(), |v| quoted(v);
    "cluster.nodes": cluster.nodes = |s| s.count(1), |v| v.to_string();
    "cluster.ranks_per_node": cluster.ranks_per_node = |s| s.or_null(|s| s.count(1)), |v| or_null(v.as_ref());
    "cluster.device": cluster.device = |s| s.choice(), |v| v.name().to_owned();
    "cluster.share_gpus": cluster.share_gpus = |s| s.boolean(), |v| v.to_string();
    "cluster.scale_up_ranks": cluster.scale_up_ranks = |s| s.or_null(|s| s.count(1)), |v| or_null(v.as_ref());
    "links.scale_up_gbyte_per_s": links.scale_up_gbyte_per_s = |s| s.or_null(Scalar::rate), |v| number(*v);
    "links.scale_out_gbyte_per_s": links.scale_out_gbyte_per_s = |s| s.or_null(Scalar::rate), |v| number(*v);
    "links.memory_gbyte_per_s": links.memory_gbyte_per_s = |s| s.or_null(Scalar::rate), |v| number(*v);
    "links.tflops_bf16": links.tflops_bf16 = |s| s.or_null(Scalar::rate), |v| number(*v);
    "moe.backend": moe.backend = |s| s.choice(), |v| v.name().to_owned();
    "moe.implementation": moe.implementation = |s| s.or_null(Scalar::text), |v| text_or_null(v.as_deref());
    "moe.allow_fallback": moe.allow_fallback = |s| s.boolean(), |v| v.to_string();
    "moe.activations": moe.activations = |s| s.choice(), |v| v.name().to_owned();
    "moe.activation": moe.activation = |s| s.activation(), |v| quoted(&activation(*v));
    "moe.combine": moe.combine = |s| s.choice(), |v| v.name().to_owned();
    "moe.batch_invariant": moe.batch_invariant = |s| s.boolean(), |v| v.to_string();
    "moe.tuning": moe.tuning = |s| s.choice(), |v| v.name().to_owned();
    "moe.cuda_graph": moe.cuda_graph = |s| s.choice(), |v| v.name().to_owned();
    "dispatch.transport": dispatch.transport = |s| s.choice(), |v| v.name().to_owned();
    "dispatch.levels": dispatch.levels = |s| s.choice(), |v| v.name().to_owned();
    "dispatch.payload": dispatch.payload = |s| s.choice(), |v| v.name().to_owned();
    "dispatch.num_max_tokens_per_rank": dispatch.num_max_tokens_per_rank = |s| s.count(1), |v| v.to_string();
    "dispatch.chunk_tokens": dispatch.chunk_tokens = |s| s.or_null(|s| s.count(1)), |v| or_null(v.as_ref());
    "dispatch.combine_dtype": dispatch.combine_dtype = |s| s.choice(), |v| v.name().to_owned();
    "dispatch.overlap": dispatch.overlap = |s| s.choice(), |v| v.name().to_owned();
    "jit.cache_dir": jit.cache_dir = |s| s.or_null(Scalar::text), |v| text_or_null(v.as_deref());
    "jit.layout": jit.layout = |s| s.choice(), |v| v.name().to_owned();
    "jit.require_warm": jit.require_warm = |s| s.boolean(), |v| v.to_string();
    "timeouts.start_s": timeouts.start_s = |s| s.count(1), |v| v.to_string();
    "timeouts.load_s": timeouts.load_s = |s| s.count(1), |v| v.to_string();
    "timeouts.compile_s": timeouts.compile_s = |s| s.count(1), |v| v.to_string();
    "timeouts.step_s": timeouts.step_s = |s| s.count(1), |v| v.to_string();
    "log.level": log.level = |s| s.text(), |v| quoted(v);
    "log.format": log.format = |s| s.choice(), |v| v.name().to_owned();
}

fn or_null<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "null".to_owned(), ToString::to_string)
}

/// The debug form of an f64 is its shortest decimal form with a point or an exponent, which a number key reads back.
fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| format!("{value:?}"))
}

fn text_or_null(value: Option<&str>) -> String {
    value.map_or_else(|| "null".to_owned(), quoted)
}

/// Text as a YAML scalar: quoted wherever YAML or our own table could read it as something else.
fn quoted(text: &str) -> String {
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./=".contains(c))
        && !Scalar::bare(text).is_null();
    if is_plain {
        return text.to_owned();
    }
    let mut yaml = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => yaml.extend(['\\', c]),
            c if c == ' ' || c.is_ascii_graphic() || c.is_alphanumeric() => yaml.push(c),
            c => yaml.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    yaml.push('"');
    yaml
}

/// An activation as its key takes it.
fn activation(value: Option<Activation>) -> String {
    value.map_or_else(|| "checkpoint".to_owned(), |activation| activation.to_string())
}
