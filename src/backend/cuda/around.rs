//! What surrounds a layer's routed experts, on the device: hidden states, the router before the experts, the latent
//! projections of models that have them, and what shared experts read.
//!
//! Everything is queued on the session's stream; nothing waits. Results stay where they are until the next step.

mod buffers;

use std::sync::Arc;

use super::super::BackendError;
use super::dense::{Dense, DenseRows, DenseTools, RowCount, Sums};
use super::topk::{Selector, TopkBuffers};
use crate::checkpoint::tensors::{LatentTensors, RouterTensors};
use crate::cuda::DeviceBuffer;
use crate::gpu::grow;
use crate::numerics::nvfp4::BLOCK;
use crate::routing::RoutingMethod;
pub use buffers::{AroundBuffers, Extent};

/// Shapes and methods.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AroundSpec {
    /// How experts are chosen.
    pub method: RoutingMethod,
    /// Routed experts.
    pub num_experts: usize,
    /// Slots a token that the router fills; at most
    /// [`TopkVariant::MAX_NUM_TOPK`](crate::jit::kernels::TopkVariant::MAX_NUM_TOPK).
    pub num_topk: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Epsilon of the norm after the routed sum, where there is one.
    pub norm_eps: Option<f32>,
}

/// The weights.
#[derive(Debug, Clone, Copy)]
pub struct AroundTensors<'a> {
    /// The router.
    pub router: &'a RouterTensors,
    /// The projections around experts that work in a latent.
    pub latent: Option<&'a LatentTensors>,
}

/// The weights of a layer on the device.
pub struct Around {
    tools: Arc<DenseTools>,
    spec: AroundSpec,
    gate: Dense,
    bias: Option<DeviceBuffer<f32>>,
    selector: Selector,
    latent: Option<Latent>,
}

struct Latent {
    down: Dense,
    up: Dense,
    width: usize,
    norm: Option<(DeviceBuffer<f32>, f32)>,
}

impl Around {
    /// Uploads the weights.
    ///
    /// # Errors
    /// If a shape or format is not one that the device computes, or memory or a kernel is missing.
    pub fn new(tools: &Arc<DenseTools>, spec: AroundSpec, tensors: AroundTensors<'_>) -> Result<Self, BackendError> {
        let gpu = tools.gpu();
        let bias = tensors.router.bias.as_deref().map(|bias| DeviceBuffer::from_slice(gpu.stream(), bias));
        let latent = tensors.latent.map(|latent| Latent::new(tools, latent, spec.norm_eps));
        Ok(Self {
            tools: tools.clone(),
            spec,
            gate: Dense::new(tools, &tensors.router.weight, Sums::Careful)?,
            bias: bias.transpose()?,
            selector: Selector::new(gpu, (spec.method, spec.num_experts, spec.num_topk))?,
            latent: latent.transpose()?,
        })
    }

    /// Bytes of the weights.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let latent = self.latent.as_ref().map_or(0, |latent| latent.down.weight_bytes() + latent.up.weight_bytes());
        self.gate.weight_bytes() + latent
    }

    /// What computes the dense projections, for the report.
    #[must_use]
    pub fn computed_by(&self) -> Vec<(&'static str, String)> {
        let latent = self
            .latent
            .iter()
            .flat_map(|latent| [("latent_down", latent.down.computed_by()), ("latent_up", latent.up.computed_by())]);
        [("router", self.gate.computed_by())].into_iter().chain(latent).collect()
    }

    /// Chooses experts: logits in fp32, then the model's method.
    ///
    /// # Errors
    /// If there is no room, or a launch is refused.
    pub fn route(&self, buffers: &mut AroundBuffers) -> Result<(), BackendError> {
        let AroundSpec { num_experts, num_topk, .. } = self.spec;
        let rows = buffers.rows();
        let AroundBuffers { extent: Extent { room, .. }, logits, ids, weights, .. } = buffers;
        grow(logits, *room * num_experts)?;
        grow(ids, *room * num_topk)?;
        grow(weights, *room * num_topk)?;
        // SAFETY: `upload` has put the rows there, and there is room for every token's logits.
        unsafe { self.gate.queue(rows, logits.address())? };
        let of_tokens = TopkBuffers { logits, bias: self.bias.as_ref(), ids, weights };
        let RowCount { most, live } = rows.count;
        self.selector.queue(self.tools.gpu().stream(), of_tokens, (most, live))?;
        buffers.num_topk = num_topk;
        Ok(())
    }

    /// Makes what routed experts read, f32 `[num_tokens, width]`: the latent, or the hidden states of models without one.
    ///
    /// # Errors
    /// If there is no room, or a launch is refused.
    pub fn values(&self, buffers: &mut AroundBuffers) -> Result<(), BackendError> {
        let Some(latent) = &self.latent else { return self.widen(buffers) };
        let rows = buffers.first_part();
        grow(&mut buffers.latent, buffers.extent.room * latent.width)?;
        // SAFETY: `upload` has put the rows there, and there is room for every token's latent.
        unsafe { latent.down.queue(rows, buffers.latent.address()) }
    }

    /// What [`Self::values`] has made.
    #[must_use]
    pub fn made_values<'a>(&self, buffers: &'a AroundBuffers) -> &'a DeviceBuffer<f32> {
        if self.latent.is_some() { &buffers.latent } else { &buffers.plain }
    }

    /// Routed sums `[num_tokens, width]` through norm and `up` into `out` `[num_tokens, hidden]`, which grows. What `up`
    /// reads is rounded to bf16. False, and nothing done, of models without a latent.
    ///
    /// # Errors
    /// If there is no room, or a launch is refused.
    ///
    /// # Panics
    /// If there are fewer sums than tokens, which is a bug of the caller.
    pub fn up(
        &self,
        buffers: &mut AroundBuffers,
        routed: &DeviceBuffer<f32>,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<bool, BackendError> {
        let Some(latent) = &self.latent else { return Ok(false) };
        let (count, room) = (buffers.count(), buffers.extent.room);
        assert!(routed.len() >= room * latent.width, "a routed sum for every token");
        grow(&mut buffers.normed, room * latent.width)?;
        grow(out, room * self.spec.hidden)?;
        let rows = DenseRows { address: buffers.normed.address(), num_parts: 1, count };
        let input = routed.address();
        match &latent.norm {
            Some((weight, epsilon)) => {
                // SAFETY: both have room for every token's latent; freeing the caller's buffer waits for the work.
                unsafe { self.tools.norm((input, rows.address), count, (weight, *epsilon))? };
            }
            // SAFETY: as above.
            None => unsafe { self.tools.split(input, rows, latent.width)? },
        }
        // SAFETY: the rows have just been queued, and there is room for every token.
        unsafe { latent.up.queue(rows, out.address())? };
        Ok(true)
    }

    /// What shared experts read: bf16 `[num_tokens, hidden]`, through NVFP4 where they have an `input_scale`; and the token
    /// of each row, which is its own number.
    ///
    /// # Errors
    /// If there is no room, or a launch is refused.
    pub fn shared_tokens<'a>(
        &self,
        buffers: &'a mut AroundBuffers,
        input_scale: Option<f32>,
    ) -> Result<(&'a DeviceBuffer<u16>, &'a DeviceBuffer<u32>), BackendError> {
        let hidden = self.spec.hidden;
        buffers.number_rows(&self.tools)?;
        let Some(input_scale) = input_scale else { return Ok((&buffers.hidden, &buffers.row_token)) };
        self.widen(buffers)?;
        grow(&mut buffers.quantised, buffers.extent.room * hidden)?;
        let (values, rows) = ((buffers.plain.address(), buffers.quantised.address()), (buffers.count(), hidden));
        // SAFETY: both have room for every token, and there are two counts.
        unsafe { self.tools.quantise(values, rows, (input_scale, &buffers.counts))? };
        Ok((&buffers.quantised, &buffers.row_token))
    }

    /// Where the shared experts' rows start and end, u32 `[2]`: those of the tokens that there are.
    #[must_use]
    pub fn shared_offsets<'a>(&self, buffers: &'a AroundBuffers) -> &'a DeviceBuffer<u32> {
        &buffers.shared_offsets
    }

    /// What [`Self::shared_tokens`] has made, once more.
    #[must_use]
    pub fn made_shared_tokens<'a>(
        &self,
        buffers: &'a AroundBuffers,
        is_quantised: bool,
    ) -> (&'a DeviceBuffer<u16>, &'a DeviceBuffer<u32>) {
        (if is_quantised { &buffers.quantised } else { &buffers.hidden }, &buffers.row_token)
    }

    /// Values of as many tokens as there is room for.
    #[must_use]
    pub fn num_room_values(&self, buffers: &AroundBuffers) -> usize {
        buffers.extent.room * self.spec.hidden
    }

    /// Blocks of NVFP4 that a step's hidden states are.
    #[must_use]
    pub fn num_blocks(&self, buffers: &AroundBuffers) -> u64 {
        (buffers.num_tokens * self.spec.hidden / BLOCK) as u64
    }

    /// Queues `out += other`, for every token's `hidden` values.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If either is shorter, which is a bug of the caller.
    pub fn add(
        &self,
        buffers: &AroundBuffers,
        out: &mut DeviceBuffer<f32>,
        other: &DeviceBuffer<f32>,
    ) -> Result<(), BackendError> {
        let hidden = self.spec.hidden;
        assert!(out.len().min(other.len()) >= buffers.extent.room * hidden, "a row for every token");
        // SAFETY: both have as many values, and outlive the work: freeing a buffer waits for it.
        unsafe { self.tools.add((out.address(), other.address()), (buffers.count(), hidden)) }
    }

    /// Makes f32 hidden states of bf16 ones, unless they are there.
    fn widen(&self, buffers: &mut AroundBuffers) -> Result<(), BackendError> {
        if !buffers.has_plain {
            let hidden = self.spec.hidden;
            grow(&mut buffers.plain, buffers.extent.room * hidden)?;
            let values = (buffers.hidden.address(), buffers.plain.address());
            // SAFETY: both have room for every token.
            unsafe { self.tools.widen(values, (buffers.count(), hidden))? };
            buffers.has_plain = true;
        }
        Ok(())
    }
}

impl Latent {
    fn new(tools: &Arc<DenseTools>, tensors: &LatentTensors, norm_eps: Option<f32>) -> Result<Self, BackendError> {
        let norm = match tensors.norm.as_deref().zip(norm_eps) {
            Some((weight, epsilon)) => Some((DeviceBuffer::from_slice(tools.gpu().stream(), weight)?, epsilon)),
            None => None,
        };
        Ok(Self {
            down: Dense::new(tools, &tensors.down, Sums::Fast)?,
            up: Dense::new(tools, &tensors.up, Sums::Fast)?,
            width: tensors.down.out_features,
            norm,
        })
    }
}
