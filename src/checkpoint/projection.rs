//! Shape and dtype checks of one projection, from headers alone.

use safetensors::Dtype;

use super::layout_error::LayoutError;
use super::naming::{Part, ProjectionKind};
use super::table::{EntryIdx, TensorTable};
use crate::ids::LayerIdx;
use crate::model::MoeGeometry;
use crate::numerics::nvfp4::BLOCK;

/// How an expert's weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertFormat {
    /// NVFP4: packed codes, block scales, a global scale.
    Nvfp4,
    /// Unquantised bf16.
    Bf16,
}

impl ExpertFormat {
    /// As messages write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "NVFP4",
            Self::Bf16 => "bf16",
        }
    }
}

/// The tensors found for one projection, by [`Part`].
pub(crate) type Slots = [Option<EntryIdx>; 4];

/// A projection's `[out, in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) out_features: usize,
    pub(crate) in_features: usize,
}

impl Dims {
    /// Of a routed expert's projection.
    pub(crate) const fn routed(geometry: &MoeGeometry, kind: ProjectionKind) -> Self {
        Self::of(kind, geometry.expert_hidden, geometry.intermediate)
    }

    /// Of the shared expert's projection.
    pub(crate) const fn of(kind: ProjectionKind, hidden: usize, intermediate: usize) -> Self {
        match kind {
            ProjectionKind::Gate | ProjectionKind::Up => Self { out_features: intermediate, in_features: hidden },
            ProjectionKind::Down => Self { out_features: hidden, in_features: intermediate },
        }
    }
}

/// A checked projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProjectionEntries {
    pub(crate) weight: EntryIdx,
    /// Present for NVFP4.
    pub(crate) scales: Option<ScaleEntries>,
}

impl ProjectionEntries {
    pub(crate) const fn format(&self) -> ExpertFormat {
        if self.scales.is_some() { ExpertFormat::Nvfp4 } else { ExpertFormat::Bf16 }
    }

    /// All its tensors.
    pub(crate) fn all(&self) -> impl Iterator<Item = EntryIdx> {
        let scales = self.scales.into_iter().flat_map(|s| [Some(s.blocks), Some(s.global), s.input]);
        std::iter::once(self.weight).chain(scales.flatten())
    }
}

/// The scales of an NVFP4 projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScaleEntries {
    pub(crate) blocks: EntryIdx,
    pub(crate) global: EntryIdx,
    pub(crate) input: Option<EntryIdx>,
}

/// Checks tensors of one layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Checker<'a> {
    pub(super) table: &'a TensorTable,
    pub(super) layer: LayerIdx,
}

impl Checker<'_> {
    /// Checks one projection; `module` names it where tensors are missing.
    pub(super) fn projection(
        &self,
        slots: Slots,
        dims: Dims,
        module: &dyn Fn() -> String,
    ) -> Result<ProjectionEntries, LayoutError> {
        let missing = |part: Part, because: &str| LayoutError::MissingTensor {
            layer: self.layer,
            tensor: format!("{}.{}", module(), part.leaf()),
            because: because.to_owned(),
        };
        let [weight, blocks, global, input] = slots;
        let weight = weight.ok_or_else(|| missing(Part::Weight, ""))?;
        if self.table.entry(weight).dtype != Dtype::U8 {
            self.unquantised(weight, &[blocks, global, input], dims)?;
            return Ok(ProjectionEntries { weight, scales: None });
        }
        let Dims { out_features, in_features } = dims;
        for (dimension, found) in [("input width", in_features), ("output width", out_features)] {
            if !found.is_multiple_of(BLOCK) {
                return Err(LayoutError::BlockWidth { layer: self.layer, dimension, found });
            }
        }
        self.shape(weight, &[out_features, in_features / 2], "[out, in / 2], two codes a byte", weight_hint(dims))?;
        let blocks =
            blocks.ok_or_else(|| missing(Part::BlockScales, ", and packed (U8) weights need their block scales"))?;
        let global = global.ok_or_else(|| missing(Part::GlobalScale, ", and NVFP4 weights need their global scale"))?;
        // The bits of e4m3 under another name: with shape, neighbours and declared format as they are, nothing else is meant.
        self.dtype(
            blocks,
            &[Dtype::F8_E4M3, Dtype::U8],
            "F8_E4M3",
            ": NVFP4 block scales are e4m3; export again with ModelOpt",
        )?;
        self.shape(
            blocks,
            &[out_features, in_features / BLOCK],
            "[out, in / 16], one scale a block",
            scale_hint(dims),
        )?;
        self.scalar(global)?;
        if let Some(input) = input {
            self.scalar(input)?;
        }
        Ok(ProjectionEntries { weight, scales: Some(ScaleEntries { blocks, global, input }) })
    }

    fn unquantised(&self, weight: EntryIdx, scales: &[Option<EntryIdx>], dims: Dims) -> Result<(), LayoutError> {
        if scales.iter().any(Option::is_some) {
            return self.dtype(weight, &[Dtype::U8], "U8 (packed NVFP4, since it has scales)", "");
        }
        let hint = match self.table.entry(weight).dtype {
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => {
                ": FP8 experts are out of scope; export them as NVFP4 with ModelOpt, or keep them in bf16"
            }
            _ => ": convert it to bf16, or quantise it with ModelOpt",
        };
        self.dtype(weight, &[Dtype::BF16], "U8 (packed NVFP4) or BF16", hint)?;
        self.dense(weight, &[dims.out_features, dims.in_features], "[out, in]")
    }

    /// Checks a shape, and says so if it looks transposed.
    pub(super) fn dense(&self, entry: EntryIdx, wanted: &[usize], meaning: &'static str) -> Result<(), LayoutError> {
        let transposed = |found: &[usize]| wanted.len() == 2 && found == [wanted[1], wanted[0]];
        self.shape(entry, wanted, meaning, |found| if transposed(found) { ": it looks transposed" } else { "" })
    }

    pub(super) fn shape(
        &self,
        entry: EntryIdx,
        wanted: &[usize],
        meaning: &'static str,
        hint: impl Fn(&[usize]) -> &'static str,
    ) -> Result<(), LayoutError> {
        let entry = self.table.entry(entry);
        if *entry.shape == *wanted {
            return Ok(());
        }
        Err(LayoutError::Shape {
            path: self.table.shard_of(entry).path.clone(),
            tensor: entry.name.to_string(),
            wanted: wanted.into(),
            found: entry.shape.clone(),
            meaning,
            hint: hint(&entry.shape),
        })
    }

    pub(super) fn dtype(
        &self,
        entry: EntryIdx,
        accepted: &[Dtype],
        wanted: &str,
        hint: &'static str,
    ) -> Result<(), LayoutError> {
        let entry = self.table.entry(entry);
        if accepted.contains(&entry.dtype) {
            return Ok(());
        }
        Err(LayoutError::Dtype {
            path: self.table.shard_of(entry).path.clone(),
            tensor: entry.name.to_string(),
            wanted: wanted.to_owned(),
            found: entry.dtype.to_string(),
            hint,
        })
    }

    /// A global scale: f32, as `[]` or `[1]`.
    fn scalar(&self, entry: EntryIdx) -> Result<(), LayoutError> {
        self.dtype(entry, &[Dtype::F32], "F32", "")?;
        match &*self.table.entry(entry).shape {
            [] | [1] => Ok(()),
            _ => self.shape(
                entry,
                &[],
                "a scalar, [] or [1]",
                |_| ": one scale a tensor; per-channel scales are not NVFP4",
            ),
        }
    }
}

fn weight_hint(dims: Dims) -> impl Fn(&[usize]) -> &'static str {
    let Dims { out_features, in_features } = dims;
    move |found| match found {
        [a, b] if *a == in_features / 2 && *b == out_features => ": it looks transposed",
        [a, b] if *a == out_features && *b == in_features => ": it looks unpacked, one code a byte",
        _ => "",
    }
}

fn scale_hint(dims: Dims) -> impl Fn(&[usize]) -> &'static str {
    let Dims { out_features, in_features } = dims;
    move |found| match found {
        [a, b] if *a == in_features / BLOCK && *b == out_features => ": it looks transposed",
        [a, b] if *a == out_features && *b == in_features / 32 => {
            ": one scale a block of 32 is MXFP4, which is out of scope"
        }
        _ => "",
    }
}
