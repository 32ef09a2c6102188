//! Faults provoked on purpose, for tests of what happens then.
//!
//! Compiled in, reachable only through `LOCKSTEP_FAULT`, which is said loudly at start. A fault is
//! `RANK:STAGE:ACTION`, several are separated by `;`. RANK is a number or `*`. Pure but for [`Faults::strike`], which does
//! what the fault says.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::exit::{Classify, Exit};
use crate::ids::Rank;
use crate::select::environment::{ComputeCapability, Library};
use crate::select::tactics::{MAX_TACTICS, Tactic};

/// Where a fault may strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Before MPI is initialised.
    Init,
    /// Between MPI's initialisation and loading.
    Start,
    /// While a rank's experts are read.
    Load,
    /// While kernels are compiled.
    Compile,
    /// While tactics are timed.
    Tune,
    /// Before a rank opens what its transport needs.
    Transport,
    /// Before a rank joins the others over its transport, which then wait for it.
    Join,
    /// Before a chunk is dispatched.
    Dispatch,
    /// In two levels, before tokens that came to a node are passed on in it.
    Forward,
    /// Before a chunk's rows are computed.
    Experts,
    /// Before a chunk's rows go home.
    Combine,
    /// Before the output is written.
    Write,
    /// Once the output is written beside its place, before it is moved there.
    Publish,
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A panic on the main thread.
    Panic,
    /// A panic on another thread.
    PanicThread,
    /// An error is returned.
    Error,
    /// SIGKILL to this process.
    Kill,
    /// SIGSEGV to this process.
    Segv,
    /// This rank stops for ever.
    Hang,
    /// This rank is late.
    Delay(Duration),
    /// Pieces of exchanges are so small: several rounds.
    RoundBytes(usize),
    /// The host has this name.
    Host(String),
    /// This rank announces a later step than it is in.
    Drift,
    /// Buffers start filled with 0xFF bytes.
    Poison,
    /// The rank finds this version of a library.
    Library(Library, String),
    /// The rank finds a GPU of this compute capability and name.
    Gpu(ComputeCapability, String),
    /// A tactic seems to take so many percent of its time.
    TacticTime(Tactic, u64),
    /// A tactic, or every one, can't run.
    TacticFails(Option<Tactic>),
    /// The rank takes this tactic, whatever all have chosen.
    TakesTactic(Tactic),
    /// This rank's kernels are made of other sources.
    Stale,
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    rank: Option<Rank>,
    stage: Stage,
    action: Action,
}

/// The faults of a run; usually none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Faults(Vec<Fault>);

/// The error of [`Action::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{rank} was told to fail at {stage} by LOCKSTEP_FAULT; unset it")]
pub struct Injected {
    rank: Rank,
    stage: Stage,
}

impl Classify for Injected {
    fn exit(&self) -> Exit {
        Exit::Environment
    }
}

/// `LOCKSTEP_FAULT` can't be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "LOCKSTEP_FAULT={text:?} is not RANK:STAGE:ACTION with a stage of init, start, load, compile, tune, transport, join, \
     dispatch, forward, experts, combine, write, publish and an action of panic, panic_thread, error, kill, segv, hang, \
     delay=SECONDS, round_bytes=N, host=NAME, library=NAME,VERSION, gpu=CAPABILITY,NAME, tactic_time=N,PERCENT, \
     tactic_fails=N|all, tactic=N, drift, poison, stale; correct or unset it"
)]
pub struct FaultError {
    text: String,
}

impl Classify for FaultError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

const STAGES: [(&str, Stage); 13] = [
    ("init", Stage::Init),
    ("start", Stage::Start),
    ("load", Stage::Load),
    ("compile", Stage::Compile),
    ("tune", Stage::Tune),
    ("transport", Stage::Transport),
    ("join", Stage::Join),
    ("dispatch", Stage::Dispatch),
    ("forward", Stage::Forward),
    ("experts", Stage::Experts),
    ("combine", Stage::Combine),
    ("write", Stage::Write),
    ("publish", Stage::Publish),
];

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = STAGES.iter().find(|(_, stage)| stage == self).map_or("?", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for Faults {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let refused = || FaultError { text: text.to_owned() };
        text.split(';').map(|fault| parse(fault.trim()).ok_or_else(refused)).collect::<Result<_, _>>().map(Self)
    }
}

fn parse(text: &str) -> Option<Fault> {
    let mut parts = text.splitn(3, ':');
    let rank = match parts.next()? {
        "*" => None,
        number => Some(Rank(number.parse().ok()?)),
    };
    let stage = parts.next()?;
    let (_, stage) = STAGES.iter().find(|(name, _)| *name == stage)?;
    Some(Fault { rank, stage: *stage, action: action(parts.next()?)? })
}

fn action(text: &str) -> Option<Action> {
    Some(match text.split_once('=') {
        Some(("delay", seconds)) => Action::Delay(Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?),
        Some(("round_bytes", bytes)) => Action::RoundBytes(bytes.parse().ok()?),
        Some(("host", name)) => Action::Host(name.to_owned()),
        Some(("library", library)) => {
            let (name, version) = library.split_once(',')?;
            Action::Library(Library::ALL.into_iter().find(|library| library.name() == name)?, version.to_owned())
        }
        Some(("gpu", gpu)) => {
            let (capability, name) = gpu.split_once(',')?;
            Action::Gpu(capability.parse().ok()?, name.to_owned())
        }
        Some(("tactic_time", changed)) => {
            let (number, percent) = changed.split_once(',')?;
            Action::TacticTime(tactic(number)?, percent.parse().ok()?)
        }
        Some(("tactic_fails", "all")) => Action::TacticFails(None),
        Some(("tactic_fails", number)) => Action::TacticFails(Some(tactic(number)?)),
        Some(("tactic", number)) => Action::TakesTactic(tactic(number)?),
        Some(_) => return None,
        None => match text {
            "panic" => Action::Panic,
            "panic_thread" => Action::PanicThread,
            "error" => Action::Error,
            "kill" => Action::Kill,
            "segv" => Action::Segv,
            "hang" => Action::Hang,
            "drift" => Action::Drift,
            "poison" => Action::Poison,
            "stale" => Action::Stale,
            _ => return None,
        },
    })
}

fn tactic(number: &str) -> Option<Tactic> {
    number.parse().ok().filter(|idx| *idx < MAX_TACTICS).map(Tactic::new)
}

impl Action {
    /// Read by whoever it concerns, rather than something that happens.
    fn is_setting(&self) -> bool {
        matches!(
            self,
            Self::RoundBytes(_)
                | Self::Host(_)
                | Self::Drift
                | Self::Poison
                | Self::Stale
                | Self::Library(..)
                | Self::Gpu(..)
                | Self::TacticTime(..)
                | Self::TacticFails(_)
                | Self::TakesTactic(_)
        )
    }
}

impl Faults {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The actions for `rank` at `stage`.
    pub fn at(&self, rank: Rank, stage: Stage) -> impl Iterator<Item = &Action> {
        self.0
            .iter()
            .filter(move |fault| fault.stage == stage && fault.rank.is_none_or(|r| r == rank))
            .map(|f| &f.action)
    }

    /// Does what the faults say for `rank` at `stage`. Settings such as `round_bytes` are read by whoever they concern.
    ///
    /// # Errors
    /// If a fault says so.
    ///
    /// # Panics
    /// If a fault says so.
    pub fn strike(&self, rank: Rank, stage: Stage) -> Result<(), Injected> {
        for action in self.at(rank, stage) {
            if !action.is_setting() {
                tracing::warn!("LOCKSTEP_FAULT strikes {rank} at {stage}: {action:?}");
            }
            match action {
                Action::Panic => panic!("LOCKSTEP_FAULT at {stage}"),
                Action::PanicThread => {
                    let thread = std::thread::spawn(move || panic!("LOCKSTEP_FAULT at {stage}, in a worker thread"));
                    // The panic hook ends the process before the join returns.
                    let _ = thread.join();
                }
                Action::Error => return Err(Injected { rank, stage }),
                Action::Kill => raise(9),
                Action::Segv => {
                    // Rust's own handler, there until MPI sets one, takes the first for a stack that has overflowed and
                    // restores the default: an instruction at fault would be met again, a signal sent is spent.
                    raise(11);
                    raise(11);
                }
                Action::Hang => std::thread::sleep(Duration::from_secs(86_400)),
                Action::Delay(time) => std::thread::sleep(*time),
                Action::RoundBytes(_)
                | Action::Host(_)
                | Action::Drift
                | Action::Poison
                | Action::Stale
                | Action::Library(..)
                | Action::Gpu(..)
                | Action::TacticTime(..)
                | Action::TacticFails(_)
                | Action::TakesTactic(_) => {}
            }
        }
        Ok(())
    }
}

fn raise(signal: i32) {
    // Fails for an unknown signal only.
    let _ = signal_hook::low_level::raise(signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_faults_and_refuses_others() {
        let faults: Faults =
            "2:dispatch:kill; *:load:delay=3;0:start:host=node=b;0:publish:delay=0.25".parse().unwrap();
        assert_eq!(faults.at(Rank(2), Stage::Dispatch).collect::<Vec<_>>(), [&Action::Kill]);
        assert_eq!(faults.at(Rank(1), Stage::Dispatch).count(), 0);
        assert_eq!(faults.at(Rank(1), Stage::Load).collect::<Vec<_>>(), [&Action::Delay(Duration::from_secs(3))]);
        assert_eq!(faults.at(Rank(0), Stage::Start).collect::<Vec<_>>(), [&Action::Host("node=b".to_owned())]);
        let settings: Faults = "0:start:library=nvrtc,13.0.88;0:start:gpu=9.0,NVIDIA H200;0:tune:tactic_time=1,95;\
            0:tune:tactic_fails=2;0:tune:tactic_fails=all;0:tune:tactic=1"
            .parse()
            .unwrap();
        let of = |stage| settings.at(Rank(0), stage).cloned().collect::<Vec<_>>();
        let library = Action::Library(Library::Nvrtc, "13.0.88".to_owned());
        let gpu = Action::Gpu(ComputeCapability::new(9, 0), "NVIDIA H200".to_owned());
        assert_eq!(of(Stage::Start), [library, gpu]);
        let [one, two] = [1, 2].map(Tactic::new);
        let fails = [Action::TacticFails(Some(two)), Action::TacticFails(None)].to_vec();
        assert_eq!(
            of(Stage::Tune),
            [vec![Action::TacticTime(one, 95)], fails, vec![Action::TakesTactic(one)]].concat()
        );
        for text in ["0:start:library=cudnn,1", "0:start:gpu=H200", "0:tune:tactic=8", "0:tune:tactic_time=1"] {
            assert!(text.parse::<Faults>().is_err(), "{text:?}");
        }
        let quarter = Action::Delay(Duration::from_millis(250));
        assert_eq!(faults.at(Rank(0), Stage::Publish).collect::<Vec<_>>(), [&quarter]);
        for text in [
            "",
            "2",
            "2:load:delay=-1",
            "2:load:delay=inf",
            "2:dispatch",
            "x:dispatch:kill",
            "2:lunch:kill",
            "2:dispatch:dance",
            "2:load:delay=x",
        ] {
            assert!(text.parse::<Faults>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_error_names_rank_stage_and_cure() {
        let faults: Faults = "1:write:error".parse().unwrap();
        assert!(faults.strike(Rank(0), Stage::Write).is_ok());
        let message = faults.strike(Rank(1), Stage::Write).unwrap_err().to_string();
        assert_eq!(message, "rank 1 was told to fail at write by LOCKSTEP_FAULT; unset it");
    }
}
