//! What changes a digest and what does not, and that bytes of other ranks can't do harm.

mod changes;
mod diff;
mod digest;
mod encoding;

use super::super::environment::Environment;
use super::super::tests::worlds::{deployment, h200, k3, qwen3, registry};
use super::super::*;
use super::*;
use crate::config::Device;
use crate::ids::LayerIdx;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// Everything that a session is made of, in a form that tests can change in one place.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    pub problems: Vec<Problem>,
    pub deployment: DeploymentFacts,
    pub environments: Vec<Environment>,
    pub registry: Registry,
    pub version: String,
    pub revision: String,
    pub target: &'static str,
    pub profile: &'static str,
    pub activation: Activation,
    pub routing: RoutingMethod,
    pub norm_eps: f32,
    pub input_scale: f32,
    pub scales: Vec<f32>,
    pub travel: &'static str,
    pub buffer_bytes: u64,
    pub layout: &'static str,
    pub tactic: &'static str,
    pub kernel_source: String,
    pub artefact: &'static str,
    pub flag: bool,
}

pub(super) fn inputs() -> Inputs {
    Inputs {
        problems: vec![k3(1), k3(2), Problem { num_experts: 896, ..qwen3(3) }],
        deployment: DeploymentFacts { node_of_rank: vec![0, 0, 1, 1], ..deployment(4, Device::Auto, "auto") },
        environments: vec![h200(); 4],
        registry: registry(),
        version: "0.1.0".to_owned(),
        revision: "abc".to_owned(),
        target: "x86_64-unknown-linux-gnu",
        profile: "release",
        activation: Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
        routing: RoutingMethod::KimiK3 { scaling: 1.0 },
        norm_eps: 1e-5,
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
    pub fn selection(&self) -> Fingerprint {
        let Self { problems, deployment, environments, registry, .. } = self;
        let selection = resolve(problems, deployment, environments, registry).unwrap();
        selection.fingerprint(deployment, environments, registry).unwrap()
    }

    /// The session's fingerprint as a rank makes it; `order` says in which order it feeds its facts.
    pub fn session_of(&self, rank: usize, order: &[usize]) -> Fingerprint {
        let mut builder = SessionBuilder::new(&self.selection());
        type Step = fn(&Inputs, usize, &mut SessionBuilder);
        let steps: [Step; NUM_STEPS] = [
            |inputs, _, b| {
                let Inputs { version, revision, target, profile, .. } = inputs;
                b.build(BuildFacts { version, revision, target, profile });
            },
            |inputs, rank, b| _ = b.environment(&inputs.environments[rank]),
            |inputs, _, b| _ = b.layer(LayerIdx(1)).activation(inputs.activation).routing(inputs.routing),
            |inputs, _, b| {
                b.layer(LayerIdx(1))
                    .scale("fc1.input", inputs.input_scale)
                    .scales("fc2", inputs.scales.iter().copied());
            },
            |inputs, _, b| {
                _ = b.layer(LayerIdx(1)).travel("payload", inputs.travel).constant("norm_eps", inputs.norm_eps)
            },
            |inputs, _, b| _ = b.capacity("receive_bytes", inputs.buffer_bytes).layout("weights", inputs.layout),
            |inputs, _, b| _ = b.tactic("k3", inputs.tactic).flag("graphs", inputs.flag),
            |inputs, _, b| {
                b.kernel_source("fc1", Digest::of(inputs.kernel_source.as_bytes())).artefact("fc1", inputs.artefact);
            },
        ];
        order.iter().for_each(|step| steps[*step](self, rank, &mut builder));
        builder.finish().unwrap()
    }

    pub fn session(&self) -> Fingerprint {
        self.session_of(0, &std::array::from_fn::<usize, NUM_STEPS, _>(|step| step))
    }
}

pub(super) const NUM_STEPS: usize = 8;

pub(super) fn next_up(value: f32) -> f32 {
    f32::from_bits(value.to_bits() + 1)
}
