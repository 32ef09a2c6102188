//! Tuning: every rank times the tactics of its kernels, and all run the one that is chosen from all timings.
//!
//! The clock and the file of remembered timings are this rank's; whatever follows from them is exchanged first, and chosen
//! by [`crate::select::tactics`]. Knows no kernel: a backend lists its tactics and runs them.

mod clock;
mod made_up;
mod store;

pub use clock::time_tactics;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::memory::capacity_of;
use super::session::SessionOptions;
use super::{LayerError, MoeLayer};
use crate::config::Tuning;
use crate::fault::{Action, Stage};
use crate::ids::{LayerIdx, Rank};
use crate::select::RankSet;
use crate::select::tactics::{Ballot, Choice, Failure, NUM_WORDS, RowBucket, Tactic, Timing, TunedShape, choose};
use crate::world::{Phase, World};
use made_up::MadeUp;
use store::Store;

/// Where the timings of a choice come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimedBy {
    /// By this session.
    ThisSession,
    /// By an earlier one: every rank remembers it.
    AnEarlierSession,
}

/// The tactic of one shape with one number of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuned {
    /// The shape.
    pub shape: TunedShape,
    /// The layers that have it.
    pub layers: Vec<LayerIdx>,
    /// Rows of an expert.
    pub rows: RowBucket,
    /// The names of the tactics, by number.
    pub names: &'static [&'static str],
    /// What was chosen, and from which times.
    pub choice: Choice,
    /// Whose times they are.
    pub timed_by: TimedBy,
}

impl Tuned {
    /// The name of the tactic that runs.
    #[must_use]
    pub fn tactic(&self) -> &'static str {
        self.names.get(self.choice.tactic.index()).copied().unwrap_or("none")
    }
}

/// The tactics of a session; empty where nothing was tuned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TacticTable(pub Vec<Tuned>);

impl TacticTable {
    /// The tactic of a layer for every number of rows. More rows than were tuned for run as the most that were.
    pub(super) fn of_layer(&self, layer: LayerIdx) -> [Tactic; RowBucket::NUM] {
        let mut of_layer = [Tactic::UNTUNED; RowBucket::NUM];
        for tuned in self.0.iter().filter(|tuned| tuned.layers.contains(&layer)) {
            of_layer[tuned.rows.index()..].fill(tuned.choice.tactic);
        }
        of_layer
    }
}

/// Layers of one shape, which are tuned on the first of them.
struct Group<'a> {
    shape: TunedShape,
    layers: Vec<&'a MoeLayer>,
}

/// Groups layers by shape, in the order in which they come; those without a choice of tactics are left out.
fn groups(layers: &[MoeLayer]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for layer in layers.iter().filter(|layer| layer.experts.tactics().len() > 1) {
        let shape = TunedShape::of(&layer.selected);
        match groups.iter_mut().find(|group| group.shape == shape) {
            Some(group) => group.layers.push(layer),
            None => groups.push(Group { shape, layers: vec![layer] }),
        }
    }
    groups
}

/// Times the tactics of every shape for every number of rows that can come, and chooses; collective. An empty table where
/// the deployment does not tune.
///
/// Every rank makes the same exchanges: shapes follow from what was compared, and the most rows from declared sizes.
///
/// # Errors
/// The same on all ranks: if for some shape no tactic runs on every rank.
pub(super) fn tune(
    world: &World,
    options: &SessionOptions<'_>,
    layers: &[MoeLayer],
) -> Result<TacticTable, LayerError> {
    if options.deployment.moe.tuning == Tuning::Off {
        return Ok(TacticTable::default());
    }
    let begin = Instant::now();
    let limit = Duration::from_secs(options.deployment.timeouts.compile_s);
    world.enter(Phase { name: "tune", limit, key: "timeouts.compile_s" });
    world.agree(world.fault(Stage::Tune))?;
    let declared = capacity_of(&options.deployment).max_tokens_at_once();
    let tokens_at_once = options.num_tokens.map_or(declared, |tokens| tokens.min(declared));
    let mut store = Store::open(world, options);
    let mut table = TacticTable::default();
    for group in groups(layers) {
        let geometry = &group.layers[0].geometry;
        let most_rows = tokens_at_once.saturating_mul(world.size()).saturating_mul(geometry.num_topk);
        for rows in RowBucket::of(most_rows, geometry.num_experts).up_to() {
            table.0.push(tune_shape(world, &group, rows, &mut store)?);
        }
    }
    store.save();
    warn_once(world, &store.warnings);
    if world.is_root() {
        say(&table, begin.elapsed());
    }
    Ok(table)
}

/// One shape with one number of rows: what the ranks remember if all of them do, else what they time now.
fn tune_shape(world: &World, group: &Group<'_>, rows: RowBucket, store: &mut Store) -> Result<Tuned, LayerError> {
    let layer = group.layers[0];
    let names = layer.experts.tactics();
    let name = group.shape.with_rows(rows);
    let about = group.shape.digest(rows, names);
    let mut timed_by = TimedBy::AnEarlierSession;
    let mut ballots = exchange(world, &Ballot::new(about, store.recall(&name, names).as_deref()));
    let mut failures = Vec::new();
    if !Ballot::all_remember(&ballots) {
        timed_by = TimedBy::ThisSession;
        let (timings, causes) = time_here(world, layer, rows);
        ballots = exchange(world, &Ballot::new(about, Some(&timings)));
        failures = exchange_causes(world, &ballots, &causes);
        store.remember(&name, names, &timings);
    }
    let mut choice = choose(&name, names, &ballots, &failures).map_err(|error| world.refuse(error))?;
    for fault in world.faults_at(Stage::Tune) {
        if let Action::TakesTactic(tactic) = fault {
            choice.tactic = *tactic;
        }
    }
    let layers = group.layers.iter().map(|layer| layer.decision.layer).collect();
    Ok(Tuned { shape: group.shape.clone(), layers, rows, names, choice, timed_by })
}

/// Every rank's ballot, in rank order; collective.
fn exchange(world: &World, mine: &Ballot) -> Vec<Ballot> {
    let all: Vec<[u64; NUM_WORDS]> = world.all_gather_u64(mine.words());
    all.iter().map(Ballot::from_words).collect()
}

/// Why a tactic failed, as it travels.
#[derive(Debug, Serialize, Deserialize)]
struct Cause {
    tactic: usize,
    text: String,
}

/// What ranks say of the tactics that failed; collective where any did, and nothing is sent where none did.
fn exchange_causes(world: &World, ballots: &[Ballot], mine: &[Cause]) -> Vec<Failure> {
    if !ballots.iter().flat_map(|ballot| ballot.timings.iter().flatten()).any(|timing| *timing == Timing::Failed) {
        return Vec::new();
    }
    let all = world.all_gather_bytes(&serde_json::to_vec(mine).unwrap_or_default());
    let of_rank = |(rank, bytes): (usize, &Vec<u8>)| -> Vec<Failure> {
        let causes: Vec<Cause> = serde_json::from_slice(bytes).unwrap_or_default();
        let failure =
            |Cause { tactic, text }| Failure { rank: Rank::from_index(rank), tactic: Tactic::new(tactic), cause: text };
        causes.into_iter().map(failure).collect()
    };
    all.iter().enumerate().flat_map(of_rank).collect()
}

/// This rank's timings, and what went wrong with those that failed.
fn time_here(world: &World, layer: &MoeLayer, rows: RowBucket) -> (Vec<Timing>, Vec<Cause>) {
    let num_tactics = layer.experts.tactics().len();
    let num_experts = layer.travel.placement.local_experts(world.rank()).len();
    let mut timed: Vec<Result<Option<u64>, String>> = match MadeUp::new(layer.geometry.expert_hidden, num_experts, rows)
    {
        None => vec![Ok(None); num_tactics],
        Some(mut work) => time_tactics(num_tactics, |tactic| work.run(&*layer.experts, tactic))
            .into_iter()
            .map(|timed| timed.map(Some).map_err(|error| error.to_string()))
            .collect(),
    };
    break_on_purpose(world, &mut timed);
    let cause = |(tactic, timed): (usize, &Result<_, String>)| {
        timed.as_ref().err().map(|text| Cause { tactic, text: text.clone() })
    };
    let causes = timed.iter().enumerate().filter_map(cause).collect();
    let timing = |timed: &Result<Option<u64>, String>| match timed {
        Ok(Some(ns)) => Timing::Took(*ns),
        Ok(None) => Timing::None,
        Err(_) => Timing::Failed,
    };
    (timed.iter().map(timing).collect(), causes)
}

/// What `LOCKSTEP_FAULT` does to this rank's timings.
fn break_on_purpose(world: &World, timed: &mut [Result<Option<u64>, String>]) {
    for fault in world.faults_at(Stage::Tune) {
        for (idx, timed) in timed.iter_mut().enumerate() {
            match (fault, &timed) {
                (Action::TacticTime(tactic, percent), Ok(Some(ns))) if tactic.index() == idx => {
                    *timed = Ok(Some(ns.saturating_mul(*percent) / 100));
                }
                (Action::TacticFails(tactic), _) if tactic.is_none_or(|tactic| tactic.index() == idx) => {
                    *timed = Err("LOCKSTEP_FAULT says that it can't run; unset it".to_owned());
                }
                _ => {}
            }
        }
    }
}

/// Says on one rank what is odd on any, with the ranks; collective.
fn warn_once(world: &World, mine: &[String]) {
    let all = world.all_gather_bytes(mine.join("\n").as_bytes());
    let ranks: RankSet =
        all.iter().enumerate().filter(|(_, text)| !text.is_empty()).map(|(rank, _)| Rank::from_index(rank)).collect();
    // They say the same of their own files, so the first speaks for all.
    if let Some(text) = all.iter().find(|text| !text.is_empty()).filter(|_| world.is_root()) {
        tracing::warn!("{} (on {ranks})", String::from_utf8_lossy(text));
    }
}

/// Says on one rank what was chosen, and once what was dropped.
fn say(table: &TacticTable, took: Duration) {
    let mut said: Vec<String> = Vec::new();
    for Tuned { shape, choice, .. } in &table.0 {
        for dropped in choice.dropped.iter().map(ToString::to_string) {
            if !said.contains(&dropped) {
                tracing::warn!(%shape, "a tactic is dropped on all ranks: {dropped}");
                said.push(dropped);
            }
        }
    }
    for tuned in &table.0 {
        let us = |(name, ns): (&&str, &Option<u64>)| Some(format!("{name} {:.1} us", (*ns)? as f64 / 1e3));
        let slowest: Vec<String> = tuned.names.iter().zip(&tuned.choice.slowest_ns).filter_map(us).collect();
        tracing::debug!(shape = %tuned.shape, rows = %tuned.rows, "{} of {}", tuned.tactic(), slowest.join(", "));
    }
    let timed_now = table.0.iter().filter(|tuned| tuned.timed_by == TimedBy::ThisSession).count();
    let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    tracing::info!(choices = table.0.len(), timed_now, took_ms, "tactics tuned");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::tactics::MAX_TACTICS;

    /// The shape of some layer: which one does not matter here.
    fn shape() -> TunedShape {
        TunedShape::made_up()
    }

    #[test]
    fn more_rows_than_were_tuned_for_run_as_the_most_that_were() {
        let layer = LayerIdx(3);
        let tuned = |rows, tactic| Tuned {
            shape: shape(),
            layers: vec![layer],
            rows,
            names: &["a", "b", "c"],
            choice: Choice { tactic: Tactic::new(tactic), slowest_ns: Vec::new(), dropped: Vec::new() },
            timed_by: TimedBy::ThisSession,
        };
        let [one, four] = [1, 4].map(|rows| RowBucket::of(rows, 1));
        let table = TacticTable(vec![tuned(one, 2), tuned(four, 1)]);
        assert_eq!(table.of_layer(layer).map(Tactic::index), [2, 1, 1, 1, 1]);
        assert_eq!(table.of_layer(LayerIdx(4)), [Tactic::UNTUNED; RowBucket::NUM], "another layer");
        assert_eq!(TacticTable::default().of_layer(layer), [Tactic::UNTUNED; RowBucket::NUM]);
        assert_eq!(table.0[0].tactic(), "c");
        assert_eq!(tuned(one, MAX_TACTICS - 1).tactic(), "none", "no such tactic");
    }
}
