//! The expert computation of one rank alone, for benches: weights, rows and results stay on the device, and what computes
//! them is recorded once and replayed.
//!
//! There are several sets of weights, so that a replay reads none from the device's cache. Experts repeat a few patterns:
//! what is copied and multiplied does not depend on that.

mod ceilings;
mod dealt;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::evidence::NUM_COUNTERS;
use super::programs::Launch;
use super::{Gpu, Shared, experts, family, narrow, pack};
use crate::backend::{BackendError, ExpertsSpec, checks};
use crate::checkpoint::tensors::ExpertTensors;
use crate::cuda::{CudaError, DeviceBuffer, Event, Graph, Stream};
use crate::jit::kernels::grouped_gemm::{
    ExpertEntry, GroupedGemm, GroupedGemmArgs, IMAGE_GROUP_ROWS, Schedule, Weights,
};
use crate::jit::kernels::{BatchSchedules, Chooser, ExpertRows};
use crate::select::Identity;
pub use ceilings::{Dense, Reading};
use dealt::Dealing;

/// How much of a layer there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSize {
    /// Experts of the rank.
    pub num_experts: usize,
    /// Sets of weights that are read in turn.
    pub num_sets: usize,
}

/// Tokens that rows take in turn; each row reads a place of its own.
#[derive(Debug, Clone, Copy)]
pub struct LocalTokens<'a> {
    /// bf16 `[num_tokens, hidden]`
    pub values: &'a [u16],
    /// Multiplies every value.
    pub scale: f32,
}

/// Packed experts on a device.
pub struct LocalLayer {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    gemm: GroupedGemm,
    identity: Identity,
    /// One set each: images of all FC1, then of all FC2.
    sets: Vec<DeviceBuffer<u8>>,
    /// `[num_experts]`, with places in a set instead of addresses.
    entries: Vec<ExpertEntry>,
    expert_bytes: u64,
}

impl LocalLayer {
    /// Packs `patterns`, which the experts repeat.
    ///
    /// # Errors
    /// If a pattern is not the spec's, does not pack, or the sets do not fit the device.
    ///
    /// # Panics
    /// If there is no pattern, or no set.
    pub fn new(
        gpu: &Gpu,
        spec: ExpertsSpec,
        patterns: &[ExpertTensors],
        size: LocalSize,
    ) -> Result<Self, BackendError> {
        let shared = gpu.shared.clone();
        let stream = shared.stream();
        let mut images = Vec::new();
        for expert in patterns {
            checks::expert(&spec, expert)?;
            let packed = |projection| move |source| BackendError::Pack { projection, source };
            let fc1 = pack::pack_fc1(&expert.gate, &expert.up).map_err(packed("gate with up"))?;
            let fc2 = pack::pack_fc2(&expert.down).map_err(packed("down"))?;
            images.push([fc1.bytes, fc2.bytes]);
        }
        let [fc1_bytes, fc2_bytes] = [0, 1].map(|fc| images[0][fc].len());
        let fc1_at = |expert: usize| expert * fc1_bytes;
        let fc2_at = |expert: usize| size.num_experts * fc1_bytes + expert * fc2_bytes;
        let mut first = DeviceBuffer::uninitialised(stream.device(), size.num_experts * (fc1_bytes + fc2_bytes))?;
        for expert in 0..size.num_experts {
            let [fc1, fc2] = &images[expert % images.len()];
            first.upload(stream, fc1_at(expert), fc1)?;
            first.upload(stream, fc2_at(expert), fc2)?;
        }
        let mut sets = vec![first];
        while sets.len() < size.num_sets {
            let mut set = DeviceBuffer::uninitialised(stream.device(), sets[0].len())?;
            set.copy_from(stream, 0, &sets[0], 0..sets[0].len())?;
            sets.push(set);
        }
        let entry = |expert: usize| ExpertEntry {
            fc1: fc1_at(expert) as u64,
            fc2: fc2_at(expert) as u64,
            ..experts::entry(&patterns[expert % patterns.len()])
        };
        Ok(Self {
            spec,
            gemm: experts::gemm(&spec, Weights::Nvfp4)?,
            identity: checks::identity(shared.technique, &spec, &patterns[0]),
            entries: (0..size.num_experts).map(entry).collect(),
            expert_bytes: (fc1_bytes + fc2_bytes) as u64,
            sets,
            shared,
        })
    }

    /// What it runs.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Packed bytes of one expert.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.expert_bytes
    }

    /// The stream that everything is queued in.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.shared.stream()
    }

    /// Loads the kernels of works over such rows, all at once: compiling one after the other takes long.
    ///
    /// # Errors
    /// If one does not compile or load.
    pub fn load<'a>(&self, lines: impl IntoIterator<Item = &'a [usize]>) -> Result<(), BackendError> {
        let mut schedules = BTreeSet::new();
        for counts in lines {
            let of_line = self.schedules(counts);
            schedules.extend(counts.iter().filter(|rows| **rows > 0).map(|&num_rows| of_line.of(num_rows)));
        }
        self.shared.programs.load(&schedules, &self.gemm)
    }

    fn schedules(&self, counts: &[usize]) -> BatchSchedules {
        let technique = self.shared.technique;
        let family = family(technique).unwrap_or_else(|| unreachable!("{technique} has no schedules"));
        Chooser { family, batch_invariant: self.spec.batch_invariant }.batch(&self.gemm, counts)
    }

    /// Records the layer over `counts[expert]` rows of each expert, once with each set.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If `counts` has another number of experts, or there are no tokens.
    pub fn work(&self, counts: &[usize], tokens: LocalTokens<'_>) -> Result<LocalWork<'_>, BackendError> {
        let schedules = self.schedules(counts);
        let rows: Vec<ExpertRows> = counts.iter().copied().map(ExpertRows::alone).collect();
        let num_multiprocessors = self.stream().device().facts().num_multiprocessors;
        let of_large = schedules.multiprocessors_of_large(&self.gemm, &rows, num_multiprocessors);
        self.work_by(counts, tokens, |num_rows| schedules.of(num_rows), of_large)
    }

    /// The same by any schedules, which follow from an expert's rows; of two, the one of many rows beside the other on
    /// `of_large` multiprocessors where that is given.
    fn work_by(
        &self,
        counts: &[usize],
        tokens: LocalTokens<'_>,
        schedule_of: impl Fn(usize) -> Schedule,
        of_large: Option<u32>,
    ) -> Result<LocalWork<'_>, BackendError> {
        assert_eq!(counts.len(), self.entries.len(), "a count for every expert");
        let stream = self.stream();
        let mut shares: BTreeMap<Schedule, Vec<usize>> = BTreeMap::new();
        for (expert, &num_rows) in counts.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            shares.entry(schedule_of(num_rows)).or_default().push(expert);
        }
        let mut programs = Vec::new();
        for (schedule, experts) in &shares {
            programs.push((self.shared.programs.schedule(*schedule, &self.gemm)?, experts));
        }
        let parts_bytes = programs.iter().map(|(program, _)| program.parts_bytes()).max().unwrap_or(0);
        let experts = programs.iter().map(|(_, experts)| &experts[..]);
        let buffers = Buffers::new(self, counts, tokens, experts, parts_bytes)?;
        let graph = Graph::capture(stream, || {
            for set in 0..self.sets.len() {
                let mut launches = Vec::with_capacity(programs.len());
                for (share, (program, _)) in programs.iter().enumerate() {
                    let mut args = buffers.args(self.entries.len(), set * programs.len() + share, tokens.scale)?;
                    if !program.wants_images() {
                        args.inner = buffers.small_inner.address();
                    }
                    launches.push(Launch { program, args });
                }
                // SAFETY: every buffer has room for these counts and goes with the work; the sets live in `self`, which
                // the work borrows, and so do the programs' modules. Programs that run at once have other experts, and
                // another input of FC2.
                unsafe { self.shared.side.queue(stream, &launches, of_large, 0)? };
            }
            Ok::<_, BackendError>(())
        })?;
        Ok(LocalWork {
            replay: Replay::new(self, graph, self.sets.len())?,
            schedules: shares.into_keys().collect(),
            num_rows: counts.iter().sum(),
            buffers,
            dealing: None,
        })
    }
}

/// What a work reads and writes, its weights apart.
struct Buffers {
    row_token: DeviceBuffer<u32>,
    expert_offsets: DeviceBuffer<u32>,
    tokens: DeviceBuffer<u16>,
    image: DeviceBuffer<u16>,
    gathered: DeviceBuffer<u32>,
    inner: DeviceBuffer<u16>,
    /// Of schedules that read rows where they lie.
    small_inner: DeviceBuffer<u16>,
    out: DeviceBuffer<f32>,
    counts: DeviceBuffer<u64>,
    parts: DeviceBuffer<u8>,
    given_out: DeviceBuffer<u32>,
    /// `[num_sets, num_shares, num_experts]`
    entries: DeviceBuffer<ExpertEntry>,
}

impl Buffers {
    fn new<'a>(
        layer: &LocalLayer,
        counts: &[usize],
        tokens: LocalTokens<'_>,
        shares: impl Iterator<Item = &'a [usize]> + Clone,
        parts_bytes: usize,
    ) -> Result<Self, BackendError> {
        let (stream, spec) = (layer.stream(), &layer.spec);
        let num_rows: usize = counts.iter().sum();
        let num_padded = experts::padded_rows(num_rows, counts.len());
        let mut expert_offsets = vec![0];
        let mut row_token = Vec::with_capacity(num_rows);
        for count in counts {
            expert_offsets.push(expert_offsets[expert_offsets.len() - 1] + narrow(*count));
        }
        // No two neighbours' tokens are neighbours, as where tokens choose their experts.
        let stride = (num_rows / 2 + 1..).find(|stride| gcd(*stride, num_rows.max(1)) == 1).unwrap_or(1);
        row_token.extend((0..num_rows).map(|row| narrow(row * stride % num_rows)));
        let mut own_tokens = DeviceBuffer::uninitialised(stream.device(), num_rows * spec.hidden)?;
        for start in (0..own_tokens.len()).step_by(tokens.values.len()) {
            let len = tokens.values.len().min(own_tokens.len() - start);
            own_tokens.upload(stream, start, &tokens.values[..len])?;
        }
        let mut entries = Vec::new();
        for set in &layer.sets {
            for share in shares.clone() {
                let start = entries.len();
                entries.resize(start + counts.len(), ExpertEntry::default());
                for &expert in share {
                    let entry = layer.entries[expert];
                    let (fc1, fc2) = (set.address() + entry.fc1, set.address() + entry.fc2);
                    entries[start + expert] = ExpertEntry { fc1, fc2, ..entry };
                }
            }
        }
        Ok(Self {
            row_token: DeviceBuffer::from_slice(stream, &row_token)?,
            expert_offsets: DeviceBuffer::from_slice(stream, &expert_offsets)?,
            tokens: own_tokens,
            image: DeviceBuffer::zeroed(stream, num_padded * experts::padded(spec.hidden))?,
            gathered: DeviceBuffer::zeroed(stream, num_padded / IMAGE_GROUP_ROWS as usize)?,
            inner: DeviceBuffer::zeroed(stream, num_padded * experts::padded(spec.intermediate))?,
            small_inner: DeviceBuffer::zeroed(stream, num_rows * experts::padded(spec.intermediate))?,
            out: DeviceBuffer::zeroed(stream, num_rows * spec.hidden)?,
            counts: DeviceBuffer::zeroed(stream, NUM_COUNTERS)?,
            parts: DeviceBuffer::zeroed(stream, parts_bytes)?,
            given_out: DeviceBuffer::zeroed(stream, 1)?,
            entries: DeviceBuffer::from_slice(stream, &entries)?,
        })
    }

    /// The arguments of the launches that take the `index`th entries of `num_experts`.
    fn args(&self, num_experts: usize, index: usize, token_scale: f32) -> Result<GroupedGemmArgs, CudaError> {
        Ok(GroupedGemmArgs {
            experts: self.entries.address_of(index * num_experts..(index + 1) * num_experts)?,
            expert_offsets: self.expert_offsets.address(),
            row_token: self.row_token.address(),
            tokens: self.tokens.address(),
            image: self.image.address(),
            gathered: self.gathered.address(),
            inner: self.inner.address(),
            out: self.out.address(),
            counts: self.counts.address(),
            parts: self.parts.address(),
            given_out: self.given_out.address(),
            dealt: 0,
            token_scale,
            num_experts: narrow(num_experts),
        })
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Recorded work, and the time of a replay.
struct Replay<'a> {
    layer: &'a LocalLayer,
    graph: Graph,
    /// How often the graph does what is timed.
    num_rounds: usize,
    start: Event,
    end: Event,
}

impl<'a> Replay<'a> {
    fn new(layer: &'a LocalLayer, graph: Graph, num_rounds: usize) -> Result<Self, CudaError> {
        let device = layer.stream().device();
        Ok(Self { layer, graph, num_rounds, start: Event::new(device)?, end: Event::new(device)? })
    }

    /// # Safety
    /// What the graph touches lives.
    unsafe fn run(&self) -> Result<Duration, BackendError> {
        let stream = self.layer.stream();
        self.start.record(stream)?;
        // SAFETY: the caller's promise; the stream orders replays.
        unsafe { self.graph.launch(stream)? };
        self.end.record(stream)?;
        self.end.synchronise()?;
        Ok(self.end.elapsed_since(&self.start)? / narrow(self.num_rounds))
    }
}

/// The recorded computation of a layer.
pub struct LocalWork<'a> {
    replay: Replay<'a>,
    schedules: Vec<Schedule>,
    num_rows: usize,
    buffers: Buffers,
    /// Where the device deals rows out.
    #[cfg_attr(not(test), expect(dead_code, reason = "the graph reads what it holds"))]
    dealing: Option<Dealing>,
}

impl LocalWork<'_> {
    /// The schedules that it consists of.
    #[must_use]
    pub fn schedules(&self) -> &[Schedule] {
        &self.schedules
    }

    /// Computes, and returns what it took with one set.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run(&self) -> Result<Duration, BackendError> {
        // SAFETY: `self` holds every buffer, those of `dealing` too, and the layer, which it borrows, the sets.
        unsafe { self.replay.run() }
    }

    /// Computes once more, and asks the device whether every row was.
    ///
    /// # Errors
    /// If the device fails, or has computed another number of rows.
    pub fn check(&mut self) -> Result<(), BackendError> {
        let stream = self.replay.layer.stream();
        self.buffers.counts.fill_bytes(stream, 0)?;
        self.run()?;
        let found = self.buffers.counts.download(stream)?[2];
        let wanted = (self.num_rows * self.replay.layer.sets.len()) as u64;
        if found != wanted {
            return Err(BackendError::Rows { identity: self.replay.layer.identity, found, wanted });
        }
        Ok(())
    }
}
