//! What a check does with a fault it finds: end there, or note it and go on.
//!
//! Loading stops at the first fault; `inspect` runs the same checks and wants all of them.

use super::error::CheckpointError;

/// The policy, and the faults noted so far.
#[derive(Debug)]
pub(crate) enum Faults {
    /// The first fault is the result.
    Stop,
    /// Faults are noted.
    Collect(Vec<CheckpointError>),
}

impl Faults {
    /// Ends with the fault, or notes it.
    pub(crate) fn raise(&mut self, fault: impl Into<CheckpointError>) -> Result<(), CheckpointError> {
        match self {
            Self::Stop => Err(fault.into()),
            Self::Collect(noted) => {
                noted.push(fault.into());
                Ok(())
            }
        }
    }

    /// The value, or nothing where a fault was noted in its place.
    pub(crate) fn take<T, E: Into<CheckpointError>>(
        &mut self,
        result: Result<T, E>,
    ) -> Result<Option<T>, CheckpointError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(fault) => self.raise(fault).map(|()| None),
        }
    }
}
