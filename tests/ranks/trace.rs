//! What ranks did when: the trace of a run beside its report, on one clock.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::support::fixtures;
use crate::support::launch::mpirun;
use crate::support::report::Report;
use crate::support::run::Work;

const RANKS: usize = 4;

/// A rank whose process starts so late has a clock that is so far behind.
const LATE_S: f64 = 1.0;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// The events that are drawn: of each rank, in the order of their begin.
fn tracks(trace: &Value) -> BTreeMap<u64, Vec<&Value>> {
    let mut tracks: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] == "X") {
        tracks.entry(event["tid"].as_u64().expect("a track")).or_default().push(event);
    }
    for events in tracks.values_mut() {
        events.sort_by(|a, b| number(&a["ts"]).total_cmp(&number(&b["ts"])));
    }
    tracks
}

fn end(event: &Value) -> f64 {
    number(&event["ts"]) + number(&event["dur"])
}

/// Where a rank leaves an exchange before another has entered it, by more than `within_us`: tokens can't come from somebody
/// who has not begun to send them.
fn causes_after_effects(trace: &Value, within_us: f64) -> Vec<String> {
    let mut exchanges: BTreeMap<String, Vec<&Value>> = BTreeMap::new();
    for event in tracks(trace).into_values().flatten().filter(|event| event["name"] == "dispatch") {
        let args = &event["args"];
        let key = format!("step {}, layer {}, chunk {}", args["step"], args["layer"], args["chunk"]);
        exchanges.entry(key).or_default().push(event);
    }
    assert!(!exchanges.is_empty());
    let mut found = Vec::new();
    for (key, events) in exchanges {
        assert_eq!(events.len(), RANKS, "{key}");
        let last_begin = events.iter().map(|event| number(&event["ts"])).fold(f64::MIN, f64::max);
        let first_end = events.iter().map(|event| end(event)).fold(f64::MAX, f64::min);
        if first_end + within_us < last_begin {
            found.push(format!("{key}: a rank is through at {first_end} us, another begins at {last_begin} us"));
        }
    }
    found
}

/// Phases lie within their layer, layers within their step, and none before what came before it has ended.
fn check_nesting(events: &[&Value]) {
    let mut open: Vec<f64> = Vec::new();
    for event in events {
        // Begin and time are written in whole nanoseconds.
        while open.last().is_some_and(|end| *end <= number(&event["ts"]) + 0.002) {
            open.pop();
        }
        if let Some(enclosing) = open.last() {
            assert!(end(event) <= enclosing + 0.002, "{event} sticks out");
        }
        open.push(end(event));
    }
}

#[test]
fn a_trace_has_every_ranks_phases_on_one_clock() {
    let work = Work::new();
    let fixture = fixtures::named("k3-tiny");
    let (report, path) = (work.path("report.json"), work.path("trace.json"));
    let words = [
        format!("--checkpoint={}", fixtures::checkpoint(fixture.name).display()),
        format!("--input={}:{}", fixture.layers[0].file.display(), fixture.layers[0].tensor("x")),
        format!("--output={}", work.path("output").display()),
        format!("--report={}", report.display()),
        format!("--trace={}", path.display()),
        "--steps=3".to_owned(),
        "--set=dispatch.chunk_tokens=4".to_owned(),
    ];
    let fault = format!("1:init:delay={LATE_S}");
    mpirun(RANKS).args(["run"]).args(words).env("LOCKSTEP_FAULT", &fault).run().expect_code(0);
    let report = Report::read(&report);
    let mut trace = Report::read(&path).0;

    let tracks = tracks(&trace);
    assert_eq!(tracks.keys().copied().collect::<Vec<_>>(), (0..RANKS as u64).collect::<Vec<_>>());
    for (rank, events) in &tracks {
        check_nesting(events);
        for phase in report.at(&format!("/ranks/{rank}/phases")).as_array().expect("phases") {
            let of_phase = events.iter().filter(|event| event["name"] == phase[0]);
            let drawn: f64 = of_phase.map(|event| number(&event["dur"]) / 1e6).sum();
            let told = number(&phase[1]);
            assert!((drawn - told).abs() <= 0.05 * told + 1e-7, "rank {rank}, {}: {drawn} s and {told} s", phase[0]);
        }
        let sum = |name: &str, arg: &str| -> f64 {
            let of = events.iter().filter(|event| event["name"] == name && event["args"]["chunk"].is_u64());
            of.map(|event| number(&event["args"][arg])).sum()
        };
        let rows: u64 = report
            .at(&format!("/ranks/{rank}/layers"))
            .as_array()
            .expect("layers")
            .iter()
            .flat_map(|layer| layer["rows_per_expert"].as_array().expect("rows"))
            .map(|rows| rows.as_u64().expect("a count"))
            .sum();
        assert_eq!(sum("experts", "rows"), rows as f64, "rank {rank}");
        assert_eq!(sum("experts", "tokens"), report.count(&format!("/ranks/{rank}/rows_received")) as f64);
        let sent = report.count(&format!("/ranks/{rank}/dispatch_bytes_sent")) as f64;
        assert_eq!(sum("dispatch", "bytes") + sum("combine", "bytes"), sent, "rank {rank}");
    }

    let clocks = trace["otherData"]["ranks"].as_array().expect("clocks").clone();
    let within_us = 2.0 * clocks.iter().map(|clock| number(&clock["uncertainty_us"])).fold(0.0, f64::max);
    assert!(within_us < 1e6 * LATE_S / 4.0, "clocks are known to {within_us} us: {clocks:?}");
    let ahead_us = number(&clocks[1]["ahead_us_before_steps"]);
    assert!(ahead_us < -1e6 * LATE_S / 2.0, "rank 1 came late, and its clock is {ahead_us} us ahead");
    assert_eq!(causes_after_effects(&trace, within_us), Vec::<String>::new());

    // The same on each rank's own clock: effects come before causes, and the check sees it.
    for event in trace["traceEvents"].as_array_mut().expect("events") {
        if event["tid"] == 1 && event["ph"] == "X" {
            event["ts"] = (number(&event["ts"]) + ahead_us).into();
        }
    }
    assert!(!causes_after_effects(&trace, within_us).is_empty());
}

/// Asked of one rank alone it would be waited for by none: nothing starts.
#[test]
fn a_trace_is_asked_of_all_ranks_or_of_none() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-qwen3-tiny");
    let layer = &fixture.layers[0];
    let words = [
        format!("--checkpoint={}", fixtures::checkpoint(fixture.name).display()),
        format!("--layers={}", layer.layer),
        format!("--input={}:{}", layer.file.display(), layer.tensor("x")),
        format!("--output={}", work.path("output").display()),
    ];
    let job = mpirun(2).args(["run"]).args(words).arg_of(1, format!("--trace={}", work.path("trace").display()));
    job.run().fails_clearly(4, &["trace"]);
}
