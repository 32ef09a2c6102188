//! Parsing and help of the whole command line.

use clap::{Args, CommandFactory};

use super::options::{RunArgs, VerifyArgs};
use super::values::{InputRef, LayerChoice, OutputDtype, Part, ProgressChoice, Split};
use super::*;
use crate::config::{BackendFamily, Choice, Combine, CombineDtype, ConfigError, Origin, Payload, Transport};
use crate::exit::Classify;
use crate::ids::LayerIdx;

fn parse<A: Args>(line: &str) -> Result<A, clap::Error> {
    let matches = A::augment_args(clap::Command::new("lockstep")).try_get_matches_from(line.split_whitespace())?;
    A::from_arg_matches(&matches)
}

fn help<A: Args>(name: &'static str) -> String {
    A::augment_args(clap::Command::new(name)).term_width(100).render_long_help().to_string()
}

const RUN: &str = "lockstep --checkpoint c --input x.safetensors:h --output o.safetensors";

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
    RunArgs::augment_args(clap::Command::new("run")).debug_assert();
    VerifyArgs::augment_args(clap::Command::new("verify")).debug_assert();
}

#[test]
fn help_of_run() {
    insta::assert_snapshot!(help::<RunArgs>("run"));
}

#[test]
fn help_of_verify() {
    insta::assert_snapshot!(help::<VerifyArgs>("verify"));
}

#[test]
fn help_of_resolve() {
    insta::assert_snapshot!(help::<resolve::ResolveArgs>("resolve"));
}

#[test]
fn help_of_doctor() {
    insta::assert_snapshot!(help::<doctor::DoctorArgs>("doctor"));
}

#[test]
fn help_of_warmup() {
    insta::assert_snapshot!(help::<warmup::WarmupArgs>("warmup"));
}

#[test]
fn help_of_cache_prune() {
    insta::assert_snapshot!(help::<cache::PruneArgs>("prune"));
}

#[test]
fn help_of_sample() {
    insta::assert_snapshot!(help::<sample::SampleArgs>("sample"));
}

#[test]
fn run_takes_the_form_of_its_documentation() {
    let args: RunArgs = parse(&format!(
        "{RUN} --deployment topology/laptop.yaml --layers 1,2 --backend simd --report r.json --split 3,0,7,1 --part routed \
         --topk t.safetensors --steps 50 --output-dtype f32 --activations quantised --activation situ:4,25 -vv --json"
    ))
    .expect("parses");
    assert_eq!(args.work.input, InputRef { path: "x.safetensors".into(), tensor: Some("h".into()) });
    assert_eq!(args.layers, LayerChoice::List(vec![LayerIdx(1), LayerIdx(2)]));
    assert_eq!(args.work.split, Split::Counts(vec![3, 0, 7, 1]));
    assert_eq!((args.work.part, args.steps, args.output_dtype), (Part::Routed, 50, OutputDtype::F32));
    assert_eq!((args.common.log.verbose, args.common.json), (2, true));
    let defaults: RunArgs = parse(RUN).expect("parses");
    assert_eq!((&defaults.layers, &defaults.work.split), (&LayerChoice::All, &Split::Even));
    assert_eq!((defaults.work.part, defaults.output_dtype, defaults.steps), (Part::Block, OutputDtype::Bf16, 1));
    assert_eq!(defaults.common.log.progress, ProgressChoice::Auto);
}

#[test]
fn verify_compares_in_f32() {
    let args: VerifyArgs =
        parse("lockstep --checkpoint c --layer 3 --input x:h --expected y:h --part shared --json").expect("parses");
    assert_eq!((args.layer, args.work.part, args.output_dtype), (LayerIdx(3), Part::Shared, OutputDtype::F32));
    assert_eq!(args.expected.expect("given").tensor.as_deref(), Some("h"));
}

#[test]
fn usage_errors_end_with_2() {
    for line in ["lockstep", "lockstep fly", "lockstep sample", "lockstep sample --geometry kimi --out x"] {
        let error = Cli::try_parse_from(line.split_whitespace()).expect_err(line);
        assert_eq!(error.exit_code(), 2, "{line}");
    }
    for extra in
        ["--steps 0", "--steps 010", "--layers 1,1", "--split 1,x", "--part all", "--set step_s=1", "--threads 0"]
    {
        let error = parse::<RunArgs>(&format!("{RUN} {extra}")).expect_err(extra);
        assert_eq!(error.exit_code(), 2, "{extra}");
    }
}

/// Each option of a key sets that key, and the words in its help are the key's own.
#[test]
fn options_set_their_keys() {
    fn words<C: Choice>() -> Vec<&'static str> {
        C::CHOICES.iter().map(|(word, _)| *word).collect()
    }
    let help = help::<RunArgs>("run");
    for (option, key, words) in [
        ("--backend", "moe.backend", words::<BackendFamily>()),
        ("--moe-backend", "moe.backend", words::<BackendFamily>()),
        ("--activations", "moe.activations", words::<crate::config::Activations>()),
        ("--combine", "moe.combine", words::<Combine>()),
        ("--transport", "dispatch.transport", words::<Transport>()),
        ("--payload", "dispatch.payload", words::<Payload>()),
        ("--combine-dtype", "dispatch.combine_dtype", words::<CombineDtype>()),
        ("--chunk-tokens", "dispatch.chunk_tokens", vec!["7", "null"]),
        ("--num-max-tokens-per-rank", "dispatch.num_max_tokens_per_rank", vec!["7"]),
        ("--implementation", "moe.implementation", vec!["lockstep.simd.grouped_gemm.nvfp4"]),
        ("--allow-fallback", "moe.allow_fallback", vec!["true", "false"]),
        ("--batch-invariant", "moe.batch_invariant", vec!["true", "false"]),
        ("--set", "timeouts.step_s", vec!["7"]),
    ] {
        for word in words {
            let value = if option == "--set" { format!("{key}={word}") } else { word.to_owned() };
            let args: RunArgs = parse(&format!("{RUN} {option}={value}")).expect("parses");
            let effective = args.common.deployment.effective(&EnvVars::default()).expect("resolves");
            let (_, shown, origin) = effective.entries().find(|(named, ..)| named.path == key).expect("a key");
            assert_eq!(shown, word, "{option}");
            assert!(matches!(origin, Origin::CommandLine(_)), "{option}: {origin}");
            assert!(help.contains(word) || word == "7" || word == "null", "{option}: {word} is in the help");
        }
    }
}

#[test]
fn flags_may_stand_alone() {
    let args: RunArgs = parse(&format!("{RUN} --allow-fallback --batch-invariant")).expect("parses");
    let moe = args.common.deployment.effective(&EnvVars::default()).expect("resolves").deployment.moe;
    assert!(moe.allow_fallback && moe.batch_invariant);
}

#[test]
fn case_i1_missing_file() {
    let args: RunArgs = parse(&format!("{RUN} --deployment /nowhere/x.yaml")).expect("parses");
    let error = args.common.deployment.effective(&EnvVars::default()).expect_err("missing");
    assert_eq!(error.exit(), Exit::BadInput);
    insta::assert_snapshot!(Failure::from(error).to_string(), @r#"
lockstep: error: cannot read the deployment file /nowhere/x.yaml
  caused by: No such file or directory (os error 2)
"#);
}

#[test]
fn case_i1_directory() {
    let args: RunArgs = parse(&format!("{RUN} --deployment /tmp")).expect("parses");
    let error = args.common.deployment.effective(&EnvVars::default()).expect_err("a directory");
    assert!(matches!(error, ConfigError::Directory { .. }));
    insta::assert_snapshot!(Failure::from(error).to_string(), @"lockstep: error: the deployment /tmp is a directory; name the YAML file inside it");
}

#[test]
fn one_rank_speaks() {
    let env = |name: &str, value: &str| EnvVars { launcher: vec![(name.into(), value.into())], ..EnvVars::default() };
    assert!(speaks(&EnvVars::default()));
    assert!(speaks(&env("OMPI_COMM_WORLD_RANK", "0")));
    assert!(!speaks(&env("OMPI_COMM_WORLD_RANK", "3")));
    assert!(!speaks(&env("PMIX_RANK", "1")));
}

#[test]
fn scales_are_fractions() {
    let sample =
        |scale: &str| parse::<sample::SampleArgs>(&format!("lockstep --geometry kimi-k3 --out x --scale {scale}"));
    assert_eq!(sample("1/16").expect("parses").scale, Some(16));
    assert_eq!(sample("1").expect("parses").scale, Some(1));
    for text in ["16", "2/16", "1/0", "0.5", "1/"] {
        assert!(sample(text).is_err(), "{text}");
    }
}
