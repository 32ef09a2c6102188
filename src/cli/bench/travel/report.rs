//! What a bench of dispatch and combine prints, for people and for machines.

use std::fmt;

use serde::Serialize;

use super::super::markdown;
use super::super::rows::RowForm;

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
    /// What came home is, bit for bit, what came over the first transport.
    pub is_alike: bool,
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
        write!(f, "{table}")
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
        assert!(!text.contains("DIFFER"), "{text}");
        report.rows.push(TravelRow { is_alike: false, ..row });
        assert!(report.to_string().contains("DIFFER"));
    }

    #[test]
    fn steps_that_differ_are_counted() {
        let report = RandomReport {
            seed: 7,
            num_steps: 100,
            transports: vec!["nccl", "nvlink"],
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
