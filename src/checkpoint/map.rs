//! Bytes of tensors: mapped for weights, read for the small ones. The only `unsafe` of checkpoints.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use half::bf16;
use memmap2::{Mmap, MmapOptions};
use safetensors::Dtype;

use super::error::CheckpointError;
use super::header::{Shard, TensorEntry};
use super::tensors::TensorBytes;

/// Tensors that begin in a window of so many bytes of a file share a map of it, which goes with the last of them. With a map a
/// tensor sixteen threads read half as fast (docs/measurements/2026-12-01-load.md): unmapping makes every core forget what was
/// mapped, and holds up all who map meanwhile.
const WINDOW_BYTES: u64 = 64 << 20;

/// What is mapped of a file.
#[derive(Debug)]
pub(crate) struct Windows {
    window_bytes: u64,
    /// By where they start.
    windows: Mutex<BTreeMap<u64, Window>>,
}

#[derive(Debug, Default)]
struct Window {
    /// Where the last tensor that begins in it ends.
    end: u64,
    /// There as long as one of its tensors is.
    map: Weak<Mmap>,
}

impl Windows {
    /// Of a file with these tensors.
    pub(super) fn new(tensors: &[TensorEntry]) -> Self {
        Self::of_size(WINDOW_BYTES, tensors)
    }

    fn of_size(window_bytes: u64, tensors: &[TensorEntry]) -> Self {
        let mut windows: BTreeMap<u64, Window> = BTreeMap::new();
        for tensor in tensors {
            let window = windows.entry(tensor.begin / window_bytes * window_bytes).or_default();
            window.end = window.end.max(tensor.end);
        }
        Self { window_bytes, windows: Mutex::new(windows) }
    }

    /// The map of the window that a tensor of the file begins in, and where in that.
    fn around(&self, file: &File, tensor: &TensorEntry) -> io::Result<(Arc<Mmap>, usize)> {
        let start = tensor.begin / self.window_bytes * self.window_bytes;
        let length = |bytes: u64| usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory);
        let begin = length(tensor.begin - start)?;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(window) = windows.get_mut(&start) else {
            unreachable!("there is a window for every tensor of the file")
        };
        if let Some(map) = window.map.upgrade() {
            return Ok((map, begin));
        }
        let mut options = MmapOptions::new();
        options.offset(start).len(length(window.end - start)?);
        // SAFETY: the map is private and read-only, and nothing is read of it but tensors that the file was just found to
        // hold. What that cannot rule out is another process cutting the file short meanwhile, which ends this one by SIGBUS;
        // checkpoints are written once.
        let map = Arc::new(unsafe { options.map_copy_read_only(file) }?);
        window.map = Arc::downgrade(&map);
        Ok((map, begin))
    }
}

/// A tensor's range, in the map of its window.
pub(super) fn map(shard: &Shard, entry: &TensorEntry) -> Result<TensorBytes, CheckpointError> {
    let length = checked_length(shard, entry)?;
    let around = shard.windows.around(&shard.file, entry);
    let (window, begin) = around.map_err(|source| failed(shard, entry, source))?;
    Ok(TensorBytes::Mapped { window, range: begin..begin + length })
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn entry(begin: u64, end: u64) -> TensorEntry {
        TensorEntry { name: "x".into(), dtype: Dtype::U8, shape: [1].into(), begin, end, shard: 0 }
    }

    /// Tensors on either side of a window's end, and one across it, out of one file.
    #[test]
    fn tensors_of_a_window_share_a_map_that_goes_with_the_last() {
        let entries = [entry(8, 5_000), entry(5_000, 6_000), entry(6_000, 19_000), entry(19_000, 20_000)];
        let content: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&content).unwrap();
        let windows = Windows::of_size(8192, &entries);
        let (path, num_bytes) = (file.path().to_owned(), 20_000);
        let shard = Shard { file: File::open(&path).unwrap(), path, num_bytes, windows };
        let maps =
            || shard.windows.windows.lock().unwrap().values().filter(|window| window.map.strong_count() > 0).count();

        let tensors: Vec<_> = entries.iter().map(|entry| map(&shard, entry).unwrap()).collect();
        for (entry, tensor) in entries.iter().zip(&tensors) {
            let range = usize::try_from(entry.begin).unwrap()..usize::try_from(entry.end).unwrap();
            assert!(tensor[..] == content[range], "from {} on", entry.begin);
        }
        assert_eq!(maps(), 2, "of windows 0 and 2");
        let [first, second, third, last] = tensors.try_into().unwrap();
        drop((first, third));
        assert_eq!(maps(), 2, "each has one that is held");
        drop(last);
        assert_eq!(maps(), 1);
        drop(second);
        assert_eq!(maps(), 0);
        assert!(map(&shard, &entries[0]).unwrap()[..] == content[8..5_000], "mapped again");
    }
}
