//! Who carries the tokens of a session: built by every rank, used if all of them could.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::config::{Choice as _, Transport};
use crate::dispatch::carrier::Carrier;
use crate::dispatch::choice::{Report, Trail, Verdict, judge};
use crate::dispatch::nccl::{NcclCarrier, NcclOptions, Prepared};
use crate::dispatch::staged::Staged;
use crate::exit::{Classify, Exit};
use crate::fault::{Injected, Stage};
use crate::gpu::Gpu;
use crate::nccl::NcclError;
use crate::select::Selection;
use crate::world::{Phase, Refusal, World};

use super::session::SessionOptions;

/// The carriers of a session's GPUs. Layers share them; hosts need none.
pub(super) struct Carriers {
    staged: Option<Rc<dyn Carrier>>,
    nccl: Option<Rc<dyn Carrier>>,
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
        selection: &Selection,
    ) -> Result<Self, Refusal> {
        let Some(gpu) = gpu else { return Ok(Self { staged: None, nccl: None }) };
        let staged: Rc<dyn Carrier> = Rc::new(world.agree(Staged::new(gpu))?);
        let is_wanted = selection.layers.iter().any(|selected| selected.transport == Transport::Nccl);
        let nccl = if is_wanted { build_nccl(world, (options, gpu))? } else { None };
        Ok(Self { staged: Some(staged), nccl })
    }

    /// What carries the tokens of a layer for which `transport` was selected: MPI where that was given up. None on hosts.
    pub fn of(&self, transport: Transport) -> Option<Rc<dyn Carrier>> {
        let nccl = self.nccl.as_ref().filter(|_| transport == Transport::Nccl);
        nccl.or(self.staged.as_ref()).cloned()
    }

    /// Lets go of what ranks hold together: all of them have to be through with it.
    pub fn close(&self) {
        if let Some(nccl) = &self.nccl {
            nccl.close();
        }
    }
}

impl fmt::Debug for Carriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Carriers").field(&self.of(Transport::Nccl)).finish()
    }
}

/// NCCL's carrier; none where some rank could not build its own and `auto` was asked for.
fn build_nccl(world: &World, (options, gpu): (&SessionOptions<'_>, &Gpu)) -> Result<Option<Rc<dyn Carrier>>, Refusal> {
    let asked = options.deployment.dispatch.transport;
    let limit = Duration::from_secs(options.deployment.timeouts.start_s);
    world.enter(Phase { name: "start", limit, key: "timeouts.start_s" });
    let prepared = prepare(world, options, gpu);
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
fn prepare(world: &World, options: &SessionOptions<'_>, gpu: &Gpu) -> Result<Prepared, AttemptError> {
    world.fault(Stage::Transport)?;
    let nccl = NcclOptions { gpu: gpu.clone(), library: options.nccl.clone() };
    Ok(Prepared::new(world, &nccl)?)
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
