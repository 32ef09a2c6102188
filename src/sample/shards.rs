//! Writes safetensors files whose data is drawn while it is written: memory does not grow with the file.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use rayon::prelude::*;
use serde_json::json;

use super::SampleError;
use super::random::{CHUNK_BYTES, Filler, Stream};
use super::tensors::TensorPlan;

/// Chunks that are drawn at once, over all threads, before they are written.
const CHUNKS_IN_FLIGHT: usize = 16;

/// Plans as one file holds them: by dtype, larger elements first, then by name.
#[must_use]
pub fn in_file_order(mut tensors: Vec<TensorPlan>) -> Vec<TensorPlan> {
    tensors.sort_by(|a, b| (a.dtype, &a.name).cmp(&(b.dtype, &b.name)));
    tensors
}

/// The length prefix and header of a file of `tensors`, padded to 8 bytes.
fn header(tensors: &[TensorPlan], seed: u64) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let metadata = json!({"format": "pt", "producer": "lockstep sample", "seed": seed.to_string()});
    entries.insert("__metadata__".to_owned(), metadata);
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.num_bytes();
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [offset, end]});
        entries.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Writes `tensors`, which are [`in_file_order`], and calls `written` with the bytes of each part.
///
/// # Errors
/// If the file cannot be written.
pub fn write(
    path: &Path,
    tensors: &[TensorPlan],
    seed: u64,
    written: &(dyn Fn(u64) + Sync),
) -> Result<(), SampleError> {
    let failed = |source| SampleError::of_write(path, source);
    let mut file = File::create(path).map_err(failed)?;
    let header = header(tensors, seed);
    file.write_all(&header).map_err(failed)?;
    let mut buffer = Vec::new();
    for tensor in tensors {
        let filler = Filler::new(Stream::new(seed, &tensor.name), &tensor.content);
        let mut offset = 0;
        while offset < tensor.num_bytes() {
            let len = (tensor.num_bytes() - offset).min((CHUNKS_IN_FLIGHT * CHUNK_BYTES) as u64);
            let start = buffer.len();
            buffer.resize(start + usize::try_from(len).unwrap_or(CHUNK_BYTES), 0);
            buffer[start..].par_chunks_mut(CHUNK_BYTES).enumerate().for_each(|(idx, chunk)| {
                filler.fill(offset + (idx * CHUNK_BYTES) as u64, chunk);
            });
            offset += len;
            // Scalars by the thousand go out together.
            if buffer.len() >= CHUNK_BYTES {
                file.write_all(&buffer).map_err(failed)?;
                written(buffer.len() as u64);
                buffer.clear();
            }
        }
    }
    file.write_all(&buffer).map_err(failed)?;
    written(buffer.len() as u64);
    // A full disk may first be seen when the file is closed.
    file.sync_all().map_err(failed)
}
