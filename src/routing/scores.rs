//! Scores of a row of logits, and the weights of the experts chosen from them.
//!
//! Elementary functions come from `libm` in f64 and are rounded to f32 once: the system's own differ between hosts. Knows
//! nothing of how experts are chosen.

use super::{RoutingMethod, Slot};

/// Which function of a logit its score is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Score {
    Softmax,
    Logit,
    Sigmoid,
    SqrtSoftplus,
}

/// Scores rows, one at a time.
pub(super) struct Scorer {
    method: RoutingMethod,
    score: Score,
    logits: Vec<f32>,
    scores: Vec<f32>,
    /// Of a softmax alone.
    exps: Vec<f64>,
}

impl Scorer {
    pub(super) fn new(method: RoutingMethod, num_experts: usize) -> Self {
        let score = match method {
            RoutingMethod::Default => Score::Softmax,
            RoutingMethod::Renormalize | RoutingMethod::Llama4 => Score::Logit,
            RoutingMethod::DeepseekV3 { .. }
            | RoutingMethod::KimiK3 { .. }
            | RoutingMethod::MinimaxM2
            | RoutingMethod::SigmoidRenorm => Score::Sigmoid,
            RoutingMethod::DeepseekV4 { .. } => Score::SqrtSoftplus,
        };
        Self { method, score, logits: vec![0.0; num_experts], scores: vec![0.0; num_experts], exps: Vec::new() }
    }

    /// Scores a row; a NaN logit scores NaN. False where no logit is above minus infinity, and there is nothing to choose.
    pub(super) fn score(&mut self, logits: &[f32]) -> bool {
        let mut max = f32::NEG_INFINITY;
        for (held, &logit) in self.logits.iter_mut().zip(logits) {
            *held = if logit == f32::INFINITY { f32::MAX } else { logit };
            // `f32::max` passes over NaN.
            max = max.max(*held);
        }
        if max == f32::NEG_INFINITY {
            return false;
        }
        match self.score {
            Score::Logit => self.scores.copy_from_slice(&self.logits),
            Score::Sigmoid => self.map(sigmoid),
            Score::SqrtSoftplus => self.map(sqrt_softplus),
            Score::Softmax => {
                self.softmax(f64::from(max));
            }
        }
        true
    }

    #[expect(clippy::cast_possible_truncation, reason = "scores are f32: the one rounding")]
    fn map(&mut self, f: impl Fn(f64) -> f64) {
        for (score, &logit) in self.scores.iter_mut().zip(&self.logits) {
            *score = f(f64::from(logit)) as f32;
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "scores are f32: the one rounding")]
    fn softmax(&mut self, max: f64) {
        self.exps.clear();
        self.exps.extend(self.logits.iter().map(|&l| libm::exp(f64::from(l) - max)));
        // None is above 1, and the largest is 1: the sum is neither 0 nor infinite.
        let sum: f64 = self.exps.iter().filter(|e| !e.is_nan()).sum();
        for (score, exp) in self.scores.iter_mut().zip(&self.exps) {
            *score = (exp / sum) as f32;
        }
    }

    /// The scores of the last row.
    pub(super) fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Appends the chosen experts with their weights; appends nothing where the weights' normaliser is 0.
    ///
    /// `chosen` is in descending order of what it was chosen by.
    pub(super) fn weigh(&self, chosen: impl Iterator<Item = usize> + Clone, slots: &mut Vec<Slot>) {
        match self.method {
            RoutingMethod::Default => push(slots, chosen, |expert| f64::from(self.scores[expert])),
            RoutingMethod::Llama4 => push(slots, chosen, |expert| sigmoid(f64::from(self.logits[expert]))),
            RoutingMethod::Renormalize => {
                let max = chosen.clone().map(|expert| self.logits[expert]).fold(f32::NEG_INFINITY, f32::max);
                let exp = |expert: usize| libm::exp(f64::from(self.logits[expert]) - f64::from(max));
                push_normalised(slots, chosen, exp, Normaliser { epsilon: 0.0, scaling: 1.0 });
            }
            method => {
                let normaliser = Normaliser { epsilon: method.epsilon(), scaling: f64::from(method.scaling()) };
                push_normalised(slots, chosen, |expert| f64::from(self.scores[expert]), normaliser);
            }
        }
    }
}

/// How scores become weights: `score / (sum + epsilon) * scaling`.
#[derive(Clone, Copy)]
struct Normaliser {
    epsilon: f64,
    scaling: f64,
}

/// Appends slots whose weight is `weight(expert)`, or 0 where that is NaN.
#[expect(clippy::cast_possible_truncation, reason = "weights are f32: the one rounding")]
fn push(slots: &mut Vec<Slot>, chosen: impl Iterator<Item = usize>, weight: impl Fn(usize) -> f64) {
    slots.extend(chosen.map(|expert| {
        let weight = weight(expert) as f32;
        let id = i32::try_from(expert).expect("validated: experts fit in 32 bits");
        Slot { expert: id, weight: if weight.is_nan() { 0.0 } else { weight } }
    }));
}

fn push_normalised(
    slots: &mut Vec<Slot>,
    chosen: impl Iterator<Item = usize> + Clone,
    score: impl Fn(usize) -> f64,
    normaliser: Normaliser,
) {
    let sum: f64 = chosen.clone().map(&score).filter(|s| !s.is_nan()).sum();
    let divisor = sum + normaliser.epsilon;
    if divisor > 0.0 {
        push(slots, chosen, |expert| score(expert) / divisor * normaliser.scaling);
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// `sqrt(ln(1 + exp(x)))`, without overflow.
fn sqrt_softplus(x: f64) -> f64 {
    libm::sqrt(x.max(0.0) + libm::log1p(libm::exp(-x.abs())))
}
