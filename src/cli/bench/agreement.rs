//! `lockstep bench --agreement`: what it costs ranks to agree, in collectives, bytes and time; under a launcher or alone.
//!
//! Puts the questions of a session over Kimi K3's 92 MoE layers, by the code that a run puts them with. Reads no checkpoint.

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::super::failure::Failure;
use super::super::world::{START, StartError, fingerprint, with_world};
use super::figures::{fastest, median, show_at_root, slowest, us};
use super::{BenchArgs, REPEATS, markdown, repeats};
use crate::config::{Deployment, Effective};
use crate::dispatch::capacity::Capacity;
use crate::dispatch::overlap::Cut;
use crate::dispatch::passing::StepTag;
use crate::dispatch::transport::exchange_sizes;
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::facts::{self, BUILD};
use crate::ids::LayerIdx;
use crate::layer::agreement::{agree_on, compare_trails};
use crate::layer::{Asks, JitOptions, Jointly, PLAN, Part, SESSION, SessionOptions, must_match, select_jointly};
use crate::model::{ModelError, MoeGeometry};
use crate::report::time;
use crate::sample::{Geometry, SampleSpec};
use crate::select::fingerprint::SessionBuilder;
use crate::select::registry::Registry;
use crate::select::{Environment, Fingerprint, LayerDecision, Problem, SelectError, decide};
use crate::world::{OUTCOME_BYTES, Traffic, World};

/// MoE layers of Kimi K3.
const NUM_LAYERS: u32 = 92;
/// Experts of a layer, whose correction bias every rank compares.
const NUM_BIASES: usize = 896;

/// What agreement costs.
#[derive(Debug, Clone, Serialize)]
pub struct AgreementReport {
    /// Ranks of the world.
    pub num_ranks: usize,
    /// Layers of the session.
    pub num_layers: u32,
    /// Measurements of each line.
    pub repeats: usize,
    /// Bytes of the session's encoding, which travel only where ranks differ.
    pub session_bytes: u64,
    /// All agreements of a session's start together, the slowest rank: the median.
    pub session_median_us: f64,
    /// The same, the fastest.
    pub session_min_us: f64,
    /// Each agreement.
    pub rows: Vec<AgreementRow>,
}

/// One agreement.
#[derive(Debug, Clone, Serialize)]
pub struct AgreementRow {
    /// What is agreed on.
    pub what: &'static str,
    /// It is part of every session's start.
    pub of_session: bool,
    /// What rank 0 moved.
    pub counted: Traffic,
    /// What the model says of rank 0; absent where sizes are the machines' own.
    pub predicted: Option<Traffic>,
    /// The median of the slowest rank, with all that is computed for it.
    pub median_us: f64,
}

/// What a session of Kimi K3 asks.
struct Questions {
    deployment: Deployment,
    geometry: MoeGeometry,
    decisions: Vec<LayerDecision>,
    problems: Vec<Problem>,
}

impl Questions {
    fn new() -> Result<Self, Failure> {
        let spec = SampleSpec::of(Geometry::KimiK3);
        let deployment = Deployment::default();
        let geometry = spec.model().map_err(|error: ModelError| Failure::from(error))?.geometry;
        let facts =
            (1..=NUM_LAYERS).map(|layer| crate::select::LayerFacts { layer: LayerIdx(layer), ..spec.layer_facts() });
        let facts: Vec<_> = facts.collect();
        let decide = |facts| decide(facts, &geometry, &deployment, true);
        let decisions: Vec<LayerDecision> = facts.iter().map(decide).collect::<Result<_, SelectError>>()?;
        let of_layer = |(facts, decision)| Problem::new(facts, decision, &geometry);
        let problems = facts.iter().zip(&decisions).map(of_layer).collect();
        Ok(Self { deployment, geometry, decisions, problems })
    }

    /// What is compared before weights are read.
    fn plan(&self, environment: &Environment, jointly: &Jointly) -> SessionBuilder {
        let options = SessionOptions {
            checkpoint: std::path::PathBuf::new(),
            layers: None,
            deployment: self.deployment.clone(),
            num_threads: 1,
            gpu_ordinal: 0,
            jit: JitOptions::default(),
            nccl: None,
            cublaslt: None,
            environment: environment.clone(),
            input_is_bf16: true,
            part: Part::Block,
            num_tokens: None,
            progress: &|_, _| {},
        };
        let Jointly { selection, fingerprint, .. } = jointly;
        must_match(BUILD, &options, (&self.geometry, &self.decisions), (selection, fingerprint))
    }

    /// What is compared before the first step: as many scales as K3's layers have on every rank.
    fn session(&self, mut fields: SessionBuilder) -> SessionBuilder {
        for decision in &self.decisions {
            let mut layer = fields.layer(decision.layer);
            layer.scale("fc1_input", 1.0).scales("router_bias", std::iter::repeat_n(0.5, NUM_BIASES));
            layer.scales("latent_norm", std::iter::repeat_n(1.0, self.geometry.expert_hidden));
            layer.scale("shared_fc1_input", None).scales("shared", []);
        }
        fields
    }
}

/// One agreement to time, and what the model says that this rank moves.
struct Timed<'a> {
    what: &'static str,
    of_session: bool,
    predicted: Option<Traffic>,
    run: Box<dyn Fn() -> Result<(), Failure> + 'a>,
    counted: Traffic,
    times_us: Vec<f64>,
}

impl<'a> Timed<'a> {
    fn new(
        what: &'static str,
        predicted: impl Into<Option<Traffic>>,
        run: impl Fn() -> Result<(), Failure> + 'a,
    ) -> Self {
        let (predicted, counted) = (predicted.into(), Traffic::default());
        Self { what, of_session: false, predicted, run: Box::new(run), counted, times_us: Vec::new() }
    }

    fn of_session(mut self) -> Self {
        self.of_session = true;
        self
    }

    /// Runs it once, all ranks from a common start; gives the time.
    fn run(&mut self, world: &World) -> Result<f64, Failure> {
        world.barrier();
        let (before, begin) = (world.traffic(), Instant::now());
        (self.run)()?;
        let time_us = us(begin.elapsed());
        self.counted = world.traffic() - before;
        self.times_us.push(time_us);
        Ok(time_us)
    }
}

/// Runs the benchmark on all ranks; rank 0 prints.
///
/// # Errors
/// If no measurements are asked for, the ranks don't agree, or standard output can't be written.
pub(super) fn command(args: &BenchArgs, env: &EnvVars) -> Result<Exit, Failure> {
    with_world(env, |world| {
        let repeats = world.agree(repeats(args, REPEATS))?;
        let environment = world.agree(facts::environment(world, env, None).map_err(StartError::from))?;
        let report = measure(world, &environment, repeats)?;
        show_at_root(world, &report, args.json)?;
        Ok(Exit::Fine)
    })
}

fn measure(world: &World, environment: &Environment, repeats: usize) -> Result<AgreementReport, Failure> {
    let questions = Questions::new()?;
    let registry = Registry::builtin();
    let Questions { deployment, problems, .. } = &questions;
    let asks = Asks { deployment, environment, problems, registry: &registry };
    let jointly = select_jointly(world, asks)?;
    let session = questions.session(questions.plan(environment, &jointly)).finish()?;
    let other = questions.session(questions.plan(environment, &jointly).flag("of_last_rank", true).clone()).finish()?;
    let mut timed = of_a_session(world, (environment, asks), (&questions, &jointly));
    timed.extend(of_failures(world, &session, &other));
    timed.extend(of_a_step(world));
    let mut totals_us = Vec::new();
    for _ in 0..repeats {
        let mut total_us = 0.0;
        for timed in &mut timed {
            let time_us = timed.run(world)?;
            total_us += if timed.of_session { time_us } else { 0.0 };
        }
        totals_us.push(total_us);
    }
    let row = |timed: Timed<'_>| AgreementRow {
        what: timed.what,
        of_session: timed.of_session,
        counted: timed.counted,
        predicted: timed.predicted,
        median_us: slowest(world, median(&timed.times_us)),
    };
    let rows = timed.into_iter().map(row).collect();
    Ok(AgreementReport {
        num_ranks: world.size(),
        num_layers: NUM_LAYERS,
        repeats,
        session_bytes: session.encode().len() as u64,
        session_median_us: slowest(world, median(&totals_us)),
        session_min_us: slowest(world, fastest(&totals_us)),
        rows,
    })
}

/// The agreements of every session's start, in their order.
fn of_a_session<'a>(
    world: &'a World,
    (environment, asks): (&'a Environment, Asks<'a>),
    (questions, jointly): (&'a Questions, &'a Jointly),
) -> Vec<Timed<'a>> {
    let alike = Traffic::of_alike(world.size() as u64);
    let effective = Effective::default();
    let start = move || {
        agree_on(world, START, fingerprint(&effective, environment, &Vec::new()))?;
        Ok(())
    };
    let select = move || {
        select_jointly(world, asks)?;
        Ok(())
    };
    let plan = move || {
        agree_on(world, PLAN, questions.plan(environment, jointly).finish())?;
        Ok(())
    };
    let trails = move || Ok(compare_trails(world, &jointly.selection)?);
    // What was compared as the plan is kept: only what was loaded is added.
    let fields = questions.plan(environment, jointly);
    let session = move || {
        agree_on(world, SESSION, questions.session(fields.clone()).finish())?;
        Ok(())
    };
    let timed = [
        Timed::new("start: what was asked for", alike, start),
        Timed::new("select: environments, hosts, the selection", None, select),
        Timed::new("plan: what would run", alike, plan),
        Timed::new("trails: why nothing else runs", alike, trails),
        Timed::new("session: what was loaded", alike, session),
    ];
    timed.into_iter().map(Timed::of_session).collect()
}

/// What is paid only where ranks don't go on.
fn of_failures<'a>(world: &'a World, session: &'a Fingerprint, other: &'a Fingerprint) -> Vec<Timed<'a>> {
    let last = world.size() - 1;
    let (num_ranks, is_last) = (world.size() as u64, world.rank().index() == last && last > 0);
    let mine = if is_last { other } else { session };
    let lengths = [session, other].map(|fingerprint| fingerprint.encode().len() as u64);
    let role = [0, last].iter().position(|root| *root == world.rank().index());
    let differing = match last {
        0 => Traffic::of_alike(1),
        _ => Traffic::of_differing(num_ranks, &lengths, role),
    };
    let differ = move || {
        // That they differ is what is timed.
        let _ = agree_on(world, SESSION, Ok(mine.clone()));
        Ok(())
    };
    let fail = move || {
        let outcome = if is_last { Err(SelectError::NoShared { layer: LayerIdx(1) }) } else { Ok(()) };
        let _ = world.agree(outcome);
        Ok(())
    };
    vec![
        Timed::new("the last rank differs in one field", differing, differ),
        Timed::new("the last rank has failed", Traffic::all_gather(num_ranks, OUTCOME_BYTES), fail),
    ]
}

/// The exchange of sizes that every dispatch begins with: with layer, step and top-k in it, and without.
fn of_a_step(world: &World) -> Vec<Timed<'_>> {
    let num_ranks = world.size() as u64;
    let capacity = Capacity { num_max_tokens_per_rank: 8192, chunk_tokens: None, cut: Cut::Never };
    let tag = StepTag { layer: LayerIdx(1), step: 7, num_topk: 16 };
    let tagged = move || {
        exchange_sizes(world, tag, 64, capacity)?;
        Ok(())
    };
    let bare = move || {
        world.all_gather_u64([64]);
        Ok(())
    };
    vec![
        Timed::new("a step's sizes with its tag", Traffic::all_gather(num_ranks, 32), tagged),
        Timed::new("a step's sizes alone", Traffic::all_gather(num_ranks, 8), bare),
    ]
}

impl fmt::Display for AgreementReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_ranks, num_layers, repeats, session_bytes, session_median_us, session_min_us, rows } = self;
        writeln!(f, "agreement on {num_layers} layers, ranks: {num_ranks}, medians of {repeats}, the slowest rank\n")?;
        let head = ["", "collectives", "bytes brought", "bytes received", "as modelled", "median"];
        let rows = rows.iter().map(|row| {
            let Traffic { collectives, brought_bytes, received_bytes } = row.counted;
            let as_modelled = match row.predicted {
                Some(predicted) if predicted == row.counted => "yes",
                Some(_) => "NO",
                None => "-",
            };
            [
                row.what.to_owned(),
                collectives.to_string(),
                brought_bytes.to_string(),
                received_bytes.to_string(),
                as_modelled.to_owned(),
                time(row.median_us),
            ]
        });
        let table = markdown::table(&head, &[0], rows);
        writeln!(f, "{table}\n")?;
        writeln!(
            f,
            "a session's start, its five agreements: {} (fastest {})",
            time(*session_median_us),
            time(*session_min_us)
        )?;
        write!(
            f,
            "an encoding of {session_bytes} bytes travels only where ranks differ; docs/agreement-cost.md has the model"
        )
    }
}
