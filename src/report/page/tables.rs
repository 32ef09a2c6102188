//! What was decided for the layers, what every rank launched, and what every rank held.

use maud::{Markup, html};

use super::{counted, grouped};
use crate::report::table::bytes;
use crate::report::{DecidedLayer, Launch, RankReport, RunReport};

/// Longer tables are shown on demand.
const MAX_OPEN_LINES: usize = 40;

/// Layers that were decided alike share a line.
pub fn layers(report: &RunReport) -> Markup {
    let mut groups: Vec<(Vec<u32>, &DecidedLayer)> = Vec::new();
    for layer in &report.decided.layers {
        let alike = |known: &DecidedLayer| *known == DecidedLayer { layer: known.layer, ..layer.clone() };
        match groups.iter_mut().find(|(_, known)| alike(known)) {
            Some((layers, _)) => layers.push(layer.layer),
            None => groups.push((vec![layer.layer], layer)),
        }
    }
    let head = ["layers", "format", "activation", "tokens travel as", "rows come back as", "implementation", "because"];
    let line = |layers: &[u32], layer: &DecidedLayer| {
        html! {
            tr {
                th { (spans(layers)) }
                td { (layer.quant) }
                td { (layer.activation) }
                td { (layer.payload) " over " (layer.transport) @if layer.levels == "two" { " in two levels" } }
                td { (layer.combine_dtype) ", a row a " (layer.combine) }
                td { @for identity in &layer.identities { code { (identity) } " " } }
                td { (layer.why) }
            }
        }
    };
    html! {
        section #selection {
            h2 { "What was selected" }
            (table(&head, 0, html! { @for (layers, layer) in &groups { (line(layers, layer)) } }, groups.len()))
            @if !report.decided.tactics.is_empty() {
                p { "Tactics, timed on all ranks: "
                    @for tuned in &report.decided.tactics {
                        code { (tuned.tactic) } " for up to " (tuned.rows) " rows an expert of layers " (spans(&tuned.layers)) "; "
                    }
                }
            }
        }
    }
}

/// What every rank's kernels say that they computed.
pub fn evidence(report: &RunReport) -> Markup {
    let lines: Vec<(&RankReport, Ran<'_>)> =
        report.ranks.iter().flat_map(|rank| ran(rank).into_iter().map(move |ran| (rank, ran))).collect();
    let head = ["rank", "part", "implementation", "layers", "calls", "rows"];
    let body = html! {
        @for (rank, ran) in &lines {
            tr {
                th.n { (rank.rank) }
                td { (ran.part) }
                td { code { (ran.identity) } }
                td { (spans(&ran.layers)) }
                td.n { (grouped(ran.calls)) }
                td.n { (grouped(ran.rows)) }
            }
        }
    };
    html! {
        section #evidence {
            h2 { "What ran, by every rank's own count" }
            (table(&head, 2, body, lines.len()))
        }
    }
}

/// One implementation of one part on one rank.
struct Ran<'a> {
    part: &'a str,
    identity: &'a str,
    layers: Vec<u32>,
    calls: u64,
    rows: u64,
}

fn ran(rank: &RankReport) -> Vec<Ran<'_>> {
    let mut lines: Vec<Ran<'_>> = Vec::new();
    for Launch { layer, part, identity, rows, calls } in &rank.launches {
        match lines.iter_mut().find(|known| known.part == part && known.identity == identity) {
            Some(known) => {
                known.layers.push(*layer);
                known.calls += calls;
                known.rows += rows;
            }
            None => lines.push(Ran { part, identity, layers: vec![*layer], calls: *calls, rows: *rows }),
        }
    }
    lines
}

pub fn ranks(report: &RunReport) -> Markup {
    let head = [
        "rank",
        "host",
        "threads",
        "tokens",
        "tokens in",
        "tokens out",
        "sent",
        "weights",
        "buffers ≤",
        "peak memory",
        "experts read",
        "replicated read",
    ];
    let body = html! {
        @for rank in &report.ranks {
            tr {
                th.n { (rank.rank) }
                td { (rank.host) }
                td.n { (rank.num_threads) }
                @for count in [rank.num_tokens, rank.rows_received, rank.rows_sent] { td.n { (grouped(count)) } }
                @for count in [
                    rank.dispatch_bytes_sent, rank.weight_bytes, rank.planned_bytes, rank.peak_rss_bytes,
                    rank.bytes_read.experts, rank.bytes_read.replicated,
                ] { td.n { (bytes(count)) } }
            }
        }
    };
    html! {
        section #ranks {
            h2 { "Ranks" }
            (table(&head, 2, body, report.ranks.len()))
        }
    }
}

/// A table whose columns hold numbers but for those named and the first few; a long one is shown on demand.
fn table(head: &[&str], num_text: usize, body: Markup, num_lines: usize) -> Markup {
    let is_text = |at: usize| num_text == 0 || (1..=num_text).contains(&at) || head[at] == "layers";
    let table = html! {
        div.scroll {
            table {
                thead { tr { @for (at, name) in head.iter().enumerate() { th.n[!is_text(at)] { (name) } } } }
                tbody { (body) }
            }
        }
    };
    html! {
        @if num_lines <= MAX_OPEN_LINES { (table) } @else {
            details { summary { (counted(num_lines, "line")) } (table) }
        }
    }
}

/// `1–3, 5`
fn spans(layers: &[u32]) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for &layer in layers {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => spans.push((layer, layer)),
        }
    }
    let show = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}–{last}") };
    spans.iter().map(show).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_written_as_spans() {
        assert_eq!(spans(&[1, 2, 3, 5, 7, 8]), "1–3, 5, 7–8");
        assert_eq!(spans(&[]), "");
    }
}
