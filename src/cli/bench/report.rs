//! What a bench prints: times beside the floor, for people and for machines.

use std::fmt;

use serde::Serialize;

use super::BenchActivations;
use super::figures::{fastest, median};
use super::markdown;
use super::plot::{Curve, Plot, Point};

/// What was timed, and how fast it was.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// The identity that ran, as `lockstep.simd.grouped_gemm.w4a16_nvfp4`.
    pub implementation: String,
    /// The instruction set, of the kernels and of the measured peak.
    pub isa: &'static str,
    /// Threads, of the kernels and of the measured ceilings.
    pub num_threads: usize,
    /// Experts.
    pub num_experts: usize,
    /// Width of the experts' input and output.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
    /// Whether activations were quantised.
    pub activations: BenchActivations,
    /// Measurements of each line.
    pub repeats: usize,
    /// Bytes of all packed weights.
    pub weight_bytes: u64,
    /// Reads of memory on all threads, the best of `repeats`.
    pub read_gbyte_per_s: f64,
    /// Fused multiply-adds in registers on all threads, the best of `repeats`.
    pub fma_gflops: f64,
    /// A line for each number of rows.
    pub rows: Vec<BenchRow>,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
    /// Rows of every expert.
    pub rows_per_expert: usize,
    /// The median.
    pub median_us: f64,
    /// The fastest.
    pub min_us: f64,
    /// flops / median.
    pub gflops: f64,
    /// weight bytes / median.
    pub packed_gbyte_per_s: f64,
    /// weight bytes / median over the read bandwidth.
    pub bandwidth_share: f64,
    /// flops / median over the FMA peak.
    pub peak_share: f64,
    /// max(weight bytes / read bandwidth, flops / FMA peak)
    pub floor_us: f64,
    /// floor / median.
    pub floor_share: f64,
    /// The tactic that was measured.
    pub tactic: &'static str,
    /// The best time of each tactic, where they were timed.
    pub tactics_us: Vec<(&'static str, f64)>,
}

impl BenchReport {
    /// Time against rows, with what reading and arithmetic allow.
    pub(super) fn plot(&self) -> Plot {
        let curve = |name: String, us: &dyn Fn(&BenchRow) -> f64| {
            let says = |row: &BenchRow| {
                let of_floor = 100.0 * row.floor_share;
                format!("{} rows an expert: {:.1} us, {of_floor:.0} % of its floor", row.rows_per_expert, row.median_us)
            };
            let point = |row: &BenchRow| Point { rows: row.rows_per_expert, us: us(row), says: says(row) };
            Curve::new(name, self.rows.iter().map(point).collect())
        };
        let (read, peak) = (self.read_gbyte_per_s, self.fma_gflops);
        Plot {
            title: format!("{} on {} with {} threads", self.implementation, self.isa, self.num_threads),
            subtitle: format!(
                "{} experts of {} x {}, median of {}",
                self.num_experts, self.hidden, self.intermediate, self.repeats
            ),
            axis: "rows an expert",
            curves: vec![curve("uniform".to_owned(), &|row| row.median_us)],
            floors: vec![
                curve(format!("weights read at {read:.1} GB/s"), &|_| self.weight_bytes as f64 / read / 1e3),
                curve(format!("multiplied at {peak:.1} GFLOPS"), &|row| row.gflops * row.median_us / peak),
            ],
        }
    }
}

/// What a time is compared with.
pub(super) struct Ceilings {
    pub(super) weight_bytes: f64,
    pub(super) read_gbyte_per_s: f64,
    pub(super) fma_gflops: f64,
}

impl Ceilings {
    /// The line of `times_us`, which are not empty.
    pub(super) fn row(&self, rows_per_expert: usize, flops: f64, times_us: &[f64]) -> BenchRow {
        let median_us = median(times_us);
        let gflops = flops / median_us / 1e3;
        let packed_gbyte_per_s = self.weight_bytes / median_us / 1e3;
        let floor_us = (self.weight_bytes / self.read_gbyte_per_s / 1e3).max(flops / self.fma_gflops / 1e3);
        BenchRow {
            rows_per_expert,
            median_us,
            min_us: fastest(times_us),
            gflops,
            packed_gbyte_per_s,
            bandwidth_share: packed_gbyte_per_s / self.read_gbyte_per_s,
            peak_share: gflops / self.fma_gflops,
            floor_us,
            floor_share: floor_us / median_us,
            tactic: "",
            tactics_us: Vec::new(),
        }
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} on {} with {} threads: {} experts of {} x {}, {:.1} MB packed, median of {}",
            self.implementation,
            self.isa,
            self.num_threads,
            self.num_experts,
            self.hidden,
            self.intermediate,
            self.weight_bytes as f64 / 1e6,
            self.repeats
        )?;
        writeln!(
            f,
            "measured beside it: {:.1} GB/s read, {:.1} GFLOPS of fused multiply-adds",
            self.read_gbyte_per_s, self.fma_gflops
        )?;
        writeln!(
            f,
            "flops = 2 * 3 * hidden * intermediate * experts * rows; bytes = packed weights, read once; \
             floor = max(bytes / read, flops / peak)"
        )?;
        let is_tuned = self.rows.iter().any(|row| !row.tactics_us.is_empty());
        let mut head = vec!["rows/expert", "median us", "GFLOPS", "of peak", "GB/s", "of read", "floor us", "of floor"];
        head.extend(is_tuned.then_some("tactic"));
        let rows = self.rows.iter().map(|row| {
            let cells = [
                row.rows_per_expert.to_string(),
                format!("{:.0}", row.median_us),
                format!("{:.1}", row.gflops),
                format!("{:.0} %", 100.0 * row.peak_share),
                format!("{:.1}", row.packed_gbyte_per_s),
                format!("{:.0} %", 100.0 * row.bandwidth_share),
                format!("{:.0}", row.floor_us),
                format!("{:.0} %", 100.0 * row.floor_share),
            ];
            cells.into_iter().chain(is_tuned.then(|| row.tactic.to_owned())).collect::<Vec<_>>()
        });
        let table = markdown::table(&head, &[], rows);
        writeln!(f, "{table}")?;
        let losing: Vec<String> =
            self.rows.iter().filter(|row| row.floor_share < 0.5).map(|row| row.rows_per_expert.to_string()).collect();
        if losing.is_empty() {
            return write!(f, "no row takes more than twice its floor");
        }
        write!(f, "more than twice the floor: {} rows an expert", losing.join(", "))
    }
}
