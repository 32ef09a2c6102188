//! The bench of a layer's routed part with chunks that travel while others are computed, next to chunks one after the other.
//!
//! Two sessions over one checkpoint, which differ in `dispatch.overlap` alone; their outputs are compared bit for bit. Under a
//! launcher, over all its ranks.

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use crate::cli::failure::Failure;
use crate::config::{Choice as _, CudaGraph, Overlap, Transport};
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::layer::{LayerInput, LayerOutput, Part, Session};
use crate::report::time;
use crate::world::World;

use super::figures::{median, show_at_root, slowest, us};
use super::layer::{self, Asked, NUM_WARM};
use super::markdown;
use super::work::Noise;

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
    let open = |overlap| {
        let mut deployment = asked.deployment(world.size(), CudaGraph::Off);
        deployment.dispatch.transport = transport;
        deployment.dispatch.overlap = overlap;
        // Ranks that share a GPU take turns on it: their times are no machine's, but bits and order are.
        deployment.cluster.share_gpus = transport == Transport::Host;
        opener.open(deployment)
    };
    let sessions = [open(Overlap::Off)?, open(Overlap::On)?];
    layer::enter_steps(world);
    let mut line = Line { world, sessions: &sessions, step: 0, noise: Noise(u64::from(world.rank().0) + 1) };
    let tokens = asked.args.layer.layer_tokens.iter();
    let rows = tokens.map(|&num_tokens| line.measure(num_tokens, asked.repeats)).collect::<Result<Vec<_>, _>>()?;
    sessions.into_iter().for_each(|session| session.close(world));
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

/// What measures one line after the other.
struct Line<'a> {
    world: &'a World,
    /// Whole steps, and chunks that overlap.
    sessions: &'a [Session; 2],
    step: u64,
    noise: Noise,
}

impl Line<'_> {
    fn measure(&mut self, num_tokens: usize, repeats: usize) -> Result<OverlapRow, Failure> {
        let sessions = self.sessions;
        let num_values = num_tokens * sessions[0].geometry().hidden;
        let hidden: Vec<f32> = (0..num_values).map(|_| half::bf16::from_f32(self.noise.value()).to_f32()).collect();
        let mut times: [[Vec<f64>; 5]; 2] = Default::default();
        let (mut first, mut is_alike, mut num_chunks) = (None, true, 0);
        for repeat in 0..NUM_WARM + repeats {
            for (session, times) in sessions.iter().zip(&mut times) {
                let (took, output) = self.run(session, &hidden)?;
                let bits: Vec<u32> = output.values.iter().map(|value| value.to_bits()).collect();
                is_alike &= *first.get_or_insert_with(|| bits.clone()) == bits;
                num_chunks = output.stats.num_chunks;
                if repeat >= NUM_WARM {
                    times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
                }
            }
        }
        let [off, on] = times.map(|times| {
            let [host_us, routed_us, dispatch_us, experts_us, combine_us] = times.map(|times| median(&times));
            Spans { host_us, routed_us, dispatch_us, experts_us, combine_us }
        });
        let exposed_us = on.routed_us - off.experts_us;
        let exposed_share = exposed_us / (off.dispatch_us + off.combine_us).max(1e-9);
        let is_alike = self.world.all_gather_u64([u64::from(is_alike)]).iter().all(|[is_alike]| *is_alike == 1);
        Ok(OverlapRow { num_tokens, num_chunks, off, on, exposed_us, exposed_share, is_alike })
    }

    /// A step, and what the slowest rank took for each of [`Spans`].
    fn run(&mut self, session: &Session, hidden: &[f32]) -> Result<([f64; 5], LayerOutput), Failure> {
        let [layer] = session.layers() else { unreachable!("one layer was asked for") };
        self.step += 1;
        self.world.barrier();
        let begin = Instant::now();
        let input = LayerInput { hidden, topk: None, part: Part::Block, step: self.step, record_spans: false };
        let output = layer.forward(self.world, session.capacity(), &input)?;
        let (took, times) = (begin.elapsed(), &output.stats.times);
        let spans = [took, output.stats.routed, times.dispatch, times.experts, times.combine];
        Ok((spans.map(|time| slowest(self.world, us(time))), output))
    }
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
