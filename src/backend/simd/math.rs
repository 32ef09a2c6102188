//! The gated activations in f32, written once for every instruction set.
//!
//! A module that calls [`activation_kernels`] provides sixteen lanes as `F`, their comparison `Mask`, and `splat`,
//! `load`, `store`, `add`, `sub`, `mul`, `div`, `fma`, `abs`, `with_sign`, `less`, `select`, `exp2_int`.
//! Relative error stays below 1e-6, also where exp(-|g|) is far below the smallest f32: the power of two is applied
//! last, in two steps. `benches/fit_activation.py` makes the coefficients.

/// log2(e)
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln(2) in 15 bits: a product with an integer below 2^9 is exact.
pub(super) const LN_2_HIGH: f32 = 0.693_145_75;
/// ln(2) - [`LN_2_HIGH`]
pub(super) const LN_2_LOW: f32 = 1.428_606_8e-6;
/// Adding it rounds to an integer: 1.5 * 2^23.
pub(super) const ROUNDER: f32 = 12_582_912.0;
/// exp of it, times any f32, is below 1e-35; powers of two of half its exponent are normal.
pub(super) const SMALLEST_EXPONENT: f32 = -170.0;
/// exp(r) = 1 + r + r^2 * q(r) for |r| <= ln(2) / 2, relative error 3.1e-9 before rounding; q's coefficients, high
/// first.
pub(super) const EXP: [f32; 5] = [0.001_381_453_9, 0.008_368_745, 0.041_668_39, 0.166_665_21, 0.499_999_94];
/// Up to here tanh is its odd polynomial.
pub(super) const TANH_SMALL: f32 = 0.625;
/// tanh(z) = z + z^3 * q(z^2) for |z| <= [`TANH_SMALL`], relative error 4.4e-9 before rounding; high first.
pub(super) const TANH: [f32; 5] = [-0.005_704_937_5, 0.020_639_045, -0.053_739_704, 0.133_314_42, -0.333_332_8];

/// `activate` of [`super::kernels::Kernels`] as a free function with the given attribute, and what it is made of.
macro_rules! activation_kernels {
    ($(#[$attribute:meta])?) => {
        /// exp(x) for x <= 0 as mantissa and two powers of two, to be multiplied in this order.
        #[inline]
        $(#[$attribute])?
        fn exp_parts(x: F) -> [F; 3] {
            let smallest = splat(math::SMALLEST_EXPONENT);
            let x = select(less(x, smallest), smallest, x);
            let rounder = splat(math::ROUNDER);
            let n = sub(fma(x, splat(math::LOG2_E), rounder), rounder);
            let r = fma(n, splat(-math::LN_2_HIGH), x);
            let r = fma(n, splat(-math::LN_2_LOW), r);
            let mut q = splat(math::EXP[0]);
            for coefficient in &math::EXP[1..] {
                q = fma(q, r, splat(*coefficient));
            }
            let mantissa = fma(fma(q, r, splat(1.0)), r, splat(1.0));
            let half = sub(fma(n, splat(0.5), rounder), rounder);
            [mantissa, exp2_int(half), exp2_int(sub(n, half))]
        }

        #[inline]
        $(#[$attribute])?
        fn tanh(z: F) -> F {
            let magnitude = abs(z);
            let square = mul(magnitude, magnitude);
            let mut q = splat(math::TANH[0]);
            for coefficient in &math::TANH[1..] {
                q = fma(q, square, splat(*coefficient));
            }
            let small = fma(mul(square, magnitude), q, magnitude);
            let [mantissa, first, second] = exp_parts(mul(magnitude, splat(-2.0)));
            let e = mul(mul(mantissa, first), second);
            let one = splat(1.0);
            let large = div(sub(one, e), add(one, e));
            with_sign(select(less(magnitude, splat(math::TANH_SMALL)), small, large), z)
        }

        /// gate * sigmoid(g) * up, sigmoid as 1 / (1 + e) or e / (1 + e) with e = exp(-|g|).
        #[inline]
        $(#[$attribute])?
        fn gated(gate: F, g: F, up: F) -> F {
            let [mantissa, first, second] = exp_parts(sub(splat(0.0), abs(g)));
            let one = splat(1.0);
            let denominator = add(one, mul(mul(mantissa, first), second));
            let negative = less(g, splat(0.0));
            let numerator = select(negative, mantissa, one);
            let value = mul(mul(gate, div(numerator, denominator)), select(negative, first, one));
            mul(mul(value, up), select(negative, second, one))
        }

        /// `gate` for SwiGLU: where exp(-|g|) was cut off, so is g.
        #[inline]
        $(#[$attribute])?
        fn swiglu(g: F, up: F) -> F {
            let smallest = splat(math::SMALLEST_EXPONENT);
            gated(select(less(g, smallest), smallest, g), g, up)
        }

        $(#[$attribute])?
        fn activate(scaled: &ScaledActivation, gate: &mut [Lane], up: &[Lane]) {
            let gate_scale = splat(scaled.gate_scale);
            let up_scale = splat(scaled.up_scale);
            for (gate, up) in gate.iter_mut().zip(up) {
                let g = mul(load(gate), gate_scale);
                let u = mul(load(up), up_scale);
                let value = match scaled.activation {
                    Activation::Swiglu => swiglu(g, u),
                    Activation::SwigluClamp { limit } => {
                        let (high, low) = (splat(limit), splat(-limit));
                        let g = select(less(high, g), high, g);
                        let u = select(less(high, u), high, u);
                        swiglu(g, select(less(u, low), low, u))
                    }
                    Activation::Situ { beta, linear_beta } => {
                        let bounded = mul(splat(beta), tanh(div(g, splat(beta))));
                        let up = match linear_beta {
                            Some(beta) => mul(splat(beta), tanh(div(u, splat(beta)))),
                            None => u,
                        };
                        gated(bounded, g, up)
                    }
                };
                store(gate, value);
            }
        }
    };
}
pub(super) use activation_kernels;
