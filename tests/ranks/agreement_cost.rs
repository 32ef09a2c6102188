//! What agreement costs over MPI: exchanges and bytes as `docs/agreement-cost.md` models them, and time.

use std::path::Path;

use serde_json::Value;

use crate::support::launch::mpirun;
use crate::support::made::S;
use crate::support::report::Report;
use crate::support::run::{Run, Work};

fn bench(ranks: usize) -> Report {
    let outcome = mpirun(ranks).args(["bench", "--agreement", "--repeats=15", "--json"]).run().expect_code(0);
    Report(serde_json::from_str(&outcome.stdout).expect("one JSON object from one rank"))
}

fn rows(report: &Report) -> &Vec<Value> {
    report.at("/rows").as_array().expect("rows is a list")
}

/// The fastest of the repeats, since other tests run beside this one; docs/agreement-cost.md has medians of a quiet machine.
#[test]
fn agreement_of_four_ranks_takes_less_than_50_ms() {
    let report = bench(4);
    assert_eq!(report.count("/num_ranks"), 4);
    let fastest_us = report.at("/session_min_us").as_f64().expect("a time");
    assert!(fastest_us > 0.0 && fastest_us < 50_000.0, "{fastest_us} us: {}", report.0);
}

#[test]
fn what_is_exchanged_is_what_the_model_says() {
    for ranks in [1, 3] {
        let report = bench(ranks);
        let modelled = rows(&report).iter().filter(|row| !row["predicted"].is_null());
        assert_eq!(modelled.clone().count(), 8, "{}", report.0);
        for row in modelled {
            assert_eq!(row["counted"], row["predicted"], "{ranks} ranks: {row}");
        }
        let of = |what: &str| rows(&report).iter().find(|row| row["what"] == what).expect("a row of this name");
        let [tagged, bare] = ["a step's sizes with its tag", "a step's sizes alone"].map(of);
        assert_eq!(
            tagged["counted"]["collectives"], bare["counted"]["collectives"],
            "the tag has a message of its own"
        );
    }
}

/// A step of one layer in one chunk: its barrier, sizes with the tag, tokens a rank, tokens, rows. Nothing else.
#[test]
fn a_step_has_no_exchange_for_its_tag() {
    let work = Work::new();
    let s = S::new(4, 32, 32);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let run = |steps| Run::new(&work, Path::new(&checkpoint), &s.tokens(8, 1.0)).ranks(2).steps(steps).succeed().report;
    assert_eq!(run(3).by_rank("step_collectives"), [3 * 5, 3 * 5]);
}
