//! Newtypes for the counts that are easy to mix up: ranks, experts, tokens, layers.
//!
//! Knows nothing of what is done with them.

use std::fmt;

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident, $label:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as a slice position.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// Wraps a slice position.
            ///
            /// # Panics
            /// If `index` does not fit in 32 bits, which no model or world reaches.
            #[must_use]
            pub fn from_index(index: usize) -> Self {
                Self(u32::try_from(index).expect(concat!($label, " index fits in 32 bits")))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, " {}"), self.0)
            }
        }
    };
}

index_type!(
    /// A process of the MPI world, 0-based.
    Rank, "rank"
);
index_type!(
    /// A routed expert of a layer, numbered over all ranks.
    ExpertIdx, "expert"
);
index_type!(
    /// A token of one rank's input, 0-based on that rank.
    TokenIdx, "token"
);
index_type!(
    /// A decoder layer, numbered as in the checkpoint's tensor names.
    LayerIdx, "layer"
);
