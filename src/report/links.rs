//! What a run sent over which kind of link.

use serde::{Deserialize, Serialize};

use crate::dispatch::nodes::Nodes;
use crate::ids::Rank;

/// Bytes that a rank sent to others, by what lies between: ranks of one node reach each other over scale-up links, all others
/// over scale-out ones. In two levels, tokens that are passed on in a node are counted where that is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkBytes {
    /// Tokens, within the node.
    pub dispatch_scale_up_bytes: u64,
    /// Tokens, to other nodes.
    pub dispatch_scale_out_bytes: u64,
    /// Rows going back, within the node.
    pub combine_scale_up_bytes: u64,
    /// Rows going back to other nodes.
    pub combine_scale_out_bytes: u64,
}

impl LinkBytes {
    /// Of what `rank` has sent to each rank: of tokens, and of rows.
    #[must_use]
    pub fn new(nodes: &Nodes, rank: Rank, [tokens, rows]: &[Vec<u64>; 2]) -> Self {
        let sent = |bytes: &[u64], within: bool| {
            let to = bytes.iter().enumerate().map(|(to, bytes)| (Rank::from_index(to), *bytes));
            let is_there = |to: Rank| to != rank && (nodes.of(to) == nodes.of(rank)) == within;
            to.filter(|(to, _)| is_there(*to)).map(|(_, bytes)| bytes).sum()
        };
        Self {
            dispatch_scale_up_bytes: sent(tokens, true),
            dispatch_scale_out_bytes: sent(tokens, false),
            combine_scale_up_bytes: sent(rows, true),
            combine_scale_out_bytes: sent(rows, false),
        }
    }
}

impl std::ops::AddAssign for LinkBytes {
    fn add_assign(&mut self, other: Self) {
        self.dispatch_scale_up_bytes += other.dispatch_scale_up_bytes;
        self.dispatch_scale_out_bytes += other.dispatch_scale_out_bytes;
        self.combine_scale_up_bytes += other.combine_scale_up_bytes;
        self.combine_scale_out_bytes += other.combine_scale_out_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_by_what_lies_between() {
        let nodes = Nodes::new(&[0, 1, 0]);
        let links = LinkBytes::new(&nodes, Rank(2), &[vec![1, 10, 100], vec![2, 20, 200]]);
        let wanted = LinkBytes {
            dispatch_scale_up_bytes: 1,
            dispatch_scale_out_bytes: 10,
            combine_scale_up_bytes: 2,
            combine_scale_out_bytes: 20,
        };
        assert_eq!(links, wanted, "what stays on the rank went over no link");
    }
}
