//! An error on its way out of the process: its exit code, and its one message.

use std::error::Error;
use std::fmt;

use crate::exit::{Classify, Exit, Known};

/// An error with the exit code it deserves. Made by `?` from every error that can be classified, so that none is
/// forgotten; it is no [`Error`] itself, so that nothing wraps it on its way.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    known: Known,
    error: Option<Box<dyn Error + Send + Sync>>,
}

impl<E: Classify + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { exit: error.exit(), known: error.known(), error: Some(Box::new(error)) }
    }
}

impl Failure {
    /// An end without a message, because another rank has given it.
    #[must_use]
    pub fn said_elsewhere(exit: Exit) -> Self {
        Self { exit, known: Known::Everywhere { speaks: false }, error: None }
    }

    /// What the process ends with.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Which ranks know of it.
    #[must_use]
    pub fn known(&self) -> Known {
        self.known
    }

    /// The message: the error, and each of its causes on a line of its own. None where another rank has given it.
    #[must_use]
    pub fn message(&self) -> Option<String> {
        let error = self.error.as_ref()?;
        let mut message = format!("lockstep: error: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            message.push_str(&format!("\n  caused by: {error}"));
            cause = error.source();
        }
        Some(message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    #[test]
    fn a_message_carries_its_causes() {
        let source = std::io::Error::other("the disk is on fire");
        let failure = Failure::from(ConfigError::of_read("x.yaml", source));
        assert_eq!((failure.exit(), failure.known()), (Exit::BadInput, Known::Here));
        assert_eq!(
            failure.to_string(),
            "lockstep: error: cannot read the deployment file x.yaml\n  caused by: the disk is on fire"
        );
    }

    #[test]
    fn what_was_said_elsewhere_is_not_said_again() {
        let failure = Failure::said_elsewhere(Exit::PeerFailed);
        assert_eq!((failure.exit(), failure.message()), (Exit::PeerFailed, None));
        assert_eq!(failure.known(), Known::Everywhere { speaks: false });
    }
}
