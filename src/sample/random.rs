//! Random tensor contents whose every byte is a function of seed, tensor name and position: the same whatever the
//! number of threads and the order of writing.
//!
//! Everything is drawn through tables of quantiles, so that NVFP4 codes and scales come at memory speed and no tensor
//! is ever held in floats.

use std::sync::OnceLock;

use crate::numerics::{e2m1, e4m3};

/// Bytes that are filled at once; a multiple of every word's share of output.
pub const CHUNK_BYTES: usize = 1 << 20;

/// Values of a full table: one a 16-bit draw.
const QUANTILES: usize = 1 << 16;

/// The largest NVFP4 value in units of the global scale: 6 * 448.
pub const LARGEST_VALUE: f64 = 2688.0;

/// The stream of one tensor.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream of the tensor `name` of a sample drawn from `seed`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
        let mut key = [0; 8];
        key.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        Self { key: u64::from_le_bytes(key) }
    }

    /// The word at `idx`: splitmix64's output function over a counter.
    const fn word(self, idx: u64) -> u64 {
        let mut z = self.key.wrapping_add(idx.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The first draw as a factor between `1 / spread` and `spread`, even in the logarithm.
    #[must_use]
    pub fn factor(self, spread: f64) -> f64 {
        // 53 bits are exact in an f64.
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
        let unit = (self.word(0) >> 11) as f64 / (1u64 << 53) as f64;
        libm::pow(spread, 2.0 * unit - 1.0)
    }

    /// Hands each word of the output that starts at `offset` to `put`, with the `stride` bytes it decides.
    fn fill(self, offset: u64, stride: usize, out: &mut [u8], put: impl Fn(u64, &mut [u8])) {
        debug_assert_eq!(offset % stride as u64, 0, "chunks start at whole words");
        let first = offset / stride as u64;
        for (idx, bytes) in (first..).zip(out.chunks_mut(stride)) {
            put(self.word(idx), bytes);
        }
    }
}

/// What a tensor holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// NVFP4 codes, two a byte, as of a normal distribution; the first is the largest.
    Codes,
    /// e4m3 block scales that go with [`Content::Codes`]; the first is the largest.
    BlockScales,
    /// Normal values in bf16.
    Bf16 {
        /// Their mean.
        mean: f64,
        /// Their standard deviation.
        sigma: f64,
    },
    /// Normal values in f32 with mean 0.
    F32 {
        /// Their standard deviation.
        sigma: f64,
    },
    /// One f32.
    Scalar(f32),
}

/// A tensor's content, ready to be written at any offset.
#[derive(Debug)]
pub struct Filler {
    stream: Stream,
    table: Table,
}

#[derive(Debug)]
enum Table {
    /// A packed byte for each 16-bit draw.
    Codes(&'static [u8]),
    /// A scale for each 8-bit draw.
    Scales(&'static [u8]),
    /// A bf16 for each 16-bit draw.
    Bf16(Vec<[u8; 2]>),
    /// An f32 for each 16-bit draw.
    F32(Vec<[u8; 4]>),
    Scalar([u8; 4]),
}

impl Filler {
    /// The content of the tensor behind `stream`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "values are rounded to the tensor's dtype")]
    pub fn new(stream: Stream, content: &Content) -> Self {
        let table = match *content {
            Content::Codes => Table::Codes(packed_codes()),
            Content::BlockScales => Table::Scales(block_scales()),
            Content::Bf16 { mean, sigma } => {
                let value = |q: &f64| half::bf16::from_f64(mean + sigma * q).to_le_bytes();
                Table::Bf16(normal_quantiles().iter().map(value).collect())
            }
            Content::F32 { sigma } => {
                Table::F32(normal_quantiles().iter().map(|q| ((sigma * q) as f32).to_le_bytes()).collect())
            }
            Content::Scalar(value) => Table::Scalar(value.to_le_bytes()),
        };
        Self { stream, table }
    }

    /// Fills `out` with the tensor's bytes from `offset` (a multiple of [`CHUNK_BYTES`]) on.
    pub fn fill(&self, offset: u64, out: &mut [u8]) {
        match &self.table {
            Table::Codes(table) => {
                self.stream.fill(offset, 4, out, |word, bytes| {
                    for (lane, byte) in bytes.iter_mut().enumerate() {
                        *byte = table[lane16(word, lane)];
                    }
                });
                if offset == 0 {
                    out[0] = (out[0] & 0xF0) | 7;
                }
            }
            Table::Scales(table) => {
                self.stream.fill(offset, 8, out, |word, bytes| {
                    for (byte, draw) in bytes.iter_mut().zip(word.to_le_bytes()) {
                        *byte = table[usize::from(draw)];
                    }
                });
                if offset == 0 {
                    out[0] = e4m3::encode(e4m3::MAX);
                }
            }
            Table::Bf16(table) => self.stream.fill(offset, 8, out, |word, bytes| {
                for (lane, value) in bytes.chunks_exact_mut(2).enumerate() {
                    value.copy_from_slice(&table[lane16(word, lane)]);
                }
            }),
            Table::F32(table) => self.stream.fill(offset, 16, out, |word, bytes| {
                for (lane, value) in bytes.chunks_exact_mut(4).enumerate() {
                    value.copy_from_slice(&table[lane16(word, lane)]);
                }
            }),
            Table::Scalar(bytes) => out.copy_from_slice(bytes),
        }
    }
}

/// The 16-bit draw `lane` of a word.
fn lane16(word: u64, lane: usize) -> usize {
    let bytes = word.to_le_bytes();
    usize::from(u16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]))
}

/// The standard normal at the middle of each of 65536 equal steps of probability, ascending.
fn normal_quantiles() -> &'static [f64] {
    static TABLE: OnceLock<Vec<f64>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut x = -4.5;
        let step = 1.0 / QUANTILES as f64;
        (0..QUANTILES)
            .map(|idx| {
                let probability = (idx as f64 + 0.5) * step;
                x = newton(x, probability, |x| 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2), density);
                x
            })
            .collect()
    })
}

/// The density of the standard normal.
fn density(x: f64) -> f64 {
    libm::exp(-0.5 * x * x) / libm::sqrt(2.0 * std::f64::consts::PI)
}

/// Where `cumulative`, which grows, reaches `probability`; `start` lies below and close.
fn newton(start: f64, probability: f64, cumulative: impl Fn(f64) -> f64, density: impl Fn(f64) -> f64) -> f64 {
    let mut x = start;
    for _ in 0..60 {
        // A step is bounded: far out the density is small and a whole step would leave the range.
        let step = ((probability - cumulative(x)) / density(x)).clamp(-0.25, 0.25);
        x += step;
        if step.abs() < 1e-13 {
            break;
        }
    }
    x
}

/// The largest of a block of 16 normal values, at the middle of each of 256 equal steps of probability.
fn block_maxima() -> Vec<f64> {
    let within = |x: f64| libm::erf(x / std::f64::consts::SQRT_2);
    let cumulative = |x: f64| libm::pow(within(x), 16.0);
    let slope = |x: f64| 16.0 * libm::pow(within(x), 15.0) * 2.0 * density(x);
    let mut x = 0.8;
    (0..256)
        .map(|idx| {
            x = newton(x, (f64::from(idx) + 0.5) / 256.0, cumulative, slope);
            x
        })
        .collect()
}

/// The largest value of a whole tensor in standard deviations: what about ten million normal values reach.
const TENSOR_MAXIMUM: f64 = 5.5;

/// e4m3 block scales of a normal tensor, as its largest value has the scale 448.
#[expect(clippy::cast_possible_truncation, reason = "quantiles are rounded to eight-bit formats next")]
fn block_scales() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        block_maxima().iter().map(|maximum| e4m3::encode((448.0 * maximum / TENSOR_MAXIMUM) as f32)).collect()
    })
}

/// e2m1 codes of normal values, scaled so that the median block's largest becomes 6.
#[expect(clippy::cast_possible_truncation, reason = "quantiles are rounded to four-bit codes next")]
fn codes() -> Vec<u8> {
    let median_maximum = block_maxima()[128];
    let quantiles = normal_quantiles();
    (0..256).map(|draw| e2m1::encode((quantiles[draw * 256 + 128] * 6.0 / median_maximum) as f32)).collect()
}

fn packed_codes() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let codes = codes();
        (0..QUANTILES).map(|draw| codes[draw & 0xFF] | codes[draw >> 8] << 4).collect()
    })
}

/// The standard deviation of code * block scale: what a global scale has to be multiplied with to give a weight's.
pub fn nvfp4_sigma() -> f64 {
    let mean_square = |values: Vec<f64>| values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
    let of_codes = mean_square(codes().iter().map(|code| f64::from(e2m1::decode(*code))).collect());
    let of_scales = mean_square(block_scales().iter().map(|scale| f64::from(e4m3::decode(*scale))).collect());
    libm::sqrt(of_codes * of_scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(content: &Content, len: usize) -> Vec<u8> {
        let filler = Filler::new(Stream::new(7, "a.weight"), content);
        let mut out = vec![0; len];
        filler.fill(0, &mut out);
        out
    }

    #[test]
    fn any_part_is_the_part_of_the_whole() {
        let contents = [
            Content::Codes,
            Content::BlockScales,
            Content::Bf16 { mean: 0.0, sigma: 1.0 },
            Content::F32 { sigma: 1.0 },
        ];
        for content in contents {
            let whole = filled(&content, 3 * CHUNK_BYTES);
            let filler = Filler::new(Stream::new(7, "a.weight"), &content);
            let mut part = vec![0; CHUNK_BYTES / 2 + 12];
            filler.fill(CHUNK_BYTES as u64, &mut part);
            assert!(whole[CHUNK_BYTES..][..part.len()] == part[..], "{content:?}");
        }
    }

    #[test]
    fn seeds_and_names_give_other_bytes() {
        let first = |seed, name| Stream::new(seed, name).word(0);
        assert_ne!(first(0, "a"), first(1, "a"));
        assert_ne!(first(0, "a"), first(0, "b"));
    }

    #[test]
    fn quantiles_are_those_of_a_normal_distribution() {
        let table = normal_quantiles();
        assert!(table.is_sorted());
        let mean = table.iter().sum::<f64>() / table.len() as f64;
        let variance = table.iter().map(|x| x * x).sum::<f64>() / table.len() as f64;
        assert!(mean.abs() < 1e-12, "mean {mean}");
        assert!((variance - 1.0).abs() < 2e-4, "variance {variance}");
        // The upper quartile of the standard normal.
        assert!((table[3 * QUANTILES / 4] - 0.674_489_75).abs() < 3e-5, "{}", table[3 * QUANTILES / 4]);
        assert!((table[0] + table[QUANTILES - 1]).abs() < 1e-9);
    }

    #[test]
    fn weights_have_the_deviation_that_is_claimed() {
        let codes = filled(&Content::Codes, 1 << 20);
        let scales = filled(&Content::BlockScales, 1 << 17);
        let value = |code: u8| f64::from(e2m1::decode(code));
        let (mut sum, mut squares) = (0.0, 0.0);
        for (idx, byte) in codes.iter().enumerate() {
            for code in [byte & 15, byte >> 4] {
                let weight = value(code) * f64::from(e4m3::decode(scales[idx / 8]));
                sum += weight;
                squares += weight * weight;
            }
        }
        let count = 2.0 * codes.len() as f64;
        assert!((sum / count).abs() < 1.0, "mean {}", sum / count);
        let sigma = libm::sqrt(squares / count);
        assert!((sigma / nvfp4_sigma() - 1.0).abs() < 0.01, "{sigma} against {}", nvfp4_sigma());
        assert_eq!(
            (codes[0] & 15, scales[0]),
            (7, e4m3::encode(e4m3::MAX)),
            "the tensor's largest value is 2688 global scales"
        );
        assert!(scales.iter().all(|scale| (1..=e4m3::encode(e4m3::MAX)).contains(scale)));
    }
}
