//! What surrounds routed experts on a GPU, against the host. Needs a GPU and NVRTC, and for half of it cublasLt.

use std::sync::Arc;

use super::super::cuda::{
    Around, AroundBuffers, AroundSpec, AroundTensors, DenseBy, DenseTools, GatedDense, Selector, TopkBuffers,
};
use super::super::{ExpertBatch, ExpertsSpec};
use super::{Format, Random, SITU, assert_same_bits, expert, projection, reference};
use crate::checkpoint::tensors::{LatentTensors, Projection, RouterTensors};
use crate::cuda::{DeviceBuffer, blas};
use crate::gpu::{Gpu, Kernels};
use crate::numerics::activation::Activation;
use crate::numerics::fixtures::{self, Tensors};
use crate::numerics::metrics::compare;
use crate::numerics::nvfp4;
use crate::routing::{self, RoutingMethod, TopK};
use crate::select::tactics::Tactic;

fn gpu() -> Gpu {
    let nvrtc = std::env::var("LOCKSTEP_NVRTC").ok();
    Gpu::open(0, &Kernels::OnDemand(nvrtc)).unwrap_or_else(|error| panic!("{error}"))
}

/// Our own kernels, and cublasLt where it is.
fn tools(gpu: &Gpu) -> Vec<Arc<DenseTools>> {
    let setting = std::env::var("LOCKSTEP_CUBLASLT").ok();
    let library = blas::Library::load(setting.as_deref()).map(|_| DenseBy::Cublaslt { setting, num_rows: 8192 });
    let all = [DenseBy::Kernels].into_iter().chain(library.ok());
    all.map(|by| Arc::new(DenseTools::new(gpu, &by).unwrap_or_else(|error| panic!("{error}")))).collect()
}

fn describe(tools: &DenseTools) -> &'static str {
    if tools.has_library() { "with cublasLt" } else { "own kernels" }
}

fn bf16(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect()
}

fn linear(weight: &Projection, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / weight.in_features * weight.out_features];
    reference().linear(weight).unwrap().forward(x, &mut out);
    out
}

/// A layer whose experts work in a latent.
struct Made {
    spec: AroundSpec,
    router: RouterTensors,
    latent: LatentTensors,
}

impl Made {
    fn new(seed: u64, (hidden, latent, num_experts): (usize, usize, usize), formats: [Format; 2]) -> Self {
        let mut rng = Random::new(seed);
        let spec = AroundSpec {
            method: RoutingMethod::KimiK3 { scaling: 2.5 },
            num_experts,
            num_topk: 6,
            hidden,
            norm_eps: Some(1e-5),
        };
        let bias = Some(rng.normals(num_experts).iter().map(|value| value * 0.1).collect());
        let router = RouterTensors { weight: projection(&mut rng, num_experts, hidden, formats[0]), bias };
        let latent = LatentTensors {
            down: projection(&mut rng, latent, hidden, formats[1]),
            up: projection(&mut rng, hidden, latent, formats[1]),
            norm: Some(rng.normals(latent)),
        };
        Self { spec, router, latent }
    }

    fn around(&self, tools: &Arc<DenseTools>) -> Around {
        let tensors = AroundTensors { router: &self.router, latent: Some(&self.latent) };
        Around::new(tools, self.spec, tensors).unwrap_or_else(|error| panic!("{error}"))
    }

    fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        linear(&self.router.weight, hidden)
    }

    fn expected_topk(&self, hidden: &[f32]) -> TopK {
        let AroundSpec { method, num_experts, num_topk, .. } = self.spec;
        routing::route(method, num_experts, num_topk, &self.logits(hidden), self.router.bias.as_deref()).unwrap()
    }
}

/// A layer's weights on the device, and what its steps need.
struct OnDevice<'a> {
    gpu: &'a Gpu,
    tools: &'a Arc<DenseTools>,
    around: Around,
    buffers: AroundBuffers,
    shape: (usize, usize),
}

impl<'a> OnDevice<'a> {
    fn new(gpu: &'a Gpu, tools: &'a Arc<DenseTools>, made: &Made) -> Self {
        let buffers = AroundBuffers::new(tools).unwrap();
        let shape = (made.spec.hidden, made.latent.down.out_features);
        Self { gpu, tools, around: made.around(tools), buffers, shape }
    }

    fn upload(&mut self, hidden: &[f32]) {
        self.buffers.upload(self.tools, hidden, self.shape.0).unwrap();
    }

    fn route(&mut self, hidden: &[f32]) -> (Vec<i32>, Vec<f32>) {
        self.upload(hidden);
        self.around.route(&mut self.buffers).unwrap();
        self.buffers.queue_results(self.tools).unwrap();
        self.gpu.stream().synchronise().unwrap();
        let topk = self.buffers.topk();
        (topk.idx, topk.weights)
    }

    fn down(&mut self, num_tokens: usize) -> Vec<f32> {
        self.around.values(&mut self.buffers).unwrap();
        let mut down = self.around.made_values(&self.buffers).download(self.gpu.stream()).unwrap();
        down.truncate(num_tokens * self.shape.1);
        down
    }

    fn up(&mut self, sums: &[f32]) -> Vec<f32> {
        let routed = DeviceBuffer::from_slice(self.gpu.stream(), sums).unwrap();
        let mut out = DeviceBuffer::uninitialised(self.gpu.device(), 0).unwrap();
        assert!(self.around.up(&mut self.buffers, &routed, &mut out).unwrap(), "there is a latent");
        out.download(self.gpu.stream()).unwrap()
    }
}

/// Ids are the same but where the host's scores are a near tie; weights are within 2e-6 where ids are the same.
fn assert_chosen(made: &Made, hidden: &[f32], found: &(Vec<i32>, Vec<f32>), what: &str) {
    let expected = made.expected_topk(hidden);
    let logits = made.logits(hidden);
    let AroundSpec { num_experts, num_topk, .. } = made.spec;
    let bias = made.router.bias.as_ref().unwrap();
    let mut num_ties = 0;
    for slot in 0..expected.idx.len() {
        let (got, wanted) = (found.0[slot], expected.idx[slot]);
        if got != wanted {
            let token = slot / num_topk;
            let score = |expert: i32| {
                let logit = f64::from(logits[token * num_experts + expert as usize]);
                1.0 / (1.0 + (-logit).exp()) + f64::from(bias[expert as usize])
            };
            assert!((score(got) - score(wanted)).abs() < 3e-6, "{what}: slot {slot} is {got}, expected {wanted}");
            num_ties += 1;
            continue;
        }
        let (got, wanted) = (found.1[slot], expected.weights[slot]);
        // Another expert changes what all weights of its token are divided by.
        let slots = slot / num_topk * num_topk..(slot / num_topk + 1) * num_topk;
        if found.0[slots.clone()] == expected.idx[slots] {
            assert!((got - wanted).abs() <= 5e-6 * wanted.abs(), "{what}: slot {slot} weighs {got}, expected {wanted}");
        }
    }
    assert!(num_ties * 100 <= expected.idx.len(), "{what}: {num_ties} of {} slots are ties", expected.idx.len());
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_topk_matches_the_expected_ids_and_weights() {
    let gpu = gpu();
    let stream = gpu.stream();
    let file = Tensors::new(fixtures::ROUTING);
    let sets: Vec<String> =
        file.0.names().into_iter().filter_map(|name| name.strip_suffix(".logits").map(String::from)).collect();
    assert!(sets.len() >= 10, "found {sets:?}");
    for set in sets {
        let num_experts = file.shape(&format!("{set}.logits"))[1];
        let num_topk = file.shape(&format!("{set}.topk_idx"))[1];
        let (idx, weights) = (file.i32(&format!("{set}.topk_idx")), file.f32(&format!("{set}.topk_weights")));
        let bias = file.has(&format!("{set}.bias")).then(|| file.f32(&format!("{set}.bias")));
        let method = routing::tests::method_of(&set);
        let logits = file.f32(&format!("{set}.logits"));
        let topk = on_device(&gpu, (method, num_experts, num_topk), &logits, bias.as_deref());
        assert_eq!(topk.idx, idx, "{set}: experts");
        for (slot, (got, expected)) in topk.weights.iter().zip(&weights).enumerate() {
            assert!((got - expected).abs() <= 2e-6 * expected.abs(), "{set}: slot {slot}: {got}, expected {expected}");
        }
    }
    stream.synchronise().unwrap();
}

fn on_device(
    gpu: &Gpu,
    (method, num_experts, num_topk): (RoutingMethod, usize, usize),
    logits: &[f32],
    bias: Option<&[f32]>,
) -> TopK {
    let (stream, num_tokens) = (gpu.stream(), logits.len() / num_experts);
    let upload = |values: &[f32]| DeviceBuffer::from_slice(stream, values).unwrap();
    let (logits, bias) = (upload(logits), bias.map(upload));
    let mut idx = DeviceBuffer::from_slice(stream, &vec![-7; num_tokens * num_topk]).unwrap();
    let mut weights = upload(&vec![f32::NAN; num_tokens * num_topk]);
    let buffers = TopkBuffers { logits: &logits, bias: bias.as_ref(), ids: &mut idx, weights: &mut weights };
    Selector::new(gpu, (method, num_experts, num_topk)).unwrap().queue(stream, buffers, (num_tokens, 0)).unwrap();
    TopK { num_topk, idx: idx.download(stream).unwrap(), weights: weights.download(stream).unwrap() }
}

/// Case C1 among others: every method, logits that are not finite, ties, few experts and many.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_topk_chooses_what_the_host_chooses() {
    use RoutingMethod::{DeepseekV3, DeepseekV4, Default, KimiK3, Llama4, MinimaxM2, Renormalize, SigmoidRenorm};
    let gpu = gpu();
    let mut rng = Random::new(31);
    for (method, num_experts, num_topk) in [
        (Default, 60, 4),
        (Renormalize, 128, 8),
        (DeepseekV3 { num_groups: 8, topk_group: 4, scaling: 2.5 }, 256, 8),
        (DeepseekV3 { num_groups: 4, topk_group: 2, scaling: 1.0 }, 8, 2),
        (DeepseekV3 { num_groups: 8, topk_group: 2, scaling: 1.0 }, 8, 2),
        (KimiK3 { scaling: 2.827 }, 896, 16),
        (DeepseekV4 { scaling: 1.5 }, 384, 6),
        (MinimaxM2, 33, 32),
        (SigmoidRenorm, 24, 6),
        (Llama4, 5, 1),
    ] {
        let num_tokens = 3000;
        let mut logits: Vec<f32> = rng.normals(num_tokens * num_experts).iter().map(|x| x * 3.0).collect();
        for (token, row) in logits.chunks_mut(num_experts).enumerate() {
            match token % 12 {
                // Values that tie.
                1 => row.iter_mut().for_each(|value| *value = value.round()),
                2 => row.fill(f32::NAN),
                3 => row.fill(f32::NEG_INFINITY),
                4 => row[rng.below(num_experts)] = f32::NAN,
                5 => row[rng.below(num_experts)] = f32::INFINITY,
                6 => row.iter_mut().for_each(|value| *value = if rng.below(2) == 0 { f32::NAN } else { *value }),
                7 => row.iter_mut().for_each(|value| *value = if rng.below(2) == 0 { -f32::INFINITY } else { *value }),
                8 => row.iter_mut().skip(1).for_each(|value| *value = f32::NAN),
                9 => row.fill(-300.0),
                10 => row.iter_mut().for_each(|value| *value *= 40.0),
                _ => {}
            }
        }
        let bias: Option<Vec<f32>> =
            method.takes_bias().then(|| rng.normals(num_experts).iter().map(|x| x * 0.2).collect());
        let expected = routing::route(method, num_experts, num_topk, &logits, bias.as_deref()).unwrap();
        let found = on_device(&gpu, (method, num_experts, num_topk), &logits, bias.as_deref());
        for slot in 0..expected.idx.len() {
            let at = format!("{}: token {} slot {}", method.name(), slot / num_topk, slot % num_topk);
            assert_eq!(found.idx[slot], expected.idx[slot], "{at}: expert");
            let (got, wanted) = (found.weights[slot], expected.weights[slot]);
            assert!((got - wanted).abs() <= 2e-6 * wanted.abs(), "{at}: weighs {got}, expected {wanted}");
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_router_chooses_what_the_host_chooses() {
    let gpu = gpu();
    for tools in tools(&gpu) {
        for (seed, shape, format) in [
            (41, (256, 128, 24), Format::Bf16),
            (42, (256, 128, 24), Format::F32),
            (43, (7168, 128, 896), Format::Bf16),
            (44, (7168, 128, 896), Format::F32),
            (45, (144, 16, 7), Format::F32),
        ] {
            let made = Made::new(seed, shape, [format, Format::Bf16]);
            let mut layer = OnDevice::new(&gpu, &tools, &made);
            for (num_tokens, are_bf16) in [(1, true), (1, false), (0, true), (203, true), (77, false)] {
                let mut hidden = Random::new(seed + 10).normals(num_tokens * made.spec.hidden);
                if are_bf16 {
                    hidden = bf16(hidden);
                }
                let what = format!("{}, {shape:?} {format:?}, {num_tokens} tokens, bf16: {are_bf16}", describe(&tools));
                let found = layer.route(&hidden);
                assert_chosen(&made, &hidden, &found, &what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_latent_is_the_hosts() {
    let gpu = gpu();
    for tools in tools(&gpu) {
        for (seed, shape, format) in
            [(51, (256, 128, 24), Format::Bf16), (52, (7168, 3584, 24), Format::Bf16), (53, (272, 48, 24), Format::F32)]
        {
            let made = Made::new(seed, shape, [Format::Bf16, format]);
            println!("{shape:?}: {:?}", made.around(&tools).computed_by());
            let (mut layer, width) = (OnDevice::new(&gpu, &tools, &made), shape.1);
            for num_tokens in [1, 60, 129] {
                let hidden = bf16(Random::new(seed + 10).normals(num_tokens * shape.0));
                let what = format!("{}, {shape:?} {format:?}, {num_tokens} tokens", describe(&tools));
                layer.upload(&hidden);
                let found = compare(&layer.down(num_tokens), &linear(&made.latent.down, &hidden));
                // Tensor cores cut off what does not fit their sums.
                let bound = if tools.has_library() { 3e-5 } else { 1e-6 };
                assert!(found.rel_l2 <= bound, "{what}: down is {:.2e} off", found.rel_l2);

                let sums = Random::new(seed + 20).normals(num_tokens * width);
                let mut normed = sums.clone();
                let weight = made.latent.norm.as_ref().unwrap();
                for row in normed.chunks_mut(width) {
                    let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                    let scale = 1.0 / (mean + f64::from(1e-5_f32)).sqrt();
                    row.iter_mut().zip(weight).for_each(|(x, w)| *x = (f64::from(*x) * scale) as f32 * w);
                }
                let up = layer.up(&sums);
                let rounded = compare(&up, &linear(&made.latent.up, &bf16(normed.clone())));
                // A value near the middle between two bf16 values may go either way.
                assert!(rounded.rel_l2 <= 1e-4, "{what}: up is {:.2e} off", rounded.rel_l2);
                let exact = compare(&up, &linear(&made.latent.up, &normed));
                assert!(exact.rel_l2 <= 2.5e-3, "{what}: up is {:.2e} off before rounding", exact.rel_l2);
            }
        }
    }
}

/// A token's bits are the same alone and among others, at any place, twice, and by whatever schedule.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_dense_bits_do_not_depend_on_the_number_of_tokens() {
    let gpu = gpu();
    for tools in tools(&gpu) {
        for (seed, shape) in [(61, (256, 128, 24)), (62, (7168, 3584, 896))] {
            let made = Made::new(seed, shape, [Format::Bf16, Format::Bf16]);
            let (mut layer, width) = (OnDevice::new(&gpu, &tools, &made), shape.1);
            let hidden = bf16(Random::new(seed + 10).normals(2100 * shape.0));
            let sums = Random::new(seed + 20).normals(2100 * width);
            let mut run = |tokens: std::ops::Range<usize>| {
                let (_, weights) = layer.route(&hidden[tokens.start * shape.0..tokens.end * shape.0]);
                let down = layer.down(tokens.len());
                (weights, down, layer.up(&sums[tokens.start * width..tokens.end * width]))
            };
            let probe = 5;
            let alone = run(probe..probe + 1);
            for tokens in [0..6, 4..20, 5..22, 0..64, 1..130, 3..260, 0..515, 5..2100, 5..6] {
                let found = run(tokens.clone());
                let what = format!("{}, {shape:?}, token {probe} in {tokens:?}", describe(&tools));
                let at = probe - tokens.start;
                let slots = made.spec.num_topk;
                assert_same_bits(
                    &found.0[at * slots..][..slots],
                    &alone.0[..slots],
                    slots,
                    &format!("{what}: weights"),
                );
                assert_same_bits(&found.1[at * width..][..width], &alone.1[..width], width, &format!("{what}: down"));
                let up = &found.2[at * shape.0..][..shape.0];
                assert_same_bits(up, &alone.2[..shape.0], shape.0, &format!("{what}: up"));
            }
        }
    }
}

/// A token of NaN touches no other.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_router_keeps_nan_to_its_token() {
    let gpu = gpu();
    for tools in tools(&gpu) {
        let made = Made::new(71, (256, 128, 24), [Format::F32, Format::Bf16]);
        let mut layer = OnDevice::new(&gpu, &tools, &made);
        let mut hidden = Random::new(72).normals(40 * 256);
        let before = layer.route(&hidden);
        hidden[7 * 256 + 3] = f32::NAN;
        let (idx, weights) = layer.route(&hidden);
        for token in 0..40 {
            let slots = token * 6..token * 6 + 6;
            if token == 7 {
                assert_eq!((&idx[slots.clone()], &weights[slots]), (&[0, 1, 2, 3, 4, 5][..], &[0.0; 6][..]));
            } else {
                assert_eq!(
                    (&idx[slots.clone()], &weights[slots.clone()]),
                    (&before.0[slots.clone()], &before.1[slots])
                );
            }
        }
    }
}

/// What shared experts read, and sums.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_shared_input_is_the_hosts() {
    let gpu = gpu();
    let made = Made::new(81, (256, 128, 24), [Format::Bf16; 2]);
    let all_tools = tools(&gpu);
    let mut layer = OnDevice::new(&gpu, &all_tools[0], &made);
    for are_bf16 in [true, false] {
        let mut hidden = Random::new(82).normals(33 * 256);
        if are_bf16 {
            hidden = bf16(hidden);
        }
        layer.upload(&hidden);
        let scale = 0.0021;
        let (tokens, row_token) = layer.around.shared_tokens(&mut layer.buffers, Some(scale)).unwrap();
        let found: Vec<f32> =
            tokens.download(gpu.stream()).unwrap().iter().map(|bits| half::bf16::from_bits(*bits).to_f32()).collect();
        assert_eq!(row_token.download(gpu.stream()).unwrap(), (0..33).collect::<Vec<u32>>());
        let mut expected = vec![0.0; hidden.len()];
        let counts = nvfp4::quantise_unscaled(&hidden, scale, &mut expected);
        assert_same_bits(&found, &expected, 256, "through NVFP4");
        layer.buffers.queue_results(&all_tools[0]).unwrap();
        gpu.stream().synchronise().unwrap();
        assert_eq!(layer.buffers.quant_counts(layer.around.num_blocks(&layer.buffers)), counts);
        let (tokens, _) = layer.around.shared_tokens(&mut layer.buffers, None).unwrap();
        let found = tokens.download(gpu.stream()).unwrap();
        let found: Vec<f32> = found[..hidden.len()].iter().map(|bits| half::bf16::from_bits(*bits).to_f32()).collect();
        assert_same_bits(&found, &bf16(hidden.clone()), 256, "rounded");

        let other = Random::new(83).normals(33 * 256);
        let mut out = DeviceBuffer::from_slice(gpu.stream(), &hidden).unwrap();
        let on_device = DeviceBuffer::from_slice(gpu.stream(), &other).unwrap();
        layer.around.add(&layer.buffers, &mut out, &on_device).unwrap();
        let expected: Vec<f32> = hidden.iter().zip(&other).map(|(a, b)| a + b).collect();
        assert_same_bits(&out.download(gpu.stream()).unwrap(), &expected, 256, "a sum");
    }
}

/// A shared expert of bf16 weights by the library: the reference's rows, whatever the number of tokens, and a count of them.
#[test]
#[ignore = "needs a GPU, NVRTC and cublasLt"]
fn gpu_shared_expert_by_the_library_is_the_references() {
    let gpu = gpu();
    let tools = tools(&gpu).pop().filter(|tools| tools.has_library()).expect("cublasLt: LOCKSTEP_CUBLASLT names it");
    let mut num_served = 0;
    // K3's fixture, K3, DeepSeek-V3, and what no model has.
    let shapes = [(256, 192), (7168, 3072), (7168, 2048), (512, 256), (256, 1024)];
    for ((hidden, intermediate), activation) in shapes.into_iter().zip([SITU, Activation::Swiglu].into_iter().cycle()) {
        let spec = ExpertsSpec { hidden, intermediate, activation, quantise_activations: false, batch_invariant: true };
        let mut rng = Random::new(5);
        let tensors = expert(&mut rng, &spec, Format::Bf16);
        let Some(shared) = GatedDense::new(&tools, spec, &tensors).unwrap() else {
            println!("{hidden} x {intermediate}: no algorithm for both products");
            continue;
        };
        num_served += 1;
        let builder = reference().experts(spec, 1).unwrap();
        builder.put(0, &tensors).unwrap();
        let on_host = builder.finish().unwrap();
        let all = bf16(rng.normals(300 * hidden));
        let mut buffers = AroundBuffers::new(&tools).unwrap();
        let mut out = DeviceBuffer::uninitialised(gpu.device(), 0).unwrap();
        let mut first: Option<Vec<f32>> = None;
        for num_tokens in [300, 1, 0, 16, 129] {
            let tokens = &all[..num_tokens * hidden];
            buffers.poison(&tools).unwrap();
            buffers.upload(&tools, tokens, hidden).unwrap();
            shared.queue(&mut buffers, &mut out).unwrap();
            shared.queue_evidence().unwrap();
            gpu.stream().synchronise().unwrap();
            let evidence = shared.evidence().unwrap();
            let counted: u64 = evidence.rows_by_identity.iter().map(|(_, rows)| *rows).sum();
            assert_eq!(counted, num_tokens as u64);
            let mut found = vec![0.0; num_tokens * hidden];
            out.download_into(gpu.stream(), 0, &mut found).unwrap();
            if let Some(first) = &first {
                assert_same_bits(&found, &first[..found.len()], hidden, &format!("{num_tokens} tokens"));
                continue;
            }
            let row_token: Vec<u32> = (0..u32::try_from(num_tokens).unwrap()).collect();
            let mut wanted = vec![0.0; found.len()];
            let (tactic, expert_offsets) = (Tactic::UNTUNED, &[0, num_tokens][..]);
            let batch = ExpertBatch { tokens, token_scale: 1.0, row_token: &row_token, expert_offsets, tactic };
            on_host.forward(&batch, &mut wanted).unwrap();
            let metrics = compare(&found, &wanted);
            assert!(metrics.rel_l2 < 3e-3, "{activation:?}: {metrics:?}");
            first = Some(found);
        }
    }
    assert!(num_served > 0, "the library serves no shape");
}
