//! Random steps over all transports, compared bit for bit. A seed says everything.

use std::ops::Range;

use super::report::RandomReport;
use super::{Bench, Form, INPUT_SCALE, Shape, Tokens, close, upload};
use crate::cli::bench::work::Noise;
use crate::cli::failure::Failure;
use crate::config::Choice as _;
use crate::cuda::{self, DeviceBuffer};
use crate::dispatch::capacity::Chunks;
use crate::dispatch::carrier::CarryError;
use crate::dispatch::combine::CombineMode;
use crate::dispatch::device::{Buffers, DeviceTokens, DeviceTransport, Echo, Way};
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::overlap::{NUM_SETS, Turn, set_of, turns};
use crate::dispatch::placement::Placement;
use crate::dispatch::region::{MAX_TAGGED_TOKENS, Rooms};
use crate::gpu::{Gpu, GpuError, Mark};
use crate::ids::Rank;

/// Narrow tokens of a layer with many slots: many rows in little time.
const SHAPE: Shape = Shape { hidden: 256, num_experts: 61, num_topk: 8 };

/// Tokens of a rank in a step, at most.
const MAX_TOKENS: usize = 512;

/// Tokens that steps take theirs from.
const NUM_TOKENS: usize = 2 * MAX_TOKENS;

/// Layers that take turns in the same memory.
const FORMS: [Form; 4] = [
    Form { payload: PayloadForm::Bf16, mode: CombineMode::Rank, returned: CombineForm::Bf16 },
    Form {
        payload: PayloadForm::Nvfp4 { input_scale: INPUT_SCALE },
        mode: CombineMode::Rank,
        returned: CombineForm::Bf16,
    },
    Form { payload: PayloadForm::Bf16, mode: CombineMode::Slot, returned: CombineForm::F32 },
    Form { payload: PayloadForm::F32, mode: CombineMode::Slot, returned: CombineForm::Bf16 },
];

/// One step as all ranks draw it.
struct Drawn {
    layer: usize,
    num_tokens: Vec<usize>,
    /// Into how many chunks that overlap it is cut, beside being left whole.
    num_chunks: usize,
}

impl Drawn {
    fn new(noise: &mut Noise, num_ranks: usize, max_chunks: usize) -> Self {
        let layer = below(noise, FORMS.len());
        // Few tokens may travel another way.
        let most = if below(noise, 4) == 0 { MAX_TAGGED_TOKENS } else { MAX_TOKENS };
        let num_tokens = (0..num_ranks).map(|_| if below(noise, 8) == 0 { 0 } else { below(noise, most + 1) });
        let num_tokens = num_tokens.collect();
        let num_chunks = if max_chunks > 1 { 1 + below(noise, max_chunks) } else { 1 };
        Self { layer, num_tokens, num_chunks }
    }

    /// Its chunks: of several the last may have no tokens of any rank.
    fn chunks(&self) -> Chunks {
        let max_tokens = self.num_tokens.iter().copied().max().unwrap_or(0);
        let chunk_tokens = max_tokens.div_ceil(self.num_chunks).max(1);
        let first_chunk_tokens = self.num_tokens.iter().map(|tokens| *tokens.min(&chunk_tokens)).sum();
        Chunks { num_chunks: self.num_chunks, chunk_tokens, max_tokens, first_chunk_tokens, is_one_cut: true }
    }
}

fn below(noise: &mut Noise, limit: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a small count")]
    let drawn = (noise.unit() * limit as f64) as usize;
    drawn
}

/// Ids of which some are masked, some repeat, and how many experts tokens know changes from token to token.
fn random_ids(noise: &mut Noise, num_tokens: usize) -> Vec<i32> {
    let mut ids = Vec::with_capacity(num_tokens * SHAPE.num_topk);
    for _ in 0..num_tokens {
        let (goes_nowhere, reach) = (below(noise, 10) == 0, 1 + below(noise, SHAPE.num_experts));
        for _ in 0..SHAPE.num_topk {
            let is_masked = goes_nowhere || below(noise, 8) == 0;
            ids.push(if is_masked { -1 } else { i32::try_from(below(noise, reach)).unwrap_or(0) });
        }
    }
    ids
}

/// What steps run on.
struct Compared<'a> {
    bench: &'a Bench<'a>,
    /// Of each transport, of each layer, for whole steps.
    transports: Vec<Vec<DeviceTransport>>,
    /// The same in the second lane, for steps whose chunks overlap.
    in_turns: Vec<Vec<DeviceTransport>>,
    travel: Gpu,
    echo: Echo,
    buffers: [Buffers; NUM_SETS],
    marks: Marks,
    tokens: Tokens,
    out: DeviceBuffer<f32>,
}

/// Where lanes wait for each other.
struct Marks {
    part: Mark,
    unpacked: [Mark; NUM_SETS],
    computed: [Mark; NUM_SETS],
    meet: Mark,
}

pub(super) fn compare(bench: &Bench<'_>, num_steps: u64) -> Result<RandomReport, Failure> {
    let Bench { world, args, .. } = *bench;
    let second = if args.chunks > 1 { MAX_TOKENS.div_ceil(2) } else { 0 };
    let of_form = |form: &Form| form.rooms(SHAPE, world.size(), [MAX_TOKENS, second]);
    let ways = bench.ways(FORMS.iter().map(of_form).fold(Rooms::default(), Rooms::max), SHAPE.num_experts)?;
    let mut compared = world.agree(Compared::new(bench, &ways))?;
    // Sizes are everybody's; what a rank routes is its own.
    let mut sizes = Noise(args.seed.wrapping_mul(2).wrapping_add(1));
    let mut own = Noise((args.seed << 20 | u64::from(world.rank().0) << 1) + 1);
    let (mut num_tokens, mut num_different, mut first_different) = (0, 0, None);
    compared.fill()?;
    let held_bytes = cuda::held_bytes();
    for step in 0..num_steps {
        let drawn = Drawn::new(&mut sizes, world.size(), args.chunks);
        num_tokens += drawn.num_tokens.iter().sum::<usize>() as u64;
        let mine = drawn.num_tokens[world.rank().index()];
        let ids = random_ids(&mut own, mine);
        let start = below(&mut own, NUM_TOKENS - mine + 1);
        // A rank remembers what differs until all tell.
        if !compared.step(step, &drawn, (start, &ids))? {
            num_different += 1;
            first_different.get_or_insert(step);
        }
    }
    let told = [num_different, first_different.unwrap_or(u64::MAX), held_bytes.abs_diff(cuda::held_bytes())];
    let all = world.all_gather_u64(told);
    drop(compared);
    close(world, &ways);
    let first = all.iter().map(|[_, first, _]| *first).min().filter(|first| *first != u64::MAX);
    Ok(RandomReport {
        seed: args.seed,
        num_steps,
        transports: ways.iter().map(|way| way.transport().name()).collect(),
        max_chunks: args.chunks,
        num_ranks: world.size(),
        num_tokens,
        num_different: all.iter().map(|[num, ..]| *num).max().unwrap_or(0),
        first_different: first,
        memory_change_bytes: all.iter().map(|[.., change]| *change).max().unwrap_or(0),
    })
}

impl<'a> Compared<'a> {
    fn new(bench: &'a Bench<'a>, ways: &[Way]) -> Result<Self, GpuError> {
        let gpu = bench.gpu;
        let mut noise = Noise(u64::from(bench.world.rank().0) + 77);
        let values: Vec<f32> = (0..NUM_TOKENS * SHAPE.hidden).map(|_| noise.value()).collect();
        let weights: Vec<f32> = (0..NUM_TOKENS * SHAPE.num_topk).map(|_| noise.value()).collect();
        let travel = gpu.urgent_lane()?;
        let of_lane = |lane: &Gpu| -> Result<Vec<Vec<DeviceTransport>>, GpuError> {
            let of_layer = |way: &Way, layer: usize| {
                bench.transport(lane, (SHAPE, FORMS[layer]), way, u32::try_from(layer).unwrap_or(0))
            };
            ways.iter().map(|way| (0..FORMS.len()).map(|layer| of_layer(way, layer)).collect()).collect()
        };
        let in_turns = of_lane(&travel)?;
        let in_turns = in_turns.into_iter().map(|layers| layers.into_iter().map(DeviceTransport::in_turns).collect());
        Ok(Self {
            bench,
            transports: of_lane(gpu)?,
            in_turns: in_turns.collect(),
            echo: Echo::new(gpu, SHAPE.hidden)?,
            buffers: [Buffers::new(gpu)?, Buffers::new(&travel)?],
            marks: Marks {
                part: gpu.mark()?,
                unpacked: [travel.mark()?, travel.mark()?],
                computed: [gpu.mark()?, gpu.mark()?],
                meet: travel.mark()?,
            },
            travel,
            tokens: upload(gpu, &values, &vec![-1; NUM_TOKENS * SHAPE.num_topk], &weights)?,
            out: DeviceBuffer::zeroed(gpu.stream(), NUM_TOKENS * SHAPE.hidden)?,
        })
    }

    /// Steps of the most tokens, all of them to each rank in turn: buffers are as large afterwards as any step needs.
    fn fill(&mut self) -> Result<(), CarryError> {
        let num_ranks = self.bench.world.size();
        let placement = Placement::new(SHAPE.num_experts, num_ranks);
        for target in (0..num_ranks).map(Rank::from_index) {
            let expert = i32::try_from(placement.local_experts(target).start).unwrap_or(0);
            for layer in 0..FORMS.len() {
                let num_chunks = self.bench.args.chunks.min(2);
                let drawn = Drawn { layer, num_tokens: vec![MAX_TOKENS; num_ranks], num_chunks };
                self.step(0, &drawn, (0, &[expert; MAX_TOKENS * SHAPE.num_topk]))?;
            }
        }
        Ok(())
    }

    /// Whether a step gives this rank, whose tokens begin at `start`, the same sums over all transports, whole and in chunks.
    fn step(&mut self, step: u64, drawn: &Drawn, (start, own_ids): (usize, &[i32])) -> Result<bool, CarryError> {
        let Bench { world, gpu, .. } = *self.bench;
        let stream = gpu.stream();
        let num_tokens = drawn.num_tokens[world.rank().index()];
        self.tokens.ids.upload(stream, start * SHAPE.num_topk, own_ids)?;
        let mut first: Option<Vec<f32>> = None;
        let mut is_alike = true;
        for at in 0..self.transports.len() {
            for in_chunks in [false, true] {
                if in_chunks && drawn.num_chunks > 1 {
                    self.queue_in_turns(at, (step, drawn), start)?;
                } else if in_chunks {
                    continue;
                } else {
                    self.queue_whole(at, (step, drawn), start)?;
                }
                self.transports[at][drawn.layer].wait_for_all(world)?;
                let mut sums = vec![0.0; num_tokens * SHAPE.hidden];
                self.out.download_into(stream, start * SHAPE.hidden, &mut sums)?;
                // What the next one does not write shows.
                self.out.fill_bytes(stream, 0xff)?;
                let same = |first: &[f32]| first.iter().zip(&sums).all(|(a, b)| a.to_bits() == b.to_bits());
                is_alike &= first.as_deref().is_none_or(same);
                first.get_or_insert(sums);
            }
        }
        Ok(is_alike)
    }

    fn queue_whole(&mut self, at: usize, (step, drawn): (u64, &Drawn), start: usize) -> Result<(), CarryError> {
        let world = self.bench.world;
        let transport = &self.transports[at][drawn.layer];
        let most = drawn.num_tokens.iter().copied().max().unwrap_or(0).max(1);
        let num_tokens = drawn.num_tokens[world.rank().index()];
        let tokens = chunk_of(&self.tokens, start..start + num_tokens, (step, 0));
        let buffers = &mut self.buffers[0];
        let handle = transport.dispatch(world, buffers, &tokens, most)?;
        self.echo.queue(buffers, &handle)?;
        transport.combine(world, buffers, &handle, (&tokens, most), &mut self.out)
    }

    /// As a layer does with its experts: see `layer::overlap`.
    fn queue_in_turns(&mut self, at: usize, (step, drawn): (u64, &Drawn), start: usize) -> Result<(), CarryError> {
        let Bench { world, gpu: compute, .. } = *self.bench;
        let Self { travel, marks, buffers, in_turns, echo, tokens: all, out, .. } = self;
        let transport = &in_turns[at][drawn.layer];
        let (chunks, num_tokens) = (drawn.chunks(), drawn.num_tokens[world.rank().index()]);
        let tokens_of = |chunk: usize| {
            let tokens = chunks.tokens(chunk, num_tokens);
            let of_step = (chunk == 0).then_some(start..start + num_tokens);
            let tokens = chunk_of(all, start + tokens.start..start + tokens.end, (step, chunk));
            DeviceTokens { of_step, ..tokens }
        };
        let mut handles = [None, None];
        compute.move_mark(&mut marks.part)?;
        travel.follow(&marks.part)?;
        for turn in turns(chunks.num_chunks) {
            match turn {
                Turn::Dispatch(chunk) => {
                    let buffers = &mut buffers[set_of(chunk)];
                    handles[set_of(chunk)] =
                        Some(transport.dispatch(world, buffers, &tokens_of(chunk), chunks.chunk_tokens)?);
                    travel.move_mark(&mut marks.unpacked[set_of(chunk)])?;
                }
                Turn::Experts(chunk) => {
                    compute.follow(&marks.unpacked[set_of(chunk)])?;
                    if let Some(handle) = &handles[set_of(chunk)] {
                        echo.queue(&mut buffers[set_of(chunk)], handle)?;
                    }
                    compute.move_mark(&mut marks.computed[set_of(chunk)])?;
                }
                Turn::Combine(chunk) => {
                    travel.follow(&marks.computed[set_of(chunk)])?;
                    if let Some(handle) = handles[set_of(chunk)].take() {
                        let tokens = tokens_of(chunk);
                        let buffers = &mut buffers[set_of(chunk)];
                        transport.combine(world, buffers, &handle, (&tokens, chunks.chunk_tokens), out)?;
                    }
                }
            }
        }
        travel.move_mark(&mut marks.meet)?;
        Ok(compute.follow(&marks.meet)?)
    }
}

fn chunk_of(all: &Tokens, tokens: Range<usize>, (step, chunk): (u64, usize)) -> DeviceTokens<'_> {
    let Tokens { values, ids, weights } = all;
    let num_topk = SHAPE.num_topk;
    DeviceTokens { values, ids, weights, tokens, num_topk, step, chunk, of_step: None, live_tokens: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_everything() {
        let drawn = |seed| {
            let mut noise = Noise(seed);
            (0..50)
                .map(|_| Drawn::new(&mut noise, 3, 5))
                .map(|drawn| (drawn.layer, drawn.num_tokens, drawn.num_chunks))
                .collect::<Vec<_>>()
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(9));
        assert!(drawn(7).iter().flat_map(|(_, sizes, _)| sizes).any(|&size| size == 0));
        assert!(drawn(7).iter().flat_map(|(_, sizes, _)| sizes).all(|&size| size <= MAX_TOKENS));
        assert!((1..=5).all(|num_chunks| drawn(7).iter().any(|drawn| drawn.2 == num_chunks)));
        let ids = random_ids(&mut Noise(3), 200);
        assert!(ids.contains(&-1) && ids.iter().all(|id| (-1..61).contains(id)));
        assert!(ids.chunks(SHAPE.num_topk).any(|token| token.iter().all(|id| *id == -1)), "some go nowhere");
    }
}
