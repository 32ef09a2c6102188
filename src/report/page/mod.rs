//! The report as one page for people: no script, no font, no picture from elsewhere, so that it opens on any machine and can be
//! mailed. What a run's names and numbers put into it is escaped by [`maud`].
//!
//! Numbers are drawn as they stand in the report, rounded only where a unit says so; what is too much to draw is said.

mod links;
mod rows;
mod scale;
mod tables;
mod times;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::table::time;
use super::{Check, RunReport};

/// Nothing may be fetched from anywhere, whatever stands in the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

const STYLE: &str = include_str!("page.css");

/// The page of a run.
#[must_use]
pub fn page(report: &RunReport) -> String {
    let title = format!("{} · {} ranks · Lockstep", report.decided.deployment, report.world.num_ranks);
    let body = html! {
        header {
            p.muted { "Lockstep run" }
            h1 { (report.decided.deployment) }
            (facts(report))
            (verdict(report))
        }
        main {
            (tables::layers(report))
            (rows::section(report))
            (times::section(report))
            (links::section(report))
            (tables::evidence(report))
            (tables::ranks(report))
            (agreement(report))
        }
        footer { "Written by lockstep " (env!("CARGO_PKG_VERSION")) "; the JSON report of the same run has every number." }
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// What a reader looks for first.
fn facts(report: &RunReport) -> Markup {
    let decided = &report.decided;
    let num_hosts = hosts(report).len();
    let num_tokens: u64 = report.ranks.iter().map(|rank| rank.num_tokens).sum();
    let facts = [
        ("ranks", format!("{} on {}", report.world.num_ranks, counted(num_hosts, "host"))),
        ("kernels", format!("{} ({})", decided.technique, decided.isa)),
        ("layers", format!("{}, {}", counted(report.layers.len(), "layer"), part(&decided.part))),
        ("tokens", format!("{} a step", grouped(num_tokens))),
        (
            "steps",
            format!(
                "{}, median {}, p99 {}",
                report.steps.count,
                time(report.steps.median_us),
                time(report.steps.p99_us)
            ),
        ),
    ];
    html! {
        dl.facts {
            @for (name, value) in &facts {
                div { dt { (name) } dd { (value) } }
            }
        }
    }
}

fn part(part: &str) -> &str {
    match part {
        "block" => "whole blocks",
        "routed" => "routed experts",
        "shared" => "shared experts",
        other => other,
    }
}

/// What was checked, and whether it holds.
fn verdict(report: &RunReport) -> Markup {
    let failed = report.checks.iter().filter(|check| !check.pass).count();
    let summary = match failed {
        0 => "Every check passed".to_owned(),
        failed => format!("{failed} of {} checks FAILED", report.checks.len()),
    };
    let item = |Check { name, pass, detail }: &Check| {
        html! {
            li.check.bad[!pass] {
                span.mark { @if *pass { "ok" } @else { "FAIL" } }
                span { (name) " " span.muted { (detail) } }
            }
        }
    };
    html! {
        section #checks {
            h2.bad[failed > 0] { (summary) }
            ul.checks { @for check in &report.checks { (item(check)) } }
        }
    }
}

/// The digests, whole: two runs are compared by them.
fn agreement(report: &RunReport) -> Markup {
    html! {
        section #agreement {
            h2 { "What all ranks agreed on" }
            dl.digests {
                dt { "selection" }
                dd { code { (report.decided.selection) } span.muted { " what runs, and all it follows from; " code { "lockstep resolve" } " prints the same" } }
                dt { "session" }
                dd { code { (report.decided.session) } span.muted { " that, and everything else that decides what is computed or exchanged; " code { "run -v" } " lists its fields" } }
            }
        }
    }
}

/// Every host once, in the order of its first rank.
fn hosts(report: &RunReport) -> Vec<&str> {
    let mut hosts: Vec<&str> = Vec::new();
    for rank in &report.ranks {
        if !hosts.contains(&rank.host.as_str()) {
            hosts.push(&rank.host);
        }
    }
    hosts
}

/// `4,096`
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 layer`, `2 layers`
fn counted(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", grouped(number as u64))
}

#[cfg(test)]
mod tests;
