//! The figures by which one tensor is compared with another.
//!
//! Says how far apart they are; whether that is close enough is the caller's to decide.

use serde::Serialize;

/// How a result differs from what was expected; all sums in f64.
///
/// Where either side holds a NaN or an infinity nothing is close: `rel_l2`, `norm_ratio` and `max_abs` are infinite,
/// `cosine` is 0, and `max_abs_at` is the first such element. No figure is ever NaN, so a comparison written either way
/// round fails. JSON has no infinity: there they read `null`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    /// `|got - expected| / |expected|`: 0 where both are zero, infinite where only `expected` is.
    pub rel_l2: f64,
    /// `|got| / |expected|`: 1 where both are zero, infinite where only `expected` is.
    pub norm_ratio: f64,
    /// `got . expected / (|got| |expected|)`: 1 where both are zero, 0 where one is.
    pub cosine: f64,
    /// The largest `|got - expected|`.
    pub max_abs: f64,
    /// The first element at which it occurs; 0 where nothing differs.
    pub max_abs_at: usize,
}

impl Comparison {
    /// What is reported when an element is not finite.
    const fn not_finite(at: usize) -> Self {
        Self { rel_l2: f64::INFINITY, norm_ratio: f64::INFINITY, cosine: 0.0, max_abs: f64::INFINITY, max_abs_at: at }
    }

    /// Whether the relative L2 difference is within `bound`; false where `bound` is NaN.
    #[must_use]
    pub fn within(&self, bound: f64) -> bool {
        self.rel_l2 <= bound
    }
}

/// Compares `got` with `expected`, element by element; two empty tensors are equal.
///
/// # Panics
/// If the lengths differ: the caller has compared the shapes.
#[must_use]
pub fn compare(got: &[f32], expected: &[f32]) -> Comparison {
    assert_eq!(got.len(), expected.len(), "compared tensors have one shape");
    let (mut differences, mut gots, mut expecteds, mut products) = (0.0, 0.0, 0.0, 0.0);
    let (mut max_abs, mut max_abs_at) = (0.0, 0);
    for (at, (&g, &e)) in got.iter().zip(expected).enumerate() {
        if !(g.is_finite() && e.is_finite()) {
            return Comparison::not_finite(at);
        }
        let (g, e) = (f64::from(g), f64::from(e));
        let difference = (g - e).abs();
        differences += difference * difference;
        gots += g * g;
        expecteds += e * e;
        products += g * e;
        if difference > max_abs {
            (max_abs, max_abs_at) = (difference, at);
        }
    }
    let norms = Norms { got: gots.sqrt(), expected: expecteds.sqrt() };
    Comparison {
        rel_l2: norms.over_expected(differences.sqrt(), 0.0),
        norm_ratio: norms.over_expected(norms.got, 1.0),
        cosine: norms.cosine(products),
        max_abs,
        max_abs_at,
    }
}

struct Norms {
    got: f64,
    expected: f64,
}

impl Norms {
    /// `norm / |expected|`, or `both_zero` where that is what they are.
    fn over_expected(&self, norm: f64, both_zero: f64) -> f64 {
        match (self.expected == 0.0, self.got == 0.0) {
            (false, _) => norm / self.expected,
            (true, false) => f64::INFINITY,
            (true, true) => both_zero,
        }
    }

    fn cosine(&self, product: f64) -> f64 {
        match (self.expected == 0.0, self.got == 0.0) {
            // Rounding alone could exceed the range of a cosine.
            (false, false) => (product / self.got / self.expected).clamp(-1.0, 1.0),
            (true, true) => 1.0,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn figures_of_a_small_example() {
        let c = compare(&[3.0, 0.0, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!(c, Comparison { rel_l2: 0.8, norm_ratio: 0.6, cosine: 0.6, max_abs: 4.0, max_abs_at: 1 });
        assert!(c.within(0.8) && !c.within(0.79) && !c.within(f64::NAN));
    }

    #[test]
    fn zero_norms() {
        let equal = Comparison { rel_l2: 0.0, norm_ratio: 1.0, cosine: 1.0, max_abs: 0.0, max_abs_at: 0 };
        assert_eq!(compare(&[], &[]), equal);
        assert_eq!(compare(&[0.0, -0.0], &[0.0, 0.0]), equal);
        let infinite = f64::INFINITY;
        let only_expected_zero =
            Comparison { rel_l2: infinite, norm_ratio: infinite, cosine: 0.0, max_abs: 2.0, max_abs_at: 1 };
        assert_eq!(compare(&[0.0, -2.0], &[0.0, 0.0]), only_expected_zero);
        let only_got_zero = Comparison { rel_l2: 1.0, norm_ratio: 0.0, cosine: 0.0, max_abs: 2.0, max_abs_at: 0 };
        assert_eq!(compare(&[0.0], &[2.0]), only_got_zero);
    }

    #[test]
    fn what_is_not_finite_never_looks_like_a_pass() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (got, expected) in
                [([1.0, bad, 1.0], [1.0; 3]), ([1.0; 3], [1.0, bad, 1.0]), ([1.0, bad, 1.0], [1.0, bad, 1.0])]
            {
                let c = compare(&got, &expected);
                assert_eq!((c.max_abs_at, c.max_abs), (1, f64::INFINITY), "{got:?} {expected:?}");
                assert!(c.rel_l2 > 1e300 && (c.norm_ratio - 1.0).abs() > 1e300 && c.cosine < 0.5);
                assert!(!c.within(1e300));
            }
        }
    }

    #[test]
    fn squares_stay_in_range_and_json_has_the_names() {
        let c = compare(&[f32::MAX, f32::from_bits(1)], &[f32::MAX, 0.0]);
        assert!(c.rel_l2 < 1e-40 && c.norm_ratio == 1.0 && c.cosine == 1.0 && c.max_abs_at == 1);
        assert_eq!(compare(&[2e-45], &[1e-45]).rel_l2, 0.0, "both are the smallest f32");
        let json = serde_json::to_string(&compare(&[1.0], &[2.0])).unwrap();
        assert_eq!(json, r#"{"rel_l2":0.5,"norm_ratio":0.5,"cosine":1.0,"max_abs":1.0,"max_abs_at":0}"#);
        assert!(serde_json::to_string(&compare(&[f32::NAN], &[2.0])).unwrap().contains(r#""rel_l2":null"#));
    }

    proptest! {
        #[test]
        fn a_scaled_tensor_has_its_scale_as_ratio(x in prop::collection::vec(0.5_f32..2.0, 1..50), shift in -8_i32..8) {
            let scale = 2.0_f32.powi(shift);
            let scaled: Vec<f32> = x.iter().map(|v| v * scale).collect();
            let c = compare(&scaled, &x);
            prop_assert!((c.norm_ratio - f64::from(scale)).abs() <= 1e-12 * f64::from(scale));
            prop_assert!((c.rel_l2 - f64::from((scale - 1.0).abs())).abs() <= 1e-12);
            prop_assert!(c.cosine > 1.0 - 1e-12);
        }
    }
}
