//! What dispatch and combine are to be measured by: what others have reached on the same link, and what the link allows.

use serde::Serialize;

use crate::cli::bench::BenchGeometry;

/// Stores from multiprocessors between two H200s (NVLink 4, 18 links) with both ways busy, GB/s each way.
pub(super) const LINE_GBYTE_PER_S: f64 = 363.5;

/// What a row takes to be there and known to be, whatever it is.
const LATENCY_US: f64 = 4.0;

/// The least time for so many bytes each way.
pub(super) fn floor_us(bytes: f64) -> f64 {
    LATENCY_US + bytes / LINE_GBYTE_PER_S / 1e3
}

/// One-sided stores between two H200s, replayed as a graph: uniform routing, bf16 tokens and rows, the slower rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goal {
    /// Rows and ids at the receiver, without the index by expert that a dispatch here makes as well.
    pub dispatch_us: f64,
    /// Sums at home, with the owner's reduction.
    pub combine_us: f64,
    /// NCCL, rows once a rank: to rows by expert.
    pub nccl_dispatch_us: f64,
    /// NCCL: sums at home.
    pub nccl_combine_us: f64,
}

/// Of so many tokens a rank, where it is known.
pub(super) fn of(geometry: BenchGeometry, tokens: usize) -> Option<Goal> {
    let [dispatch_us, combine_us, nccl_dispatch_us, nccl_combine_us] = match (geometry, tokens) {
        (BenchGeometry::KimiK3, 1) => [4.0, 8.1, 74.0, 15.0],
        (BenchGeometry::KimiK3, 64) => [5.8, 9.8, 97.0, 20.0],
        (BenchGeometry::KimiK3, 512) => [14.9, 30.0, 194.0, 57.0],
        (BenchGeometry::KimiK3, 2048) => [46.0, 93.0, 326.0, 162.0],
        (BenchGeometry::KimiK3, 8192) => [171.0, 332.0, 923.0, 529.0],
        (BenchGeometry::DeepseekV3, 1) => [4.5, 7.8, 74.0, 16.0],
        (BenchGeometry::DeepseekV3, 512) => [25.0, 41.0, 215.0, 78.0],
        (BenchGeometry::DeepseekV3, 8192) => [329.0, 512.0, 1183.0, 790.0],
        _ => return None,
    };
    Some(Goal { dispatch_us, combine_us, nccl_dispatch_us, nccl_combine_us })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_above_what_the_link_allows() {
        // A token and its ids to the other rank, of both.
        for (geometry, tokens, token_bytes) in
            [(BenchGeometry::KimiK3, 8192, 7168.0), (BenchGeometry::DeepseekV3, 8192, 14336.0)]
        {
            let (goal, floor) = (of(geometry, tokens).unwrap(), floor_us(tokens as f64 * token_bytes));
            assert!(goal.dispatch_us > floor && goal.dispatch_us < 1.1 * floor, "{goal:?}, {floor}");
            assert!(goal.nccl_dispatch_us > goal.dispatch_us && goal.nccl_combine_us > goal.combine_us);
        }
        assert_eq!(of(BenchGeometry::KimiK3, 2), None);
    }
}
