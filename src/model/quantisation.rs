//! What the config files declare about the storage of each module, by name.
//!
//! A declaration is a claim: the tensors say how a module really is stored, and the checkpoint compares the two.

use std::collections::HashMap;

use super::patterns::{ModulePattern, ancestors, canonical};

/// How one module is declared to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declared<'a> {
    /// NVFP4 weights.
    Nvfp4 {
        /// Whether its input is quantised too, as far as the config goes.
        activations: bool,
    },
    /// Unquantised.
    Unquantised {
        /// The exclusion that says so; absent where nothing declares the module quantised.
        by: Option<&'a ModulePattern>,
    },
    /// Some other format, by its name in the config.
    Other(&'a str),
}

/// The format of a group of modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Format {
    Nvfp4 { activations: bool },
    Other(String),
}

/// Modules that share a format: `config_groups` of `quantization_config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// Module names; empty stands for every linear module.
    pub(super) targets: Vec<ModulePattern>,
    pub(super) format: Format,
}

/// The declarations of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantisation {
    /// `quant_algo` as written, absent for an unquantised model.
    pub algorithm: Option<String>,
    /// Modules that stay unquantised.
    pub excluded: Vec<ModulePattern>,
    /// What every module is that nothing else speaks of; absent in a mixed or unquantised model.
    pub(super) default: Option<Format>,
    /// By canonical module name: `quantized_layers` of a mixed model.
    pub(super) layers: HashMap<String, Format>,
    pub(super) groups: Vec<Group>,
}

impl Quantisation {
    /// Whether the config declares any module quantised.
    #[must_use]
    pub fn is_quantised(&self) -> bool {
        self.algorithm.is_some()
    }

    /// How `module` is declared. Exclusions outrank the rest, and of nested entries the innermost counts.
    #[must_use]
    pub fn declared(&self, module: &str) -> Declared<'_> {
        self.within(module).declared(module)
    }

    /// The declarations about what is inside `module`.
    ///
    /// For asking about many modules of one layer: a release lists hundreds of exclusions, of which a few concern a layer.
    #[must_use]
    pub fn within(&self, module: &str) -> Scope<'_> {
        Scope { all: self, excluded: self.excluded.iter().filter(|pattern| pattern.may_touch(module)).collect() }
    }

    fn format(&self, module: &str) -> Option<&Format> {
        let listed = ancestors(canonical(module)).find_map(|name| self.layers.get(name));
        listed
            .or_else(|| self.group(module).filter(|_| self.default.is_none()).map(|group| &group.format))
            .or(self.default.as_ref())
    }

    /// A group that quantises no input outranks an algorithm whose name says it does.
    fn weights_only(&self, module: &str) -> bool {
        self.group(module).is_some_and(|group| group.format == Format::Nvfp4 { activations: false })
    }

    fn group(&self, module: &str) -> Option<&Group> {
        let named = self.groups.iter().find(|group| group.targets.iter().any(|target| target.matches(module)));
        named.or_else(|| self.groups.iter().find(|group| group.targets.is_empty()))
    }
}

/// The declarations about one module and what is inside it.
#[derive(Debug, Clone)]
pub struct Scope<'a> {
    all: &'a Quantisation,
    excluded: Vec<&'a ModulePattern>,
}

impl<'a> Scope<'a> {
    /// As [`Quantisation::declared`], for a module of this scope.
    #[must_use]
    pub fn declared(&self, module: &str) -> Declared<'a> {
        if let Some(pattern) = self.excluded.iter().find(|pattern| pattern.matches(module)) {
            return Declared::Unquantised { by: Some(pattern) };
        }
        match self.all.format(module) {
            None => Declared::Unquantised { by: None },
            Some(Format::Other(name)) => Declared::Other(name),
            Some(Format::Nvfp4 { activations }) => {
                Declared::Nvfp4 { activations: *activations && !self.all.weights_only(module) }
            }
        }
    }
}
