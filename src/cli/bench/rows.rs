//! How rows fall on experts: plain counts, the same in every run.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

/// A form that rows can take. All forms of one line have as many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowForm {
    /// Every expert has as many.
    Uniform,
    /// Sizes that are log-normal, sigma 1.
    LogNormal,
    /// One expert has half of all rows, the others share the rest.
    OneHot,
    /// Every third expert has none.
    ThirdEmpty,
    /// From 1 to twice the mean, drawn evenly: counts that no tile divides.
    Ragged,
}

impl fmt::Display for RowForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uniform => "uniform",
            Self::LogNormal => "log-normal",
            Self::OneHot => "one-hot",
            Self::ThirdEmpty => "third-empty",
            Self::Ragged => "ragged",
        })
    }
}

impl RowForm {
    /// Rows of each expert, `num_experts * rows_per_expert` in all.
    pub(super) fn counts(self, num_experts: usize, rows_per_expert: usize) -> Vec<usize> {
        let num_rows = num_experts * rows_per_expert;
        let mut noise = super::work::Noise(0x9E37_79B9_7F4A_7C15);
        let weights: Vec<f64> = match self {
            Self::Uniform => vec![1.0; num_experts],
            Self::LogNormal => (0..num_experts).map(|_| normal(&mut noise).exp()).collect(),
            Self::OneHot if num_experts > 1 => {
                let others = 1.0 / (num_experts - 1) as f64;
                (0..num_experts).map(|expert| if expert == num_experts / 2 { 1.0 } else { others }).collect()
            }
            Self::OneHot => vec![1.0],
            Self::ThirdEmpty => (0..num_experts).map(|expert| if expert % 3 == 2 { 0.0 } else { 1.0 }).collect(),
            Self::Ragged => (0..num_experts).map(|_| noise.unit() + 0.5 / rows_per_expert as f64).collect(),
        };
        shared_out(num_rows, &weights)
    }
}

/// A normal number, as the sum of twelve even ones.
fn normal(noise: &mut super::work::Noise) -> f64 {
    (0..12).map(|_| noise.unit()).sum::<f64>() - 6.0
}

/// `num_rows` in proportion to weights, what rounding leaves going to the largest remainders, earlier ones first.
fn shared_out(num_rows: usize, weights: &[f64]) -> Vec<usize> {
    let total: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| num_rows as f64 * weight / total).collect();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rows are few and not negative")]
    let mut counts: Vec<usize> = exact.iter().map(|rows| rows.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).filter(|&i| weights[i] > 0.0).collect();
    order.sort_by(|&a, &b| (exact[b].fract()).total_cmp(&exact[a].fract()));
    let left = num_rows - counts.iter().sum::<usize>().min(num_rows);
    for index in 0..left {
        counts[order[index % order.len()]] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [RowForm; 5] =
        [RowForm::Uniform, RowForm::LogNormal, RowForm::OneHot, RowForm::ThirdEmpty, RowForm::Ragged];

    #[test]
    fn every_form_has_all_rows() {
        for form in FORMS {
            for (num_experts, rows) in [(1, 1), (2, 3), (3, 1), (56, 1), (56, 16), (448, 1024)] {
                let counts = form.counts(num_experts, rows);
                assert_eq!(counts.len(), num_experts, "{form}");
                assert_eq!(counts.iter().sum::<usize>(), num_experts * rows, "{form} {num_experts} x {rows}");
            }
        }
    }

    #[test]
    fn forms_are_what_they_say() {
        assert_eq!(RowForm::Uniform.counts(4, 5), [5; 4]);
        let hot = RowForm::OneHot.counts(56, 64);
        assert_eq!((hot[28], hot[0]), (56 * 32, 33));
        let empty = RowForm::ThirdEmpty.counts(9, 4);
        assert_eq!(empty, [6, 6, 0, 6, 6, 0, 6, 6, 0]);
        let ragged = RowForm::Ragged.counts(56, 64);
        assert!(ragged.iter().any(|rows| rows % 8 != 0) && ragged.iter().all(|rows| (0..200).contains(rows)));
        let skewed = RowForm::LogNormal.counts(56, 64);
        assert!(*skewed.iter().max().unwrap() > 192 && *skewed.iter().min().unwrap() < 16, "{skewed:?}");
    }
}
