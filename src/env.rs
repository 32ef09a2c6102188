//! The only reader of environment variables and of the number of cores: once, at start, as plain data.
//!
//! Everything else takes an [`EnvVars`], so that what a run depends on can be compared between ranks, printed, and made
//! up by a test. Terminal libraries read what concerns the terminal (`TERM`, `NO_COLOR`) on their own.

use std::ffi::OsString;

use crate::exit::{Classify, Exit};
use crate::launched::{self, Launched};

/// The prefix of the variables that are Lockstep's.
pub const PREFIX: &str = "LOCKSTEP_";

/// Beginnings of variables of libraries that a run goes through: a setting that reached one host only should be seen.
const OF_LIBRARIES: [&str; 7] = [
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "NVCC_APPEND_FLAGS",
    "NVIDIA_TF32_OVERRIDE",
    "OMPI_MCA_",
    "UCX_",
];

/// What launchers tell each process through the same names.
const LAUNCHERS_OWN: [&str; 8] = [
    "OMPI_MCA_orte_",
    "OMPI_MCA_ess",
    "OMPI_MCA_pmix",
    "OMPI_MCA_shmem_",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_plm",
    "OMPI_MCA_routed",
    "OMPI_MCA_mpi_oversubscribe",
];

/// Where user directories are.
const HOME: [&str; 2] = ["HOME", "XDG_CACHE_HOME"];

/// The environment of this process as far as Lockstep reads it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EnvVars {
    /// Every variable named `LOCKSTEP_*`, by name.
    pub lockstep: Vec<(String, String)>,
    /// The launcher's variables that are set, by name.
    pub launcher: Vec<(String, String)>,
    /// Variables of MPI, NCCL and their like, by name; bytes that are no text replaced.
    pub libraries: Vec<(String, String)>,
    /// `HOME`, if set and not empty.
    pub home: Option<String>,
    /// `XDG_CACHE_HOME`, if set and not empty.
    pub xdg_cache_home: Option<String>,
    /// Cores that this process may run on (its affinity and cgroup counted), at least 1.
    pub available_parallelism: usize,
}

/// Why the environment is refused.
#[derive(Debug, thiserror::Error)]
pub enum EnvError {
    /// A variable that Lockstep reads is not text.
    #[error("the environment variable {name} is not UTF-8; set it again as plain text, or unset it")]
    NotUtf8 {
        /// Its name, bad bytes replaced.
        name: String,
    },
    /// `LOCKSTEP_THREADS` is no count.
    #[error("LOCKSTEP_THREADS takes a whole number of at least 1, found {found}")]
    Threads {
        /// Its value.
        found: String,
    },
}

impl Classify for EnvError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

impl EnvVars {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// If a variable that Lockstep reads is not UTF-8.
    pub fn read() -> Result<Self, EnvError> {
        let available_parallelism = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Ok(Self { available_parallelism, ..Self::from_pairs(std::env::vars_os())? })
    }

    /// Keeps of `pairs` what Lockstep reads; one core.
    ///
    /// # Errors
    /// If a variable that Lockstep reads is not UTF-8.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, EnvError> {
        let mut vars = Self { available_parallelism: 1, ..Self::default() };
        for (name, value) in pairs {
            let shown = name.to_string_lossy().into_owned();
            let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| shown.starts_with(prefix));
            if begins(&OF_LIBRARIES) && !begins(&LAUNCHERS_OWN) {
                vars.libraries.push((shown, value.to_string_lossy().into_owned()));
                continue;
            }
            let is_ours = shown.starts_with(PREFIX);
            if !is_ours && !launched::VARIABLES.contains(&shown.as_str()) && !HOME.contains(&shown.as_str()) {
                continue;
            }
            let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else {
                return Err(EnvError::NotUtf8 { name: shown });
            };
            match name.as_str() {
                "HOME" => vars.home = Some(value).filter(|value| !value.is_empty()),
                "XDG_CACHE_HOME" => vars.xdg_cache_home = Some(value).filter(|value| !value.is_empty()),
                _ if is_ours => vars.lockstep.push((name, value)),
                _ => vars.launcher.push((name, value)),
            }
        }
        vars.lockstep.sort();
        vars.launcher.sort();
        vars.libraries.sort();
        Ok(vars)
    }

    fn ours(&self, name: &str) -> Option<&str> {
        self.lockstep.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// A launcher's variable.
    #[must_use]
    pub fn launcher(&self, name: &str) -> Option<&str> {
        self.launcher.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// What a launcher says of this process; none where it was started alone.
    #[must_use]
    pub fn launched(&self) -> Option<Launched> {
        Launched::read(|name| self.launcher(name))
    }

    /// The launcher's number of this process, also where it does not say of how many.
    #[must_use]
    pub fn launched_rank(&self) -> Option<u32> {
        let ranks = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"];
        ranks.into_iter().find_map(|name| self.launcher(name)?.parse().ok())
    }

    /// `LOCKSTEP_LOG`: a filter such as `debug` or `lockstep::dispatch=trace,info`.
    #[must_use]
    pub fn log_filter(&self) -> Option<&str> {
        self.ours("LOCKSTEP_LOG").filter(|filter| !filter.is_empty())
    }

    /// `LOCKSTEP_FAULT`: a fault to provoke, for tests of what happens then.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.ours("LOCKSTEP_FAULT").filter(|fault| !fault.is_empty())
    }

    /// `LOCKSTEP_LAUNCHER`: set by a launcher that says itself that it was told to end.
    #[must_use]
    pub fn launcher_speaks(&self) -> bool {
        self.ours("LOCKSTEP_LAUNCHER").is_some_and(|launcher| !launcher.is_empty())
    }

    /// `LOCKSTEP_START_S`, for the time before a deployment is read; absent also where it is refused, which the
    /// deployment then says.
    #[must_use]
    pub fn start_s(&self) -> Option<u64> {
        crate::config::scalar::Scalar::bare(self.ours("LOCKSTEP_START_S")?).count(1).ok()
    }

    /// `LOCKSTEP_NCCL`: what carries bytes between GPUs, by its library or the directory that this lies in.
    #[must_use]
    pub fn nccl(&self) -> Option<&str> {
        self.ours("LOCKSTEP_NCCL").filter(|path| !path.is_empty())
    }

    /// `LOCKSTEP_CUBLASLT`: what multiplies dense matrices on GPUs, by its library or the directory that this lies in.
    #[must_use]
    pub fn cublaslt(&self) -> Option<&str> {
        self.ours("LOCKSTEP_CUBLASLT").filter(|path| !path.is_empty())
    }

    /// `LOCKSTEP_NVRTC`: the compiler of kernels, by its library or the directory that this lies in.
    #[must_use]
    pub fn nvrtc(&self) -> Option<&str> {
        self.ours("LOCKSTEP_NVRTC").filter(|path| !path.is_empty())
    }

    /// `LOCKSTEP_THREADS`: threads of this rank's pool.
    ///
    /// # Errors
    /// If it is not a whole number of at least 1.
    pub fn threads(&self) -> Result<Option<usize>, EnvError> {
        let Some(found) = self.ours("LOCKSTEP_THREADS") else { return Ok(None) };
        match crate::config::scalar::Scalar::bare(found).count(1) {
            Ok(threads) => Ok(Some(threads)),
            Err(_) => Err(EnvError::Threads { found: found.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> EnvVars {
        EnvVars::from_pairs(pairs.iter().map(|(name, value)| (name.into(), value.into()))).expect("text")
    }

    #[test]
    fn keeps_what_is_read_and_sorts_it() {
        let vars = vars(&[
            ("PATH", "/bin"),
            ("LOCKSTEP_STEP_S", "5"),
            ("LOCKSTEP_BACKEND", "simd"),
            ("SLURM_NTASKS", "4"),
            ("HOME", ""),
            ("XDG_CACHE_HOME", "/c"),
        ]);
        let ours: Vec<&str> = vars.lockstep.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(ours, ["LOCKSTEP_BACKEND", "LOCKSTEP_STEP_S"]);
        assert_eq!(vars.launcher("SLURM_NTASKS"), Some("4"));
        assert_eq!(vars.launcher("PATH"), None);
        assert_eq!((vars.home.as_deref(), vars.xdg_cache_home.as_deref()), (None, Some("/c")));
    }

    #[test]
    fn refuses_bytes_in_its_own_variables_only() {
        let bad = || OsString::from_vec(vec![0xff]);
        assert!(EnvVars::from_pairs([("PATH".into(), bad())]).is_ok());
        let error = EnvVars::from_pairs([("LOCKSTEP_NAME".into(), bad())]).expect_err("not UTF-8");
        assert!(error.to_string().contains("LOCKSTEP_NAME"), "{error}");
    }

    #[test]
    fn threads_are_read_by_the_table_of_scalars() {
        assert_eq!(vars(&[]).threads().expect("unset"), None);
        assert_eq!(vars(&[("LOCKSTEP_START_S", "5")]).start_s(), Some(5));
        assert_eq!(vars(&[("LOCKSTEP_START_S", "soon")]).start_s(), None);
        assert_eq!(vars(&[("LOCKSTEP_THREADS", "3")]).threads().expect("a count"), Some(3));
        for text in ["0", "-1", "010", "", "two", "1e1"] {
            let error = vars(&[("LOCKSTEP_THREADS", text)]).threads().expect_err("refused");
            assert_eq!(error.exit(), Exit::BadInput, "{text}");
        }
    }
}
