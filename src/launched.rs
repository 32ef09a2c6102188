//! What a launcher says of this process, and whether the launched processes can become one world. Pure: knows neither MPI
//! nor the environment.
//!
//! Processes that a launcher does not connect are each alone: every one would take itself for rank 0 of 1, load the whole
//! model and write the output. Open MPI under `srun` without PMIx does not come so far: it ends the process inside
//! `MPI_Init`, with exit code 1 and advice on building Slurm. What can be known before is said before.

use crate::exit::{Classify, Exit};

/// Variables that say how many processes were launched, each with the one that says which of them this is.
const COUNTS: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    // Also set in a batch script that launched nothing; a task has a rank.
    ("SLURM_NTASKS", "SLURM_PROCID"),
];

/// Every variable that is looked at.
pub const VARIABLES: [&str; 14] = [
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK",
    "PMI_SIZE",
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
];

/// How the launcher lets the processes find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireUp {
    /// PMIx, or what Open MPI's own `mpirun` gives.
    Pmix,
    /// PMI-1 or PMI-2.
    Pmi,
    /// Not at all, as `srun --mpi=none`.
    Nothing,
}

/// What a launcher says of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The variable that says how many processes there are.
    pub variable: &'static str,
    /// How many.
    pub size: u32,
    /// Which of them this is, where it is said.
    pub rank: Option<u32>,
    /// How they find each other.
    pub wire_up: WireUp,
    /// Whether it is `srun` that started this process, and not `mpirun` in its job.
    pub is_srun: bool,
    /// Whether a launcher is really there, and the other processes with it: one of them can speak for all.
    pub is_there: bool,
}

/// The MPI library, as far as it decides whom it can be launched by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Library<'a> {
    /// Its name and version, as in `Open MPI v4.1.4`.
    pub name: &'a str,
    /// Whether it speaks PMI-1 or PMI-2; absent where that can't be seen.
    pub speaks_pmi: Option<bool>,
}

/// The launched processes are no world.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// MPI made each process a world of its own.
    #[error(
        "{variable}={launched} says that {launched} processes were launched, but MPI formed a world of {found}: \
         every process would believe that it is alone. Use the mpirun of the MPI that lockstep was built with \
         (`mpirun -n {launched}`), or `srun --mpi=pmix`"
    )]
    Singletons {
        /// The launcher's variable.
        variable: &'static str,
        /// What it says.
        launched: u32,
        /// The world's size.
        found: usize,
    },
    /// `srun` connects nothing, or in a way that this MPI does not know.
    #[error(
        "srun started {variable}={launched} processes {how}, so that {library} can't form a world of them. \
         Start them with `srun --mpi=pmix` (`srun --mpi=list` says what this Slurm has; launch/srun.sh chooses), or with \
         `mpirun -n {launched}` inside the allocation"
    )]
    WrongPlugin {
        /// Slurm's variable.
        variable: &'static str,
        /// What it says.
        launched: u32,
        /// In which way they were started.
        how: &'static str,
        /// The MPI library.
        library: String,
    },
}

impl Classify for LaunchError {
    fn exit(&self) -> Exit {
        Exit::Environment
    }
}

impl Launched {
    /// Reads what a launcher has said; none where nothing was launched. `of` gives a variable's value.
    pub fn read<'a>(of: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
        let number = |name: &str| of(name).and_then(|value| value.parse::<u32>().ok());
        let is_task = |variable: &str| variable != "SLURM_NTASKS" || of("SLURM_PROCID").is_some();
        let (variable, size, rank_variable) = COUNTS
            .into_iter()
            .filter(|(variable, _)| is_task(variable))
            .find_map(|(variable, rank)| Some((variable, number(variable)?, rank)))?;
        let has = |names: &[&str]| names.iter().any(|name| of(name).is_some());
        let is_mpirun = has(&["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]);
        let wire_up = if is_mpirun || has(&["PMIX_NAMESPACE"]) {
            WireUp::Pmix
        } else if has(&["PMI_RANK", "PMI_FD", "PMI_PORT"]) {
            WireUp::Pmi
        } else {
            WireUp::Nothing
        };
        let is_step = has(&["SLURM_STEP_ID"]) && has(&["SLURM_PROCID"]);
        Some(Self {
            variable,
            size,
            rank: number(rank_variable).or_else(|| number("PMIX_RANK")),
            wire_up,
            is_srun: is_step && !is_mpirun,
            is_there: is_step || has(&["PMIX_NAMESPACE", "PMI_FD", "PMI_PORT"]),
        })
    }

    /// Whether this process speaks where all launched ones would say the same.
    #[must_use]
    pub fn speaks(&self) -> bool {
        !self.is_there || self.rank.is_none_or(|rank| rank == 0)
    }

    /// Refuses what `library` would end, or leave alone, when it starts.
    ///
    /// # Errors
    /// If the processes are sure not to become a world.
    pub fn foresee(&self, library: Library<'_>) -> Result<(), LaunchError> {
        let is_open_mpi = library.name.starts_with("Open MPI");
        let how = match self.wire_up {
            // One process of another library is a good world of one.
            WireUp::Nothing if self.is_srun && (is_open_mpi || self.size > 1) => "without connecting them (--mpi=none)",
            WireUp::Pmi if self.is_srun && is_open_mpi && library.speaks_pmi == Some(false) => {
                "over PMI-2 (--mpi=pmi2), which it was built without"
            }
            _ => return Ok(()),
        };
        let (variable, launched) = (self.variable, self.size);
        Err(LaunchError::WrongPlugin { variable, launched, how, library: library.name.to_owned() })
    }

    /// Refuses a process that is alone in a world where others were launched with it.
    ///
    /// # Errors
    /// If it is.
    pub fn expect_one_world(&self, found: usize) -> Result<(), LaunchError> {
        if found == 1 && self.size > 1 {
            return Err(LaunchError::Singletons { variable: self.variable, launched: self.size, found });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN_MPI: Library<'static> = Library { name: "Open MPI v4.1.4", speaks_pmi: Some(false) };
    const MPICH: Library<'static> = Library { name: "MPICH Version: 4.0.2", speaks_pmi: None };
    const SRUN: [(&str, &str); 4] =
        [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_NTASKS", "4")];

    fn launched(pairs: &[&[(&'static str, &'static str)]]) -> Option<Launched> {
        let pairs: Vec<(&str, &str)> = pairs.concat();
        Launched::read(|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| *value))
    }

    #[test]
    fn launchers_are_taken_at_their_word() {
        let of = |pairs: &[(&'static str, &'static str)]| launched(&[pairs]).map(|found| (found.rank, found.size));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "2")]), Some((Some(2), 4)));
        assert_eq!(of(&[("SLURM_NTASKS", "4")]), None, "the shell of an allocation is no task");
        assert_eq!(of(&[("PMI_SIZE", "4"), ("PMI_RANK", "1")]), Some((Some(1), 4)));
        let inside = [
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_PROCID", "0"),
        ];
        assert_eq!(of(&inside), Some((Some(0), 2)), "mpirun inside a job");
    }

    #[test]
    fn every_variable_that_is_looked_at_is_listed() {
        for (count, rank) in COUNTS {
            assert!(VARIABLES.contains(&count) && VARIABLES.contains(&rank), "{count}, {rank}");
        }
    }

    #[test]
    fn g1_srun_without_a_plugin_is_foreseen() {
        let none = launched(&[&SRUN]).expect("launched");
        let error = none.foresee(OPEN_MPI).expect_err("no world").to_string();
        for needle in ["SLURM_STEP_NUM_TASKS=4", "--mpi=none", "srun --mpi=pmix", "mpirun -n 4", "Open MPI v4.1.4"] {
            assert!(error.contains(needle), "{needle}: {error}");
        }
        assert!(none.foresee(MPICH).is_err(), "four singletons");
        let one = launched(&[&SRUN[..2], &[("SLURM_STEP_NUM_TASKS", "1")]]).expect("launched");
        assert!(one.foresee(OPEN_MPI).is_err(), "Open MPI ends a single process as well");
        assert!(one.foresee(MPICH).is_ok());
    }

    #[test]
    fn g1_pmi_is_refused_where_open_mpi_lacks_it() {
        let pmi2 = launched(&[&SRUN, &[("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("PMI_FD", "11")]]).expect("launched");
        assert_eq!((pmi2.variable, pmi2.wire_up), ("PMI_SIZE", WireUp::Pmi));
        assert!(pmi2.foresee(OPEN_MPI).expect_err("no world").to_string().contains("--mpi=pmi2"));
        assert!(pmi2.foresee(Library { speaks_pmi: Some(true), ..OPEN_MPI }).is_ok());
        assert!(pmi2.foresee(Library { speaks_pmi: None, ..OPEN_MPI }).is_ok(), "what is unknown is not refused");
        assert!(pmi2.foresee(MPICH).is_ok());
    }

    #[test]
    fn what_connects_is_let_through() {
        let pmix = launched(&[&SRUN, &[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "slurm.pmix.1.0")]]).expect("launched");
        assert_eq!((pmix.wire_up, pmix.rank), (WireUp::Pmix, Some(1)));
        // Daemons of mpirun are started by srun without a plug-in, and their ranks have their variables.
        let inside = launched(&[&SRUN, &[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")]]);
        for launched in [pmix, inside.expect("launched")] {
            assert!(launched.foresee(OPEN_MPI).is_ok() && launched.foresee(MPICH).is_ok(), "{launched:?}");
            assert!(launched.expect_one_world(4).is_ok() && launched.expect_one_world(1).is_err());
        }
    }

    #[test]
    fn one_process_speaks_where_the_others_are_there() {
        let second = launched(&[&SRUN]).expect("launched");
        assert!(!second.speaks(), "rank 1 of a step leaves it to rank 0");
        let alone = launched(&[&SRUN[1..]]).expect("launched");
        assert!(alone.speaks(), "no step: nobody else would speak");
    }
}
