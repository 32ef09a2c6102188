//! What tests draw.

/// xorshift64*, so that a seed says everything; the state is not 0.
pub(crate) struct Random(pub u64);

impl Random {
    /// Of any seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.bits() >> 33).unwrap() % limit
    }
}
