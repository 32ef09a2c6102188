//! What a rank's machine has, as plain data: collected elsewhere, once, or read from a file.
//!
//! Knows neither how facts are found nor what is done with them. A fact that nobody collected is unknown, which is not
//! the same as absent.

mod json;
mod values;

pub use json::EnvironmentError;
pub use values::{ComputeCapability, Fact, InstructionSet, Library, ParseCapabilityError, version_at_least};

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

/// The environment of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Environment {
    /// The host's name: information only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The best CPU instruction set that may be used.
    #[serde(skip_serializing_if = "Fact::is_unknown")]
    pub instruction_set: Fact<InstructionSet>,
    /// The GPU that the rank drives.
    #[serde(skip_serializing_if = "Fact::is_unknown")]
    pub gpu: Fact<Gpu>,
    /// Versions of what is loaded at run time.
    pub libraries: Libraries,
    /// Opt-in flags that are set; absent: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<BTreeSet<String>>,
    /// Environment variables that bear on a run.
    pub variables: BTreeMap<String, String>,
    /// Whatever else is worth printing: cores, cache directory, ... Information only.
    pub info: BTreeMap<String, String>,
}

/// A rank's GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// As the driver names it: `NVIDIA H200`.
    pub name: String,
    /// What tells it from every other GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Which machine code it runs.
    pub compute_capability: ComputeCapability,
}

/// Versions of libraries.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libraries {
    /// The MPI library.
    #[serde(default, skip_serializing_if = "Fact::is_unknown")]
    pub mpi: Fact<String>,
    /// The GPU driver.
    #[serde(default, skip_serializing_if = "Fact::is_unknown")]
    pub driver: Fact<String>,
    /// NCCL.
    #[serde(default, skip_serializing_if = "Fact::is_unknown")]
    pub nccl: Fact<String>,
    /// The run-time compiler.
    #[serde(default, skip_serializing_if = "Fact::is_unknown")]
    pub nvrtc: Fact<String>,
    /// cublasLt.
    #[serde(default, skip_serializing_if = "Fact::is_unknown")]
    pub cublaslt: Fact<String>,
}

impl Libraries {
    /// The version of one.
    #[must_use]
    pub fn get(&self, library: Library) -> &Fact<String> {
        match library {
            Library::Mpi => &self.mpi,
            Library::Driver => &self.driver,
            Library::Nccl => &self.nccl,
            Library::Nvrtc => &self.nvrtc,
            Library::Cublaslt => &self.cublaslt,
        }
    }

    /// The version of one, to set.
    pub fn get_mut(&mut self, library: Library) -> &mut Fact<String> {
        match library {
            Library::Mpi => &mut self.mpi,
            Library::Driver => &mut self.driver,
            Library::Nccl => &mut self.nccl,
            Library::Nvrtc => &mut self.nvrtc,
            Library::Cublaslt => &mut self.cublaslt,
        }
    }
}

impl Environment {
    /// Reads the JSON that `doctor --json` prints: a list of ranks, each perhaps with a `count`, or one such entry.
    ///
    /// A key that is left out is unknown, `null` is absent.
    ///
    /// # Errors
    /// If the text is not of that form, has an unknown key, or describes no rank or too many.
    pub fn list_from_json(text: &str) -> Result<Vec<Self>, EnvironmentError> {
        json::read(text)
    }

    /// Whether the rank has a GPU, as far as is known.
    #[must_use]
    pub fn has_gpu(&self) -> Option<bool> {
        match self.gpu {
            Fact::Unknown => None,
            Fact::Absent => Some(false),
            Fact::Present(_) => Some(true),
        }
    }

    /// The facts that gates read, without what differs between ranks by nature.
    #[must_use]
    pub fn gated(&self) -> Self {
        let mut gpu = self.gpu.clone();
        if let Fact::Present(gpu) = &mut gpu {
            gpu.uuid = None;
        }
        Self {
            instruction_set: self.instruction_set,
            gpu,
            libraries: self.libraries.clone(),
            flags: self.flags.clone(),
            ..Self::default()
        }
    }
}
