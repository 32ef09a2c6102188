//! Small checkpoints for tests, their safetensors bytes written by hand so that headers can lie.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Checkpoint, CheckpointError, LayerManifest};
use crate::ids::{ExpertIdx, LayerIdx};

/// A tensor as it will be written, whatever it claims.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

impl Tensor {
    pub(super) fn new(dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    pub(super) fn scalar(value: f32) -> Self {
        Self::new("F32", &[], value.to_le_bytes().to_vec())
    }

    /// One value everywhere.
    pub(super) fn bf16(shape: &[usize], value: f32) -> Self {
        let one = half::bf16::from_f32(value).to_le_bytes();
        Self::new("BF16", shape, one.repeat(shape.iter().product()))
    }
}

/// The bytes of a safetensors file in the order given.
pub(super) fn safetensors<'a>(tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        let offsets = [begin, data.len()];
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
        entries.push(format!("{}:{entry}", Value::from(name.as_str())));
    }
    with_header(&format!("{{{}}}", entries.join(",")), &data)
}

/// A file of any header and any data.
pub(super) fn with_header(json: &str, data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), data].concat()
}

/// A checkpoint in memory, to be bent and written.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) tensors: BTreeMap<String, Tensor>,
    pub(super) config: Value,
    pub(super) quant: Option<Value>,
}

/// The sizes of a sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) layers: usize,
    pub(super) experts: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
}

impl Sample {
    /// One layer of the cases' fixture S: all zero but gate[0, 0], up[0, 0] and down[0, 0], which are 1; down's global scale of
    /// expert e is 2^e.
    pub(super) fn s(experts: usize, hidden: usize, intermediate: usize) -> Self {
        Self::of(Size { layers: 1, experts, hidden, intermediate }, "model.")
    }

    pub(super) fn of(size: Size, prefix: &str) -> Self {
        let Size { layers, experts, hidden, intermediate } = size;
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_experts": experts,
            "num_experts_per_tok": 1, "moe_intermediate_size": intermediate, "norm_topk_prob": true, "hidden_act": "situ",
            "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        });
        let quant = json!({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*.gate"]}});
        let mut sample = Self { tensors: BTreeMap::new(), config, quant: Some(quant) };
        for layer in 0..layers {
            let block = format!("{prefix}layers.{layer}.mlp");
            sample.tensors.insert(format!("{block}.gate.weight"), Tensor::bf16(&[experts, hidden], 0.0));
            for expert in 0..experts {
                let module = |name| format!("{block}.experts.{expert}.{name}");
                sample.nvfp4(&module("gate_proj"), [intermediate, hidden], 1.0);
                sample.nvfp4(&module("up_proj"), [intermediate, hidden], 1.0);
                sample.nvfp4(
                    &module("down_proj"),
                    [hidden, intermediate],
                    2.0_f32.powi(i32::try_from(expert).unwrap()),
                );
            }
        }
        sample
    }

    /// Puts an NVFP4 projection whose first element is 1 times the global scale.
    pub(super) fn nvfp4(&mut self, module: &str, [out, inner]: [usize; 2], global_scale: f32) {
        let mut packed = vec![0; out * (inner / 2)];
        packed[0] = 0x02;
        let mut put = |part: &str, tensor| self.tensors.insert(format!("{module}.{part}"), tensor);
        put("weight", Tensor::new("U8", &[out, inner / 2], packed));
        put("weight_scale", Tensor::new("F8_E4M3", &[out, inner / 16], vec![0x38; out * (inner / 16)]));
        put("weight_scale_2", Tensor::scalar(global_scale));
        put("input_scale", Tensor::scalar(1.0 / 2688.0));
    }

    /// Replaces an NVFP4 projection by bf16 of the same shape and values.
    pub(super) fn make_bf16(&mut self, module: &str) {
        let packed = self.tensors.remove(&format!("{module}.weight")).unwrap();
        let shape = [packed.shape[0], packed.shape[1] * 2];
        let scale = f32::from_le_bytes(self.tensors[&format!("{module}.weight_scale_2")].bytes[..].try_into().unwrap());
        for part in ["weight_scale", "weight_scale_2", "input_scale"] {
            self.tensors.remove(&format!("{module}.{part}")).unwrap();
        }
        let mut weight = Tensor::bf16(&shape, 0.0);
        weight.bytes[..2].copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes());
        self.tensors.insert(format!("{module}.weight"), weight);
    }

    pub(super) fn exclude(&mut self, pattern: &str) {
        let quant = self.quant.as_mut().unwrap();
        quant["quantization"]["exclude_modules"].as_array_mut().unwrap().push(json!(pattern));
    }

    pub(super) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("the sample has no {name}"))
    }

    /// Removes the tensors whose name contains `part`.
    pub(super) fn remove(&mut self, part: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|name, _| !name.contains(part));
        assert_ne!(self.tensors.len(), before, "no tensor was named like {part}");
    }

    pub(super) fn write_configs(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if let Some(quant) = &self.quant {
            std::fs::write(dir.join("hf_quant_config.json"), quant.to_string()).unwrap();
        }
    }

    /// One file without an index.
    pub(super) fn write(&self) -> Dir {
        let dir = Dir::new();
        self.write_configs(dir.path());
        dir.put("model.safetensors", &safetensors(&self.tensors));
        dir
    }

    /// Two files with an index: the second holds every other expert.
    pub(super) fn write_two_shards(&self) -> Dir {
        let dir = Dir::new();
        self.write_configs(dir.path());
        let of_second = |name: &str| {
            let number =
                name.split_once(".experts.").and_then(|(_, rest)| rest.split_once('.')).map(|(number, _)| number);
            number.is_some_and(|number| number.parse::<u32>().unwrap() % 2 == 1)
        };
        dir.put(FIRST, &safetensors(self.tensors.iter().filter(|(name, _)| !of_second(name))));
        dir.put(SECOND, &safetensors(self.tensors.iter().filter(|(name, _)| of_second(name))));
        let file = |name: &String| if of_second(name) { SECOND } else { FIRST };
        let map: BTreeMap<_, _> = self.tensors.keys().map(|name| (name, file(name))).collect();
        dir.put(INDEX, json!({"metadata": {}, "weight_map": map}).to_string().as_bytes());
        dir
    }
}

pub(super) const FIRST: &str = "model-00001-of-00002.safetensors";
pub(super) const SECOND: &str = "model-00002-of-00002.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// A directory that goes away with the test.
#[derive(Debug)]
pub(super) struct Dir(tempfile::TempDir);

impl Dir {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(super) fn put(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.file(name), bytes).unwrap();
    }

    pub(super) fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).unwrap()
    }
}

/// Loads everything a rank that owns all experts would load.
pub(super) fn load_all(dir: &Path) -> Result<(Checkpoint, Vec<LayerManifest>), CheckpointError> {
    let checkpoint = Checkpoint::open(dir)?;
    let layers: Vec<_> =
        checkpoint.moe_layers().into_iter().map(|layer| checkpoint.layer(layer)).collect::<Result<_, _>>()?;
    for manifest in &layers {
        checkpoint.read_router(manifest)?;
        checkpoint.read_shared(manifest)?;
        checkpoint.read_latent(manifest)?;
        for expert in 0..manifest.experts.len() {
            checkpoint.read_expert(manifest, ExpertIdx::from_index(expert))?;
        }
    }
    Ok((checkpoint, layers))
}

/// The only layer of a sample that loads.
#[track_caller]
pub(super) fn loads(dir: &Path) -> (Checkpoint, LayerManifest) {
    let (checkpoint, mut layers) = load_all(dir).unwrap_or_else(|error| panic!("should load: {}", chain(&error)));
    (checkpoint, layers.remove(0))
}

/// Loading fails with a message that holds all of `words`.
#[track_caller]
pub(super) fn refused(dir: &Path, words: &[&str]) -> CheckpointError {
    let error = load_all(dir).err().unwrap_or_else(|| panic!("should be refused, naming {words:?}"));
    let message = chain(&error);
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    error
}

/// The layer's manifest is refused already, from headers alone.
#[track_caller]
pub(super) fn refused_by_headers(dir: &Path, layer: u32, words: &[&str]) {
    let checkpoint = Checkpoint::open(dir).unwrap_or_else(|error| panic!("should open: {}", chain(&error)));
    let error =
        checkpoint.layer(LayerIdx(layer)).err().unwrap_or_else(|| panic!("should be refused, naming {words:?}"));
    let message = chain(&error);
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    assert_eq!(checkpoint.bytes_read(), super::BytesRead::default(), "headers should have been enough");
}

/// An error and its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
