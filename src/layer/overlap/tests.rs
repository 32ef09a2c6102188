//! Which layers' chunks overlap; and, on a GPU with NVRTC, that steps whose chunks do have the bits of whole ones. One process is
//! one rank here: with others `tests/ranks/gpu/overlap.rs` has the same.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::config::{Activations, BackendFamily, Choice as _};
use crate::fault::Faults;
use crate::layer::testing::session_on_gpu;
use crate::layer::{LayerInput, LayerOutput, Part, Session};
use crate::random::Random;
use crate::routing::TopK;

const ALL: Facts = Facts { asked: config::Overlap::On, num_ranks: 2, is_recorded: false };

#[test]
fn refusals_name_the_layer_and_the_cure() {
    let refused = |facts: Facts, made| facts.choose::<()>(LayerIdx(3), made).unwrap_err().to_string();
    let on_hosts = refused(ALL, None);
    for part in ["layer 3", "runs on hosts", "cluster.device: gpu", "dispatch.overlap: off"] {
        assert!(on_hosts.contains(part), "{on_hosts}");
    }
    assert!(refused(Facts { is_recorded: true, ..ALL }, Some(())).contains("moe.cuda_graph: off"));
}

#[test]
fn auto_says_why_not_and_off_says_nothing_else() {
    let chosen = |facts: Facts, made: Option<()>| facts.choose(LayerIdx(3), made).unwrap();
    let auto = Facts { asked: config::Overlap::Auto, ..ALL };
    assert_eq!(chosen(auto, Some(())), Ok(()));
    assert_eq!(chosen(Facts { num_ranks: 1, ..auto }, Some(())), Err(NotOverlapped::Alone.to_string()));
    assert_eq!(chosen(Facts { num_ranks: 1, ..ALL }, Some(())), Ok(()), "asked for by name");
    assert_eq!(chosen(auto, None), Err(NotOverlapped::OnHost.to_string()));
    let off = Facts { asked: config::Overlap::Off, ..ALL };
    for made in [None, Some(())] {
        assert_eq!(chosen(off, made), Err(NO_OVERLAP_ASKED.to_owned()));
    }
}

/// Tokens of a rank that sessions are opened for: the last of [`TOKENS`].
const CAPACITY: usize = 4100;

/// From whole steps to those of 2 and 4 chunks, and back: sets of buffers hold what others left. Those of [`from_outside`] follow.
const TOKENS: [usize; 10] = [700, 0, 513, 37, CAPACITY, 511, 512, 1400, 513, 700];
/// The first of them.
const FIRST_FROM_OUTSIDE: usize = 7;

/// Expert 1 has a row in 27: a whole step's are too many for the order over K that a chunk's few would have.
fn from_outside(num_tokens: usize) -> TopK {
    let few = |token: usize| if token.is_multiple_of(27) { 1 } else { -1 };
    let idx = (0..num_tokens).flat_map(|token| [0, few(token)]).collect();
    TopK { num_topk: 2, idx, weights: [0.5, 0.25].repeat(num_tokens) }
}

fn open(
    place: (&World, &Path),
    layer: (&str, BackendFamily, Activations),
    (overlap, chunk_tokens): (config::Overlap, Option<usize>),
) -> Session {
    session_on_gpu(place, layer, CAPACITY, |deployment| {
        deployment.dispatch.overlap = overlap;
        deployment.dispatch.chunk_tokens = chunk_tokens;
    })
}

fn run(world: &World, session: &Session, what: &str) -> Vec<LayerOutput> {
    let mut random = Random::new(1);
    let mut value = || half::bf16::from_f32(((random.bits() >> 40) as f32 / 8_388_608.0) - 1.0).to_f32();
    let mut outputs = Vec::new();
    for (step, num_tokens) in TOKENS.into_iter().enumerate() {
        let hidden: Vec<f32> = (0..num_tokens * session.geometry().hidden).map(|_| value()).collect();
        let topk = from_outside(num_tokens);
        for layer in session.layers() {
            let topk = (step >= FIRST_FROM_OUTSIDE).then_some(&topk);
            let input = LayerInput { hidden: &hidden, topk, part: Part::Block, step: step as u64, record_spans: false };
            let output = layer.forward(world, session.capacity(), &input);
            outputs.push(output.unwrap_or_else(|error| panic!("{what}, step {step}: {error}")));
        }
    }
    outputs
}

/// Fixtures through both backends in both modes: steps that are cut have the bits and counts of whole ones, in both orders over
/// K; and chunks that were declared have those of the same chunks one after the other.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_overlapping_chunks_have_the_bits_of_whole_steps() {
    let world = World::init(Duration::from_secs(60), Faults::default()).unwrap();
    let work = tempfile::tempdir().unwrap();
    for fixture in ["k3-tiny", "modelopt-dsv3-mixed"] {
        for technique in [BackendFamily::MmaSync, BackendFamily::Wgmma] {
            for activations in [Activations::Bf16, Activations::Checkpoint] {
                for chunk_tokens in [None, Some(300)] {
                    let what = format!("{fixture} {} {} {chunk_tokens:?}", technique.name(), activations.name());
                    let [found, wanted] = [config::Overlap::On, config::Overlap::Off].map(|overlap| {
                        let layer = (fixture, technique, activations);
                        let session = open((&world, work.path()), layer, (overlap, chunk_tokens));
                        session.enter_steps(&world);
                        let outputs = run(&world, &session, &what);
                        session.close(&world);
                        outputs
                    });
                    let num_layers = found.len() / TOKENS.len();
                    for (step, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                        let num_tokens = TOKENS[step / num_layers];
                        compare(found, wanted, &format!("{what}, {num_tokens} tokens"));
                        let num_chunks = match chunk_tokens {
                            None => config_cut(num_tokens),
                            Some(chunk_tokens) => num_tokens.div_ceil(chunk_tokens).max(1),
                        };
                        assert_eq!(found.stats.num_chunks, num_chunks as u64, "{what}, {num_tokens} tokens");
                    }
                }
            }
        }
    }
    world.finish();
}

/// Random steps of 0 to 1,500 tokens, with experts from outside or the router's, on sessions whose layers have whole and cut steps in
/// turns: bits of whole steps, and memory that stays as it is. `LOCKSTEP_TEST_STEPS` and `LOCKSTEP_TEST_SEED` say otherwise how many
/// and which.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_overlapping_random_steps_have_the_bits_of_whole_ones() {
    const MOST: usize = 1500;
    let setting = |name, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let num_steps: u64 = setting("LOCKSTEP_TEST_STEPS", 300);
    let mut random = Random::new(setting("LOCKSTEP_TEST_SEED", 20_261_201));
    let mut below = |limit: usize| random.below(limit);
    let world = World::init(Duration::from_secs(60), Faults::default()).unwrap();
    let work = tempfile::tempdir().unwrap();
    let layer = ("k3-tiny", BackendFamily::Wgmma, Activations::Checkpoint);
    let sessions =
        [config::Overlap::On, config::Overlap::Off].map(|overlap| open((&world, work.path()), layer, (overlap, None)));
    sessions[0].enter_steps(&world);
    let (width, num_experts) = (sessions[0].geometry().hidden, sessions[0].geometry().num_experts);
    let hidden: Vec<f32> =
        (0..MOST * width).map(|_| half::bf16::from_f32(below(20_001) as f32 / 5000.0 - 2.0).to_f32()).collect();
    let mut held = None;
    for step in 0..num_steps {
        // The first two make room for all.
        let num_tokens = if step < 2 { MOST } else { below(MOST + 1) };
        let mut topk = TopK { num_topk: 3, idx: Vec::new(), weights: [0.5, 0.25, 0.0].repeat(num_tokens) };
        for _ in 0..num_tokens {
            let expert = i32::try_from(below(num_experts)).unwrap();
            let few = if below(40) == 0 { i32::try_from(below(num_experts)).unwrap() } else { expert };
            topk.idx.extend([expert, few, -1]);
        }
        let from_outside = if step < 2 { step == 0 } else { below(2) == 0 };
        let topk = from_outside.then_some(&topk);
        for at in 0..sessions[0].layers().len() {
            let hidden = &hidden[..num_tokens * width];
            let input = LayerInput { hidden, topk, part: Part::Block, step, record_spans: false };
            let [found, wanted] =
                [0, 1].map(|of| sessions[of].layers()[at].forward(&world, sessions[of].capacity(), &input).unwrap());
            compare(&found, &wanted, &format!("step {step}, layer {at}, {num_tokens} tokens"));
        }
        // Lists of experts, an entry each, may be of more kernels than before.
        let now = crate::cuda::held_bytes();
        assert!(step < 2 || now <= *held.get_or_insert(now) + (1 << 16), "step {step}: {now} bytes");
    }
    sessions.into_iter().for_each(|session| session.close(&world));
    world.finish();
}

fn config_cut(num_tokens: usize) -> usize {
    Cut::ByTokens.num_chunks(num_tokens, num_tokens)
}

fn compare(found: &LayerOutput, wanted: &LayerOutput, what: &str) {
    assert_eq!((found.width, found.values.len()), (wanted.width, wanted.values.len()), "{what}");
    for (at, (a, b)) in found.values.iter().zip(&wanted.values).enumerate() {
        let (row, column) = (at / found.width, at % found.width);
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: row {row}, column {column} is {a:e}, not {b:e}");
    }
    let counts = |stats: &LayerStats| {
        let mut rows = stats.routed_rows.clone();
        rows.sort_by_key(|(identity, _)| identity.to_string());
        (rows, stats.rows_per_expert.clone(), stats.num_tokens_received, stats.fc1_input, stats.fc2_input)
    };
    assert_eq!(counts(&found.stats), counts(&wanted.stats), "{what}: rows and block scales");
}
