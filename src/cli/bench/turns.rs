//! Steps of a checkpoint's first layer by two sessions in turns, which differ in how they run it: times, and whether all bits are
//! the same.

use std::time::{Duration, Instant};

use super::figures::{median, slowest, us};
use super::layer::Opener;
use super::work::Noise;
use crate::cli::failure::Failure;
use crate::config::Deployment;
use crate::layer::{LayerInput, LayerOutput, LayerStats, Part, Session};
use crate::world::{Phase, World};

/// Steps before those that count: the second records what the third replays.
const NUM_WARM: usize = 3;

/// Two sessions, and what all steps of theirs share.
pub(super) struct Turns<'a> {
    world: &'a World,
    sessions: &'a [Session; 2],
    step: u64,
    noise: Noise,
}

/// Times of one number of tokens.
pub(super) struct Turned<const N: usize> {
    /// For each session its spans, in microseconds: medians of the slowest rank of each step.
    pub medians_us: [[f64; N]; 2],
    /// On every rank, every step's output has the bits of the others'.
    pub is_alike: bool,
}

/// Opens both sessions and makes a row of every number of tokens that is asked for; collective.
///
/// # Errors
/// If a session can't be opened, or `row` fails.
pub(super) fn in_turns<R>(
    opener: &Opener<'_>,
    deployments: [Deployment; 2],
    mut row: impl FnMut(&mut Turns<'_>, usize) -> Result<R, Failure>,
) -> Result<Vec<R>, Failure> {
    let world = opener.world;
    let [first, second] = deployments;
    let sessions = [opener.open(first)?, opener.open(second)?];
    world.enter(Phase { name: "step", limit: Duration::from_secs(60), key: "the bench's own limit" });
    let mut turns = Turns { world, sessions: &sessions, step: 0, noise: Noise(u64::from(world.rank().0) + 1) };
    let tokens = opener.asked.args.layer.layer_tokens.iter();
    let rows = tokens.map(|&num_tokens| row(&mut turns, num_tokens)).collect::<Result<_, _>>()?;
    sessions.into_iter().for_each(|session| session.close(world));
    Ok(rows)
}

impl Turns<'_> {
    /// Times `repeats` steps of each session over the same tokens; collective. `spans` are those of a step, from what its host
    /// took; `see` is told what every step did, warming up included.
    ///
    /// # Errors
    /// If a step fails.
    pub fn measure<const N: usize>(
        &mut self,
        (num_tokens, repeats): (usize, usize),
        spans: impl Fn(Duration, &LayerStats) -> [Duration; N],
        mut see: impl FnMut(&LayerStats),
    ) -> Result<Turned<N>, Failure> {
        let sessions = self.sessions;
        let num_values = num_tokens * sessions[0].geometry().hidden;
        let hidden: Vec<f32> = (0..num_values).map(|_| half::bf16::from_f32(self.noise.value()).to_f32()).collect();
        let mut times: [[Vec<f64>; N]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| Vec::new()));
        let (mut first, mut is_alike) = (None, true);
        for repeat in 0..NUM_WARM + repeats {
            for (session, times) in sessions.iter().zip(&mut times) {
                let (took, output) = self.run(session, &hidden)?;
                let bits: Vec<u32> = output.values.iter().map(|value| value.to_bits()).collect();
                is_alike &= *first.get_or_insert_with(|| bits.clone()) == bits;
                see(&output.stats);
                let took = spans(took, &output.stats).map(|span| slowest(self.world, us(span)));
                if repeat >= NUM_WARM {
                    times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
                }
            }
        }
        let medians_us = times.map(|of_session| of_session.map(|times| median(&times)));
        let is_alike = self.world.all_gather_u64([u64::from(is_alike)]).iter().all(|[is_alike]| *is_alike == 1);
        Ok(Turned { medians_us, is_alike })
    }

    /// A step, and how long it took this rank's host.
    fn run(&mut self, session: &Session, hidden: &[f32]) -> Result<(Duration, LayerOutput), Failure> {
        let [layer] = session.layers() else { unreachable!("one layer was asked for") };
        self.step += 1;
        self.world.barrier();
        let begin = Instant::now();
        let input = LayerInput { hidden, topk: None, part: Part::Block, step: self.step, record_spans: false };
        let output = layer.forward(self.world, session.capacity(), &input)?;
        Ok((begin.elapsed(), output))
    }
}
