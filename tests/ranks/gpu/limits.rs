//! Much, and for long: rows beyond 2^31 elements, and thousands of steps in memory that stays as it is.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::{assert_answers, with_exact_rows};
use crate::support::directed;
use crate::support::disturb::Running;
use crate::support::gpu::{GPU_BACKENDS, job_with_cache, on_gpus};
use crate::support::launch::alone;
use crate::support::made::{Choice, S, S_ANSWER};
use crate::support::run::{Run, Work, word};

/// Case A4 (iii): row 299,594 of 7168 values is the first beyond 2^31 elements.
const NUM_TOKENS: usize = 300_000;
const HIDDEN: usize = 7168;

/// Writes `x` BF16 `[NUM_TOKENS, HIDDEN]` with 1 in the first column, row by row: it would not fit twice in memory.
fn write_input(path: &Path) {
    let num_bytes = NUM_TOKENS * HIDDEN * 2;
    let header =
        format!(r#"{{"x":{{"dtype":"BF16","shape":[{NUM_TOKENS},{HIDDEN}],"data_offsets":[0,{num_bytes}]}}}}"#);
    let header = format!("{header:<len$}", len = header.len().next_multiple_of(8));
    let mut file = BufWriter::with_capacity(1 << 24, File::create(path).expect("created"));
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
    file.write_all(header.as_bytes()).expect("written");
    let mut row = vec![0; HIDDEN * 2];
    row[..2].copy_from_slice(&half::bf16::ONE.to_le_bytes());
    (0..NUM_TOKENS).for_each(|_| file.write_all(&row).expect("written"));
    file.flush().expect("written");
}

/// Rows of the only tensor of a file, BF16 of `HIDDEN` columns.
fn rows(path: &Path, wanted: &[usize]) -> Vec<Vec<f32>> {
    let mut file = File::open(path).expect("an output");
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix).expect("a length");
    let start = 8 + u64::from_le_bytes(prefix);
    let read = |&row: &usize| {
        let mut bytes = vec![0; HIDDEN * 2];
        file.seek(SeekFrom::Start(start + (row * HIDDEN * 2) as u64)).expect("in the file");
        file.read_exact(&mut bytes).expect("a row");
        bytes.chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
    };
    wanted.iter().map(read).collect()
}

fn a4_past_2_31_elements(backend: &str) {
    let work = Work::new();
    let s = S::new(4, HIDDEN, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let (input, output) = (work.path("input.safetensors"), work.path("output.safetensors"));
    write_input(&input);
    let choice = work.tensors("choice", &Choice::single(vec![0; NUM_TOKENS]).tensors());
    let job = alone().args([
        "run".to_owned(),
        format!("--checkpoint={}", word(&checkpoint)),
        format!("--input={}", word(&input)),
        format!("--topk={}", word(&choice)),
        format!("--output={}", word(&output)),
        format!("--num-max-tokens-per-rank={NUM_TOKENS}"),
        "--part=routed".to_owned(),
        "--activation=situ:4,25".to_owned(),
        "--activations=bf16".to_owned(),
        "--set=timeouts.step_s=200".to_owned(),
        format!("--backend={backend}"),
    ]);
    job_with_cache(job).without_env("LOCKSTEP_THREADS").run().expect_code(0);
    let wanted = [0, 299_593, 299_594, 299_999];
    for (row, values) in wanted.iter().zip(rows(&output, &wanted)) {
        assert_eq!(f64::from(values[0]), S_ANSWER, "{backend}: row {row}");
        assert!(values[1..].iter().all(|value| *value == 0.0), "{backend}: row {row} is not 0 elsewhere");
    }
}

#[test]
#[ignore = "needs a GPU, NVRTC, 70 GB of memory and 9 GB of disk"]
fn one_gpu_alone_a4_past_2_31_elements_mma_sync() {
    a4_past_2_31_elements(GPU_BACKENDS[0]);
}

#[test]
#[ignore = "needs a GPU, NVRTC, 70 GB of memory and 9 GB of disk"]
fn one_gpu_alone_a4_past_2_31_elements_wgmma() {
    a4_past_2_31_elements(GPU_BACKENDS[1]);
}

/// Memory in use on all GPUs, in MiB, while a job runs; empty where `nvidia-smi` is not to be had.
fn memory_used(running: &Running) -> Vec<u64> {
    let mut seen = Vec::new();
    while !running.is_over() {
        let smi =
            Command::new("nvidia-smi").args(["--query-gpu=memory.used", "--format=csv,noheader,nounits"]).output();
        let Ok(smi) = smi else { return seen };
        let text = String::from_utf8_lossy(&smi.stdout).into_owned();
        seen.push(text.lines().filter_map(|line| line.trim().parse::<u64>().ok()).sum());
        thread::sleep(Duration::from_millis(200));
    }
    seen
}

/// Case A3 (iii): 5,000 steps that alternate, three layers standing for three kinds of step. Run it alone: others' memory
/// counts as well.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL, and nobody else on them"]
fn two_gpus_alone_a3_alternating_steps() {
    let steps = 5000;
    let work = Work::new();
    let s = S::new(3, 128, 128).layers(3);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let choices = directed::alternating_steps(8, 2, 2);

    let run = Run::new(&work, &checkpoint, &s.tokens(8, 1.0)).choice_tensors(&choices).ranks(2).split(&[4, 4]);
    let run = with_exact_rows(&on_gpus(&run, "wgmma")).activations("bf16").steps(steps);
    let mut used = Vec::new();
    let done = run.succeed_while(|running| used = memory_used(running));
    assert_answers(done.layer(0), 0, "bf16", &[4.0; 8], "all to expert 2");
    assert_answers(done.layer(1), 0, "bf16", &[4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0], "only rank 0 to rank 1");
    assert_answers(done.layer(2), 0, "bf16", &[0.0; 8], "no traffic at all");
    assert_eq!(done.report.count("/steps/count"), steps as u64);
    // Loading comes first and the end last; between them memory is what it is.
    let steady = &used[used.len() / 2..used.len() * 9 / 10];
    assert!(steady.len() > 3, "too few looks at the memory: {used:?}");
    let (least, most) = (steady.iter().min(), steady.iter().max());
    assert_eq!(least, most, "device memory is not flat, in MiB: {used:?}");
}
