//! What a step moves: tokens and slots over each kind of link, from every rank's point of view.
//!
//! Every rank brings as many tokens and its experts are as popular as any (see [`super::reach`]). Ranks of one node reach
//! each other over scale-up links, all others over scale-out ones. In two levels tokens go over the one to each node and over
//! the other to its ranks; rows come back as in one.

use serde::Serialize;

use crate::config::Levels;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::placement::Placement;
use crate::ids::Rank;

use super::reach::Reach;

/// Counts, or bytes, by the way that they take; expectations, so not whole numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ByLink {
    /// Stays on the rank.
    pub local: f64,
    /// To other ranks of the node.
    pub scale_up: f64,
    /// To ranks of other nodes.
    pub scale_out: f64,
}

impl ByLink {
    /// What leaves the rank.
    #[must_use]
    pub fn remote(&self) -> f64 {
        self.scale_up + self.scale_out
    }

    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.local + self.remote()
    }

    /// Each times `factor`.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        Self { local: self.local * factor, scale_up: self.scale_up * factor, scale_out: self.scale_out * factor }
    }
}

/// Where a rank's traffic goes and comes from, for one token of every rank in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flow {
    /// Tokens of this rank at their destinations: once for each rank that hosts one of their experts.
    pub tokens_sent: ByLink,
    /// Tokens that arrive here.
    pub tokens_received: ByLink,
    /// Tokens that this rank puts on each kind of link: in two levels its own to other nodes, and in its node its own and those
    /// that it passes on.
    pub dispatch_sent: ByLink,
    /// Tokens that it takes from each.
    pub dispatch_received: ByLink,
    /// Slots of this rank's tokens, by where they are computed.
    pub slots_sent: ByLink,
    /// Slots that are computed here, by where their tokens live.
    pub slots_received: ByLink,
}

/// Every rank's flow. The ranks of a node lie in a row, as those of a declared deployment do.
#[must_use]
pub fn flows(placement: Placement, reach: &Reach, (nodes, levels): (&Nodes, Levels)) -> Vec<Flow> {
    let ranks = || (0..nodes.num_ranks()).map(Rank::from_index);
    let chance: Vec<f64> = ranks().map(|rank| reach.chance(placement.local_experts(rank))).collect();
    let slots: Vec<f64> = ranks().map(|rank| reach.slots(placement.local_experts(rank).len())).collect();
    let (tokens, slots) = (By::new(chance, nodes), By::new(slots, nodes));
    let crossing = (levels == Levels::Two).then(|| Crossing::new(placement, reach, nodes));
    let flow = |rank: Rank| {
        let (tokens_sent, tokens_received) = (tokens.sent(rank), tokens.received(rank));
        let dispatched = crossing.as_ref().map(|crossing| crossing.dispatched(rank, &tokens));
        let (dispatch_sent, dispatch_received) = dispatched.unwrap_or((tokens_sent, tokens_received));
        let (slots_sent, slots_received) = (slots.sent(rank), slots.received(rank));
        Flow { tokens_sent, tokens_received, dispatch_sent, dispatch_received, slots_sent, slots_received }
    };
    ranks().map(flow).collect()
}

/// What one token brings to each node.
struct Crossing {
    of_node: Vec<f64>,
    total: f64,
}

impl Crossing {
    fn new(placement: Placement, reach: &Reach, nodes: &Nodes) -> Self {
        let of_node = |node: usize| {
            let first = nodes.ranks(node).iter().map(|rank| placement.local_experts(*rank).start).min();
            let last = nodes.ranks(node).iter().map(|rank| placement.local_experts(*rank).end).max();
            reach.chance(first.unwrap_or_default()..last.unwrap_or_default())
        };
        let of_node: Vec<f64> = (0..nodes.num_nodes()).map(of_node).collect();
        Self { total: of_node.iter().sum(), of_node }
    }

    /// What `rank` sends and receives in both hops, given what a token brings to each rank.
    fn dispatched(&self, rank: Rank, tokens: &By<'_>) -> (ByLink, ByLink) {
        let nodes = tokens.nodes;
        let (num_sources, node) = (nodes.num_sources(rank) as f64, nodes.of(rank));
        let here = tokens.of_rank[rank.index()];
        let peers = if nodes.ranks(node).len() == 1 { 0.0 } else { (tokens.of_node[node] - here).max(0.0) };
        let sent = ByLink {
            local: here,
            scale_up: num_sources * peers,
            scale_out: (self.total - self.of_node[node]).max(0.0),
        };
        let num_elsewhere = (nodes.num_ranks() - nodes.num_sources(rank)) as f64;
        let received =
            ByLink { local: here, scale_up: num_elsewhere * here, scale_out: (num_sources - 1.0) * self.of_node[node] };
        (sent, received)
    }
}

/// What one token brings to each rank, with its sums.
struct By<'a> {
    of_rank: Vec<f64>,
    nodes: &'a Nodes,
    of_node: Vec<f64>,
    total: f64,
}

impl<'a> By<'a> {
    fn new(of_rank: Vec<f64>, nodes: &'a Nodes) -> Self {
        let mut of_node = vec![0.0; nodes.num_nodes()];
        for (rank, here) in of_rank.iter().enumerate() {
            of_node[nodes.of(Rank::from_index(rank))] += here;
        }
        // From the nodes' sums, so that a lone node's rest is exactly zero.
        let total = of_node.iter().sum();
        Self { of_rank, nodes, of_node, total }
    }

    fn sent(&self, rank: Rank) -> ByLink {
        let (node, here) = (self.nodes.of(rank), self.of_rank[rank.index()]);
        let peers = if self.nodes.ranks(node).len() == 1 { 0.0 } else { self.of_node[node] - here };
        ByLink { local: here, scale_up: peers.max(0.0), scale_out: (self.total - self.of_node[node]).max(0.0) }
    }

    fn received(&self, rank: Rank) -> ByLink {
        let num_here = self.nodes.peers(rank).len();
        let here = self.of_rank[rank.index()];
        let from = |num_ranks: usize| here * num_ranks as f64;
        ByLink { local: here, scale_up: from(num_here - 1), scale_out: from(self.nodes.num_ranks() - num_here) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reach::tests::Random;
    use super::*;
    use crate::dispatch::plan::{DispatchPlan, Slots};
    use crate::dispatch::two_level::TwoLevelPlan;

    fn sum(flows: &[Flow], of: impl Fn(&Flow) -> f64) -> f64 {
        flows.iter().map(of).sum()
    }

    const WORLDS: [(usize, &[u32]); 4] = [
        (896, &[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
        (10, &[0, 0, 0, 1, 1, 2, 2]),
        (3, &[0, 0, 1, 1]),
        (8, &[0, 1, 2]),
    ];

    #[test]
    fn what_is_sent_is_received() {
        for (num_experts, node_of_rank) in WORLDS {
            for levels in [Levels::One, Levels::Two] {
                let reach = Reach { num_experts, num_topk: 3, num_groups: 1, topk_group: 1 };
                let nodes = Nodes::new(node_of_rank);
                let flows = flows(Placement::new(num_experts, node_of_rank.len()), &reach, (&nodes, levels));
                for link in [(|by| by.scale_up) as fn(&ByLink) -> f64, |by| by.scale_out] {
                    for (what, sent, received) in [
                        ("tokens", sum(&flows, |f| link(&f.tokens_sent)), sum(&flows, |f| link(&f.tokens_received))),
                        ("slots", sum(&flows, |f| link(&f.slots_sent)), sum(&flows, |f| link(&f.slots_received))),
                        (
                            "dispatch",
                            sum(&flows, |f| link(&f.dispatch_sent)),
                            sum(&flows, |f| link(&f.dispatch_received)),
                        ),
                    ] {
                        let said = format!("{what} in {levels} on {node_of_rank:?}: {sent} sent, {received} received");
                        assert!((sent - received).abs() < 1e-9, "{said}");
                    }
                }
                for flow in &flows {
                    assert!((flow.slots_sent.total() - 3.0).abs() < 1e-12, "every slot is computed once");
                    assert!(flow.tokens_sent.total() <= 3.0 + 1e-12, "a token goes to no more ranks than it has slots");
                }
            }
        }
    }

    /// The hops of the plans that the transport follows, drawn at random: every rank's tokens over each kind of link.
    #[test]
    fn two_levels_send_what_their_plans_send() {
        for (num_experts, node_of_rank) in WORLDS {
            let reach = Reach { num_experts, num_topk: 3, num_groups: 1, topk_group: 1 };
            let nodes = Nodes::new(node_of_rank);
            let placement = Placement::new(num_experts, node_of_rank.len());
            let (num_tokens, mut random) = (6000, Random(11));
            let mut found = vec![ByLink::default(); node_of_rank.len()];
            for rank in (0..node_of_rank.len()).map(Rank::from_index) {
                let idx: Vec<i32> = (0..num_tokens)
                    .flat_map(|_| random.draw((0..num_experts).collect(), 3))
                    .map(|expert| i32::try_from(expert).expect("small"))
                    .collect();
                let slots = Slots { num_topk: 3, idx: &idx, weights: &vec![1.0; idx.len()] };
                let mut count = |from: Rank, to: usize, num: usize| {
                    let (to, found) = (Rank::from_index(to), &mut found[from.index()]);
                    match nodes.of(to) == nodes.of(from) {
                        _ if to == from => {}
                        true => found.scale_up += num as f64 / f64::from(num_tokens),
                        false => found.scale_out += num as f64 / f64::from(num_tokens),
                    }
                };
                let plans = TwoLevelPlan { placement, nodes: &nodes, rank };
                for (to, num) in plans.cross(slots).num_tokens_to().into_iter().enumerate() {
                    count(rank, to, num);
                }
                for (to, num) in DispatchPlan::new(placement, slots).num_tokens_to().into_iter().enumerate() {
                    count(nodes.forwarder(rank, nodes.of(Rank::from_index(to))), to, num);
                }
            }
            let flows = flows(placement, &reach, (&nodes, Levels::Two));
            for (rank, (flow, found)) in flows.iter().zip(&found).enumerate() {
                for (name, wanted, found) in [
                    ("scale-up", flow.dispatch_sent.scale_up, found.scale_up),
                    ("scale-out", flow.dispatch_sent.scale_out, found.scale_out),
                ] {
                    let near = (found - wanted).abs() <= 0.05 * wanted;
                    assert!(near, "rank {rank} of {node_of_rank:?}, {name}: {found}, formula {wanted}");
                }
            }
        }
    }

    /// Kimi K3 on four hosts of four: once a node is fewer than once a rank, and all the rest stays in the nodes.
    #[test]
    fn two_levels_cross_once_a_node() {
        let reach = Reach { num_experts: 896, num_topk: 16, num_groups: 1, topk_group: 1 };
        let nodes = Nodes::blocks(16, 4);
        let of = |levels| flows(Placement::new(896, 16), &reach, (&nodes, levels))[5];
        let (one, two) = (of(Levels::One), of(Levels::Two));
        assert_eq!((one.dispatch_sent, one.dispatch_received), (one.tokens_sent, one.tokens_received));
        assert!((two.dispatch_sent.scale_out - 3.0 * reach.chance(0..224)).abs() < 1e-12);
        assert!(two.dispatch_sent.scale_out < 0.4 * one.dispatch_sent.scale_out);
        // It passes on for one rank of each node.
        assert!((two.dispatch_sent.scale_up - 4.0 * one.dispatch_sent.scale_up).abs() < 1e-12);
        assert_eq!((two.tokens_sent, two.slots_sent), (one.tokens_sent, one.slots_sent), "rows come back as in one");
    }

    #[test]
    fn kinds_of_links_follow_the_nodes() {
        let reach = Reach { num_experts: 8, num_topk: 2, num_groups: 1, topk_group: 1 };
        let of = |nodes: &[u32]| flows(Placement::new(8, nodes.len()), &reach, (&Nodes::new(nodes), Levels::One))[0];
        let one_node = of(&[0, 0, 0, 0]);
        assert_eq!(one_node.tokens_sent.scale_out, 0.0);
        assert!(one_node.tokens_sent.scale_up > 0.0);
        let four_nodes = of(&[0, 1, 2, 3]);
        assert_eq!((four_nodes.tokens_sent.scale_up, four_nodes.slots_received.scale_up), (0.0, 0.0));
        assert!((four_nodes.tokens_sent.scale_out - one_node.tokens_sent.scale_up).abs() < 1e-12);
        assert!((of(&[0, 0, 1, 1]).tokens_sent.remote() - one_node.tokens_sent.remote()).abs() < 1e-12);
    }
}
