//! The gated activations of the expert MLPs.

/// A validated activation: its constants are finite and greater than zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `g * sigmoid(g) * u`
    Swiglu,
    /// SwiGLU of `min(g, limit)` and `clamp(u, -limit, limit)`.
    SwigluClamp {
        /// Finite, > 0.
        limit: f32,
    },
    /// `beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)`; without `linear_beta` the last factor is `u`.
    Situ {
        /// Finite, > 0.
        beta: f32,
        /// Finite, > 0.
        linear_beta: Option<f32>,
    },
}
