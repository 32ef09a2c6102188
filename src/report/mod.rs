//! What a run did, as data: counted on every rank, joined on rank 0, written as JSON or shown as a table.

mod checks;
mod links;
mod page;
mod steps;
mod table;
mod tactics;
mod trace;

pub use checks::Check;
pub use links::LinkBytes;
pub use page::page;
pub use steps::StepReport;
pub use table::{bytes, new_table, time};
pub use tactics::DecidedTactic;
pub use trace::{Event, LAYER, LOAD, RankTrace, Record, STEP, Trace};

use checks::{check_finite, check_identities, check_rows};
use steps::check_steps;
use tactics::check_tactics;

use serde::{Deserialize, Serialize};

use crate::dispatch::capacity::BufferPlan;
use crate::exit::Exit;
use crate::ids::LayerIdx;
use crate::layer::LayerStats;
use crate::numerics::nvfp4::QuantCounts;
use crate::select::Identity;

/// One rank's part of a report; plain data, so that it can travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Tokens of its input.
    pub num_tokens: u64,
    /// Threads it computed with.
    pub num_threads: usize,
    /// Checkpoint bytes it read.
    pub bytes_read: BytesReport,
    /// Seconds that reading and packing its experts took; waits for other ranks left out.
    pub load_experts_s: f64,
    /// Bytes of its packed weights.
    pub weight_bytes: u64,
    /// The most that its dispatch buffers were planned to take.
    pub planned_bytes: u64,
    /// The largest resident set of its process.
    pub peak_rss_bytes: u64,
    /// Tokens it sent to other ranks.
    pub rows_sent: u64,
    /// Tokens it received, its own included.
    pub rows_received: u64,
    /// Bytes of dispatch and combine that it sent to other ranks.
    pub dispatch_bytes_sent: u64,
    /// `[num_ranks]` the same by the rank they went to; to itself: what did not travel.
    pub bytes_to: Vec<u64>,
    /// The same by kind of link.
    pub links: LinkBytes,
    /// Collectives that it took part in over all steps.
    pub step_collectives: u64,
    /// What it launched.
    pub launches: Vec<Launch>,
    /// Its share of each layer.
    pub layers: Vec<RankLayer>,
    /// Seconds in each phase: loading, then the phases of its layers over all steps.
    pub phases: Vec<(String, f64)>,
    /// On a GPU, seconds from first dispatch to last sums, of all layers and steps. Less than those phases' where chunks overlap.
    pub routed_s: f64,
}

/// Checkpoint bytes that a rank read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BytesReport {
    /// Of its own experts.
    pub experts: u64,
    /// Of the parts that every rank holds: routers, shared experts, latent projections.
    pub replicated: u64,
}

/// Evidence of what ran: one identity in one layer on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The layer.
    pub layer: u32,
    /// `routed` or `shared`.
    pub part: String,
    /// The identity that computed.
    pub identity: String,
    /// Rows it computed.
    pub rows: u64,
    /// Calls of the layer.
    pub calls: u64,
}

/// One rank's share of a layer, over all steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLayer {
    /// The layer.
    pub layer: u32,
    /// The first expert of the rank.
    pub first_expert: usize,
    /// Rows of each expert of the rank.
    pub rows_per_expert: Vec<u64>,
    /// Chunks of the dispatch.
    pub chunks: u64,
    /// Waits of its host for its device.
    pub device_waits: u64,
    /// Steps after which they were recorded as a CUDA graph.
    pub graph_captures: u64,
    /// Steps that were replayed.
    pub graph_replays: u64,
    /// Batches that each tactic computed, of a backend that has several.
    pub tactics: Vec<(String, u64)>,
    /// FC1's quantised input.
    pub fc1_input: QuantReport,
    /// FC2's quantised input.
    pub fc2_input: QuantReport,
    /// Slots of this rank's tokens that name an expert.
    pub slots: u64,
    /// Output values that are not finite.
    pub num_not_finite: u64,
    /// Steps whose output is not bit for bit that of the step before.
    pub num_steps_off: u64,
}

/// Block scales of a quantised input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantReport {
    /// Blocks quantised.
    pub num_blocks: u64,
    /// Blocks clipped at 448.
    pub num_saturated: u64,
    /// Blocks whose non-zero values vanished.
    pub num_zeroed: u64,
}

impl From<QuantCounts> for QuantReport {
    fn from(counts: QuantCounts) -> Self {
        let QuantCounts { num_blocks, num_saturated, num_zeroed } = counts;
        Self { num_blocks, num_saturated, num_zeroed }
    }
}

impl std::ops::AddAssign for QuantReport {
    fn add_assign(&mut self, other: Self) {
        self.num_blocks += other.num_blocks;
        self.num_saturated += other.num_saturated;
        self.num_zeroed += other.num_zeroed;
    }
}

impl RankReport {
    /// Adds what one layer did on this rank over all steps. `wanted` are the slots that name an expert.
    pub fn add_layer(&mut self, layer: LayerIdx, first_expert: usize, stats: &LayerStats, outcome: LayerOutcome) {
        let mut launched = |part: &str, rows: &[(Identity, u64)]| {
            for (identity, rows) in rows {
                self.launches.push(Launch {
                    layer: layer.0,
                    part: part.to_owned(),
                    identity: identity.to_string(),
                    rows: *rows,
                    calls: stats.num_calls,
                });
            }
        };
        launched("routed", &stats.routed_rows);
        launched("shared", &stats.shared_rows);
        self.rows_sent += stats.num_tokens_sent;
        self.rows_received += stats.num_tokens_received;
        self.layers.push(RankLayer {
            layer: layer.0,
            first_expert,
            rows_per_expert: stats.rows_per_expert.clone(),
            chunks: stats.num_chunks,
            device_waits: stats.num_device_waits,
            graph_captures: stats.num_graph_captures,
            graph_replays: stats.num_graph_replays,
            tactics: stats.tactic_calls.iter().map(|(name, calls)| ((*name).to_owned(), *calls)).collect(),
            fc1_input: stats.fc1_input.into(),
            fc2_input: stats.fc2_input.into(),
            slots: outcome.num_slots,
            num_not_finite: outcome.num_not_finite,
            num_steps_off: outcome.num_steps_off,
        });
        self.routed_s += stats.routed.as_secs_f64();
        for (name, time) in stats.times.by_name() {
            match self.phases.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += time.as_secs_f64(),
                None => self.phases.push((name.to_owned(), time.as_secs_f64())),
            }
        }
    }
}

/// What came out of a layer on one rank, over all steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerOutcome {
    /// Slots of this rank's tokens that name an expert.
    pub num_slots: u64,
    /// Output values that are not finite.
    pub num_not_finite: u64,
    /// Steps whose output is not bit for bit that of the step before.
    pub num_steps_off: u64,
}

/// What was decided for all ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decided {
    /// Free text of the deployment.
    pub deployment: String,
    /// Number of ranks.
    pub num_ranks: usize,
    /// Number of nodes: hosts, or what the deployment takes for them.
    pub num_nodes: usize,
    /// The technique that serves every layer.
    pub technique: String,
    /// The instruction set that all ranks use.
    pub isa: String,
    /// The digest of what was selected and everything it follows from; `lockstep resolve` prints the same.
    pub selection: String,
    /// The digest of that and everything else that all ranks have compared.
    pub session: String,
    /// The part that was computed.
    pub part: String,
    /// The routed experts work on a latent of the hidden states.
    pub has_latent: bool,
    /// Dispatch buffers of rank 0, at most.
    pub buffers: BufferPlan,
    /// Each layer.
    pub layers: Vec<DecidedLayer>,
    /// The tactics that all ranks run, where they were tuned.
    pub tactics: Vec<DecidedTactic>,
}

/// What was decided for a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DecidedLayer {
    /// The layer.
    pub layer: u32,
    /// Its numeric contract.
    pub quant: String,
    /// Its activation.
    pub activation: String,
    /// What carries them.
    pub transport: String,
    /// Where a token goes once: `one`, to each rank; `two`, to each node.
    pub levels: String,
    /// How tokens travel.
    pub payload: String,
    /// Where weights are applied.
    pub combine: String,
    /// How rows come back.
    pub combine_dtype: String,
    /// The identities that may compute: the winner first.
    pub identities: Vec<String>,
    /// What computes dense projections on GPUs, each by its name; empty where hosts do.
    pub dense: Vec<String>,
    /// Why the winner.
    pub why: String,
    /// Why its steps are not replayed as a CUDA graph; absent: they are.
    pub no_cuda_graph: Option<String>,
    /// Why its chunks do not travel while others are computed; absent: they do, where a step has several.
    pub no_overlap: Option<String>,
}

/// A run, joined from all ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// Version of this form.
    pub version: u32,
    /// What was decided.
    pub decided: Decided,
    /// The world.
    pub world: WorldReport,
    /// Every rank.
    pub ranks: Vec<RankReport>,
    /// Every layer over all ranks.
    pub layers: Vec<LayerReport>,
    /// The largest of the ranks' seconds in each phase, over all steps.
    pub phases: Vec<(String, f64)>,
    /// The steps' times on rank 0.
    pub steps: StepReport,
    /// What was checked.
    pub checks: Vec<Check>,
}

/// The world of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorldReport {
    /// Number of ranks.
    pub num_ranks: usize,
}

/// A layer over all ranks and steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerReport {
    /// The layer.
    pub layer: u32,
    /// Its numeric contract.
    pub quant: String,
    /// `[num_experts]` rows of each expert.
    pub rows_per_expert: Vec<u64>,
    /// Chunks of the dispatch.
    pub chunks: u64,
    /// Recordings as a CUDA graph, of the rank that made most.
    pub graph_captures: u64,
    /// Steps that were replayed, of the rank that replayed fewest.
    pub graph_replays: u64,
    /// FC1's quantised input.
    pub fc1_input: QuantReport,
    /// FC2's quantised input.
    pub fc2_input: QuantReport,
}

impl RunReport {
    /// Joins the ranks' reports and checks them.
    #[must_use]
    pub fn join(decided: Decided, ranks: Vec<RankReport>, steps: StepReport) -> Self {
        let layers = decided.layers.iter().map(|layer| join_layer(layer, &ranks)).collect();
        let phases = join_phases(&ranks);
        let mut checks = vec![check_rows(&ranks), check_finite(&ranks), check_identities(&decided, &ranks)];
        if steps.count > 1 {
            checks.push(check_steps(&ranks));
        }
        if !decided.tactics.is_empty() {
            checks.push(check_tactics(&decided, &ranks));
        }
        let world = WorldReport { num_ranks: ranks.len() };
        Self { version: 1, decided, world, ranks, layers, phases, steps, checks }
    }

    /// Whether every check passed.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.checks.iter().all(|check| check.pass)
    }

    fn ran_as_agreed(&self) -> bool {
        check_identities(&self.decided, &self.ranks).pass && check_tactics(&self.decided, &self.ranks).pass
    }

    /// What a run with this report ends with: ranks that ran something else than agreed have no result to speak of.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self.passes() {
            true => Exit::Fine,
            false if self.ran_as_agreed() => Exit::WrongResult,
            false => Exit::Disagreement,
        }
    }
}

fn join_layer(decided: &DecidedLayer, ranks: &[RankReport]) -> LayerReport {
    let mut joined = LayerReport {
        layer: decided.layer,
        quant: decided.quant.clone(),
        rows_per_expert: Vec::new(),
        chunks: 0,
        graph_captures: 0,
        graph_replays: 0,
        fc1_input: QuantReport::default(),
        fc2_input: QuantReport::default(),
    };
    let shares = || ranks.iter().flat_map(|rank| &rank.layers).filter(|share| share.layer == decided.layer);
    joined.graph_replays = shares().map(|share| share.graph_replays).min().unwrap_or(0);
    for share in shares() {
        joined.graph_captures = joined.graph_captures.max(share.graph_captures);
        joined.rows_per_expert.extend(&share.rows_per_expert);
        joined.chunks = joined.chunks.max(share.chunks);
        joined.fc1_input += share.fc1_input;
        joined.fc2_input += share.fc2_input;
    }
    joined
}

fn join_phases(ranks: &[RankReport]) -> Vec<(String, f64)> {
    let mut phases: Vec<(String, f64)> = Vec::new();
    for (name, time_s) in ranks.iter().flat_map(|rank| &rank.phases) {
        match phases.iter_mut().find(|(known, _)| known == name) {
            Some((_, largest)) => *largest = largest.max(*time_s),
            None => phases.push((name.clone(), *time_s)),
        }
    }
    phases
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A run of layer 3, agreed to be `simd` with bf16 experts beside, in which rank 0 launched these.
    pub(super) fn report(launched: &[&str]) -> RunReport {
        report_with(launched, &[], Vec::new())
    }

    /// The same with the tactics that were chosen, and those that ran.
    pub(super) fn report_with(launched: &[&str], ran: &[&str], tactics: Vec<DecidedTactic>) -> RunReport {
        let quant = serde_json::json!({"num_blocks": 0, "num_saturated": 0, "num_zeroed": 0});
        let decided = serde_json::json!({
            "rank": 0, "host": "h", "num_tokens": 1, "num_threads": 1, "load_experts_s": 0.0, "weight_bytes": 0, "planned_bytes": 0,
            "bytes_read": {"experts": 0, "replicated": 0}, "peak_rss_bytes": 0, "rows_sent": 0, "rows_received": 0,
            "dispatch_bytes_sent": 0, "bytes_to": [0], "links": LinkBytes::default(), "step_collectives": 0, "routed_s": 0.0, "phases": [],
            "layers": [{
                "layer": 3, "first_expert": 0, "rows_per_expert": [1], "chunks": 1, "device_waits": 0,
                "graph_captures": 0, "graph_replays": 0,
                "fc1_input": quant, "fc2_input": quant, "slots": 1, "num_not_finite": 0, "num_steps_off": 0,
                "tactics": ran.iter().map(|name| (name, 1)).collect::<Vec<_>>(),
            }],
            "launches": launched.iter().map(|identity| serde_json::json!({
                "layer": 3, "part": "routed", "identity": identity, "rows": 1, "calls": 1,
            })).collect::<Vec<_>>(),
        });
        let rank: RankReport = serde_json::from_value(decided).expect("a rank's report");
        let layer = DecidedLayer {
            layer: 3,
            quant: "nvfp4".to_owned(),
            activation: "swiglu".to_owned(),
            transport: "host".to_owned(),
            levels: "one".to_owned(),
            payload: "bf16".to_owned(),
            combine: "slot".to_owned(),
            combine_dtype: "f32".to_owned(),
            dense: Vec::new(),
            identities: ["nvfp4", "none"].map(|quant| format!("lockstep.simd.grouped_gemm.{quant}")).to_vec(),
            why: "preferred by backend auto".to_owned(),
            no_cuda_graph: Some("moe.cuda_graph: off".to_owned()),
            no_overlap: Some("dispatch.overlap: off".to_owned()),
        };
        let decided = Decided {
            deployment: "laptop".to_owned(),
            num_ranks: 1,
            num_nodes: 1,
            technique: "simd".to_owned(),
            isa: "scalar".to_owned(),
            selection: "0".repeat(64),
            session: "1".repeat(64),
            part: "block".to_owned(),
            has_latent: false,
            buffers: BufferPlan::default(),
            layers: vec![layer],
            tactics,
        };
        RunReport::join(decided, vec![rank], StepReport::new(vec![1.0]))
    }

    #[test]
    fn a_run_of_another_implementation_than_agreed_fails() {
        let agreed = ["lockstep.simd.grouped_gemm.nvfp4", "lockstep.simd.grouped_gemm.none"];
        assert_eq!(report(&agreed).exit(), Exit::Fine);
        for other in ["lockstep.reference.grouped_gemm.nvfp4", "lockstep.simd.grouped_gemm.w4a16_nvfp4"] {
            let report = report(&[agreed[0], other]);
            assert_eq!(report.exit(), Exit::Disagreement, "{other}");
            assert!(report.to_string().contains(&format!("rank 0 ran {other} in layer 3")), "{report}");
        }
    }

    /// Whole, so that two runs can be compared by eye, and with where to see what they are of.
    #[test]
    fn a_person_reads_both_digests_and_where_their_fields_are() {
        let text = report(&[]).to_string();
        for part in ["0".repeat(64), "1".repeat(64), "-v lists every field".to_owned()] {
            assert!(text.contains(&part), "lacks {part}: {text}");
        }
    }
}
