//! Measures and assertions on output tensors; what fails is named by row and column.

use half::bf16;

use super::tensor::{Dtype, Tensor};

/// `beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)`, in f64; without `linear_beta` the last
/// factor is `u`.
pub fn situ(g: f64, u: f64, beta: f64, linear_beta: Option<f64>) -> f64 {
    let up = linear_beta.map_or(u, |linear_beta| linear_beta * (u / linear_beta).tanh());
    beta * (g / beta).tanh() / (1.0 + (-g).exp()) * up
}

/// Relative L2 distance and ratio of norms of `found` against `wanted`, in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    pub rel_l2: f64,
    pub norm_ratio: f64,
}

impl Distance {
    pub fn of(found: &[f32], wanted: &[f32]) -> Self {
        assert_eq!(found.len(), wanted.len());
        let (mut difference, mut norm, mut norm_found) = (0.0, 0.0, 0.0);
        for (&found, &wanted) in found.iter().zip(wanted) {
            let (found, wanted) = (f64::from(found), f64::from(wanted));
            difference += (found - wanted).powi(2);
            norm += wanted.powi(2);
            norm_found += found.powi(2);
        }
        Self { rel_l2: (difference / norm).sqrt(), norm_ratio: (norm_found / norm).sqrt() }
    }
}

/// Panics unless relative L2 is within `bound` and the norms agree within 1 %, naming the worst element.
#[track_caller]
pub fn assert_close(found: &Tensor, wanted: &Tensor, bound: f64, what: &str) {
    assert_eq!(found.shape, wanted.shape, "{what}: shape");
    let (found_values, wanted_values) = (found.floats(), wanted.floats());
    let distance = Distance::of(&found_values, &wanted_values);
    // A NaN has to fail, hence the comparisons in this direction.
    if distance.rel_l2 <= bound && (distance.norm_ratio - 1.0).abs() <= 0.01 {
        return;
    }
    let columns = found.shape[1];
    let worst = (0..found_values.len())
        .max_by(|&a, &b| {
            let error = |i: usize| (f64::from(found_values[i]) - f64::from(wanted_values[i])).abs();
            error(a).total_cmp(&error(b))
        })
        .unwrap_or(0);
    panic!(
        "{what}: {distance:?}, bound {bound:e}; worst at [{}, {}]: found {}, want {}",
        worst / columns,
        worst % columns,
        found_values[worst],
        wanted_values[worst]
    );
}

/// Panics unless two tensors are equal bit for bit, naming the first difference.
#[track_caller]
pub fn assert_same_bits(found: &Tensor, wanted: &Tensor, what: &str) {
    assert_eq!((found.dtype, &found.shape), (wanted.dtype, &wanted.shape), "{what}: dtype and shape");
    let size = found.dtype.num_bytes();
    let columns = found.shape.last().copied().unwrap_or(1);
    let pairs = found.bytes.chunks_exact(size).zip(wanted.bytes.chunks_exact(size));
    if let Some((position, (found, wanted))) = pairs.enumerate().find(|(_, (found, wanted))| found != wanted) {
        panic!(
            "{what}: first difference at [{}, {}]: found bytes {found:02x?}, want {wanted:02x?}",
            position / columns,
            position % columns
        );
    }
}

/// How far a value at `h0` may be from what is expected.
#[derive(Debug, Clone, Copy)]
pub enum Tolerance {
    /// In bf16 steps of the expected value.
    Ulps(i32),
    /// Relative.
    Relative(f64),
}

/// Panics unless every row holds its expected value at column `h0` and exactly 0 everywhere else.
#[track_caller]
pub fn assert_rows(found: &Tensor, h0: usize, wanted: &[f64], tolerance: Tolerance, what: &str) {
    assert_eq!(found.shape.len(), 2, "{what}: shape {:?}", found.shape);
    assert_eq!(found.shape[0], wanted.len(), "{what}: rows");
    let columns = found.shape[1];
    for (position, value) in found.floats().into_iter().enumerate() {
        let (row, column) = (position / columns, position % columns);
        if column != h0 {
            assert!(value == 0.0, "{what}: [{row}, {column}] is {value}, want 0");
            continue;
        }
        let wanted = wanted[row];
        let good = match tolerance {
            Tolerance::Ulps(ulps) => {
                assert_eq!(found.dtype, Dtype::Bf16, "{what}: bf16 steps want a bf16 output");
                ordered(bf16::from_f32(value)).abs_diff(ordered(bf16::from_f64(wanted))) <= ulps.unsigned_abs()
            }
            Tolerance::Relative(bound) => (f64::from(value) - wanted).abs() <= bound * wanted.abs(),
        };
        assert!(good, "{what}: [{row}, {column}] is {value}, want {wanted} ({tolerance:?})");
    }
}

/// A bf16's place among all bf16 values, so that neighbours differ by 1; -0 and 0 share a place.
fn ordered(value: bf16) -> i32 {
    let bits = i32::from(value.to_bits());
    if bits & 0x8000 == 0 { bits } else { 0x8000 - bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(check: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let payload = std::panic::catch_unwind(check).expect_err("should have panicked");
        payload.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn situ_meets_the_published_points() {
        for (g, u, linear_beta, wanted) in
            [(8.0, 30.0, Some(25.0), 80.34), (2.0, 3.0, Some(25.0), 4.86107), (6.0, -6.0, Some(25.0), -21.26315)]
        {
            let found = situ(g, u, 4.0, linear_beta);
            assert!((found / wanted - 1.0).abs() < 2e-5, "situ({g}, {u}) = {found}, want {wanted}");
        }
        assert!((situ(1.0, 10.0, 4.0, Some(25.0)) - 6.80298).abs() < 1e-5);
        assert!((situ(1.0, 1.2545455, 4.0, Some(25.0)) - 0.89775).abs() < 1e-5);
        assert_eq!(situ(1.0, 3.0, 4.0, None), 3.0 * situ(1.0, 1.0, 4.0, None));
    }

    #[test]
    fn distances_are_relative() {
        let same = Distance::of(&[3.0, -4.0], &[3.0, -4.0]);
        assert_eq!(same, Distance { rel_l2: 0.0, norm_ratio: 1.0 });
        let half = Distance::of(&[1.5, -2.0], &[3.0, -4.0]);
        assert_eq!(half, Distance { rel_l2: 0.5, norm_ratio: 0.5 });
    }

    #[test]
    fn failures_name_the_place() {
        let wanted = Tensor::f32(&[2, 2], &[0.0, 1.0, 0.0, 2.0]);
        let wrong = Tensor::f32(&[2, 2], &[0.0, 1.0, 0.0, 2.5]);
        assert!(text(|| assert_close(&wrong, &wanted, 1e-5, "x")).contains("worst at [1, 1]"));
        assert!(text(|| assert_same_bits(&wrong, &wanted, "x")).contains("at [1, 1]"));
        let relative = Tolerance::Relative(1e-6);
        assert!(text(|| assert_rows(&wrong, 1, &[1.0, 2.0], relative, "x")).contains("[1, 1] is 2.5, want 2"));
        let stray = Tensor::f32(&[2, 2], &[0.0, 1.0, 1e-30, 2.0]);
        assert!(text(|| assert_rows(&stray, 1, &[1.0, 2.0], relative, "x")).contains("[1, 0]"));
        assert_rows(&wanted, 1, &[1.0, 2.0], relative, "x");
    }

    #[test]
    fn nan_is_never_close() {
        let wanted = Tensor::f32(&[1, 2], &[0.0, 1.0]);
        let nan = Tensor::f32(&[1, 2], &[0.0, f32::NAN]);
        assert!(text(|| assert_close(&nan, &wanted, 1.0, "x")).contains("NaN"));
        assert!(text(|| assert_rows(&nan, 1, &[1.0], Tolerance::Relative(1.0), "x")).contains("NaN"));
    }

    #[test]
    fn ulps_count_bf16_steps() {
        let one_up = Tensor::bf16(&[1, 1], &[0.71875]);
        assert_rows(&one_up, 0, &[0.714_843_75], Tolerance::Ulps(1), "x");
        assert!(text(|| assert_rows(&one_up, 0, &[0.714_843_75], Tolerance::Ulps(0), "x")).contains("[0, 0]"));
        let tiny = Tensor::bf16(&[1, 1], &[-0.0]);
        assert_rows(&tiny, 0, &[0.0], Tolerance::Ulps(0), "x");
    }
}
