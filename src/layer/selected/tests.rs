//! What a session compares: which of its inputs are in it, and what is said where ranks differ.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::backend::{self, Machine};
use crate::checkpoint::Checkpoint;
use crate::config::{Activations, Combine, CombineDtype, CudaGraph, Overlap, Payload, Transport};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::placement::Placement;
use crate::dispatch::travel::Travel;
use crate::exit::{Classify, Known};
use crate::ids::Rank;
use crate::layer::load::Loader;
use crate::layer::plan::{self, Asked};
use crate::layer::{JitOptions, Part};
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;
use crate::sample::{Geometry, SampleSpec};
use crate::select::environment::Fact;
use crate::select::fingerprint::diff;
use crate::select::tactics::{RowBucket, Tactic};
use crate::select::tests::worlds::host;
use crate::select::{Digest, InstructionSet, LayerDecision};
use crate::world::simulated::simulate;

/// Everything that a session is made from, to change in one place.
#[derive(Clone)]
struct Made {
    build: [String; 4],
    deployment: Deployment,
    environments: Vec<Environment>,
    part: Part,
    input_is_bf16: bool,
    num_tokens: Option<usize>,
    change_geometry: fn(&mut MoeGeometry),
    change_loaded: fn(&mut MoeLayer),
}

impl Made {
    fn new() -> Self {
        let mut rank = host(InstructionSet::Avx2);
        rank.libraries.nccl = Fact::Present("2.28.3".to_owned());
        rank.libraries.nvrtc = Fact::Present("13.0.88".to_owned());
        rank.libraries.cublaslt = Fact::Present("13.0.2".to_owned());
        rank.variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
        Self {
            build: ["0.1.0", "abc", "x86_64-unknown-linux-gnu", "release"].map(str::to_owned),
            deployment: Deployment::default(),
            environments: vec![rank; 2],
            part: Part::Block,
            input_is_bf16: true,
            num_tokens: Some(64),
            change_geometry: |_| {},
            change_loaded: |_| {},
        }
    }

    /// The fingerprints of selection and session, as a rank of a run makes them from this checkpoint.
    fn fingerprints(&self, checkpoint: &Checkpoint) -> (Fingerprint, Fingerprint) {
        let Self { deployment, environments, part, input_is_bf16, num_tokens, .. } = self.clone();
        let asked = Asked { layers: None, deployment: &deployment, input_is_bf16, part };
        let plans = plan::plan(checkpoint, &asked).expect("plans");
        let mut geometry = checkpoint.model().geometry.clone();
        (self.change_geometry)(&mut geometry);
        let problems: Vec<_> = plans.iter().map(|plan| plan.problem.clone()).collect();
        let registry = Registry::builtin();
        let facts = DeploymentFacts::new(&deployment, vec![0; environments.len()]).expect("ranks");
        let selection = resolve(&problems, &facts, &environments, &registry).expect("serves");
        let fingerprint = selection.fingerprint(&facts, &environments, &registry).expect("one value a path");
        let options = SessionOptions {
            checkpoint: checkpoint.dir().to_owned(),
            layers: None,
            deployment: deployment.clone(),
            num_threads: 1,
            gpu_ordinal: 0,
            jit: JitOptions::default(),
            nccl: None,
            cublaslt: None,
            environment: environments[0].clone(),
            input_is_bf16,
            part,
            num_tokens,
            progress: &|_, _| {},
        };
        let [version, revision, target, profile] = &self.build;
        let build = BuildFacts { version, revision, target, profile };
        let decisions: Vec<_> = plans.iter().map(|plan| plan.decision).collect();
        let mut fields = must_match(build, &options, (&geometry, &decisions), (&selection, &fingerprint));
        for plan in &plans {
            let mut layer = load(checkpoint, (&geometry, environments.len()), plan, &selection);
            (self.change_loaded)(&mut layer);
            add_loaded(&mut fields, &layer);
        }
        (fingerprint, fields.finish().expect("one value a path"))
    }
}

/// The layer as rank 0 of a run loads it, its scale not yet reduced.
fn load(
    checkpoint: &Checkpoint,
    (geometry, num_ranks): (&MoeGeometry, usize),
    plan: &LayerPlan,
    selection: &Selection,
) -> MoeLayer {
    let backend = backend::build("reference", &Machine::default()).expect("the reference runs anywhere");
    let placement = Placement::new(geometry.num_experts, num_ranks);
    let loader = Loader {
        checkpoint,
        backend: &*backend,
        dense: None,
        placement,
        rank: Rank(0),
        batch_invariant: false,
        progress: &|_| {},
    };
    let decision: LayerDecision = plan.decision;
    let loaded = loader.load(&plan.manifest, &decision).expect("loads");
    MoeLayer {
        decision,
        selected: selection.layers[0].clone(),
        geometry: geometry.clone(),
        router: loaded.router,
        latent: loaded.latent,
        shared: loaded.shared,
        experts: loaded.experts,
        input_scale: Some(loaded.largest_input_scale),
        travel: Travel {
            placement,
            payload: payload_form(&decision, 1.0),
            mode: CombineMode::Slot,
            row_form: row_form(geometry, &decision),
        },
        nodes: None,
        carrier: Transport::Host,
        device: None,
        block: None,
        graphs: Err(String::new()),
        overlap: Err(String::new()),
        tactics: [Tactic::UNTUNED; RowBucket::NUM],
        weight_bytes: loaded.weight_bytes,
    }
}

fn next_up(value: f32) -> f32 {
    f32::from_bits(value.to_bits() + 1)
}

/// A field's path without numbers of layers.
fn pattern(path: &str) -> String {
    match path.split('.').collect::<Vec<_>>()[..] {
        ["layers", _, ref field @ ..] => format!("layers.*.{}", field.join(".")),
        ["variables", _] => "variables.*".to_owned(),
        ["layout", "packed", _] => "layout.packed.*".to_owned(),
        _ => path.to_owned(),
    }
}

type Change = fn(&mut Made);

/// Changes of one thing, with a field of the session's own that each must move; those of the selection's fields are with
/// [`crate::select::fingerprint`].
fn changes() -> Vec<(&'static str, &'static str, Change)> {
    fn situ(beta: f32, linear_beta: f32) -> Option<Activation> {
        Some(Activation::Situ { beta, linear_beta: Some(linear_beta) })
    }
    vec![
        ("version", "build.version", |m| m.build[0].push('1')),
        ("source of the build", "build.revision", |m| m.build[1].push('d')),
        ("target of the build", "build.target", |m| m.build[2].push('x')),
        ("profile of the build", "build.profile", |m| m.build[3] = "debug".to_owned()),
        ("NCCL", "versions.nccl", |m| m.environments[0].libraries.nccl = Fact::Present("2.28.9".to_owned())),
        ("NVRTC", "versions.nvrtc", |m| m.environments[0].libraries.nvrtc = Fact::Absent),
        ("cublasLt", "versions.cublaslt", |m| m.environments[0].libraries.cublaslt = Fact::Absent),
        ("a variable", "variables.*", |m| {
            m.environments[0].variables.insert("NCCL_ALGO".to_owned(), "Tree".to_owned());
        }),
        ("number of ranks", "selection", |m| m.environments.push(m.environments[0].clone())),
        ("capacity", "capacity.num_max_tokens_per_rank", |m| m.deployment.dispatch.num_max_tokens_per_rank += 1),
        ("chunk size", "capacity.tokens_at_once", |m| m.deployment.dispatch.chunk_tokens = Some(32)),
        ("tokens", "capacity.tokens_at_once", |m| m.num_tokens = Some(63)),
        ("part", "flags.part", |m| m.part = Part::Routed),
        ("CUDA graphs", "flags.cuda_graph", |m| m.deployment.moe.cuda_graph = CudaGraph::On),
        ("overlap", "flags.overlap", |m| m.deployment.dispatch.overlap = Overlap::On),
        ("input dtype", "flags.input_is_bf16", |m| m.input_is_bf16 = false),
        ("beta", "layers.*.activation.beta", |m| m.deployment.moe.activation = situ(next_up(4.0), 25.0)),
        ("linear_beta", "layers.*.activation.linear_beta", |m| m.deployment.moe.activation = situ(4.0, next_up(25.0))),
        ("activation", "layers.*.activation", |m| m.deployment.moe.activation = Some(Activation::Swiglu)),
        ("routing", "layers.*.routing", |m| m.change_geometry = |g| g.routing = RoutingMethod::Renormalize),
        ("scaling", "layers.*.routing.scaling", |m| {
            m.change_geometry = |g| g.routing = RoutingMethod::KimiK3 { scaling: next_up(1.0) };
        }),
        ("a norm's epsilon", "layers.*.constants.norm_eps", |m| {
            m.change_geometry = |g| {
                let latent = g.latent.as_mut().expect("K3 has a latent");
                latent.norm_eps = latent.norm_eps.map(next_up);
            };
        }),
        ("payload", "layers.*.travel.payload", |m| m.deployment.dispatch.payload = Payload::Bf16),
        ("combine", "layers.*.travel.combine", |m| m.deployment.moe.combine = Combine::Rank),
        ("combine dtype", "layers.*.travel.combine_dtype", |m| {
            m.deployment.dispatch.combine_dtype = CombineDtype::Bf16;
        }),
        ("width of rows", "layers.*.travel.return_bytes", |m| m.change_geometry = |g| g.expert_hidden += 16),
        ("packing", "layout.packed.*", |m| m.environments[1].instruction_set = Fact::Present(InstructionSet::Scalar)),
        ("activations", "selection", |m| m.deployment.moe.activations = Activations::Bf16),
        ("reduced input_scale", "layers.*.scales.fc1_input", |m| {
            m.change_loaded = |l| l.input_scale = l.input_scale.map(next_up);
        }),
        ("what carries tokens", "layers.*.travel.carrier", |m| {
            m.change_loaded = |l| l.carrier = Transport::Nccl;
        }),
        ("a router's bias", "layers.*.scales.router_bias", |m| {
            m.change_loaded = |l| {
                let bias = &mut l.router.bias.as_mut().expect("K3's router has one")[0];
                *bias = next_up(*bias);
            };
        }),
        ("a norm's weight", "layers.*.scales.latent_norm", |m| {
            m.change_loaded = |l| {
                let norm = l.latent.as_mut().and_then(|latent| latent.norm.as_mut()).expect("K3 norms its latent");
                norm.weight[0] = next_up(norm.weight[0]);
            };
        }),
        ("a shared expert's scale", "layers.*.scales.shared", |m| {
            m.change_loaded = |l| {
                let shared = l.shared.as_mut().expect("K3 has shared experts");
                shared.scales.push(1.0);
            };
        }),
        ("a shared expert's input_scale", "layers.*.scales.shared_fc1_input", |m| {
            m.change_loaded = |l| l.shared.as_mut().expect("K3 has shared experts").input_scale = Some(0.5);
        }),
    ]
}

/// A checkpoint of Kimi K3's layout, a few kilobytes large.
fn tiny_k3() -> (tempfile::TempDir, Checkpoint) {
    let mut spec = SampleSpec::of(Geometry::KimiK3);
    (spec.hidden, spec.latent, spec.intermediate, spec.num_experts, spec.num_topk) = (64, Some(32), 32, 8, 2);
    spec.fit_groups();
    let dir = tempfile::tempdir().expect("a directory");
    spec.plan().expect("a plan").write(dir.path(), &|_| {}).expect("written");
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    (dir, checkpoint)
}

/// The digest that a run compares, made by the run's own code: any single change gives another, no two changes give the
/// same, and every field that is the session's own is moved by one.
#[test]
fn any_single_change_gives_another_session() {
    let (_dir, checkpoint) = tiny_k3();
    let (selection, before) = Made::new().fingerprints(&checkpoint);
    let of_selection: BTreeSet<&str> = selection.fields().map(|(path, _)| path).collect();
    let own = before.fields().map(|(path, _)| path).filter(|path| !of_selection.contains(path));
    let own: BTreeSet<String> = own.map(pattern).collect();
    let mut moved: BTreeSet<String> = BTreeSet::new();
    let mut digests: BTreeMap<Digest, &str> = BTreeMap::from([(before.digest(), "none")]);
    for (name, field, change) in changes() {
        let mut made = Made::new();
        change(&mut made);
        let (_, after) = made.fingerprints(&checkpoint);
        let differences = diff([(Rank(0), &before), (Rank(1), &after)]);
        let fields: BTreeSet<String> = differences.iter().map(|difference| pattern(&difference.field)).collect();
        assert!(fields.contains(field), "{name} does not move {field}, but {fields:?}");
        moved.insert(field.to_owned());
        let twin = digests.insert(after.digest(), name);
        assert_eq!(twin, None, "{name}");
    }
    assert_eq!(moved, own, "left: fields that the table of changes names, right: fields of the session alone");
}

/// What differs by nature is not in it, whichever rank makes it.
#[test]
fn what_is_a_ranks_own_gives_no_other_session() {
    let (_dir, checkpoint) = tiny_k3();
    let wanted = Made::new().fingerprints(&checkpoint);
    let mut made = Made::new();
    for (idx, rank) in made.environments.iter_mut().enumerate() {
        rank.host = Some(format!("node{idx}"));
        rank.variables.insert("SLURM_PROCID".to_owned(), idx.to_string());
        rank.info.insert("cache_dir".to_owned(), format!("/tmp/{idx}"));
        rank.libraries.mpi = Fact::Present(format!("4.1.{idx}"));
    }
    made.deployment.name = "another".to_owned();
    made.deployment.log.level = "trace".to_owned();
    made.deployment.jit.cache_dir = Some("/elsewhere".to_owned());
    assert_eq!(made.fingerprints(&checkpoint), wanted);
}

/// The one message of a world in which `of_rank` brings what it brings.
fn message(num_ranks: usize, topic: Topic, of_rank: impl Fn(usize) -> Fingerprint + Sync) -> String {
    let ended = simulate(num_ranks, |ranks| agreement::agree_on(ranks, topic, Ok(of_rank(ranks.rank().index()))));
    let refusals = ended.into_iter().map(|(outcome, _)| outcome.expect_err("ranks differ"));
    let spoken: Vec<String> = refusals
        .filter(|refusal| refusal.known() == (Known::Everywhere { speaks: true }))
        .map(|refusal| format!("exit {}: {refusal}", refusal.exit().code()))
        .collect();
    spoken.join("\n")
}

#[test]
fn ranks_that_would_run_or_have_loaded_other_things_are_told() {
    let (_dir, checkpoint) = tiny_k3();
    let session = |change: Change| {
        let mut made = Made::new();
        change(&mut made);
        made.fingerprints(&checkpoint).1
    };
    let alike = session(|_| {});
    let beta = session(|m| {
        m.deployment.moe.activation = Some(Activation::Situ { beta: next_up(4.0), linear_beta: Some(25.0) });
    });
    insta::assert_snapshot!("plan", message(4, PLAN, |rank| if rank == 2 { beta.clone() } else { alike.clone() }));
    let stale = session(|m| m.change_loaded = |l| l.shared.as_mut().expect("shared experts").scales.push(1.0));
    insta::assert_snapshot!(
        "session",
        message(16, SESSION, |rank| if rank < 8 { stale.clone() } else { alike.clone() })
    );
    let scale = session(|m| m.change_loaded = |l| l.input_scale = l.input_scale.map(next_up));
    insta::assert_snapshot!("scale", message(2, SESSION, |rank| if rank == 1 { scale.clone() } else { alike.clone() }));
}
