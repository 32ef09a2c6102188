//! The instruction sets that the kernels are written for, of which all give the same bits: the choice is about time alone.

use crate::select::InstructionSet;

/// The best that this machine has.
#[must_use]
pub fn best_instruction_set() -> InstructionSet {
    #[cfg(target_arch = "x86_64")]
    {
        if super::avx512::Avx512::detect().is_some() {
            return InstructionSet::Avx512;
        }
        if super::avx2::Avx2::detect().is_some() {
            return InstructionSet::Avx2;
        }
    }
    InstructionSet::Scalar
}
