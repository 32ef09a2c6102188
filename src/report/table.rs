//! The report as tables that a person reads at the end of a run.

use std::fmt;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::{LinkBytes, RunReport};
use crate::layer::tune::TimedBy;
use crate::layer::{NO_GRAPH_ASKED, NO_OVERLAP_ASKED};

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decided = &self.decided;
        writeln!(
            f,
            "{} · {} ranks · lockstep.{}.grouped_gemm ({}) · part {}",
            decided.deployment, decided.num_ranks, decided.technique, decided.isa, decided.part,
        )?;
        writeln!(f, "all ranks agreed on selection {} (`lockstep resolve` prints the same)", decided.selection)?;
        writeln!(f, "              and session   {} (-v lists every field of it)", decided.session)?;
        writeln!(f, "\n{}\n\n{}", layers(self), ranks(self))?;
        if decided.num_nodes > 1 {
            writeln!(f, "\n{}", links(self))?;
        }
        if !decided.tactics.is_empty() {
            writeln!(f, "\n{}", tactics(self))?;
        }
        writeln!(f, "\n{}", phases(self))?;
        graphs(self, f)?;
        overlap(self, f)?;
        writeln!(
            f,
            "\nsteps: {}, median {}, p99 {}\n",
            self.steps.count,
            time(self.steps.median_us),
            time(self.steps.p99_us)
        )?;
        for check in &self.checks {
            writeln!(f, "{} {} ({})", if check.pass { "ok  " } else { "FAIL" }, check.name, check.detail)?;
        }
        Ok(())
    }
}

/// How steps ran whose layers are recorded as CUDA graphs; and where that was not taken for granted, why others are not.
fn graphs(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (decided, layer) in report.decided.layers.iter().zip(&report.layers) {
        match &decided.no_cuda_graph {
            None => {
                let (replays, captures, of) = (layer.graph_replays, layer.graph_captures, report.steps.count);
                writeln!(
                    f,
                    "layer {}: {replays} of {of} steps replayed as a CUDA graph, {captures} recorded",
                    layer.layer
                )?;
            }
            Some(why) if why != NO_GRAPH_ASKED => {
                writeln!(f, "layer {}: no CUDA graph: {why}", layer.layer)?;
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Whose chunks overlap, and what of the way to the experts and back they did not hide; and where that was not taken for granted,
/// why those of others don't.
fn overlap(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for decided in &report.decided.layers {
        match &decided.no_overlap {
            None => writeln!(f, "layer {}: chunks overlap where a step has several", decided.layer)?,
            Some(why) if why != NO_OVERLAP_ASKED => writeln!(f, "layer {}: no overlap: {why}", decided.layer)?,
            Some(_) => {}
        }
    }
    if report.decided.layers.iter().any(|layer| layer.no_overlap.is_none())
        && let Some((rank, slowest)) =
            report.ranks.iter().enumerate().max_by(|(_, a), (_, b)| a.routed_s.total_cmp(&b.routed_s))
    {
        let experts_s: f64 =
            slowest.phases.iter().filter(|(name, _)| name == "experts").map(|(_, time_s)| time_s).sum();
        let (routed, exposed) = (time(slowest.routed_s * 1e6), time((slowest.routed_s - experts_s).max(0.0) * 1e6));
        writeln!(
            f,
            "from dispatch to sums {routed} on rank {rank}, the slowest; {exposed} of it without experts at work"
        )?;
    }
    Ok(())
}

fn layers(report: &RunReport) -> Table {
    let mut table = new_table(&[
        "layer",
        "quant",
        "activation",
        "travels as",
        "combine",
        "chunks",
        "rows",
        "rows/expert min·max",
        "saturated",
        "zeroed",
    ]);
    for (decided, layer) in report.decided.layers.iter().zip(&report.layers) {
        let rows = &layer.rows_per_expert;
        let range = format!("{}·{}", rows.iter().min().unwrap_or(&0), rows.iter().max().unwrap_or(&0));
        table.add_row(vec![
            layer.layer.to_string(),
            decided.quant.clone(),
            decided.activation.clone(),
            match decided.levels.as_str() {
                "two" => format!("{} over {} in two levels", decided.payload, decided.transport),
                _ => format!("{} over {}", decided.payload, decided.transport),
            },
            format!("{} {}", decided.combine, decided.combine_dtype),
            layer.chunks.to_string(),
            rows.iter().sum::<u64>().to_string(),
            range,
            (layer.fc1_input.num_saturated + layer.fc2_input.num_saturated).to_string(),
            (layer.fc1_input.num_zeroed + layer.fc2_input.num_zeroed).to_string(),
        ]);
    }
    align_right(&mut table, &[5, 6, 7, 8, 9]);
    table
}

fn ranks(report: &RunReport) -> Table {
    let mut table = new_table(&[
        "rank",
        "host",
        "tokens",
        "experts read",
        "GB/s",
        "replicated",
        "weights",
        "buffers ≤",
        "peak memory",
        "tokens in",
        "tokens out",
        "sent",
    ]);
    for rank in &report.ranks {
        table.add_row(vec![
            rank.rank.to_string(),
            rank.host.clone(),
            rank.num_tokens.to_string(),
            bytes(rank.bytes_read.experts),
            rate(rank.bytes_read.experts, rank.load_experts_s),
            bytes(rank.bytes_read.replicated),
            bytes(rank.weight_bytes),
            bytes(rank.planned_bytes),
            bytes(rank.peak_rss_bytes),
            rank.rows_received.to_string(),
            rank.rows_sent.to_string(),
            bytes(rank.dispatch_bytes_sent),
        ]);
    }
    align_right(&mut table, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    table
}

/// GB/s, of 10^9 bytes.
fn rate(num_bytes: u64, seconds: f64) -> String {
    if seconds > 0.0 { format!("{:.2}", num_bytes as f64 / seconds / 1e9) } else { "-".to_owned() }
}

/// What all ranks sent, by kind of link.
fn links(report: &RunReport) -> String {
    let mut sum = LinkBytes::default();
    report.ranks.iter().for_each(|rank| sum += rank.links);
    let (nodes, steps) = (report.decided.num_nodes, report.steps.count);
    format!(
        "between {nodes} nodes: dispatch {}, combine {}; within them: dispatch {}, combine {} (all ranks, {steps} step{})",
        bytes(sum.dispatch_scale_out_bytes),
        bytes(sum.combine_scale_out_bytes),
        bytes(sum.dispatch_scale_up_bytes),
        bytes(sum.combine_scale_up_bytes),
        if steps == 1 { "" } else { "s" },
    )
}

/// Shapes and their tactics, with what the chosen one and the untuned one take on the slowest rank.
fn tactics(report: &RunReport) -> Table {
    let mut table =
        new_table(&["tuned", "layers", "rows/expert ≤", "tactic", "slowest rank", "untuned", "dropped", "timed"]);
    for tuned in &report.decided.tactics {
        let us = |name: &str| {
            let took = tuned.slowest_us.iter().find(|(known, _)| *known == name);
            took.and_then(|(_, us)| *us).map_or_else(|| "-".to_owned(), time)
        };
        let untuned = tuned.slowest_us.first().map_or("", |(name, _)| name);
        table.add_row(vec![
            tuned.shape.clone(),
            tuned.layers.len().to_string(),
            tuned.rows.to_string(),
            tuned.tactic.to_owned(),
            us(tuned.tactic),
            us(untuned),
            tuned.dropped.len().to_string(),
            match tuned.timed_by {
                TimedBy::ThisSession => "now",
                TimedBy::AnEarlierSession => "before",
            }
            .to_owned(),
        ]);
    }
    align_right(&mut table, &[1, 2, 4, 5, 6]);
    table
}

fn phases(report: &RunReport) -> Table {
    let names: Vec<&str> = report.phases.iter().map(|(name, _)| name.as_str()).collect();
    let mut table = new_table(&names);
    table.add_row(report.phases.iter().map(|(_, time_s)| time(time_s * 1e6)));
    for column in 0..names.len() {
        align_right(&mut table, &[column]);
    }
    table
}

/// A line under the header and nothing else: many rows stay readable.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// An empty table in the style of all of them.
#[must_use]
pub fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header);
    table
}

fn align_right(table: &mut Table, columns: &[usize]) {
    for &column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Bytes in the largest unit that keeps three digits.
#[must_use]
pub fn bytes(count: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, size)| count >= *size) {
        Some((unit, size)) => format!("{:.1} {unit}", count as f64 / *size as f64),
        None => format!("{count} B"),
    }
}

/// Microseconds in a unit that reads well.
#[must_use]
pub fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.2} s", us / 1e6),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us => format!("{us:.0} us"),
    }
}
