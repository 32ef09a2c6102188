//! A thousand numbers of tokens through layers of one session, in this process: a world of one.

use std::collections::BTreeSet;
use std::time::Duration;

use lockstep::config::{BackendFamily, Choice, Deployment, Device};
use lockstep::env::EnvVars;
use lockstep::facts;
use lockstep::fault::Faults;
use lockstep::layer::{JitOptions, LayerInput, Part, Session, SessionOptions};
use lockstep::world::World;
use lockstep::{cuda, jit};

use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, cache};
use crate::support::run::word;

/// Tokens of a step at most, and how many steps there are.
const NUM_COUNTS: usize = 1000;

/// What was compiled and loaded in this process until now.
fn kernels() -> (u64, u64) {
    (jit::num_compiled(), cuda::num_modules_loaded())
}

/// Every number of tokens from 1 to 1,000, none next to its neighbours, as a server's batches come: what they need was
/// compiled and loaded when the session opened, whatever the backend and the number.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_a_thousand_token_counts_compile_nothing() {
    let env = EnvVars::read().expect("an environment");
    let world = World::init(Duration::from_secs(60), Faults::default()).expect("a world of one");
    let machine = facts::machine(&world, &env, None).expect("a machine");
    let hidden: Vec<f32> =
        (0_u8..=255).cycle().take(NUM_COUNTS * 256).map(|byte| f32::from(byte) / 128.0 - 1.0).collect();
    for backend in GPU_BACKENDS {
        let mut deployment = Deployment::default();
        deployment.cluster.device = Device::Gpu;
        deployment.moe.backend = BackendFamily::from_name(backend).expect("a family");
        deployment.dispatch.num_max_tokens_per_rank = NUM_COUNTS;
        let options = SessionOptions {
            checkpoint: fixtures::checkpoint("k3-tiny"),
            layers: None,
            deployment,
            num_threads: 4,
            gpu_ordinal: machine.gpu_ordinal,
            jit: JitOptions { cache_dir: Some(word(cache()).into()), nvrtc: env.nvrtc().map(str::to_owned) },
            nccl: env.nccl().map(str::to_owned),
            cublaslt: env.cublaslt().map(str::to_owned),
            environment: machine.environment.clone(),
            input_is_bf16: true,
            part: Part::Block,
            num_tokens: Some(NUM_COUNTS),
            progress: &|_, _| {},
        };
        let session = Session::open(&world, &options).unwrap_or_else(|error| panic!("{backend}: {error}"));
        session.enter_steps(&world);
        let ready = kernels();
        assert!(ready.1 > 0, "{backend}: kernels are loaded before the first step");
        let mut seen = BTreeSet::new();
        for step in 0..NUM_COUNTS {
            // 617 has no factor in common with 1,000.
            let num_tokens = step * 617 % NUM_COUNTS + 1;
            seen.insert(num_tokens);
            for layer in session.layers() {
                let hidden = &hidden[..num_tokens * 256];
                let input =
                    LayerInput { hidden, topk: None, part: Part::Block, step: step as u64, record_spans: false };
                let output = layer.forward(&world, session.capacity(), &input);
                let output = output.unwrap_or_else(|error| panic!("{backend}, {num_tokens} tokens: {error}"));
                assert_eq!(output.values.len(), num_tokens * 256, "{backend}, {num_tokens} tokens");
            }
            assert_eq!(kernels(), ready, "{backend}: (compiled, loaded) behind {num_tokens} tokens");
        }
        assert_eq!(seen.len(), NUM_COUNTS);
        session.close(&world);
    }
    world.finish();
}
