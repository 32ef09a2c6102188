//! The made checkpoints of the tests, their inputs and routing choices: fixture S, whose answers are known by hand, and
//! seeded random weights.

use super::checkpoint::{Checkpoint, Geometry, PROJECTIONS, expert_tensor, router_tensor};
use super::safetensors::Tensors;
use super::tensor::Tensor;

/// What one token of value 1 becomes on expert 0 of S, in bf16, whether or not activations are quantised.
pub const S_ANSWER: f64 = 0.714_843_75;
/// The same before it is rounded, with unquantised activations: `situ(1, 1)` at 4 and 25.
pub const S_ANSWER_W4A16: f64 = 0.715_817_83;
/// The same before it is rounded, with quantised activations.
pub const S_ANSWER_W4A4: f64 = 0.714_285_73;

/// Fixture S: one live weight a projection, at `gate[i0, h0]`, `up[i0, h0]` and `down[h0, i0]`, all 1.0, expert `e`'s
/// down scaled by 2^e. A token with 1 at `h0` comes out as `c * sum of p_j * 2^(e_j)` at `h0` and 0 elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct S {
    pub geometry: Geometry,
    pub i0: usize,
    pub h0: usize,
    unit_scales: bool,
}

impl S {
    /// Top-1, one layer, everything at row and column 0.
    pub fn new(num_experts: usize, hidden: usize, intermediate: usize) -> Self {
        let geometry = Geometry { num_experts, hidden, intermediate, num_topk: 1, num_layers: 1 };
        Self { geometry, i0: 0, h0: 0, unit_scales: false }
    }

    pub fn topk(mut self, num_topk: usize) -> Self {
        self.geometry.num_topk = num_topk;
        self
    }

    pub fn layers(mut self, num_layers: usize) -> Self {
        self.geometry.num_layers = num_layers;
        self
    }

    pub fn at(mut self, i0: usize, h0: usize) -> Self {
        (self.i0, self.h0) = (i0, h0);
        self
    }

    /// Every expert's down `weight_scale_2` is 1, so that all experts answer alike.
    pub fn unit_scales(mut self) -> Self {
        self.unit_scales = true;
        self
    }

    pub fn checkpoint(self) -> Checkpoint {
        let mut checkpoint = Checkpoint::blank(self.geometry);
        for layer in 0..self.geometry.num_layers {
            for expert in 0..self.geometry.num_experts {
                for projection in PROJECTIONS {
                    let (row, column) = if projection == "down_proj" { (self.h0, self.i0) } else { (self.i0, self.h0) };
                    checkpoint.tensor(&expert_tensor(layer, expert, projection, "weight")).set_code(row, column, 2);
                }
                if !self.unit_scales {
                    let exponent = i32::try_from(expert).expect("few experts");
                    let scale = Tensor::scalar(2f32.powi(exponent));
                    *checkpoint.tensor(&expert_tensor(layer, expert, "down_proj", "weight_scale_2")) = scale;
                }
            }
        }
        checkpoint
    }

    /// `num_tokens` tokens with `value` at `h0`.
    pub fn tokens(self, num_tokens: usize, value: f32) -> Tensor {
        let hidden = self.geometry.hidden;
        let mut values = vec![0.0; num_tokens * hidden];
        values.iter_mut().skip(self.h0).step_by(hidden).for_each(|x| *x = value);
        Tensor::bf16(&[num_tokens, hidden], &values)
    }
}

/// A router's choice for every token, for `--topk`.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    ids: Vec<Vec<i64>>,
    weights: Vec<Vec<f32>>,
}

impl Choice {
    /// One row a token.
    pub fn new(rows: &[(&[i64], &[f32])]) -> Self {
        let mut choice = Self::default();
        for (ids, weights) in rows {
            choice.push(ids, weights);
        }
        choice
    }

    /// The same row for every token.
    pub fn uniform(num_tokens: usize, ids: &[i64], weights: &[f32]) -> Self {
        Self { ids: vec![ids.to_vec(); num_tokens], weights: vec![weights.to_vec(); num_tokens] }
    }

    /// Top-1 with weight 1: one expert a token.
    pub fn single(experts: impl IntoIterator<Item = usize>) -> Self {
        let ids: Vec<Vec<i64>> = experts.into_iter().map(|e| vec![i64::try_from(e).expect("small")]).collect();
        Self { weights: vec![vec![1.0]; ids.len()], ids }
    }

    pub fn push(&mut self, ids: &[i64], weights: &[f32]) {
        assert_eq!(ids.len(), weights.len());
        self.ids.push(ids.to_vec());
        self.weights.push(weights.to_vec());
    }

    /// Adds `topk_idx` (I64) and `topk_weights` under a prefix (`""` or `layers.N.`).
    pub fn add_to(&self, tensors: &mut Tensors, prefix: &str, num_topk: usize) {
        let shape = [self.ids.len(), num_topk];
        tensors.insert(format!("{prefix}topk_idx"), Tensor::i64(&shape, &self.ids.concat()));
        tensors.insert(format!("{prefix}topk_weights"), Tensor::f32(&shape, &self.weights.concat()));
    }

    /// The tensors of a file for all layers, ids as I64.
    pub fn tensors(&self) -> Tensors {
        self.tensors_of(self.ids.first().map_or(1, Vec::len))
    }

    /// The same; a choice of no tokens still has a width.
    pub fn tensors_of(&self, num_topk: usize) -> Tensors {
        let mut tensors = Tensors::new();
        self.add_to(&mut tensors, "", num_topk);
        tensors
    }

    /// The same with ids as I32, as the expected files hold them.
    pub fn tensors_i32(&self) -> Tensors {
        let mut tensors = self.tensors();
        let ids = &tensors["topk_idx"];
        let narrow: Vec<i32> = ids.integers().iter().map(|&id| i32::try_from(id).expect("a small id")).collect();
        let narrow = Tensor::i32(&ids.shape, &narrow);
        tensors.insert("topk_idx".into(), narrow);
        tensors
    }
}

/// A small deterministic generator (splitmix64), so that a seed gives the same checkpoint on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1, with few enough bits to be exact in f32.
    pub fn unit(&mut self) -> f32 {
        let top = u16::try_from(self.bits() >> 48).expect("sixteen bits");
        f32::from(top) / 32768.0 - 1.0
    }

    /// `[num_rows, num_columns]` uniform values in -scale..scale, as bf16.
    pub fn matrix(&mut self, num_rows: usize, num_columns: usize, scale: f32) -> Tensor {
        let values: Vec<f32> = (0..num_rows * num_columns).map(|_| self.unit() * scale).collect();
        Tensor::bf16(&[num_rows, num_columns], &values)
    }
}

/// A checkpoint of random codes and block scales, whose pre-activations have a standard deviation near 1.5 for inputs
/// uniform in -1..1: large enough to tell activations apart. Every scalar differs by expert and projection.
pub fn random_checkpoint(geometry: Geometry, seed: u64) -> Checkpoint {
    let mut random = Random::new(seed);
    let mut checkpoint = Checkpoint::blank(geometry);
    for layer in 0..geometry.num_layers {
        *checkpoint.tensor(&router_tensor(layer)) = random.matrix(geometry.num_experts, geometry.hidden, 0.3);
    }
    for (name, tensor) in &mut checkpoint.tensors {
        if !name.contains(".experts.") {
            continue;
        }
        let Some((_, kind)) = name.rsplit_once('.') else { continue };
        // Codes have a standard deviation of 3, block scales 1 to 2 a mean of 1.5, inputs 0.58.
        let fan_in = if name.contains("down_proj") { geometry.intermediate } else { geometry.hidden };
        let spread = [0.5, 1.0, 2.0][usize::try_from(random.bits() % 3).expect("small")];
        #[expect(clippy::cast_precision_loss, reason = "a layer's width is far below 2^24")]
        let global = 1.5 / (3.0 * 1.5 * 0.58 * (fan_in as f32).sqrt());
        match kind {
            "weight" => tensor.bytes.iter_mut().for_each(|byte| *byte = random.bits().to_le_bytes()[7]),
            "weight_scale" => {
                tensor.bytes.iter_mut().for_each(|bits| *bits = 0x38 + (random.bits().to_le_bytes()[7] & 7));
            }
            "weight_scale_2" => tensor.bytes = (global * spread).to_le_bytes().to_vec(),
            "input_scale" => {
                let largest = if name.contains("down_proj") { 32.0 } else { 4.0 };
                tensor.bytes = (spread * largest / 2688.0).to_le_bytes().to_vec();
            }
            other => panic!("unexpected tensor kind {other}"),
        }
    }
    checkpoint
}

#[cfg(test)]
mod tests {
    use super::super::compare::situ;
    use super::super::tensor::e2m1;
    use super::*;

    #[test]
    fn s_answers_are_the_activation_s_values() {
        assert!((situ(1.0, 1.0, 4.0, Some(25.0)) - S_ANSWER_W4A16).abs() < 5e-9);
        // FC2's input with input_scale 1/2688: the block scale is e4m3(c / 6 * 2688) = 320, the code 6.
        assert!((6.0 * 320.0 / 2688.0 - S_ANSWER_W4A4).abs() < 5e-8);
        for exact in [S_ANSWER_W4A16, S_ANSWER_W4A4] {
            assert_eq!(half::bf16::from_f64(exact).to_f64(), S_ANSWER);
        }
    }

    #[test]
    fn s_has_one_live_weight_a_projection() {
        let mut checkpoint = S::new(3, 32, 48).at(5, 17).checkpoint();
        for expert in 0..3 {
            for (projection, row, column) in [("gate_proj", 5, 17), ("up_proj", 5, 17), ("down_proj", 17, 5)] {
                let weight = checkpoint.of_expert(expert, projection, "weight");
                assert_eq!(e2m1(weight.code(row, column)), 1.0);
                assert_eq!(weight.bytes.iter().filter(|&&byte| byte != 0).count(), 1);
            }
        }
        assert_eq!(checkpoint.of_expert(2, "down_proj", "weight_scale_2").floats(), [4.0]);
        assert_eq!(S::new(3, 32, 48).at(5, 17).tokens(2, 3.0).floats()[32 + 17], 3.0);
    }

    #[test]
    fn choices_write_both_integer_widths() {
        let choice = Choice::new(&[(&[1, -1], &[0.5, 0.25]), (&[0, 3], &[1.0, 2.0])]);
        let (wide, narrow) = (choice.tensors(), choice.tensors_i32());
        assert_eq!(wide["topk_idx"].integers(), [1, -1, 0, 3]);
        assert_eq!(narrow["topk_idx"].integers(), wide["topk_idx"].integers());
        assert_eq!(wide["topk_weights"].shape, [2, 2]);
    }

    #[test]
    fn random_weights_are_seeded() {
        let geometry = Geometry { num_experts: 2, hidden: 32, intermediate: 16, num_topk: 1, num_layers: 1 };
        let (one, two) = (random_checkpoint(geometry, 7).tensors, random_checkpoint(geometry, 7).tensors);
        assert_eq!(one, two);
        assert_ne!(one, random_checkpoint(geometry, 8).tensors);
    }
}
