//! What a deployment asks for: a family or a pinned implementation.

use std::fmt;

use super::deployment::DeploymentFacts;
use super::identity::Identity;
use super::query::Query;
use super::registry::{AUTO, Registry};
use super::resolve::ResolveError;
use crate::near::near;

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Whatever serves best.
    Auto,
    /// A family by its name.
    Family(&'static str),
    /// One implementation.
    Pin {
        /// As it was asked for.
        query: String,
        /// The only one that matches.
        identity: Identity,
    },
}

impl Request {
    /// Reads what `deployment` asks for.
    ///
    /// # Errors
    /// If the family is not one of the registry, the query does not address exactly one implementation, or that one is
    /// not of the family asked for.
    pub fn read(deployment: &DeploymentFacts, registry: &Registry) -> Result<Self, ResolveError> {
        let families = registry.families();
        let backend = deployment.backend.as_str();
        let Some(family) = families.iter().copied().find(|family| *family == backend) else {
            return Err(ResolveError::UnknownBackend {
                backend: backend.to_owned(),
                near: near(backend, families.iter().copied()),
                offered: families,
            });
        };
        match &deployment.implementation {
            None if family == AUTO => Ok(Self::Auto),
            None => Ok(Self::Family(family)),
            Some(query) => {
                let identity = Query::parse(query, registry)?.only_match(registry)?;
                if !registry.is_in_family(family, identity) {
                    return Err(ResolveError::PinOutsideFamily { identity, family });
                }
                Ok(Self::Pin { query: query.trim().to_owned(), identity })
            }
        }
    }

    /// Whether it asks for `identity`.
    #[must_use]
    pub fn asks_for(&self, identity: Identity, registry: &Registry) -> bool {
        match self {
            Self::Auto => true,
            Self::Family(family) => registry.is_in_family(family, identity),
            Self::Pin { identity: pinned, .. } => *pinned == identity,
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("backend auto"),
            Self::Family(family) => write!(f, "backend {family}"),
            Self::Pin { query, .. } => write!(f, "implementation {query}"),
        }
    }
}
