//! The bench of expert computation on CPUs, and which options go with which bench.

use clap::Parser;
use clap::error::ErrorKind;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: BenchArgs,
}

fn bench(line: &str) -> Result<BenchReport, BenchError> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    run_reading(&Line::try_parse_from(words).unwrap().args, 1 << 20)
}

#[test]
fn figures_follow_from_the_times() {
    for mode in ["bf16", "quantised"] {
        let line =
            format!("--hidden 64 --intermediate 48 --experts 2 --rows-per-expert 3,1 --repeats 3 --activations {mode}");
        let report = bench(&line).unwrap();
        assert_eq!(report.weight_bytes, 2 * 3 * (64 * 48 / 2 + 64 * 48 / 16));
        assert_eq!(report.rows.iter().map(|row| row.rows_per_expert).collect::<Vec<_>>(), [3, 1]);
        for row in &report.rows {
            let flops = 2.0 * 3.0 * 64.0 * 48.0 * 2.0 * row.rows_per_expert as f64;
            let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 1e-9;
            assert!(near(row.gflops * row.median_us * 1e3, flops), "{row:?}");
            assert!(near(row.packed_gbyte_per_s * row.median_us * 1e3, report.weight_bytes as f64), "{row:?}");
            let by_memory = report.weight_bytes as f64 / report.read_gbyte_per_s / 1e3;
            let by_flops = flops / report.fma_gflops / 1e3;
            assert!(near(row.floor_us, by_memory.max(by_flops)), "{row:?}");
            assert!(near(row.floor_share, row.bandwidth_share.max(row.peak_share)), "{row:?}");
            assert!(row.min_us > 0.0 && row.min_us <= row.median_us, "{row:?}");
        }
        let text = report.to_string();
        for part in ["floor = max(bytes / read, flops / peak)", "of peak", "rows/expert", &report.implementation] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][1]["rows_per_expert"], 1);
        assert_eq!(json["activations"], mode);
    }
}

#[test]
fn a_picture_of_a_cpu_has_its_times_and_floors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.svg");
    let line = format!("--hidden 64 --intermediate 48 --rows-per-expert 3,1 --repeats 1 --plot {}", path.display());
    let report = bench(&line).unwrap();
    let args = Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).unwrap().args;
    draw(&args, || report.plot()).unwrap();
    let plot = report.plot();
    let times: Vec<_> = plot.curves[0].points.iter().map(|point| (point.rows, point.us)).collect();
    assert_eq!(times, [(1, report.rows[1].median_us), (3, report.rows[0].median_us)]);
    assert_eq!(plot.floors.len(), 2);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), plot.svg());
    let nowhere = BenchArgs { plot: Some(dir.path().join("not/there.svg")), ..args };
    assert_eq!(draw(&nowhere, || report.plot()).unwrap_err().exit(), Exit::BadInput);
}

#[test]
fn tuning_times_every_tactic_and_keeps_one() {
    let line = "--hidden 64 --intermediate 48 --experts 2 --rows-per-expert 3,1 --repeats 1";
    let untuned = bench(line).unwrap();
    assert!(untuned.rows.iter().all(|row| row.tactics_us.is_empty()));
    let first = untuned.rows[0].tactic;
    assert!(!untuned.to_string().contains("tactic"), "{untuned}");
    let tuned = bench(&format!("{line} --tuning on")).unwrap();
    for row in &tuned.rows {
        let took = |name| row.tactics_us.iter().find(|(known, _)| *known == name).expect("it was timed").1;
        assert!(row.tactics_us.len() > 1 && row.tactics_us.iter().all(|(_, us)| *us > 0.0), "{row:?}");
        assert!(took(row.tactic) <= took(first), "{row:?}");
    }
    assert!(tuned.to_string().contains("tactic"), "{tuned}");
    assert!(bench(&format!("{line} --tuning on --backend reference")).is_ok(), "a backend without a choice");
    assert!(Line::try_parse_from(["bench", "--geometry", "kimi-k3", "--tuning", "yes"]).is_err());
}

#[test]
fn both_backends_and_all_geometries_are_known() {
    let reference = bench("--hidden 32 --intermediate 16 --rows-per-expert 2 --repeats 1 --backend reference").unwrap();
    assert_eq!(reference.implementation, "lockstep.reference.grouped_gemm.w4a16_nvfp4");
    for (name, widths) in [("kimi-k3", (3584, 3072)), ("deepseek-v3", (7168, 2048)), ("qwen3-235b", (4096, 1536))] {
        let args = Line::try_parse_from(["bench", "--geometry", name]).unwrap().args;
        let spec = spec(&args).unwrap();
        assert_eq!((spec.hidden, spec.intermediate), widths, "{name}");
    }
}

#[test]
fn nonsense_is_refused_with_its_option() {
    for (line, message) in [
        ("--hidden 64 --intermediate 48 --repeats 0", "--repeats is 0; nothing would be timed"),
        ("--hidden 64 --intermediate 48 --rows-per-expert 1,0", "--rows-per-expert is 0; nothing would be timed"),
        ("--hidden 64 --intermediate 48 --experts 0", "--experts is 0; nothing would be timed"),
        (
            "--hidden 64 --intermediate 48 --rows one-hot",
            "--rows has a form for GPUs alone, and simd runs on CPUs: give --backend wgmma or mma_sync",
        ),
        (
            "--hidden 64 --intermediate 48 --counts f.json",
            "--counts is for GPUs alone, and simd runs on CPUs: give --backend wgmma or mma_sync",
        ),
    ] {
        let error = bench(line).unwrap_err();
        assert_eq!((error.to_string().as_str(), error.exit()), (message, Exit::BadInput));
    }
    let error = bench("--hidden 72 --intermediate 48").unwrap_err();
    assert_eq!(error.exit(), Exit::BadInput);
    for line in [&["bench"][..], &["bench", "--hidden", "64"], &["bench", "--geometry", "gpt"]] {
        assert!(Line::try_parse_from(line).is_err(), "{line:?}");
    }
}

#[test]
fn options_that_would_not_be_read_are_refused() {
    let experts = "--hidden=8 --intermediate=8 --experts=2 --rows-per-expert=1 --counts=f --tuning=on \
                   --batch-invariant --alone";
    let modes = ["--agreement", "--travel --geometry=kimi-k3", "--load=k3", "--layer=k3"];
    let others = [
        "--backend=wgmma --isa=avx2 --threads=2 --activations=bf16 --rows=one-hot --cache-dir=d --plot=f",
        "--backend=wgmma --isa=avx2 --threads=2 --activations=bf16",
        "--activations=bf16 --rows=one-hot --geometry=kimi-k3 --plot=f",
        "--isa=avx2 --threads=2 --rows=one-hot --geometry=kimi-k3 --plot=f",
    ];
    let parse = |line: &str| Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace()));
    for (mode, others) in modes.iter().zip(others) {
        assert!(parse(&format!("{mode} --repeats=2 --json")).is_ok(), "{mode}");
        for option in experts.split_whitespace().chain(others.split_whitespace()) {
            let kind = parse(&format!("{mode} {option}")).err().map(|error| error.kind());
            assert_eq!(kind, Some(ErrorKind::ArgumentConflict), "{mode} {option}");
        }
        for other in modes.iter().filter(|other| *other != mode) {
            assert!(parse(&format!("{mode} {other}")).is_err(), "{mode} {other}");
        }
    }
}
