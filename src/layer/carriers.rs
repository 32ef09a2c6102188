//! Who carries the tokens of a session: built by every rank, used if all of them could.

use std::rc::Rc;
use std::time::Duration;
use std::{fmt, iter};

use crate::config::{Choice as _, Overlap, Transport};
use crate::dispatch::carrier::Carrier;
use crate::dispatch::choice::{Report, Trail, Verdict, judge, stand_in};
use crate::dispatch::device::Way;
use crate::dispatch::nccl::{self, NcclCarrier, NcclOptions};
use crate::dispatch::nvlink::{self, Nvlink, NvlinkError, NvlinkOptions};
use crate::dispatch::overlap::NUM_TRAVEL_MULTIPROCESSORS;
use crate::dispatch::region::Rooms;
use crate::dispatch::staged::Staged;
use crate::exit::{Classify, Exit};
use crate::fault::{Injected, Stage};
use crate::gpu::Gpu;
use crate::nccl::NcclError;
use crate::world::{Phase, Refusal, World};

/// The ways between a session's GPUs. Layers share them; hosts need none.
pub(crate) struct Carriers {
    staged: Option<Way>,
    nccl: Option<Way>,
    nvlink: Option<Way>,
}

/// What ways are built from.
#[derive(Clone, Copy)]
pub(crate) struct Needs<'a> {
    /// What was asked for: by name, or the best that every rank can build.
    pub asked: Transport,
    /// How long ranks wait for each other as they build.
    pub start_limit: Duration,
    /// How long a step waits.
    pub step_limit: Duration,
    /// NCCL, or the directory that it lies in; absent: where the loader finds it.
    pub nccl: Option<&'a str>,
    /// This rank's GPU, where it drives one.
    pub gpu: Option<&'a Gpu>,
    /// Room that other ranks need here.
    pub rooms: Rooms,
    /// The most experts that a rank has.
    pub num_local_experts: usize,
    /// Whether tokens travel while experts compute.
    pub overlap: Overlap,
}

/// Why this rank has no part in a transport.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error(transparent)]
    Nvlink(#[from] NvlinkError),
    #[error(transparent)]
    Fault(#[from] Injected),
}

impl Classify for AttemptError {
    fn exit(&self) -> Exit {
        match self {
            Self::Nccl(error) => error.exit(),
            Self::Nvlink(error) => error.exit(),
            Self::Fault(error) => error.exit(),
        }
    }
}

impl Carriers {
    /// Builds what layers want, and what stands in for it; collective.
    ///
    /// What follows from a rank's report of an attempt, follows on every rank.
    ///
    /// # Errors
    /// The same on all ranks: if one could not build what was asked for by name.
    pub fn build(world: &World, needs: &Needs<'_>, wanted: &[Transport]) -> Result<Self, Refusal> {
        let Some(gpu) = needs.gpu else { return Ok(Self { staged: None, nccl: None, nvlink: None }) };
        let staged = Some(Way::Carried(Rc::new(world.agree(Staged::new(gpu))?)));
        let Needs { asked, start_limit: limit, .. } = *needs;
        world.enter(Phase { name: "start", limit, key: "timeouts.start_s" });
        let attempts = Attempts { world, asked, limit };
        let wants_nvlink = wanted.contains(&Transport::Nvlink);
        let nvlink = if wants_nvlink { attempts.nvlink(needs, gpu)? } else { None };
        let wants_nccl = wanted.contains(&Transport::Nccl) || (wants_nvlink && nvlink.is_none());
        let nccl = if wants_nccl { attempts.nccl(needs, gpu)? } else { None };
        Ok(Self { staged, nccl, nvlink })
    }

    /// How the tokens of a layer travel for which `transport` was selected: over what stands in for it where that was given up.
    /// None on hosts.
    pub fn of(&self, transport: Transport) -> Option<Way> {
        let built = |transport| match transport {
            Transport::Nvlink => self.nvlink.as_ref(),
            Transport::Nccl => self.nccl.as_ref(),
            Transport::Host | Transport::Auto => self.staged.as_ref(),
        };
        iter::successors(Some(transport), |transport| stand_in(*transport)).find_map(built).cloned()
    }

    /// Lets go of what ranks hold together: all of them have to be through with it.
    pub fn close(&self) {
        self.nvlink.iter().chain(&self.nccl).for_each(Way::close);
    }
}

impl fmt::Debug for Carriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Carriers").field(&self.of(Transport::Nvlink)).finish()
    }
}

/// What a rank has made, and what every rank told of its own.
type Agreed<T> = (T, Vec<Vec<u8>>);

/// Attempts of all ranks at a transport.
struct Attempts<'a> {
    world: &'a World,
    asked: Transport,
    limit: Duration,
}

impl Attempts<'_> {
    /// NCCL's; none where some rank could not build its own and `auto` was asked for. Two reports: before ranks join, so that
    /// none waits for one that can't come, and after it.
    fn nccl(&self, needs: &Needs<'_>, gpu: &Gpu) -> Result<Option<Way>, Refusal> {
        let Self { world, limit, .. } = *self;
        let prepare = || -> Result<nccl::Prepared, AttemptError> {
            world.fault(Stage::Transport)?;
            // What is left to it, or kernels that wait for each other on one GPU could wait for ever: see docs/configuration.md.
            let max_multiprocessors = (needs.overlap != Overlap::Off).then_some(NUM_TRAVEL_MULTIPROCESSORS);
            let library = needs.nccl.map(str::to_owned);
            let options = NcclOptions { gpu: gpu.clone(), library, max_multiprocessors };
            Ok(nccl::Prepared::new(world, &options)?)
        };
        let Some((prepared, told)) = self.settle(Transport::Nccl, prepare(), nccl::Prepared::told, |_| {})? else {
            return Ok(None);
        };
        // A rank waits for the others' reports of the whole phase, and for NCCL half of it: what it says still arrives in time.
        let join = || -> Result<NcclCarrier, AttemptError> {
            world.fault(Stage::Join)?;
            Ok(prepared.join(world, &told[0], limit / 2)?)
        };
        // Whoever joined holds what is of no use any more.
        let joined = self.settle(Transport::Nccl, join(), |_| Vec::new(), NcclCarrier::close)?;
        Ok(joined.map(|(carrier, _)| Way::Carried(Rc::new(carrier))))
    }

    /// NVLink's, likewise. Three reports: of this rank's memory, of having opened the others', and of having found there what
    /// they stored.
    fn nvlink(&self, needs: &Needs<'_>, gpu: &Gpu) -> Result<Option<Way>, Refusal> {
        let world = self.world;
        // Every rank lays out its memory alike.
        let Rooms { room_bytes, home_bytes: [even, odd], tagged_bytes } = needs.rooms;
        let wanted = world.all_gather_u64([room_bytes, even, odd, tagged_bytes].map(|bytes| bytes as u64));
        let as_usize = |value| usize::try_from(value).unwrap_or(usize::MAX);
        let rooms = wanted.into_iter().map(|wanted| {
            let [room_bytes, even, odd, tagged_bytes] = wanted.map(as_usize);
            Rooms { room_bytes, home_bytes: [even, odd], tagged_bytes }
        });
        let rooms = rooms.fold(Rooms::default(), Rooms::max);
        let prepare = || -> Result<nvlink::Prepared, AttemptError> {
            world.fault(Stage::Transport)?;
            let Needs { step_limit, num_local_experts, .. } = *needs;
            let options = NvlinkOptions { gpu: gpu.clone(), rooms, num_local_experts, step_limit };
            Ok(nvlink::Prepared::new(world, options)?)
        };
        let Some((prepared, told)) = self.settle(Transport::Nvlink, prepare(), nvlink::Prepared::told, |_| {})? else {
            return Ok(None);
        };
        let open = || -> Result<Nvlink, AttemptError> {
            world.fault(Stage::Join)?;
            Ok(prepared.open(world, &told)?)
        };
        let Some((opened, _)) = self.settle(Transport::Nvlink, open(), |_| Vec::new(), Nvlink::close)? else {
            return Ok(None);
        };
        let greeted = opened.greet(world).map(|()| opened).map_err(AttemptError::from);
        let greeted = self.settle(Transport::Nvlink, greeted, |_| Vec::new(), Nvlink::close)?;
        Ok(greeted.map(|(nvlink, _)| Way::Pushed(Rc::new(nvlink))))
    }

    /// What this rank has made and what all told of theirs, if all go on; else what it has made is given up, and nothing where
    /// all give the transport up, which rank 0 says.
    fn settle<T>(
        &self,
        transport: Transport,
        attempt: Result<T, AttemptError>,
        told: impl Fn(&T) -> Vec<u8>,
        give_up: impl Fn(&T),
    ) -> Result<Option<Agreed<T>>, Refusal> {
        let report = match &attempt {
            Ok(made) => Report::Ready(told(made)),
            failed @ Err(_) => Report::of(failed),
        };
        let reports = self.world.all_gather_bytes(&report.encode());
        let reports: Vec<Report> = reports.iter().map(|bytes| Report::decode(bytes)).collect();
        let verdict = judge(self.asked, transport, &reports);
        match (verdict, attempt) {
            (Ok(Verdict::Use), Ok(made)) => {
                let told = reports.into_iter().map(|report| match report {
                    Report::Ready(told) => told,
                    Report::Failed { .. } => Vec::new(),
                });
                Ok(Some((made, told.collect())))
            }
            (verdict, attempt) => {
                attempt.iter().for_each(give_up);
                match verdict {
                    Ok(Verdict::GiveUp(trail)) => say_given_up(self.world, transport, &trail),
                    Ok(Verdict::Use) => {}
                    Err(refused) => return Err(self.world.refuse(refused)),
                }
                Ok(None)
            }
        }
    }
}

fn say_given_up(world: &World, transport: Transport, trail: &Trail) {
    if world.is_root() {
        let (given_up, why) = (transport.name(), trail.on_one_line());
        let next = stand_in(transport).unwrap_or(Transport::Host).name();
        tracing::warn!("tokens travel over {next} and not over {given_up}, which can't be built on every rank: {why}");
    }
}
