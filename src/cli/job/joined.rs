//! A job's report: a rank's part of it, what was decided, and all ranks' parts joined on rank 0.

use super::{Job, Share};
use crate::config::Choice as _;
use crate::layer::{MoeLayer, Session};
use crate::report::{BytesReport, Decided, DecidedLayer, DecidedTactic, LinkBytes, RankReport, RunReport, StepReport};
use crate::world::World;

/// What a rank knows of itself before its layers are added.
pub(super) fn new_report(world: &World, job: &Job<'_>, session: &Session, share: &Share, load_s: f64) -> RankReport {
    let bytes_read = session.bytes_read();
    RankReport {
        rank: world.rank().0,
        host: world.host().to_owned(),
        num_tokens: share.rows.len() as u64,
        num_threads: job.num_threads,
        bytes_read: BytesReport { experts: bytes_read.experts, replicated: bytes_read.replicated },
        load_experts_s: session.experts_elapsed().as_secs_f64(),
        weight_bytes: session.layers().iter().map(MoeLayer::weight_bytes).sum(),
        planned_bytes: session.buffers().total_bytes(),
        peak_rss_bytes: 0,
        rows_sent: 0,
        rows_received: 0,
        dispatch_bytes_sent: 0,
        bytes_to: Vec::new(),
        links: LinkBytes::default(),
        step_collectives: 0,
        launches: Vec::new(),
        layers: Vec::new(),
        phases: vec![("load".to_owned(), load_s)],
        routed_s: 0.0,
    }
}

/// What was decided for all ranks.
pub(super) fn decided(world: &World, job: &Job<'_>, session: &Session) -> Decided {
    let layer = |layer: &MoeLayer| DecidedLayer {
        layer: layer.decision().layer.0,
        quant: layer.decision().quant.name().to_owned(),
        activation: layer.decision().activation.to_string(),
        transport: layer.carrier().name().to_owned(),
        levels: layer.levels().name().to_owned(),
        payload: layer.travel().payload.name().to_owned(),
        combine: layer.travel().mode.name().to_owned(),
        combine_dtype: layer.travel().row_form.form.name().to_owned(),
        identities: layer.identities().iter().map(ToString::to_string).collect(),
        dense: layer.dense().iter().map(|(projection, by)| format!("{projection}: {by}")).collect(),
        why: layer.selected().why.to_string(),
        no_cuda_graph: layer.graphs().err().map(str::to_owned),
        no_overlap: layer.overlap().err().map(str::to_owned),
    };
    let (technique, isa) = session.backend();
    let (selection, session_digest) = session.digests();
    Decided {
        deployment: job.deployment.name.clone(),
        num_ranks: world.size(),
        num_nodes: session.nodes().num_nodes(),
        technique: technique.to_owned(),
        isa: isa.to_string(),
        selection: selection.to_string(),
        session: session_digest.to_string(),
        part: job.part.name().to_owned(),
        has_latent: session.geometry().latent.is_some(),
        buffers: *session.buffers(),
        layers: session.layers().iter().map(layer).collect(),
        tactics: session.tactics().iter().map(DecidedTactic::from).collect(),
    }
}

/// A rank's report is far below this; it bounds the gather alike on all ranks.
const MAX_REPORT_BYTES: usize = 64 << 20;

/// All ranks' reports as one, on rank 0; collective.
pub(super) fn join(world: &World, report: &RankReport, decided: Decided, step_us: Vec<f64>) -> Option<RunReport> {
    let mine = serde_json::to_vec(report).unwrap_or_default();
    let all = world.gather_bytes(&mine, MAX_REPORT_BYTES)?;
    let ranks = all.iter().filter_map(|bytes| serde_json::from_slice(bytes).ok()).collect();
    Some(RunReport::join(decided, ranks, StepReport::new(step_us)))
}
