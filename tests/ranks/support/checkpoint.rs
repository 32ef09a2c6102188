//! Checkpoint directories made from scratch: a map of tensors and two config files that a test may bend before writing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::safetensors::{self, Tensors};
use super::tensor::{Tensor, e2m1, e4m3};

/// The three projections of an expert.
pub const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Sizes of a made checkpoint; all its layers are MoE layers.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    pub num_experts: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub num_topk: usize,
    pub num_layers: usize,
}

/// A checkpoint in memory.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub geometry: Geometry,
    pub tensors: Tensors,
    /// `config.json`
    pub config: Value,
    /// `hf_quant_config.json`
    pub quant_config: Value,
}

/// The name of a tensor of an expert.
pub fn expert_tensor(layer: usize, expert: usize, projection: &str, kind: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.{kind}")
}

/// The name of a layer's router weight.
pub fn router_tensor(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.gate.weight")
}

impl Checkpoint {
    /// All codes 0, all block scales 1, all global scales 1, all input scales 1/2688, router 0; softmax routing,
    /// renormalised.
    pub fn blank(geometry: Geometry) -> Self {
        let Geometry { num_experts, hidden, intermediate, num_topk, num_layers } = geometry;
        let mut tensors = Tensors::new();
        for layer in 0..num_layers {
            tensors
                .insert(router_tensor(layer), Tensor::bf16(&[num_experts, hidden], &vec![0.0; num_experts * hidden]));
            for expert in 0..num_experts {
                for projection in PROJECTIONS {
                    let (rows, columns) =
                        if projection == "down_proj" { (hidden, intermediate) } else { (intermediate, hidden) };
                    let name = |kind| expert_tensor(layer, expert, projection, kind);
                    let codes = vec![0; rows * (columns / 2)];
                    tensors.insert(name("weight"), Tensor::u8(&[rows, columns / 2], codes));
                    // A width that is no multiple of 16 is written as a converter would that rounds up: the product has
                    // to refuse it.
                    let blocks = columns.div_ceil(16);
                    let scales = Tensor::e4m3(&[rows, blocks], vec![0x38; rows * blocks]);
                    tensors.insert(name("weight_scale"), scales);
                    tensors.insert(name("weight_scale_2"), Tensor::scalar(1.0));
                    tensors.insert(name("input_scale"), Tensor::scalar(1.0 / 2688.0));
                }
            }
        }
        let excluded: Vec<String> = (0..num_layers).map(|layer| format!("model.layers.{layer}.mlp.gate")).collect();
        Self {
            geometry,
            tensors,
            config: json!({
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "hidden_size": hidden,
                "hidden_act": "silu",
                "moe_intermediate_size": intermediate,
                "num_experts": num_experts,
                "num_experts_per_tok": num_topk,
                "norm_topk_prob": true,
                "num_hidden_layers": num_layers,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "rms_norm_eps": 1e-6,
                "dtype": "bfloat16",
            }),
            quant_config: json!({
                "producer": {"name": "modelopt", "version": "0.47.0"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": null,
                    "group_size": 16,
                    "exclude_modules": excluded,
                },
            }),
        }
    }

    /// A tensor that must be there.
    #[track_caller]
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("the test checkpoint has no {name}"))
    }

    /// A tensor of an expert of layer 0.
    #[track_caller]
    pub fn of_expert(&mut self, expert: usize, projection: &str, kind: &str) -> &mut Tensor {
        self.tensor(&expert_tensor(0, expert, projection, kind))
    }

    /// Sets a global scale of an expert of layer 0.
    #[track_caller]
    pub fn set_scalar(&mut self, expert: usize, projection: &str, kind: &str, value: f32) {
        *self.of_expert(expert, projection, kind) = Tensor::scalar(value);
    }

    /// Applies an edit to every tensor whose name ends with `suffix`.
    pub fn for_each(&mut self, suffix: &str, mut edit: impl FnMut(&mut Tensor)) {
        let mut num_edited = 0;
        for (name, tensor) in &mut self.tensors {
            if name.ends_with(suffix) {
                edit(tensor);
                num_edited += 1;
            }
        }
        assert!(num_edited > 0, "the test checkpoint has no *{suffix}");
    }

    /// Multiplies every scalar whose name ends with `suffix`.
    pub fn scale_scalars(&mut self, suffix: &str, factor: f32) {
        self.for_each(suffix, |scalar| scalar.bytes = (scalar.floats()[0] * factor).to_le_bytes().to_vec());
    }

    /// Removes every tensor whose name ends with `suffix`.
    pub fn remove(&mut self, suffix: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|name, _| !name.ends_with(suffix));
        assert!(self.tensors.len() < before, "the test checkpoint has no *{suffix}");
    }

    /// Renames tensors by replacing a part of their names.
    pub fn rename(&mut self, from: &str, to: &str) {
        assert!(self.tensors.keys().any(|name| name.contains(from)), "the test checkpoint has no *{from}*");
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, tensor)| (name.replace(from, to), tensor)).collect();
    }

    /// Stores one projection's values as a plain bf16 weight, without scales.
    pub fn store_as_bf16(&mut self, layer: usize, expert: usize, projection: &str) {
        let name = |kind| expert_tensor(layer, expert, projection, kind);
        let packed = self.tensor(&name("weight")).clone();
        let scales = self.tensor(&name("weight_scale")).clone();
        let global = self.tensor(&name("weight_scale_2")).floats()[0];
        let (rows, columns) = (packed.shape[0], packed.shape[1] * 2);
        let mut values = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            for column in 0..columns {
                let scale = e4m3(scales.bytes[row * scales.shape[1] + column / 16]);
                values.push(e2m1(packed.code(row, column)) * scale * global);
            }
        }
        for kind in ["weight_scale", "weight_scale_2", "input_scale"] {
            self.tensors.remove(&name(kind));
        }
        self.tensors.insert(name("weight"), Tensor::bf16(&[rows, columns], &values));
    }

    /// Writes the two config files.
    pub fn write_configs(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap_or_else(|error| panic!("cannot create {}: {error}", dir.display()));
        safetensors::write_bytes(&dir.join("config.json"), self.config.to_string().as_bytes());
        safetensors::write_bytes(&dir.join("hf_quant_config.json"), self.quant_config.to_string().as_bytes());
    }

    /// Writes all as `model.safetensors` without an index.
    pub fn write_single(&self, dir: &Path) {
        self.write_configs(dir);
        safetensors::write(&dir.join("model.safetensors"), &self.tensors);
    }

    /// Writes shards of equally many experts each, the rest in the first, with an index.
    pub fn write_shards(&self, dir: &Path, num_shards: usize) {
        self.write_configs(dir);
        let mut weight_map = BTreeMap::new();
        let mut total_size = 0;
        for shard in 0..num_shards {
            let file = shard_name(shard, num_shards);
            let tensors = self.shard(shard, num_shards);
            for (name, tensor) in &tensors {
                weight_map.insert(name.clone(), file.clone());
                total_size += tensor.bytes.len();
            }
            safetensors::write(&dir.join(file), &tensors);
        }
        write_index(dir, &json!({"metadata": {"total_size": total_size}, "weight_map": weight_map}));
    }

    /// The tensors of one shard of [`Checkpoint::write_shards`].
    pub fn shard(&self, shard: usize, num_shards: usize) -> Tensors {
        let of = |name: &str| match expert_of(name) {
            Some(expert) => expert * num_shards / self.geometry.num_experts,
            None => 0,
        };
        self.tensors.iter().filter(|(name, _)| of(name) == shard).map(|(n, t)| (n.clone(), t.clone())).collect()
    }
}

/// The expert whose tensor `name` is.
pub fn expert_of(name: &str) -> Option<usize> {
    name.split_once(".experts.")?.1.split('.').next()?.parse().ok()
}

/// The usual name of a shard, 0-based.
pub fn shard_name(shard: usize, num_shards: usize) -> String {
    format!("model-{:05}-of-{num_shards:05}.safetensors", shard + 1)
}

fn index_path(dir: &Path) -> std::path::PathBuf {
    dir.join("model.safetensors.index.json")
}

fn write_index(dir: &Path, index: &Value) {
    safetensors::write_bytes(&index_path(dir), index.to_string().as_bytes());
}

/// Rewrites the index of a sharded checkpoint.
pub fn edit_index(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let text = fs::read(index_path(dir)).expect("the checkpoint has an index");
    let mut index = serde_json::from_slice(&text).expect("the index is JSON");
    edit(&mut index);
    write_index(dir, &index);
}

/// Deletes the index of a sharded checkpoint.
pub fn delete_index(dir: &Path) {
    fs::remove_file(index_path(dir)).expect("the checkpoint has an index");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Checkpoint {
        Checkpoint::blank(Geometry { num_experts: 4, hidden: 32, intermediate: 16, num_topk: 2, num_layers: 2 })
    }

    #[test]
    fn shards_hold_every_tensor_once_and_the_index_knows_where() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let checkpoint = small();
        checkpoint.write_shards(dir.path(), 3);
        let mut together = Tensors::new();
        for shard in 0..3 {
            together.append(&mut safetensors::read(&dir.path().join(shard_name(shard, 3))));
        }
        assert_eq!(together, checkpoint.tensors);
        edit_index(dir.path(), |index| {
            let map = index["weight_map"].as_object().expect("a map");
            assert_eq!(map.len(), checkpoint.tensors.len());
            assert_eq!(map[&expert_tensor(1, 3, "up_proj", "weight")], shard_name(2, 3));
            assert_eq!(map[&router_tensor(1)], shard_name(0, 3));
        });
    }

    #[test]
    fn edits_reach_what_they_name() {
        let mut checkpoint = small();
        checkpoint.scale_scalars("down_proj.weight_scale_2", 4.0);
        assert_eq!(checkpoint.of_expert(2, "down_proj", "weight_scale_2").floats(), [4.0]);
        assert_eq!(checkpoint.of_expert(2, "up_proj", "weight_scale_2").floats(), [1.0]);
        checkpoint.rename("gate_proj.weight_scale_2", "gate_proj.weight_global_scale");
        assert!(checkpoint.tensors.contains_key("model.layers.0.mlp.experts.0.gate_proj.weight_global_scale"));
        checkpoint.remove("experts.3.up_proj.input_scale");
        assert!(!checkpoint.tensors.contains_key(&expert_tensor(1, 3, "up_proj", "input_scale")));
    }

    #[test]
    fn bf16_storage_keeps_the_values() {
        let mut checkpoint = small();
        checkpoint.of_expert(1, "gate_proj", "weight").set_code(3, 20, 13);
        checkpoint.of_expert(1, "gate_proj", "weight_scale").set_block_scale(3, 20, 0x40);
        checkpoint.set_scalar(1, "gate_proj", "weight_scale_2", 0.5);
        checkpoint.store_as_bf16(0, 1, "gate_proj");
        let weight = checkpoint.of_expert(1, "gate_proj", "weight");
        assert_eq!(weight.shape, [16, 32]);
        let values = weight.floats();
        assert_eq!(values[3 * 32 + 20], -3.0);
        assert_eq!(values.iter().filter(|&&value| value != 0.0).count(), 1);
        assert!(!checkpoint.tensors.contains_key(&expert_tensor(0, 1, "gate_proj", "weight_scale")));
    }
}
