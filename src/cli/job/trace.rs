//! What `--trace` keeps while a job runs, and its way to rank 0.

use std::time::{Duration, Instant};

use crate::layer::LayerOutput;
use crate::report::{Decided, Event, LAYER, LOAD, RankTrace, Record, STEP, Trace};
use crate::world::{ClockReading, World};

/// Events that are kept, of all ranks together: what a viewer still opens, some 300 MB.
const MAX_EVENTS: usize = 1 << 21;

/// Events of this rank.
pub(super) struct Recorder<'a> {
    world: &'a World,
    events: Vec<Event>,
    num_dropped: u64,
    /// Of all ranks, on rank 0.
    before: Option<Vec<ClockReading>>,
}

impl<'a> Recorder<'a> {
    /// Reads the ranks' clocks; collective. What was before the steps began at `begin`.
    pub(super) fn start(world: &'a World, begin: Instant, load: Duration) -> Self {
        let mut recorder = Self { world, events: Vec::new(), num_dropped: 0, before: None };
        recorder.push((LOAD, 0, None), (begin, load));
        recorder.before = world.read_clocks();
        recorder
    }

    fn push(&mut self, (name, step, layer): (&'static str, u64, Option<u32>), (begin, time): (Instant, Duration)) {
        let begin_ns = self.world.clock_ns(begin);
        self.keep(Event { name, step, layer, begin_ns, time_ns: ns(time), work: None });
    }

    fn keep(&mut self, event: Event) {
        if self.events.len() < max_events(self.world) {
            self.events.push(event);
        } else {
            self.num_dropped += 1;
        }
    }

    /// A call of a layer that began at `begin`, with its phases.
    pub(super) fn layer(&mut self, (step, layer): (u64, u32), begin: Instant, output: &mut LayerOutput) {
        self.push((LAYER, step, Some(layer)), (begin, begin.elapsed()));
        for span in output.stats.times.take_spans() {
            let begin_ns = self.world.clock_ns(span.begin);
            let (name, time_ns) = (span.phase, ns(span.time));
            self.keep(Event { name, step, layer: Some(layer), begin_ns, time_ns, work: span.work });
        }
    }

    /// A step that began at `begin`.
    pub(super) fn step(&mut self, step: u64, begin: Instant) {
        self.push((STEP, step, None), (begin, begin.elapsed()));
    }

    /// Reads the clocks again, and gives what all ranks did on rank 0; collective.
    pub(super) fn finish(self, decided: &Decided) -> Option<Trace> {
        let world = self.world;
        let after = world.read_clocks();
        let mut words: Vec<u64> = vec![self.num_dropped];
        words.extend(self.events.iter().flat_map(Event::record));
        // Equal on all ranks, as gathering wants.
        let max_bytes = 8 + size_of::<Record>() * max_events(world);
        let all = world.gather_bytes(bytemuck::cast_slice(&words), max_bytes);
        let hosts = world.all_gather_bytes(world.host().as_bytes());
        let clocks = self.before?.into_iter().zip(after?);
        let ranks = all?.into_iter().zip(hosts).zip(clocks).map(|((bytes, host), (before, after))| {
            let words: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
            let (num_dropped, records) = words.split_first().unwrap_or((&0, &[]));
            let (records, _) = records.as_chunks();
            RankTrace {
                host: String::from_utf8_lossy(&host).into_owned(),
                events: records.iter().filter_map(Event::of_record).collect(),
                num_dropped: *num_dropped,
                before,
                after,
            }
        });
        let (selection, session) = (decided.selection.clone(), decided.session.clone());
        Some(Trace { ranks: ranks.collect(), selection, session })
    }
}

fn max_events(world: &World) -> usize {
    MAX_EVENTS / world.size()
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
