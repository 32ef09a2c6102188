//! Bytes of tensors: mapped for weights, read for the small ones. The only `unsafe` of checkpoints.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use half::bf16;
use memmap2::MmapOptions;
use safetensors::Dtype;

use super::error::CheckpointError;
use super::header::{Shard, TensorEntry};
use super::tensors::TensorBytes;

/// Maps exactly the range of a tensor.
pub(super) fn map(shard: &Shard, entry: &TensorEntry) -> Result<TensorBytes, CheckpointError> {
    let length = checked_length(shard, entry)?;
    let mut options = MmapOptions::new();
    options.offset(entry.begin).len(length);
    // SAFETY: the map is private and read-only, and was just found to lie inside the file. What it cannot rule out is another
    // process cutting the file short meanwhile, which ends this one by SIGBUS; checkpoints are written once.
    let map = unsafe { options.map_copy_read_only(&shard.file) };
    map.map(|map| TensorBytes::Mapped(Arc::new(map))).map_err(|source| failed(shard, entry, source))
}

/// Reads a tensor into memory.
pub(super) fn read(shard: &Shard, entry: &TensorEntry) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = vec![0; checked_length(shard, entry)?];
    shard.file.read_exact_at(&mut bytes, entry.begin).map_err(|source| failed(shard, entry, source))?;
    Ok(bytes)
}

/// Reads a tensor of F32 or BF16 as f32; every bf16 is one. Other dtypes give nothing.
pub(super) fn read_floats(shard: &Shard, entry: &TensorEntry) -> Result<Option<Vec<f32>>, CheckpointError> {
    // The data starts behind a header of any length, so values need not lie at multiples of their size.
    match entry.dtype {
        Dtype::F32 => {
            let bytes = read(shard, entry)?;
            Ok(Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
        }
        Dtype::BF16 => {
            let bytes = read(shard, entry)?;
            Ok(Some(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()))
        }
        _ => Ok(None),
    }
}

/// The tensor's length, after asking the file whether it still holds it.
fn checked_length(shard: &Shard, entry: &TensorEntry) -> Result<usize, CheckpointError> {
    let found_bytes = shard.file.metadata().map_err(|source| failed(shard, entry, source))?.len();
    if found_bytes < entry.end {
        let (path, expected_bytes) = (shard.path.clone(), shard.num_bytes);
        return Err(CheckpointError::Shrank { path, expected_bytes, found_bytes });
    }
    usize::try_from(entry.num_bytes()).map_err(|_| failed(shard, entry, std::io::ErrorKind::OutOfMemory.into()))
}

fn failed(shard: &Shard, entry: &TensorEntry, source: std::io::Error) -> CheckpointError {
    let (path, tensor) = (shard.path.clone(), entry.name.to_string());
    CheckpointError::ReadTensor { path, tensor, num_bytes: entry.num_bytes(), source }
}
