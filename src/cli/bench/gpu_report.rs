//! What a bench of GPU kernels prints: times beside the floor, for people and for machines.

use std::fmt;

use serde::Serialize;

use super::BenchActivations;
use super::markdown;
use super::plot::{Curve, Plot, Point};
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
    /// Whether each line was measured by itself, on a card that had rested, and not in turn with the others.
    pub alone: bool,
    /// Whether the GPU dealt rows out to kernels.
    pub dealt: bool,
    /// Packed bytes of one expert.
    pub expert_bytes: u64,
    /// What the GPU gave beside it.
    pub ceilings: GpuCeilings,
    /// What computed the dense product, or why there was none.
    pub dense: DenseBaseline,
    /// A line for each form and number of rows.
    pub rows: Vec<GpuRow>,
}

/// Where the rate of dense products comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseBaseline {
    /// cublasLt of this version.
    Cublaslt(String),
    /// There was no library, or no such product.
    Missing(String),
}

/// What a time is compared with: medians of runs between the lines', or before and behind lines that were measured alone.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GpuCeilings {
    /// All weights read once, and nothing computed.
    pub read_tbyte_per_s: f64,
    /// A product of two bf16 matrices of 8192 x 8192 by cublasLt, rows in bf16; absent where there is none.
    pub dense_tflops: Option<f64>,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct GpuRow {
    /// How rows fall on experts; absent where a file says.
    pub form: Option<RowForm>,
    /// Rows of an expert, on average; rounded up where a file says.
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
    /// Bytes of the experts hit / reading.
    pub memory_floor_us: f64,
    /// flops / dense; absent where there is no dense product.
    pub flops_floor_us: Option<f64>,
    /// The larger of both.
    pub floor_us: f64,
    /// floor / median.
    pub floor_share: f64,
}

impl GpuCeilings {
    /// The figures of a line.
    pub(super) fn row(&self, flops: f64, num_bytes: f64, median_us: f64) -> GpuRow {
        let memory_floor_us = num_bytes / self.read_tbyte_per_s / 1e6;
        let flops_floor_us = self.dense_tflops.map(|tflops| flops / tflops / 1e6);
        let floor_us = flops_floor_us.map_or(memory_floor_us, |by_flops| by_flops.max(memory_floor_us));
        GpuRow {
            form: None,
            rows_per_expert: 0,
            counts: Vec::new(),
            num_rows: 0,
            num_experts_hit: 0,
            schedules: Vec::new(),
            median_us,
            min_us: median_us,
            tflops: flops / median_us / 1e6,
            packed_tbyte_per_s: num_bytes / median_us / 1e6,
            memory_floor_us,
            flops_floor_us,
            floor_us,
            floor_share: floor_us / median_us,
        }
    }
}

impl GpuRow {
    fn form_name(&self) -> String {
        form_name(self.form)
    }

    /// Which floor is the larger.
    fn bound(&self) -> &'static str {
        if self.flops_floor_us.is_some_and(|by_flops| by_flops > self.memory_floor_us) { "flops" } else { "memory" }
    }

    /// What the picture says of it.
    fn says(&self) -> String {
        format!(
            "{} rows an expert: {:.1} us, {:.0} % of what {} allows ({:.1} us); {}",
            self.rows_per_expert,
            self.median_us,
            100.0 * self.floor_share,
            self.bound(),
            self.floor_us,
            self.schedules.join(" ")
        )
    }
}

fn form_name(form: Option<RowForm>) -> String {
    form.map_or_else(|| "given".to_owned(), |form| form.to_string())
}

impl GpuReport {
    /// Time against rows: a curve for each form, and both floors, that of memory for each number of experts hit.
    pub(super) fn plot(&self) -> Plot {
        let mut forms: Vec<Option<RowForm>> = Vec::new();
        for row in &self.rows {
            if !forms.contains(&row.form) {
                forms.push(row.form);
            }
        }
        let curve = |form: Option<RowForm>, name: String, point: &dyn Fn(&GpuRow) -> Option<Point>| {
            Curve::new(name, self.rows.iter().filter(|row| row.form == form).filter_map(point).collect())
        };
        let at = |row: &GpuRow, us: f64, says: String| Some(Point { rows: row.rows_per_expert, us, says });
        let read = self.ceilings.read_tbyte_per_s;
        let mut floors: Vec<Curve> = Vec::new();
        for &form in &forms {
            let name = format!("weights of {} rows copied at {read:.2} TB/s", form_name(form));
            let floor = curve(form, name, &|row| at(row, row.memory_floor_us, String::new()));
            if floors.iter().all(|known| known.points != floor.points) {
                floors.push(floor);
            }
        }
        if let (Some(tflops), Some(&form)) = (self.ceilings.dense_tflops, forms.first()) {
            let name = format!("multiplied at {tflops:.0} TFLOPS, as cublasLt does a dense product");
            floors.push(curve(form, name, &|row| at(row, row.flops_floor_us?, String::new())));
        }
        Plot {
            title: format!("{} on {}", self.implementation, self.device),
            subtitle: format!(
                "{} experts of {} x {}, median of {} graph replays, cold weights",
                self.num_experts, self.hidden, self.intermediate, self.repeats
            ),
            axis: "rows an expert",
            curves: forms
                .iter()
                .map(|&form| curve(form, form_name(form), &|row| at(row, row.median_us, row.says())))
                .collect(),
            floors,
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
        let tflops = self.ceilings.dense_tflops.unwrap_or_default();
        let dense = match &self.dense {
            DenseBaseline::Cublaslt(version) => {
                format!("{tflops:.0} TFLOPS of cublasLt {version}, bf16, 8192 x 8192 x 8192")
            }
            DenseBaseline::Missing(why) => format!("no dense product to compare with ({why})"),
        };
        writeln!(
            f,
            "measured {}: {:.2} TB/s of weights copied and not used, {dense}",
            if self.alone { "alone on a rested card, as each line was" } else { "between the lines" },
            self.ceilings.read_tbyte_per_s
        )?;
        writeln!(
            f,
            "flops = 2 * 3 * hidden * intermediate * rows; bytes = packed weights of the experts hit, read once; \
             floor = max(bytes / copied, flops / cublasLt)"
        )?;
        if self.dealt {
            writeln!(f, "rows were dealt out to kernels by the GPU, as in steps that are replayed")?;
        }
        let head = [
            "rows",
            "an expert",
            "hit",
            "median us",
            "min us",
            "TFLOPS",
            "TB/s",
            "floor us",
            "by",
            "of floor",
            "schedules",
        ];
        let rows = self.rows.iter().map(|row| {
            [
                row.form_name(),
                row.rows_per_expert.to_string(),
                row.num_experts_hit.to_string(),
                format!("{:.1}", row.median_us),
                format!("{:.1}", row.min_us),
                format!("{:.0}", row.tflops),
                format!("{:.2}", row.packed_tbyte_per_s),
                format!("{:.0}", row.floor_us),
                row.bound().to_owned(),
                format!("{:.0} %", 100.0 * row.floor_share),
                row.schedules.join(" "),
            ]
        });
        let table = markdown::table(&head, &[0, 8, 10], rows);
        writeln!(f, "{table}")?;
        let losing: Vec<String> = self
            .rows
            .iter()
            .filter(|row| row.floor_share < 1.0 / 1.15)
            .map(|row| format!("{} {}", row.form_name(), row.rows_per_expert))
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
        assert_eq!(
            (by_memory.memory_floor_us, by_memory.flops_floor_us, by_memory.bound()),
            (250.0, Some(1.25), "memory")
        );
        let by_flops = both.row(1.6e12, 1e9, 4000.0);
        assert_eq!((by_flops.floor_us, by_flops.floor_share, by_flops.tflops), (2000.0, 0.5, 400.0));
        assert_eq!((by_flops.memory_floor_us, by_flops.bound()), (250.0, "flops"));
        let memory_alone = GpuCeilings { dense_tflops: None, ..both }.row(1.6e12, 1e9, 4000.0);
        assert_eq!((memory_alone.floor_us, memory_alone.flops_floor_us, memory_alone.bound()), (250.0, None, "memory"));
    }

    const CEILINGS: GpuCeilings = GpuCeilings { read_tbyte_per_s: 4.0, dense_tflops: Some(800.0) };

    fn line(form: RowForm, rows_per_expert: usize, num_bytes: f64, median_us: f64) -> GpuRow {
        GpuRow {
            form: Some(form),
            rows_per_expert,
            schedules: vec!["small-8".to_owned()],
            ..CEILINGS.row(4e9 * rows_per_expert as f64, num_bytes, median_us)
        }
    }

    fn report(rows: Vec<GpuRow>) -> GpuReport {
        GpuReport {
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
            alone: false,
            dealt: false,
            expert_bytes: 18_579_456,
            ceilings: CEILINGS,
            dense: DenseBaseline::Cublaslt("13.1.0".to_owned()),
            rows,
        }
    }

    #[test]
    fn lines_that_lose_are_named() {
        let mut report = report(vec![line(RowForm::Uniform, 8, 1e9, 260.0)]);
        let text = report.to_string();
        for part in ["small-8", "4.00 TB/s", "800 TFLOPS of cublasLt 13.1.0", "no line is more than 15 %", "96 %"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        report.rows.push(line(RowForm::Uniform, 8, 1e9, 400.0));
        assert!(report.to_string().ends_with("more than 15 % over the floor: uniform 8"), "{report}");
        report.rows[1].form = None;
        assert!(report.to_string().ends_with("over the floor: given 8"), "{report}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["rows"][0]["form"], &json["dense"]["cublaslt"]), (&"uniform".into(), &"13.1.0".into()));
        assert_eq!(json["rows"][0]["flops_floor_us"], 4e9 * 8.0 / 800e6);
    }

    #[test]
    fn a_report_without_a_dense_product_says_why() {
        let mut report = report(vec![line(RowForm::Uniform, 8, 1e9, 260.0)]);
        report.dense = DenseBaseline::Missing("no cublasLt: libcublasLt.so.13: not there".to_owned());
        report.ceilings.dense_tflops = None;
        assert!(report.to_string().contains("no dense product to compare with (no cublasLt: libcublasLt"), "{report}");
        assert_eq!(serde_json::to_value(&report).unwrap()["ceilings"]["dense_tflops"], serde_json::Value::Null);
        assert_eq!(report.plot().floors.len(), 1, "memory's alone");
    }

    #[test]
    fn a_picture_has_a_curve_a_form_and_each_floor_once() {
        let rows = vec![
            line(RowForm::Uniform, 64, 1e9, 500.0),
            line(RowForm::Uniform, 8, 1e9, 260.0),
            line(RowForm::OneHot, 8, 1e9, 380.0),
            line(RowForm::OneHot, 64, 1e9, 730.0),
            line(RowForm::ThirdEmpty, 8, 0.6e9, 200.0),
        ];
        let plot = report(rows).plot();
        let times = |curve: &Curve| curve.points.iter().map(|point| (point.rows, point.us)).collect::<Vec<_>>();
        assert_eq!(
            plot.curves.iter().map(times).collect::<Vec<_>>(),
            [vec![(8, 260.0), (64, 500.0)], vec![(8, 380.0), (64, 730.0)], vec![(8, 200.0)],]
        );
        let floors: Vec<_> = plot.floors.iter().map(times).collect();
        assert_eq!(floors[0], [(8, 250.0), (64, 250.0)], "one of memory for forms that hit as many experts");
        assert_eq!((floors[1].len(), floors.len()), (1, 3));
        assert!((floors[1][0].1 - 150.0).abs() < 1e-9, "fewer experts, fewer bytes");
        assert!((floors[2][1].1 - 320.0).abs() < 1e-9 && floors[2][0].1 < 250.0, "flops");
        let svg = plot.svg();
        for part in [
            "4.00 TB/s",
            "800 TFLOPS",
            "uniform, 64 rows an expert: 500.0 us, 64 % of what flops allows",
            "NVIDIA H200",
        ] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
    }
}
