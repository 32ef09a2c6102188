//! Rows per expert, ranks down and their experts across; where there are several layers, first rows of each layer on each rank.

use maud::{Markup, html};

use super::links::{Axis, matrix};
use super::scale::Scale;
use super::{counted, grouped};
use crate::report::{LayerReport, RankLayer, RunReport};

/// Cells that are drawn one by one: more make a page that opens slowly.
const MAX_CELLS: usize = 30_000;
/// Cells side by side; a rank's other experts go below.
const MAX_CELLS_ACROSS: usize = 128;
/// Up to so many layers are shown at once; of more the most uneven, and the others on demand.
const MAX_OPEN: usize = 2;
/// Width of a rank's cells, in pixels.
const WIDTH: usize = 768;

/// A layer's part of the page.
struct Layer<'a> {
    joined: &'a LayerReport,
    /// Of each rank that has it.
    shares: Vec<(u32, &'a RankLayer)>,
}

impl Layer<'_> {
    fn max(&self) -> u64 {
        self.joined.rows_per_expert.iter().copied().max().unwrap_or_default()
    }

    fn sum(&self) -> u64 {
        self.joined.rows_per_expert.iter().sum()
    }

    /// The busiest expert's rows over the mean.
    fn unevenness(&self) -> f64 {
        let mean = self.sum() as f64 / self.joined.rows_per_expert.len().max(1) as f64;
        if mean > 0.0 { self.max() as f64 / mean } else { 1.0 }
    }
}

pub fn section(report: &RunReport) -> Markup {
    let layers: Vec<Layer<'_>> = report.layers.iter().map(|joined| layer(report, joined)).collect();
    let drawn = drawn(&layers);
    let num_left_out = layers.len() - drawn.len();
    let most_uneven = drawn.iter().max_by(|a, b| a.unevenness().total_cmp(&b.unevenness()));
    let most_uneven = most_uneven.map_or(0, |layer| layer.joined.layer);
    html! {
        section #rows {
            h2 { "Rows per expert" }
            p.muted {
                "A row is one token at one of its experts, counted where it was computed, over all steps. "
                "Each rank's experts lie side by side; darker is more (in the dark: brighter)."
            }
            @if layers.len() > 1 { (overview(report, &layers)) }
            @for layer in &drawn { (heat_map(layer, layers.len() <= MAX_OPEN || layer.joined.layer == most_uneven)) }
            @if num_left_out > 0 {
                p.muted #left-out {
                    "The " (drawn.len()) " most uneven layers are drawn expert by expert; the JSON report has the other "
                    (num_left_out) "."
                }
            }
        }
    }
}

fn layer<'a>(report: &'a RunReport, joined: &'a LayerReport) -> Layer<'a> {
    let of_rank = |rank: &'a crate::report::RankReport| {
        rank.layers.iter().filter(|share| share.layer == joined.layer).map(move |share| (rank.rank, share))
    };
    Layer { joined, shares: report.ranks.iter().flat_map(of_rank).collect() }
}

/// All layers, or as many of the most uneven as can be drawn, in their order.
fn drawn<'a, 'b>(layers: &'b [Layer<'a>]) -> Vec<&'b Layer<'a>> {
    let mut by_unevenness: Vec<(usize, &Layer<'a>)> = layers.iter().enumerate().collect();
    by_unevenness.sort_by(|(_, a), (_, b)| b.unevenness().total_cmp(&a.unevenness()));
    let mut left = MAX_CELLS;
    let mut chosen: Vec<(usize, &Layer<'a>)> = Vec::new();
    for (at, layer) in by_unevenness {
        let Some(rest) = left.checked_sub(layer.joined.rows_per_expert.len()) else { break };
        left = rest;
        chosen.push((at, layer));
    }
    chosen.sort_by_key(|(at, _)| *at);
    chosen.into_iter().map(|(_, layer)| layer).collect()
}

/// Layers down, ranks across.
fn overview(report: &RunReport, layers: &[Layer<'_>]) -> Markup {
    let labels = layers.iter().map(|layer| layer.joined.layer.to_string()).collect();
    let rows_of = |layer: &Layer<'_>| -> Vec<u64> {
        let mut of_ranks = vec![0; report.ranks.len()];
        for (rank, share) in &layer.shares {
            if let Some(rows) = of_ranks.get_mut(*rank as usize) {
                *rows = share.rows_per_expert.iter().sum();
            }
        }
        of_ranks
    };
    let values: Vec<Vec<u64>> = layers.iter().map(rows_of).collect();
    html! {
        h3 { "Rows of every layer on every rank" }
        (matrix("layer", Axis::new(labels), &values, &|rows| grouped(rows), "rows"))
    }
}

fn heat_map(layer: &Layer<'_>, is_open: bool) -> Markup {
    let scale = Scale::new(layer.max());
    let rows = &layer.joined.rows_per_expert;
    let busiest = rows.iter().position(|&rows| rows == layer.max()).unwrap_or_default();
    let most = layer.shares.iter().map(|(_, share)| share.rows_per_expert.len()).max().unwrap_or_default();
    let cells = Cells::of(most);
    let idle = rows.iter().filter(|&&rows| rows == 0).count();
    html! {
        details.layer open[is_open] {
            summary {
                "Layer " (layer.joined.layer) ": " (grouped(layer.sum())) " rows on " (counted(rows.len(), "expert"))
                @if layer.sum() > 0 {
                    "; expert " (busiest) " has the most, " (grouped(layer.max()))
                    " (" (format!("{:.1}", layer.unevenness())) " times the mean)"
                }
                @if idle > 0 { "; " (idle) " had none" }
            }
            (scale.legend(&grouped))
            div.strips {
                @for (rank, share) in &layer.shares { (strip(*rank, share, (&cells, scale))) }
            }
        }
    }
}

/// One rank's experts.
fn strip(rank: u32, share: &RankLayer, (cells, scale): (&Cells, Scale)) -> Markup {
    let rows = &share.rows_per_expert;
    let sum: u64 = rows.iter().sum();
    let (width, height) = (cells.across * cells.width, cells.lines(rows.len()) * cells.height);
    html! {
        div.strip {
            span.name { "rank " (rank) }
            @if rows.is_empty() {
                span.muted { "no experts" }
            } @else {
                svg.heat viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height) role="img"
                    aria-label={ "rows of rank " (rank) "'s " (counted(rows.len(), "expert")) } {
                    @for (at, &rows) in rows.iter().enumerate() {
                        (cell(cells, at, (share.first_expert + at, rows), scale))
                    }
                }
            }
            span.sum { (grouped(sum)) " rows" }
        }
    }
}

fn cell(cells: &Cells, at: usize, (expert, rows): (usize, u64), scale: Scale) -> Markup {
    let (x, y) = (at % cells.across * cells.width, at / cells.across * cells.height);
    html! {
        rect x=(x) y=(y) width=(cells.width - 1) height=(cells.height - 1) class=(scale.class(rows)) {
            title { "expert " (expert) ": " (grouped(rows)) " rows" }
        }
        @if cells.has_room_for_numbers() && grouped(rows).len() <= 5 {
            text x=(x + cells.width / 2) y=(y + cells.height / 2) class=(scale.text_class(rows)) { (grouped(rows)) }
        }
    }
}

/// How every rank's cells lie.
struct Cells {
    across: usize,
    width: usize,
    height: usize,
}

impl Cells {
    /// For ranks of which none has more than `most` experts.
    fn of(most: usize) -> Self {
        let down = most.div_ceil(MAX_CELLS_ACROSS).max(1);
        let across = most.div_ceil(down).max(1);
        let width = (WIDTH / across).clamp(6, 44);
        Self { across, width, height: if width >= 40 { 22 } else { 14 } }
    }

    fn lines(&self, num_cells: usize) -> usize {
        num_cells.div_ceil(self.across)
    }

    fn has_room_for_numbers(&self) -> bool {
        self.width >= 40
    }
}
