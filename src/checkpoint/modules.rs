//! The modules of a checkpoint: how many are stored how, and which exclusions concern none.

use safetensors::Dtype;

use super::naming::Part;
use super::roles::module_of;
use super::table::TensorTable;
use crate::model::Quantisation;

/// How many linear modules of the whole checkpoint are stored in which format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct ModuleCounts {
    /// Packed weights with block and global scales.
    pub nvfp4: usize,
    /// Two-dimensional bf16 weights.
    pub bf16: usize,
    /// Two-dimensional weights of other dtypes.
    pub other: usize,
}

/// Counts modules with a two-dimensional `weight`.
pub(super) fn count_modules(table: &TensorTable) -> ModuleCounts {
    let mut counts = ModuleCounts::default();
    for entry in table.entries() {
        let Some((module, leaf)) = entry.name.rsplit_once('.') else { continue };
        if leaf != Part::Weight.leaf() || entry.shape.len() != 2 {
            continue;
        }
        let has_global_scale = || table.find(&format!("{module}.{}", Part::GlobalScale.leaf())).is_some();
        match entry.dtype {
            Dtype::BF16 => counts.bf16 += 1,
            Dtype::U8 if has_global_scale() => counts.nvfp4 += 1,
            _ => counts.other += 1,
        }
    }
    counts
}

/// The exclusions, as written, that match no module at all.
pub(super) fn unmatched_patterns(table: &TensorTable, quantisation: &Quantisation) -> Vec<String> {
    let matches_one = |pattern: &&crate::model::patterns::ModulePattern| {
        pattern.heads().any(|head| table.under(head).any(|(_, entry)| pattern.matches(module_of(&entry.name))))
    };
    let unmatched =
        quantisation.excluded.iter().filter(|pattern| !pattern.is_regex()).filter(|pattern| !matches_one(pattern));
    unmatched.map(|pattern| pattern.text().to_owned()).collect()
}
