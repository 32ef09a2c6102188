//! What may differ between ranks. Some of it by nature; of the rest a difference is worth a warning.

use super::super::candidate::Candidate;
use super::super::environment::{Environment, Library};
use super::super::resolve::Selection;
use super::session::{must_match, should_match};
use super::{FieldDifference, Fields, Fingerprint, FingerprintError, Kind, Value};

const COMPARED: &str = "compared.";
const OWN: &str = "own.";

/// Collects what may differ, in any order.
#[derive(Debug, Clone)]
pub struct Information {
    fields: Fields,
}

impl Default for Information {
    fn default() -> Self {
        Self { fields: Fields::new(Kind::Information) }
    }
}

impl Information {
    /// Something that is each rank's own: rank, host, a path.
    pub fn own(&mut self, name: &str, value: impl Into<Value>) -> &mut Self {
        self.fields.add(format!("{OWN}{name}"), value);
        self
    }

    /// Something that should be alike and need not be.
    pub fn compared(&mut self, name: &str, value: impl Into<Value>) -> &mut Self {
        self.fields.add(format!("{COMPARED}{name}"), value);
        self
    }

    /// Of a rank's environment what need not match: library versions and the GPU's model compared, the rest its own.
    pub fn environment(&mut self, environment: &Environment) -> &mut Self {
        let Environment { host, instruction_set, gpu, libraries, flags, variables, info } = environment;
        self.own("host", host.as_deref());
        self.compared("instruction_set", Value::text(instruction_set));
        self.compared("gpu", gpu.present().map(|gpu| gpu.name.as_str()));
        self.own("gpu.uuid", gpu.present().and_then(|gpu| gpu.uuid.as_deref()));
        for library in Library::ALL.into_iter().filter(|library| !library.must_match()) {
            self.compared(library.name(), Value::text(libraries.get(library)));
        }
        for flag in flags.iter().flatten() {
            self.compared(&format!("flags.{flag}"), true);
        }
        for (name, value) in variables.iter().filter(|(name, _)| !must_match(name)) {
            let path = format!("variables.{name}");
            match should_match(name) {
                true => self.compared(&path, value.as_str()),
                false => self.own(&path, value.as_str()),
            };
        }
        for (name, value) in info {
            self.own(&format!("info.{name}"), value.as_str());
        }
        self
    }

    /// Who else could have run each layer, and why not: the same winner for other reasons is worth a warning.
    pub fn trail(&mut self, selection: &Selection) -> &mut Self {
        for selected in &selection.layers {
            for candidate in selected.others.iter().chain(&selected.refused) {
                let Candidate { identity, refusals, passed_over, assumptions, .. } = candidate;
                let path = format!("trail.{}.{identity}", selected.layer.0);
                self.compared(&format!("{path}.refusals"), Value::set(refusals));
                self.compared(&format!("{path}.passed_over"), Value::set(passed_over));
                self.compared(&format!("{path}.assumptions"), Value::set(assumptions));
            }
        }
        self
    }

    /// What was collected.
    ///
    /// # Errors
    /// If one name was fed two values.
    pub fn finish(self) -> Result<Fingerprint, FingerprintError> {
        self.fields.finish()
    }
}

impl FieldDifference {
    /// Whether ranks should be alike here: every field of what must match, and the compared part of what need not.
    #[must_use]
    pub fn is_worth_a_warning(&self) -> bool {
        !self.field.starts_with(OWN)
    }
}
