//! Which recordings there are; and, on a GPU with NVRTC, that replays serve any number of tokens with the bits of steps that hosts
//! follow. One process is one rank here: the session is the product's own.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::config::{Activations, BackendFamily};
use crate::fault::Faults;
use crate::layer::Session;
use crate::layer::testing::session_on_gpu;
use crate::random::Random;
use crate::routing::TopK;

#[test]
fn recordings_are_few_and_serve_every_number_of_tokens() {
    for capacity in [1, 7, 255, 256, 300, 8192, 10_000] {
        let mut kinds: Vec<usize> = (0..=capacity).map(|tokens| rows_of(tokens, capacity, true)).collect();
        for (tokens, rows) in kinds.iter().enumerate() {
            assert!(*rows >= tokens && *rows <= capacity, "{tokens} of {capacity}: {rows}");
            assert!(*rows <= MIN_ROWS.max(ROWS_FACTOR * tokens), "{tokens} of {capacity}: {rows}");
        }
        kinds.dedup();
        assert!(kinds.len() <= 4, "{kinds:?}");
        assert_eq!(rows_of(0, capacity, false), capacity);
    }
}

#[test]
fn refusals_name_the_layer_and_the_cure() {
    let refused = |why| GraphRefusal { layer: LayerIdx(3), why }.to_string();
    let of_nccl = refused(NotRecorded::HostsTell { transport: "nccl" });
    for part in ["layer 3", "over nccl", "dispatch.transport: nvlink", "moe.cuda_graph: off"] {
        assert!(of_nccl.contains(part), "{of_nccl}");
    }
    for why in [NotRecorded::OnHost, NotRecorded::RouterOnHost, NotRecorded::SharedGpu] {
        assert!(refused(why).contains("moe.cuda_graph: off"));
    }
}

/// Tokens of a rank that sessions are opened for.
const CAPACITY: usize = 37;

impl Random {
    /// bf16 values about 1, or f32 ones that are none.
    fn hidden(&mut self, len: usize, are_bf16: bool) -> Vec<f32> {
        let mut value = || (self.below(20_001) as f32 - 10_000.0) / 5000.0;
        (0..len).map(|_| if are_bf16 { half::bf16::from_f32(value()).to_f32() } else { value() }).collect()
    }

    /// Experts from outside: cases B6 and B7, some masked and some twice.
    fn topk(&mut self, num_tokens: usize, num_experts: usize) -> TopK {
        const NUM_TOPK: usize = 3;
        let mut topk = TopK { num_topk: NUM_TOPK, idx: Vec::new(), weights: Vec::new() };
        for _ in 0..num_tokens {
            let expert = i32::try_from(self.below(num_experts)).unwrap();
            let other = i32::try_from(self.below(num_experts)).unwrap();
            topk.idx.extend([expert, if self.below(2) == 0 { expert } else { other }, -1]);
            topk.weights.extend([0.5, 0.25, 0.0]);
        }
        topk
    }
}

fn open(place: (&World, &Path), fixture: &str, technique: BackendFamily, activations: Activations) -> Session {
    session_on_gpu(place, (fixture, technique, activations), CAPACITY, |deployment| {
        deployment.moe.cuda_graph = CudaGraph::On;
    })
}

/// A step's part, tokens, dtype, and whether experts come from outside.
type Step = (Part, usize, bool, bool);

const STEPS: [Step; 17] = [
    (Part::Block, 7, true, false),
    (Part::Block, 1, true, false),
    (Part::Block, 0, true, false),
    (Part::Block, CAPACITY, true, false),
    (Part::Block, 7, true, false),
    (Part::Routed, 7, true, false),
    (Part::Routed, CAPACITY, true, false),
    (Part::Routed, 0, true, false),
    (Part::Block, 20, true, true),
    (Part::Block, 3, true, true),
    (Part::Block, 0, true, true),
    (Part::Block, CAPACITY, true, true),
    (Part::Block, 5, false, false),
    (Part::Block, CAPACITY, false, false),
    (Part::Block, 0, false, false),
    (Part::Block, 36, true, false),
    (Part::Block, 2, true, false),
];

/// Every fixture through both backends in both modes: a session whose layers are replayed gives the bits, experts and counts of
/// one whose hosts follow, for any number of tokens in any order; then a thousand replays in memory that stays as it is.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_replays_have_the_bits_of_steps_that_hosts_follow() {
    let world = World::init(Duration::from_secs(60), Faults::default()).unwrap();
    // Both sessions of a fixture, and layers of one shape, have most kernels in common.
    let work = tempfile::tempdir().unwrap();
    for fixture in ["k3-tiny", "modelopt-dsv3-tiny", "modelopt-qwen3-tiny", "modelopt-dsv3-mixed"] {
        for technique in [BackendFamily::MmaSync, BackendFamily::Wgmma] {
            for activations in [Activations::Bf16, Activations::Checkpoint] {
                let what = format!("{fixture} {} {}", technique.name(), activations.name());
                let mut session = open((&world, work.path()), fixture, technique, activations);
                session.enter_steps(&world);
                let replayed = run(&world, &session, &what);
                let captures: u64 = replayed.iter().map(|output| output.stats.num_graph_captures).sum();
                let replays: u64 = replayed.iter().map(|output| output.stats.num_graph_replays).sum();
                let num_layers = session.layers().len() as u64;
                assert_eq!(captures + replays, STEPS.len() as u64 * num_layers, "{what}: every step in a graph");
                assert!(replays >= 9 * num_layers, "{what}: {replays} replays, {captures} captures");
                if fixture == "k3-tiny" {
                    thousand(&world, &session, &what);
                }
                session.follow_every_step();
                let followed = run(&world, &session, &what);
                for (step, (found, wanted)) in replayed.iter().zip(&followed).enumerate() {
                    compare(found, wanted, &format!("{what}, {:?}", STEPS[step / session.layers().len()]));
                }
                session.close(&world);
            }
        }
    }
    world.finish();
}

fn run(world: &World, session: &Session, what: &str) -> Vec<LayerOutput> {
    let mut random = Random(11);
    let mut outputs = Vec::new();
    for (step, (part, num_tokens, are_bf16, from_outside)) in STEPS.into_iter().enumerate() {
        let geometry = session.geometry();
        let hidden = random.hidden(num_tokens * geometry.hidden, are_bf16);
        let topk = random.topk(num_tokens, geometry.num_experts);
        for layer in session.layers() {
            let topk = from_outside.then_some(&topk);
            let input = LayerInput { hidden: &hidden, topk, part, step: step as u64, record_spans: false };
            let output = layer.forward(world, session.capacity(), &input);
            outputs.push(output.unwrap_or_else(|error| panic!("{what}, step {step}: {error}")));
        }
    }
    outputs
}

fn compare(found: &LayerOutput, wanted: &LayerOutput, what: &str) {
    assert_eq!(wanted.stats.num_graph_replays + wanted.stats.num_graph_captures, 0, "{what}: hosts follow");
    assert_eq!(found.width, wanted.width, "{what}");
    assert_eq!(found.values.len(), wanted.values.len(), "{what}");
    for (at, (a, b)) in found.values.iter().zip(&wanted.values).enumerate() {
        let (row, column) = (at / found.width, at % found.width);
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: row {row}, column {column} is {a:e}, not {b:e}");
    }
    let of = |output: &LayerOutput| output.topk.as_ref().map(|topk| (topk.idx.clone(), topk.weights.clone()));
    assert_eq!(of(found), of(wanted), "{what}: experts");
    let counts = |stats: &LayerStats| {
        let mut rows = stats.routed_rows.clone();
        rows.sort_by_key(|(identity, _)| identity.to_string());
        (rows, stats.shared_rows.clone(), stats.rows_per_expert.clone(), stats.num_tokens_received)
    };
    assert_eq!(counts(&found.stats), counts(&wanted.stats), "{what}: rows");
    let scales = |stats: &LayerStats| (stats.fc1_input, stats.fc2_input);
    assert_eq!(scales(&found.stats), scales(&wanted.stats), "{what}: block scales");
    assert_eq!(found.stats.num_device_waits, 0, "{what}: no host waits on the way");
}

/// A thousand steps of any number of tokens: nothing is recorded anew, and no memory is taken.
fn thousand(world: &World, session: &Session, what: &str) {
    let mut random = Random(5);
    let hidden = random.hidden(CAPACITY * session.geometry().hidden, true);
    let held = crate::cuda::held_bytes();
    for step in 0..1000 {
        let hidden = &hidden[..random.below(CAPACITY + 1) * session.geometry().hidden];
        for layer in session.layers() {
            let input = LayerInput { hidden, topk: None, part: Part::Block, step, record_spans: false };
            let output = layer.forward(world, session.capacity(), &input).unwrap();
            // The steps before may have made room for more slots than a layer had when it was recorded.
            assert!(step == 0 || output.stats.num_graph_replays == 1, "{what}, step {step}");
        }
        assert_eq!(crate::cuda::held_bytes(), held, "{what}, step {step}");
    }
}
