//! Bytes from every rank to every other, and the matrix that they are drawn as.

use maud::{Markup, html};

use super::scale::Scale;
use super::{counted, hosts};
use crate::report::RunReport;
use crate::report::table::bytes;

/// Up to so many ranks the numbers stand in the cells.
const MAX_IN_CELLS: usize = 12;
/// Up to so many rows or columns each has its own; beyond, neighbours share one.
const MAX_LINES: usize = 96;
/// Pixels of the longer side, labels excluded.
const SIDE: usize = 672;
/// Pixels for a label at the left and on top, as `504–509`.
const MARGIN: usize = 56;

/// Labels of rows, of which neighbours may be joined.
pub struct Axis {
    labels: Vec<String>,
}

impl Axis {
    pub fn new(labels: Vec<String>) -> Self {
        Self { labels }
    }

    fn ranks(num_ranks: usize) -> Self {
        Self::new((0..num_ranks).map(|rank| rank.to_string()).collect())
    }

    /// The axis with neighbours joined, and how many make one.
    fn joined(&self) -> (Vec<String>, usize) {
        let size = self.labels.len().div_ceil(MAX_LINES).max(1);
        let label = |labels: &[String]| match labels {
            [first, .., last] => format!("{first}–{last}"),
            [only] => only.clone(),
            [] => String::new(),
        };
        (self.labels.chunks(size).map(label).collect(), size)
    }
}

pub fn section(report: &RunReport) -> Markup {
    let values: Vec<Vec<u64>> = report.ranks.iter().map(|rank| rank.bytes_to.clone()).collect();
    let totals = totals(report);
    html! {
        section #links {
            h2 { "Bytes between ranks" }
            p.muted {
                "Dispatch and combine over " (counted(report.steps.count, "step"))
                ", from the rank at the left to the rank on top. What a rank has for itself does not travel."
            }
            dl.facts {
                div { dt { "between hosts" } dd { (bytes(totals.between_hosts)) } }
                div { dt { "within hosts" } dd { (bytes(totals.within_hosts)) } }
                div { dt { "did not travel" } dd { (bytes(totals.own)) } }
            }
            (matrix("from", Axis::ranks(report.ranks.len()), &values, &bytes, "bytes"))
        }
    }
}

/// Bytes by the kind of way that they take.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub between_hosts: u64,
    pub within_hosts: u64,
    pub own: u64,
}

pub fn totals(report: &RunReport) -> Totals {
    let mut totals = Totals::default();
    let known = hosts(report);
    let host_of: Vec<_> = report.ranks.iter().map(|rank| known.iter().position(|host| *host == rank.host)).collect();
    for (from, rank) in report.ranks.iter().enumerate() {
        for (to, bytes) in rank.bytes_to.iter().enumerate() {
            let way = match (from == to, host_of.get(from) == host_of.get(to)) {
                (true, _) => &mut totals.own,
                (false, true) => &mut totals.within_hosts,
                (false, false) => &mut totals.between_hosts,
            };
            *way += bytes;
        }
    }
    totals
}

/// `values[row][rank]`, ranks across: a table of numbers where few, else a drawing whose cells say theirs when pointed at.
pub fn matrix(corner: &str, rows: Axis, values: &[Vec<u64>], show: &dyn Fn(u64) -> String, what: &str) -> Markup {
    let columns = Axis::ranks(values.iter().map(Vec::len).max().unwrap_or_default());
    let (row_labels, row_size) = rows.joined();
    let (column_labels, column_size) = columns.joined();
    let sums: Vec<Vec<u64>> = values
        .chunks(row_size)
        .map(|rows| {
            let of_columns = |at: usize| {
                let span = |row: &Vec<u64>| row.iter().skip(at * column_size).take(column_size).sum::<u64>();
                rows.iter().map(span).sum()
            };
            (0..column_labels.len()).map(of_columns).collect()
        })
        .collect();
    let drawn = Drawn { corner, rows: row_labels, columns: column_labels, values: sums, what };
    if drawn.columns.len() <= MAX_IN_CELLS && drawn.rows.len() <= MAX_LINES {
        return drawn.table(show);
    }
    html! {
        (drawn.scale().legend(show))
        (drawn.svg(show))
    }
}

struct Drawn<'a> {
    corner: &'a str,
    rows: Vec<String>,
    columns: Vec<String>,
    values: Vec<Vec<u64>>,
    what: &'a str,
}

impl Drawn<'_> {
    fn scale(&self) -> Scale {
        Scale::new(self.values.iter().flatten().copied().max().unwrap_or_default())
    }

    fn table(&self, show: &dyn Fn(u64) -> String) -> Markup {
        let scale = self.scale();
        let cell = |value: u64| html! { td class={ "n " (scale.class(value)) } { (show(value)) } };
        html! {
            div.scroll {
                table.matrix {
                    thead { tr { th { (self.corner) } @for label in &self.columns { th.n { "rank " (label) } } } }
                    tbody {
                        @for (label, values) in self.rows.iter().zip(&self.values) {
                            tr { th { (label) } @for value in values { (cell(*value)) } }
                        }
                    }
                }
            }
        }
    }

    fn svg(&self, show: &dyn Fn(u64) -> String) -> Markup {
        let scale = self.scale();
        let cell_width = (SIDE / self.columns.len().max(1)).clamp(6, 36);
        let cell_height = (SIDE / self.rows.len().max(1)).clamp(6, 18);
        let (width, height) = (MARGIN + cell_width * self.columns.len(), MARGIN + cell_height * self.rows.len());
        // Labels stand where there is room for them: one every 14 pixels.
        let every = |size: usize| 14usize.div_ceil(size);
        let middle = |at: usize, size: usize| MARGIN + at * size + size / 2;
        let cell = |(y, x): (usize, usize), value: u64| {
            html! {
                rect x=(MARGIN + x * cell_width) y=(MARGIN + y * cell_height) width=(cell_width - 1) height=(cell_height - 1)
                    class=(scale.class(value)) {
                    title { (self.corner) " " (self.rows[y]) ", rank " (self.columns[x]) ": " (show(value)) }
                }
            }
        };
        html! {
            div.scroll {
                svg.matrix viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height) role="img"
                    aria-label={ (self.what) " by " (self.corner) " and rank" } {
                    @for (at, label) in self.rows.iter().enumerate().step_by(every(cell_height)) {
                        text.row x=(MARGIN - 6) y=(middle(at, cell_height)) { (label) }
                    }
                    @for (at, label) in self.columns.iter().enumerate().step_by(every(cell_width)) {
                        text.column transform={ "translate(" (middle(at, cell_width)) " " (MARGIN - 6) ") rotate(-90)" } { (label) }
                    }
                    @for (y, values) in self.values.iter().enumerate() {
                        @for (x, &value) in values.iter().enumerate() { (cell((y, x), value)) }
                    }
                }
            }
        }
    }
}
