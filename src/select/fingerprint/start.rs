//! The first thing that ranks compare: what they were asked for, before anything is decided from it.

use super::super::environment::Environment;
use super::{BuildFacts, Fields, Fingerprint, FingerprintError, Kind};

/// Collects what ranks were asked for, in any order.
#[derive(Debug, Clone)]
pub struct StartBuilder {
    fields: Fields,
}

impl StartBuilder {
    /// Starts from the build that a rank runs.
    #[must_use]
    pub fn new(build: BuildFacts<'_>) -> Self {
        let mut fields = Fields::new(Kind::Start);
        fields.add_build(build);
        Self { fields }
    }

    /// A key of the deployment, by its path, with its value as the file would have it.
    pub fn key(&mut self, path: &str, value: &str) -> &mut Self {
        self.fields.add(path, value);
        self
    }

    /// Something that the command line asks for beside the deployment.
    pub fn asked(&mut self, option: &str, value: &str) -> &mut Self {
        self.fields.add(format!("asked.{option}"), value);
        self
    }

    /// Of this rank's environment what must match.
    pub fn environment(&mut self, environment: &Environment) -> &mut Self {
        self.fields.add_environment(environment);
        self
    }

    /// The fingerprint of what was collected.
    ///
    /// # Errors
    /// If one path was fed two values.
    pub fn finish(self) -> Result<Fingerprint, FingerprintError> {
        self.fields.finish()
    }
}
