//! What a step did, counted where it is done.

use std::time::{Duration, Instant};

use crate::backend::ForwardStats;
use crate::dispatch::transport::Handle;
use crate::numerics::nvfp4::QuantCounts;
use crate::select::Identity;

use super::spans::{Recorder, Span, Work};

/// Counts of one layer on one rank; adds up over steps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// Times this was added to: calls of the layer.
    pub num_calls: u64,
    /// Rows that each identity computed, routed experts and shared ones apart.
    pub routed_rows: Vec<(Identity, u64)>,
    /// Rows through the shared experts.
    pub shared_rows: Vec<(Identity, u64)>,
    /// Batches that each tactic computed, of a backend that has several.
    pub tactic_calls: Vec<(&'static str, u64)>,
    /// `[num_local_experts]` rows of each expert of this rank.
    pub rows_per_expert: Vec<u64>,
    /// Block scales of FC1's quantised input, as received (or sent, where tokens travel quantised).
    pub fc1_input: QuantCounts,
    /// Block scales of FC2's quantised input.
    pub fc2_input: QuantCounts,
    /// Chunks of the dispatch.
    pub num_chunks: u64,
    /// Times the host has waited for its device on the way of tokens and rows; the caller's own wait for the sums not included.
    pub num_device_waits: u64,
    /// Steps that were recorded as a CUDA graph after they had run.
    pub num_graph_captures: u64,
    /// Steps that were replayed.
    pub num_graph_replays: u64,
    /// Tokens sent to other ranks.
    pub num_tokens_sent: u64,
    /// Tokens received, this rank's own included.
    pub num_tokens_received: u64,
    /// Where the time went.
    pub times: PhaseTimes,
    /// On GPUs, from the first chunk's dispatch to the last one's sums. Where chunks overlap that is less than their phases
    /// together; what it is more than the experts' is communication that nothing hides.
    pub routed: Duration,
}

impl LayerStats {
    pub(super) fn new(num_local_experts: usize) -> Self {
        Self { num_calls: 1, rows_per_expert: vec![0; num_local_experts], ..Self::default() }
    }

    pub(super) fn count_dispatch(&mut self, handle: &Handle) {
        self.fc1_input += handle.sent_quant;
        self.num_tokens_sent += handle.num_sent_remote;
        self.num_tokens_received += handle.num_received_tokens() as u64;
        for (rows, pair) in self.rows_per_expert.iter_mut().zip(handle.compute.expert_offsets.windows(2)) {
            *rows += (pair[1] - pair[0]) as u64;
        }
    }

    pub(super) fn count_forward(&mut self, forward: ForwardStats, fc1_input: QuantCounts) {
        self.fc1_input += fc1_input;
        self.fc2_input += forward.fc2_input;
        add_counts(&mut self.routed_rows, &forward.rows_by_identity);
        // A batch without rows launches nothing.
        if let Some(tactic) = forward.tactic.filter(|_| !forward.rows_by_identity.is_empty()) {
            add_counts(&mut self.tactic_calls, &[(tactic, 1)]);
        }
    }

    pub(super) fn count_shared(&mut self, forward: &ForwardStats, fc1_input: QuantCounts) {
        self.fc1_input += fc1_input;
        self.fc2_input += forward.fc2_input;
        add_counts(&mut self.shared_rows, &forward.rows_by_identity);
    }

    /// Adds another call's counts of the same layer.
    pub fn add(&mut self, other: &Self) {
        self.num_calls += other.num_calls;
        add_counts(&mut self.routed_rows, &other.routed_rows);
        add_counts(&mut self.shared_rows, &other.shared_rows);
        add_counts(&mut self.tactic_calls, &other.tactic_calls);
        self.rows_per_expert.resize(other.rows_per_expert.len(), 0);
        self.rows_per_expert.iter_mut().zip(&other.rows_per_expert).for_each(|(sum, rows)| *sum += rows);
        self.fc1_input += other.fc1_input;
        self.fc2_input += other.fc2_input;
        self.num_chunks += other.num_chunks;
        self.num_device_waits += other.num_device_waits;
        self.num_graph_captures += other.num_graph_captures;
        self.num_graph_replays += other.num_graph_replays;
        self.num_tokens_sent += other.num_tokens_sent;
        self.num_tokens_received += other.num_tokens_received;
        self.times.add(&other.times);
        self.routed += other.routed;
    }
}

/// Adds counts by what they count.
fn add_counts<T: Copy + PartialEq>(sums: &mut Vec<(T, u64)>, counts: &[(T, u64)]) {
    for (counted, count) in counts {
        match sums.iter_mut().find(|(known, _)| known == counted) {
            Some((_, sum)) => *sum += count,
            None => sums.push((*counted, *count)),
        }
    }
}

macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Time spent in each phase of a layer.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct PhaseTimes {
            $($(#[$doc])* pub $name: Duration,)+
            recorder: Recorder,
        }

        impl PhaseTimes {
            $(
                /// Runs `work` and adds its time to the phase.
                pub fn $name<T>(&mut self, work: impl FnOnce() -> T) -> T {
                    let begin = Instant::now();
                    let value = work();
                    let time = begin.elapsed();
                    self.$name += time;
                    self.recorder.record(stringify!($name), begin, time);
                    value
                }
            )+

            /// Adds another's times; not its spans.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)+
            }

            /// Every phase's name.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            /// Every phase by name.
            #[must_use]
            pub fn by_name(&self) -> Vec<(&'static str, Duration)> {
                vec![$((stringify!($name), self.$name)),+]
            }
        }
    };
}

phases! {
    /// Router logits and top-k.
    route,
    /// Latent projections and norm.
    latent,
    /// Sizes, packing, and the tokens' way to their experts, waiting included. On GPUs this and the next two are times of the
    /// device's stream.
    dispatch,
    /// FC1, activation, FC2.
    experts,
    /// The rows' way home and their sum, waiting included.
    combine,
    /// The shared experts.
    shared,
}

impl PhaseTimes {
    /// From here on every phase is also kept as a [`Span`].
    pub fn record_spans(&mut self) {
        self.recorder.start();
    }

    /// Says what was done in the phase that ended last.
    pub(super) fn describe(&mut self, work: Work) {
        self.recorder.describe(work);
    }

    /// Takes the spans, in the order in which they ended.
    #[must_use]
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.recorder.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_add_up_to_the_phases_and_are_kept_where_asked_for() {
        let mut silent = PhaseTimes::default();
        silent.dispatch(|| ());
        silent.describe(Work { chunk: 1, ..Work::default() });
        assert_eq!(silent.take_spans(), Vec::new());

        let mut times = PhaseTimes::default();
        times.record_spans();
        times.dispatch(|| std::hint::black_box(vec![0u8; 1 << 16]));
        let work = Work { chunk: 1, num_tokens: 2, num_rows: 3, sent_bytes: 4 };
        times.describe(work);
        times.experts(|| ());
        times.dispatch(|| ());
        let spans = times.take_spans();
        let phases: Vec<_> = spans.iter().map(|span| (span.phase, span.work)).collect();
        assert_eq!(phases, [("dispatch", Some(work)), ("experts", None), ("dispatch", None)]);
        for (name, time) in times.by_name() {
            let sum: Duration = spans.iter().filter(|span| span.phase == name).map(|span| span.time).sum();
            assert_eq!(sum, time, "{name}");
        }
        assert!(spans.windows(2).all(|pair| pair[0].begin + pair[0].time <= pair[1].begin));
        assert!(spans.iter().all(|span| PhaseTimes::NAMES.contains(&span.phase)));
    }
}
