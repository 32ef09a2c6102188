//! Writing safetensors files: whole or not at all, and equal bytes for equal tensors.

use std::fs::{File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::bf16;
use safetensors::Dtype;

use super::error::CheckpointError;

/// A tensor to write, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its values, row-major and little-endian.
    pub bytes: &'a [u8],
}

/// The values of an output.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputData {
    /// Written as BF16.
    Bf16(Vec<bf16>),
    /// Written as F32.
    F32(Vec<f32>),
    /// 32-bit integers, as expert ids.
    I32(Vec<i32>),
}

/// An output.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputTensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values, row-major.
    pub data: OutputData,
}

/// Writes outputs as a safetensors file; see [`write_tensors`]. `publishing` is called when all is written, before the file
/// gets its name.
///
/// # Errors
/// As [`write_tensors`], and what `publishing` fails with.
pub fn write_outputs(
    path: &Path,
    outputs: &[(String, OutputTensor)],
    publishing: &dyn Fn() -> std::io::Result<()>,
) -> Result<(), CheckpointError> {
    let views: Vec<_> = outputs.iter().map(|(name, output)| output.view(name)).collect();
    write(path, &views, publishing)
}

impl OutputTensor {
    /// The output as bytes, without a copy.
    fn view<'a>(&'a self, name: &'a str) -> TensorView<'a> {
        const {
            assert!(
                cfg!(target_endian = "little"),
                "safetensors are little-endian, and values are written as they lie in memory"
            )
        }
        let (dtype, bytes) = match &self.data {
            OutputData::Bf16(values) => (Dtype::BF16, bytemuck::cast_slice(values)),
            OutputData::F32(values) => (Dtype::F32, bytemuck::cast_slice(values)),
            OutputData::I32(values) => (Dtype::I32, bytemuck::cast_slice(values)),
        };
        TensorView { name, dtype, shape: &self.shape, bytes }
    }
}

/// Writes a safetensors file in one step: a temporary file beside it, synced, then renamed over `path`.
///
/// Tensors lie in the order of their names and the header holds nothing else, so the bytes depend on the tensors alone. A failed or
/// interrupted call leaves what was at `path` before.
///
/// # Errors
/// If a name occurs twice, if bytes and shape differ, or if writing fails.
pub fn write_tensors(path: &Path, tensors: &[TensorView<'_>]) -> Result<(), CheckpointError> {
    write(path, tensors, &|| Ok(()))
}

fn write(
    path: &Path,
    tensors: &[TensorView<'_>],
    publishing: &dyn Fn() -> std::io::Result<()>,
) -> Result<(), CheckpointError> {
    let mut sorted: Vec<_> = tensors.to_vec();
    sorted.sort_by_key(|tensor| tensor.name);
    let header = header(&sorted)?;
    write_atomically(path, &|out| {
        out.write_all(&header)?;
        sorted.iter().try_for_each(|tensor| out.write_all(tensor.bytes))?;
        out.flush()?;
        publishing()
    })
}

/// Writes a file in one step: a temporary file beside it, filled by `fill`, synced, then renamed over `path`.
///
/// # Errors
/// If writing fails; what was at `path` before is still there then.
pub fn write_atomically(
    path: &Path,
    fill: &dyn Fn(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), CheckpointError> {
    let failed = |source| CheckpointError::Write { path: path.to_owned(), source };
    let dir = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    // Readable as any new file is: temporary files are private by default, and 0o666 is narrowed by the umask.
    let permissions = Permissions::from_mode(0o666);
    let create =
        || tempfile::Builder::new().prefix(".lockstep-").suffix(".tmp").permissions(permissions).tempfile_in(&dir);
    let (mut temporary, _unfinished) = Unfinished::create(create, |file| file.path()).map_err(failed)?;
    let mut out = BufWriter::new(temporary.as_file_mut());
    fill(&mut out).map_err(failed)?;
    out.flush().map_err(failed)?;
    drop(out);
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(path).map_err(|error| failed(error.error))?;
    // The rename itself is durable once the directory is synced.
    File::open(&dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

/// Files and directories that are being written: a signal ends the process without running destructors.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn lock_unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something with a temporary name, while it is being written.
#[derive(Debug)]
pub struct Unfinished(PathBuf);

impl Unfinished {
    /// Runs `create` and remembers what it made, at `path`, until the guard is dropped. Once [`remove_unfinished`] has
    /// begun, nothing new is made.
    ///
    /// # Errors
    /// Those of `create`.
    pub fn create<T>(
        create: impl FnOnce() -> std::io::Result<T>,
        path: impl FnOnce(&T) -> &Path,
    ) -> std::io::Result<(T, Self)> {
        let mut paths = lock_unfinished();
        let made = create()?;
        let path = path(&made).to_owned();
        paths.push(path.clone());
        Ok((made, Self(path)))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        lock_unfinished().retain(|path| *path != self.0);
    }
}

/// Others may be adding to a directory while it is removed.
const MAX_REMOVALS: usize = 20;

/// Removes what is being written, for a process that ends at once. A writer that fails because of it, or begins anew,
/// waits for that end instead of saying so: the lock is not given back.
pub fn remove_unfinished() {
    let paths = lock_unfinished();
    for path in &*paths {
        // It may have got its name in the meantime: then nothing is there, and nothing half-written is left.
        let _ = std::fs::remove_file(path);
        let _ = (0..MAX_REMOVALS).find(|_| !path.exists() || std::fs::remove_dir_all(path).is_ok());
    }
    std::mem::forget(paths);
}

/// Length prefix and JSON, padded with spaces so that the data starts at a multiple of 8.
fn header(sorted: &[TensorView<'_>]) -> Result<Vec<u8>, CheckpointError> {
    let mut json = serde_json::Map::new();
    let mut end = 0_usize;
    for tensor in sorted {
        let num_bits = tensor.shape.iter().try_fold(tensor.dtype.bitsize(), |product, &n| product.checked_mul(n));
        if num_bits != tensor.bytes.len().checked_mul(8) {
            let (shape, found) = (tensor.shape.to_vec(), tensor.bytes.len() * 8 / tensor.dtype.bitsize());
            return Err(CheckpointError::OutputShape { tensor: tensor.name.to_owned(), shape, found });
        }
        let begin = end;
        end += tensor.bytes.len();
        let entry =
            serde_json::json!({"dtype": tensor.dtype.to_string(), "shape": tensor.shape, "data_offsets": [begin, end]});
        if json.insert(tensor.name.to_owned(), entry).is_some() {
            return Err(CheckpointError::OutputDoubled { tensor: tensor.name.to_owned() });
        }
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::super::activations::{MatrixDtype, read_activations};
    use super::*;

    fn outputs() -> Vec<(String, OutputTensor)> {
        let values: Vec<f32> = (0_u8..6).map(|i| f32::from(i) - 2.5).collect();
        let halves = values.iter().map(|&value| bf16::from_f32(value)).collect();
        vec![
            ("layers.2.output".to_owned(), OutputTensor { shape: vec![2, 3], data: OutputData::F32(values) }),
            ("layers.1.output".to_owned(), OutputTensor { shape: vec![3, 2], data: OutputData::Bf16(halves) }),
        ]
    }

    fn write_plain(path: &Path, outputs: &[(String, OutputTensor)]) -> Result<(), CheckpointError> {
        write_outputs(path, outputs, &|| Ok(()))
    }

    #[test]
    fn another_reader_reads_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        write_plain(&path, &outputs()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let second = file.tensor("layers.2.output").unwrap();
        assert_eq!((second.dtype(), second.shape()), (Dtype::F32, &[2, 3][..]));
        assert_eq!(&second.data()[..4], (-2.5_f32).to_le_bytes());
        let matrix = read_activations(&path, Some("layers.1.output")).unwrap();
        assert_eq!((matrix.num_rows, matrix.num_columns, matrix.dtype), (3, 2, MatrixDtype::Bf16));
        assert_eq!(matrix.values, [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]);
    }

    #[test]
    fn equal_tensors_make_equal_files_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        let mut tensors = outputs();
        write_plain(&one, &tensors).unwrap();
        tensors.reverse();
        write_plain(&other, &tensors).unwrap();
        assert_eq!(std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        std::fs::write(&path, "old").unwrap();
        let mut tensors = outputs();
        tensors[0].1.shape = vec![4, 2];
        let message = write_plain(&path, &tensors).unwrap_err().to_string();
        assert!(
            message.contains("layers.2.output") && message.contains("[4, 2]") && message.contains('6'),
            "{message}"
        );
        let doubled = [outputs(), outputs()].concat();
        assert!(matches!(write_plain(&path, &doubled), Err(CheckpointError::OutputDoubled { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        let missing = dir.path().join("missing/out.safetensors");
        assert!(matches!(write_plain(&missing, &outputs()), Err(CheckpointError::Write { .. })));
        // A directory in the way fails only at the rename.
        let blocked = dir.path().join("blocked");
        std::fs::create_dir(&blocked).unwrap();
        assert!(matches!(write_plain(&blocked, &outputs()), Err(CheckpointError::Write { .. })));
        let late = write_outputs(&path, &outputs(), &|| Err(std::io::Error::other("late")));
        assert!(matches!(late, Err(CheckpointError::Write { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "a temporary file was left behind");
    }

    #[test]
    fn a_new_file_is_readable_like_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let (plain, path) = (dir.path().join("plain"), dir.path().join("out"));
        std::fs::write(&plain, "").unwrap();
        write_plain(&path, &outputs()).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
    }
}
