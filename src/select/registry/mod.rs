//! The implementations of a build. A value, so that tests and instances make their own.

mod builtin;

use std::collections::{BTreeMap, BTreeSet};

use super::descriptor::{Descriptor, WidenedError};
use super::environment::Library;
use super::identity::{Identity, Part};
use crate::config::Transport;

use crate::exit::{Classify, Exit};
pub use builtin::{MAX_FORWARDING_GPUS, OLDEST_NCCL};

/// The family that chooses freely.
pub const AUTO: &str = "auto";
/// The family of everything that runs on a host's cores.
pub const CPU: &str = "cpu";

/// Why descriptors make no registry: a bug in the code that wrote them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// One address, two implementations.
    #[error("{identity} is registered twice; give each implementation an identity of its own")]
    Twice {
        /// The identity.
        identity: Identity,
    },
    /// A name that a query could not tell apart.
    #[error("`{token}` is both a {first} and a {second}, so a query can't tell which is meant; rename one")]
    Token {
        /// The name.
        token: String,
        /// A part it names.
        first: Part,
        /// Another.
        second: Part,
    },
    /// A name that `backend:` could not tell apart.
    #[error("technique `{technique}` has the name of a family; rename it")]
    Family {
        /// The technique.
        technique: &'static str,
    },
    /// A transport that an implementation names and nobody describes.
    #[error("{identity} names the transport {transport}, which is not registered; register it first")]
    Transport {
        /// The identity.
        identity: Identity,
        /// The transport.
        transport: Transport,
    },
    /// Nothing of this name to narrow.
    #[error("{identity} is not registered, so no instance can narrow it; register its descriptor first")]
    NotRegistered {
        /// The identity.
        identity: Identity,
    },
    /// An instance that claims more.
    #[error(transparent)]
    Widened(#[from] WidenedError),
}

impl Classify for RegistryError {
    fn exit(&self) -> Exit {
        Exit::Bug
    }
}

/// What carries tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportDescriptor {
    /// Its name.
    pub transport: Transport,
    /// What it loads, with the earliest version that will do where that matters.
    pub libraries: BTreeMap<Library, Option<&'static str>>,
    /// `auto` takes it in worlds of at least so many ranks; where it is asked for by name, any will do.
    pub auto_from_num_ranks: usize,
    /// It serves ranks that share a GPU.
    pub shares_gpus: bool,
    /// Hosts that it connects at most; absent: any number.
    pub max_num_nodes: Option<u32>,
    /// It carries tokens that are passed on in their node.
    pub forwards: bool,
    /// What it does depends on which ranks share a host: then ranks must agree on that too.
    pub reads_node_layout: bool,
}

/// The implementations of a build, the preferred first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registry {
    descriptors: Vec<Descriptor>,
    transports: Vec<TransportDescriptor>,
    tokens: BTreeMap<String, Part>,
}

impl Registry {
    /// A registry of `descriptors`, the preferred first, and of the transports that they name.
    ///
    /// # Errors
    /// If an identity is there twice, one name means two things, or a transport is not described.
    pub fn new(descriptors: Vec<Descriptor>, transports: Vec<TransportDescriptor>) -> Result<Self, RegistryError> {
        let mut tokens: BTreeMap<String, Part> = BTreeMap::new();
        let mut identities: BTreeSet<Identity> = BTreeSet::new();
        for Descriptor { identity, transports: named, .. } in &descriptors {
            let described = |name: &Transport| transports.iter().any(|known| known.transport == *name);
            if let Some(transport) = named.iter().copied().find(|name| !described(name)) {
                return Err(RegistryError::Transport { identity: *identity, transport });
            }
            if !identities.insert(*identity) {
                return Err(RegistryError::Twice { identity: *identity });
            }
            if [AUTO, CPU].contains(&identity.technique) {
                return Err(RegistryError::Family { technique: identity.technique });
            }
            for (part, token) in identity.parts() {
                let first = *tokens.entry(token.to_owned()).or_insert(part);
                if first != part {
                    return Err(RegistryError::Token { token: token.to_owned(), first, second: part });
                }
            }
        }
        Ok(Self { descriptors, transports, tokens })
    }

    /// The registry in which an instance's descriptor stands for the one that it narrows.
    ///
    /// # Errors
    /// If the identity is not registered, or the instance claims more than what is.
    pub fn with_instance(mut self, instance: Descriptor) -> Result<Self, RegistryError> {
        let identity = instance.identity;
        let known = self.descriptors.iter_mut().find(|descriptor| descriptor.identity == identity);
        let known = known.ok_or(RegistryError::NotRegistered { identity })?;
        *known = known.narrow(|descriptor| *descriptor = instance)?;
        Ok(self)
    }

    /// All descriptors, the preferred first.
    #[must_use]
    pub fn descriptors(&self) -> &[Descriptor] {
        &self.descriptors
    }

    /// The descriptor of an identity.
    #[must_use]
    pub fn descriptor(&self, identity: Identity) -> Option<&Descriptor> {
        self.descriptors.iter().find(|descriptor| descriptor.identity == identity)
    }

    /// What carries tokens.
    #[must_use]
    pub fn transports(&self) -> &[TransportDescriptor] {
        &self.transports
    }

    /// The description of a transport; `auto` has none.
    #[must_use]
    pub fn transport(&self, transport: Transport) -> Option<&TransportDescriptor> {
        self.transports.iter().find(|known| known.transport == transport)
    }

    /// All identities, the preferred first.
    pub fn identities(&self) -> impl Iterator<Item = Identity> {
        self.descriptors.iter().map(|descriptor| descriptor.identity)
    }

    /// Every name that `backend:` takes: `auto`, `cpu` and the techniques, the preferred first.
    #[must_use]
    pub fn families(&self) -> Vec<&'static str> {
        let mut families = vec![AUTO, CPU];
        for identity in self.identities() {
            if !families.contains(&identity.technique) {
                families.push(identity.technique);
            }
        }
        families
    }

    /// Whether a family holds an identity.
    #[must_use]
    pub fn is_in_family(&self, family: &str, identity: Identity) -> bool {
        match family {
            AUTO => true,
            CPU => self.descriptor(identity).is_some_and(|descriptor| !descriptor.target.is_gpu()),
            technique => identity.technique == technique,
        }
    }

    /// What a name in an identity stands for.
    #[must_use]
    pub fn part_of(&self, token: &str) -> Option<Part> {
        self.tokens.get(token).copied()
    }

    /// Every name that occurs in an identity.
    #[must_use]
    pub fn tokens(&self) -> Vec<String> {
        let mut tokens: Vec<(Part, &String)> = self.tokens.iter().map(|(token, part)| (*part, token)).collect();
        tokens.sort_unstable();
        tokens.into_iter().map(|(_, token)| token.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::Limits;
    use super::super::identity::Quant;
    use super::*;

    #[test]
    fn the_build_has_four_techniques_of_three_contracts() {
        let identities: Vec<String> = Registry::builtin().identities().map(|identity| identity.to_string()).collect();
        assert_eq!(
            identities,
            [
                "lockstep.simd.grouped_gemm.nvfp4",
                "lockstep.simd.grouped_gemm.w4a16_nvfp4",
                "lockstep.simd.grouped_gemm.none",
                "lockstep.reference.grouped_gemm.nvfp4",
                "lockstep.reference.grouped_gemm.w4a16_nvfp4",
                "lockstep.reference.grouped_gemm.none",
                "lockstep.wgmma.grouped_gemm.nvfp4",
                "lockstep.wgmma.grouped_gemm.w4a16_nvfp4",
                "lockstep.wgmma.grouped_gemm.none",
                "lockstep.mma_sync.grouped_gemm.nvfp4",
                "lockstep.mma_sync.grouped_gemm.w4a16_nvfp4",
                "lockstep.mma_sync.grouped_gemm.none",
            ]
        );
        assert_eq!(Registry::builtin().families(), ["auto", "cpu", "simd", "reference", "wgmma", "mma_sync"]);
    }

    #[test]
    fn one_name_means_one_thing() {
        let descriptor = Registry::builtin().descriptors()[0].clone();
        let host = Registry::builtin().transports().to_vec();
        let with = |identity: Identity| {
            Registry::new(vec![descriptor.clone(), Descriptor { identity, ..descriptor.clone() }], host.clone())
        };
        assert_eq!(with(descriptor.identity), Err(RegistryError::Twice { identity: descriptor.identity }));
        let doubled = with(Identity { kernel: "simd", ..descriptor.identity }).unwrap_err();
        assert_eq!(
            doubled.to_string(),
            "`simd` is both a technique and a kernel, so a query can't tell which is meant; rename one"
        );
        assert!(matches!(
            with(Identity::grouped_gemm("cpu", Quant::None)),
            Err(RegistryError::Family { technique: "cpu" })
        ));
        let error = Registry::new(vec![descriptor.clone()], Vec::new()).unwrap_err();
        assert!(error.to_string().contains("transport host, which is not registered"), "{error}");
    }

    #[test]
    fn an_instance_stands_for_what_it_narrows() {
        let registry = Registry::builtin();
        let simd = registry.descriptors()[0].clone();
        let narrowed = simd.narrow(|d| d.num_topk = Limits::between(1, 8)).unwrap();
        let with = registry.clone().with_instance(narrowed.clone()).unwrap();
        assert_eq!(with.descriptor(simd.identity), Some(&narrowed));
        assert_eq!(with.descriptors()[1..], registry.descriptors()[1..]);
        // The instance's is now the truth: what it took away can't come back.
        assert!(matches!(with.with_instance(simd.clone()), Err(RegistryError::Widened(_))));
        let stranger = Descriptor { identity: Identity::grouped_gemm("other", Quant::None), ..simd };
        assert!(matches!(registry.with_instance(stranger), Err(RegistryError::NotRegistered { .. })));
    }
}
