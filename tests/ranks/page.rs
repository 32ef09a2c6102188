//! The report as a page: what a browser draws of a run, beside the JSON report of the same run.

use std::path::Path;

use serde_json::Value;

use crate::support::browser::{Scheme, seen};
use crate::support::fixtures;
use crate::support::launch::mpirun;
use crate::support::report::Report;
use crate::support::run::Work;

const SCRIPT: &str = include_str!("support/seen.js");

/// WCAG's least contrast of text.
const LEAST_CONTRAST: f64 = 4.5;

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// The first number of a text such as `1,234 rows`.
fn count(text: &str) -> u64 {
    let digits: String = text.chars().take_while(|c| c.is_ascii_digit() || *c == ',').filter(|c| *c != ',').collect();
    digits.parse().unwrap_or_else(|_| panic!("no count: {text}"))
}

/// `12.34 ms` in seconds, and half of what its last digit is worth.
fn seconds(text: &str) -> (f64, f64) {
    let (value, unit) = text.split_once(' ').unwrap_or_else(|| panic!("no time: {text}"));
    let unit = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)].into_iter().find(|(name, _)| *name == unit).expect("a unit").1;
    let digits = value.split_once('.').map_or(0, |(_, digits)| digits.len());
    let rounding = 0.51 * unit / 10f64.powi(i32::try_from(digits).expect("few"));
    (value.parse::<f64>().expect("a number") * unit, rounding)
}

/// `1.5 KiB` in bytes, and half of what its last digit is worth.
fn bytes(text: &str) -> (f64, f64) {
    let (value, unit) = text.split_once(' ').unwrap_or_else(|| panic!("no bytes: {text}"));
    let units = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let unit = f64::from(1u32 << units.into_iter().find(|(name, _)| *name == unit).expect("a unit").1);
    (value.parse::<f64>().expect("a number") * unit, if unit > 1.0 { 0.051 * unit } else { 0.0 })
}

#[track_caller]
fn assert_near(what: &str, (drawn, within): (f64, f64), wanted: f64) {
    assert!((drawn - wanted).abs() <= within, "{what}: {drawn} is drawn, the report says {wanted}");
}

/// Every expert's rows on its rank, the same number the same shade, more rows more contrast to the ground.
fn check_rows(seen: &Value, report: &Report) {
    let layers = list(&seen["layers"]);
    assert_eq!(layers.len(), list(report.at("/layers")).len());
    for (position, layer) in layers.iter().enumerate() {
        let strips = list(&layer["strips"]);
        assert_eq!(strips.len(), report.num_ranks());
        let mut shades: Vec<(u64, f64)> = Vec::new();
        for (rank, strip) in strips.iter().enumerate() {
            assert_eq!(strip["rank"], format!("rank {rank}"));
            let share = report.at(&format!("/ranks/{rank}/layers/{position}"));
            let wanted: Vec<u64> =
                list(&share["rows_per_expert"]).iter().map(|rows| rows.as_u64().expect("rows")).collect();
            assert_eq!(count(text(&strip["sum"])), wanted.iter().sum::<u64>(), "layer {position}, rank {rank}");
            let cells = list(&strip["pieces"]);
            assert_eq!(cells.len(), wanted.len());
            for (at, (cell, rows)) in cells.iter().zip(wanted).enumerate() {
                let expert = share["first_expert"].as_u64().expect("an expert") + at as u64;
                assert_eq!(text(&cell["title"]), format!("expert {expert}: {rows} rows"));
                assert_eq!(cell["label"], rows.to_string(), "few experts have their rows written on them");
                shades.push((rows, (number(&cell["fill"]) - number(&seen["ground"])).abs()));
            }
        }
        shades.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        for pair in shades.windows(2).filter(|pair| pair[0].0 > 0) {
            let [(fewer, faint), (more, strong)] = [pair[0], pair[1]];
            assert!(strong >= faint && (fewer < more || strong == faint), "{fewer} and {more} rows: {faint}, {strong}");
        }
        assert!(shades[0].1 < shades[shades.len() - 1].1, "all cells look alike");
    }
}

/// Widths and totals of bars: phases of steps, then loading.
fn check_times(seen: &Value, report: &Report) {
    let phases_of = |rank: usize, is_load: bool| -> Vec<(String, f64)> {
        let phases = list(report.at(&format!("/ranks/{rank}/phases"))).iter();
        let phases = phases.map(|phase| (text(&phase[0]).to_owned(), number(&phase[1])));
        phases.filter(|(name, _)| (name == "load") == is_load).collect()
    };
    let sum = |phases: &[(String, f64)]| phases.iter().map(|(_, time_s)| time_s).sum::<f64>();
    let figures = list(&seen["bars"]);
    assert_eq!(figures.len(), 2);
    for (figure, is_load) in figures.iter().zip([false, true]) {
        let longest = (0..report.num_ranks()).map(|rank| sum(&phases_of(rank, is_load))).fold(0.0, f64::max);
        for (rank, bar) in list(figure).iter().enumerate() {
            let phases = phases_of(rank, is_load);
            assert_near("a rank's time", seconds(text(&bar["sum"])), sum(&phases));
            assert_eq!(list(&bar["pieces"]).len(), phases.len());
            let mut left = 0.0;
            for (piece, (name, time_s)) in list(&bar["pieces"]).iter().zip(&phases) {
                let (drawn, time) = text(&piece["title"]).split_once(": ").expect("a phase and its time");
                assert_eq!(drawn, name);
                assert_near(name, seconds(time), *time_s);
                assert_near(name, (number(&piece["share"]), 2e-3), time_s / longest);
                assert_near(name, (number(&piece["left"]), 2e-3), left / longest);
                left += time_s;
            }
        }
    }
}

fn check_links(seen: &Value, report: &Report) {
    let rows = list(&seen["links"]);
    assert_eq!(rows.len(), report.num_ranks());
    for (from, row) in rows.iter().enumerate() {
        let sent = list(report.at(&format!("/ranks/{from}/bytes_to")));
        assert_eq!(list(row).len(), sent.len());
        for (cell, sent) in list(row).iter().zip(sent) {
            assert_near("bytes", bytes(text(cell)), number(sent));
        }
        let others: u64 =
            sent.iter().enumerate().filter(|(to, _)| *to != from).map(|(_, n)| n.as_u64().expect("bytes")).sum();
        assert_eq!(report.count(&format!("/ranks/{from}/dispatch_bytes_sent")), others);
    }
}

/// What ran: verdict, digests, evidence and ranks.
fn check_texts(seen: &Value, report: &Report) {
    assert_eq!(seen["title"], *report.at("/decided/deployment"));
    assert_eq!(seen["verdict"], "Every check passed");
    for (drawn, check) in list(&seen["checks"]).iter().zip(list(report.at("/checks"))) {
        assert_eq!(drawn[0], "ok");
        assert!(text(&drawn[1]).starts_with(text(&check["name"])) && text(&drawn[1]).contains(text(&check["detail"])));
    }
    assert_eq!(seen["digests"], serde_json::json!([report.at("/decided/selection"), report.at("/decided/session")]));
    for rank in 0..report.num_ranks() {
        let launches = list(report.at(&format!("/ranks/{rank}/launches")));
        let name = rank.to_string();
        let lines: Vec<&Value> = list(&seen["evidence"]).iter().filter(|line| text(&line[0]) == name).collect();
        let drawn: u64 = lines.iter().map(|line| count(text(&line[5]))).sum();
        let wanted: u64 = launches.iter().map(|launch| launch["rows"].as_u64().expect("rows")).sum();
        assert_eq!(drawn, wanted, "rows of rank {rank}");
        let ran =
            |line: &&Value| launches.iter().any(|launch| line[1] == launch["part"] && line[2] == launch["identity"]);
        assert!(!lines.is_empty() && lines.iter().all(ran), "{lines:?}");
        let line = &seen["ranks"][rank];
        assert_eq!(line[1], *report.at(&format!("/ranks/{rank}/host")));
        assert_eq!(count(text(&line[4])), report.count(&format!("/ranks/{rank}/rows_received")));
    }
}

/// A run of four ranks over every layer of a fixture, as JSON and as a page.
fn run(work: &Work) -> (Report, std::path::PathBuf) {
    let fixture = fixtures::named("k3-tiny");
    let input = format!("{}:{}", fixture.layers[0].file.display(), fixture.layers[0].tensor("x"));
    let (json, page) = (work.path("report.json"), work.path("report.html"));
    let path = |path: &Path| path.display().to_string();
    let words = [
        ["--checkpoint".to_owned(), path(&fixtures::checkpoint(fixture.name))],
        ["--input".to_owned(), input],
        ["--output".to_owned(), path(&work.path("output"))],
        ["--report".to_owned(), path(&json)],
        ["--report".to_owned(), path(&page)],
        ["--steps".to_owned(), "2".to_owned()],
    ];
    mpirun(4).args(["run"]).args(words.into_iter().flatten()).run().expect_code(0);
    (Report::read(&json), page)
}

#[test]
fn a_browser_draws_the_reports_numbers_in_light_and_dark() {
    let work = Work::new();
    let (report, page) = run(&work);
    for scheme in [Scheme::Light, Scheme::Dark] {
        let Some(seen) = seen(&page, scheme, SCRIPT) else { return };
        assert_eq!(seen["isDark"], scheme == Scheme::Dark);
        assert_eq!(number(&seen["ground"]) < 0.2, scheme == Scheme::Dark, "{}", seen["ground"]);
        assert!(number(&seen["worst"]["contrast"]) >= LEAST_CONTRAST, "{scheme:?}: {}", seen["worst"]);
        assert_eq!(seen["fetched"], serde_json::json!([]), "the page is whole");
        assert_eq!(seen["overflow"], 0, "nothing is wider than the page");
        check_rows(&seen, &report);
        check_times(&seen, &report);
        check_links(&seen, &report);
        check_texts(&seen, &report);
    }
}

/// Each report appears whole or not at all, and what can't be written is said.
#[test]
fn a_page_that_cannot_be_written_ends_the_run() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-qwen3-tiny");
    let layer = &fixture.layers[0];
    let page = work.path("missing").join("report.html");
    let words = [
        format!("--checkpoint={}", fixtures::checkpoint(fixture.name).display()),
        format!("--layers={}", layer.layer),
        format!("--input={}:{}", layer.file.display(), layer.tensor("x")),
        format!("--output={}", work.path("output").display()),
        format!("--report={}", page.display()),
    ];
    let outcome = mpirun(2).args(["run"]).args(words).run().fails_clearly(2, &[&page.display().to_string()]);
    assert!(!page.exists(), "{}", outcome.printed());
}
