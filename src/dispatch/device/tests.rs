//! The device's dispatch and combine against the host's, bit for bit: one GPU plays every rank in turn, and this process
//! carries between them. They need a GPU and NVRTC.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

mod few;
mod two_levels;

use super::{Buffers, DeviceTokens, Forms, Stages};
use crate::cuda::DeviceBuffer;
use crate::dispatch::combine::{self, CombineMode, RowForm};
use crate::dispatch::counts::{ReceivedCounts, SentCounts};
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::packing::{local_id, pack};
use crate::dispatch::placement::Placement;
use crate::dispatch::plan::{ComputePlan, DispatchPlan, NOT_HERE, Slots};
use crate::dispatch::region::MAX_PEERS;
use crate::dispatch::travel::Travel;
use crate::gpu::{Gpu, GpuError, Kernels, grow};
use crate::ids::Rank;
use crate::jit::kernels::nvlink::Run;
use crate::numerics::nvfp4::{self, QuantCounts};
use crate::random::Random;

/// A layer's tokens over all ranks, and the forms that they travel in.
#[derive(Debug, Clone)]
struct World {
    num_experts: usize,
    num_topk: usize,
    hidden: usize,
    /// `[num_ranks]` tokens of each.
    num_tokens: Vec<usize>,
    seed: u64,
    payload: PayloadForm,
    quantise: Option<f32>,
    mode: CombineMode,
    form: CombineForm,
    values: Values,
}

/// Tokens of one rank.
struct Home {
    values: Vec<f32>,
    idx: Vec<i32>,
    weights: Vec<f32>,
}

/// What tokens hold.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    /// Between -16 and 16.
    Plain,
    /// About an input scale, with all that quantising treats specially: see [`around_scale`].
    Around(f32),
}

impl Random {
    /// Between -1 and 1, at 2^13 places times powers of two.
    fn value(&mut self) -> f32 {
        let place = f32::from(i16::try_from(self.below(16_385)).unwrap() - 8192) / 8192.0;
        place * 2f32.powi(i32::try_from(self.below(9)).unwrap() - 4)
    }
}

impl World {
    fn placement(&self) -> Placement {
        Placement::new(self.num_experts, self.num_tokens.len())
    }

    fn forms(&self) -> Forms {
        let row_form = RowForm { hidden: self.hidden, form: self.form };
        let travel = Travel { placement: self.placement(), payload: self.payload, mode: self.mode, row_form };
        Forms { travel, quantise: self.quantise }
    }

    /// Skewed to the first experts; slots are masked or repeat an expert now and then, and some tokens go nowhere.
    fn home(&self, rank: usize) -> Home {
        let mut random = Random(self.seed * 1000 + rank as u64 + 1);
        let num_tokens = self.num_tokens[rank];
        let mut idx = Vec::new();
        for _ in 0..num_tokens {
            let goes_nowhere = random.below(10) == 0;
            let reach = 1 + random.below(self.num_experts);
            for _ in 0..self.num_topk {
                let is_masked = goes_nowhere || random.below(8) == 0;
                idx.push(if is_masked { -1 } else { i32::try_from(random.below(reach)).unwrap() });
            }
        }
        let mut value = |bf16: bool| {
            let value = random.value();
            if bf16 { half::bf16::from_f32(value).to_f32() } else { value }
        };
        let is_bf16 = self.payload == PayloadForm::Bf16;
        let values = match self.values {
            Values::Plain => (0..num_tokens * self.hidden).map(|_| value(is_bf16)).collect(),
            Values::Around(input_scale) => around_scale(self.seed, num_tokens * self.hidden, input_scale),
        };
        let weights = idx.iter().map(|_| value(false)).collect();
        Home { values, idx, weights }
    }
}

/// Blocks that are special throughout: zeros of both signs, the smallest and largest subnormals, infinities, one value alone.
const SPECIAL: [[f32; 4]; 6] = [
    [0.0, -0.0, 0.0, -0.0],
    [f32::from_bits(1), -f32::from_bits(1), f32::from_bits(0x007F_FFFF), 0.0],
    [f32::INFINITY, 1.0, f32::NEG_INFINITY, -1.0],
    [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 0.0],
    [6.0, 5.0, 0.25, -0.25],
    [448.0 * 6.0, 464.0 * 6.0, 465.0 * 6.0, 2.5],
];

/// Values from far below to far above what an input scale holds: a quarter on or beside ties, some subnormal.
fn around_scale(seed: u64, len: usize, input_scale: f32) -> Vec<f32> {
    let mut random = Random(seed);
    let mut x = Vec::with_capacity(len);
    for special in SPECIAL {
        x.extend((0..nvfp4::BLOCK).map(|i| special[i % 4] * input_scale));
        x.extend((0..nvfp4::BLOCK).map(|i| special[i % 4]));
    }
    while x.len() < len {
        let size = input_scale * 2f32.powi(i32::try_from(random.below(34)).unwrap() - 16);
        for i in 0..nvfp4::BLOCK {
            let tie = (f32::from(u8::try_from(random.below(65)).unwrap()) - 32.0) / 4.0;
            let value = if i % 4 == 0 { tie } else { random.value() } * size;
            let beside = value.to_bits().wrapping_add(u32::try_from(random.below(3)).unwrap()).wrapping_sub(1);
            x.push(if i % 8 == 0 && value != 0.0 { f32::from_bits(beside) } else { value });
        }
    }
    x.truncate(len);
    x
}

impl Home {
    fn slots(&self, num_topk: usize) -> Slots<'_> {
        Slots { num_topk, idx: &self.idx, weights: &self.weights }
    }
}

/// Runs of every source for `rank`, of what all ranks have packed.
fn arriving(packed: &[Vec<u8>], counts: &[Vec<usize>], rank: usize, row_bytes: usize) -> Vec<u8> {
    let run = |(bytes, counts): (&Vec<u8>, &Vec<usize>)| {
        let start: usize = counts[..rank].iter().sum();
        bytes[start * row_bytes..(start + counts[rank]) * row_bytes].to_vec()
    };
    packed.iter().zip(counts).flat_map(run).collect()
}

fn assert_same<T: PartialEq + std::fmt::Debug>(got: &[T], expected: &[T], width: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    if let Some(at) = got.iter().zip(expected).position(|(got, expected)| got != expected) {
        let (row, column) = (at / width, at % width);
        panic!("{what}: row {row}, column {column} is {:?}, expected {:?}", got[at], expected[at]);
    }
}

/// All tokens that lie on a device.
fn all_of<'a>(
    (values, ids, weights): (&'a DeviceBuffer<f32>, &'a DeviceBuffer<i32>, &'a DeviceBuffer<f32>),
    (num_tokens, num_topk): (usize, usize),
) -> DeviceTokens<'a> {
    let (tokens, step, chunk) = (0..num_tokens, 0, 0);
    DeviceTokens { values, ids, weights, tokens, num_topk, step, chunk, of_step: None, live_tokens: 0 }
}

struct Bench {
    gpu: Gpu,
    /// One rank's after the other: what one leaves behind must not show in the next.
    buffers: Buffers,
}

impl Bench {
    fn new() -> Self {
        let kernels = Kernels::OnDemand(std::env::var("LOCKSTEP_NVRTC").ok());
        let gpu = Gpu::open(0, &kernels).unwrap_or_else(|error| panic!("{error}"));
        let buffers = Buffers::new(&gpu).unwrap();
        Self { gpu, buffers }
    }

    fn on_device<T: bytemuck::Pod>(&self, values: &[T]) -> DeviceBuffer<T> {
        DeviceBuffer::from_slice(self.gpu.stream(), values).unwrap()
    }

    fn first<T: bytemuck::Pod>(&self, buffer: &DeviceBuffer<T>, len: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); len];
        buffer.download_into(self.gpu.stream(), 0, &mut values).unwrap();
        values
    }

    fn put(&self, bytes: &[u8]) -> DeviceBuffer<u8> {
        let mut buffer = DeviceBuffer::uninitialised(self.gpu.device(), 0).unwrap();
        grow(&mut buffer, bytes.len()).unwrap();
        buffer.upload(self.gpu.stream(), 0, bytes).unwrap();
        buffer
    }

    /// Plays all ranks of `world`, holding every step to the host's.
    fn play(&mut self, world: &World) {
        let forms = world.forms();
        let (placement, num_ranks) = (world.placement(), world.num_tokens.len());
        let layout = forms.travel.layout(world.num_topk);
        let row_bytes = layout.row_bytes();
        let what = format!("{world:?}");
        let stages: Vec<Stages> =
            (0..num_ranks).map(|rank| Stages::new(&self.gpu, forms, Rank::from_index(rank)).unwrap()).collect();
        let homes: Vec<Home> = (0..num_ranks).map(|rank| world.home(rank)).collect();
        let plans: Vec<DispatchPlan> =
            homes.iter().map(|home| DispatchPlan::new(placement, home.slots(world.num_topk))).collect();
        let (mut packed, mut messages, mut counts, mut home_rows) = (vec![], vec![], vec![], vec![]);
        for (rank, (home, plan)) in homes.iter().zip(&plans).enumerate() {
            let what = format!("{what}, rank {rank} sends");
            self.send(world, &stages[rank], home);
            let sent = SentCounts::new(placement, &self.buffers.host_totals, (world.num_tokens[rank], world.num_topk));
            let sent = sent.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(sent.num_tokens, plan.num_tokens_to(), "{what}: tokens");
            assert_eq!(sent.num_slots, plan.num_slots, "{what}: slots");
            let slots = home.slots(world.num_topk);
            let (expected, quantised) = pack(&layout, (plan, slots), &home.values, local_id(placement));
            let bytes = self.first(&self.buffers.packed, expected.len());
            assert_same(&bytes, &expected, row_bytes, &what);
            let found = self.first(&self.buffers.counts, 2);
            assert_eq!(found, [quantised.num_saturated, quantised.num_zeroed], "{what}: block scales");
            home_rows.push(self.first(&self.buffers.home_rows, home.idx.len()));
            packed.push(bytes);
            messages.push(sent.messages(placement));
            counts.push(sent.num_tokens.clone());
        }
        let (mut back, mut back_counts) = (vec![], vec![]);
        for (rank, stages) in stages.iter().enumerate() {
            let what = format!("{what}, rank {rank} receives");
            let received = received(&messages, placement, rank);
            let arrived = arriving(&packed, &counts, rank, row_bytes);
            back.push(self.receive(world, (stages, &received), &arrived, rank, &what));
            back_counts.push(match world.mode {
                CombineMode::Slot => received.num_rows,
                CombineMode::Rank => received.num_tokens,
            });
        }
        let return_bytes = world.form.row_bytes(world.hidden);
        for rank in 0..num_ranks {
            let what = format!("{what}, rank {rank} is home");
            let bytes = arriving(&back, &back_counts, rank, return_bytes);
            self.buffers.home_rows = self.on_device(&home_rows[rank]);
            let got = self.add(world, (&stages[rank], &homes[rank]), &bytes);
            let mut expected = vec![0.0; got.len()];
            let mut rest = bytes.as_slice();
            let runs: Vec<&[u8]> = (0..num_ranks)
                .map(|source| {
                    let (run, others) = rest.split_at(back_counts[source][rank] * return_bytes);
                    rest = others;
                    run
                })
                .collect();
            let (slots, row_form) = (homes[rank].slots(world.num_topk), forms.travel.row_form);
            match world.mode {
                CombineMode::Slot => combine::add_slots(&runs, placement, slots, row_form, &mut expected),
                CombineMode::Rank => combine::add_sums(&runs, &plans[rank], row_form, &mut expected),
            }
            let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
            assert_same(&bits(&got), &bits(&expected), world.hidden, &what);
            if num_ranks == 1 {
                let got = self
                    .add_with((world, &homes[rank]), |buffers, tokens, out| stages[rank].add_own(buffers, tokens, out));
                assert_same(&bits(&got), &bits(&expected), world.hidden, &format!("{what} alone"));
            }
        }
    }

    /// What `f` does with a rank's tokens, in buffers of rubbish; waits for it.
    fn with_tokens(
        &mut self,
        (world, home): (&World, &Home),
        f: impl FnOnce(&mut Buffers, &DeviceTokens<'_>) -> Result<(), GpuError>,
    ) {
        let (values, ids, weights) =
            (self.on_device(&home.values), self.on_device(&home.idx), self.on_device(&home.weights));
        let (num_tokens, num_topk) = (home.idx.len() / world.num_topk, world.num_topk);
        let tokens = all_of((&values, &ids, &weights), (num_tokens, num_topk));
        self.buffers.poison(&self.gpu).unwrap();
        self.buffers.counts.fill_bytes(self.gpu.stream(), 0).unwrap();
        f(&mut self.buffers, &tokens).unwrap();
        self.gpu.stream().synchronise().unwrap();
    }

    fn send(&mut self, world: &World, stages: &Stages, home: &Home) {
        self.with_tokens((world, home), |buffers, tokens| {
            stages.count(buffers, tokens)?;
            stages.pack(buffers, tokens, None)
        });
    }

    /// Unpacks what `rank` receives, makes up its experts' rows, and gives back.
    fn receive(
        &mut self,
        world: &World,
        (stages, received): (&Stages, &ReceivedCounts),
        arrived: &[u8],
        rank: usize,
        what: &str,
    ) -> Vec<u8> {
        let packed = self.put(arrived);
        // In one piece, or in one for each source.
        let whole = Run::whole(packed.address());
        let row_bytes = world.forms().travel.layout(world.num_topk).row_bytes();
        let starts: Vec<u64> = received
            .num_tokens
            .iter()
            .scan(0, |start, &num_tokens| {
                let at = *start;
                *start += (num_tokens * row_bytes) as u64;
                Some(packed.address() + at)
            })
            .collect();
        let pieces = Run::of(&received.num_tokens, row_bytes, |source| starts[source]);
        let runs = if world.seed.is_multiple_of(2) { whole } else { pieces };
        let plan = self.unpack(world, (stages, received), (arrived, runs), (rank, what));
        let (forms, hidden, num_topk) = (world.forms(), world.hidden, world.num_topk);
        let layout = forms.travel.layout(num_topk);
        let rows = || arrived.chunks_exact(row_bytes);
        let local_idx: Vec<i32> = rows().flat_map(|row| layout.local_idx(row)).collect();
        let weights: Vec<f32> = rows().flat_map(|row| layout.weights(row)).collect();
        let mut random = Random(world.seed + 77 + rank as u64);
        // Some round to -0, which the sum at home makes 0.
        let mut row_value = || if random.below(9) == 0 { -f32::from_bits(1) } else { random.value() };
        let rows: Vec<f32> = (0..plan.num_rows() * hidden).map(|_| row_value()).collect();
        self.buffers.rows = self.on_device(&rows);
        stages.give_back(&mut self.buffers, received, num_topk, None).unwrap();
        let hosted = local_idx.iter().zip(&weights).filter(|(id, _)| **id != NOT_HERE);
        let hosted_weights: Vec<f32> = hosted.map(|(_, weight)| *weight).collect();
        let row_form = forms.travel.row_form;
        let expected = match world.mode {
            CombineMode::Slot => combine::return_slots(&rows, &plan, row_form),
            CombineMode::Rank => combine::return_sums(&rows, &plan, &hosted_weights, row_form),
        };
        let back = self.first(&self.buffers.back, expected.len());
        assert_same(&back, &expected, world.form.row_bytes(hidden), &format!("{what}, gives back"));
        back
    }

    /// Unpacks what lies in `runs`, which is `in_order` by sources.
    fn unpack(
        &mut self,
        world: &World,
        (stages, received): (&Stages, &ReceivedCounts),
        (in_order, runs): (&[u8], [Run; MAX_PEERS]),
        (rank, what): (usize, &str),
    ) -> ComputePlan {
        let (hidden, num_topk) = (world.hidden, world.num_topk);
        let layout = world.forms().travel.layout(num_topk);
        let rows = || in_order.chunks_exact(layout.row_bytes());
        self.buffers.poison(&self.gpu).unwrap();
        self.buffers.counts.fill_bytes(self.gpu.stream(), 0).unwrap();
        stages.unpack(&mut self.buffers, received, num_topk, runs).unwrap();

        let local_idx: Vec<i32> = rows().flat_map(|row| layout.local_idx(row)).collect();
        let num_experts = world.placement().local_experts(Rank::from_index(rank)).len();
        let plan = ComputePlan::new(num_experts, num_topk, &local_idx);
        assert_eq!(received.expert_offsets, plan.expert_offsets, "{what}: offsets");
        assert_same(&self.first(&self.buffers.row_token, plan.num_rows()), &plan.row_token, 1, what);
        assert_same(&self.first(&self.buffers.return_rows, plan.num_rows()), &plan.return_rows, 1, what);
        let mut quantised = QuantCounts::default();
        let mut tokens: Vec<u16> = Vec::new();
        for row in rows() {
            let mut values = vec![0.0; hidden];
            layout.decode_values(row, &mut values);
            if let Some(input_scale) = world.quantise {
                let before = values.clone();
                quantised += nvfp4::quantise_unscaled(&before, input_scale, &mut values);
            }
            tokens.extend(values.iter().map(|value| half::bf16::from_f32(*value).to_bits()));
        }
        assert_same(&self.first(&self.buffers.tokens, tokens.len()), &tokens, hidden, what);
        let found = &self.first(&self.buffers.counts, 4)[2..];
        assert_eq!(found, [quantised.num_saturated, quantised.num_zeroed], "{what}: block scales");
        plan
    }

    fn add(&self, world: &World, (stages, home): (&Stages, &Home), bytes: &[u8]) -> Vec<f32> {
        let target = self.put(bytes);
        self.add_with((world, home), |buffers, tokens, out| stages.add(buffers, tokens, target.address(), out))
    }

    /// What `add` makes of rubbish.
    fn add_with(
        &self,
        (world, home): (&World, &Home),
        add: impl FnOnce(&Buffers, &DeviceTokens<'_>, &mut DeviceBuffer<f32>) -> Result<(), GpuError>,
    ) -> Vec<f32> {
        let (values, ids, weights) =
            (self.on_device(&home.values), self.on_device(&home.idx), self.on_device(&home.weights));
        let num_tokens = home.idx.len() / world.num_topk;
        let tokens = all_of((&values, &ids, &weights), (num_tokens, world.num_topk));
        let mut out = self.on_device(&vec![f32::NAN; home.values.len()]);
        add(&self.buffers, &tokens, &mut out).unwrap();
        out.download(self.gpu.stream()).unwrap()
    }
}

/// What all ranks tell `rank`.
fn received(messages: &[Vec<u32>], placement: Placement, rank: usize) -> ReceivedCounts {
    let told: Vec<u32> = messages
        .iter()
        .flat_map(|message| {
            let before: usize =
                (0..rank).map(|other| crate::dispatch::counts::message_len(placement, Rank::from_index(other))).sum();
            message[before..][..crate::dispatch::counts::message_len(placement, Rank::from_index(rank))].to_vec()
        })
        .collect();
    ReceivedCounts::new(placement.local_experts(Rank::from_index(rank)).len(), &told)
}

const SCALE: f32 = 0.01;

/// Every form of tokens and rows.
fn all_forms() -> Vec<(PayloadForm, Option<f32>, CombineMode, CombineForm)> {
    let nvfp4 = PayloadForm::Nvfp4 { input_scale: SCALE };
    vec![
        (PayloadForm::F32, None, CombineMode::Slot, CombineForm::F32),
        (PayloadForm::F32, Some(SCALE), CombineMode::Rank, CombineForm::Bf16),
        (PayloadForm::Bf16, None, CombineMode::Rank, CombineForm::F32),
        (PayloadForm::Bf16, Some(SCALE), CombineMode::Slot, CombineForm::Bf16),
        (nvfp4, None, CombineMode::Slot, CombineForm::F32),
        (nvfp4, None, CombineMode::Rank, CombineForm::Bf16),
    ]
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_ranks_1_to_16_pack_and_combine_like_the_host() {
    let mut bench = Bench::new();
    for (payload, quantise, mode, form) in all_forms() {
        for num_tokens in [vec![37], vec![5, 64], vec![0, 9, 1], vec![33; 8], (0..16).map(|rank| rank * 3).collect()] {
            for (num_experts, num_topk, hidden) in [(7, 3, 48), (61, 8, 1200), (5, 40, 16)] {
                let (num_tokens, seed, values) = (num_tokens.clone(), num_experts as u64, Values::Plain);
                let world =
                    World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
                bench.play(&world);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_random_worlds_pack_and_combine_like_the_host() {
    let mut bench = Bench::new();
    let mut runner = TestRunner::deterministic();
    let forms = all_forms();
    // Few widths: each has its own kernels.
    let worlds = (1usize..40, 1usize..12, proptest::bool::ANY, prop_tokens(), 0u64..1000, 0..forms.len());
    for _ in 0..60 {
        let (num_experts, num_topk, is_wide, num_tokens, seed, form) =
            worlds.new_tree(&mut runner).expect("a world").current();
        let (payload, quantise, mode, form) = forms[form];
        let hidden = if is_wide { 144 } else { 16 };
        let values = Values::Plain;
        bench.play(&World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values });
    }
}

fn prop_tokens() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0usize..90, 1..17)
}

/// More tokens than tiles of the smallest size, and experts than threads of a block.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_many_tokens_pack_and_combine_like_the_host() {
    let mut bench = Bench::new();
    for num_tokens in [vec![5000], vec![3000, 2500]] {
        let (payload, quantise, mode, form) = all_forms()[0];
        let (num_experts, num_topk, hidden, seed) = (896, 16, 64, 3);
        let values = Values::Plain;
        bench.play(&World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values });
    }
}

/// 10 million values to codes and block scales where tokens are packed, and through NVFP4 where they arrive, under each of
/// four input scales.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_quantises_ten_million_values_like_the_host() {
    let mut bench = Bench::new();
    let (num_experts, num_topk, hidden, seed, mode, form) = (1, 1, 256, 31, CombineMode::Rank, CombineForm::Bf16);
    for input_scale in [1.0, 0.0037, nvfp4::MIN_INPUT_SCALE, 1e3] {
        for (payload, quantise) in [(PayloadForm::Nvfp4 { input_scale }, None), (PayloadForm::F32, Some(input_scale))] {
            let (num_tokens, values) = (vec![39_063], Values::Around(input_scale));
            let world =
                World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
            bench.play(&world);
        }
    }
}
