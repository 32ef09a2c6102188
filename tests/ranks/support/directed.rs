//! Checkpoints and inputs of cases that run on CPUs and on GPUs alike: the same files for both, made once.

use super::checkpoint::Checkpoint;
use super::made::{Choice, S};
use super::safetensors::Tensors;
use super::tensor::Tensor;

/// Case B3: every expert answers in the last of `hidden` columns, by block scales of its own.
pub fn last_column(hidden: usize) -> (S, Checkpoint) {
    let s = S::new(4, hidden, 128).at(0, hidden - 1);
    let mut checkpoint = s.checkpoint();
    for expert in 0..4 {
        checkpoint.of_expert(expert, "down_proj", "weight_scale").set_block_scale(hidden - 1, 0, 0x40);
    }
    (s, checkpoint)
}

/// Case A3: three layers that stand for three kinds of step. All of `num_tokens` go to expert `all_to`; the first four, rank
/// 0's, go to `one_way_to` and the others nowhere; nothing goes anywhere.
pub fn alternating_steps(num_tokens: usize, all_to: usize, one_way_to: usize) -> Tensors {
    let mut choices = Tensors::new();
    Choice::single(vec![all_to; num_tokens]).add_to(&mut choices, "layers.0.", 1);
    let mut one_way = Choice::single([one_way_to; 4]);
    (4..num_tokens).for_each(|_| one_way.push(&[-1], &[0.0]));
    one_way.add_to(&mut choices, "layers.1.", 1);
    Choice::uniform(num_tokens, &[-1], &[0.0]).add_to(&mut choices, "layers.2.", 1);
    choices
}

/// Case C8: activations of 4000 are above what the input scale can hold.
pub fn saturating() -> (S, Checkpoint) {
    let s = S::new(1, 128, 128);
    let mut checkpoint = s.checkpoint();
    for projection in ["gate_proj", "up_proj"] {
        checkpoint.set_scalar(0, projection, "input_scale", 1.0);
        checkpoint.set_scalar(0, projection, "weight_scale_2", 1.0 / 4000.0);
    }
    (s, checkpoint)
}

/// Case C8: scales at the ends of their range, with an input each; all answer 1.
pub fn ends_of_range() -> (S, [(&'static str, Checkpoint, Tensor); 3]) {
    let s = S::new(1, 128, 128);
    let mut largest = s.checkpoint();
    largest.of_expert(0, "down_proj", "weight_scale").set_block_scale(0, 0, 0x7E);
    largest.of_expert(0, "down_proj", "weight").set_code(0, 0, 7);
    largest.set_scalar(0, "down_proj", "weight_scale_2", 1.0 / 2688.0);

    let mut smallest = s.checkpoint();
    smallest.for_each(".weight_scale", |scales| scales.bytes.fill(0x01));
    smallest.scale_scalars("weight_scale_2", 512.0);

    let mut sums = s.checkpoint();
    for projection in ["gate_proj", "up_proj"] {
        for column in 0..128 {
            sums.of_expert(0, projection, "weight").set_code(0, column, 7);
            sums.of_expert(0, projection, "weight_scale").set_block_scale(0, column, 0x7E);
        }
        sums.set_scalar(0, projection, "weight_scale_2", 1.0 / 344_064.0);
    }
    let ones = Tensor::bf16(&[1, 128], &[1.0; 128]);
    let cases = [
        ("block scale 448", largest, s.tokens(1, 1.0)),
        ("block scale 2^-9", smallest, s.tokens(1, 1.0)),
        ("a raw sum of 344064", sums, ones),
    ];
    (s, cases)
}

/// Case H1: slots that give c * 2^25, c, -c * 2^25 and c with weight 1, for five tokens: in their order the sum is c. Backwards
/// it is 0, by expert or by rank about 2 c.
pub fn cancelling_slots() -> (S, Checkpoint, Choice) {
    let s = S::new(4, 128, 128).topk(4).unit_scales();
    let mut checkpoint = s.checkpoint();
    for expert in [2, 3] {
        checkpoint.set_scalar(expert, "down_proj", "weight_scale_2", 2f32.powi(25));
    }
    checkpoint.of_expert(3, "down_proj", "weight").set_code(0, 0, 10);
    (s, checkpoint, Choice::uniform(5, &[2, 0, 3, 1], &[1.0; 4]))
}
