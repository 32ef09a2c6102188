//! What the scales of a checkpoint may be, and a summary of what they are.

use std::path::PathBuf;

use super::naming::ProjectionKind;
use super::warning::Warning;
use crate::exit::{Classify, Exit};
use crate::ids::ExpertIdx;
use crate::numerics::e4m3;

/// From here on a global scale is reported as implausible.
///
/// It multiplies: amax / 2688. A weight of 100 * 2688 occurs in no model, while the divisors of other formats, 2688 / amax, lie
/// above 100 for every amax below 27.
pub const IMPLAUSIBLE_GLOBAL_SCALE: f32 = 100.0;

/// Bits of 448, the largest e4m3 value.
const E4M3_MAX: u8 = 0x7E;

/// A scale that stands for nothing.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// A block scale.
    #[error("{}tensor {tensor} in {path}: the scale of row {row}, block {block} is {what} (0x{bits:02X}); {num_bad} of its scales are such", expert_prefix(*expert))]
    Block {
        /// The expert; absent for the shared one.
        expert: Option<ExpertIdx>,
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first bad scale's row.
        row: usize,
        /// Its column.
        block: usize,
        /// Its bits.
        bits: u8,
        /// NaN or negative.
        what: &'static str,
        /// Bad scales of the tensor.
        num_bad: u64,
    },
    /// `weight_scale_2` or `input_scale`.
    #[error("{}tensor {tensor} in {path} is {value}; it must be finite and greater than zero: calibrate and export again", expert_prefix(*expert))]
    Global {
        /// The expert; absent for the shared one.
        expert: Option<ExpertIdx>,
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its value.
        value: f32,
    },
}

fn expert_prefix(expert: Option<ExpertIdx>) -> String {
    expert.map_or_else(String::new, |expert| format!("{expert}: "))
}

impl Classify for ScaleError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// What the block scales of some tensors are.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct ScaleSummary {
    /// Scales.
    pub count: u64,
    /// The smallest that is not zero; 0 where all are.
    pub smallest: f32,
    /// The largest.
    pub largest: f32,
    /// Scales of 448, the largest there is: their blocks may have been clipped.
    pub num_saturated: u64,
    /// Scales of zero: their blocks are zero.
    pub num_zero: u64,
    /// Whether all that are not zero are powers of two, as after a conversion from MXFP4.
    pub powers_of_two: bool,
}

impl Default for ScaleSummary {
    fn default() -> Self {
        Self { count: 0, smallest: 0.0, largest: 0.0, num_saturated: 0, num_zero: 0, powers_of_two: true }
    }
}

impl ScaleSummary {
    /// Takes in the scales of other tensors.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.smallest = smaller_nonzero(self.smallest, other.smallest);
        self.largest = self.largest.max(other.largest);
        self.num_saturated += other.num_saturated;
        self.num_zero += other.num_zero;
        self.powers_of_two &= other.powers_of_two;
    }
}

fn smaller_nonzero(a: f32, b: f32) -> f32 {
    match (a > 0.0, b > 0.0) {
        (true, true) => a.min(b),
        (true, false) => a,
        _ => b,
    }
}

/// A block scale that is NaN or negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadBlockScale {
    pub(crate) position: usize,
    pub(crate) bits: u8,
    pub(crate) what: &'static str,
    pub(crate) num_bad: u64,
}

/// Scales that are compared side by side.
const LANES: usize = 32;

/// What some bits are as block scales, lane by lane. The bits of e4m3 values from 0 up are in the order of the values, so that
/// all of it is found by comparing bytes, a vector of them at a time. -0 counts as 0.
struct Lanes {
    /// The least bits of a value that is not zero, less 1; `u8::MAX` where there is none.
    least: [u8; LANES],
    /// The most bits; NaN and all below zero come behind 448.
    most: [u8; LANES],
    /// Not 0 where a value from 0 to 448 is no power of two.
    others: [u8; LANES],
    num_saturated: [u8; LANES],
    num_zero: [u8; LANES],
}

impl Lanes {
    /// Of no more than 255 groups.
    fn of(groups: &[[u8; LANES]]) -> Self {
        let (mut least, mut most, mut others) = ([u8::MAX; LANES], [0; LANES], [0; LANES]);
        // Wrapping, though none can: a check of each would be all that a debug build does.
        let (mut num_saturated, mut num_zero) = ([0_u8; LANES], [0_u8; LANES]);
        for group in groups {
            for lane in 0..LANES {
                let bits = if group[lane] == 0x80 { 0 } else { group[lane] };
                least[lane] = least[lane].min(bits.wrapping_sub(1));
                most[lane] = most[lane].max(bits);
                // Normal values have their mantissa in the low three bits; 1 to 7 are as many of the smallest steps.
                let low = if bits < 8 { bits & bits.wrapping_sub(1) } else { bits & 7 };
                others[lane] |= low;
                num_saturated[lane] = num_saturated[lane].wrapping_add(u8::from(bits == E4M3_MAX));
                num_zero[lane] = num_zero[lane].wrapping_add(u8::from(bits == 0));
            }
        }
        Self { least, most, others, num_saturated, num_zero }
    }
}

/// Checks e4m3 bits as block scales: no NaN, nothing below zero (minus zero is zero).
pub(crate) fn check_block_scales(bits: &[u8]) -> Result<ScaleSummary, BadBlockScale> {
    let (mut least, mut most, mut powers_of_two, mut num_saturated, mut num_zero) = (u8::MAX, 0, true, 0, 0);
    let mut add = |found: Lanes| {
        least = found.least.into_iter().fold(least, u8::min);
        most = found.most.into_iter().fold(most, u8::max);
        powers_of_two &= found.others == [0; LANES];
        num_saturated += found.num_saturated.into_iter().map(u64::from).sum::<u64>();
        num_zero += found.num_zero.into_iter().map(u64::from).sum::<u64>();
    };
    let (groups, rest) = bits.as_chunks::<LANES>();
    groups.chunks(usize::from(u8::MAX)).for_each(|groups| add(Lanes::of(groups)));
    // Zeros fill up the last group, and count for nothing but zeros.
    let mut last = [0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    add(Lanes::of(&[last]));
    num_zero -= (LANES - rest.len()) as u64;
    let bad = |bits: u8| bits & 0x7F == 0x7F || bits > 0x80;
    if most > E4M3_MAX
        && let Some((position, &first)) = bits.iter().enumerate().find(|(_, bits)| bad(**bits))
    {
        let what = if first & 0x7F == 0x7F { "NaN" } else { "negative" };
        let num_bad = bits.iter().filter(|bits| bad(**bits)).count() as u64;
        return Err(BadBlockScale { position, bits: first, what, num_bad });
    }
    Ok(ScaleSummary {
        count: bits.len() as u64,
        smallest: if most == 0 { 0.0 } else { e4m3::decode(least + 1) },
        largest: e4m3::decode(most),
        num_saturated,
        num_zero,
        powers_of_two,
    })
}

/// Whether a positive, finite value is a power of two.
fn is_power_of_two(value: f32) -> bool {
    let mantissa = value.to_bits() & 0x007F_FFFF;
    if value >= f32::MIN_POSITIVE { mantissa == 0 } else { mantissa.is_power_of_two() }
}

/// What the global scales of some tensors are.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct GlobalScaleSummary {
    /// Scales.
    pub count: u64,
    /// The smallest; 0 where there is none.
    pub smallest: f32,
    /// The largest.
    pub largest: f32,
    /// Whether all are powers of two.
    pub powers_of_two: bool,
}

impl Default for GlobalScaleSummary {
    fn default() -> Self {
        Self { count: 0, smallest: 0.0, largest: 0.0, powers_of_two: true }
    }
}

impl GlobalScaleSummary {
    /// The summary of one scale, finite and above zero.
    #[must_use]
    pub fn of(value: f32) -> Self {
        Self { count: 1, smallest: value, largest: value, powers_of_two: is_power_of_two(value) }
    }

    /// Takes in other scales.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.smallest = smaller_nonzero(self.smallest, other.smallest);
        self.largest = self.largest.max(other.largest);
        self.powers_of_two &= other.powers_of_two;
    }
}

/// The scales of one projection, or of one kind of projection over several experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct ProjectionScales {
    /// `weight_scale`
    pub blocks: ScaleSummary,
    /// `weight_scale_2`
    pub global: GlobalScaleSummary,
    /// `input_scale`
    pub input: GlobalScaleSummary,
}

/// The scales of the experts read so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerScales {
    /// By kind of projection, in the order of [`ProjectionKind::ALL`].
    pub projections: [ProjectionScales; 3],
    /// NVFP4 experts.
    pub num_pairs: u64,
    /// NVFP4 experts whose gate and up differ in `weight_scale_2`.
    pub num_pairs_differing: u64,
    /// Global scales that look like divisors.
    pub num_implausible: u64,
    /// The first of them and its value.
    pub first_implausible: Option<(String, f32)>,
}

impl LayerScales {
    /// The scales of one kind of projection.
    #[must_use]
    pub const fn of(&self, kind: ProjectionKind) -> &ProjectionScales {
        &self.projections[kind as usize]
    }

    /// What is odd about them, as a warning.
    #[must_use]
    pub fn warning(&self) -> Option<Warning> {
        self.first_implausible.as_ref().map(|(tensor, value)| Warning::ImplausibleScales {
            count: usize::try_from(self.num_implausible).unwrap_or(usize::MAX),
            first: tensor.clone(),
            value_bits: value.to_bits(),
        })
    }

    /// Takes in the scales of other experts of the layer.
    pub fn merge(&mut self, other: &Self) {
        for (ours, theirs) in self.projections.iter_mut().zip(&other.projections) {
            ours.blocks.merge(&theirs.blocks);
            ours.global.merge(&theirs.global);
            ours.input.merge(&theirs.input);
        }
        self.num_pairs += other.num_pairs;
        self.num_pairs_differing += other.num_pairs_differing;
        self.num_implausible += other.num_implausible;
        if self.first_implausible.is_none() {
            self.first_implausible.clone_from(&other.first_implausible);
        }
    }

    pub(super) fn note_implausible(&mut self, tensor: &str, value: f32) {
        if value >= IMPLAUSIBLE_GLOBAL_SCALE {
            self.num_implausible += 1;
            self.first_implausible.get_or_insert_with(|| (tensor.to_owned(), value));
        }
    }
}

#[cfg(test)]
mod tests {
    use float8::F8E4M3;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn e4m3_agrees_with_another_implementation() {
        for bits in 0..=E4M3_MAX {
            assert_eq!(e4m3::decode(bits).to_bits(), F8E4M3::from_bits(bits).to_f32().to_bits(), "0x{bits:02X}");
        }
    }

    #[test]
    fn nan_and_negative_scales_are_found_where_they_are() {
        for (byte, what) in [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xB8, "negative")] {
            let mut bits = vec![0x38; 40];
            (bits[17], bits[30]) = (byte, byte);
            let wanted = BadBlockScale { position: 17, bits: byte, what, num_bad: 2 };
            assert_eq!(check_block_scales(&bits), Err(wanted));
        }
    }

    #[test]
    fn counts_of_zero_and_saturated_scales() {
        let summary = check_block_scales(&[0x00, 0x80, 0x7E, 0x01, 0x38, 0x7E]).unwrap();
        let wanted = ScaleSummary {
            count: 6,
            smallest: 1.0 / 512.0,
            largest: 448.0,
            num_saturated: 2,
            num_zero: 2,
            powers_of_two: false,
        };
        assert_eq!(summary, wanted);
        assert!(check_block_scales(&[0x01, 0x02, 0x04, 0x08, 0x38, 0x00]).unwrap().powers_of_two);
        assert!(!check_block_scales(&[0x03]).unwrap().powers_of_two);
        assert_eq!(check_block_scales(&[0, 0]).unwrap().smallest.to_bits(), 0);
        assert!(is_power_of_two(f32::from_bits(1)) && !is_power_of_two(f32::from_bits(3)));
    }

    /// Scales as checkpoints have them, one bad one among many, powers of two, anything at all, and more than lanes count.
    fn scales() -> impl Strategy<Value = Vec<u8>> {
        let some = |bits: std::ops::RangeInclusive<u8>| proptest::collection::vec(bits, 0..300);
        let with_one = (some(0..=0x7E), any::<u8>(), any::<prop::sample::Index>()).prop_map(|(mut bits, one, at)| {
            bits.push(one);
            let at = at.index(bits.len());
            let last = bits.len() - 1;
            bits.swap(at, last);
            bits
        });
        let powers = some(0..=15).prop_map(|bits| bits.into_iter().map(|bits| bits << 3).collect());
        let many = (0..=0x80_u8, 8100..8300_usize).prop_map(|(bits, len)| vec![bits; len]);
        prop_oneof![some(0..=0x7E), with_one, powers, some(0..=255), many]
    }

    proptest! {
        /// Found by comparing bits, all is what it is found to be by values one by one.
        #[test]
        fn bits_are_summed_up_like_values(bits in scales()) {
            let values: Vec<f32> = bits.iter().map(|bits| e4m3::decode(*bits)).collect();
            let num_bad = values.iter().filter(|value| value.is_nan() || **value < 0.0).count() as u64;
            let above = || values.iter().copied().filter(|value| *value > 0.0);
            let count = |wanted: f32| values.iter().filter(|value| **value == wanted).count() as u64;
            match check_block_scales(&bits) {
                Err(bad) => {
                    prop_assert_eq!(bad.num_bad, num_bad);
                    prop_assert_eq!(bad.position, values.iter().position(|value| value.is_nan() || *value < 0.0).unwrap());
                    prop_assert_eq!(bad.bits, bits[bad.position]);
                }
                Ok(summary) => prop_assert_eq!((num_bad, summary), (0, ScaleSummary {
                    count: bits.len() as u64,
                    smallest: above().reduce(f32::min).unwrap_or(0.0),
                    largest: above().fold(0.0, f32::max),
                    num_saturated: count(448.0),
                    num_zero: count(0.0),
                    powers_of_two: above().all(is_power_of_two),
                })),
            }
        }

        #[test]
        fn merging_parts_equals_the_whole(bits in proptest::collection::vec(0_u8..0x7F, 0..200), cut in 0_usize..200) {
            let cut = cut.min(bits.len());
            let mut merged = check_block_scales(&bits[..cut]).unwrap();
            merged.merge(&check_block_scales(&bits[cut..]).unwrap());
            prop_assert_eq!(merged, check_block_scales(&bits).unwrap());
        }
    }
}
