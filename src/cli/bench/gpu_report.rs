//! What a bench of GPU kernels prints: times beside the floor, for people and for machines.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::BenchActivations;
use super::rows::RowForm;

/// What was timed, and how fast it was.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// The identity that ran, as `lockstep.wgmma.grouped_gemm.w4a16_nvfp4`.
    pub implementation: String,
    /// The GPU.
    pub device: String,
    /// Its multiprocessors.
    pub num_multiprocessors: u32,
    /// Experts.
    pub num_experts: usize,
    /// Width of the experts' input and output.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
    /// Whether activations were quantised.
    pub activations: BenchActivations,
    /// Whether one order over K served all row counts.
    pub batch_invariant: bool,
    /// Sets of weights that were read in turn.
    pub num_sets: usize,
    /// Measurements of each line.
    pub repeats: usize,
    /// Packed bytes of one expert.
    pub expert_bytes: u64,
    /// What the GPU gave beside it.
    pub ceilings: GpuCeilings,
    /// A line for each form and number of rows.
    pub rows: Vec<GpuRow>,
}

/// What a time is compared with; medians of runs between the lines'.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GpuCeilings {
    /// All weights read once, and nothing computed.
    pub read_tbyte_per_s: f64,
    /// A product of two bf16 matrices of 8192 x 8192 by cublasLt; absent where there is none.
    pub dense_tflops: Option<f64>,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct GpuRow {
    /// How rows fall on experts.
    pub form: RowForm,
    /// Rows of an expert, on average.
    pub rows_per_expert: usize,
    /// Rows of each expert.
    pub counts: Vec<usize>,
    /// All rows.
    pub num_rows: usize,
    /// Experts that have any.
    pub num_experts_hit: usize,
    /// The schedules that ran.
    pub schedules: Vec<String>,
    /// The median.
    pub median_us: f64,
    /// The fastest.
    pub min_us: f64,
    /// flops / median.
    pub tflops: f64,
    /// Bytes of the experts hit / median.
    pub packed_tbyte_per_s: f64,
    /// max(bytes / reading, flops / dense); the first alone where there is no dense product.
    pub floor_us: f64,
    /// floor / median.
    pub floor_share: f64,
}

impl GpuCeilings {
    /// The figures of a line.
    pub(super) fn row(&self, flops: f64, num_bytes: f64, median_us: f64) -> GpuRow {
        let by_memory = num_bytes / self.read_tbyte_per_s / 1e6;
        let by_flops = self.dense_tflops.map_or(0.0, |tflops| flops / tflops / 1e6);
        let floor_us = by_memory.max(by_flops);
        GpuRow {
            form: RowForm::Uniform,
            rows_per_expert: 0,
            counts: Vec::new(),
            num_rows: 0,
            num_experts_hit: 0,
            schedules: Vec::new(),
            median_us,
            min_us: median_us,
            tflops: flops / median_us / 1e6,
            packed_tbyte_per_s: num_bytes / median_us / 1e6,
            floor_us,
            floor_share: floor_us / median_us,
        }
    }
}

impl fmt::Display for GpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} on {}: {} experts of {} x {}, {:.1} MB packed, rows in f32, median of {} graph replays over {} sets of \
             weights",
            self.implementation,
            self.device,
            self.num_experts,
            self.hidden,
            self.intermediate,
            self.expert_bytes as f64 * self.num_experts as f64 / 1e6,
            self.repeats,
            self.num_sets
        )?;
        let dense = self.ceilings.dense_tflops.map_or_else(
            || "no cublasLt to compare with".to_owned(),
            |tflops| format!("{tflops:.0} TFLOPS of cublasLt, bf16, 8192 x 8192 x 8192"),
        );
        writeln!(
            f,
            "measured between the lines: {:.2} TB/s of weights copied and not used, {dense}",
            self.ceilings.read_tbyte_per_s
        )?;
        writeln!(
            f,
            "flops = 2 * 3 * hidden * intermediate * rows; bytes = packed weights of the experts hit, read once; \
             floor = max(bytes / copied, flops / cublasLt)"
        )?;
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header([
            "rows",
            "an expert",
            "hit",
            "median us",
            "min us",
            "TFLOPS",
            "TB/s",
            "floor us",
            "of floor",
            "schedules",
        ]);
        for row in &self.rows {
            table.add_row([
                row.form.to_string(),
                row.rows_per_expert.to_string(),
                row.num_experts_hit.to_string(),
                format!("{:.1}", row.median_us),
                format!("{:.1}", row.min_us),
                format!("{:.0}", row.tflops),
                format!("{:.2}", row.packed_tbyte_per_s),
                format!("{:.0}", row.floor_us),
                format!("{:.0} %", 100.0 * row.floor_share),
                row.schedules.join(" "),
            ]);
        }
        for column in table.column_iter_mut().take(9).skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        writeln!(f, "{table}")?;
        let losing: Vec<String> = self
            .rows
            .iter()
            .filter(|row| row.floor_share < 1.0 / 1.15)
            .map(|row| format!("{} {}", row.form, row.rows_per_expert))
            .collect();
        if losing.is_empty() {
            return write!(f, "no line is more than 15 % over its floor");
        }
        write!(f, "more than 15 % over the floor: {}", losing.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_larger_of_both() {
        let both = GpuCeilings { read_tbyte_per_s: 4.0, dense_tflops: Some(800.0) };
        let by_memory = both.row(1e9, 1e9, 500.0);
        assert_eq!((by_memory.floor_us, by_memory.floor_share, by_memory.packed_tbyte_per_s), (250.0, 0.5, 2.0));
        let by_flops = both.row(1.6e12, 1e9, 4000.0);
        assert_eq!((by_flops.floor_us, by_flops.floor_share, by_flops.tflops), (2000.0, 0.5, 400.0));
        let memory_alone = GpuCeilings { dense_tflops: None, ..both };
        assert_eq!(memory_alone.row(1.6e12, 1e9, 4000.0).floor_us, 250.0);
    }

    #[test]
    fn lines_that_lose_are_named() {
        let ceilings = GpuCeilings { read_tbyte_per_s: 4.0, dense_tflops: None };
        let line = |median_us| GpuRow {
            rows_per_expert: 8,
            schedules: vec!["small 8".to_owned()],
            ..ceilings.row(1e9, 1e9, median_us)
        };
        let mut report = GpuReport {
            implementation: "lockstep.wgmma.grouped_gemm.w4a16_nvfp4".to_owned(),
            device: "NVIDIA H200".to_owned(),
            num_multiprocessors: 132,
            num_experts: 56,
            hidden: 3584,
            intermediate: 3072,
            activations: BenchActivations::Bf16,
            batch_invariant: false,
            num_sets: 4,
            repeats: 30,
            expert_bytes: 18_579_456,
            ceilings,
            rows: vec![line(260.0)],
        };
        let text = report.to_string();
        for part in ["small 8", "4.00 TB/s", "no cublasLt", "no line is more than 15 %", "96 %"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        report.rows.push(line(400.0));
        assert!(report.to_string().ends_with("more than 15 % over the floor: uniform 8"), "{report}");
        assert_eq!(serde_json::to_value(&report).unwrap()["rows"][0]["form"], "uniform");
    }
}
