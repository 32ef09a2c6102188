//! What a step moves: tokens and slots over each kind of link, from every rank's point of view.
//!
//! Every rank brings as many tokens and its experts are as popular as any (see [`super::reach`]). Ranks of one node reach
//! each other over scale-up links, all others over scale-out ones.

use serde::Serialize;

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
    /// Slots of this rank's tokens, by where they are computed.
    pub slots_sent: ByLink,
    /// Slots that are computed here, by where their tokens live.
    pub slots_received: ByLink,
}

/// Every rank's flow.
#[must_use]
pub fn flows(placement: Placement, reach: &Reach, node_of_rank: &[u32]) -> Vec<Flow> {
    let local = |rank| placement.local_experts(Rank::from_index(rank));
    let chance: Vec<f64> = (0..node_of_rank.len()).map(|rank| reach.chance(local(rank))).collect();
    let slots: Vec<f64> = (0..node_of_rank.len()).map(|rank| reach.slots(local(rank).len())).collect();
    let (tokens, slots) = (By::new(chance, node_of_rank), By::new(slots, node_of_rank));
    let flow = |rank| Flow {
        tokens_sent: tokens.sent(rank),
        tokens_received: tokens.received(rank),
        slots_sent: slots.sent(rank),
        slots_received: slots.received(rank),
    };
    (0..node_of_rank.len()).map(flow).collect()
}

/// What one token brings to each rank, with its sums.
struct By<'a> {
    of_rank: Vec<f64>,
    node_of_rank: &'a [u32],
    of_node: Vec<f64>,
    ranks_of_node: Vec<usize>,
    total: f64,
}

impl<'a> By<'a> {
    fn new(of_rank: Vec<f64>, node_of_rank: &'a [u32]) -> Self {
        let num_nodes = node_of_rank.iter().max().map_or(0, |&node| node as usize + 1);
        let (mut of_node, mut ranks_of_node) = (vec![0.0; num_nodes], vec![0; num_nodes]);
        for (&node, here) in node_of_rank.iter().zip(&of_rank) {
            of_node[node as usize] += here;
            ranks_of_node[node as usize] += 1;
        }
        // From the nodes' sums, so that a lone node's rest is exactly zero.
        let total = of_node.iter().sum();
        Self { of_rank, node_of_rank, of_node, ranks_of_node, total }
    }

    fn sent(&self, rank: usize) -> ByLink {
        let node = self.node_of_rank[rank] as usize;
        let peers = if self.ranks_of_node[node] == 1 { 0.0 } else { self.of_node[node] - self.of_rank[rank] };
        ByLink {
            local: self.of_rank[rank],
            scale_up: peers.max(0.0),
            scale_out: (self.total - self.of_node[node]).max(0.0),
        }
    }

    fn received(&self, rank: usize) -> ByLink {
        let num_here = self.ranks_of_node[self.node_of_rank[rank] as usize];
        let here = self.of_rank[rank];
        let from = |num_ranks: usize| here * num_ranks as f64;
        ByLink { local: here, scale_up: from(num_here - 1), scale_out: from(self.node_of_rank.len() - num_here) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(flows: &[Flow], of: impl Fn(&Flow) -> f64) -> f64 {
        flows.iter().map(of).sum()
    }

    #[test]
    fn what_is_sent_is_received() {
        for (num_experts, node_of_rank) in [
            (896, (0..16).map(|rank| rank / 4).collect::<Vec<u32>>()),
            (10, vec![0, 0, 0, 1, 1, 2, 2]),
            (3, vec![0, 0, 1, 1]),
        ] {
            let reach = Reach { num_experts, num_topk: 3, num_groups: 1, topk_group: 1 };
            let flows = flows(Placement::new(num_experts, node_of_rank.len()), &reach, &node_of_rank);
            let all_sent =
                |of: fn(&ByLink) -> f64| [sum(&flows, |f| of(&f.tokens_sent)), sum(&flows, |f| of(&f.slots_sent))];
            let all_received = |of: fn(&ByLink) -> f64| {
                [sum(&flows, |f| of(&f.tokens_received)), sum(&flows, |f| of(&f.slots_received))]
            };
            for link in [(|by| by.scale_up) as fn(&ByLink) -> f64, |by| by.scale_out] {
                for (sent, received) in all_sent(link).into_iter().zip(all_received(link)) {
                    assert!((sent - received).abs() < 1e-9, "{node_of_rank:?}: {sent} sent, {received} received");
                }
            }
            for flow in &flows {
                assert!((flow.slots_sent.total() - 3.0).abs() < 1e-12, "every slot is computed once");
                assert!(flow.tokens_sent.total() <= 3.0 + 1e-12, "a token goes to no more ranks than it has slots");
            }
        }
    }

    #[test]
    fn kinds_of_links_follow_the_nodes() {
        let reach = Reach { num_experts: 8, num_topk: 2, num_groups: 1, topk_group: 1 };
        let of = |nodes: &[u32]| flows(Placement::new(8, nodes.len()), &reach, nodes)[0];
        let one_node = of(&[0, 0, 0, 0]);
        assert_eq!(one_node.tokens_sent.scale_out, 0.0);
        assert!(one_node.tokens_sent.scale_up > 0.0);
        let four_nodes = of(&[0, 1, 2, 3]);
        assert_eq!((four_nodes.tokens_sent.scale_up, four_nodes.slots_received.scale_up), (0.0, 0.0));
        assert!((four_nodes.tokens_sent.scale_out - one_node.tokens_sent.scale_up).abs() < 1e-12);
        assert!((of(&[0, 0, 1, 1]).tokens_sent.remote() - one_node.tokens_sent.remote()).abs() < 1e-12);
    }
}
