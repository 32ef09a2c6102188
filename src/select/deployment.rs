//! What a deployment and the shape of the world say that selection depends on. Nothing rank-local: no path, host or level.

use std::collections::BTreeMap;

use serde::Serialize;

use super::environment::Environment;
use crate::config::{self, Activations, Choice, Combine, CombineDtype, Device, Levels, Payload, Transport};
use crate::dispatch::placement::Placement;
use crate::exit::{Classify, Exit};
use crate::ids::Rank;
use crate::numerics::activation::Activation;

/// Why a deployment does not fit its world.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeploymentError {
    /// Another number of ranks than declared.
    #[error(
        "the deployment `{name}` declares {nodes} x {ranks_per_node} ranks, the world has {found}; start {} ranks, or leave \
         cluster.ranks_per_node out",
        u64::from(*nodes) * u64::from(*ranks_per_node)
    )]
    Ranks {
        /// The deployment's name.
        name: String,
        /// Hosts declared.
        nodes: u32,
        /// Ranks a host declared.
        ranks_per_node: u32,
        /// Ranks there are.
        found: usize,
    },
    /// More ranks than are planned for.
    #[error("the deployment `{name}` declares {num_ranks} ranks; at most {limit} are supported")]
    TooManyRanks {
        /// The deployment's name.
        name: String,
        /// Ranks declared.
        num_ranks: u64,
        /// The most.
        limit: usize,
    },
}

impl Classify for DeploymentError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// The most ranks of a world: a bound on what a file can make this process allocate.
pub const MAX_NUM_RANKS: usize = 65_536;

/// How experts are dealt to ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertSplit {
    /// Contiguous blocks as even as can be; the first ranks hold one more where they don't divide.
    Even,
    /// Contiguous blocks of these sizes, by rank.
    Blocks(Vec<usize>),
}

impl ExpertSplit {
    /// Experts of each rank.
    #[must_use]
    pub fn counts(&self, num_experts: usize, num_ranks: usize) -> Vec<usize> {
        match self {
            Self::Even => {
                let of_rank = |rank| Placement::new(num_experts, num_ranks).local_experts(rank).len();
                (0..num_ranks).map(Rank::from_index).map(of_rank).collect()
            }
            Self::Blocks(counts) => counts.clone(),
        }
    }
}

/// A deployment as selection sees it: equal on all ranks, or they disagree.
#[derive(Debug, Clone, PartialEq)]
pub struct DeploymentFacts {
    /// The node of every rank, as the world found it or as `cluster.scale_up_ranks` has it: numbered in the order in which
    /// ranks meet them.
    pub node_of_rank: Vec<u32>,
    /// How experts are dealt to ranks.
    pub experts: ExpertSplit,
    /// Ranks that share one expert.
    pub tensor_parallel: u32,
    /// What a rank drives.
    pub device: Device,
    /// Several ranks may drive one GPU.
    pub share_gpus: bool,
    /// The family that may run: `auto`, `cpu` or a technique.
    pub backend: String,
    /// A pinned identity, as a query.
    pub implementation: Option<String>,
    /// Whether a named family may be replaced.
    pub allow_fallback: bool,
    /// Whether activations are asked to be quantised; what each layer does is in its problem.
    pub activations: Activations,
    /// The gated activation that stands for the checkpoint's; what each layer has is in its problem.
    pub activation: Option<Activation>,
    /// Where routing weights are applied.
    pub combine: Combine,
    /// One order over K for every row count and chunking.
    pub batch_invariant: bool,
    /// What carries tokens.
    pub transport: Transport,
    /// Where a token goes once.
    pub levels: Levels,
    /// The form of a travelling token.
    pub payload: Payload,
    /// The form of a row that comes back.
    pub combine_dtype: CombineDtype,
    /// Tokens of a rank that buffers are planned for.
    pub num_max_tokens_per_rank: usize,
    /// Tokens of a rank that are dispatched at once.
    pub chunk_tokens: Option<usize>,
}

impl DeploymentFacts {
    /// The facts of `deployment` in a world of one rank for each entry of `node_of_rank`.
    ///
    /// # Errors
    /// If the deployment declares another number of ranks.
    pub fn new(deployment: &config::Deployment, node_of_rank: Vec<u32>) -> Result<Self, DeploymentError> {
        let config::Cluster { nodes, ranks_per_node, device, share_gpus, scale_up_ranks } = deployment.cluster;
        let found = node_of_rank.len();
        if let Some(ranks_per_node) = ranks_per_node
            && u64::from(nodes) * u64::from(ranks_per_node) != found as u64
        {
            return Err(DeploymentError::Ranks { name: deployment.name.clone(), nodes, ranks_per_node, found });
        }
        let (moe, dispatch) = (&deployment.moe, &deployment.dispatch);
        Ok(Self {
            node_of_rank: match scale_up_ranks {
                Some(num_ranks) => (0..found).map(|rank| Rank::from_index(rank).0 / num_ranks.max(1)).collect(),
                None => in_order_of_meeting(&node_of_rank),
            },
            experts: ExpertSplit::Even,
            tensor_parallel: 1,
            device,
            share_gpus,
            backend: moe.backend.name().to_owned(),
            implementation: moe.implementation.clone(),
            allow_fallback: moe.allow_fallback,
            activations: moe.activations,
            activation: moe.activation,
            combine: moe.combine,
            batch_invariant: moe.batch_invariant,
            transport: dispatch.transport,
            levels: dispatch.levels,
            payload: dispatch.payload,
            combine_dtype: dispatch.combine_dtype,
            num_max_tokens_per_rank: dispatch.num_max_tokens_per_rank,
            chunk_tokens: dispatch.chunk_tokens,
        })
    }

    /// The facts of the world that `deployment` declares, with no world at hand: a rank a node where it does not say.
    ///
    /// # Errors
    /// If it declares more than [`MAX_NUM_RANKS`].
    pub fn declared(deployment: &config::Deployment) -> Result<Self, DeploymentError> {
        let config::Cluster { nodes, ranks_per_node, .. } = deployment.cluster;
        let per_node = ranks_per_node.unwrap_or(1);
        let num_ranks = u64::from(nodes) * u64::from(per_node);
        if num_ranks > MAX_NUM_RANKS as u64 {
            let name = deployment.name.clone();
            return Err(DeploymentError::TooManyRanks { name, num_ranks, limit: MAX_NUM_RANKS });
        }
        let node_of_rank = (0..nodes).flat_map(|node| (0..per_node).map(move |_| node)).collect();
        Self::new(deployment, node_of_rank)
    }

    /// The facts of a world that is described rank by rank: by the hosts' names where all are known, else in as many
    /// blocks of ranks as the deployment has nodes.
    ///
    /// # Errors
    /// If the deployment declares another number of ranks.
    pub fn described(deployment: &config::Deployment, environments: &[Environment]) -> Result<Self, DeploymentError> {
        let hosts: Option<Vec<&str>> = environments.iter().map(|environment| environment.host.as_deref()).collect();
        let node_of_rank = match hosts {
            Some(hosts) => in_order_of_meeting(&hosts),
            None => {
                let nodes = ExpertSplit::Even.counts(environments.len(), deployment.cluster.nodes as usize);
                let blocks = nodes.iter().zip(0..).map(|(num_ranks, node)| std::iter::repeat_n(node, *num_ranks));
                blocks.flatten().collect()
            }
        };
        Self::new(deployment, node_of_rank)
    }

    /// Ranks of the world.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.node_of_rank.len()
    }

    /// Hosts of the world.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.node_of_rank.iter().max().map_or(0, |node| *node as usize + 1)
    }

    /// Whether the tokens of a layer cross to a node once and are passed on in it, where what runs it can do so. `auto` does
    /// if that does so `unasked` and where it crosses less: there are other nodes, and one of them holds several ranks.
    #[must_use]
    pub fn levels(&self, unasked: bool) -> Levels {
        let num_nodes = self.num_nodes();
        let crosses_less = num_nodes > 1 && num_nodes < self.num_ranks();
        match self.levels {
            Levels::Auto if unasked && crosses_less => Levels::Two,
            Levels::Auto => Levels::One,
            named => named,
        }
    }

    /// All ranks.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.num_ranks()).map(Rank::from_index)
    }
}

/// The same partition with nodes numbered by their lowest rank: what hosts are called must not matter.
fn in_order_of_meeting<T: Ord>(node_of_rank: &[T]) -> Vec<u32> {
    let mut met: BTreeMap<&T, u32> = BTreeMap::new();
    let number = |node| {
        // As many nodes as ranks at most, and ranks count in 32 bits.
        let next = Rank::from_index(met.len()).0;
        *met.entry(node).or_insert(next)
    };
    node_of_rank.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_ranks_must_be_those_of_the_world() {
        let mut deployment = config::Deployment::default();
        assert_eq!(DeploymentFacts::declared(&deployment).unwrap().num_ranks(), 1);
        assert_eq!(DeploymentFacts::new(&deployment, vec![0; 3]).unwrap().num_ranks(), 3);
        deployment.cluster = config::Cluster {
            nodes: 2,
            ranks_per_node: Some(8),
            device: Device::Gpu,
            share_gpus: false,
            scale_up_ranks: None,
        };
        let declared = DeploymentFacts::declared(&deployment).unwrap();
        assert_eq!((declared.num_ranks(), declared.num_nodes()), (16, 2));
        let error = DeploymentFacts::new(&deployment, vec![0; 3]).unwrap_err();
        assert!(error.to_string().contains("2 x 8 ranks, the world has 3; start 16"), "{error}");
        deployment.cluster.ranks_per_node = Some(u32::MAX);
        assert!(DeploymentFacts::declared(&deployment).unwrap_err().to_string().contains("at most 65536"));
    }

    #[test]
    fn tokens_cross_once_a_node_where_that_is_less() {
        let facts = |nodes: &[u32], levels, scale_up_ranks| {
            let mut deployment = config::Deployment::default();
            (deployment.dispatch.levels, deployment.cluster.scale_up_ranks) = (levels, scale_up_ranks);
            DeploymentFacts::new(&deployment, nodes.to_vec()).unwrap()
        };
        for (nodes, levels) in [
            (&[0, 0, 1, 1][..], Levels::Two),
            (&[0, 1, 0], Levels::Two),
            (&[0, 1, 2], Levels::One),
            (&[0, 0, 0], Levels::One),
            (&[0], Levels::One),
        ] {
            let auto = facts(nodes, Levels::Auto, None);
            assert_eq!((auto.levels(true), auto.levels(false)), (levels, Levels::One), "{nodes:?}");
            for named in [Levels::One, Levels::Two] {
                assert_eq!(facts(nodes, named, None).levels(true), named, "{nodes:?}");
            }
        }
        let pretended = facts(&[0; 5], Levels::Auto, Some(2));
        assert_eq!((pretended.node_of_rank.as_slice(), pretended.levels(true)), (&[0, 0, 1, 1, 2][..], Levels::Two));
        assert_eq!(facts(&[0, 1], Levels::Auto, Some(8)).node_of_rank, [0, 0]);
    }

    #[test]
    fn nodes_are_numbered_as_ranks_meet_them() {
        let facts = |nodes: &[u32]| DeploymentFacts::new(&config::Deployment::default(), nodes.to_vec()).unwrap();
        assert_eq!(facts(&[7, 7, 2, 2]), facts(&[0, 0, 1, 1]));
        assert_ne!(facts(&[7, 2, 7, 2]), facts(&[0, 0, 1, 1]));
        assert_eq!(facts(&[3, 1, 9]).num_nodes(), 3);
    }

    #[test]
    fn described_ranks_lie_on_their_hosts() {
        let mut deployment = config::Deployment::default();
        let on = |hosts: &[Option<&str>]| -> Vec<Environment> {
            let environment =
                |host: &Option<&str>| Environment { host: host.map(str::to_owned), ..Environment::default() };
            hosts.iter().map(environment).collect()
        };
        let nodes = |deployment: &config::Deployment, hosts: &[Option<&str>]| {
            DeploymentFacts::described(deployment, &on(hosts)).unwrap().node_of_rank
        };
        assert_eq!(nodes(&deployment, &[Some("b"), Some("a"), Some("b")]), [0, 1, 0]);
        deployment.cluster.nodes = 2;
        assert_eq!(nodes(&deployment, &[None; 5]), [0, 0, 0, 1, 1]);
        deployment.cluster.ranks_per_node = Some(2);
        assert!(DeploymentFacts::described(&deployment, &on(&[None; 5])).is_err());
    }

    #[test]
    fn experts_are_dealt_evenly() {
        assert_eq!(ExpertSplit::Even.counts(7, 3), [3, 2, 2]);
        assert_eq!(ExpertSplit::Even.counts(2, 4), [1, 1, 0, 0]);
        assert_eq!(ExpertSplit::Blocks(vec![5, 2]).counts(7, 2), [5, 2]);
    }
}
