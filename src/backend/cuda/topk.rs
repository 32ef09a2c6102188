//! Router logits to experts and weights on the device, as `src/routing` chooses them.

use super::super::BackendError;
use crate::cuda::{DeviceBuffer, Function, LaunchShape, Stream};
use crate::gpu::Gpu;
use crate::jit::kernels::{TopkArgs, TopkVariant};
use crate::routing::RoutingMethod;

/// Chooses the experts of tokens.
pub struct Selector {
    function: Function,
    num_experts: usize,
    num_topk: usize,
    most_blocks: u32,
}

/// What is read, and what is written for every token.
#[derive(Debug)]
pub struct TopkBuffers<'a> {
    /// `[num_tokens, num_experts]`
    pub logits: &'a DeviceBuffer<f32>,
    /// `[num_experts]` what takes part in the choice.
    pub bias: Option<&'a DeviceBuffer<f32>>,
    /// `[num_tokens, num_topk]`
    pub ids: &'a mut DeviceBuffer<i32>,
    /// `[num_tokens, num_topk]`
    pub weights: &'a mut DeviceBuffer<f32>,
}

impl Selector {
    /// For a method, a number of experts, and slots a token.
    ///
    /// # Errors
    /// If there is no such kernel.
    pub fn new(
        gpu: &Gpu,
        (method, num_experts, num_topk): (RoutingMethod, usize, usize),
    ) -> Result<Self, BackendError> {
        let narrow = |width, found| u32::try_from(found).map_err(|_| BackendError::Width { width, found });
        let variant = TopkVariant {
            method,
            num_experts: narrow("num_experts", num_experts)?,
            num_topk: narrow("num_topk", num_topk)?,
        };
        let function = gpu.module(variant.request(gpu.arch()))?.function(TopkVariant::FUNCTION)?;
        Ok(Self { function, num_experts, num_topk, most_blocks: gpu.device().facts().num_multiprocessors * 8 })
    }

    /// Queues the choice for `num_tokens` tokens, or for as many of them as the u32 at `live` says, unless that is 0.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If a buffer is too short, which is a bug of the caller.
    pub fn queue(
        &self,
        stream: &Stream,
        buffers: TopkBuffers<'_>,
        (num_tokens, live): (usize, u64),
    ) -> Result<(), BackendError> {
        let TopkBuffers { logits, bias, ids, weights } = buffers;
        assert!(logits.len() >= num_tokens * self.num_experts, "a logit for every token and expert");
        assert!(bias.is_none_or(|bias| bias.len() == self.num_experts), "a bias for every expert");
        assert!(ids.len().min(weights.len()) >= num_tokens * self.num_topk, "room for every slot");
        let args = TopkArgs {
            logits: logits.address(),
            bias: bias.map_or(0, DeviceBuffer::address),
            idx: ids.address(),
            weights: weights.address(),
            live_tokens: live,
            num_tokens: num_tokens as u64,
        };
        let num_blocks = num_tokens.div_ceil(TopkVariant::NUM_THREADS as usize / 32);
        let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX).min(self.most_blocks);
        let shape = LaunchShape::rows(num_blocks, TopkVariant::NUM_THREADS);
        // SAFETY: the assertions above; freeing a buffer waits for the work that uses it.
        unsafe { self.function.launch(stream, &shape, &args)? };
        Ok(())
    }
}
