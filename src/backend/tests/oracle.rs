//! An f64 oracle that shares nothing with the backends: own decoding, own rounding, own activation.

use super::{Case, ExpertTensors, Projection, ProjectionData};
use crate::numerics::activation::Activation;

/// What could be done wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    SwapsGateAndUp,
    SharesGateScale,
    TakesAnothersInputScale,
    RoundsToBf16BeforeQuantising,
    LeavesFc2Unquantised,
    DropsLinearBeta,
    RunsSwiglu,
    DropsTokenScale,
    ShiftsExperts,
}

const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e2m1(code: u8) -> f64 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn e4m3(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    if exponent == 0 { mantissa * 2.0_f64.powi(-9) } else { (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7) }
}

/// The code of the nearest of ascending values, ties to the even code, the last beyond it.
fn nearest(x: f32, count: u8, value: impl Fn(u8) -> f64) -> u8 {
    let x = f64::from(x);
    let distance = |code: u8| (value(code) - x).abs();
    (0..count).min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

/// Takes a row through NVFP4, in f32 as the format prescribes, to values with the global scale applied.
pub(super) fn quantise(x: &[f32], input_scale: f32) -> Vec<f64> {
    let inverse = 1.0 / input_scale;
    let mut out = Vec::new();
    for block in x.chunks(16) {
        let amax = block.iter().fold(0.0_f32, |amax, v| amax.max(v.abs()));
        let scale = e4m3(nearest(amax / 6.0 * inverse, 0x7F, e4m3)) as f32;
        for v in block {
            let code = if scale == 0.0 { 0 } else { nearest((v * (inverse / scale)).abs(), 8, e2m1) };
            out.push(e2m1(code).copysign(f64::from(*v)) * f64::from(scale) * f64::from(input_scale));
        }
    }
    out
}

fn weight(projection: &Projection, scale: Option<f32>) -> Vec<f64> {
    let width = projection.in_features;
    let elements = 0..projection.out_features * width;
    match &projection.data {
        ProjectionData::Nvfp4 { packed, block_scales, global_scale, .. } => elements
            .map(|i| {
                let code = packed[i / 2] >> (i % 2 * 4) & 15;
                e2m1(code) * e4m3(block_scales[i / 16]) * f64::from(scale.unwrap_or(*global_scale))
            })
            .collect(),
        ProjectionData::Bf16(bytes) => {
            elements.map(|i| f64::from(f32::from_le_bytes([0, 0, bytes[2 * i], bytes[2 * i + 1]]))).collect()
        }
        ProjectionData::F32(bytes) => {
            elements.map(|i| f64::from(f32::from_le_bytes(bytes[4 * i..][..4].try_into().unwrap()))).collect()
        }
    }
}

pub(super) fn scales(projection: &Projection) -> (Option<f32>, Option<f32>) {
    match &projection.data {
        ProjectionData::Nvfp4 { global_scale, input_scale, .. } => (Some(*global_scale), *input_scale),
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => (None, None),
    }
}

fn products(weight: &[f64], x: &[f64]) -> Vec<f64> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn activation(activation: Activation, fault: Option<Fault>, g: f64, u: f64) -> f64 {
    let sigmoid = 1.0 / (1.0 + (-g).exp());
    match activation {
        Activation::Situ { beta, linear_beta } if fault != Some(Fault::RunsSwiglu) => {
            let limit = |x: f64, limit: f32| f64::from(limit) * (x / f64::from(limit)).tanh();
            let up = match linear_beta {
                Some(linear_beta) if fault != Some(Fault::DropsLinearBeta) => limit(u, linear_beta),
                _ => u,
            };
            limit(g, beta) * sigmoid * up
        }
        _ => g * sigmoid * u,
    }
}

fn expert_row(case: &Case, expert: usize, token: usize, fault: Option<Fault>) -> Vec<f64> {
    let ExpertTensors { gate, up, down } = &case.experts[expert];
    let (gate, up) = if fault == Some(Fault::SwapsGateAndUp) { (up, gate) } else { (gate, up) };
    let token_scale = if fault == Some(Fault::DropsTokenScale) { 1.0 } else { f64::from(case.token_scale) };
    let x: Vec<f64> = case.tokens[token * case.spec.hidden..][..case.spec.hidden]
        .iter()
        .map(|v| f64::from(*v) * token_scale)
        .collect();
    let g = products(&weight(gate, None), &x);
    let up_scale = if fault == Some(Fault::SharesGateScale) { scales(gate).0 } else { None };
    let u = products(&weight(up, up_scale), &x);
    let inner: Vec<f64> = g.iter().zip(&u).map(|(g, u)| activation(case.spec.activation, fault, *g, *u)).collect();
    let inner = if case.spec.quantise_activations && fault != Some(Fault::LeavesFc2Unquantised) {
        let other =
            if fault == Some(Fault::TakesAnothersInputScale) { (expert + 1) % case.experts.len() } else { expert };
        let input_scale = scales(&case.experts[other].down).1.unwrap();
        let rounded: Vec<f32> = inner
            .iter()
            .map(|v| match fault {
                Some(Fault::RoundsToBf16BeforeQuantising) => half::bf16::from_f64(*v).to_f32(),
                _ => *v as f32,
            })
            .collect();
        quantise(&rounded, input_scale)
    } else {
        inner
    };
    products(&weight(down, None), &inner)
}

/// `[num_rows, hidden]`, right or wrong in one way.
pub(super) fn run(case: &Case, fault: Option<Fault>) -> Vec<f32> {
    let mut out = Vec::new();
    for (expert, offsets) in case.expert_offsets.windows(2).enumerate() {
        let expert = if fault == Some(Fault::ShiftsExperts) { (expert + 1) % case.experts.len() } else { expert };
        for token in &case.row_token[offsets[0]..offsets[1]] {
            out.extend(expert_row(case, expert, *token as usize, fault).iter().map(|v| *v as f32));
        }
    }
    out
}
