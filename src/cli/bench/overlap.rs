//! The bench of a layer's routed part with chunks that travel while others are computed, next to chunks one after the other.
//!
//! Two sessions over one checkpoint, which differ in `dispatch.overlap` alone; their outputs are compared bit for bit. Under a
//! launcher, over all its ranks.

use std::fmt;

use serde::Serialize;

use crate::cli::failure::Failure;
use crate::config::{Choice as _, CudaGraph, Overlap, Transport};
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::layer::LayerStats;
use crate::report::time;
use crate::world::World;

use super::figures::show_at_root;
use super::layer::{self, Asked};
use super::markdown;
use super::turns::{Turned, Turns, in_turns};

/// The table.
#[derive(Debug, Serialize)]
pub struct OverlapReport {
    device: String,
    checkpoint: String,
    transport: &'static str,
    num_ranks: usize,
    capacity: usize,
    repeats: usize,
    rows: Vec<OverlapRow>,
}

/// One number of tokens.
#[derive(Debug, Serialize)]
pub struct OverlapRow {
    num_tokens: usize,
    /// With overlap; without, steps are whole.
    num_chunks: u64,
    off: Spans,
    on: Spans,
    /// From first dispatch to last sums with overlap, less the experts of whole steps: communication that nothing hides, and what
    /// cutting costs.
    exposed_us: f64,
    /// Of dispatch and combine of whole steps.
    exposed_share: f64,
    /// On every rank, every step's output has the bits of the others'.
    is_alike: bool,
}

/// Medians of the slowest rank of each step.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Spans {
    /// From the call to rows on the host.
    host_us: f64,
    /// From first dispatch to last sums, on the device, as the following, which with overlap lie beside each other.
    routed_us: f64,
    dispatch_us: f64,
    experts_us: f64,
    combine_us: f64,
}

/// Runs the benchmark on all ranks, over `transport`; rank 0 prints.
///
/// # Errors
/// As [`layer::command`].
pub(super) fn command(
    world: &World,
    asked: &Asked<'_>,
    (transport, env): (Transport, &EnvVars),
) -> Result<Exit, Failure> {
    let opener = layer::Opener::new(world, asked, env)?;
    let deployments = [Overlap::Off, Overlap::On].map(|overlap| {
        let mut deployment = asked.deployment(world.size(), CudaGraph::Off);
        deployment.dispatch.transport = transport;
        deployment.dispatch.overlap = overlap;
        // Ranks that share a GPU take turns on it: their times are no machine's, but bits and order are.
        deployment.cluster.share_gpus = transport == Transport::Host;
        deployment
    });
    let rows = in_turns(&opener, deployments, |turns, num_tokens| row(turns, (num_tokens, asked.repeats)))?;
    let is_fine = rows.iter().all(|row| row.is_alike);
    let report = OverlapReport {
        device: opener.device(),
        checkpoint: asked.checkpoint.display().to_string(),
        transport: transport.name(),
        num_ranks: world.size(),
        capacity: asked.capacity(),
        repeats: asked.repeats,
        rows,
    };
    show_at_root(world, &report, asked.args.json)?;
    Ok(if is_fine { Exit::Fine } else { Exit::WrongResult })
}

/// Whole steps, and chunks that overlap.
fn row(turns: &mut Turns<'_>, (num_tokens, repeats): (usize, usize)) -> Result<OverlapRow, Failure> {
    let mut num_chunks = 0;
    let Turned { medians_us, is_alike } = turns.measure(
        (num_tokens, repeats),
        |took, LayerStats { times, routed, .. }| [took, *routed, times.dispatch, times.experts, times.combine],
        |stats| num_chunks = stats.num_chunks,
    )?;
    let [off, on] = medians_us.map(|[host_us, routed_us, dispatch_us, experts_us, combine_us]| Spans {
        host_us,
        routed_us,
        dispatch_us,
        experts_us,
        combine_us,
    });
    let exposed_us = on.routed_us - off.experts_us;
    let exposed_share = exposed_us / (off.dispatch_us + off.combine_us).max(1e-9);
    Ok(OverlapRow { num_tokens, num_chunks, off, on, exposed_us, exposed_share, is_alike })
}

impl fmt::Display for OverlapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, checkpoint, transport, num_ranks, repeats, .. } = self;
        writeln!(f, "{device} · {num_ranks} ranks over {transport} · {checkpoint} · median of {repeats}")?;
        let head = ["tokens", "chunks", "layer", "routed", "dispatch", "experts", "combine", "exposed", "same bits"];
        let rows = self.rows.iter().map(|row| {
            let both = |of: fn(&Spans) -> f64| format!("{}, {}", time(of(&row.off)), time(of(&row.on)));
            [
                row.num_tokens.to_string(),
                row.num_chunks.to_string(),
                both(|spans| spans.host_us),
                both(|spans| spans.routed_us),
                both(|spans| spans.dispatch_us),
                both(|spans| spans.experts_us),
                both(|spans| spans.combine_us),
                format!("{:.0} %", 100.0 * row.exposed_share),
                if row.is_alike { "yes" } else { "NO" }.to_owned(),
            ]
        });
        let table = markdown::table(&head, &[8], rows);
        write!(
            f,
            "{table}\nWhole, and in chunks: the layer from the call to rows on the host; the rest on the device. Exposed: routed in \
             chunks less experts of whole steps, of dispatch and combine of whole steps."
        )
    }
}
