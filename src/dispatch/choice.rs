//! Which transport a session uses, from what every rank says of its own attempt to build one. Pure: a rank that could not is
//! no reason for that rank alone.

use std::collections::BTreeMap;
use std::fmt;

use crate::config::{Choice as _, Transport};
use crate::exit::{Classify, Exit};
use crate::ids::Rank;
use crate::select::RankSet;

/// What stands in for a transport that all ranks have given up; nothing for hosts, which need none.
#[must_use]
pub const fn stand_in(given_up: Transport) -> Option<Transport> {
    match given_up {
        Transport::Nvlink => Some(Transport::Nccl),
        Transport::Nccl => Some(Transport::Host),
        Transport::Host | Transport::Auto => None,
    }
}

/// What a rank says of its attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It could, and has this to tell the others.
    Ready(Vec<u8>),
    /// It could not.
    Failed {
        /// What a process ends with for that.
        exit: Exit,
        /// Why.
        text: String,
    },
}

impl Report {
    /// Of an attempt that yields nothing to tell.
    pub fn of<T, E: Classify>(attempt: &Result<T, E>) -> Self {
        match attempt {
            Ok(_) => Self::Ready(Vec::new()),
            Err(error) => Self::Failed { exit: error.exit(), text: error.to_string() },
        }
    }

    /// As bytes for the other ranks.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (code, rest) = match self {
            Self::Ready(told) => (Exit::Fine.code(), told.as_slice()),
            Self::Failed { exit, text } => (exit.code(), text.as_bytes()),
        };
        [&[code], rest].concat()
    }

    /// What [`Report::encode`] wrote.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Self {
        match bytes.split_first() {
            Some((&code, told)) if code == Exit::Fine.code() => Self::Ready(told.to_vec()),
            Some((&code, text)) => {
                Self::Failed { exit: Exit::from_code(code), text: String::from_utf8_lossy(text).into_owned() }
            }
            None => Self::Failed { exit: Exit::Bug, text: "it said nothing".to_owned() },
        }
    }
}

/// What all ranks do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Every rank could: go on with it.
    Use,
    /// Some could not, and nobody insisted: all ranks give it up, for these reasons.
    GiveUp(Trail),
}

/// Why a transport can't be had: every reason with the ranks that have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trail(Vec<(RankSet, String)>);

impl Trail {
    /// For a log, where a line is an event.
    #[must_use]
    pub fn on_one_line(&self) -> String {
        self.0.iter().map(|(ranks, text)| format!("{ranks}: {text}")).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for Trail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(ranks, text)| write!(f, "\n    {ranks}: {text}"))
    }
}

/// A transport that was asked for by name and that some rank could not build.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "dispatch.transport is {transport}, which can't be built on every rank:{trail}\n  \
     Cure the cause, or set dispatch.transport to auto or host"
)]
pub struct TransportRefused {
    /// Its name.
    pub transport: &'static str,
    /// Why.
    pub trail: Trail,
    /// What the lowest rank that could not ends with.
    pub exit: Exit,
}

impl Classify for TransportRefused {
    fn exit(&self) -> Exit {
        self.exit
    }
}

/// Whether all ranks use `built`, given what ranks 0, 1, ... report and what was `asked` for. The same list gives the same
/// verdict wherever it is read.
///
/// # Errors
/// If some rank could not build what was asked for by name.
pub fn judge(asked: Transport, built: Transport, reports: &[Report]) -> Result<Verdict, TransportRefused> {
    let mut ranks_of: BTreeMap<(Rank, &str), Vec<Rank>> = BTreeMap::new();
    let mut first_exit = None;
    for (idx, report) in reports.iter().enumerate() {
        let Report::Failed { exit, text } = report else { continue };
        first_exit.get_or_insert(*exit);
        let rank = Rank::from_index(idx);
        match ranks_of.iter_mut().find(|((_, known), _)| known == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => drop(ranks_of.insert((rank, text), vec![rank])),
        }
    }
    let Some(exit) = first_exit else { return Ok(Verdict::Use) };
    let trail =
        Trail(ranks_of.into_iter().map(|((_, text), ranks)| (ranks.into_iter().collect(), text.to_owned())).collect());
    if asked == Transport::Auto {
        return Ok(Verdict::GiveUp(trail));
    }
    Err(TransportRefused { transport: built.name(), trail, exit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(text: &str) -> Report {
        Report::Failed { exit: Exit::Environment, text: text.to_owned() }
    }

    #[test]
    fn all_ready_is_used_whoever_asked() {
        let ready = vec![Report::Ready(vec![7]); 3];
        for asked in [Transport::Auto, Transport::Nccl] {
            assert_eq!(judge(asked, Transport::Nccl, &ready), Ok(Verdict::Use));
        }
    }

    #[test]
    fn hazard_03_one_rank_that_could_not_decides_for_all() {
        let reports =
            [Report::Ready(vec![]), failed("no NCCL"), Report::Ready(vec![]), failed("no NCCL"), failed("late")];
        let Ok(Verdict::GiveUp(trail)) = judge(Transport::Auto, Transport::Nccl, &reports) else {
            panic!("auto gives it up")
        };
        assert_eq!(trail.to_string(), "\n    ranks 1, 3: no NCCL\n    rank 4: late");
        assert_eq!(trail.on_one_line(), "ranks 1, 3: no NCCL; rank 4: late");
        let refused = judge(Transport::Nccl, Transport::Nccl, &reports).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "dispatch.transport is nccl, which can't be built on every rank:\n    ranks 1, 3: no NCCL\n    rank 4: late\n  \
             Cure the cause, or set dispatch.transport to auto or host"
        );
        assert_eq!(refused.exit(), Exit::Environment);
    }

    #[test]
    fn the_exit_code_is_the_lowest_failing_ranks() {
        let peer = Report::Failed { exit: Exit::PeerFailed, text: "gone".to_owned() };
        let refused = judge(Transport::Nccl, Transport::Nccl, &[Report::Ready(vec![]), peer, failed("x")]).unwrap_err();
        assert_eq!(refused.exit(), Exit::PeerFailed);
    }

    #[test]
    fn reports_travel_as_bytes() {
        for report in [Report::Ready(vec![]), Report::Ready((0..128).collect()), failed("no room"), failed("")] {
            assert_eq!(Report::decode(&report.encode()), report);
        }
        assert!(matches!(Report::decode(&[]), Report::Failed { exit: Exit::Bug, .. }));
    }
}
