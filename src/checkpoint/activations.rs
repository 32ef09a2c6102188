//! Files of inputs and expected values: matrices of activations, and the choices of another router.

use std::path::Path;

use safetensors::Dtype;

use super::error::CheckpointError;
use super::header::{self, Shard, TensorEntry};
use super::map;
use crate::ids::LayerIdx;
use crate::routing::TopK;

/// How a matrix was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixDtype {
    /// bf16, widened exactly.
    Bf16,
    /// f32
    F32,
}

/// A matrix of activations, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Rows: tokens.
    pub num_rows: usize,
    /// Columns: the width.
    pub num_columns: usize,
    /// `[num_rows, num_columns]`
    pub values: Vec<f32>,
    /// How it was stored.
    pub dtype: MatrixDtype,
    /// The tensor that was read.
    pub tensor: String,
}

/// A matrix of activations in a file, of which the header was read alone.
pub struct Activations {
    file: File,
    entry: TensorEntry,
    /// Rows: tokens.
    pub num_rows: usize,
    /// Columns: the width.
    pub num_columns: usize,
    /// How it is stored.
    pub dtype: MatrixDtype,
}

impl Activations {
    const WANTED: &str = "BF16 or F32 [rows, columns]";

    /// Finds a two-dimensional BF16 or F32 tensor of a safetensors file.
    ///
    /// Without a name the file must hold exactly one such tensor.
    ///
    /// # Errors
    /// If the file is unreadable or lies about itself, if there is no such tensor or more than one, or if it has another form.
    pub fn open(path: &Path, tensor: Option<&str>) -> Result<Self, CheckpointError> {
        let file = File::open(path)?;
        let entry = match tensor {
            Some(name) => file.named(name)?,
            None => file.only_matrix()?,
        };
        let (num_rows, num_columns) = file.matrix_dims(entry, Self::WANTED)?;
        let dtype = match entry.dtype {
            Dtype::BF16 => MatrixDtype::Bf16,
            Dtype::F32 => MatrixDtype::F32,
            _ => return Err(file.form(entry, Self::WANTED.to_owned())),
        };
        let entry = entry.clone();
        Ok(Self { file, entry, num_rows, num_columns, dtype })
    }

    /// Reads some rows, ascending, and nothing else of the file: `[rows.len(), num_columns]`.
    ///
    /// # Errors
    /// If the file fails.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn read(&self, rows: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        assert!(rows.last().is_none_or(|last| *last < self.num_rows), "rows of {}", self.num_rows);
        let row_bytes = self.entry.num_bytes() / (self.num_rows as u64).max(1);
        let mut values = Vec::with_capacity(rows.len() * self.num_columns);
        // Neighbours in one piece.
        for run in rows.chunk_by(|one, next| one + 1 == *next) {
            let begin = self.entry.begin + run[0] as u64 * row_bytes;
            let part = TensorEntry { begin, end: begin + run.len() as u64 * row_bytes, ..self.entry.clone() };
            let read = map::read_floats(&self.file.shard, &part)?;
            values.extend(read.ok_or_else(|| self.file.form(&self.entry, Self::WANTED.to_owned()))?);
        }
        Ok(values)
    }
}

/// Reads all of what [`Activations::open`] finds.
///
/// # Errors
/// As [`Activations::open`], or if the file fails.
pub fn read_activations(path: &Path, tensor: Option<&str>) -> Result<Matrix, CheckpointError> {
    let found = Activations::open(path, tensor)?;
    let Activations { num_rows, num_columns, dtype, .. } = found;
    let values = found.read(&(0..num_rows).collect::<Vec<_>>())?;
    Ok(Matrix { num_rows, num_columns, values, dtype, tensor: found.entry.name.to_string() })
}

/// Reads `topk_idx` (I32 or I64) and `topk_weights` (F32), both `[tokens, slots]`.
///
/// With a layer, `layers.N.topk_idx` and `layers.N.topk_weights` come before the bare names. Whether the ids exist is for the
/// router's checks, which know the number of experts.
///
/// # Errors
/// If the file is unreadable or lies about itself, if a tensor is missing or has another form, if the two differ in shape, if an id
/// does not fit in 32 bits, or if a weight is not finite.
pub fn read_topk(path: &Path, layer: Option<LayerIdx>) -> Result<TopK, CheckpointError> {
    let file = File::open(path)?;
    let idx_entry = file.of_layer("topk_idx", layer)?;
    let weights_entry = file.of_layer("topk_weights", layer)?;
    let (num_tokens, num_topk) = file.matrix_dims(idx_entry, "I32 or I64 [tokens, slots]")?;
    if *weights_entry.shape != *idx_entry.shape || weights_entry.dtype != Dtype::F32 {
        return Err(
            file.form(weights_entry, format!("F32 [{num_tokens}, {num_topk}], the shape of {}", idx_entry.name))
        );
    }
    let idx = file.ids(idx_entry, num_topk)?;
    let weights = map::read_floats(&file.shard, weights_entry)?.unwrap_or_default();
    if let Some((position, value)) = weights.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        return Err(file.bad_value(weights_entry, (position, num_topk), value.to_string(), "finite"));
    }
    Ok(TopK { num_topk, idx, weights })
}

/// A safetensors file of a few tensors.
struct File {
    shard: Shard,
    entries: Vec<TensorEntry>,
}

impl File {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (shard, mut entries) = header::open(path, 0)?;
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { shard, entries })
    }

    fn find(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.iter().find(|entry| &*entry.name == name)
    }

    fn named(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.find(name).ok_or_else(|| self.pick(format!("there is no tensor {name}")))
    }

    fn of_layer(&self, name: &str, layer: Option<LayerIdx>) -> Result<&TensorEntry, CheckpointError> {
        let nested = layer.map(|layer| format!("layers.{}.{name}", layer.0));
        match nested {
            None => self.named(name),
            Some(nested) => self
                .find(&nested)
                .or_else(|| self.find(name))
                .ok_or_else(|| self.pick(format!("there is neither {nested} nor {name}"))),
        }
    }

    fn only_matrix(&self) -> Result<&TensorEntry, CheckpointError> {
        let is_matrix =
            |entry: &&TensorEntry| entry.shape.len() == 2 && matches!(entry.dtype, Dtype::BF16 | Dtype::F32);
        let mut matrices = self.entries.iter().filter(is_matrix);
        match (matrices.next(), matrices.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(self.pick("no tensor is a BF16 or F32 matrix".to_owned())),
            (Some(_), Some(_)) => Err(self.pick("several tensors are matrices; name one as FILE:TENSOR".to_owned())),
        }
    }

    fn matrix_dims(&self, entry: &TensorEntry, wanted: &str) -> Result<(usize, usize), CheckpointError> {
        match *entry.shape {
            [rows, columns] if columns > 0 => Ok((rows, columns)),
            _ => Err(self.form(entry, wanted.to_owned())),
        }
    }

    fn ids(&self, entry: &TensorEntry, num_topk: usize) -> Result<Vec<i32>, CheckpointError> {
        let bytes = match entry.dtype {
            Dtype::I32 | Dtype::I64 => map::read(&self.shard, entry)?,
            _ => return Err(self.form(entry, "I32 or I64 [tokens, slots]".to_owned())),
        };
        if entry.dtype == Dtype::I32 {
            return Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect());
        }
        let wide = bytes.chunks_exact(8).map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]));
        wide.enumerate()
            .map(|(position, id)| {
                let place = (position, num_topk);
                i32::try_from(id).map_err(|_| self.bad_value(entry, place, id.to_string(), "an expert id of 32 bits"))
            })
            .collect()
    }

    fn bad_value(
        &self,
        entry: &TensorEntry,
        (position, num_topk): (usize, usize),
        found: String,
        wanted: &'static str,
    ) -> CheckpointError {
        let (token, slot) = (position / num_topk, position % num_topk);
        let (path, tensor) = (self.shard.path.clone(), entry.name.to_string());
        CheckpointError::TopkValue { path, tensor, token, slot, found, wanted }
    }

    fn form(&self, entry: &TensorEntry, wanted: String) -> CheckpointError {
        let (path, tensor) = (self.shard.path.clone(), entry.name.to_string());
        CheckpointError::TensorForm { path, tensor, wanted, found: entry.form() }
    }

    /// The error of a tensor that cannot be picked, with what there is.
    fn pick(&self, reason: String) -> CheckpointError {
        const NUM_LISTED: usize = 40;
        let mut present: Vec<_> =
            self.entries.iter().take(NUM_LISTED).map(|e| format!("{} ({})", e.name, e.form())).collect();
        if self.entries.len() > NUM_LISTED {
            present.push(format!("and {} more", self.entries.len() - NUM_LISTED));
        }
        CheckpointError::PickTensor { path: self.shard.path.clone(), reason, present: present.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(dir: &Path, dtype: &str, (rows, columns): (usize, usize), values: &[u8]) -> std::path::PathBuf {
        let size = if dtype == "BF16" { 2 } else { 4 };
        let num_bytes = rows * columns * size;
        let header =
            format!(r#"{{"hidden":{{"dtype":"{dtype}","shape":[{rows},{columns}],"data_offsets":[0,{num_bytes}]}}}}"#);
        let path = dir.join("input.safetensors");
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.write_all(values).unwrap();
        // What is not written takes no room on disk.
        file.set_len((8 + header.len() + num_bytes) as u64).unwrap();
        path
    }

    #[test]
    fn any_rows_are_those_of_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..7 * 5).map(|value| value as f32).collect();
        let bytes = |value: &f32| value.to_le_bytes();
        let path = file(dir.path(), "F32", (7, 5), &values.iter().flat_map(bytes).collect::<Vec<_>>());
        let whole = read_activations(&path, None).unwrap();
        assert_eq!((whole.num_rows, whole.num_columns, whole.dtype), (7, 5, MatrixDtype::F32));
        assert_eq!((&whole.values, whole.tensor.as_str()), (&values, "hidden"));
        let found = Activations::open(&path, Some("hidden")).unwrap();
        for rows in [&[][..], &[3], &[0, 1, 2], &[0, 2, 3, 6], &[6]] {
            let wanted: Vec<f32> = rows.iter().flat_map(|row| values[5 * row..][..5].to_vec()).collect();
            assert_eq!(found.read(rows).unwrap(), wanted, "{rows:?}");
        }
    }

    /// Half a terabyte, of which a rank has three rows.
    #[test]
    fn what_is_not_asked_for_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (rows, columns) = (1 << 25, 1 << 13);
        let path = file(dir.path(), "BF16", (rows, columns), &[0x80, 0x3f]);
        let found = Activations::open(&path, None).unwrap();
        let values = found.read(&[0, rows / 2, rows - 1]).unwrap();
        assert_eq!((values.len(), values[0], values[1]), (3 * columns, 1.0, 0.0));
    }
}
