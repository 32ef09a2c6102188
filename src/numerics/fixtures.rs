//! The expected values kept under `tests/fixtures`, for the tests of the pure modules.
//!
//! Compiled for tests alone; the bytes are part of the test binary, so that no test depends on where it is run.

use safetensors::SafeTensors;
use serde_json::Value;

/// `expected/routing.safetensors`
pub(crate) const ROUTING: &[u8] = include_bytes!("../../tests/fixtures/expected/routing.safetensors");
/// `expected/nvfp4_quantize.safetensors`
pub(crate) const NVFP4_QUANTIZE: &[u8] = include_bytes!("../../tests/fixtures/expected/nvfp4_quantize.safetensors");
/// A checkpoint written by ModelOpt.
pub(crate) const QWEN3_TINY: &[u8] = include_bytes!("../../tests/fixtures/modelopt-qwen3-tiny/model.safetensors");

/// `expected/activation.json`
pub(crate) fn activation() -> Value {
    serde_json::from_slice(include_bytes!("../../tests/fixtures/expected/activation.json")).unwrap()
}

/// A list of `expected/formats.json`, by the path to it.
pub(crate) fn formats_optional_u32(path: &[&str]) -> Vec<Option<u32>> {
    let root: Value = serde_json::from_slice(include_bytes!("../../tests/fixtures/expected/formats.json")).unwrap();
    let list = path.iter().fold(&root, |value, key| &value[key]);
    let list = list.as_array().unwrap_or_else(|| panic!("formats.json has a list {path:?}"));
    list.iter().map(|v| v.as_u64().map(|v| u32::try_from(v).unwrap())).collect()
}

/// A list of `expected/formats.json` without nulls.
pub(crate) fn formats_u32(path: &[&str]) -> Vec<u32> {
    formats_optional_u32(path).into_iter().map(Option::unwrap).collect()
}

/// Tensors of one file, read as the type that the test wants.
pub(crate) struct Tensors<'a>(pub SafeTensors<'a>);

impl<'a> Tensors<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(SafeTensors::deserialize(bytes).unwrap())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.tensor(name).is_ok()
    }

    pub(crate) fn shape(&self, name: &str) -> Vec<usize> {
        self.0.tensor(name).unwrap().shape().to_vec()
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
    }

    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }

    pub(crate) fn i32(&self, name: &str) -> Vec<i32> {
        self.bytes(name).as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect()
    }

    pub(crate) fn bf16(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
    }
}

/// The metadata entry of a file, as JSON.
pub(crate) fn metadata(bytes: &[u8], key: &str) -> Value {
    let (_, metadata) = SafeTensors::read_metadata(bytes).unwrap();
    serde_json::from_str(&metadata.metadata().as_ref().unwrap()[key]).unwrap()
}

/// Fails at the first element whose bits differ, naming its index.
pub(crate) fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
        assert!(same, "{what}: element {i} is {g:e}, expected {e:e}");
    }
}
