//! A few tokens in one launch, against the kernels that take several: one GPU plays every rank, each with a region of its own.

use bytemuck::Zeroable;

use super::super::few::{Few, Sides};
use super::*;
use crate::cuda::PinnedBuffer;
use crate::dispatch::region::{ALARM_WORDS, Alarm, ChunkTag, Flag, MAX_TAGGED_TOKENS, Region, Rooms, RowSizes};
use crate::ids::LayerIdx;
use crate::jit::kernels::few::FewArgs;
use crate::jit::kernels::live::Live;
use crate::jit::kernels::nvlink::Hear;

/// Enough for any store on one device.
const LIMIT_NS: u64 = 2_000_000_000;

/// What all ranks have mapped, and what hosts see of it.
struct Regions {
    region: Region,
    memory: Vec<DeviceBuffer<u8>>,
    host_counts: PinnedBuffer<u32>,
    host_alarms: PinnedBuffer<u64>,
    epoch: u32,
}

/// What experts read, and where rows come home.
#[derive(Debug, PartialEq)]
struct Arrived {
    expert_offsets: Vec<u32>,
    tokens: Vec<u16>,
    weights: Vec<u32>,
    row_token: Vec<u32>,
    return_rows: Vec<u32>,
    slot_row: Vec<u32>,
    scales: Vec<u64>,
}

impl Regions {
    fn new(bench: &Bench, world: &World) -> Self {
        let num_ranks = world.num_tokens.len();
        let sizes = RowSizes {
            num_ranks,
            num_topk: world.num_topk,
            token_bytes: world.forms().travel.layout(world.num_topk).row_bytes(),
            return_bytes: world.form.row_bytes(world.hidden),
            per_slot: world.mode == CombineMode::Slot,
        };
        let num_local_experts = world.placement().local_experts(Rank(0)).len();
        let region = Region::new(num_ranks, num_local_experts, Rooms::new(&sizes, [MAX_TAGGED_TOKENS, 0]));
        let device = bench.gpu.device();
        let memory = || DeviceBuffer::zeroed(bench.gpu.stream(), region.num_bytes()).unwrap();
        Self {
            memory: (0..num_ranks).map(|_| memory()).collect(),
            host_counts: PinnedBuffer::zeroed(device, num_ranks * region.num_words()).unwrap(),
            host_alarms: PinnedBuffer::zeroed(device, num_ranks * ALARM_WORDS).unwrap(),
            region,
            epoch: 0,
        }
    }

    fn args(&self, rank: usize, limit_ns: u64) -> FewArgs {
        let region = &self.region;
        let mut regions = [0; MAX_PEERS];
        regions.iter_mut().zip(&self.memory).for_each(|(address, memory)| *address = memory.address());
        let narrow = |number: usize| u32::try_from(number).unwrap();
        let hear = Hear {
            regions,
            host_alarms: self.host_alarms.address(),
            flags_at: region.flags_at(Flag::Counts, 0) as u64,
            alarms_at: region.alarms_at() as u64,
            word: ChunkTag { epoch: self.epoch, layer: LayerIdx(3), step: 5 }.word(),
            limit_ns,
            rank: narrow(rank),
            num_ranks: narrow(self.memory.len()),
            ..Hear::zeroed()
        };
        FewArgs {
            hear,
            host_counts: self.host_counts.address(),
            counts_at: region.counts_at() as u64,
            tagged_at: region.tagged_at(0) as u64,
            tagged_bytes: region.rooms().tagged_bytes as u64,
            home_at: region.home_at(0) as u64,
            num_words: narrow(region.num_words()),
            num_heard: narrow(region.num_told(false)),
            ..FewArgs::zeroed()
        }
    }
}

impl Bench {
    fn arrived(&self, num_experts: usize, (num_tokens, num_rows): (usize, usize), world: &World) -> Arrived {
        let num_slots = num_tokens * world.num_topk;
        let weights = self.first(&self.buffers.weights, num_slots);
        Arrived {
            expert_offsets: self.first(&self.buffers.expert_offsets, num_experts + 1),
            tokens: self.first(&self.buffers.tokens, num_tokens * world.hidden),
            weights: weights.into_iter().map(f32::to_bits).collect(),
            row_token: self.first(&self.buffers.row_token, num_rows),
            return_rows: self.first(&self.buffers.return_rows, num_rows),
            slot_row: self.first(&self.buffers.slot_row, num_slots),
            scales: self.first(&self.buffers.counts, 4)[2..].to_vec(),
        }
    }

    /// A step of all ranks in their regions, once as kernels do that hosts queue one by one, and once in one launch.
    fn few(&mut self, world: &World, regions: &mut Regions) {
        let (num_ranks, num_topk, placement) = (world.num_tokens.len(), world.num_topk, world.placement());
        let row_bytes = world.forms().travel.layout(num_topk).row_bytes();
        let stages: Vec<Stages> =
            (0..num_ranks).map(|rank| Stages::new(&self.gpu, world.forms(), Rank::from_index(rank)).unwrap()).collect();
        let homes: Vec<Home> = (0..num_ranks).map(|rank| world.home(rank)).collect();
        regions.epoch += 1;
        let few = Few { max_tokens: MAX_TAGGED_TOKENS, live: 0, of_step: 0 };
        let (mut packed, mut messages, mut sent_counts) = (vec![], vec![], vec![]);
        for (rank, (stages, home)) in stages.iter().zip(&homes).enumerate() {
            let what = format!("{world:?}, rank {rank} sends");
            self.send(world, stages, home);
            let totals = self.buffers.host_totals.to_vec();
            let num_slots = home.idx.len();
            let wanted = (self.first(&self.buffers.home_rows, num_slots), self.first(&self.buffers.counts, 4));
            let sent = SentCounts::new(placement, &totals, (world.num_tokens[rank], num_topk)).unwrap();
            packed.push(self.first(&self.buffers.packed, sent.num_tokens.iter().sum::<usize>() * row_bytes));
            let args = regions.args(rank, LIMIT_NS);
            self.with_tokens((world, home), |buffers, tokens| {
                buffers.host_totals.fill(7);
                stages.queue_few(buffers, tokens, args, (few, Sides::Send))
            });
            assert_same(&self.buffers.host_totals, &totals, 1, &format!("{what}: totals on the host"));
            assert_same(&self.first(&self.buffers.totals, totals.len()), &totals, 1, &format!("{what}: totals"));
            assert_same(&self.first(&self.buffers.home_rows, num_slots), &wanted.0, num_topk, &what);
            assert_eq!(self.first(&self.buffers.counts, 4), wanted.1, "{what}: block scales");
            messages.push(sent.messages(placement));
            sent_counts.push(sent);
        }
        let counts: Vec<Vec<usize>> = sent_counts.iter().map(|sent| sent.num_tokens.clone()).collect();
        for (rank, (stages, home)) in stages.iter().zip(&homes).enumerate() {
            let what = format!("{world:?}, rank {rank} takes");
            let received = received(&messages, placement, rank);
            let (num_tokens, num_rows) = (received.total_tokens(), received.total_rows());
            let num_experts = placement.local_experts(Rank::from_index(rank)).len();
            let arrived = self.put(&arriving(&packed, &counts, rank, row_bytes));
            self.buffers.poison(&self.gpu).unwrap();
            self.buffers.counts.fill_bytes(self.gpu.stream(), 0).unwrap();
            stages.unpack(&mut self.buffers, &received, num_topk, Run::whole(arrived.address())).unwrap();
            let wanted = self.arrived(num_experts, (num_tokens, num_rows), world);

            // Alone, or in one launch with what it sends once more; with a host that follows, or without.
            let sides = if world.seed.is_multiple_of(2) { Sides::Take } else { Sides::Both };
            let live = DeviceBuffer::from_slice(self.gpu.stream(), &[Live::zeroed()]).unwrap();
            let few = Few { live: if world.seed.is_multiple_of(3) { 0 } else { live.address() }, ..few };
            let args = regions.args(rank, LIMIT_NS);
            regions.host_counts.fill(9);
            self.with_tokens((world, home), |buffers, tokens| stages.queue_few(buffers, tokens, args, (few, sides)));
            assert_eq!(Alarm::first(&regions.host_alarms), None, "{what}");
            assert_eq!(self.arrived(num_experts, (num_tokens, num_rows), world), wanted, "{what}");
            let told: Vec<u32> = regions
                .host_counts
                .chunks_exact(regions.region.num_words())
                .flat_map(|words| [&words[..1], &words[2..2 + num_experts]].concat())
                .collect();
            assert_eq!(ReceivedCounts::new(num_experts, &told), received, "{what}: counts");
            if few.live == 0 {
                continue;
            }
            let live = live.download(self.gpu.stream()).unwrap()[0];
            let found = (live.num_received as usize, live.num_rows as usize, live.is_over);
            assert_eq!(found, (num_tokens, num_rows, 0), "{what}");
            let (back, per_slot) = match world.mode {
                CombineMode::Slot => (&received.num_rows, true),
                CombineMode::Rank => (&received.num_tokens, false),
            };
            let before = |source: usize| -> usize {
                let of = if per_slot { &sent_counts[source].num_slots } else { &sent_counts[source].num_tokens };
                of[..rank].iter().sum()
            };
            let return_bytes = world.form.row_bytes(world.hidden);
            let homes = Run::of(back, return_bytes, |source| {
                regions.memory[source].address() + (regions.region.home_at(0) + before(source) * return_bytes) as u64
            });
            assert_eq!(live.homes[..num_ranks], homes[..num_ranks], "{what}: homes");
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_a_few_tokens_go_in_one_launch_as_in_several() {
    let mut bench = Bench::new();
    let mut runner = TestRunner::deterministic();
    let forms = all_forms();
    let few = proptest::collection::vec(0usize..=MAX_TAGGED_TOKENS, 1..17);
    let worlds = (1usize..300, 1usize..33, few, 0u64..1000, 0..forms.len());
    for _ in 0..150 {
        let (num_experts, num_topk, num_tokens, seed, form) = worlds.new_tree(&mut runner).expect("a world").current();
        let (payload, quantise, mode, form) = forms[form];
        // Blocks of scales that fill no word, and words that fill no row.
        let (hidden, values) = (144, Values::Plain);
        let world = World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
        let mut regions = Regions::new(&bench, &world);
        // The second time what the first has left is there.
        for seed in [seed, seed + 1] {
            bench.few(&World { seed, ..world.clone() }, &mut regions);
        }
    }
}

/// As wide as models are, several blocks a token, all experts on one rank and on many.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_a_few_wide_tokens_go_in_one_launch_as_in_several() {
    let mut bench = Bench::new();
    for (at, (payload, quantise, mode, form)) in all_forms().into_iter().enumerate() {
        for (num_experts, num_topk, num_tokens) in
            [(896, 16, vec![16]), (896, 16, vec![1; 8]), (256, 8, vec![16; 24]), (61, 64, vec![5, 0, 16])]
        {
            let (hidden, seed, values) = (8336, at as u64, Values::Around(SCALE));
            let values = if payload == PayloadForm::Bf16 { Values::Plain } else { values };
            let world =
                World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
            let mut regions = Regions::new(&bench, &world);
            bench.few(&world, &mut regions);
        }
    }
}

/// Who is not heard of is named, and nothing runs on.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_a_rank_whose_few_tokens_do_not_come_is_named() {
    let mut bench = Bench::new();
    let (payload, quantise, mode, form) = all_forms()[2];
    let (num_experts, num_topk, hidden, seed, values) = (8, 2, 16, 1, Values::Plain);
    let num_tokens = vec![3, 4];
    let world = World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
    let mut regions = Regions::new(&bench, &world);
    regions.epoch = 1;
    let (stages, home) = (Stages::new(&bench.gpu, world.forms(), Rank(0)).unwrap(), world.home(0));
    let few = Few { max_tokens: MAX_TAGGED_TOKENS, live: 0, of_step: 0 };
    let args = regions.args(0, 1_000_000);
    bench.with_tokens((&world, &home), |buffers, tokens| stages.queue_few(buffers, tokens, args, (few, Sides::Both)));
    let alarm = Alarm::first(&regions.host_alarms).expect("an alarm");
    assert_eq!((alarm.waiter, alarm.missing, alarm.is_drift()), (Rank(0), Rank(1), false), "{alarm}");
}
