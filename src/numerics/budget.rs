//! How far quantised activations may move a layer's output: the error budget a measured difference is held to.
//!
//! Model of the error: each of the two quantisations (FC1's input, FC2's input) adds independent noise of relative size
//! eps. Noise at FC1's input reaches the gate and up values with their own sigma, and passes each branch f with the gain
//! `k = sigma^2 * E[f'^2] / E[f^2]`, the expectation over a Gaussian of that sigma. So the output's relative L2 error is
//! `eps * sqrt(kg + ku + 1)`. Knows nothing of how sigma is measured.

use super::activation::{Activation, sigmoid};

/// The relative L2 error of one NVFP4 round trip of Gaussian data.
pub const ROUND_TRIP_ERROR: f64 = 0.0950;

/// Beyond this many sigma a Gaussian's mass (1e-50) is nothing in f64.
const TAIL: f64 = 15.0;

/// The longest panel of the quadrature, in the stretched coordinate where every feature is about 1 wide.
const PANEL: f64 = 0.25;

/// Nodes and weights of Gauss-Legendre quadrature with eight points on [-1, 1]; each stands for itself and its mirror image.
const GAUSS_LEGENDRE: [(f64, f64); 4] = [
    (0.183_434_642_495_649_8, 0.362_683_783_378_362),
    (0.525_532_409_916_329, 0.313_706_645_877_887_27),
    (0.796_666_477_413_626_7, 0.222_381_034_453_374_48),
    (0.960_289_856_497_536_3, 0.101_228_536_290_376_26),
];

/// The relative L2 error that quantised activations cost a layer, against an exact computation with the same weights.
///
/// `sigma` is the standard deviation of the gate and up pre-activations. At 0 the answer is the limit, `eps * sqrt(3)`; a
/// sigma that is negative or not finite gives NaN, which no measured error is below.
#[must_use]
pub fn quantisation_budget(activation: Activation, sigma: f64) -> f64 {
    if !sigma.is_finite() || sigma < 0.0 {
        return f64::NAN;
    }
    ROUND_TRIP_ERROR * (gate_gain(activation, sigma) + up_gain(activation, sigma) + 1.0).sqrt()
}

/// `sigma^2 * E[f'^2] / E[f^2]` of the gate branch.
fn gate_gain(activation: Activation, sigma: f64) -> f64 {
    let (width, kink) = match activation {
        Activation::Swiglu => (1.0, None),
        Activation::SwigluClamp { limit } => (1.0, Some(f64::from(limit))),
        Activation::Situ { beta, .. } => (f64::from(beta).min(1.0), None),
    };
    let branch = Branch { value: |g| activation.gate(g), slope: |g| gate_slope(activation, g) };
    branch.gain(sigma, width, kink)
}

/// `sigma^2 * E[f'^2] / E[f^2]` of the up branch.
fn up_gain(activation: Activation, sigma: f64) -> f64 {
    let (width, kink) = match activation {
        Activation::Swiglu | Activation::Situ { linear_beta: None, .. } => return 1.0,
        Activation::SwigluClamp { limit } => (f64::from(limit), Some(f64::from(limit))),
        Activation::Situ { linear_beta: Some(linear_beta), .. } => (f64::from(linear_beta), None),
    };
    let branch = Branch { value: |u| activation.up(u), slope: |u| up_slope(activation, u) };
    branch.gain(sigma, width, kink)
}

/// The derivative of [`Activation::gate`].
fn gate_slope(activation: Activation, g: f64) -> f64 {
    let s = sigmoid(g);
    // sigmoid' = s (1 - s), and 1 - sigmoid(g) = sigmoid(-g) without cancellation.
    let s_slope = s * sigmoid(-g);
    match activation {
        Activation::SwigluClamp { limit } if g > f64::from(limit) => 0.0,
        Activation::Swiglu | Activation::SwigluClamp { .. } => s + g * s_slope,
        Activation::Situ { beta, .. } => {
            let beta = f64::from(beta);
            let t = libm::tanh(g / beta);
            (1.0 - t) * (1.0 + t) * s + beta * t * s_slope
        }
    }
}

/// The derivative of [`Activation::up`].
fn up_slope(activation: Activation, u: f64) -> f64 {
    match activation {
        Activation::SwigluClamp { limit } if u.abs() > f64::from(limit) => 0.0,
        Activation::Situ { linear_beta: Some(linear_beta), .. } => {
            let t = libm::tanh(u / f64::from(linear_beta));
            (1.0 - t) * (1.0 + t)
        }
        _ => 1.0,
    }
}

/// One factor of an activation, with its derivative.
struct Branch<F, S> {
    value: F,
    slope: S,
}

impl<F: Fn(f64) -> f64, S: Fn(f64) -> f64> Branch<F, S> {
    /// `sigma^2 * E[f'^2] / E[f^2]`. `width` is the smallest length over which the branch bends; `kink` is where (on both
    /// sides of 0) its slope jumps.
    fn gain(&self, sigma: f64, width: f64, kink: Option<f64>) -> f64 {
        if sigma == 0.0 {
            return 1.0;
        }
        // x = width * sinh(t): near 0 the steps are as fine as the branch needs, further out they grow with x, so a constant
        // a billion times smaller than sigma costs a few more panels and no accuracy.
        let width = width.min(sigma);
        let stretched = |x: f64| libm::asinh(x / width);
        let end = stretched(TAIL * sigma);
        let mut edges = vec![-end, 0.0, end];
        if let Some(kink) = kink.filter(|&kink| kink < TAIL * sigma) {
            edges.extend([-stretched(kink), stretched(kink)]);
        }
        edges.sort_by(f64::total_cmp);
        let (mut slopes, mut values) = (0.0, 0.0);
        for pair in edges.windows(2) {
            for_nodes(pair[0], pair[1], |t, weight| {
                let x = width * libm::sinh(t);
                let z = x / sigma;
                let mass = weight * libm::cosh(t) * libm::exp(-0.5 * z * z);
                // f over sigma, not f' times sigma: neither square then leaves the range of f64.
                slopes += mass * (self.slope)(x).powi(2);
                values += mass * ((self.value)(x) / sigma).powi(2);
            });
        }
        slopes / values
    }
}

/// Calls `f(node, weight)` for a composite Gauss-Legendre rule over [start, end].
fn for_nodes(start: f64, end: f64, mut f: impl FnMut(f64, f64)) {
    let num_panels = ((end - start) / PANEL).ceil().max(1.0);
    let half = (end - start) / num_panels / 2.0;
    let mut panel = 0.0;
    while panel < num_panels {
        let centre = start + (2.0 * panel + 1.0) * half;
        for (node, weight) in GAUSS_LEGENDRE {
            f(centre - node * half, weight * half);
            f(centre + node * half, weight * half);
        }
        panel += 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::nvfp4;

    fn situ(beta: f32, linear_beta: f32) -> Activation {
        Activation::situ(beta, Some(linear_beta)).unwrap()
    }

    #[test]
    fn published_budgets_come_out() {
        for (beta, linear_beta, published) in
            [(4.0, 25.0, 0.1664), (2.0, 10.0, 0.1677), (0.5, 2.0, 0.1885), (0.25, 1.0, 0.2208)]
        {
            let budget = quantisation_budget(situ(beta, linear_beta), 1.497);
            assert!((budget - published).abs() < 0.5e-4 + 1e-9, "({beta}, {linear_beta}): {budget}, not {published}");
        }
    }

    /// The same expectations by plain summation over a fine grid, where no constant needs more.
    #[test]
    fn gains_agree_with_a_plain_sum() {
        let step = 1e-4;
        let sum = |sigma: f64, value: &dyn Fn(f64) -> f64, slope: &dyn Fn(f64) -> f64| {
            let (mut slopes, mut values) = (0.0, 0.0);
            for i in -100_000..=100_000 {
                let z = f64::from(i) * step;
                let mass = (-0.5 * z * z).exp();
                slopes += mass * slope(z * sigma).powi(2);
                values += mass * value(z * sigma).powi(2);
            }
            sigma * sigma * slopes / values
        };
        for text in ["swiglu", "swiglu_clamp:2", "swiglu_clamp:10", "situ:4,25", "situ:.25,1", "situ:.5"] {
            let activation = Activation::parse(text).unwrap();
            for sigma in [0.15, 1.497, 6.0] {
                let gate = sum(sigma, &|g| activation.gate(g), &|g| gate_slope(activation, g));
                let up = sum(sigma, &|u| activation.up(u), &|u| up_slope(activation, u));
                for (got, expected, branch) in
                    [(gate_gain(activation, sigma), gate, "gate"), (up_gain(activation, sigma), up, "up")]
                {
                    assert!((got / expected - 1.0).abs() < 1e-4, "{text} at {sigma}: {branch} {got}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn slopes_are_derivatives() {
        for text in ["swiglu", "swiglu_clamp:2", "situ:4,25", "situ:.25,1", "situ:.5"] {
            let activation = Activation::parse(text).unwrap();
            for i in -40..=40 {
                let x = f64::from(i) * 0.173;
                let h = 1e-5;
                let gate = (activation.gate(x + h) - activation.gate(x - h)) / (2.0 * h);
                let up = (activation.up(x + h) - activation.up(x - h)) / (2.0 * h);
                assert!((gate - gate_slope(activation, x)).abs() < 1e-8, "{text}: gate slope at {x}");
                assert!((up - up_slope(activation, x)).abs() < 1e-8, "{text}: up slope at {x}");
            }
        }
    }

    #[test]
    fn extreme_constants_follow_their_limits() {
        let sqrt3 = ROUND_TRIP_ERROR * 3.0_f64.sqrt();
        assert_eq!(quantisation_budget(situ(4.0, 25.0), 0.0), sqrt3);
        assert!((quantisation_budget(situ(4.0, 25.0), 1e-200) - sqrt3).abs() < 1e-12);
        assert!((quantisation_budget(situ(f32::MAX, f32::MAX), 1e-3) - sqrt3).abs() < 1e-4);
        // A tanh far narrower than sigma is a step: E[f^2] = b^2 and E[f'^2] = 4/3 b phi(0) / sigma, whose quotient is
        // sigma / b times 4 / (3 sqrt(2 pi)).
        for linear_beta in [1e-3_f32, 1e-30] {
            let expected = 2.0 / f64::from(linear_beta) * 4.0 / (3.0 * std::f64::consts::TAU.sqrt());
            let gain = up_gain(situ(4.0, linear_beta), 2.0);
            assert!((gain / expected - 1.0).abs() < 2e-3, "linear_beta {linear_beta}: {gain}, not {expected}");
        }
        for sigma in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(quantisation_budget(Activation::Swiglu, sigma).is_nan(), "sigma {sigma}");
        }
    }

    /// A deterministic Gaussian sequence: Box-Muller over a multiplicative congruential generator.
    fn gaussian(num: usize) -> Vec<f32> {
        let mut state = 0x1234_5678_9abc_def1_u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        };
        let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        #[expect(clippy::cast_possible_truncation, reason = "the data is f32")]
        (0..num).map(|_| normal() as f32).collect()
    }

    #[test]
    fn one_round_trip_of_gaussian_data_costs_the_published_error() {
        let x = gaussian(1 << 20);
        let amax = x.iter().fold(0.0_f32, |a, v| a.max(v.abs()));
        let input_scale = amax / nvfp4::MAX;
        let mut q = vec![0.0; x.len()];
        let counts = nvfp4::quantise_unscaled(&x, input_scale, &mut q);
        assert_eq!((counts.num_saturated, counts.num_zeroed), (0, 0));
        let error: f64 = x.iter().zip(&q).map(|(x, q)| f64::from(x - q * input_scale).powi(2)).sum();
        let norm: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        let relative = (error / norm).sqrt();
        assert!((relative - ROUND_TRIP_ERROR).abs() < 3e-4, "one round trip costs {relative}");
    }
}
