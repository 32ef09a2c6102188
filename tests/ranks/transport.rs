//! What carries tokens, on hosts without GPUs: NCCL and NVLink can't be had there, which all ranks are told alike.

use crate::support::fixtures;
use crate::support::gpu::job_with_cache;
use crate::support::launch::{Job, mpirun};
use crate::support::report::Report;
use crate::support::run::Work;

/// A run of a fixture's first layer on two ranks, with `words` beside.
fn job(work: &Work, words: &[&str]) -> Job {
    let fixture = fixtures::named("modelopt-qwen3-tiny");
    let layer = &fixture.layers[0];
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let mut own = vec![
        "run".to_owned(),
        format!("--checkpoint={}", fixtures::checkpoint(fixture.name).display()),
        format!("--layers={}", layer.layer),
        format!("--input={}:{}", layer.file.display(), layer.tensor("x")),
    ];
    if !words.iter().any(|word: &String| word.starts_with("--output=")) {
        own.push(format!("--output={}", work.path("output").display()));
    }
    mpirun(2).args(own.into_iter().chain(words))
}

/// Asked for by name it is refused, with what every implementation says, by one rank for all.
#[test]
fn what_needs_gpus_is_refused_on_all_ranks_without() {
    for transport in ["nccl", "nvlink"] {
        let work = Work::new();
        let asked = format!("--transport={transport}");
        let travels = format!("travels by host; dispatch.transport is {transport} (ranks 0-1)");
        let trail = [travels.as_str(), "runs on GPUs; cluster.device is cpu"];
        job(&work, &[&asked]).run().fails_clearly(3, &trail);
        // What runs on cores alone has no GPU to go through, whatever the machine has.
        let cores = ["backend simd does not serve layer 0", trail[0], "set dispatch.transport to auto"];
        job(&work, &[&asked, "--backend=simd"]).run().fails_clearly(2, &cores);
    }
}

/// Left to choose, ranks go over the host, and the log and the report say so.
#[test]
fn auto_takes_the_host_and_says_so() {
    let work = Work::new();
    let report = work.path("report.json");
    let outcome = job(&work, &["--transport=auto", &format!("--report={}", report.display())]).run().expect_code(0);
    assert!(outcome.stderr.contains("over host, preferred by"), "{}", outcome.printed());
    assert!(!outcome.stderr.contains("passed over"), "nothing better was to be had: {}", outcome.printed());
    assert_eq!(Report::read(&report).at("/decided/layers/0/transport"), "host");
}

/// A run on GPUs; their libraries are where this process's variables say.
fn gpu_job(work: &Work, words: &[&str]) -> Job {
    job_with_cache(job(work, &["--combine=slot"].into_iter().chain(words.iter().copied()).collect::<Vec<_>>()))
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nccl_gives_the_bits_that_mpi_gives() {
    for backend in ["mma_sync", "wgmma"] {
        for form in [["--payload=bf16", "--activations=bf16"], ["--payload=nvfp4", "--activations=quantised"]] {
            let [over_mpi, over_nccl] = ["host", "nccl"].map(|transport| {
                let work = Work::new();
                let (report, output) = (work.path("report.json"), work.path("rows"));
                let files = [format!("--report={}", report.display()), format!("--output={}", output.display())];
                let words = [&*format!("--backend={backend}"), &*format!("--transport={transport}"), form[0], form[1]];
                let words: Vec<&str> = words.into_iter().chain(files.iter().map(String::as_str)).collect();
                gpu_job(&work, &words).run().expect_code(0);
                assert_eq!(Report::read(&report).at("/decided/layers/0/transport"), transport);
                std::fs::read(output).expect("an output")
            });
            assert!(over_mpi == over_nccl, "{backend} {form:?}: the bits differ");
        }
    }
}

/// Case G4.
#[test]
#[ignore = "needs a GPU, NVRTC and NCCL"]
fn two_gpus_two_ranks_on_one_are_refused_before_nccl() {
    let refused = gpu_job(&Work::new(), &["--transport=nccl"]).env("CUDA_VISIBLE_DEVICES", "0").run();
    let said = ["needs a GPU for every rank; these share GPU-", "cluster.share_gpus: true", "(ranks 0-1)"];
    refused.fails_clearly(2, &said);
}

/// One GPU plays 3, 8 and 16 ranks: packing and unpacking beyond two, with ranks that have few experts, none, or no tokens.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn a_gpu_that_ranks_share_gives_the_bits_that_one_rank_gives() {
    for form in [["--payload=bf16", "--activations=bf16"], ["--payload=nvfp4", "--activations=quantised"]] {
        let output = |num_ranks: usize| {
            let work = Work::new();
            let (report, output) = (work.path("report.json"), work.path("rows"));
            let files = [format!("--report={}", report.display()), format!("--output={}", output.display())];
            let own = ["--set=cluster.share_gpus=true", "--batch-invariant", "--chunk-tokens=7"];
            let words: Vec<&str> = own.into_iter().chain(form).chain(files.iter().map(String::as_str)).collect();
            gpu_job(&work, &words).ranks(num_ranks).run().expect_code(0);
            let report = Report::read(&report);
            // Case J4: a chunk waits for its counts, and for what leaves and what goes back where MPI carries them.
            let waits = if num_ranks == 1 { 1 } else { 3 };
            for rank in 0..num_ranks {
                let count = |name| report.count(&format!("/ranks/{rank}/layers/0/{name}"));
                assert_eq!(count("device_waits"), waits * count("chunks"), "rank {rank} of {num_ranks}");
            }
            std::fs::read(output).expect("an output")
        };
        let alone = output(1);
        for num_ranks in [3, 8, 16] {
            assert!(output(num_ranks) == alone, "{num_ranks} ranks, {form:?}: the bits differ");
        }
    }
}

/// Hazard 3 with the real parts: before ranks join, and as they join.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_a_rank_that_cannot_build_its_transport() {
    for (stage, code) in [("transport", 3), ("join", 5)] {
        let fault = format!("1:{stage}:error");
        let run = |transport: &str| {
            let work = Work::new();
            let job = gpu_job(&work, &[&format!("--transport={transport}"), "--set=timeouts.start_s=20"]);
            job.env("LOCKSTEP_FAULT", &fault).run()
        };
        let told = format!("rank 1: rank 1 was told to fail at {stage}");
        run("nccl").fails_clearly(code, &["dispatch.transport is nccl", &told]);
        let outcome = run("auto").expect_code(0);
        assert!(outcome.stderr.contains("tokens travel over host") && outcome.stderr.contains(&told));
    }
}

/// A fault of a transport that is not used changes nothing; one that can't be read names the stages there are.
#[test]
fn faults_of_a_transport_that_is_not_used_do_not_strike() {
    let work = Work::new();
    job(&work, &[]).env("LOCKSTEP_FAULT", "1:transport:error;0:join:error").run().expect_code(0);
    let misspelt = job(&work, &[]).env("LOCKSTEP_FAULT", "1:transprt:error").run().expect_code(2);
    assert!(misspelt.stderr.contains("compile, tune, transport, join, dispatch"), "{}", misspelt.printed());
}
