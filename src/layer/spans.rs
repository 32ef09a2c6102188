//! When each phase of a layer ran: recorded where it is asked for, one branch a phase where it is not.

use std::time::{Duration, Instant};

/// One phase of one call of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its name, as in [`super::PhaseTimes`].
    pub phase: &'static str,
    /// When it began.
    pub begin: Instant,
    /// How long it took.
    pub time: Duration,
    /// What was done in it; absent: nothing was said of it.
    pub work: Option<Work>,
}

/// What was done in a phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// The chunk of the step.
    pub chunk: u64,
    /// Tokens that were sent out, received, or got their sum.
    pub num_tokens: u64,
    /// Rows of experts.
    pub num_rows: u64,
    /// Bytes that this rank sent to others.
    pub sent_bytes: u64,
}

/// Spans in the order in which they ended; absent: nobody asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Recorder(Option<Vec<Span>>);

impl Recorder {
    pub(super) fn start(&mut self) {
        self.0 = Some(Vec::new());
    }

    pub(super) fn record(&mut self, phase: &'static str, begin: Instant, time: Duration) {
        if let Some(spans) = &mut self.0 {
            spans.push(Span { phase, begin, time, work: None });
        }
    }

    /// Says what was done in the last span.
    pub(super) fn describe(&mut self, work: Work) {
        if let Some(span) = self.0.as_mut().and_then(|spans| spans.last_mut()) {
            span.work = Some(work);
        }
    }

    pub(super) fn take(&mut self) -> Vec<Span> {
        self.0.take().unwrap_or_default()
    }
}
