//! What the device makes of what ranks told, against the host's code. It needs a GPU and NVRTC.

use super::*;
use crate::cuda::LaunchShape;
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::gpu::Kernels;
use crate::jit::kernels::dispatch::{NUM_THREADS, ReceiveArgs, TravelKernels};
use crate::random::Random;

const MAX_TOKENS: usize = 300;
const NUM_TOPK: usize = 8;

/// What `num_ranks` ranks told of `num_experts` experts: tokens, where their homes begin, rows of each expert.
fn told(random: &mut Random, (num_ranks, num_experts, num_words): (usize, usize, usize)) -> Vec<u32> {
    let mut told = vec![u32::MAX; num_ranks * num_words];
    for words in told.chunks_exact_mut(num_words) {
        let num_tokens = if random.below(3) == 0 { 0 } else { random.below(MAX_TOKENS + 1) };
        words[..2].copy_from_slice(&[narrow(num_tokens), narrow(random.below(1000))]);
        words[2..2 + num_experts].fill(0);
        // A token that came has a slot here at least.
        (0..num_tokens).filter(|_| num_experts > 0).for_each(|_| words[2 + random.below(num_experts)] += 1);
    }
    told
}

struct Bench {
    gpu: Gpu,
    live: LiveStep,
    index: crate::cuda::Function,
}

impl Bench {
    fn settle(&mut self, told: &[u32], args: SettleArgs) -> (Live, Vec<u32>) {
        let stream = self.gpu.stream();
        let told = DeviceBuffer::from_slice(stream, told).unwrap();
        let offsets = DeviceBuffer::from_slice(stream, &vec![u32::MAX; args.num_experts as usize + 1]).unwrap();
        let settle =
            SettleArgs { told: told.address(), live: self.live.at(0), expert_offsets: offsets.address(), ..args };
        // No tiles: the block that settles is alone.
        let args = ReceiveArgs { settle, ..ReceiveArgs::zeroed() };
        // SAFETY: the argument is the kernel's, and what it points to is as large as it says and lives.
        unsafe { self.index.launch(stream, &LaunchShape::rows(1, NUM_THREADS), &args) }.unwrap();
        self.live.queue_numbers(&self.gpu).unwrap();
        stream.synchronise().unwrap();
        (self.live.numbers(), offsets.download(stream).unwrap())
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_what_comes_is_settled_as_hosts_do() {
    let gpu = Gpu::open(0, &Kernels::OnDemand(std::env::var("LOCKSTEP_NVRTC").ok())).unwrap();
    let (payload, form) = (PayloadForm::Bf16, CombineForm::F32);
    let kernels = TravelKernels { hidden: 16, payload, quantise: false, form, mode: CombineMode::Slot };
    let index = gpu.function(kernels.receive(gpu.arch()), TravelKernels::INDEX, 0).unwrap();
    let mut bench = Bench { live: LiveStep::new(&gpu).unwrap(), index, gpu };
    let mut random = Random(7);
    for case in 0..200 {
        let num_ranks = if case < 4 { 1 } else { 1 + random.below(MAX_PEERS) };
        let num_experts = [0, 1, 56, 1024, 1025, random.below(3000)][random.below(6)];
        let num_words = (2 + num_experts).next_multiple_of(4);
        let per_slot = case % 2 == 0;
        let mut words = told(&mut random, (num_ranks, num_experts, num_words));
        let extent = LiveExtent { max_tokens: MAX_TOKENS, num_ranks, num_topk: NUM_TOPK };
        let homes: [u64; MAX_PEERS] = std::array::from_fn(|rank| 1 << 40 | (rank as u64) << 32);
        let (arrived_at, room_bytes, row_bytes, return_bytes) = (1 << 20, 1 << 16, 144, 96);
        let args = SettleArgs {
            homes,
            arrived_at,
            room_bytes,
            row_bytes,
            return_bytes,
            num_words: narrow(num_words),
            num_ranks: narrow(num_ranks),
            num_experts: narrow(num_experts),
            per_slot: u32::from(per_slot),
            max_tokens: narrow(extent.max_tokens),
            max_rows: narrow(extent.max_rows()),
            ..SettleArgs::zeroed()
        };
        bench.live.begin(&bench.gpu, 99, 17).unwrap();
        let (found, offsets) = bench.settle(&words, args);
        let messages: Vec<u32> = words
            .chunks_exact(num_words)
            .flat_map(|words| [&words[..1], &words[2..2 + num_experts]].concat())
            .collect();
        let received = ReceivedCounts::new(num_experts, &messages);
        let what = format!("case {case}: {num_ranks} ranks, {num_experts} experts");
        assert_eq!((found.from_host.word, found.from_host.num_tokens), (99, 17), "{what}");
        assert_eq!(found.is_over, 0, "{what}");
        assert_eq!(found.num_received as usize, received.total_tokens(), "{what}");
        assert_eq!(found.num_rows as usize, received.total_rows(), "{what}");
        assert_eq!(offsets, received.expert_offsets.iter().map(|&at| narrow(at)).collect::<Vec<_>>(), "{what}");
        let row_bytes = usize::try_from(row_bytes).unwrap();
        let arrived = Run::of(&received.num_tokens, row_bytes, |rank| arrived_at + rank as u64 * room_bytes);
        assert_same_runs(&found.arrived, &arrived, num_ranks, &what);
        let back = if per_slot { &received.num_rows } else { &received.num_tokens };
        let home_start = |rank: usize| u64::from(words[rank * num_words + 1]) * return_bytes;
        let wanted = Run::of(back, usize::try_from(return_bytes).unwrap(), |rank| homes[rank] + home_start(rank));
        assert_same_runs(&found.homes, &wanted, num_ranks, &what);

        // More than there may be: nothing comes, and it is said
        let rank = random.below(num_ranks);
        words[rank * num_words] = narrow(MAX_TOKENS) + 1;
        let (found, offsets) = bench.settle(&words, args);
        assert_eq!((found.is_over, found.num_received, found.num_rows), (1, 0, 0), "{what}");
        assert!(offsets.iter().all(|offset| *offset == 0), "{what}");
    }
}

fn assert_same_runs(found: &[Run], wanted: &[Run], num_ranks: usize, what: &str) {
    for (rank, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert_eq!(found.end, wanted.end, "{what}: run {rank}");
        assert!(rank >= num_ranks || found.address == wanted.address, "{what}: run {rank}");
    }
}
