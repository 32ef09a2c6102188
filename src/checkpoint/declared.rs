//! Where the config files and the tensors of a layer differ about formats.

use safetensors::Dtype;

use super::layout_error::LayoutError;
use super::projection::ProjectionEntries;
use super::roles::module_of;
use super::table::TensorTable;
use super::warning::Warning;
use crate::ids::LayerIdx;
use crate::model::Declared;
use crate::model::quantisation::Scope;

/// The differences found so far in one group of experts.
pub(super) struct Notes<'a> {
    layer: LayerIdx,
    declared: Scope<'a>,
    pub(super) num_nvfp4: usize,
    pub(super) all_activations: bool,
    undeclared_bf16: Option<(usize, String)>,
    excluded: Option<(usize, String, String)>,
    scales_as_u8: Option<(usize, String)>,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Notes<'a> {
    pub(super) fn new(layer: LayerIdx, declared: Scope<'a>) -> Self {
        Self {
            layer,
            declared,
            num_nvfp4: 0,
            all_activations: true,
            undeclared_bf16: None,
            excluded: None,
            scales_as_u8: None,
            warnings: Vec::new(),
        }
    }

    /// Compares an expert's storage with what is declared. The tensors win, unless nothing declares packed ones.
    pub(super) fn take(
        &mut self,
        table: &TensorTable,
        projections: &[ProjectionEntries; 3],
    ) -> Result<(), LayoutError> {
        for projection in projections {
            let module = module_of(&table.entry(projection.weight).name);
            let declared = self.declared.declared(module);
            let Some(scales) = projection.scales else {
                if !matches!(declared, Declared::Unquantised { .. }) {
                    self.undeclared_bf16.get_or_insert_with(|| (0, module.to_owned())).0 += 1;
                }
                continue;
            };
            self.num_nvfp4 += 1;
            let undeclared = |declaration: String| {
                Err(LayoutError::Undeclared { layer: self.layer, module: module.to_owned(), declaration })
            };
            match declared {
                Declared::Nvfp4 { activations } => self.all_activations &= activations,
                Declared::Other(name) => return undeclared(format!("the config declares `{name}`")),
                Declared::Unquantised { by: None } => {
                    return undeclared("no config file declares it quantised".to_owned());
                }
                Declared::Unquantised { by: Some(pattern) } => {
                    self.all_activations = false;
                    let first = || (0, module.to_owned(), pattern.text().to_owned());
                    self.excluded.get_or_insert_with(first).0 += 1;
                }
            }
            let blocks = table.entry(scales.blocks);
            if blocks.dtype == Dtype::U8 {
                self.scales_as_u8.get_or_insert_with(|| (0, blocks.name.to_string())).0 += 1;
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Vec<Warning> {
        let bf16 = self.undeclared_bf16.map(|(count, first)| Warning::UndeclaredBf16 { count, first });
        let excluded =
            self.excluded.map(|(count, first, pattern)| Warning::ExcludedButQuantised { count, first, pattern });
        let as_u8 = self.scales_as_u8.map(|(count, first)| Warning::ScalesAsU8 { count, first });
        self.warnings.into_iter().chain(bf16).chain(excluded).chain(as_u8).collect()
    }
}
