//! `lockstep plan` against what runs measure: weights, planned buffers, bytes sent to other ranks.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::launch::alone;
use crate::support::made::{Choice, Random};
use crate::support::report::Report;
use crate::support::run::{Run, Work};
use crate::support::safetensors;
use crate::support::tensor::Tensor;

/// A sample of a scaled geometry, and a run of it that a plan is held against.
struct Scaled<'a> {
    geometry: &'a str,
    size: &'a [&'a str],
    ranks: usize,
    tokens: usize,
    payload: &'a str,
    combine: &'a str,
    /// Ranks in a row that stand for a node, where tokens go in two levels.
    scale_up_ranks: Option<usize>,
    /// A uniform choice; absent: the router's own.
    uniform: Option<Uniform>,
}

/// What a uniform choice draws from: first groups, then experts of those.
#[derive(Clone, Copy)]
struct Uniform {
    num_experts: usize,
    num_topk: usize,
    num_groups: usize,
    topk_group: usize,
}

impl Scaled<'_> {
    fn sample(&self, work: &Work) -> PathBuf {
        let dir = work.path("sample");
        alone()
            .args(["sample".to_owned(), format!("--geometry={}", self.geometry)])
            .args(self.size.iter().copied())
            .args([format!("--tokens={}", self.ranks * self.tokens), format!("--out={}", dir.display())])
            .run()
            .expect_code(0);
        dir
    }

    fn plan(&self, dir: &Path) -> Value {
        let outcome = alone()
            .args(["plan", "--json"])
            .args([format!("--model={}", dir.display()), format!("--tokens={}", self.tokens)])
            .args([format!("--set=cluster.ranks_per_node={}", self.ranks)])
            .args([format!("--payload={}", self.payload), format!("--combine={}", self.combine)])
            .args(self.scale_up_ranks.map(|ranks| format!("--set=cluster.scale_up_ranks={ranks}")))
            .run()
            .expect_code(0);
        serde_json::from_str(&outcome.stdout).expect("a plan in JSON")
    }

    fn run(&self, work: &Work, dir: &Path) -> Report {
        let input: Tensor = safetensors::read(&dir.join("inputs.safetensors")).into_values().next().expect("an input");
        let mut run = Run::new(work, dir, &input).without("activation").ranks(self.ranks);
        run = run.option("payload", self.payload).option("combine", self.combine);
        if let Some(ranks) = self.scale_up_ranks {
            run = run.key("cluster", "scale_up_ranks", &ranks.to_string());
        }
        if let Some(uniform) = self.uniform {
            run = run.choice(&uniform.choice(self.ranks * self.tokens));
        }
        run.succeed().report
    }

    /// Plan and report agree on every rank: bytes held and planned exactly or nearly so, bytes sent within 1 %.
    fn check(&self) {
        let work = Work::new();
        let dir = self.sample(&work);
        let (plan, report) = (self.plan(&dir), self.run(&work, &dir));
        let mut sent = [0, 0];
        let mut by_link = LINKS.map(|link| (link, [0, 0]));
        let levels = if self.scale_up_ranks.is_some() { "two" } else { "one" };
        assert_eq!((&plan["levels"], report.at("/decided/layers/0/levels")), (&levels.into(), &levels.into()));
        for rank in 0..self.ranks {
            let group = group_of(&plan, rank);
            let at = |field: &str| report.count(&format!("/ranks/{rank}/{field}"));
            let of = |field: &str| group[field].as_u64().unwrap_or_else(|| panic!("{field} of {group}"));
            near(of("expert_weight_bytes") + of("replicated_weight_bytes"), at("weight_bytes"), "weights", rank);
            near(of("expert_weight_bytes"), at("bytes_read/experts"), "experts read", rank);
            assert_eq!(of("buffer_bytes"), at("planned_bytes"), "rank {rank}: buffers of plan and run");
            let steps = group["step"].as_array().expect("steps");
            let step = steps.iter().find(|step| step["payload"] == self.payload).expect("the payload that runs");
            let planned = step["sent_bytes"].as_u64().expect("a count");
            near(planned, at("dispatch_bytes_sent"), "bytes sent", rank);
            sent[0] += planned;
            sent[1] += at("dispatch_bytes_sent");
            for (link, [planned, measured]) in &mut by_link {
                *planned += step[*link].as_u64().expect("a count");
                *measured += at(&format!("links/{link}"));
            }
        }
        for (link, [planned, measured]) in by_link {
            let is_none = planned == 0 && measured == 0;
            assert!(
                is_none || planned.abs_diff(measured) * 100 <= measured,
                "{link}: planned {planned}, {measured} sent"
            );
        }
        near(sent[0], sent[1], "bytes sent by all ranks to", self.ranks);
    }
}

/// What plan and report count by the kind of link.
const LINKS: [&str; 4] =
    ["dispatch_scale_up_bytes", "dispatch_scale_out_bytes", "combine_scale_up_bytes", "combine_scale_out_bytes"];

#[track_caller]
fn near(planned: u64, measured: u64, what: &str, rank: usize) {
    assert!(measured > 0, "rank {rank}: a run has {what}");
    let off = planned.abs_diff(measured);
    assert!(off * 100 <= measured, "rank {rank}: {what}: planned {planned}, measured {measured}");
}

/// The plan's group that a rank belongs to.
fn group_of(plan: &Value, rank: usize) -> &Value {
    let holds = |group: &&Value| {
        let at = |field: &str| usize::try_from(group[field].as_u64().expect("a rank")).expect("small");
        (at("first_rank")..=at("last_rank")).contains(&rank)
    };
    plan["ranks"].as_array().expect("ranks").iter().find(holds).unwrap_or_else(|| panic!("no rank {rank} in {plan}"))
}

impl Uniform {
    /// Top-k of each token, every set of groups and of their experts as likely as any.
    fn choice(self, num_tokens: usize) -> Choice {
        let mut random = Random::new(11);
        let mut draw = |mut items: Vec<usize>, count: usize| {
            for at in 0..count {
                let left = u64::try_from(items.len() - at).expect("few");
                items.swap(at, at + usize::try_from(random.bits() % left).expect("few"));
            }
            items.truncate(count);
            items
        };
        let size = self.num_experts / self.num_groups;
        let mut choice = Choice::default();
        for _ in 0..num_tokens {
            let groups = draw((0..self.num_groups).collect(), self.topk_group);
            let experts = groups.into_iter().flat_map(|group| group * size..(group + 1) * size).collect();
            let ids = draw(experts, self.num_topk).into_iter().map(|expert| i64::try_from(expert).expect("few"));
            choice.push(&ids.collect::<Vec<i64>>(), &vec![0.5; self.num_topk]);
        }
        choice
    }
}

/// Kimi K3 with a sixteenth of its experts in narrow layers, with its own router; tokens travel in NVFP4.
#[test]
fn kimi_k3_scaled_on_four_ranks() {
    Scaled {
        geometry: "kimi-k3",
        size: &["--scale=1/16", "--hidden=256", "--latent=128", "--intermediate=128", "--layers=2"],
        ranks: 4,
        tokens: 512,
        payload: "nvfp4",
        combine: "rank",
        scale_up_ranks: None,
        uniform: None,
    }
    .check();
}

/// Few slots over uneven ranks, so that a token misses ranks: the formula of its destinations decides.
#[test]
fn qwen3_scaled_on_three_uneven_ranks() {
    Scaled {
        geometry: "qwen3-235b",
        size: &["--experts=16", "--topk=3", "--hidden=64", "--intermediate=64"],
        ranks: 3,
        tokens: 8000,
        payload: "bf16",
        combine: "rank",
        scale_up_ranks: None,
        uniform: Some(Uniform { num_experts: 16, num_topk: 3, num_groups: 1, topk_group: 1 }),
    }
    .check();
}

fn deepseek_v3_on_three_ranks() -> Scaled<'static> {
    Scaled {
        geometry: "deepseek-v3",
        size: &["--experts=32", "--topk=4", "--hidden=64", "--intermediate=64"],
        ranks: 3,
        tokens: 8000,
        payload: "bf16",
        combine: "slot",
        scale_up_ranks: None,
        uniform: Some(Uniform { num_experts: 32, num_topk: 4, num_groups: 8, topk_group: 4 }),
    }
}

/// Groups that ranks cut in two; each slot's row comes back, as hosts have it by default.
#[test]
fn deepseek_v3_scaled_on_three_ranks_with_groups() {
    deepseek_v3_on_three_ranks().check();
}

/// Tokens once a node: what each kind of link carries, and buffers of those who pass on.
#[test]
fn qwen3_scaled_on_two_nodes_of_two() {
    Scaled {
        geometry: "qwen3-235b",
        size: &["--experts=16", "--topk=3", "--hidden=64", "--intermediate=64"],
        ranks: 4,
        tokens: 6000,
        payload: "bf16",
        combine: "rank",
        scale_up_ranks: Some(2),
        uniform: Some(Uniform { num_experts: 16, num_topk: 3, num_groups: 1, topk_group: 1 }),
    }
    .check();
}

/// The same on nodes of two ranks and one, which cut groups in two, and each slot's row coming back.
#[test]
fn deepseek_v3_scaled_on_uneven_nodes() {
    Scaled { scale_up_ranks: Some(2), ..deepseek_v3_on_three_ranks() }.check();
}
