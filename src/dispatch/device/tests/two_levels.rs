//! Both hops of two levels against the host's code, bit for bit, and what arrives against one level.

use std::rc::Rc;

use super::{Bench, Home, Values, World, all_forms, arriving, assert_same, received};
use crate::dispatch::counts::SentCounts;
use crate::dispatch::crossing::ToldCrossing;
use crate::dispatch::device::{Stages, TwoLevels};
use crate::dispatch::nodes::Nodes;
use crate::dispatch::packing::{pack, pack_forward};
use crate::dispatch::two_level::TwoLevelPlan;
use crate::ids::Rank;

/// What every rank has sent in a hop.
#[derive(Default)]
struct Hop {
    packed: Vec<Vec<u8>>,
    /// `[num_ranks, num_ranks]` tokens from each to each.
    counts: Vec<Vec<usize>>,
}

/// One rank's kernels.
struct Kernels {
    stages: Stages,
    levels: TwoLevels,
}

/// A world on nodes, and what its ranks bring.
struct Scene<'a> {
    world: &'a World,
    nodes: &'a Nodes,
    homes: Vec<Home>,
    kernels: Vec<Kernels>,
}

impl Scene<'_> {
    fn plans(&self, rank: usize) -> TwoLevelPlan<'_> {
        TwoLevelPlan { placement: self.world.placement(), nodes: self.nodes, rank: Rank::from_index(rank) }
    }

    fn row_bytes(&self) -> usize {
        self.world.forms().travel.layout(self.world.num_topk).row_bytes()
    }
}

impl Bench {
    /// Plays all ranks of `world` on `nodes`.
    fn play_in_two_levels(&mut self, world: &World, nodes: &Rc<Nodes>) {
        let num_ranks = world.num_tokens.len();
        let kernels = |rank| {
            let (forms, rank) = (world.forms(), Rank::from_index(rank));
            let levels = TwoLevels::new(&self.gpu, forms, (rank, nodes.clone())).unwrap();
            Kernels { stages: Stages::new(&self.gpu, forms, rank).unwrap(), levels }
        };
        let scene = Scene {
            world,
            nodes,
            homes: (0..num_ranks).map(|rank| world.home(rank)).collect(),
            kernels: (0..num_ranks).map(kernels).collect(),
        };
        let (one, messages_of_one) = self.one_level(&scene);
        let (first, told) = self.first_hop(&scene);
        let second = self.second_hop(&scene, &first, &told);
        for (rank, kernels) in scene.kernels.iter().enumerate() {
            let what = format!("{world:?} on {nodes:?}, rank {rank} receives");
            let plans = scene.plans(rank);
            let place = nodes.peers(plans.rank).iter().position(|peer| *peer == plans.rank).unwrap();
            let counts: Vec<&[u32]> =
                nodes.peers(plans.rank).iter().map(|peer| &*told[peer.index()].num_passed_on[place]).collect();
            let arrival = plans.arrive(&counts);
            let arrived = arriving(&second.packed, &second.counts, rank, scene.row_bytes());
            let in_order = arrival.by_source(&arrived, scene.row_bytes()).concat();
            let wanted = arriving(&one.packed, &one.counts, rank, scene.row_bytes());
            assert_same(&in_order, &wanted, scene.row_bytes(), &what);
            let of_one = received(&messages_of_one, world.placement(), rank);
            assert_eq!(told[rank].received, of_one, "{what}: counts");
            let there = self.put(&arrived);
            let runs = TwoLevels::arrived(&arrival, there.address(), scene.row_bytes());
            self.unpack(world, (&kernels.stages, &of_one), (&in_order, runs), (rank, &what));
        }
    }

    /// What goes in one level, which is held to the host's code elsewhere.
    fn one_level(&mut self, scene: &Scene<'_>) -> (Hop, Vec<Vec<u32>>) {
        let (world, placement) = (scene.world, scene.world.placement());
        let (mut hop, mut messages) = (Hop::default(), Vec::new());
        for (home, Kernels { stages, .. }) in scene.homes.iter().zip(&scene.kernels) {
            self.send(world, stages, home);
            let size = (home.idx.len() / world.num_topk, world.num_topk);
            let sent = SentCounts::new(placement, &self.buffers.host_totals, size).unwrap();
            let num_bytes = sent.num_tokens.iter().sum::<usize>() * scene.row_bytes();
            hop.packed.push(self.first(&self.buffers.packed, num_bytes));
            messages.push(sent.messages(placement));
            hop.counts.push(sent.num_tokens);
        }
        (hop, messages)
    }

    /// What every rank sends once a node, and what all are told before.
    fn first_hop(&mut self, scene: &Scene<'_>) -> (Hop, Vec<ToldCrossing>) {
        let (world, placement) = (scene.world, scene.world.placement());
        let layout = world.forms().travel.layout(world.num_topk);
        let (mut hop, mut told) = (Hop::default(), vec![Vec::new(); scene.homes.len()]);
        for (rank, (home, Kernels { stages, levels })) in scene.homes.iter().zip(&scene.kernels).enumerate() {
            let what = format!("{world:?} on {:?}, rank {rank} sends", scene.nodes);
            self.send(world, stages, home);
            let home_rows = self.first(&self.buffers.home_rows, home.idx.len());
            self.with_tokens((world, home), |buffers, tokens| {
                levels.count(stages, buffers, tokens)?;
                levels.pack(stages, buffers, tokens)
            });
            let (plans, slots) = (scene.plans(rank), home.slots(world.num_topk));
            let size = (slots.num_tokens(), world.num_topk);
            let sent = SentCounts::new(placement, &self.buffers.host_totals, size).unwrap();
            let crossing = plans.sent_crossing(&sent, &self.buffers.host_entering, size);
            let crossing = crossing.unwrap_or_else(|error| panic!("{what}: {error}"));
            let plan = plans.cross(slots);
            assert_eq!(crossing.num_tokens, plan.num_tokens_to(), "{what}: tokens");
            let id_of = |to: usize, expert| plans.id_in_node(to, expert);
            let (expected, quantised) = pack(&layout, (&plan, slots), &home.values, id_of);
            let bytes = self.first(&self.buffers.packed, expected.len());
            assert_same(&bytes, &expected, layout.row_bytes(), &what);
            let found = self.first(&self.buffers.counts, 2);
            assert_eq!(found, [quantised.num_saturated, quantised.num_zeroed], "{what}: block scales");
            let found = self.first(&self.buffers.home_rows, home.idx.len());
            assert_same(&found, &home_rows, world.num_topk, &format!("{what}: rows come home as in one level"));
            let messages = plans.crossing_messages(&sent, &crossing);
            let mut rest = messages.as_slice();
            for (told, len) in told.iter_mut().zip(&plans.crossing_lens()[0]) {
                let (message, others) = rest.split_at(*len);
                told.extend_from_slice(message);
                rest = others;
            }
            hop.packed.push(bytes);
            hop.counts.push(crossing.num_tokens);
        }
        let told = told.iter().enumerate().map(|(rank, words)| scene.plans(rank).told_crossing(words)).collect();
        (hop, told)
    }

    /// What every rank passes on of what came.
    fn second_hop(&mut self, scene: &Scene<'_>, first: &Hop, told: &[ToldCrossing]) -> Hop {
        let (world, row_bytes) = (scene.world, scene.row_bytes());
        let layout = world.forms().travel.layout(world.num_topk);
        let mut hop = Hop::default();
        for (rank, (home, Kernels { stages, levels })) in scene.homes.iter().zip(&scene.kernels).enumerate() {
            let what = format!("{world:?} on {:?}, rank {rank} passes on", scene.nodes);
            let (plans, told) = (scene.plans(rank), &told[rank]);
            let entered = arriving(&first.packed, &first.counts, rank, row_bytes);
            let (forward, expected) = pack_forward(plans, &layout, &entered, &told.num_entering);
            assert_eq!(told.num_passed_on, forward.num_tokens, "{what}: tokens");
            let there = self.put(&entered);
            self.with_tokens((world, home), |buffers, tokens| {
                buffers.entered = there;
                levels.pass_on(stages, buffers, (tokens, told))
            });
            let bytes = self.first(&self.buffers.passed_on, expected.len());
            assert_same(&bytes, &expected, row_bytes, &what);
            hop.packed.push(bytes);
            hop.counts.push(told.num_tokens_to(plans));
        }
        hop
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_two_levels_pack_like_the_host_and_bring_what_one_level_brings() {
    let mut bench = Bench::new();
    let nodes = [
        Nodes::blocks(4, 2),
        Nodes::blocks(3, 2),
        Nodes::blocks(5, 3),
        Nodes::blocks(8, 2),
        Nodes::blocks(2, 1),
        Nodes::blocks(3, 3),
        Nodes::new(&[0, 1, 0, 1, 1, 2]),
    ];
    // A width a form: each has its own kernels. NVFP4 of 48 values is pieces of 16 bytes and words behind them, of 16 words alone.
    let widths = [256, 48, 16, 256, 48, 16];
    for ((payload, quantise, mode, form), hidden) in all_forms().into_iter().zip(widths) {
        for nodes in &nodes {
            let nodes = Rc::new(nodes.clone());
            for (num_experts, num_topk) in [(7, 3), (61, 8), (5, 40)] {
                let num_tokens = (0..nodes.num_ranks()).map(|rank| rank * 29 % 64).collect();
                let (seed, values) = (num_experts as u64, Values::Plain);
                let world =
                    World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
                bench.play_in_two_levels(&world, &nodes);
            }
        }
    }
}

/// More tokens than tiles of the smallest size, and as many ranks as can be.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_two_levels_of_many_tokens_and_of_64_ranks() {
    let mut bench = Bench::new();
    let (payload, quantise, mode, form) = all_forms()[3];
    for (nodes, num_tokens) in [(Nodes::blocks(3, 2), vec![3000, 0, 2500]), (Nodes::blocks(64, 8), vec![5; 64])] {
        let (num_experts, num_topk, hidden, seed, values) = (896, 16, 64, 3, Values::Plain);
        let world = World { num_experts, num_topk, hidden, num_tokens, seed, payload, quantise, mode, form, values };
        bench.play_in_two_levels(&world, &Rc::new(nodes));
    }
}
