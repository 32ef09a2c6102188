//! The query by which a person pins an implementation: parts of an identity in any order, `*` for any.

use std::collections::BTreeMap;

use super::identity::{Identity, Part};
use super::registry::Registry;
use crate::exit::{Classify, Exit};
use crate::near::{did_you_mean, near};

/// Why a query addresses no implementation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// Nothing was asked for.
    #[error("moe.implementation is empty; name an implementation, such as {example}, or leave the key out")]
    Empty {
        /// One that there is.
        example: String,
    },
    /// Not parts between dots.
    #[error(
        "implementation `{query}` is malformed: {reason}; write provider.technique.kernel.quant, such as {example}"
    )]
    Malformed {
        /// What was asked for.
        query: String,
        /// What is wrong with its form.
        reason: &'static str,
        /// One that there is.
        example: String,
    },
    /// A name that no registered identity has.
    #[error(
        "implementation `{query}`: `{token}` is no provider, technique, kernel or quant of this build{}; valid are {}",
        did_you_mean(near),
        known.join(", ")
    )]
    UnknownToken {
        /// What was asked for.
        query: String,
        /// The name.
        token: String,
        /// What may have been meant.
        near: Vec<String>,
        /// Every name there is.
        known: Vec<String>,
    },
    /// Two names for one part.
    #[error("implementation `{query}` names two parts of one kind: {first} and {second} are each a {part}; keep one")]
    Doubled {
        /// What was asked for.
        query: String,
        /// The part named twice.
        part: Part,
        /// The name that comes first.
        first: String,
        /// The other.
        second: String,
    },
    /// Every part is open.
    #[error(
        "implementation `{query}` leaves every part open; name one of {}, or choose with moe.backend instead",
        offered.join(", ")
    )]
    WhollyOpen {
        /// What was asked for.
        query: String,
        /// Every identity there is.
        offered: Vec<String>,
    },
    /// Names that exist, but not together.
    #[error("implementation `{query}` matches nothing in this build; there are {}", offered.join(", "))]
    NoMatch {
        /// What was asked for.
        query: String,
        /// Every identity there is.
        offered: Vec<String>,
    },
    /// Names that several identities share.
    #[error("implementation `{query}` matches {} implementations: {}; name more parts until one is left", matches.len(), matches.join(", "))]
    Ambiguous {
        /// What was asked for.
        query: String,
        /// The identities it matches.
        matches: Vec<String>,
    },
}

impl Classify for QueryError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// The parts of an identity that a query fixes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    text: String,
    parts: BTreeMap<Part, String>,
}

impl Query {
    /// Reads one to four names and `*`s between dots. A part that is not named is open.
    ///
    /// # Errors
    /// If the text is empty, malformed or wholly open, or has an unknown name or two of one kind.
    pub fn parse(text: &str, registry: &Registry) -> Result<Self, QueryError> {
        let query = text.trim().to_owned();
        let example = registry.identities().next().map(|identity| identity.to_string()).unwrap_or_default();
        if query.is_empty() {
            return Err(QueryError::Empty { example });
        }
        if let Some(reason) = malformed(&query) {
            return Err(QueryError::Malformed { query, reason, example });
        }
        let mut parts = BTreeMap::new();
        for token in query.split('.').filter(|token| *token != "*") {
            let Some(part) = registry.part_of(token) else {
                let known = registry.tokens();
                let near = near(token, known.iter().map(String::as_str));
                return Err(QueryError::UnknownToken { token: token.to_owned(), near, known, query });
            };
            if let Some(first) = parts.insert(part, token.to_owned()) {
                return Err(QueryError::Doubled { part, first, second: token.to_owned(), query });
            }
        }
        if parts.is_empty() {
            return Err(QueryError::WhollyOpen { query, offered: texts(registry.identities()) });
        }
        Ok(Self { text: query, parts })
    }

    /// Whether `identity` has every part that is named.
    #[must_use]
    pub fn matches(&self, identity: Identity) -> bool {
        identity.parts().iter().all(|(part, name)| self.parts.get(part).is_none_or(|wanted| wanted == name))
    }

    /// The one registered identity that it matches.
    ///
    /// # Errors
    /// If it matches none, or several.
    pub fn only_match(&self, registry: &Registry) -> Result<Identity, QueryError> {
        let matches: Vec<Identity> = registry.identities().filter(|identity| self.matches(*identity)).collect();
        let query = self.text.clone();
        match matches[..] {
            [only] => Ok(only),
            [] => Err(QueryError::NoMatch { query, offered: texts(registry.identities()) }),
            _ => Err(QueryError::Ambiguous { query, matches: texts(matches) }),
        }
    }
}

fn malformed(query: &str) -> Option<&'static str> {
    let tokens: Vec<&str> = query.split('.').collect();
    if query.chars().any(|c| !(c.is_ascii_alphanumeric() || "_-.*".contains(c))) {
        return Some("its names consist of letters, digits and underscores");
    }
    if tokens.contains(&"") {
        return Some("there is nothing between two of its dots, or at an end");
    }
    if tokens.len() > 4 {
        return Some("it has more than four parts");
    }
    tokens.iter().any(|token| token.contains('*') && *token != "*").then_some("`*` stands for a whole part")
}

fn texts(identities: impl IntoIterator<Item = Identity>) -> Vec<String> {
    identities.into_iter().map(|identity| identity.to_string()).collect()
}
