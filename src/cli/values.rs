//! Typed values of options: what stands behind `F:TENSOR`, `1,2|all`, `even|3,0,7,1`.
//!
//! Pure. Numbers are read by the one table of scalars, so that `010` means the same nowhere.

use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;

use crate::config::scalar::Scalar;
use crate::ids::LayerIdx;
use crate::select::InstructionSet;

/// A tensor in a safetensors file, as `FILE[:TENSOR]`.
///
/// The last colon parts the two, unless what follows holds a `/` or ends in `.safetensors`: then it is part of the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputRef {
    /// The file.
    pub path: PathBuf,
    /// The tensor; absent: the file's only one.
    pub tensor: Option<String>,
}

/// Layers that a command works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerChoice {
    /// Every MoE layer of the checkpoint.
    All,
    /// These, in this order.
    List(Vec<LayerIdx>),
}

/// How input rows are dealt to the ranks, in contiguous blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Split {
    /// As evenly as they divide, the first ranks one more.
    Even,
    /// So many to each rank, in rank order.
    Counts(Vec<usize>),
}

/// The part of an MoE block that is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The routed experts' weighted sum (of a latent model: before the norm).
    Routed,
    /// The shared experts alone.
    Shared,
    /// All of it.
    Block,
}

/// The dtype of output tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputDtype {
    /// Rounded once from the fp32 sum.
    Bf16,
    /// The fp32 sum.
    F32,
}

/// The instruction set of the CPU kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IsaChoice {
    /// The best that every rank has.
    Auto,
    /// Portable code.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512.
    Avx512,
}

/// When progress bars are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ProgressChoice {
    /// Where standard error is a terminal.
    #[default]
    Auto,
    /// Also into a pipe, as under mpirun.
    Always,
    /// Nowhere.
    Never,
}

/// A deployment key and its value, as `KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key's path.
    pub key: &'static str,
    /// The value, as given.
    pub text: String,
}

impl IsaChoice {
    /// The instruction set that was named; absent: the machine's best.
    #[must_use]
    pub const fn named(self) -> Option<InstructionSet> {
        match self {
            Self::Auto => None,
            Self::Scalar => Some(InstructionSet::Scalar),
            Self::Avx2 => Some(InstructionSet::Avx2),
            Self::Avx512 => Some(InstructionSet::Avx512),
        }
    }
}

impl FromStr for InputRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_path = |tail: &str| tail.contains('/') || tail.ends_with(".safetensors");
        let (path, tensor) = match text.rsplit_once(':') {
            Some((path, tensor)) if !is_path(tensor) => (path, Some(tensor)),
            _ => (text, None),
        };
        match (path, tensor) {
            ("", _) => Err("the file is missing; write FILE or FILE:TENSOR".to_owned()),
            (_, Some("")) => Err("the tensor's name is missing after the colon; write FILE:TENSOR".to_owned()),
            _ => Ok(Self { path: path.into(), tensor: tensor.map(str::to_owned) }),
        }
    }
}

impl std::fmt::Display for LayerChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::List(layers) => f.write_str(&comma_separated(layers.iter().map(|layer| layer.0))),
        }
    }
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Even => f.write_str("even"),
            Self::Counts(counts) => f.write_str(&comma_separated(counts)),
        }
    }
}

fn comma_separated<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(",")
}

impl std::fmt::Display for InputRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.tensor.as_ref().map_or(Ok(()), |tensor| write!(f, ":{tensor}"))
    }
}

/// A whole number in decimal digits, at least `least`.
fn count<T: TryFrom<u64>>(text: &str, least: u64) -> Result<T, String> {
    Scalar::bare(text).count(least).map_err(|error| error.to_string())
}

/// A whole number of at least 1, for clap.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    count(text, 1)
}

/// A number above 0, for clap.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    Scalar::bare(text).rate().map_err(|error| error.to_string())
}

/// A layer number, for clap.
pub(super) fn layer(text: &str) -> Result<LayerIdx, String> {
    count(text, 0).map(LayerIdx)
}

/// A seed, for clap.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    count(text, 0)
}

impl FromStr for LayerChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        let mut layers = Vec::new();
        for part in text.split(',') {
            let layer = layer(part).map_err(|error| format!("{error}; write `all`, or layers as in 1,2"))?;
            if layers.contains(&layer) {
                return Err(format!("{layer} is named twice"));
            }
            layers.push(layer);
        }
        Ok(Self::List(layers))
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "even" {
            return Ok(Self::Even);
        }
        let counts: Result<Vec<usize>, String> = text.split(',').map(|part| count(part, 0)).collect();
        counts
            .map(Self::Counts)
            .map_err(|error| format!("{error}; write `even`, or the rows of each rank as in 3,0,7,1"))
    }
}

impl FromStr for KeyValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, as in timeouts.step_s=30")?;
        match crate::config::key_named(key) {
            Ok(key) => Ok(Self { key: key.path, text: value.to_owned() }),
            Err(cure) => Err(format!("unknown key {key}; {cure}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_refs_split_at_the_right_colon() {
        for (text, path, tensor) in [
            ("x.safetensors", "x.safetensors", None),
            ("x.safetensors:hidden", "x.safetensors", Some("hidden")),
            ("x.safetensors:1.block.w4a16", "x.safetensors", Some("1.block.w4a16")),
            ("a:b/x.safetensors", "a:b/x.safetensors", None),
            ("a:b/x.safetensors:y", "a:b/x.safetensors", Some("y")),
            ("2024:x.safetensors", "2024:x.safetensors", None),
            ("2024:x.safetensors:y", "2024:x.safetensors", Some("y")),
            ("/tmp/12:30:00/out", "/tmp/12:30:00/out", None),
        ] {
            let wanted = InputRef { path: path.into(), tensor: tensor.map(str::to_owned) };
            assert_eq!(text.parse::<InputRef>(), Ok(wanted), "{text}");
            assert_eq!(text.parse::<InputRef>().expect("parses").to_string(), text);
        }
        for text in ["", ":x", "x:", ":"] {
            assert!(text.parse::<InputRef>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn layers_and_splits() {
        assert_eq!("all".parse(), Ok(LayerChoice::All));
        assert_eq!("2,0,11".parse(), Ok(LayerChoice::List(vec![LayerIdx(2), LayerIdx(0), LayerIdx(11)])));
        for text in ["", "1,", "1,1", "01", "-1", "one", "1-3", "4294967296", "All"] {
            assert!(text.parse::<LayerChoice>().is_err(), "{text:?}");
        }
        assert_eq!("even".parse(), Ok(Split::Even));
        assert_eq!("3,0,7,1".parse(), Ok(Split::Counts(vec![3, 0, 7, 1])));
        assert_eq!("37".parse(), Ok(Split::Counts(vec![37])));
        for text in ["", "3,", "3,-1", "3;4", "0x3"] {
            assert!(text.parse::<Split>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn keys_are_checked_when_parsed() {
        let set = "timeouts.step_s=30".parse::<KeyValue>().expect("a key");
        assert_eq!((set.key, set.text.as_str()), ("timeouts.step_s", "30"));
        assert_eq!("jit.cache_dir=a=b".parse::<KeyValue>().expect("a key").text, "a=b");
        for (text, cure) in
            [("step_s=30", "timeouts.step_s"), ("timeouts.setp_s=30", "timeouts.step_s"), ("name", "KEY=VALUE")]
        {
            let error = text.parse::<KeyValue>().expect_err("refused");
            assert!(error.contains(cure), "{text}: {error}");
        }
    }
}
