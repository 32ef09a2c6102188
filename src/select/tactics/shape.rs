//! What a tactic is chosen for: an implementation, the widths and formats of a layer, and how many rows an expert gets.

use std::fmt;

use super::super::fingerprint::Digest;
use super::super::identity::Identity;
use super::super::problem::{ActivationForm, Problem};
use super::super::resolve::LayerSelection;
use super::RowBucket;

/// All of a layer that bears on how fast a tactic is. Layers that have it in common are tuned once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunedShape {
    /// What runs the layer's experts, the winner first.
    implementations: Vec<Identity>,
    hidden: usize,
    intermediate: usize,
    num_experts: usize,
    activation: ActivationForm,
}

impl TunedShape {
    /// The shape of a layer.
    #[must_use]
    pub fn of(selected: &LayerSelection) -> Self {
        let Problem { hidden, intermediate, num_experts, activation, .. } = selected.problem;
        Self { implementations: selected.identities(), hidden, intermediate, num_experts, activation }
    }

    /// Some shape, for tests.
    #[cfg(test)]
    pub(crate) fn made_up() -> Self {
        use super::super::identity::Quant;

        Self {
            implementations: [Quant::Nvfp4, Quant::None].map(|quant| Identity::grouped_gemm("simd", quant)).to_vec(),
            hidden: 3584,
            intermediate: 3072,
            num_experts: 896,
            activation: ActivationForm::SituLinear,
        }
    }

    /// The name of this shape with so many rows, as fields and caches have it.
    #[must_use]
    pub fn with_rows(&self, rows: RowBucket) -> String {
        format!("{self}.rows_{}", rows.rows())
    }

    /// What two ranks must have in common for their timings to be about the same: the shape, the rows, and the tactics by
    /// number.
    #[must_use]
    pub fn digest(&self, rows: RowBucket, tactics: &[&str]) -> u64 {
        let text = format!("{} {}", self.with_rows(rows), tactics.join(" "));
        let Digest(bytes) = Digest::of(text.as_bytes());
        bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
    }
}

impl fmt::Display for TunedShape {
    /// `lockstep.simd.grouped_gemm.nvfp4.3584x3072.experts_896.situ_linear`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, identity) in self.implementations.iter().enumerate() {
            match idx {
                0 => write!(f, "{identity}")?,
                _ => write!(f, "+{}", identity.quant)?,
            }
        }
        let activation = match self.activation {
            ActivationForm::Swiglu => "swiglu",
            ActivationForm::SwigluClamp => "swiglu_clamp",
            ActivationForm::SwigluAlpha => "swiglu_alpha",
            ActivationForm::Situ => "situ",
            ActivationForm::SituLinear => "situ_linear",
        };
        write!(f, ".{}x{}.experts_{}.{activation}", self.hidden, self.intermediate, self.num_experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_all_of_it() {
        let rows = RowBucket::of(16, 1);
        assert_eq!(
            TunedShape::made_up().with_rows(rows),
            "lockstep.simd.grouped_gemm.nvfp4+none.3584x3072.experts_896.situ_linear.rows_16"
        );
        type Change = fn(&mut TunedShape);
        let changes: [Change; 6] = [
            |shape| shape.implementations.truncate(1),
            |shape| shape.implementations.reverse(),
            |shape| shape.hidden += 16,
            |shape| shape.intermediate += 16,
            |shape| shape.num_experts += 1,
            |shape| shape.activation = ActivationForm::Situ,
        ];
        for (idx, change) in changes.into_iter().enumerate() {
            let mut other = TunedShape::made_up();
            change(&mut other);
            assert_ne!(other.to_string(), TunedShape::made_up().to_string(), "change {idx}");
        }
    }

    #[test]
    fn a_digest_tells_shapes_rows_and_lists_apart() {
        let one = RowBucket::of(1, 1);
        let mine = TunedShape::made_up().digest(one, &["a", "b"]);
        assert_eq!(mine, TunedShape::made_up().digest(one, &["a", "b"]));
        for other in [
            TunedShape::made_up().digest(one, &["b", "a"]),
            TunedShape::made_up().digest(one, &["a"]),
            TunedShape::made_up().digest(RowBucket::of(4, 1), &["a", "b"]),
            TunedShape { hidden: 16, ..TunedShape::made_up() }.digest(one, &["a", "b"]),
        ] {
            assert_ne!(mine, other);
        }
    }
}
