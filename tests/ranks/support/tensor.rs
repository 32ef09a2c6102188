//! A tensor in memory: dtype, shape and little-endian bytes, with the edits that test checkpoints need.

use half::bf16;

/// The dtypes that the tests write, under the names that safetensors headers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    U8,
    F8E4M3,
    Bf16,
    F32,
    I32,
    I64,
}

impl Dtype {
    pub const ALL: [Self; 6] = [Self::U8, Self::F8E4M3, Self::Bf16, Self::F32, Self::I32, Self::I64];

    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "U8",
            Self::F8E4M3 => "F8_E4M3",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::I32 => "I32",
            Self::I64 => "I64",
        }
    }

    pub const fn num_bytes(self) -> usize {
        match self {
            Self::U8 | Self::F8E4M3 => 1,
            Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// A tensor; nothing forces `bytes` to fit `shape`, because some tests need it not to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::from_parts(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// Rounds to bf16.
    pub fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        Self::from_parts(Dtype::Bf16, shape, bytes)
    }

    pub fn u8(shape: &[usize], bytes: Vec<u8>) -> Self {
        Self::from_parts(Dtype::U8, shape, bytes)
    }

    pub fn e4m3(shape: &[usize], bits: Vec<u8>) -> Self {
        Self::from_parts(Dtype::F8E4M3, shape, bits)
    }

    pub fn i32(shape: &[usize], values: &[i32]) -> Self {
        Self::from_parts(Dtype::I32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        Self::from_parts(Dtype::I64, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// An f32 of shape `[]`, as ModelOpt writes its global scales.
    pub fn scalar(value: f32) -> Self {
        Self::f32(&[], &[value])
    }

    fn from_parts(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        assert_eq!(bytes.len(), shape.iter().product::<usize>() * dtype.num_bytes(), "{dtype:?} {shape:?}");
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// The values of an F32 or BF16 tensor.
    pub fn floats(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::Bf16 => self.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            other => panic!("{other:?} holds no floats"),
        }
    }

    /// The values of an I32 or I64 tensor.
    pub fn integers(&self) -> Vec<i64> {
        match self.dtype {
            Dtype::I32 => {
                self.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect()
            }
            Dtype::I64 => {
                self.bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))).collect()
            }
            other => panic!("{other:?} holds no integers"),
        }
    }

    /// Rows of a matrix stacked below each other; shapes must agree but for the first dimension.
    pub fn stack(parts: &[&Self]) -> Self {
        let mut stacked = parts[0].clone();
        for part in &parts[1..] {
            assert_eq!((part.dtype, &part.shape[1..]), (stacked.dtype, &stacked.shape[1..]));
            stacked.shape[0] += part.shape[0];
            stacked.bytes.extend_from_slice(&part.bytes);
        }
        stacked
    }

    /// Rows `start..end` of a matrix.
    pub fn rows(&self, start: usize, end: usize) -> Self {
        let row_bytes = self.shape[1..].iter().product::<usize>() * self.dtype.num_bytes();
        let mut shape = self.shape.clone();
        shape[0] = end - start;
        Self { dtype: self.dtype, shape, bytes: self.bytes[start * row_bytes..end * row_bytes].to_vec() }
    }

    /// Sets one e2m1 code of a packed `[out, in / 2]` tensor; the even column is the low nibble.
    pub fn set_code(&mut self, row: usize, column: usize, code: u8) {
        let byte = &mut self.bytes[row * self.shape[1] + column / 2];
        *byte = if column.is_multiple_of(2) { (*byte & 0xF0) | code } else { (*byte & 0x0F) | (code << 4) };
    }

    /// One e2m1 code of a packed `[out, in / 2]` tensor.
    pub fn code(&self, row: usize, column: usize) -> u8 {
        let byte = self.bytes[row * self.shape[1] + column / 2];
        if column.is_multiple_of(2) { byte & 0x0F } else { byte >> 4 }
    }

    /// Sets the block scale that covers a column of the weight, `[out, in / 16]`.
    pub fn set_block_scale(&mut self, row: usize, column: usize, bits: u8) {
        let position = row * self.shape[1] + column / 16;
        self.bytes[position] = bits;
    }
}

/// The value of an e2m1 code.
pub fn e2m1(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of e4m3 bits that are not a NaN.
pub fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude =
        if exponent == 0 { mantissa * 2f32.powi(-9) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_sit_in_the_right_nibble() {
        let mut packed = Tensor::u8(&[2, 2], vec![0; 4]);
        packed.set_code(1, 2, 7);
        packed.set_code(1, 3, 9);
        packed.set_code(1, 2, 2);
        assert_eq!(packed.bytes, [0, 0, 0, 0x92]);
        assert_eq!((packed.code(1, 2), packed.code(1, 3)), (2, 9));
    }

    #[test]
    fn formats_decode_to_their_tables() {
        assert_eq!([e2m1(2), e2m1(7), e2m1(10)], [1.0, 6.0, -1.0]);
        assert_eq!([e4m3(0x38), e4m3(0x40), e4m3(0x48), e4m3(0x7E)], [1.0, 2.0, 4.0, 448.0]);
        assert_eq!([e4m3(0x01), e4m3(0x08), e4m3(0xB8)], [2f32.powi(-9), 2f32.powi(-6), -1.0]);
    }

    #[test]
    fn rows_and_stack_are_inverse() {
        let whole = Tensor::bf16(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let (head, tail) = (whole.rows(0, 1), whole.rows(1, 3));
        assert_eq!(tail.floats(), [3.0, 4.0, 5.0, 6.0]);
        assert_eq!(Tensor::stack(&[&head, &tail]), whole);
    }

    #[test]
    fn integers_read_both_widths() {
        assert_eq!(Tensor::i32(&[2], &[-1, 7]).integers(), [-1, 7]);
        assert_eq!(Tensor::i64(&[2], &[-1, 1 << 40]).integers(), [-1, 1 << 40]);
    }
}
