//! The same computation where the device alone knows the rows: as steps that are replayed have it.

use std::iter;

use super::{Buffers, LocalLayer, LocalTokens, LocalWork, Replay};
use crate::backend::BackendError;
use crate::backend::cuda::programs::{Launch, Program};
use crate::backend::cuda::{family, narrow};
use crate::cuda::{DeviceBuffer, Function, Graph};
use crate::jit::kernels::deal::{DealArgs, DealKernel, DealTable, Dealt, Sizes, format_of};
use crate::jit::kernels::grouped_gemm::{ExpertEntry, Schedule, Weights};
use crate::jit::kernels::{Chooser, deal};

/// What deals rows out.
pub(super) struct Dealing {
    function: Function,
    table: DealTable,
    sizes: Sizes,
    may_overlap: bool,
    formats: DeviceBuffer<u32>,
    /// `[MAX_PROGRAMS, num_experts]`
    lists: DeviceBuffer<ExpertEntry>,
    /// `[MAX_PROGRAMS]`
    pub(super) launches: DeviceBuffer<Dealt>,
}

impl Dealing {
    fn new(layer: &LocalLayer, programs: &[Program], table: DealTable) -> Result<Self, BackendError> {
        let (gpu, stream) = (&layer.shared.gpu, layer.stream());
        let (device, num_experts) = (stream.device(), layer.entries.len());
        Ok(Self {
            function: gpu.function(DealKernel.request(gpu.arch()), DealKernel::FUNCTION, 0)?,
            sizes: Sizes::new(&layer.gemm, device.facts().num_multiprocessors),
            may_overlap: Program::may_overlap(device, programs),
            formats: DeviceBuffer::from_slice(stream, &vec![format_of(Weights::Nvfp4); num_experts])?,
            lists: DeviceBuffer::uninitialised(device, deal::MAX_PROGRAMS * num_experts)?,
            launches: DeviceBuffer::uninitialised(device, deal::MAX_PROGRAMS)?,
            table,
        })
    }

    /// Queues the kernel, for a set's experts with rows at `expert_offsets`.
    fn queue(&self, layer: &LocalLayer, experts: u64, expert_offsets: u64) -> Result<(), BackendError> {
        let args = DealArgs {
            expert_offsets,
            experts,
            formats: self.formats.address(),
            dealt: self.lists.address(),
            launches: self.launches.address(),
            ..self.table.args(self.sizes, narrow(layer.entries.len()), self.may_overlap)
        };
        // SAFETY: there are as many offsets, entries and formats as experts, and room for every program's list and launch; all of
        // it lives as long as the work that queues it.
        unsafe { Ok(self.function.launch(layer.stream(), &DealKernel::SHAPE, &args)?) }
    }
}

impl LocalLayer {
    /// What may run, whatever the rows.
    fn table(&self) -> DealTable {
        let technique = self.shared.technique;
        let family = family(technique).unwrap_or_else(|| unreachable!("{technique} has no schedules"));
        DealTable::new(&[Chooser { family, batch_invariant: self.spec.batch_invariant }.candidates(&self.gemm)])
    }

    /// Records the layer as [`LocalLayer::work`] does, with all kernels that may run and the one that says which of them do.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// As there.
    pub fn dealt_work(&self, counts: &[usize], tokens: LocalTokens<'_>) -> Result<LocalWork<'_>, BackendError> {
        assert_eq!(counts.len(), self.entries.len(), "a count for every expert");
        let (stream, num_experts) = (self.stream(), counts.len());
        let table = self.table();
        let schedules: Vec<Schedule> = table.programs.iter().map(|may_run| may_run.cost.schedule).collect();
        self.shared.programs.load(&schedules.iter().copied().collect(), &self.gemm)?;
        let programs = schedules.iter().map(|&schedule| self.shared.programs.schedule(schedule, &self.gemm));
        let programs: Vec<Program> = programs.collect::<Result<_, _>>()?;
        let parts_bytes = programs.iter().map(Program::parts_bytes).max().unwrap_or(0);
        let all: Vec<usize> = (0..num_experts).collect();
        let buffers = Buffers::new(self, counts, tokens, iter::once(&all[..]), parts_bytes)?;
        let dealing = Dealing::new(self, &programs, table)?;
        let dealt = dealing.table.deal(counts.iter().map(|rows| (Weights::Nvfp4, *rows)));
        let has_rows = |at: usize| dealt.contains(&Some(at));
        let graph = Graph::capture(stream, || {
            for set in 0..self.sets.len() {
                let entries = buffers.entries.address_of(set * num_experts..(set + 1) * num_experts)?;
                dealing.queue(self, entries, buffers.expert_offsets.address())?;
                let mut launches = Vec::with_capacity(programs.len());
                for (at, program) in programs.iter().enumerate() {
                    let mut args = buffers.args(num_experts, set, tokens.scale)?;
                    args.experts = dealing.lists.address_of(at * num_experts..(at + 1) * num_experts)?;
                    args.dealt = dealing.launches.address_of(at..at + 1)?;
                    if !program.wants_images() {
                        args.inner = buffers.small_inner.address();
                    }
                    launches.push(Launch { program, args });
                }
                // SAFETY: as for the work that knows its rows; what each launch does is dealt before it.
                unsafe { self.shared.side.queue_dealt(stream, &launches, dealing.may_overlap)? };
            }
            Ok::<_, BackendError>(())
        })?;
        Ok(LocalWork {
            replay: Replay::new(self, graph, self.sets.len())?,
            schedules: (0..schedules.len()).filter(|&at| has_rows(at)).map(|at| schedules[at]).collect(),
            num_rows: counts.iter().sum(),
            buffers,
            dealing: Some(dealing),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_repeats, gpu, layer};
    use super::super::{LocalSize, LocalTokens};
    use super::*;
    use crate::backend::ExpertsSpec;
    use crate::backend::tests::{Random, SITU};

    /// Rows of experts: one hot, few everywhere, few and more, one kind alone, none.
    fn counts(rng: &mut Random, num_experts: usize, round: usize) -> Vec<usize> {
        let mut counts = vec![0; num_experts];
        match round % 6 {
            0 => {
                counts.iter_mut().for_each(|rows| *rows = 1 + rng.below(4));
                counts[rng.below(num_experts)] = 17 + rng.below(300);
            }
            1 => counts.iter_mut().for_each(|rows| *rows = rng.below(17)),
            2 => counts.iter_mut().for_each(|rows| *rows = rng.below([3, 17, 60, 200][round / 6 % 4])),
            3 => counts.iter_mut().for_each(|rows| *rows = 17 + rng.below(100)),
            4 => (0..3).for_each(|_| counts[rng.below(num_experts)] = rng.below(2000)),
            _ => counts[rng.below(num_experts)] = rng.below(2),
        }
        counts
    }

    /// The bits of rows that the host knows, whatever the device lets run at once.
    #[test]
    #[ignore = "needs a Hopper GPU and NVRTC"]
    fn gpu_dealt_rows_have_the_bits_of_known_ones() {
        let opened = gpu();
        for (hidden, intermediate, quantise_activations) in [(320, 176, true), (1024, 768, false), (2624, 2688, false)]
        {
            let spec =
                ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: false };
            let (layer, values) = layer(&opened, spec, LocalSize { num_experts: 40, num_sets: 2 });
            let tokens = LocalTokens { values: &values, scale: 5.0 / 2688.0 };
            let mut rng = Random::new(17);
            for round in 0..12 {
                let counts = counts(&mut rng, 40, round);
                if counts.iter().all(|rows| *rows == 0) {
                    continue;
                }
                let mut wanted = None;
                let what = format!("round {round}");
                let schedules = layer.schedules(&counts);
                let mut known = layer.work_by(&counts, tokens, |rows| schedules.of(rows), None).unwrap();
                assert_repeats(&mut known, 2, &mut wanted, &what);
                let mut dealt = layer.dealt_work(&counts, tokens).unwrap();
                assert_repeats(&mut dealt, 6, &mut wanted, &format!("{what}, dealt"));
            }
        }
    }

    /// The kernel's launches are the host's, divisions of the machine among them.
    #[test]
    #[ignore = "needs a Hopper GPU and NVRTC"]
    fn gpu_launches_are_dealt_as_the_host_would() {
        let opened = gpu();
        let mut num_divided = 0;
        for (num_experts, hidden, intermediate) in [(16, 320, 176), (56, 1024, 768), (1100, 144, 48)] {
            let spec = ExpertsSpec {
                hidden,
                intermediate,
                activation: SITU,
                quantise_activations: false,
                batch_invariant: false,
            };
            let (layer, values) = layer(&opened, spec, LocalSize { num_experts, num_sets: 1 });
            let tokens = LocalTokens { values: &values, scale: 1.0 };
            let mut work = layer.dealt_work(&vec![1; num_experts], tokens).unwrap();
            let dealing = work.dealing.as_mut().unwrap();
            let gemm = layer.gemm;
            let mut rng = Random::new(19);
            for round in 0..200 {
                // Widths of models, which the kernel takes as they come.
                let (hidden, intermediate) = [(3584, 3072), (4096, 1536), (7168, 2048), (640, 320)][rng.below(4)];
                let of_model = crate::jit::kernels::grouped_gemm::GroupedGemm { hidden, intermediate, ..gemm };
                dealing.sizes = Sizes::new(&of_model, [132, 114, 78][rng.below(3)]);
                dealing.may_overlap = round % 5 != 4;
                let chooser = Chooser { family: family(layer.shared.technique).unwrap(), batch_invariant: false };
                dealing.table = DealTable::new(&[chooser.candidates(&of_model)]);
                let counts = counts(&mut rng, num_experts, round);
                let mut offsets = vec![0_u32];
                counts.iter().for_each(|rows| offsets.push(offsets[offsets.len() - 1] + narrow(*rows)));
                let offsets = DeviceBuffer::from_slice(layer.stream(), &offsets).unwrap();
                dealing.queue(&layer, work.buffers.entries.address(), offsets.address()).unwrap();
                let experts = counts.iter().map(|rows| (Weights::Nvfp4, *rows));
                let machine = (&of_model, dealing.sizes.num_multiprocessors);
                let wanted = dealing.table.launches(experts, machine, dealing.may_overlap);
                let found = dealing.launches.download(layer.stream()).unwrap();
                assert_eq!(found[..wanted.len()], wanted, "round {round}: {counts:?} on {:?}", dealing.sizes);
                let is_divided = |launch: &Dealt| (1..machine.1).contains(&launch.num_blocks);
                num_divided += usize::from(wanted.iter().any(is_divided));
            }
        }
        assert!(num_divided > 50, "{num_divided} batches were divided");
    }
}
