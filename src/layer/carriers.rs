//! Who carries the tokens of a session: built by every rank, used if all of them could.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::config::{Choice as _, Transport};
use crate::dispatch::carrier::{Carrier, Mpi};
use crate::dispatch::choice::{Report, Trail, Verdict, judge};
use crate::dispatch::nccl::{NcclCarrier, NcclOptions, Prepared};
use crate::dispatch::staging::Staging;
use crate::dispatch::travel::{combine_mode, row_form, token_layout};
use crate::exit::{Classify, Exit};
use crate::fault::{Injected, Stage};
use crate::gpu::Gpu;
use crate::model::MoeGeometry;
use crate::nccl::NcclError;
use crate::select::Selection;
use crate::world::{Phase, Refusal, World};

use super::plan::LayerPlan;
use super::session::{SessionOptions, capacity_of, tokens_at_once};

/// The carriers of a session. Layers share them.
pub(super) struct Carriers {
    mpi: Rc<dyn Carrier>,
    nccl: Option<(Rc<dyn Carrier>, Staging)>,
}

/// Why this rank has no part in a transport.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error(transparent)]
    Fault(#[from] Injected),
}

impl Classify for AttemptError {
    fn exit(&self) -> Exit {
        match self {
            Self::Nccl(error) => error.exit(),
            Self::Fault(error) => error.exit(),
        }
    }
}

impl Carriers {
    /// Builds what the selection names; collective.
    ///
    /// Two exchanges of reports: before ranks join, so that none waits for one that can't come, and after it. What follows
    /// from a report, follows on every rank.
    ///
    /// # Errors
    /// The same on all ranks: if one could not build what was asked for by name.
    pub fn build(
        world: &World,
        (options, gpu): (&SessionOptions<'_>, Option<&Gpu>),
        (geometry, plans): (&MoeGeometry, &[LayerPlan]),
        selection: &Selection,
    ) -> Result<Self, Refusal> {
        let mpi: Rc<dyn Carrier> = Rc::new(Mpi);
        let is_wanted = selection.layers.iter().any(|selected| selected.transport == Transport::Nccl);
        // Selection gives NCCL to nobody but techniques of GPUs.
        let Some(gpu) = gpu.filter(|_| is_wanted) else { return Ok(Self { mpi, nccl: None }) };
        let limit = Duration::from_secs(options.deployment.timeouts.start_s);
        world.enter(Phase { name: "start", limit, key: "timeouts.start_s" });
        let staging = Staging::new(world.size(), max_run_bytes(options, geometry, plans));
        let nccl = build_nccl(world, (options, gpu), staging, limit)?;
        Ok(Self { mpi, nccl: nccl.map(|carrier| (carrier, staging)) })
    }

    /// What carries the tokens of a layer for which `transport` was selected: MPI where that was given up.
    pub fn of(&self, transport: Transport) -> Rc<dyn Carrier> {
        match &self.nccl {
            Some((nccl, _)) if transport == Transport::Nccl => nccl.clone(),
            _ => self.mpi.clone(),
        }
    }

    /// The most that goes to one rank in one round, where bytes are staged; else 0.
    pub fn piece_bytes(&self) -> usize {
        self.nccl.as_ref().map_or(0, |(_, staging)| staging.piece_bytes())
    }

    /// Lets go of what ranks hold together: all of them have to be through with it.
    pub fn close(&self) {
        if let Some((nccl, _)) = &self.nccl {
            nccl.close();
        }
    }
}

impl fmt::Debug for Carriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Carriers").field(&self.of(Transport::Nccl).name()).finish()
    }
}

/// NCCL's carrier; none where some rank could not build its own and `auto` was asked for.
fn build_nccl(
    world: &World,
    (options, gpu): (&SessionOptions<'_>, &Gpu),
    staging: Staging,
    limit: Duration,
) -> Result<Option<Rc<dyn Carrier>>, Refusal> {
    let asked = options.deployment.dispatch.transport;
    let prepared = prepare(world, (options, gpu), staging);
    let report = match &prepared {
        Ok(prepared) => Report::Ready(prepared.told()),
        failed @ Err(_) => Report::of(failed),
    };
    let reports = exchange(world, &report);
    let (Some(told), Ok(prepared)) = (agreed(world, asked, &reports)?, prepared) else { return Ok(None) };
    // A rank waits for the others' reports of the whole phase, and for NCCL half of it: what it says still arrives in time.
    let joined = join(world, prepared, &told, limit / 2);
    let reports = exchange(world, &Report::of(&joined));
    let used = agreed(world, asked, &reports);
    match (used, joined) {
        (Ok(Some(_)), Ok(carrier)) => Ok(Some(Rc::new(carrier))),
        (used, joined) => {
            // Whoever joined holds what is of no use any more.
            if let Ok(carrier) = joined {
                carrier.close();
            }
            used.map(|_| None)
        }
    }
}

/// What this rank can do alone.
fn prepare(
    world: &World,
    (options, gpu): (&SessionOptions<'_>, &Gpu),
    staging: Staging,
) -> Result<Prepared, AttemptError> {
    world.fault(Stage::Transport)?;
    if world.is_root() {
        let bytes = 2 * staging.buffer_bytes();
        tracing::info!(gpu_bytes = bytes, pinned_host_bytes = bytes, "NCCL buffers planned for a rank");
    }
    let nccl = NcclOptions { gpu: gpu.clone(), library: options.nccl.clone() };
    Ok(Prepared::new(world, &nccl, staging)?)
}

fn join(world: &World, prepared: Prepared, told: &[u8], limit: Duration) -> Result<NcclCarrier, AttemptError> {
    world.fault(Stage::Join)?;
    Ok(prepared.join(world, told, limit)?)
}

fn exchange(world: &World, report: &Report) -> Vec<Report> {
    world.all_gather_bytes(&report.encode()).iter().map(|bytes| Report::decode(bytes)).collect()
}

/// What rank 0 told if all ranks go on; nothing where they give the transport up, which rank 0 says.
fn agreed(world: &World, asked: Transport, reports: &[Report]) -> Result<Option<Vec<u8>>, Refusal> {
    match judge(asked, Transport::Nccl, reports) {
        Ok(Verdict::Use) => match reports.first() {
            Some(Report::Ready(told)) => Ok(Some(told.clone())),
            _ => Ok(None),
        },
        Ok(Verdict::GiveUp(trail)) => {
            say_given_up(world, &trail);
            Ok(None)
        }
        Err(refused) => Err(world.refuse(refused)),
    }
}

fn say_given_up(world: &World, trail: &Trail) {
    if world.is_root() {
        let (nccl, host) = (Transport::Nccl.name(), Transport::Host.name());
        let why = trail.on_one_line();
        tracing::warn!("tokens travel over {host} and not over {nccl}, which can't be built on every rank: {why}");
    }
}

/// The longest run between two ranks, of tokens or of rows, over all layers.
fn max_run_bytes(options: &SessionOptions<'_>, geometry: &MoeGeometry, plans: &[LayerPlan]) -> usize {
    let tokens = tokens_at_once(capacity_of(&options.deployment), options.num_tokens);
    let of_layer = |plan: &LayerPlan| {
        let row = row_form(geometry, &plan.decision);
        let rows = combine_mode(&plan.decision).max_rows(geometry.num_topk);
        token_layout(geometry, &plan.decision).row_bytes().max(rows.saturating_mul(row.form.row_bytes(row.hidden)))
    };
    tokens.saturating_mul(plans.iter().map(of_layer).max().unwrap_or(0))
}
