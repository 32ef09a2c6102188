//! `lockstep bench --travel`: dispatch and combine alone, over every transport that the ranks' GPUs can have; under a launcher.
//!
//! Experts give back what they get, so that what comes home shows what travelled: every transport has to give the same bits. With
//! `--steps` steps of random sizes are compared instead of timed.

mod goals;
mod random;
mod report;

use std::time::Duration;

use clap::Args;

use super::super::failure::Failure;
use super::super::world::{StartError, with_world};
use super::figures::{median, show_at_root, slowest, us};
use super::rows::RowForm;
use super::work::Noise;
use super::{BenchArgs, BenchGeometry, EXPERTS_ALONE, REPEATS, draw, repeats};
use crate::config::{Choice as _, Overlap, Payload, Transport};
use crate::cuda::{DeviceBuffer, Event};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::combine::{CombineMode, RowForm as ReturnedForm};
use crate::dispatch::device::{
    Buffers, DeviceTokens, DeviceTransport, Echo, Forms, LiveExtent, Recorded, Recording, Stages, Way,
};
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::placement::Placement;
use crate::dispatch::region::{NUM_HOMES, Rooms, RowSizes};
use crate::dispatch::travel::Travel;
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::facts;
use crate::gpu::{Gpu, GpuError};
use crate::ids::{LayerIdx, Rank};
use crate::layer::{Carriers, Needs};
use crate::world::{Phase, World};
use report::{Replayed, TravelReport, TravelRow};

/// FC1's `input_scale` of the made-up tokens, whose sigma is 1.
const INPUT_SCALE: f32 = super::work::TOKEN_SCALE;

/// Rounds of a replay, the first of which aligns ranks and does not count.
const NUM_ROUNDS: usize = 9;

/// Chunks of a random step, at most.
const MAX_CHUNKS: usize = 16;

/// Repeats before those that count.
const NUM_WARM: usize = 3;

/// Options of `--travel`.
#[derive(Debug, Clone, Args)]
pub struct TravelArgs {
    /// Times dispatch and combine between the ranks' GPUs instead, over every transport that can be had; under a launcher, with
    /// --geometry.
    #[arg(long, requires = "geometry", conflicts_with_all = EXPERTS_ALONE,
        conflicts_with_all = ["agreement", "backend", "isa", "threads", "activations"])]
    pub travel: bool,
    /// Tokens of a rank; a line of the table each.
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_value = "1,8,64,512,2048,8192",
        requires = "travel"
    )]
    pub tokens: Vec<usize>,
    /// The form of a travelling token: bf16, nvfp4 or f32.
    #[arg(long, value_name = "FORM", value_parser = payload, default_value = "bf16", requires = "travel")]
    pub payload: Payload,
    /// Transports, the first of which the others are compared with: host, nccl, nvlink.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = transport, default_value = "nccl,nvlink",
        requires = "travel")]
    pub transports: Vec<Transport>,
    /// Compares so many steps of 0 to 512 tokens a rank, of random forms, masks and routing, and times nothing.
    #[arg(long, value_name = "N", requires = "travel", conflicts_with = "plot")]
    pub steps: Option<u64>,
    /// Cuts each of these steps into up to N chunks as well, which overlap.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = chunks, requires = "steps")]
    pub chunks: usize,
    /// What the random steps are drawn from.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "travel")]
    pub seed: u64,
}

fn payload(text: &str) -> Result<Payload, String> {
    Payload::from_name(text).filter(|form| *form != Payload::Auto).ok_or_else(|| "give bf16, nvfp4 or f32".to_owned())
}

fn chunks(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|chunks| (1..=MAX_CHUNKS).contains(chunks))
        .ok_or_else(|| format!("give 1 to {MAX_CHUNKS}"))
}

fn transport(text: &str) -> Result<Transport, String> {
    let known = Transport::from_name(text).filter(|transport| *transport != Transport::Auto);
    known.ok_or_else(|| "give host, nccl or nvlink".to_owned())
}

/// What tokens are made of.
#[derive(Debug, Clone, Copy)]
struct Shape {
    hidden: usize,
    num_experts: usize,
    num_topk: usize,
}

impl Shape {
    const fn of(geometry: BenchGeometry) -> Self {
        match geometry {
            BenchGeometry::KimiK3 => Self { hidden: 3584, num_experts: 896, num_topk: 16 },
            BenchGeometry::DeepseekV3 => Self { hidden: 7168, num_experts: 256, num_topk: 8 },
            BenchGeometry::Qwen3_235b => Self { hidden: 4096, num_experts: 128, num_topk: 8 },
        }
    }
}

/// One form of tokens and rows.
#[derive(Debug, Clone, Copy)]
struct Form {
    payload: PayloadForm,
    mode: CombineMode,
    returned: CombineForm,
}

impl Form {
    fn forms(&self, shape: Shape, num_ranks: usize) -> Forms {
        let row_form = ReturnedForm { hidden: shape.hidden, form: self.returned };
        let placement = Placement::new(shape.num_experts, num_ranks);
        let travel = Travel { placement, payload: self.payload, mode: self.mode, row_form };
        Forms { travel, quantise: None }
    }

    /// Room that chunks of so many tokens need.
    fn rooms(&self, shape: Shape, num_ranks: usize, num_tokens: [usize; NUM_HOMES]) -> Rooms {
        let travel = self.forms(shape, num_ranks).travel;
        let sizes = RowSizes {
            num_ranks,
            num_topk: shape.num_topk,
            token_bytes: travel.layout(shape.num_topk).row_bytes(),
            return_bytes: self.returned.row_bytes(shape.hidden),
            per_slot: self.mode == CombineMode::Slot,
        };
        Rooms::new(&sizes, num_tokens)
    }
}

/// Runs the benchmark on all ranks; rank 0 prints.
///
/// # Errors
/// If no measurements are asked for, no transport can be had, two of them differ, or standard output can't be written.
pub(super) fn command(bench: &BenchArgs, geometry: BenchGeometry, env: &EnvVars) -> Result<Exit, Failure> {
    let (bench_args, args, forms, as_json) = (bench, &bench.travel, &bench.rows[..], bench.json);
    with_world(env, |world| {
        let repeats = world.agree(repeats(bench, REPEATS))?;
        let start = Phase { name: "start", limit: Duration::from_secs(120), key: "LOCKSTEP_START_S" };
        world.enter(start);
        let machine = world.agree(facts::machine(world, env, None).map_err(StartError::from))?;
        let gpu = world.agree(Gpu::open(machine.gpu_ordinal, &bench.kernels(env)))?;
        let bench = Bench { world, gpu: &gpu, args, nccl: env.nccl() };
        if let Some(steps) = args.steps {
            let report = random::compare(&bench, steps)?;
            show_at_root(world, &report, as_json)?;
            return Ok(if report.num_different == 0 { Exit::Fine } else { Exit::WrongResult });
        }
        let report = measure(&bench, (geometry, forms, repeats))?;
        world.agree(if world.is_root() { draw(bench_args, || report.plot()) } else { Ok(()) })?;
        show_at_root(world, &report, as_json)?;
        Ok(if report.rows.iter().all(|row| row.is_alike) { Exit::Fine } else { Exit::WrongResult })
    })
}

/// What both forms of the bench have.
struct Bench<'a> {
    world: &'a World,
    gpu: &'a Gpu,
    args: &'a TravelArgs,
    nccl: Option<&'a str>,
}

impl Bench<'_> {
    /// The transports that were asked for, in that order; all ranks have built each of them.
    fn ways(&self, rooms: Rooms, num_experts: usize) -> Result<Vec<Way>, Failure> {
        let world = self.world;
        let needs = Needs {
            asked: Transport::Auto,
            start_limit: Duration::from_secs(120),
            step_limit: Duration::from_secs(60),
            nccl: self.nccl,
            gpu: Some(self.gpu),
            rooms,
            num_local_experts: Placement::new(num_experts, world.size()).local_experts(Rank(0)).len(),
            overlap: if self.args.chunks > 1 { Overlap::On } else { Overlap::Off },
        };
        let mut ways = Vec::new();
        for &transport in &self.args.transports {
            let asked = Needs { asked: transport, ..needs };
            let way = Carriers::build(world, &asked, &[transport])?.of(transport);
            ways.extend(way);
        }
        world.enter(Phase { name: "step", limit: needs.step_limit, key: "the bench's own limit" });
        Ok(ways)
    }

    fn transport(
        &self,
        lane: &Gpu,
        (shape, form): (Shape, Form),
        way: &Way,
        layer: u32,
    ) -> Result<DeviceTransport, GpuError> {
        let stages = Stages::new(lane, form.forms(shape, self.world.size()), self.world.rank())?;
        Ok(DeviceTransport::new(lane, stages, way.clone(), LayerIdx(layer)))
    }
}

/// Tokens of this rank.
struct Tokens {
    values: DeviceBuffer<f32>,
    ids: DeviceBuffer<i32>,
    weights: DeviceBuffer<f32>,
}

/// Ids of `num_tokens` tokens, each of which goes to `num_topk` different experts where experts are as popular as `form` says.
fn routed(shape: Shape, form: RowForm, num_tokens: usize, noise: &mut Noise) -> Vec<i32> {
    let popular = form.counts(shape.num_experts, 1024);
    let ends: Vec<usize> = popular
        .iter()
        .scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
        .collect();
    let total = ends.last().copied().unwrap_or(1);
    let mut ids = Vec::with_capacity(num_tokens * shape.num_topk);
    for token in 0..num_tokens {
        let start = token * shape.num_topk;
        while ids.len() < start + shape.num_topk {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a small count")]
            let drawn = (noise.unit() * total as f64) as usize;
            let expert = i32::try_from(ends.partition_point(|end| *end <= drawn)).unwrap_or(0);
            if !ids[start..].contains(&expert) {
                ids.push(expert);
            }
        }
    }
    ids
}

fn upload(gpu: &Gpu, values: &[f32], ids: &[i32], weights: &[f32]) -> Result<Tokens, GpuError> {
    let stream = gpu.stream();
    Ok(Tokens {
        values: DeviceBuffer::from_slice(stream, values)?,
        ids: DeviceBuffer::from_slice(stream, ids)?,
        weights: DeviceBuffer::from_slice(stream, weights)?,
    })
}

fn measure(
    bench: &Bench<'_>,
    (geometry, row_forms, repeats): (BenchGeometry, &[RowForm], usize),
) -> Result<TravelReport, Failure> {
    let shape = Shape::of(geometry);
    let Bench { world, gpu, args, .. } = *bench;
    let payload = match args.payload {
        Payload::F32 => PayloadForm::F32,
        Payload::Nvfp4 => PayloadForm::Nvfp4 { input_scale: INPUT_SCALE },
        Payload::Bf16 | Payload::Auto => PayloadForm::Bf16,
    };
    let form = Form { payload, mode: CombineMode::Rank, returned: CombineForm::Bf16 };
    let most = args.tokens.iter().copied().max().unwrap_or(1);
    let ways = bench.ways(form.rooms(shape, world.size(), [most, 0]), shape.num_experts)?;
    let mut buffers = world.agree(Buffers::new(gpu))?;
    let echo = world.agree(Echo::new(gpu, shape.hidden))?;
    let mut noise = Noise(u64::from(world.rank().0) + 1);
    let values: Vec<f32> = (0..most * shape.hidden).map(|_| noise.value()).collect();
    let weights = vec![1.0 / shape.num_topk as f32; most * shape.num_topk];
    let mut rows = Vec::new();
    for &row_form in row_forms {
        for &num_tokens in &args.tokens {
            let ids = routed(shape, row_form, num_tokens, &mut noise);
            let (values, weights) = (&values[..num_tokens * shape.hidden], &weights[..ids.len()]);
            let tokens = world.agree(upload(gpu, values, &ids, weights))?;
            let mut first: Option<Vec<f32>> = None;
            for way in &ways {
                let transport = world.agree(bench.transport(gpu, (shape, form), way, 0))?;
                let mut step = Step { bench, transport: &transport, echo: &echo, tokens: &tokens, num_tokens, shape };
                let timed = step.time(&mut buffers, repeats)?;
                let first = first.get_or_insert_with(|| timed.out.clone());
                let mut is_alike = *first == timed.out;
                let replayed = step.replay(&mut buffers, repeats)?;
                let replayed = replayed.map(|Replay { times_us, sums }| {
                    is_alike &= *first == sums;
                    Replayed::new(times_us, [timed.dispatch_bytes, timed.combine_bytes])
                });
                let is_like_goals = world.size() == 2 && payload == PayloadForm::Bf16 && row_form == RowForm::Uniform;
                let goal = goals::of(geometry, num_tokens).filter(|_| is_like_goals);
                let row = timed.row(bench, way.transport(), (row_form, num_tokens), is_alike);
                rows.push(TravelRow { replayed, goal, ..row });
            }
        }
    }
    close(world, &ways);
    let facts = gpu.device().facts();
    Ok(TravelReport {
        device: facts.name.clone(),
        num_ranks: world.size(),
        hidden: shape.hidden,
        num_experts: shape.num_experts,
        num_topk: shape.num_topk,
        payload: args.payload.name(),
        repeats,
        rows,
    })
}

/// Lets go of what ranks hold together, once all are here.
fn close(world: &World, ways: &[Way]) {
    world.barrier();
    ways.iter().for_each(Way::close);
    world.barrier();
}

/// One line that is being measured.
struct Step<'a> {
    bench: &'a Bench<'a>,
    transport: &'a DeviceTransport,
    echo: &'a Echo,
    tokens: &'a Tokens,
    num_tokens: usize,
    shape: Shape,
}

/// What was measured of it on this rank, and then of the slowest.
struct Timed {
    dispatch_us: f64,
    combine_us: f64,
    dispatch_bytes: f64,
    combine_bytes: f64,
    out: Vec<f32>,
}

/// What rounds of a replay took.
struct Replay {
    /// Dispatch and combine.
    times_us: [f64; 2],
    /// What came home.
    sums: Vec<f32>,
}

impl Step<'_> {
    fn time(&mut self, buffers: &mut Buffers, repeats: usize) -> Result<Timed, Failure> {
        let Bench { world, gpu, .. } = *self.bench;
        let stream = gpu.stream();
        let mark = || Event::new(gpu.device());
        let marks = world.agree((|| Ok::<_, GpuError>([mark()?, mark()?, mark()?, mark()?]))())?;
        let mut out =
            world.agree(DeviceBuffer::zeroed(stream, self.num_tokens * self.shape.hidden).map_err(GpuError::from))?;
        let (mut dispatch, mut combine) = (Vec::new(), Vec::new());
        let mut bytes = [0.0; 2];
        for repeat in 0..NUM_WARM + repeats {
            world.barrier();
            let [dispatch_us, combine_us] = self.run((buffers, &marks, &mut out), repeat as u64, &mut bytes)?;
            if repeat >= NUM_WARM {
                dispatch.push(slowest(world, dispatch_us));
                combine.push(slowest(world, combine_us));
            }
        }
        let out = world.agree(out.download(stream).map_err(GpuError::from))?;
        let [dispatch_bytes, combine_bytes] = bytes.map(|bytes| slowest(world, bytes));
        Ok(Timed { dispatch_us: median(&dispatch), combine_us: median(&combine), dispatch_bytes, combine_bytes, out })
    }

    /// The same in replays, where no host has to follow.
    fn replay(&mut self, buffers: &mut Buffers, repeats: usize) -> Result<Option<Replay>, Failure> {
        let Bench { world, gpu, .. } = *self.bench;
        let num_values = self.num_tokens * self.shape.hidden;
        let mut out = world.agree(DeviceBuffer::zeroed(gpu.stream(), num_values).map_err(GpuError::from))?;
        let (max_tokens, num_topk) = (self.num_tokens, self.shape.num_topk);
        let recorded = Recorded {
            transport: self.transport,
            echo: self.echo,
            buffers,
            tokens: self.device_tokens(0),
            out: &mut out,
            extent: LiveExtent { max_tokens, num_ranks: world.size(), num_topk },
        };
        let Some(mut recording) = Recording::new((world, gpu), recorded, NUM_ROUNDS)? else { return Ok(None) };
        let (mut dispatch, mut combine) = (Vec::new(), Vec::new());
        for repeat in 0..NUM_WARM + repeats {
            world.barrier();
            let rounds = recording.replay(world, repeat as u64 + 1)?;
            for round in rounds.iter().skip(1).filter(|_| repeat >= NUM_WARM) {
                dispatch.push(slowest(world, us(round.dispatch)));
                combine.push(slowest(world, us(round.combine)));
            }
        }
        let sums = world.agree(recording.sums().map_err(GpuError::from))?;
        Ok(Some(Replay { times_us: [median(&dispatch), median(&combine)], sums }))
    }

    fn device_tokens(&self, step: u64) -> DeviceTokens<'_> {
        let Tokens { values, ids, weights } = self.tokens;
        let (tokens, num_topk) = (0..self.num_tokens, self.shape.num_topk);
        DeviceTokens { values, ids, weights, tokens, num_topk, step, chunk: 0, of_step: None, live_tokens: 0 }
    }

    /// Once: what dispatch and combine took on the device, and the bytes that left.
    fn run(
        &self,
        (buffers, marks, out): (&mut Buffers, &[Event; 4], &mut DeviceBuffer<f32>),
        step: u64,
        bytes: &mut [f64; 2],
    ) -> Result<[f64; 2], CarryError> {
        let Bench { world, gpu, .. } = *self.bench;
        let (stream, tokens) = (gpu.stream(), self.device_tokens(step));
        let sent = || world.exchanged().sent_bytes as f64;
        let before = sent();
        marks[0].record(stream)?;
        let handle = self.transport.dispatch(world, buffers, &tokens, self.num_tokens)?;
        marks[1].record(stream)?;
        let between = sent();
        self.echo.queue(buffers, &handle)?;
        self.transport.wait_for_all(world)?;
        stream.synchronise()?;
        // What ranks do one after the other is no part of what combine takes.
        world.barrier();
        marks[2].record(stream)?;
        self.transport.combine(world, buffers, &handle, (&tokens, self.num_tokens), out)?;
        marks[3].record(stream)?;
        self.transport.wait_for_all(world)?;
        stream.synchronise()?;
        *bytes = [between - before, sent() - between];
        let from = |at: usize| -> Result<f64, CarryError> { Ok(us(marks[at + 1].elapsed_since(&marks[at])?)) };
        Ok([from(0)?, from(2)?])
    }
}

impl Timed {
    fn row(
        &self,
        bench: &Bench<'_>,
        transport: Transport,
        (form, tokens): (RowForm, usize),
        is_alike: bool,
    ) -> TravelRow {
        // One rank that differs counts.
        let is_alike = slowest(bench.world, f64::from(u8::from(!is_alike))) == 0.0;
        let rate = |bytes: f64, us: f64| bytes / us / 1e3;
        TravelRow {
            transport: transport.name(),
            form,
            tokens,
            dispatch_bytes: self.dispatch_bytes,
            dispatch_us: self.dispatch_us,
            dispatch_gbyte_per_s: rate(self.dispatch_bytes, self.dispatch_us),
            combine_bytes: self.combine_bytes,
            combine_us: self.combine_us,
            combine_gbyte_per_s: rate(self.combine_bytes, self.combine_us),
            replayed: None,
            goal: None,
            is_alike,
        }
    }
}
