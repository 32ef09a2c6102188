//! What dispatch plans and touches.

use super::assert_answers;
use crate::support::made::{Choice, S};
use crate::support::report::Report;
use crate::support::run::{Run, Work};

/// S with `num_topk` of 8 experts for every token, `tokens` tokens on each of `ranks` ranks.
fn j3_run(work: &Work, (ranks, tokens, num_topk): (usize, usize, usize)) -> Report {
    let s = S::new(8, 7168, 16).topk(num_topk).unit_scales();
    let checkpoint = work.checkpoint(&s.checkpoint());
    let ids: Vec<i64> = (0..8).take(num_topk).collect();
    #[expect(clippy::cast_precision_loss, reason = "at most eight")]
    let choice = Choice::uniform(ranks * tokens, &ids, &vec![1.0 / num_topk as f32; num_topk]);
    let run = Run::new(work, &checkpoint, &s.tokens(ranks * tokens, 1.0)).choice(&choice).ranks(ranks);
    let done = run.activations("bf16").succeed();
    assert_answers(done.layer(0), 0, "bf16", &vec![1.0; ranks * tokens], &format!("R={ranks} T={tokens} k={num_topk}"));
    done.report
}

/// The plan is in the report, grows at most linearly with ranks and with top-k, and decoding touches real rows alone.
#[test]
fn j3_planned_buffers() {
    let work = Work::new();
    let planned = |shape| *j3_run(&work, shape).by_rank("planned_bytes").iter().max().expect("a rank");
    let tokens = 32;
    let (two, eight) = (planned((2, tokens, 8)), planned((8, tokens, 8)));
    let receive = |ranks: usize| (tokens * ranks * 7168 * 2) as u64;
    assert!(two >= receive(2), "R=2 plans {two} bytes, less than the tokens that arrive");
    assert!(eight <= 4 * two + two / 4, "planned bytes go from {two} to {eight} when ranks go from 2 to 8");
    // Arriving as bf16 and as f32, leaving to eight ranks, a row computed and returned for each slot: ten times at most.
    assert!(eight <= 11 * receive(8), "R=8 plans {eight} bytes for {} arriving", receive(8));
    let one_expert = planned((2, tokens, 1));
    assert!(two <= 8 * one_expert, "planned bytes go from {one_expert} to {two} when top-k goes from 1 to 8");

    let decode = j3_run(&work, (8, 1, 8));
    assert_eq!(decode.computed_rows(0), [8; 8], "a token from each rank for the one expert of each rank");
    assert_eq!(decode.rows_per_expert(0), [8; 8]);
}

/// Buffers that no machine has room for are refused on all ranks, with what is needed and what there is.
#[test]
fn j3_more_than_there_is() {
    let work = Work::new();
    let s = S::new(64, 16, 4096).topk(64).unit_scales();
    let checkpoint = work.checkpoint(&s.checkpoint());
    let run = Run::new(&work, &checkpoint, &s.tokens(2_000_000, 1.0)).ranks(2).activations("bf16");
    let run = run.key("dispatch", "num_max_tokens_per_rank", "2000000");
    run.fails_with(3, &["bytes free", "need", "chunk_tokens"]);
}
