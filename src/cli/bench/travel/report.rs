//! What a bench of dispatch and combine prints, for people and for machines.

use std::fmt;

use serde::Serialize;

use super::super::markdown;
use super::super::plot::{Curve, Plot, Point};
use super::super::rows::RowForm;
use super::goals::{Goal, LINE_GBYTE_PER_S, floor_us};

/// What was timed.
#[derive(Debug, Clone, Serialize)]
pub struct TravelReport {
    /// Rank 0's GPU.
    pub device: String,
    /// Ranks of the world.
    pub num_ranks: usize,
    /// Width of a token.
    pub hidden: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Slots of a token.
    pub num_topk: usize,
    /// The form of a travelling token.
    pub payload: &'static str,
    /// Measurements of each line.
    pub repeats: usize,
    /// A line for each routing, number of tokens and transport.
    pub rows: Vec<TravelRow>,
}

/// One line of the table. Times are medians of the slowest rank's; bytes are those that the rank with most of them sends to
/// others.
#[derive(Debug, Clone, Serialize)]
pub struct TravelRow {
    /// What carried tokens.
    pub transport: &'static str,
    /// How tokens chose experts.
    pub form: RowForm,
    /// Tokens of a rank.
    pub tokens: usize,
    /// Tokens on their way: `tokens to other ranks * bytes of a token`.
    pub dispatch_bytes: f64,
    /// From tokens on the device to tokens and rows as experts read them.
    pub dispatch_us: f64,
    /// bytes / time.
    pub dispatch_gbyte_per_s: f64,
    /// Rows on their way: `tokens from other ranks * bytes of a row`.
    pub combine_bytes: f64,
    /// From rows of experts, all ranks at once, to sums at home.
    pub combine_us: f64,
    /// bytes / time.
    pub combine_gbyte_per_s: f64,
    /// The same work in replays of a graph, where no host has to follow a step.
    pub replayed: Option<Replayed>,
    /// What others have reached with as many tokens, where it is known.
    pub goal: Option<Goal>,
    /// What came home is, bit for bit, what came over the first transport; of replays too.
    pub is_alike: bool,
}

/// Dispatch and combine in replays: medians of rounds, each of the slowest rank, between marks on the device.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Replayed {
    /// From tokens on the device to tokens and rows as experts read them.
    pub dispatch_us: f64,
    /// bytes / time.
    pub dispatch_gbyte_per_s: f64,
    /// Of [`LINE_GBYTE_PER_S`].
    pub dispatch_line_share: f64,
    /// The least time: 4 us + bytes / that rate.
    pub dispatch_floor_us: f64,
    /// From rows of experts to sums at home, with the owner's reduction.
    pub combine_us: f64,
    /// bytes / time.
    pub combine_gbyte_per_s: f64,
    /// Of that rate.
    pub combine_line_share: f64,
    /// The least time, likewise.
    pub combine_floor_us: f64,
}

impl Replayed {
    pub(super) fn new([dispatch_us, combine_us]: [f64; 2], [dispatch_bytes, combine_bytes]: [f64; 2]) -> Self {
        let (dispatch_rate, combine_rate) = (dispatch_bytes / dispatch_us / 1e3, combine_bytes / combine_us / 1e3);
        Self {
            dispatch_us,
            dispatch_gbyte_per_s: dispatch_rate,
            dispatch_line_share: dispatch_rate / LINE_GBYTE_PER_S,
            dispatch_floor_us: floor_us(dispatch_bytes),
            combine_us,
            combine_gbyte_per_s: combine_rate,
            combine_line_share: combine_rate / LINE_GBYTE_PER_S,
            combine_floor_us: floor_us(combine_bytes),
        }
    }
}

/// What comparing random steps has shown.
#[derive(Debug, Clone, Serialize)]
pub struct RandomReport {
    /// What the steps were drawn from.
    pub seed: u64,
    /// Steps.
    pub num_steps: u64,
    /// Transports, all against the first.
    pub transports: Vec<&'static str>,
    /// The most chunks that a step was cut into, beside being left whole.
    pub max_chunks: usize,
    /// Ranks of the world.
    pub num_ranks: usize,
    /// Tokens of all ranks and steps.
    pub num_tokens: u64,
    /// Steps in which some rank's sums differed.
    pub num_different: u64,
    /// The first of them.
    pub first_different: Option<u64>,
    /// By how many bytes the device memory that a rank holds has changed since buffers were as large as any step needs.
    pub memory_change_bytes: u64,
}

impl fmt::Display for TravelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "dispatch and combine on {} x {}: {} wide, {} experts, top-{}, {} tokens, bf16 rows, one a rank; medians of {}, \
             the slowest rank, queued by hosts and timed by devices",
            self.num_ranks, self.device, self.hidden, self.num_experts, self.num_topk, self.payload, self.repeats
        )?;
        writeln!(f, "bytes = rows to other ranks * bytes of a row, with its ids and weights; GB/s = bytes / time")?;
        let head = ["routing", "tokens", "transport", "dispatch us", "MB", "GB/s", "combine us", "MB", "GB/s", "bits"];
        let rows = self.rows.iter().map(|row| {
            [
                row.form.to_string(),
                row.tokens.to_string(),
                row.transport.to_owned(),
                format!("{:.1}", row.dispatch_us),
                format!("{:.3}", row.dispatch_bytes / 1e6),
                format!("{:.1}", row.dispatch_gbyte_per_s),
                format!("{:.1}", row.combine_us),
                format!("{:.3}", row.combine_bytes / 1e6),
                format!("{:.1}", row.combine_gbyte_per_s),
                if row.is_alike { "alike" } else { "DIFFER" }.to_owned(),
            ]
        });
        let table = markdown::table(&head, &[0, 2, 9], rows);
        write!(f, "{table}")?;
        if self.rows.iter().any(|row| row.replayed.is_some()) { self.write_replayed(f) } else { Ok(()) }
    }
}

impl TravelReport {
    fn write_replayed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nthe same in replays of a graph that holds several rounds, medians of rounds; line: {LINE_GBYTE_PER_S} GB/s each \
             way, floor: 4 us + bytes / line, as measured between two H200s; goals: one-sided stores there (dispatch without the \
             index by expert), NCCL behind"
        )?;
        let head = [
            "routing",
            "tokens",
            "transport",
            "dispatch us",
            "floor",
            "goal",
            "GB/s",
            "of line",
            "combine us",
            "floor",
            "goal",
            "GB/s",
            "of line",
        ];
        let rows = self.rows.iter().filter_map(|row| row.replayed.map(|replayed| (row, replayed)));
        let rows = rows.map(|(row, replayed)| {
            let goal = |of: fn(&Goal) -> [f64; 2]| {
                row.goal.as_ref().map_or_else(String::new, |goal| {
                    let [stores, nccl] = of(goal);
                    format!("{stores:.1}, {nccl:.0}")
                })
            };
            [
                row.form.to_string(),
                row.tokens.to_string(),
                row.transport.to_owned(),
                format!("{:.1}", replayed.dispatch_us),
                format!("{:.1}", replayed.dispatch_floor_us),
                goal(|goal| [goal.dispatch_us, goal.nccl_dispatch_us]),
                format!("{:.1}", replayed.dispatch_gbyte_per_s),
                format!("{:.0} %", 100.0 * replayed.dispatch_line_share),
                format!("{:.1}", replayed.combine_us),
                format!("{:.1}", replayed.combine_floor_us),
                goal(|goal| [goal.combine_us, goal.nccl_combine_us]),
                format!("{:.1}", replayed.combine_gbyte_per_s),
                format!("{:.0} %", 100.0 * replayed.combine_line_share),
            ]
        });
        write!(f, "{}", markdown::table(&head, &[0, 2], rows))
    }

    /// Time against tokens of the first routing: of each transport dispatch and combine, as hosts drive them and in replays; what
    /// the link allows, and the goals.
    pub(super) fn plot(&self) -> Plot {
        let routing = self.rows.first().map(|row| row.form);
        let rows: Vec<&TravelRow> = self.rows.iter().filter(|row| Some(row.form) == routing).collect();
        let curve = |name: String, rows: &mut dyn Iterator<Item = (usize, f64)>| {
            let point = |(rows, us): (usize, f64)| Point { rows, us, says: format!("{rows} tokens: {us:.1} us") };
            Some(Curve::new(name, rows.map(point).collect())).filter(|curve| !curve.points.is_empty())
        };
        let mut transports: Vec<&'static str> = rows.iter().map(|row| row.transport).collect();
        transports.dedup();
        transports.sort_unstable();
        transports.dedup();
        let mut curves = Vec::new();
        for transport in transports {
            let rows = || rows.iter().filter(|row| row.transport == transport);
            let replayed = || rows().filter_map(|row| row.replayed.map(|replayed| (row.tokens, replayed)));
            let name = |what: &str| format!("{transport}, {what}");
            curves.extend(curve(name("dispatch"), &mut rows().map(|row| (row.tokens, row.dispatch_us))));
            curves.extend(curve(name("combine"), &mut rows().map(|row| (row.tokens, row.combine_us))));
            curves.extend(curve(
                name("dispatch replayed"),
                &mut replayed().map(|(tokens, row)| (tokens, row.dispatch_us)),
            ));
            curves
                .extend(curve(name("combine replayed"), &mut replayed().map(|(tokens, row)| (tokens, row.combine_us))));
        }
        // Over all transports the same.
        let once = |row: &&&TravelRow| row.transport == self.rows[0].transport;
        let of_rows = || rows.iter().filter(once);
        let goals = || of_rows().filter_map(|row| row.goal.map(|goal| (row.tokens, goal)));
        let floors = [
            curve(
                format!("4 us and bytes of tokens at {LINE_GBYTE_PER_S} GB/s"),
                &mut of_rows().map(|row| (row.tokens, floor_us(row.dispatch_bytes))),
            ),
            curve("goal of dispatch".to_owned(), &mut goals().map(|(tokens, goal)| (tokens, goal.dispatch_us))),
            curve("goal of combine".to_owned(), &mut goals().map(|(tokens, goal)| (tokens, goal.combine_us))),
        ];
        Plot {
            title: format!("dispatch and combine on {} x {}", self.num_ranks, self.device),
            subtitle: format!(
                "{} wide, {} experts, top-{}, {} tokens, {} routing, median of {}",
                self.hidden,
                self.num_experts,
                self.num_topk,
                self.payload,
                routing.map_or_else(String::new, |form| form.to_string()),
                self.repeats
            ),
            axis: "tokens a rank",
            curves,
            floors: floors.into_iter().flatten().collect(),
        }
    }
}

impl fmt::Display for RandomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, num_steps, num_ranks, num_tokens, num_different, memory_change_bytes, .. } = self;
        writeln!(
            f,
            "{num_steps} random steps of seed {seed} over {}, ranks: {num_ranks}, tokens: {num_tokens}",
            self.transports.join(" and ")
        )?;
        if self.max_chunks > 1 {
            writeln!(f, "each whole, and in up to {} chunks that overlap", self.max_chunks)?;
        }
        writeln!(f, "device memory that a rank holds changed by {memory_change_bytes} bytes")?;
        match self.first_different {
            None => write!(f, "all of them alike, bit for bit"),
            Some(step) => write!(f, "{num_different} DIFFER, the first of them step {step}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_differ_stand_out() {
        let row = TravelRow {
            transport: "nvlink",
            form: RowForm::OneHot,
            tokens: 64,
            dispatch_bytes: 458_752.0,
            dispatch_us: 5.0,
            dispatch_gbyte_per_s: 91.75,
            combine_bytes: 1e6,
            combine_us: 10.0,
            combine_gbyte_per_s: 100.0,
            replayed: None,
            goal: None,
            is_alike: true,
        };
        let mut report = TravelReport {
            device: "NVIDIA H200".to_owned(),
            num_ranks: 2,
            hidden: 3584,
            num_experts: 896,
            num_topk: 16,
            payload: "bf16",
            repeats: 9,
            rows: vec![row.clone()],
        };
        let text = report.to_string();
        for part in ["2 x NVIDIA H200", "one-hot", "nvlink", "0.459", "91.8", "alike"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("DIFFER") && !text.contains("replays"), "{text}");
        assert_eq!(report.plot().curves.len(), 2, "dispatch and combine as hosts drive them");
        report.rows.push(TravelRow { is_alike: false, ..row.clone() });
        assert!(report.to_string().contains("DIFFER"));

        let replayed = Some(Replayed::new([5.5, 11.0], [458_752.0, 1e6]));
        let goal = Some(Goal { dispatch_us: 5.8, combine_us: 9.8, nccl_dispatch_us: 97.0, nccl_combine_us: 20.0 });
        report.rows = vec![TravelRow { replayed, goal, ..row }];
        let text = report.to_string();
        for part in ["replays of a graph", "5.8, 97", "9.8, 20", "83.4", "23 %", "25 %", "5.3"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let svg = report.plot().svg();
        for part in ["nvlink, dispatch replayed", "goal of combine", "tokens a rank", "64 tokens: 5.5 us"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
    }

    #[test]
    fn steps_that_differ_are_counted() {
        let report = RandomReport {
            seed: 7,
            num_steps: 100,
            transports: vec!["nccl", "nvlink"],
            max_chunks: 1,
            num_ranks: 2,
            num_tokens: 50_000,
            num_different: 0,
            first_different: None,
            memory_change_bytes: 0,
        };
        assert!(report.to_string().ends_with("all of them alike, bit for bit"), "{report}");
        let differing = RandomReport { num_different: 2, first_different: Some(41), ..report };
        assert!(differing.to_string().ends_with("2 DIFFER, the first of them step 41"), "{differing}");
    }
}
