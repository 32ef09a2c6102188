//! Plans of published models on made-up clusters, as people see them, and what they must say.

use std::path::PathBuf;

use super::*;

fn args(model: &str, deployment: &str) -> PlanArgs {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/deployments").join(deployment);
    PlanArgs {
        model: model.to_owned(),
        tokens: None,
        device_memory_gbyte: None,
        deployment: DeploymentArgs { deployment: Some(file), ..DeploymentArgs::default() },
        json: false,
        log: LogArgs::default(),
    }
}

fn plan(args: &PlanArgs) -> Result<Plan, PlanCommandError> {
    let effective = args.deployment.effective(&EnvVars::default()).expect("a deployment");
    planned(args, &effective.deployment)
}

fn shown(args: &PlanArgs) -> String {
    show::Shown(&plan(args).expect("a plan")).to_string()
}

/// The exit code and message of a plan that does not fit.
fn refused(args: &PlanArgs) -> String {
    let error = plan(args).expect("a plan").fit().expect_err("too large");
    assert_eq!(error.exit(), Exit::Environment);
    error.to_string()
}

#[test]
fn kimi_k3_on_sixteen_ranks() {
    let args = PlanArgs { device_memory_gbyte: Some(288.0), ..args("kimi-k3", "4x4-gpu.yaml") };
    let plan = plan(&args).expect("a plan");
    let [ranks] = &plan.ranks[..] else { panic!("sixteen ranks are alike: {:?}", plan.ranks) };
    assert_eq!((ranks.first_rank, ranks.last_rank, ranks.num_experts), (0, 15, 56));
    assert_eq!(ranks.expert_weight_bytes, 95_721_357_312, "95.7 GB, as published");
    let nvfp4 = plan.layers[0].ways.iter().find(|way| way.payload == "nvfp4").expect("K3 is calibrated");
    assert_eq!(nvfp4.token_bytes, 1792 + 224 + 128);
    assert_eq!(plan.layers[0].ways[0].token_bytes, 7168 + 128);
    assert_eq!((plan.num_layers, plan.fits), (92, Some(true)));
    insta::assert_snapshot!(shown(&args));
}

#[test]
fn deepseek_v3_on_eight_ranks() {
    insta::assert_snapshot!(shown(&args("deepseek-v3", "1x8-gpu.yaml")));
}

#[test]
fn qwen3_on_four_ranks() {
    insta::assert_snapshot!(shown(&args("qwen3-235b", "2x2-cpu.yaml")));
}

#[test]
fn kimi_k3_on_4096_ranks() {
    insta::assert_snapshot!(shown(&args("kimi-k3", "512x8-gpu.yaml")));
}

#[test]
fn a_plan_as_json() {
    let args = PlanArgs { tokens: Some(1), device_memory_gbyte: Some(80.0), ..args("qwen3-235b", "2x2-cpu.yaml") };
    let mut json = serde_json::to_value(plan(&args).expect("a plan")).expect("JSON");
    let layers = json["layers"][0]["layers"].take();
    assert_eq!(layers, serde_json::json!((0..94).collect::<Vec<u32>>()));
    insta::assert_json_snapshot!(json);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let with = |model, memory, chunk: Option<&str>| {
        let mut args = PlanArgs { device_memory_gbyte: Some(memory), ..args(model, "4x4-gpu.yaml") };
        args.deployment.chunk_tokens = chunk.map(str::to_owned);
        args
    };
    insta::assert_snapshot!("cure_chunk", refused(&with("kimi-k3", 141.0, Some("null"))));
    insta::assert_snapshot!("cure_ranks", refused(&with("kimi-k3", 80.0, None)));
    insta::assert_snapshot!("cure_none", refused(&with("kimi-k3", 24.0, None)));
}

/// What a message proposes fits, and a step beyond it does not.
#[test]
fn cures_are_exact() {
    let mut args = PlanArgs { device_memory_gbyte: Some(141.0), ..args("kimi-k3", "4x4-gpu.yaml") };
    args.deployment.chunk_tokens = Some("null".to_owned());
    let number_after = |message: &str, words: &str| -> usize {
        let rest = &message[message.find(words).unwrap_or_else(|| panic!("{words}: {message}")) + words.len()..];
        rest.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
    };
    let chunk = number_after(&refused(&args), "chunk_tokens to ");
    let mut fits = |chunk: usize| {
        args.deployment.chunk_tokens = Some(chunk.to_string());
        plan(&args).expect("a plan").fits
    };
    assert_eq!((fits(chunk), fits(chunk + 1)), (Some(true), Some(false)));

    let mut args = PlanArgs { device_memory_gbyte: Some(80.0), ..self::args("kimi-k3", "4x4-gpu.yaml") };
    args.deployment.chunk_tokens = Some("1".to_owned());
    let ranks = number_after(&refused(&args), "experts over ");
    let mut fits = |ranks: usize| {
        args.deployment.set = [("cluster.nodes", 1), ("cluster.ranks_per_node", ranks)]
            .map(|(key, text)| format!("{key}={text}"))
            .map(|set| set.parse().expect("a key"))
            .to_vec();
        plan(&args).expect("a plan").fits
    };
    assert_eq!((fits(ranks), fits(ranks - 1)), (Some(true), Some(false)));
}

#[test]
fn more_tokens_than_declared_are_refused() {
    let args = PlanArgs { tokens: Some(257), ..args("qwen3-235b", "2x2-cpu.yaml") };
    let error = plan(&args).expect_err("over the limit");
    assert_eq!(error.exit(), Exit::BadInput);
    assert!(error.to_string().contains("257") && error.to_string().contains("chunk_tokens"), "{error}");
}

/// The plan of a sample's directory is that of its geometry.
#[test]
fn a_directory_says_what_its_geometry_says() {
    use clap::ValueEnum;

    for geometry in Geometry::value_variants() {
        let mut spec = SampleSpec::of(*geometry);
        (spec.hidden, spec.intermediate, spec.num_experts, spec.num_topk, spec.num_layers) = (64, 32, 8, 2, 2);
        spec.latent = spec.latent.map(|_| 32);
        spec.fit_groups();
        let dir = tempfile::tempdir().expect("a directory");
        spec.clone().plan().expect("a plan").write(dir.path(), &|_| {}).expect("written");
        let checkpoint = Checkpoint::open(dir.path()).expect("a checkpoint");
        let model = spec.model().expect("a model").geometry;
        for layer in of_checkpoint(&checkpoint).expect("layers") {
            assert_eq!(layer.dense_bytes, weights::dense_bytes(&model), "{}", geometry.name());
            assert_eq!(
                LayerFacts { layer: layer.facts.layer, ..spec.layer_facts() },
                layer.facts,
                "{}",
                geometry.name()
            );
            assert_eq!(layer.is_nvfp4, [true; 8], "{}", geometry.name());
        }
    }
}

/// Every file of `topology/` can be planned; the sixteen GB300 are those that Kimi K3's published figures are of.
#[test]
fn topologies_can_be_planned() {
    for (file, num_ranks) in
        [("laptop", 1), ("two-hosts", 4), ("h200", 1), ("h200x2", 2), ("2x8-h200", 16), ("4x4-gb300-k3", 16)]
            .map(|(name, ranks)| (format!("../../topology/{name}.yaml"), ranks))
    {
        let plan = plan(&PlanArgs { tokens: Some(64), ..args("kimi-k3", &file) }).expect("a plan");
        assert_eq!(plan.num_ranks, num_ranks, "{file}");
        assert_eq!(plan.ranks[0].num_experts, 896 / num_ranks, "{file}");
        assert_eq!(plan.layers[0].ways.iter().map(|way| way.token_bytes).min(), Some(2144), "{file}");
    }
}
