//! The words that stand for the values of an enumerated key.

use std::fmt;

use super::{
    Activations, BackendFamily, CacheLayout, Combine, CombineDtype, CudaGraph, Device, Levels, LogFormat, Overlap,
    Payload, Transport, Tuning,
};

/// A key's value that is one of a few words.
pub trait Choice: Copy + PartialEq + 'static {
    /// Every word with its value, in the order they are listed to people.
    const CHOICES: &'static [(&'static str, Self)];

    /// The word of a value.
    #[must_use]
    fn name(self) -> &'static str {
        Self::CHOICES.iter().find(|(_, value)| *value == self).map_or("?", |(name, _)| name)
    }

    /// The value of a word.
    #[must_use]
    fn from_name(name: &str) -> Option<Self> {
        Self::CHOICES.iter().find(|(word, _)| *word == name).map(|(_, value)| *value)
    }
}

macro_rules! choices {
    ($($type:ident { $($word:literal => $value:ident),+ $(,)? })+) => {
        $(
            impl Choice for $type {
                const CHOICES: &'static [(&'static str, Self)] = &[$(($word, Self::$value)),+];
            }

            impl fmt::Display for $type {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.pad(self.name())
                }
            }
        )+

        #[cfg(test)]
        mod tests {
            use super::*;

            /// A match without a wildcard: a new variant does not compile until it has a word.
            #[test]
            fn every_variant_has_a_word() {
                $(
                    for (word, value) in $type::CHOICES {
                        let spelt = match value { $($type::$value => $word),+ };
                        assert_eq!(spelt, *word);
                        assert_eq!($type::from_name(word), Some(*value));
                        assert_eq!(value.to_string(), *word);
                    }
                )+
            }
        }
    };
}

choices! {
    Device { "cpu" => Cpu, "gpu" => Gpu, "auto" => Auto }
    BackendFamily {
        "auto" => Auto, "cpu" => Cpu, "reference" => Reference, "simd" => Simd, "mma_sync" => MmaSync, "wgmma" => Wgmma,
    }
    Activations { "checkpoint" => Checkpoint, "bf16" => Bf16, "quantised" => Quantised }
    Tuning { "off" => Off, "on" => On }
    CudaGraph { "off" => Off, "auto" => Auto, "on" => On }
    Overlap { "off" => Off, "auto" => Auto, "on" => On }
    Combine { "auto" => Auto, "slot" => Slot, "rank" => Rank }
    Transport { "auto" => Auto, "host" => Host, "nccl" => Nccl, "nvlink" => Nvlink }
    Levels { "auto" => Auto, "one" => One, "two" => Two }
    Payload { "auto" => Auto, "f32" => F32, "bf16" => Bf16, "nvfp4" => Nvfp4 }
    CombineDtype { "auto" => Auto, "f32" => F32, "bf16" => Bf16 }
    CacheLayout { "per-rank" => PerRank, "flat" => Flat }
    LogFormat { "text" => Text, "json" => Json }
}
