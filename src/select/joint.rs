//! The environments of all ranks as one: ranks with equal facts together, and what follows from all of them.

use std::collections::BTreeMap;

use super::environment::{Environment, Fact, InstructionSet};
use super::ranks::RankSet;
use crate::ids::Rank;

/// The environments of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Joint {
    /// Each distinct environment, as far as gates read it, with its ranks.
    pub classes: Vec<(Environment, RankSet)>,
    /// GPUs that several ranks would drive.
    pub shared_gpus: Vec<(String, RankSet)>,
    /// All ranks.
    pub ranks: RankSet,
}

impl Joint {
    /// Joins the environments of ranks 0, 1, ...
    pub fn new(environments: &[Environment]) -> Self {
        let mut classes: Vec<(Environment, Vec<Rank>)> = Vec::new();
        let mut gpus: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
        for (idx, environment) in environments.iter().enumerate() {
            let rank = Rank::from_index(idx);
            let gated = environment.gated();
            match classes.iter_mut().find(|(known, _)| *known == gated) {
                Some((_, ranks)) => ranks.push(rank),
                None => classes.push((gated, vec![rank])),
            }
            if let Some(uuid) = environment.gpu.present().and_then(|gpu| gpu.uuid.as_deref()) {
                gpus.entry(uuid).or_default().push(rank);
            }
        }
        Self {
            classes: classes
                .into_iter()
                .map(|(environment, ranks)| (environment, ranks.into_iter().collect()))
                .collect(),
            shared_gpus: gpus
                .into_iter()
                .filter(|(_, ranks)| ranks.len() > 1)
                .map(|(uuid, ranks)| (uuid.to_owned(), ranks.into_iter().collect()))
                .collect(),
            ranks: RankSet::all(environments.len()),
        }
    }

    /// The best instruction set that all ranks have; absent where it is not known of any rank.
    pub fn instruction_set(&self) -> Option<InstructionSet> {
        // A CPU without any of the sets is a scalar one.
        let of_class = |fact: Fact<InstructionSet>| match fact {
            Fact::Unknown => None,
            Fact::Absent => Some(InstructionSet::Scalar),
            Fact::Present(set) => Some(set),
        };
        self.classes.iter().filter_map(|(environment, _)| of_class(environment.instruction_set)).min()
    }

    /// The ranks that have a GPU (true), or none (false); those of which it is not known are in neither.
    pub fn ranks_by_gpu(&self, has_gpu: bool) -> RankSet {
        let of_kind = self.classes.iter().filter(|(environment, _)| environment.has_gpu() == Some(has_gpu));
        of_kind.flat_map(|(_, ranks)| ranks.iter()).collect()
    }
}
