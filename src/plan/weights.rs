//! Bytes of weights: what a rank holds of a layer, from the formats of its experts.
//!
//! Per-tensor scales, correction biases and norms are left out, as reports of packed weights leave them out: they are a
//! millionth of it.

use std::ops::Range;

use crate::model::MoeGeometry;
use crate::numerics::nvfp4::BLOCK;

use super::StoredLayer;

/// Matrices of an expert: gate, up and down, of one size.
const NUM_PROJECTIONS: u64 = 3;

/// Bytes of one gated expert. NVFP4: half a byte a weight and a scale byte a block; else bf16, two bytes a weight.
#[must_use]
pub fn expert_bytes(hidden: usize, intermediate: usize, is_nvfp4: bool) -> u64 {
    let weights = NUM_PROJECTIONS * hidden as u64 * intermediate as u64;
    if is_nvfp4 { weights / 2 + weights / BLOCK as u64 } else { weights * 2 }
}

impl StoredLayer {
    /// Bytes of the routed experts `local`.
    #[must_use]
    pub fn local_expert_bytes(&self, geometry: &MoeGeometry, local: Range<usize>) -> u64 {
        let of_one = |is_nvfp4| expert_bytes(geometry.expert_hidden, geometry.intermediate, is_nvfp4);
        self.is_nvfp4.get(local).unwrap_or_default().iter().map(|&is_nvfp4| of_one(is_nvfp4)).sum()
    }

    /// Bytes that every rank holds: router, latent projections, shared experts.
    #[must_use]
    pub fn replicated_bytes(&self, geometry: &MoeGeometry) -> u64 {
        let shared = geometry.shared.zip(self.facts.shared);
        let of_shared =
            shared.map_or(0, |(shape, facts)| expert_bytes(geometry.hidden, shape.intermediate, facts.is_nvfp4));
        self.dense_bytes + of_shared
    }
}

/// Bytes of router and latent projections in bf16, where no checkpoint says otherwise.
#[must_use]
pub fn dense_bytes(geometry: &MoeGeometry) -> u64 {
    let latent = if geometry.latent.is_some() { 2 * geometry.expert_hidden } else { 0 };
    2 * geometry.hidden as u64 * (geometry.num_experts + latent) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published: an expert of Kimi K3 is 18.58 MB, a layer's 896 are 16.65 GB, the 92 layers' 1.53 TB.
    #[test]
    fn an_expert_of_kimi_k3() {
        let expert = expert_bytes(3584, 3072, true);
        assert_eq!(expert, 18_579_456);
        assert_eq!(expert * 896 / 10_000_000, 1664);
        assert_eq!(expert * 896 * 92 / 10_000_000_000, 153);
        assert_eq!(expert_bytes(3584, 3072, false), 66_060_288);
    }
}
