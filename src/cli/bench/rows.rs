//! How rows fall on experts: plain counts, the same in every run.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use super::super::options::read_text;

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

/// Why a file gives no lines.
#[derive(Debug, thiserror::Error)]
pub enum CountsError {
    /// It can't be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is no list of lists of numbers.
    #[error("{} is not as [[rows of expert 0, rows of expert 1, ...], ...]", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// Where it is not.
        source: serde_json::Error,
    },
    /// A line that can't be timed.
    #[error("line {line} of {} has {num_counts} experts and {num_rows} rows; give rows of {num_experts} experts", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which, from 0.
        line: usize,
        /// Its counts.
        num_counts: usize,
        /// Their sum.
        num_rows: usize,
        /// As many as there are.
        num_experts: usize,
    },
}

/// The lines of a file: rows of each of `num_experts` experts, some of them not zero.
pub(super) fn read_counts(path: &Path, num_experts: usize) -> Result<Vec<Vec<usize>>, CountsError> {
    let text = read_text(path).map_err(|source| CountsError::Read { path: path.to_owned(), source })?;
    let lines: Vec<Vec<usize>> =
        serde_json::from_str(&text).map_err(|source| CountsError::Form { path: path.to_owned(), source })?;
    for (line, counts) in lines.iter().enumerate() {
        let num_rows = counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count));
        if counts.len() != num_experts || num_rows == 0 {
            let num_counts = counts.len();
            return Err(CountsError::Line { path: path.to_owned(), line, num_counts, num_rows, num_experts });
        }
    }
    Ok(lines)
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
    fn a_file_gives_lines_or_says_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let path = dir.path().join("counts.json");
            std::fs::write(&path, text).unwrap();
            read_counts(&path, 3).map_err(|error| error.to_string())
        };
        assert_eq!(read("[[1,0,2],[0,0,70]]"), Ok(vec![vec![1, 0, 2], vec![0, 0, 70]]));
        for (text, reason) in [
            ("[[1,0,2],[4,4]]", "line 1 of "),
            ("[[0,0,0]]", "has 3 experts and 0 rows"),
            ("[[1,-1,2]]", "is not as [[rows of expert 0"),
            ("{}", "is not as [[rows of expert 0"),
        ] {
            assert!(read(text).is_err_and(|error| error.contains(reason)), "{text}");
        }
        assert!(matches!(read_counts(&dir.path().join("none"), 3), Err(CountsError::Read { .. })));
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
