//! What changes a digest and what does not, and that bytes of other ranks can't do harm.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::environment::Environment;
use super::super::tests::worlds::{deployment, gb300, h200, host, k3, qwen3, registry};
use super::super::*;
use super::*;
use crate::config::{CombineDtype, Device, Payload};
use crate::ids::{LayerIdx, Rank};
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// Everything that a session is made of, in a form that tests can change in one place.
#[derive(Debug, Clone)]
struct Inputs {
    problems: Vec<Problem>,
    deployment: DeploymentFacts,
    environments: Vec<Environment>,
    registry: Registry,
    version: String,
    revision: String,
    activation: Activation,
    routing: RoutingMethod,
    input_scale: f32,
    scales: Vec<f32>,
    travel: &'static str,
    buffer_bytes: u64,
    layout: &'static str,
    tactic: &'static str,
    kernel_source: String,
    artefact: &'static str,
    flag: bool,
}

fn inputs() -> Inputs {
    Inputs {
        problems: vec![k3(1), k3(2), Problem { num_experts: 896, ..qwen3(3) }],
        deployment: DeploymentFacts { node_of_rank: vec![0, 0, 1, 1], ..deployment(4, Device::Auto, "auto") },
        environments: vec![h200(); 4],
        registry: registry(),
        version: "0.1.0".to_owned(),
        revision: "abc".to_owned(),
        activation: Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
        routing: RoutingMethod::KimiK3 { scaling: 1.0 },
        input_scale: 0.125,
        scales: vec![0.5, 0.25, 2.0],
        travel: "bf16",
        buffer_bytes: 1 << 20,
        layout: "k_major",
        tactic: "block_m 64",
        kernel_source: "kernel".to_owned(),
        artefact: "0123",
        flag: false,
    }
}

impl Inputs {
    fn selection(&self) -> Fingerprint {
        let Self { problems, deployment, environments, registry, .. } = self;
        let selection = resolve(problems, deployment, environments, registry).unwrap();
        selection.fingerprint(deployment, environments, registry).unwrap()
    }

    /// The session's fingerprint as a rank makes it; `order` says in which order it feeds its facts.
    fn session_of(&self, rank: usize, order: &[usize]) -> Fingerprint {
        let mut builder = SessionBuilder::new(&self.selection());
        type Step = fn(&Inputs, usize, &mut SessionBuilder);
        let steps: [Step; NUM_STEPS] = [
            |inputs, _, b| {
                let (version, revision) = (&inputs.version, &inputs.revision);
                b.build(BuildFacts { version, revision, target: "x86_64-unknown-linux-gnu", profile: "release" });
            },
            |inputs, rank, b| _ = b.environment(&inputs.environments[rank]),
            |inputs, _, b| _ = b.layer(LayerIdx(1)).activation(inputs.activation).routing(inputs.routing),
            |inputs, _, b| {
                b.layer(LayerIdx(1))
                    .scale("fc1.input", inputs.input_scale)
                    .scales("fc2", inputs.scales.iter().copied());
            },
            |inputs, _, b| _ = b.layer(LayerIdx(1)).travel("payload", inputs.travel).constant("norm_eps", 1e-5),
            |inputs, _, b| _ = b.capacity("receive_bytes", inputs.buffer_bytes).layout("weights", inputs.layout),
            |inputs, _, b| _ = b.tactic("k3", inputs.tactic).flag("graphs", inputs.flag),
            |inputs, _, b| {
                b.kernel_source("fc1", Digest::of(inputs.kernel_source.as_bytes())).artefact("fc1", inputs.artefact);
            },
        ];
        order.iter().for_each(|step| steps[*step](self, rank, &mut builder));
        builder.finish().unwrap()
    }

    fn session(&self) -> Fingerprint {
        self.session_of(0, &std::array::from_fn::<usize, NUM_STEPS, _>(|step| step))
    }
}

const NUM_STEPS: usize = 8;

fn next_up(value: f32) -> f32 {
    f32::from_bits(value.to_bits() + 1)
}

type Change = fn(&mut Inputs);

/// Changes of one thing, with whether it is the selection that changes.
fn changes() -> Vec<(&'static str, bool, Change)> {
    fn situ(inputs: &mut Inputs) -> (&mut f32, &mut f32) {
        match &mut inputs.activation {
            Activation::Situ { beta, linear_beta: Some(linear_beta) } => (beta, linear_beta),
            other => unreachable!("the inputs have SiTU with both constants, not {other:?}"),
        }
    }
    vec![
        ("beta", false, |i| *situ(i).0 = next_up(*situ(i).0)),
        ("linear_beta", false, |i| *situ(i).1 = next_up(*situ(i).1)),
        ("activation", false, |i| i.activation = Activation::Situ { beta: *situ(i).0, linear_beta: None }),
        ("scaling", false, |i| i.routing = RoutingMethod::KimiK3 { scaling: next_up(1.0) }),
        ("routing", false, |i| i.routing = RoutingMethod::Default),
        ("input_scale", false, |i| i.input_scale = next_up(i.input_scale)),
        ("one of many scales", false, |i| i.scales[1] = next_up(i.scales[1])),
        ("order of scales", false, |i| i.scales.reverse()),
        ("version", false, |i| i.version.push('1')),
        ("revision", false, |i| i.revision.push('d')),
        ("travelling dtype", false, |i| i.travel = "f32"),
        ("buffer size", false, |i| i.buffer_bytes += 1),
        ("layout", false, |i| i.layout = "n_major"),
        ("tactic", false, |i| i.tactic = "block_m 128"),
        ("kernel source", false, |i| i.kernel_source.push(' ')),
        ("artefact", false, |i| i.artefact = "0124"),
        ("flag", false, |i| i.flag = true),
        ("must-match variable", false, |i| {
            i.environments[0].variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
        }),
        ("chunk size", true, |i| i.deployment.chunk_tokens = Some(64)),
        ("capacity", true, |i| i.deployment.num_max_tokens_per_rank += 1),
        ("payload", true, |i| i.deployment.payload = Payload::Bf16),
        ("combine dtype", true, |i| i.deployment.combine_dtype = CombineDtype::Bf16),
        ("expert split", true, |i| i.deployment.experts = ExpertSplit::Blocks(vec![225, 223, 224, 224])),
        ("top-k", true, |i| i.problems[1].num_topk = 15),
        ("number of layers", true, |i| i.problems.truncate(2)),
        ("order of layers", true, |i| i.problems.swap(0, 1)),
        ("hidden", true, |i| i.problems[0].hidden += 128),
        ("format", true, |i| i.problems[0].quantisation.quantised_activations = false),
        ("shared width", true, |i| i.problems[0].shared.as_mut().unwrap().intermediate += 128),
        ("backend", true, |i| i.deployment.backend = "simd".to_owned()),
        ("fallback", true, |i| i.deployment.allow_fallback = true),
        ("batch invariance", true, |i| i.deployment.batch_invariant = true),
        ("device", true, |i| i.deployment.device = Device::Gpu),
        ("node layout under a transport that reads it", true, |i| i.deployment.node_of_rank = vec![0, 1, 1, 1]),
        ("instruction set of a rank", true, |i| {
            i.environments[3].instruction_set = environment::Fact::Present(InstructionSet::Scalar);
        }),
        ("GPU of a rank", true, |i| i.environments[3].gpu = gb300().gpu),
        ("library of a rank", true, |i| {
            i.environments[3].libraries.nccl = environment::Fact::Present("2.30".to_owned())
        }),
        ("flag of a rank", true, |i| {
            i.environments[3].flags = Some(["LOCKSTEP_EAGER".to_owned()].into());
        }),
        ("registry", true, |i| {
            let instance = i.registry.descriptors()[0].narrow(|d| d.num_topk.max = Some(31)).unwrap();
            i.registry = i.registry.clone().with_instance(instance).unwrap();
        }),
    ]
}

#[test]
fn any_single_change_changes_the_digest_and_is_named() {
    let before = inputs();
    for (name, of_selection, change) in changes() {
        let mut after = before.clone();
        change(&mut after);
        assert_eq!(before.selection().digest() != after.selection().digest(), of_selection, "{name}");
        let (ours, theirs) = (before.session(), after.session());
        assert_ne!(ours.digest(), theirs.digest(), "{name}");
        let differences = diff([(Rank(0), &ours), (Rank(1), &theirs)]);
        assert!(!differences.is_empty(), "{name}");
        if !of_selection {
            assert_eq!(differences.len(), 1 + usize::from(name == "routing"), "{name}: {differences:?}");
        }
    }
    // Every pair of changes is told apart as well.
    let mut digests: BTreeMap<Digest, &str> = BTreeMap::from([(before.session().digest(), "none")]);
    for (name, _, change) in changes() {
        let mut after = before.clone();
        change(&mut after);
        let twin = digests.insert(after.session().digest(), name);
        assert_eq!(twin, None, "{name}");
    }
}

#[test]
fn what_is_rank_local_stays_out() {
    let base = inputs();
    let mut other = base.clone();
    for (idx, environment) in other.environments.iter_mut().enumerate() {
        environment.host = Some(format!("node{idx}"));
        environment.info.insert("cache".to_owned(), format!("/tmp/{idx}"));
        environment.variables.insert("SLURM_PROCID".to_owned(), idx.to_string());
        environment.libraries.driver = base.environments[idx].libraries.driver.clone();
        if let environment::Fact::Present(gpu) = &mut environment.gpu {
            gpu.uuid = Some(format!("GPU-{idx}"));
        }
    }
    assert_eq!(base.selection(), other.selection());
    let sessions: Vec<Fingerprint> = (0..4).map(|rank| other.session_of(rank, &[0, 1, 2, 3, 4, 5, 6, 7])).collect();
    for (rank, session) in sessions.iter().enumerate() {
        assert_eq!(*session, base.session(), "rank {rank}");
    }
}

#[test]
fn node_layout_counts_only_where_a_transport_reads_it() {
    let mut base = inputs();
    base.deployment.backend = "cpu".to_owned();
    let mut other = base.clone();
    other.deployment.node_of_rank = vec![0, 1, 2, 3];
    assert_eq!(base.selection(), other.selection(), "the host transport reads no layout");
    (base.deployment.backend, other.deployment.backend) = ("wgmma".to_owned(), "wgmma".to_owned());
    let differences = diff([(Rank(0), &base.selection()), (Rank(1), &other.selection())]);
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(text, ["world.node_of_rank: [0, 0, 1, 1] on rank 0, [0, 1, 2, 3] on rank 1"]);
}

#[test]
fn a_laptop_and_the_ranks_themselves_give_one_digest() {
    let registry = registry();
    for (described, device) in [
        (
            r#"{"count": 16, "instruction_set": "scalar", "libraries": {"driver": "580.65.06", "nccl": "2.28.3", "nvrtc": "13.0.88"},
            "flags": [], "gpu": {"name": "NVIDIA GB300", "compute_capability": "10.3"}}"#,
            Device::Gpu,
        ),
        (r#"{"count": 16, "instruction_set": "avx2", "gpu": null}"#, Device::Cpu),
    ] {
        let laptop = Environment::list_from_json(described).unwrap();
        // What ranks collect has more in it: hosts, UUIDs, MPI, variables.
        let collected: Vec<Environment> = (0..16)
            .map(|rank| {
                let mut environment = if device == Device::Gpu { gb300() } else { host(InstructionSet::Avx2) };
                if device == Device::Cpu {
                    environment.libraries = laptop[0].libraries.clone();
                    environment.flags = laptop[0].flags.clone();
                }
                environment.host = Some(format!("node{}", rank / 4));
                environment.variables.insert("OMPI_COMM_WORLD_RANK".to_owned(), rank.to_string());
                if let environment::Fact::Present(gpu) = &mut environment.gpu {
                    gpu.uuid = Some(format!("GPU-{rank}"));
                }
                environment
            })
            .collect();
        let facts =
            DeploymentFacts { node_of_rank: (0..16).map(|rank| rank / 4).collect(), ..deployment(16, device, "auto") };
        let digest = |environments: &[Environment]| {
            let selection = resolve(&[k3(1), k3(2)], &facts, environments, &registry).unwrap();
            (selection.summary(), selection.fingerprint(&facts, environments, &registry).unwrap().digest())
        };
        assert_eq!(digest(&laptop), digest(&collected));
    }
}

#[test]
fn differences_name_field_values_and_ranks_of_every_side() {
    let fingerprint = |chunk: Option<u64>, beta: f32, note: bool| {
        let mut fields = Fields::new(Kind::Session);
        fields.add("dispatch.chunk_tokens", chunk);
        fields.add("layers.10.activation.beta", beta);
        fields.add("layers.2.activation.beta", beta);
        fields.add("same", "everywhere");
        if note {
            fields.add("note", Value::set(["b", "a", "b"]));
        }
        fields.finish().unwrap()
    };
    let kinds =
        [fingerprint(Some(64), 4.0, false), fingerprint(Some(128), 4.0, false), fingerprint(None, next_up(4.0), true)];
    let of_rank = |rank: u32| {
        &kinds[match rank {
            7 => 1,
            200 => 2,
            _ => 0,
        }]
    };
    let differences = diff((0..256).map(|rank| (Rank(rank), of_rank(rank))));
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(
        text,
        [
            "dispatch.chunk_tokens: 64 on ranks 0-6, 8-199, 201-255, 128 on rank 7, absent on rank 200",
            "layers.2.activation.beta: 4.0 (bits 0x40800000) on ranks 0-199, 201-255, 4.0000005 (bits 0x40800001) on rank 200",
            "layers.10.activation.beta: 4.0 (bits 0x40800000) on ranks 0-199, 201-255, 4.0000005 (bits 0x40800001) on rank 200",
            "note: not there on ranks 0-199, 201-255, {a, b} on rank 200",
        ]
    );
    assert_eq!(diff((0..256).map(|rank| (Rank(rank), &kinds[0]))), []);
}

#[test]
fn what_may_differ_is_sorted_into_warnings_and_the_rest() {
    let base = inputs();
    let selection = resolve(&base.problems, &base.deployment, &base.environments, &base.registry).unwrap();
    let information = |change: &dyn Fn(&mut Environment, &mut Selection)| {
        let (mut environment, mut selection) = (h200(), selection.clone());
        environment.variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
        change(&mut environment, &mut selection);
        let mut information = Information::default();
        information.environment(&environment).trail(&selection).own("rank", 0u32);
        information.finish().unwrap()
    };
    let ours = information(&|_, _| {});
    assert_eq!(ours.field("own.variables.NCCL_ALGO"), None, "that one must match, and is elsewhere");
    let worth = |theirs: &Fingerprint| -> Vec<(String, bool)> {
        let differences = diff([(Rank(0), &ours), (Rank(1), theirs)]);
        differences.iter().map(|difference| (difference.field.clone(), difference.is_worth_a_warning())).collect()
    };
    let driver = information(&|environment, _| environment.libraries.driver = environment::Fact::Absent);
    assert_eq!(worth(&driver), [("compared.driver".to_owned(), true)]);
    let other_host = information(&|environment, _| environment.host = Some("b".to_owned()));
    assert_eq!(worth(&other_host), [("own.host".to_owned(), false)]);
    // The same winner, other rejections.
    let other_reasons = information(&|_, selection| selection.layers[0].refused[0].refusals.clear());
    let path = format!("compared.trail.1.{}.refusals", selection.layers[0].refused[0].identity);
    assert_eq!(worth(&other_reasons), [(path, true)]);
}

#[test]
fn the_encoding_is_what_it_says() {
    let mut fields = Fields::new(Kind::Selection);
    fields.add("b", Value::set(["y", "x"]));
    fields.add("a", 1.0f32);
    let fingerprint = fields.finish().unwrap();
    let mut wanted = b"lockstep\x01\0\x01\x02\0\0\0".to_vec();
    wanted.extend(b"\x01\0\0\0a\x03\0\0\x80\x3f");
    wanted.extend(b"\x01\0\0\0b\x07\x02\0\0\0\x01\0\0\0x\x01\0\0\0y");
    assert_eq!(fingerprint.encode(), wanted);
    assert_eq!(fingerprint.digest(), Digest::of(&wanted));
    assert_eq!(fingerprint.listing(), "a: 1.0 (bits 0x3f800000)\nb: {x, y}\n");
}

#[test]
fn one_path_has_one_value() {
    let mut fields = Fields::new(Kind::Session);
    fields.add("a", 1u64);
    fields.add("a", 1u64);
    assert!(fields.clone().finish().is_ok());
    fields.add("a", 2u64);
    assert_eq!(
        fields.finish().unwrap_err().to_string(),
        "the fingerprint was fed a twice, with 1 and with 2; give each value a path of its own"
    );
}

#[test]
fn bytes_that_are_no_fingerprint_are_refused_by_their_fault() {
    let good = inputs().session().encode();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Fingerprint::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, b'L'), DecodeError::Magic);
    assert_eq!(with(8, 2), DecodeError::Version { found: 2 });
    assert!(with(8, 2).to_string().contains("start every rank from the same build"));
    assert!(matches!(with(10, 9), DecodeError::Malformed { at: 10, .. }));
    // A count that would make a careless reader allocate 4 GiB.
    assert!(matches!(with(14, 0xff), DecodeError::Truncated { at: 15, .. }));
    let mut longer = good.clone();
    longer.push(0);
    assert_eq!(Fingerprint::decode(&longer), Err(DecodeError::Trailing { at: good.len(), len: good.len() + 1 }));
    assert_eq!(Fingerprint::decode(&[]), Err(DecodeError::Magic));
}

fn any_value() -> impl Strategy<Value = Value> {
    let text = "\\PC{0,12}";
    prop_oneof![
        Just(Value::Absent),
        any::<bool>().prop_map(Value::Flag),
        any::<u64>().prop_map(Value::Number),
        any::<u32>().prop_map(Value::F32),
        any::<u64>().prop_map(Value::F64),
        text.prop_map(Value::Text),
        any::<[u8; 32]>().prop_map(|bytes| Value::Digest(Digest(bytes))),
        prop::collection::btree_set(text, 0..4).prop_map(Value::Set),
        prop::collection::vec(text, 0..4).prop_map(Value::List),
    ]
}

fn any_fingerprint() -> impl Strategy<Value = Fingerprint> {
    prop::collection::btree_map("[a-z.0-9]{0,10}", any_value(), 0..12)
        .prop_map(|map| Fingerprint::new(Kind::Session, map))
}

proptest! {
    #[test]
    fn bytes_read_back(fingerprint in any_fingerprint()) {
        let bytes = fingerprint.encode();
        prop_assert_eq!(Fingerprint::decode(&bytes).unwrap(), fingerprint);
        for len in 0..bytes.len() {
            prop_assert!(Fingerprint::decode(&bytes[..len]).is_err(), "cut to {} of {}", len, bytes.len());
        }
    }

    /// What is accepted is what this version writes: damage is refused, or gives another value and so another digest.
    #[test]
    fn damage_is_refused_or_seen(fingerprint in any_fingerprint(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = fingerprint.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(damaged) = Fingerprint::decode(&bytes) {
            prop_assert_eq!(damaged.encode(), bytes);
            prop_assert_ne!(damaged.digest(), fingerprint.digest());
        }
    }

    #[test]
    fn order_does_not_matter(order in Just((0..NUM_STEPS).collect::<Vec<usize>>()).prop_shuffle()) {
        let inputs = inputs();
        prop_assert_eq!(inputs.session_of(0, &order), inputs.session());
    }

    #[test]
    fn the_last_bit_of_a_constant_counts(beta in 1e-30f32..1e30, scale in 1e-30f32..1e30) {
        let mut base = inputs();
        base.activation = Activation::Situ { beta, linear_beta: Some(scale) };
        base.input_scale = scale;
        for change in [
            (|i: &mut Inputs| i.input_scale = next_up(i.input_scale)) as Change,
            |i| if let Activation::Situ { beta, .. } = &mut i.activation { *beta = next_up(*beta) },
            |i| if let Activation::Situ { linear_beta: Some(l), .. } = &mut i.activation { *l = next_up(*l) },
        ] {
            let mut after = base.clone();
            change(&mut after);
            prop_assert_ne!(base.session().digest(), after.session().digest());
        }
    }

    /// Equal set-ups never differ: which rank has which environment, what hosts are called and where caches lie.
    #[test]
    fn equal_set_ups_give_one_selection_digest(
        ranks in Just((0..4usize).collect::<Vec<_>>()).prop_shuffle(),
        hosts in prop::collection::vec("[a-z]{1,8}", 4),
        variables in prop::collection::vec(("[A-Z_]{1,8}", "[a-z]{0,4}"), 0..6),
    ) {
        let mut base = inputs();
        base.environments = vec![h200(), h200(), gb300(), gb300()];
        let mut other = base.clone();
        other.environments = ranks.iter().map(|rank| base.environments[*rank].clone()).collect();
        for (environment, host) in other.environments.iter_mut().zip(hosts) {
            environment.host = Some(host);
            environment.variables.extend(variables.iter().cloned());
        }
        prop_assert_eq!(base.selection(), other.selection());
    }
}
