//! The least time that a layer can take, by what would have to be waited for.
//!
//! Each is bytes or operations over a rate, and a lower bound even where all overlap:
//! - memory: weights of the experts that get a row (expected, once a chunk) and of the parts that every rank holds, and
//!   every travelling byte once where it leaves and once where it arrives;
//! - compute: 2 * 3 * hidden * intermediate a row of a routed or shared expert, 2 * in * out a row of router and latent
//!   projections, at the dense bf16 rate, in which NVFP4 products are exact;
//! - links: what a rank sends or receives, whichever is more, for dispatch and then for combine.

use serde::Serialize;

use crate::config::Links;

/// What is waited for.
pub const RESOURCES: [&str; 4] = ["memory", "compute", "scale-up", "scale-out"];

/// What one rank has to move and to compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Bytes through the device's memory.
    pub memory_bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes over the rank's scale-up link, one way.
    pub scale_up_bytes: f64,
    /// Bytes over its scale-out link, one way.
    pub scale_out_bytes: f64,
}

/// The least time by resource; absent where the rate is not known and there is something to do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Floors {
    /// Memory.
    pub memory_us: Option<f64>,
    /// Compute.
    pub compute_us: Option<f64>,
    /// Links inside a node.
    pub scale_up_us: Option<f64>,
    /// Links between nodes.
    pub scale_out_us: Option<f64>,
    /// The largest of those that are known: nothing is faster.
    pub floor_us: Option<f64>,
    /// Which one that is, of [`RESOURCES`].
    pub dominant: Option<&'static str>,
}

impl Work {
    /// Its floors at the rates of `links`.
    #[must_use]
    pub fn floors(&self, links: &Links) -> Floors {
        // A GB a second is 1e3 bytes a microsecond, a TFLOPS 1e6 operations.
        let over = |work: f64, rate: Option<f64>, unit: f64| {
            if work == 0.0 { Some(0.0) } else { rate.map(|rate| work / (rate * unit)) }
        };
        Floors::new([
            over(self.memory_bytes, links.memory_gbyte_per_s, 1e3),
            over(self.flops, links.tflops_bf16, 1e6),
            over(self.scale_up_bytes, links.scale_up_gbyte_per_s, 1e3),
            over(self.scale_out_bytes, links.scale_out_gbyte_per_s, 1e3),
        ])
    }
}

impl Floors {
    /// Nothing to do.
    pub const ZERO: Self = Self {
        memory_us: Some(0.0),
        compute_us: Some(0.0),
        scale_up_us: Some(0.0),
        scale_out_us: Some(0.0),
        floor_us: Some(0.0),
        dominant: None,
    };

    fn new(times_us: [Option<f64>; 4]) -> Self {
        let [memory_us, compute_us, scale_up_us, scale_out_us] = times_us;
        let floors = Self { memory_us, compute_us, scale_up_us, scale_out_us, floor_us: None, dominant: None };
        let (dominant, floor_us) = floors.largest().unzip();
        Self { floor_us, dominant: dominant.filter(|_| floor_us > Some(0.0)), ..floors }
    }

    /// In the order of [`RESOURCES`].
    #[must_use]
    pub fn by_resource(&self) -> [Option<f64>; 4] {
        [self.memory_us, self.compute_us, self.scale_up_us, self.scale_out_us]
    }

    fn largest(&self) -> Option<(&'static str, f64)> {
        let known = RESOURCES.into_iter().zip(self.by_resource()).filter_map(|(name, time)| Some((name, time?)));
        known.reduce(|best, next| if next.1 > best.1 { next } else { best })
    }

    /// The slower of two ranks for every resource.
    #[must_use]
    pub fn slower(&self, other: &Self) -> Self {
        let (ours, theirs) = (self.by_resource(), other.by_resource());
        Self::new(std::array::from_fn(|at| ours[at].zip(theirs[at]).map(|(a, b)| a.max(b))))
    }

    /// One layer after the other: the floor of the whole is the sum of the layers' floors.
    #[must_use]
    pub fn then(&self, other: &Self) -> Self {
        let (ours, theirs) = (self.by_resource(), other.by_resource());
        let sum = Self::new(std::array::from_fn(|at| ours[at].zip(theirs[at]).map(|(a, b)| a + b)));
        Self { floor_us: self.floor_us.zip(other.floor_us).map(|(a, b)| a + b), ..sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Work = Work { memory_bytes: 4.8e6, flops: 1e9, scale_up_bytes: 9e5, scale_out_bytes: 0.0 };

    #[test]
    fn the_largest_known_floor_dominates() {
        let links = Links {
            scale_up_gbyte_per_s: Some(450.0),
            scale_out_gbyte_per_s: None,
            memory_gbyte_per_s: Some(4800.0),
            tflops_bf16: Some(1000.0),
        };
        let floors = WORK.floors(&links);
        assert_eq!(floors.by_resource(), [Some(1.0), Some(1.0), Some(2.0), Some(0.0)]);
        assert_eq!((floors.dominant, floors.floor_us), (Some("scale-up"), Some(2.0)));
        let blind = WORK.floors(&Links { scale_up_gbyte_per_s: None, ..links });
        assert_eq!((blind.scale_up_us, blind.dominant, blind.floor_us), (None, Some("memory"), Some(1.0)));
        let nothing = WORK.floors(&Links::default());
        assert_eq!((nothing.dominant, nothing.floor_us), (None, Some(0.0)), "only the idle link is known");
    }

    #[test]
    fn layers_add_up_and_ranks_do_not() {
        let of = |memory_us, compute_us| Floors::new([Some(memory_us), Some(compute_us), Some(0.0), None]);
        let sum = of(1.0, 5.0).then(&of(4.0, 1.0));
        assert_eq!((sum.memory_us, sum.compute_us, sum.scale_out_us), (Some(5.0), Some(6.0), None));
        assert_eq!((sum.floor_us, sum.dominant), (Some(9.0), Some("compute")));
        let slower = of(1.0, 5.0).slower(&of(4.0, 1.0));
        assert_eq!((slower.memory_us, slower.floor_us, slower.dominant), (Some(4.0), Some(5.0), Some("compute")));
    }
}
