//! Random steps over all transports, compared bit for bit. A seed says everything.

use super::report::RandomReport;
use super::{Bench, Form, INPUT_SCALE, Shape, Tokens, close, upload};
use crate::cli::bench::work::Noise;
use crate::cli::failure::Failure;
use crate::config::Choice as _;
use crate::cuda::{self, DeviceBuffer};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::combine::CombineMode;
use crate::dispatch::device::{Buffers, DeviceTokens, DeviceTransport, Echo, Way};
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::placement::Placement;
use crate::dispatch::region::Rooms;
use crate::gpu::GpuError;
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
}

impl Drawn {
    fn new(noise: &mut Noise, num_ranks: usize) -> Self {
        let layer = below(noise, FORMS.len());
        let num_tokens = (0..num_ranks).map(|_| if below(noise, 8) == 0 { 0 } else { below(noise, MAX_TOKENS + 1) });
        Self { layer, num_tokens: num_tokens.collect() }
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
    /// Of each transport, of each layer.
    transports: Vec<Vec<DeviceTransport>>,
    echo: Echo,
    buffers: Buffers,
    tokens: Tokens,
    out: DeviceBuffer<f32>,
}

pub(super) fn compare(bench: &Bench<'_>, num_steps: u64) -> Result<RandomReport, Failure> {
    let Bench { world, args, .. } = *bench;
    let of_form = |form: &Form| form.rooms(SHAPE, world.size(), MAX_TOKENS);
    let ways = bench.ways(FORMS.iter().map(of_form).fold(Rooms::default(), Rooms::max), SHAPE.num_experts)?;
    let mut compared = world.agree(Compared::new(bench, &ways))?;
    // Sizes are everybody's; what a rank routes is its own.
    let mut sizes = Noise(args.seed.wrapping_mul(2).wrapping_add(1));
    let mut own = Noise((args.seed << 20 | u64::from(world.rank().0) << 1) + 1);
    let (mut num_tokens, mut num_different, mut first_different) = (0, 0, None);
    compared.fill()?;
    let held_bytes = cuda::held_bytes();
    for step in 0..num_steps {
        let drawn = Drawn::new(&mut sizes, world.size());
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
        let of_layer =
            |way: &Way, layer: usize| bench.transport((SHAPE, FORMS[layer]), way, u32::try_from(layer).unwrap_or(0));
        let of_way =
            |way: &Way| (0..FORMS.len()).map(|layer| of_layer(way, layer)).collect::<Result<Vec<_>, GpuError>>();
        Ok(Self {
            bench,
            transports: ways.iter().map(of_way).collect::<Result<_, _>>()?,
            echo: Echo::new(gpu, SHAPE.hidden)?,
            buffers: Buffers::new(gpu)?,
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
                let drawn = Drawn { layer, num_tokens: vec![MAX_TOKENS; num_ranks] };
                self.step(0, &drawn, (0, &[expert; MAX_TOKENS * SHAPE.num_topk]))?;
            }
        }
        Ok(())
    }

    /// Whether a step gives this rank, whose tokens begin at `start`, the same sums over all transports.
    fn step(&mut self, step: u64, drawn: &Drawn, (start, own_ids): (usize, &[i32])) -> Result<bool, CarryError> {
        let Bench { world, gpu, .. } = *self.bench;
        let (stream, num_topk) = (gpu.stream(), SHAPE.num_topk);
        let num_tokens = drawn.num_tokens[world.rank().index()];
        let most = drawn.num_tokens.iter().copied().max().unwrap_or(0).max(1);
        self.tokens.ids.upload(stream, start * num_topk, own_ids)?;
        let mut first: Option<Vec<f32>> = None;
        let mut is_alike = true;
        for layers in &self.transports {
            let transport = &layers[drawn.layer];
            let Tokens { values, ids, weights } = &self.tokens;
            let tokens = DeviceTokens {
                values,
                ids,
                weights,
                tokens: start..start + num_tokens,
                num_topk,
                step,
                chunk: 0,
                of_step: None,
                live_tokens: 0,
            };
            let handle = transport.dispatch(world, &mut self.buffers, &tokens, most)?;
            self.echo.queue(&mut self.buffers, &handle)?;
            transport.combine(world, &mut self.buffers, &handle, (&tokens, most), &mut self.out)?;
            transport.wait_for_all(world)?;
            let mut sums = vec![0.0; num_tokens * SHAPE.hidden];
            self.out.download_into(stream, start * SHAPE.hidden, &mut sums)?;
            let same = |first: &[f32]| first.iter().zip(&sums).all(|(a, b)| a.to_bits() == b.to_bits());
            is_alike &= first.as_deref().is_none_or(same);
            first.get_or_insert(sums);
        }
        Ok(is_alike)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_everything() {
        let drawn = |seed| {
            let mut noise = Noise(seed);
            (0..50).map(|_| Drawn::new(&mut noise, 3)).map(|drawn| (drawn.layer, drawn.num_tokens)).collect::<Vec<_>>()
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(9));
        assert!(drawn(7).iter().flat_map(|(_, sizes)| sizes).any(|&size| size == 0));
        assert!(drawn(7).iter().flat_map(|(_, sizes)| sizes).all(|&size| size <= MAX_TOKENS));
        let ids = random_ids(&mut Noise(3), 200);
        assert!(ids.contains(&-1) && ids.iter().all(|id| (-1..61).contains(id)));
        assert!(ids.chunks(SHAPE.num_topk).any(|token| token.iter().all(|id| *id == -1)), "some go nowhere");
    }
}
