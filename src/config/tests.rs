//! Cases I1 (keys) and I2 (scalars), and the layers.

use proptest::prelude::*;

use super::scalar::Scalar;
use super::*;
use crate::exit::{Classify, Exit};

const FILE: &str = "laptop.yaml";

fn resolve(yaml: &[u8]) -> Result<Effective, ConfigError> {
    Effective::resolve(&Sources { file: Some((FILE, yaml)), ..Sources::default() })
}

fn deployment(yaml: &str) -> Deployment {
    resolve(yaml.as_bytes()).unwrap_or_else(|error| panic!("{yaml:?}: {error}")).deployment
}

/// The message of a refusal; every one is bad input and names the file.
fn refusal(yaml: impl AsRef<[u8]>) -> String {
    let yaml = yaml.as_ref();
    let error = resolve(yaml).expect_err(&format!("{:?} is refused", String::from_utf8_lossy(yaml)));
    assert_eq!(error.exit(), Exit::BadInput);
    let message = error.to_string();
    assert!(message.contains(FILE), "names the file: {message}");
    message
}

/// The refusal of one value of a key, without the place.
fn refused(key: &str, value: &str) -> String {
    let (section, name) = key.split_once('.').expect("a key in a section");
    let message = refusal(format!("{section}:\n  {name}: {value}\n"));
    let (place, problem) = message.split_once(": ").expect("a place");
    assert_eq!(place, format!("{FILE}:2"), "{message}");
    let problem = problem.strip_prefix(key).unwrap_or_else(|| panic!("names the key: {message}"));
    problem.trim_start().to_owned()
}

/// What three entry paths make of one value; they must agree.
fn by_every_path<T: PartialEq + std::fmt::Debug>(
    key: &'static str,
    value: &str,
    of: impl Fn(&Deployment) -> T,
) -> Result<T, String> {
    let (section, name) = key.split_once('.').expect("a key in a section");
    let yaml = format!("{section}:\n  {name}: {value}\n");
    let variables = [(format!("LOCKSTEP_{}", name.to_uppercase()), value.to_owned())];
    let command_line = [Override { key, option: "--it", text: value.to_owned() }];
    let results = [
        Sources { file: Some((FILE, yaml.as_bytes())), ..Sources::default() },
        Sources { variables: &variables, ..Sources::default() },
        Sources { command_line: &command_line, ..Sources::default() },
    ]
    .map(|sources| match Effective::resolve(&sources) {
        Ok(effective) => Ok(of(&effective.deployment)),
        Err(ConfigError::Value { key: named, problem, .. }) if named == key => Err(problem.to_string()),
        Err(other) => panic!("{key}: {value}: {other}"),
    });
    let [file, env, command_line] = results;
    assert_eq!(file, env, "{key}: {value} through file and environment");
    assert_eq!(file, command_line, "{key}: {value} through file and command line");
    file
}

#[test]
fn defaults_are_the_tables() {
    insta::assert_snapshot!(Effective::default().to_string());
}

/// `topology/laptop.yaml` says of itself that it holds the defaults.
#[test]
fn the_laptop_is_the_default() {
    let effective = resolve(include_bytes!("../../topology/laptop.yaml")).expect("loads");
    assert_eq!(effective.deployment, Deployment::default());
}

/// The documentation has a row for every key, with its variable and default.
#[test]
fn the_documentation_lists_every_key() {
    let text = include_str!("../../docs/configuration.md");
    let effective = Effective::default();
    for (key, default, _) in effective.entries() {
        let variable = key.variable().map_or_else(|| "none".to_owned(), |variable| format!("`{variable}`"));
        let row = format!("| `{}` | {variable} | `{default}` | ", key.path);
        assert!(text.contains(&row), "docs/configuration.md has no row that begins with {row}");
    }
    let num_rows = text.lines().filter(|line| line.starts_with("| `") && line.contains("LOCKSTEP_")).count();
    assert_eq!(num_rows, KEYS.len() - 1, "rows of keys that do not exist");
}

#[test]
fn every_variable_is_one_key() {
    let mut variables: Vec<String> = KEYS.iter().filter_map(Key::variable).collect();
    assert_eq!(variables.len(), KEYS.len() - 1, "all but version");
    variables.sort();
    variables.dedup();
    assert_eq!(variables.len(), KEYS.len() - 1, "no two keys share a variable");
}

#[test]
fn case_i1_unknown_key() {
    insta::assert_snapshot!(refusal("name: x\nmoe: {top_kk: 2}\n"), @"laptop.yaml:2:7: unknown key moe.top_kk; moe takes backend, implementation, allow_fallback, activations, activation, combine, batch_invariant, tuning, cuda_graph");
    insta::assert_snapshot!(refusal("moe: {backendd: simd}\n"), @"laptop.yaml:1:7: unknown key moe.backendd; did you mean backend?");
    insta::assert_snapshot!(refusal("version: 1\nmeo:\n  backend: simd\n"), @"laptop.yaml:2:1: unknown key meo; did you mean moe?");
    insta::assert_snapshot!(refusal("fruit: apple\n"), @"laptop.yaml:1:1: unknown key fruit; the top level takes version, name, cluster, links, moe, dispatch, jit, timeouts, log");
    insta::assert_snapshot!(refusal("moe:\n  num_tokens_per_rank: 4\n"), @"laptop.yaml:2:3: unknown key moe.num_tokens_per_rank; did you mean dispatch.num_max_tokens_per_rank?");
}

#[test]
fn case_i1_wrong_level() {
    insta::assert_snapshot!(refusal("version: 1\nnum_max_tokens_per_rank: 64\n"), @"laptop.yaml:2:1: unknown key num_max_tokens_per_rank; num_max_tokens_per_rank belongs under dispatch");
    insta::assert_snapshot!(refusal("moe:\n  chunk_tokens: 64\n"), @"laptop.yaml:2:3: unknown key moe.chunk_tokens; chunk_tokens belongs under dispatch");
    insta::assert_snapshot!(refusal("moe:\n  name: x\n"), @"laptop.yaml:2:3: unknown key moe.name; name belongs at the top level");
    insta::assert_snapshot!(refusal("moe:\n  dispatch:\n    payload: bf16\n"), @"laptop.yaml:2:3: unknown key moe.dispatch; dispatch is a section of the top level");
    insta::assert_snapshot!(refusal("moe.backend: simd\n"), @"laptop.yaml:1:1: unknown key moe.backend; write backend in the section moe:");
}

#[test]
fn case_i1_hyphens() {
    insta::assert_snapshot!(refusal("moe:\n  allow-fallback: true\n"), @"laptop.yaml:2:3: unknown key moe.allow-fallback; keys are written in lower case with underscores: allow_fallback");
}

#[test]
fn case_i1_capitals() {
    insta::assert_snapshot!(refusal("moe:\n  Allow_Fallback: true\n"), @"laptop.yaml:2:3: unknown key moe.Allow_Fallback; keys are written in lower case with underscores: allow_fallback");
    insta::assert_snapshot!(refusal("Moe:\n  backend: simd\n"), @"laptop.yaml:1:1: unknown key Moe; keys are written in lower case with underscores: moe");
}

#[test]
fn case_i1_extra_nested_map() {
    insta::assert_snapshot!(refusal("moe:\n  backend:\n    name: simd\n"), @"laptop.yaml:3:5: moe.backend takes a single value, found a mapping");
    insta::assert_snapshot!(refusal("moe:\n  extra: {backend: simd}\n"), @"laptop.yaml:2:3: unknown key moe.extra; moe takes backend, implementation, allow_fallback, activations, activation, combine, batch_invariant, tuning, cuda_graph");
    insta::assert_snapshot!(refusal("moe: simd\n"), @"laptop.yaml:1:6: moe takes a mapping of keys (backend, implementation, allow_fallback, activations, activation, combine, batch_invariant, tuning, cuda_graph), found simd");
    insta::assert_snapshot!(refusal("moe:\n  backend: [simd, reference]\n"), @"laptop.yaml:2:12: moe.backend takes a single value, found a list");
    insta::assert_snapshot!(refusal("name: {a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}}\n"), @"laptop.yaml:1:36: mappings are nested too deeply; sections hold keys, keys hold values");
}

#[test]
fn case_i1_empty_file() {
    insta::assert_snapshot!(refusal(""), @"the deployment file laptop.yaml holds no keys (it is empty or all comments); write at least `version: 1`");
    assert_eq!(refusal(""), refusal("\n\n"));
    assert_eq!(refusal(""), refusal("---\n"));
    assert_eq!(refusal(""), refusal("\u{feff}"));
}

#[test]
fn case_i1_only_comments() {
    assert_eq!(refusal("# a comment\n# and another\n"), refusal(""));
}

#[test]
fn case_i1_list_at_top_level() {
    insta::assert_snapshot!(refusal("- version: 1\n- name: x\n"), @"laptop.yaml:1:1: a deployment takes a mapping of keys such as cluster, links, moe, dispatch, jit, timeouts, log, found a list");
    insta::assert_snapshot!(refusal("just text\n"), @"laptop.yaml:1:1: a deployment takes a mapping of keys such as cluster, links, moe, dispatch, jit, timeouts, log, found just text");
}

#[test]
fn case_i1_bad_indent() {
    insta::assert_snapshot!(refusal("name: a\n moe:\n   backend: simd\n"), @"laptop.yaml:2:5: mapping values are not allowed in this context; check the indentation: the keys of one section start in the same column");
    insta::assert_snapshot!(refusal("moe:\n  backend: simd\n allow_fallback: true\n"), @"laptop.yaml:3:2: while parsing a block mapping, did not find expected key; check the indentation: the keys of one section start in the same column");
    insta::assert_snapshot!(refusal("moe:\nbackend: simd\n"), @"laptop.yaml:2:1: unknown key backend; backend belongs under moe");
}

#[test]
fn case_i1_tab_indent() {
    insta::assert_snapshot!(refusal("moe:\n\tbackend: simd\n"), @"laptop.yaml:2:2: tabs disallowed within this context (block indentation); this line is indented with a tab, YAML indents with spaces");
}

#[test]
fn case_i1_bom_loads() {
    assert_eq!(deployment("\u{feff}moe:\n  backend: simd\n").moe.backend, BackendFamily::Simd);
    let effective = resolve("\u{feff}name: x\n".as_bytes()).expect("loads");
    assert_eq!(effective.origin("name"), &Origin::File { path: FILE.into(), line: 1 });
}

#[test]
fn case_i1_crlf_loads() {
    let unix = "version: 1\nname: x\nmoe:\n  backend: simd\n  activation: situ:4,25\n";
    assert_eq!(deployment(&unix.replace('\n', "\r\n")), deployment(unix));
    insta::assert_snapshot!(refusal("name: x\r\nmoe:\r\n  backendd: simd\r\n"), @"laptop.yaml:3:3: unknown key moe.backendd; did you mean backend?");
}

#[test]
fn case_i1_non_utf8() {
    insta::assert_snapshot!(refusal(b"version: 1\nname: caf\xe9\n"), @"laptop.yaml:2:10: not UTF-8 (byte 0xe9 at offset 20); save the file as UTF-8");
    // UTF-16, as some editors save it.
    insta::assert_snapshot!(refusal(b"\xff\xfen\0a\0"), @"laptop.yaml:1:1: not UTF-8 (byte 0xff at offset 0); save the file as UTF-8");
}

#[test]
fn case_i1_doubled_key() {
    insta::assert_snapshot!(refusal("moe:\n  backend: simd\n  backend: simd\n"), @"laptop.yaml:3:3: moe.backend is given twice, first on line 2; keep one");
    insta::assert_snapshot!(refusal("moe: {}\nname: x\nmoe: {}\n"), @"laptop.yaml:3:1: moe is given twice, first on line 1; keep one");
}

#[test]
fn case_i1_other_yaml_is_refused() {
    insta::assert_snapshot!(refusal("name: &a x\nmoe:\n  implementation: *a\n"), @"laptop.yaml:1:10: anchors and aliases are not read; write the value out");
    insta::assert_snapshot!(refusal("dispatch:\n  chunk_tokens: !!int \"4\"\n"), @"laptop.yaml:2:23: tags are not read; remove it, each key has one type");
    insta::assert_snapshot!(refusal("name: x\n---\nname: y\n"), @"laptop.yaml:2:1: a second document starts here; a deployment is one document");
    insta::assert_snapshot!(refusal("? [a, b]\n: x\n"), @"laptop.yaml:1:3: a key is a name; a list or a mapping cannot be one");
    insta::assert_snapshot!(refusal("moe: {backend: simd\n"), @"laptop.yaml:1:6: unclosed bracket '{'");
    insta::assert_snapshot!(refusal("moe: {activation: situ:4,25}\n"), @r#"laptop.yaml:1:26: unknown key moe.25; inside {...} a comma ends the value: quote a value that holds one, as in "situ:4,25""#);
    insta::assert_snapshot!(refusal("version: 2\n"), @"laptop.yaml:1: version takes 1, the form of file that this build reads, found 2");
    insta::assert_snapshot!(refusal(vec![b'#'; (1 << 20) + 1]), @"the deployment file laptop.yaml has 1048577 bytes; a deployment has at most 1048576");
}

#[test]
fn a_section_without_keys_sets_nothing() {
    assert_eq!(deployment("version: 1\nmoe:\n  # backend: simd\n"), Deployment::default());
}

#[test]
fn case_i2_floats() {
    let rate = |value| by_every_path("links.tflops_bf16", value, |d| d.links.tflops_bf16);
    for (text, wanted) in
        [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("1E-5", 1e-5), (".5", 0.5), ("5.", 5.0), ("4", 4.0), ("1.5e+3", 1500.0)]
    {
        assert_eq!(rate(text), Ok(Some(wanted)), "{text}");
    }
    insta::assert_snapshot!(refused("links.tflops_bf16", "\"1e-5\""), @r#"takes a number greater than 0, or null, found "1e-5"; write it without quotes"#);
    for text in
        [".inf", "-.inf", ".nan", "inf", "NaN", "1_000.0", "+1.0", "0", "-1.5", "1e999", "1e", ".", "e5", "fast"]
    {
        assert!(rate(text).is_err(), "{text} is refused");
    }
    insta::assert_snapshot!(refused("links.tflops_bf16", ".inf"), @"takes a number greater than 0, or null, found .inf; it must be finite");
    insta::assert_snapshot!(refused("links.tflops_bf16", ".nan"), @"takes a number greater than 0, or null, found .nan; it must be finite");
    insta::assert_snapshot!(refused("links.tflops_bf16", "1_000.0"), @"takes a number greater than 0, or null, found 1_000.0; write it without underscores");
    insta::assert_snapshot!(refused("links.tflops_bf16", "1e999"), @"takes a number greater than 0, or null, found 1e999; it is too large for a 64-bit float");
    insta::assert_snapshot!(refused("links.tflops_bf16", "0"), @"takes a number greater than 0, or null, found 0");
}

#[test]
fn case_i2_integers() {
    let tokens =
        |value| by_every_path("dispatch.num_max_tokens_per_rank", value, |d| d.dispatch.num_max_tokens_per_rank);
    assert_eq!(tokens("1"), Ok(1));
    assert_eq!(tokens("8192"), Ok(8192));
    for text in
        ["010", "0x10", "0o10", "0b1", "1_000", "4.0", "4e3", "-1", "+4", "0", "99999999999999999999", "four", "4 4"]
    {
        assert!(tokens(text).is_err(), "{text} is refused");
    }
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "010"), @"takes a whole number of at least 1, found 010; a leading zero means octal to some readers, write 10");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "0x10"), @"takes a whole number of at least 1, found 0x10; write it in decimal digits");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "0o10"), @"takes a whole number of at least 1, found 0o10; write it in decimal digits");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "1_000"), @"takes a whole number of at least 1, found 1_000; write 1000");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "4.0"), @"takes a whole number of at least 1, found 4.0; write decimal digits only, without a fraction or an exponent");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "\"4\""), @r#"takes a whole number of at least 1, found "4"; write it without quotes"#);
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "-1"), @"takes a whole number of at least 1, found -1; it cannot be negative");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "99999999999999999999"), @"takes a whole number of at least 1, found 99999999999999999999; the largest is 18446744073709551615");
    insta::assert_snapshot!(refused("cluster.nodes", "4294967296"), @"takes a whole number of at least 1, found 4294967296; the largest is 4294967295");
    insta::assert_snapshot!(refused("dispatch.num_max_tokens_per_rank", "null"), @"takes a whole number of at least 1, found null");
    insta::assert_snapshot!(refused("dispatch.chunk_tokens", "0"), @"takes a whole number of at least 1, or null, found 0");
}

#[test]
fn case_i2_bools() {
    let fallback = |value| by_every_path("moe.allow_fallback", value, |d| d.moe.allow_fallback);
    assert_eq!(fallback("true"), Ok(true));
    assert_eq!(fallback("false"), Ok(false));
    for text in ["True", "TRUE", "yes", "no", "on", "off", "0", "1", "null", "~", "", "maybe"] {
        assert!(fallback(text).is_err(), "{text} is refused");
    }
    insta::assert_snapshot!(refused("moe.allow_fallback", "True"), @"takes true or false, found True; write true");
    insta::assert_snapshot!(refused("moe.allow_fallback", "yes"), @"takes true or false, found yes; write true");
    insta::assert_snapshot!(refused("moe.allow_fallback", "off"), @"takes true or false, found off; write false");
    insta::assert_snapshot!(refused("moe.allow_fallback", "\"false\""), @r#"takes true or false, found "false"; write it without quotes"#);
    insta::assert_snapshot!(refused("moe.allow_fallback", "0"), @"takes true or false, found 0; write false");
}

#[test]
fn case_i2_strings() {
    let pin = |value| by_every_path("moe.implementation", value, |d| d.moe.implementation.clone());
    for text in ["no", "on", "1.10", "0x10", "true"] {
        assert_eq!(pin(text), Ok(Some(text.to_owned())), "{text} stays text");
    }
    for text in ["null", "~", "", "Null"] {
        assert_eq!(pin(text), Ok(None), "{text:?} is no value");
    }
    assert_eq!(deployment("moe:\n  implementation: \"null\"\n").moe.implementation.as_deref(), Some("null"));
    let level = |value| by_every_path("log.level", value, |d| d.log.level.clone());
    assert_eq!(level("no"), Ok("no".to_owned()));
    assert_eq!(level("1.10"), Ok("1.10".to_owned()));
    for text in ["null", "~", ""] {
        assert!(level(text).is_err(), "{text:?} does not silently mean the default");
    }
    insta::assert_snapshot!(refused("log.level", "null"), @"takes text, found null; leave the key out for its default, or quote the word to mean it");
    insta::assert_snapshot!(refused("log.level", ""), @"takes text, found nothing; leave the key out for its default, or quote the word to mean it");
}

#[test]
fn case_i2_words() {
    let backend = |value| by_every_path("moe.backend", value, |d| d.moe.backend);
    assert_eq!(backend("mma_sync"), Ok(BackendFamily::MmaSync));
    assert_eq!(deployment("moe: {backend: \"simd\"}").moe.backend, BackendFamily::Simd);
    insta::assert_snapshot!(refused("moe.backend", "smid"), @"takes one of auto, cpu, reference, simd, mma_sync, wgmma, found smid; did you mean simd?");
    insta::assert_snapshot!(refused("moe.backend", "SIMD"), @"takes one of auto, cpu, reference, simd, mma_sync, wgmma, found SIMD; did you mean simd?");
    insta::assert_snapshot!(refused("moe.backend", "cutlas"), @"takes one of auto, cpu, reference, simd, mma_sync, wgmma, found cutlas");
    insta::assert_snapshot!(refused("moe.activations", "quantized"), @"takes one of checkpoint, bf16, quantised, found quantized; did you mean quantised?");
    insta::assert_snapshot!(refused("moe.backend", "null"), @"takes one of auto, cpu, reference, simd, mma_sync, wgmma, found null");
}

#[test]
fn case_i2_activation_constants() {
    let activation = |value| by_every_path("moe.activation", value, |d| d.moe.activation);
    let situ = |beta, linear_beta| Ok(Some(Activation::Situ { beta, linear_beta }));
    assert_eq!(activation("checkpoint"), Ok(None));
    assert_eq!(activation("swiglu"), Ok(Some(Activation::Swiglu)));
    assert_eq!(activation("situ:4,25"), situ(4.0, Some(25.0)));
    assert_eq!(activation("situ:.5,2.5e1"), situ(0.5, Some(25.0)));
    assert_eq!(activation("situ:4"), situ(4.0, None));
    for text in [
        "situ",
        "situ:0",
        "situ:-4",
        "situ:.inf",
        "situ:.nan,25",
        "situ:4,",
        "situ:4,25,1",
        "situ:1e-60",
        "situ:1e60",
        "gelu",
    ] {
        assert!(activation(text).is_err(), "{text} is refused");
    }
    assert!(Scalar::bare("situ:").activation().is_err());
    insta::assert_snapshot!(refused("moe.activation", "situ"), @"takes checkpoint, swiglu or situ:BETA[,LINEAR_BETA], found situ; SiTU needs its constants, as in situ:4,25");
    insta::assert_snapshot!(refused("moe.activation", "situ:4,.inf"), @"takes checkpoint, swiglu or situ:BETA[,LINEAR_BETA], found situ:4,.inf; a constant takes a number greater than 0, found .inf; it must be finite");
    insta::assert_snapshot!(refused("moe.activation", "situ:1e-60"), @"takes checkpoint, swiglu or situ:BETA[,LINEAR_BETA], found situ:1e-60; the activation's constant beta is 0; it must be finite and greater than 0");
    insta::assert_snapshot!(refused("moe.activation", "swigelu"), @"takes checkpoint, swiglu or situ:BETA[,LINEAR_BETA], found swigelu; did you mean swiglu?");
}

#[test]
fn layers_override_in_order() {
    let yaml = "moe:\n  backend: reference\n  combine: rank\n  allow_fallback: true\n";
    let variables =
        [("LOCKSTEP_BACKEND".to_owned(), "simd".to_owned()), ("LOCKSTEP_COMBINE".to_owned(), "slot".to_owned())];
    let command_line = [Override { key: "moe.backend", option: "--backend", text: "cpu".to_owned() }];
    let effective = Effective::resolve(&Sources {
        file: Some((FILE, yaml.as_bytes())),
        variables: &variables,
        command_line: &command_line,
    })
    .expect("resolves");
    assert_eq!(effective.deployment.moe.backend, BackendFamily::Cpu);
    assert_eq!(effective.deployment.moe.combine, Combine::Slot);
    assert!(effective.deployment.moe.allow_fallback);
    assert_eq!(effective.origin("moe.backend"), &Origin::CommandLine("--backend"));
    assert_eq!(effective.origin("moe.combine"), &Origin::Env("LOCKSTEP_COMBINE".into()));
    assert_eq!(effective.origin("moe.allow_fallback"), &Origin::File { path: FILE.into(), line: 4 });
    assert_eq!(effective.origin("moe.activation"), &Origin::Default);
    insta::assert_snapshot!(effective.to_string());
}

#[test]
fn a_replaced_value_is_checked_too() {
    let command_line = [Override { key: "moe.backend", option: "--backend", text: "simd".to_owned() }];
    let sources =
        Sources { file: Some((FILE, b"moe: {backend: smid}\n")), command_line: &command_line, ..Sources::default() };
    assert!(Effective::resolve(&sources).is_err());
}

#[test]
fn refusals_name_the_variable_and_the_option() {
    let variables = [("LOCKSTEP_CHUNK_TOKENS".to_owned(), "010".to_owned())];
    let error = Effective::resolve(&Sources { variables: &variables, ..Sources::default() }).expect_err("refused");
    insta::assert_snapshot!(error.to_string(), @"LOCKSTEP_CHUNK_TOKENS: dispatch.chunk_tokens takes a whole number of at least 1, or null, found 010; a leading zero means octal to some readers, write 10");
    let command_line = [Override { key: "moe.backend", option: "--moe-backend", text: "cutlas".to_owned() }];
    let error =
        Effective::resolve(&Sources { command_line: &command_line, ..Sources::default() }).expect_err("refused");
    insta::assert_snapshot!(error.to_string(), @"--moe-backend: moe.backend takes one of auto, cpu, reference, simd, mma_sync, wgmma, found cutlas");
}

#[test]
fn unknown_variables_are_warned_about() {
    let variables = [
        "LOCKSTEP_BAKEND",
        "LOCKSTEP_backend",
        "LOCKSTEP_LOG",
        "LOCKSTEP_THREADS",
        "LOCKSTEP_FAULT",
        "LOCKSTEP_LAUNCHER",
        "LOCKSTEP_FRUIT",
    ]
    .map(|name| (name.to_owned(), "1".to_owned()));
    let effective = Effective::resolve(&Sources { variables: &variables, ..Sources::default() }).expect("resolves");
    insta::assert_snapshot!(effective.warnings.join("\n"), @r#"
LOCKSTEP_BAKEND is set but nothing reads it; did you mean LOCKSTEP_BACKEND?
LOCKSTEP_backend is set but nothing reads it; did you mean LOCKSTEP_BACKEND?
LOCKSTEP_FRUIT is set but nothing reads it; unset it or correct its name
"#);
}

#[test]
fn contradictions_are_refused_with_both_origins() {
    let variables = [("LOCKSTEP_CHUNK_TOKENS".to_owned(), "9000".to_owned())];
    let error = Effective::resolve(&Sources { variables: &variables, ..Sources::default() }).expect_err("refused");
    insta::assert_snapshot!(error.to_string(), @"dispatch.chunk_tokens: 9000 (LOCKSTEP_CHUNK_TOKENS) and dispatch.num_max_tokens_per_rank: 8192 (default) cannot both hold: buffers are planned for num_max_tokens_per_rank tokens; lower the one or raise the other");
    insta::assert_snapshot!(refusal("moe: {activations: bf16}\ndispatch: {payload: nvfp4}\n"), @"dispatch.payload: nvfp4 (laptop.yaml:2) and moe.activations: bf16 (laptop.yaml:1) cannot both hold: only quantised activations travel as NVFP4; use another payload, or activations: quantised");
}

proptest! {
    /// What is printed reads back as the same deployment, whatever text and numbers it holds.
    #[test]
    fn printed_reads_back(name in ".*", cache_dir in proptest::option::of("\\PC{1,20}"), rate in 1e-300f64..1e300,
                          beta in 1e-30f32..1e30, tokens in 1usize..usize::MAX) {
        let mut effective = Effective::default();
        effective.deployment.name = name;
        effective.deployment.jit.cache_dir = cache_dir;
        effective.deployment.links.tflops_bf16 = Some(rate);
        effective.deployment.moe.activation = Some(Activation::Situ { beta, linear_beta: Some(beta) });
        effective.deployment.dispatch.num_max_tokens_per_rank = tokens;
        let yaml = effective.to_string();
        let again = resolve(yaml.as_bytes()).map_err(|error| TestCaseError::fail(format!("{error}\n{yaml}")))?;
        prop_assert_eq!(again.deployment, effective.deployment, "{}", yaml);
    }

    /// No bytes make the reader panic.
    #[test]
    fn any_bytes_end_in_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), text in "[a-z:{}\\[\\],#&*!|>'\"%@ \t\n-]{0,80}") {
        let _ = resolve(&bytes);
        let _ = resolve(text.as_bytes());
    }
}
