//! Time per phase and rank, as bars of one scale.

use maud::{Markup, html};

use super::counted;
use crate::report::table::time;
use crate::report::{RankReport, RunReport};

/// What is measured outside of steps, and would make bars of steps too short to see.
const LOAD: &str = "load";
/// Colours that the style sheet has, `p0` to `p7`.
const NUM_COLOURS: usize = 8;

/// A phase with its seconds.
type Phase = (String, f64);

pub fn section(report: &RunReport) -> Markup {
    let (load, phases): (Vec<&Phase>, Vec<&Phase>) = report.phases.iter().partition(|(name, _)| name == LOAD);
    let names = |phases: &[&Phase]| -> Vec<String> { phases.iter().map(|(name, _)| name.clone()).collect() };
    let (load, phases) = (names(&load), names(&phases));
    html! {
        section #times {
            h2 { "Time per phase and rank" }
            p.muted {
                "Over " (counted(report.steps.count, "step")) " and " (counted(report.layers.len(), "layer"))
                "; dispatch and combine include waiting for other ranks, so that a rank which computes less waits more."
            }
            (bars(report, &phases))
            (summary(report, &phases))
            h3 { "Opening: reading, compiling, packing" }
            (bars(report, &load))
        }
    }
}

/// A bar a rank; the longest fills the width.
fn bars(report: &RunReport, names: &[String]) -> Markup {
    let totals: Vec<f64> = report.ranks.iter().map(|rank| seconds_of(rank, names).iter().sum()).collect();
    let longest = totals.iter().copied().fold(0.0, f64::max);
    html! {
        @if names.len() > 1 {
            ul.legend {
                @for (at, name) in names.iter().enumerate() { li { span class={ "swatch " (colour(at, names)) } {} (name) } }
            }
        }
        div.bars {
            @for (rank, total) in report.ranks.iter().zip(totals) { (bar(rank, names, (total, longest))) }
        }
    }
}

fn bar(rank: &RankReport, names: &[String], (total, longest): (f64, f64)) -> Markup {
    let percent = |seconds: f64| if longest > 0.0 { 100.0 * seconds / longest } else { 0.0 };
    let mut at = 0.0;
    let pieces: Vec<(usize, f64, f64)> = seconds_of(rank, names)
        .into_iter()
        .enumerate()
        .map(|(phase, seconds)| {
            let start = at;
            at += seconds;
            (phase, start, seconds)
        })
        .collect();
    html! {
        div.strip {
            span.name { "rank " (rank.rank) }
            svg.bar width="100%" height="14" role="img" aria-label={ "rank " (rank.rank) ": " (time(total * 1e6)) } {
                @for (phase, start, seconds) in pieces {
                    rect x=(format!("{:.3}%", percent(start))) width=(format!("{:.3}%", percent(seconds)))
                        height="14" class=(colour(phase, names)) {
                        title { (names[phase]) ": " (time(seconds * 1e6)) }
                    }
                }
            }
            span.sum { (time(total * 1e6)) }
        }
    }
}

/// A phase's class; one that stands alone needs no colour of its own.
fn colour(phase: usize, names: &[String]) -> String {
    if names.len() > 1 { format!("p{}", phase % NUM_COLOURS) } else { "px".to_owned() }
}

/// Seconds of each phase of a rank; 0 where it had none.
fn seconds_of(rank: &RankReport, names: &[String]) -> Vec<f64> {
    let of = |name: &String| rank.phases.iter().filter(|(known, _)| known == name).map(|(_, seconds)| seconds).sum();
    names.iter().map(of).collect()
}

/// Each phase over all ranks: what bars of hundreds of ranks no longer show.
fn summary(report: &RunReport, names: &[String]) -> Markup {
    let row = |phase: usize| {
        let mut of_ranks: Vec<(f64, u32)> =
            report.ranks.iter().map(|rank| (seconds_of(rank, names)[phase], rank.rank)).collect();
        of_ranks.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let cell = |at: usize, has_rank: bool| {
            let (seconds, rank) = of_ranks.get(at).copied().unwrap_or_default();
            html! { td.n { (time(seconds * 1e6)) @if has_rank { " " span.muted { "rank " (rank) } } } }
        };
        let last = of_ranks.len().saturating_sub(1);
        html! { tr { th { (names[phase]) } (cell(last, true)) (cell(of_ranks.len() / 2, false)) (cell(0, true)) } }
    };
    html! {
        div.scroll {
            table #phases {
                thead { tr { th { "phase" } th.n { "slowest" } th.n { "median" } th.n { "fastest" } } }
                tbody { @for phase in 0..names.len() { (row(phase)) } }
            }
        }
    }
}
