//! When every rank did what, as a trace that Perfetto and `chrome://tracing` open: one track a rank, on rank 0's clock.
//!
//! The form is Chrome's JSON trace event format, with complete events (`X`) and names of tracks (`M`).

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::layer::{PhaseTimes, Work};
use crate::world::ClockReading;

/// What encloses the phases of a layer, and what comes before them.
const OUTER: [&str; 3] = [LOAD, STEP, LAYER];
/// Everything before the first step.
pub const LOAD: &str = "load";
/// All layers once.
pub const STEP: &str = "step";
/// One call of a layer.
pub const LAYER: &str = "layer";

/// Something that a rank did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What: a phase, or what encloses phases.
    pub name: &'static str,
    /// In which step; 0 before the first.
    pub step: u64,
    /// In which layer.
    pub layer: Option<u32>,
    /// When it began, on the rank's own clock.
    pub begin_ns: u64,
    /// How long it took.
    pub time_ns: u64,
    /// What was done.
    pub work: Option<Work>,
}

/// An event on its way to rank 0.
pub type Record = [u64; 10];

impl Event {
    /// The event as plain words.
    #[must_use]
    pub fn record(&self) -> Record {
        let Work { chunk, num_tokens, num_rows, sent_bytes } = self.work.unwrap_or_default();
        let name = names().position(|name| name == self.name).unwrap_or(usize::MAX) as u64;
        let layer = self.layer.map_or(0, |layer| u64::from(layer) + 1);
        let has_work = u64::from(self.work.is_some());
        [name, self.step, layer, self.begin_ns, self.time_ns, has_work, chunk, num_tokens, num_rows, sent_bytes]
    }

    /// The event of a record; `None` where it names none, as of another build.
    #[must_use]
    pub fn of_record(record: &Record) -> Option<Self> {
        let [name, step, layer, begin_ns, time_ns, has_work, chunk, num_tokens, num_rows, sent_bytes] = *record;
        let name = names().nth(usize::try_from(name).ok()?)?;
        let layer = layer.checked_sub(1).map(u32::try_from).transpose().ok()?;
        let work = (has_work == 1).then_some(Work { chunk, num_tokens, num_rows, sent_bytes });
        Some(Self { name, step, layer, begin_ns, time_ns, work })
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    OUTER.into_iter().chain(PhaseTimes::NAMES.iter().copied())
}

/// What one rank did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankTrace {
    /// Its host.
    pub host: String,
    /// What it did.
    pub events: Vec<Event>,
    /// Events that were not kept.
    pub num_dropped: u64,
    /// Its clock before the first step.
    pub before: ClockReading,
    /// Its clock behind the last step.
    pub after: ClockReading,
}

/// What all ranks did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// By rank.
    pub ranks: Vec<RankTrace>,
    /// The digest of what was selected.
    pub selection: String,
    /// The digest of all that ranks have compared.
    pub session: String,
}

impl RankTrace {
    /// A moment of this rank on rank 0's clock: clocks that drift apart do so evenly between the two readings.
    fn on_rank_0(&self, ns: u64) -> i64 {
        let signed = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
        let (first, last) = (self.before.ahead_ns, self.after.ahead_ns);
        let lasted = signed(self.after.at_ns) - signed(self.before.at_ns);
        let since = (signed(ns) - first - signed(self.before.at_ns)).clamp(0, lasted.max(0));
        // Drift is microseconds over minutes: an f64 holds it to far below a nanosecond.
        let share = if lasted > 0 { since as f64 / lasted as f64 } else { 0.0 };
        #[expect(clippy::cast_possible_truncation, reason = "below the drift, which is an i64")]
        let drifted = ((last - first) as f64 * share).round() as i64;
        signed(ns) - first - drifted
    }

    /// The most by which an event's place on rank 0's clock can be wrong.
    fn uncertainty_ns(&self) -> u64 {
        self.before.uncertainty_ns.max(self.after.uncertainty_ns)
    }
}

impl Trace {
    /// Writes the trace, an event a line.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let hosts = self.hosts();
        let begins = self.ranks.iter().flat_map(|rank| rank.events.iter().map(|event| rank.on_rank_0(event.begin_ns)));
        let zero = begins.min().unwrap_or_default();
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\n\"traceEvents\":[", self.metadata())?;
        let mut is_first = true;
        let mut line = |out: &mut dyn Write, event: &Value| {
            out.write_all(if std::mem::take(&mut is_first) { b"\n" } else { b",\n" })?;
            serde_json::to_writer(&mut *out, event).map_err(io::Error::from)
        };
        for (pid, host) in hosts.iter().enumerate() {
            line(out, &json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": host}}))?;
        }
        for (rank, of_rank) in self.ranks.iter().enumerate() {
            let pid = hosts.iter().position(|host| *host == of_rank.host).unwrap_or_default();
            let name = format!("rank {rank}");
            line(out, &json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": name}}))?;
            let order = json!({"sort_index": rank});
            line(out, &json!({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": order}))?;
            for event in &of_rank.events {
                // Both ends are moved, so that what lies within another event stays within it.
                let begin = of_rank.on_rank_0(event.begin_ns);
                let end = of_rank.on_rank_0(event.begin_ns.saturating_add(event.time_ns));
                let (ts, dur) = (us(begin - zero), us(end - begin));
                let (name, args) = (shown(event), args(event));
                let cat = if OUTER.contains(&event.name) { event.name } else { "phase" };
                let complete = json!({
                    "ph": "X", "name": name, "cat": cat, "pid": pid, "tid": rank, "ts": ts, "dur": dur, "args": args,
                });
                line(out, &complete)?;
            }
        }
        out.write_all(b"\n]}\n")
    }

    /// Every host once, in the order of its first rank.
    fn hosts(&self) -> Vec<&str> {
        let mut hosts: Vec<&str> = Vec::new();
        for rank in &self.ranks {
            if !hosts.contains(&rank.host.as_str()) {
                hosts.push(&rank.host);
            }
        }
        hosts
    }

    /// What can't be drawn: where clocks stood, how well that is known, and what was not kept.
    fn metadata(&self) -> Value {
        let clock = |(rank, of_rank): (usize, &RankTrace)| {
            json!({
                "rank": rank,
                "ahead_us_before_steps": us(of_rank.before.ahead_ns),
                "ahead_us_after_steps": us(of_rank.after.ahead_ns),
                "uncertainty_us": of_rank.uncertainty_ns() as f64 / 1e3,
                "num_dropped_events": of_rank.num_dropped,
            })
        };
        json!({
            "written_by": concat!("lockstep ", env!("CARGO_PKG_VERSION")),
            "selection": self.selection,
            "session": self.session,
            "clock": "rank 0's; other ranks' clocks were read by round trips over MPI before and after the steps, \
                      and an event's place is wrong by at most its rank's uncertainty_us, if clocks drift evenly",
            "ranks": self.ranks.iter().enumerate().map(clock).collect::<Vec<_>>(),
        })
    }
}

fn us(ns: i64) -> f64 {
    ns as f64 / 1e3
}

/// A name that tells steps and layers apart in a drawing.
fn shown(event: &Event) -> String {
    match (event.name, event.layer) {
        (STEP, _) => format!("step {}", event.step),
        (LAYER, Some(layer)) => format!("layer {layer}"),
        (name, _) => name.to_owned(),
    }
}

fn args(event: &Event) -> Value {
    let mut args = serde_json::Map::new();
    if event.name != LOAD {
        args.insert("step".to_owned(), event.step.into());
    }
    if let Some(layer) = event.layer {
        args.insert("layer".to_owned(), layer.into());
    }
    if let Some(Work { chunk, num_tokens, num_rows, sent_bytes }) = event.work {
        let counts = [("chunk", chunk), ("tokens", num_tokens), ("rows", num_rows), ("bytes", sent_bytes)];
        args.extend(counts.map(|(name, count)| (name.to_owned(), count.into())));
    }
    Value::Object(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &'static str, begin_ns: u64) -> Event {
        Event { name, step: 0, layer: None, begin_ns, time_ns: 1500, work: None }
    }

    /// A rank that is `ahead_ns` ahead of rank 0, and drifts by `drift_ns` over a second.
    fn rank(host: &str, ahead_ns: i64, drift_ns: i64, events: Vec<Event>) -> RankTrace {
        let before = ClockReading { at_ns: 1_000_000, ahead_ns, uncertainty_ns: 700 };
        let after = ClockReading { at_ns: 1_001_000_000, ahead_ns: ahead_ns + drift_ns, uncertainty_ns: 900 };
        RankTrace { host: host.to_owned(), events, num_dropped: 0, before, after }
    }

    fn written(trace: &Trace) -> Value {
        let mut bytes = Vec::new();
        trace.write(&mut bytes).expect("memory takes it");
        serde_json::from_slice(&bytes).expect("JSON")
    }

    #[test]
    fn records_are_what_they_were_made_of() {
        let work = Work { chunk: 3, num_tokens: 5, num_rows: 7, sent_bytes: 9 };
        for name in names() {
            let event = Event { step: 4, layer: Some(0), work: Some(work), ..event(name, 17) };
            assert_eq!(Event::of_record(&event.record()), Some(event));
            let bare = Event { layer: None, work: None, ..event };
            assert_eq!(Event::of_record(&bare.record()), Some(bare));
        }
        assert_eq!(Event::of_record(&[99, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn moments_come_to_rank_0s_clock_also_where_clocks_drift() {
        let ahead = rank("a", 5_000, 0, Vec::new());
        assert_eq!(ahead.on_rank_0(1_005_000), 1_000_000);
        assert_eq!(rank("a", -5_000, 0, Vec::new()).on_rank_0(995_000), 1_000_000);
        let drifting = rank("a", 5_000, 200, Vec::new());
        // Before the first reading, half-way, and behind the second.
        for (ns, wanted) in [(5_000, 0), (501_005_100, 501_000_000), (2_000_005_200, 2_000_000_000)] {
            assert_eq!(drifting.on_rank_0(ns), wanted);
        }
        assert_eq!(drifting.uncertainty_ns(), 900);
    }

    #[test]
    fn a_trace_has_a_track_a_rank_on_one_clock() {
        let work = Work { chunk: 1, num_tokens: 2, num_rows: 3, sent_bytes: 4 };
        let dispatch = Event { name: "dispatch", step: 2, layer: Some(7), work: Some(work), ..event(LOAD, 8_000) };
        let trace = Trace {
            ranks: vec![
                rank("a", 0, 0, vec![event(LOAD, 1_000), dispatch]),
                rank("b \"<&", 6_000, 0, vec![Event { layer: Some(7), ..event(LAYER, 9_000) }]),
            ],
            selection: "s".to_owned(),
            session: "t".to_owned(),
        };
        let json = written(&trace);
        let events = json["traceEvents"].as_array().expect("events");
        let drawn: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        let of = |event: &Value| (event["name"].clone(), event["tid"].clone(), event["ts"].as_f64());
        assert_eq!(of(drawn[0]), (json!("load"), json!(0), Some(0.0)));
        assert_eq!(of(drawn[1]), (json!("dispatch"), json!(0), Some(7.0)));
        assert_eq!(of(drawn[2]), (json!("layer 7"), json!(1), Some(2.0)));
        assert_eq!(drawn[1]["dur"], 1.5);
        assert_eq!(drawn[1]["args"], json!({"step": 2, "layer": 7, "chunk": 1, "tokens": 2, "rows": 3, "bytes": 4}));
        assert_eq!(drawn[0]["args"], json!({}));
        let named: Vec<_> = events.iter().filter(|event| event["ph"] == "M").map(|e| &e["args"]["name"]).collect();
        assert!(named.contains(&&json!("b \"<&")) && named.contains(&&json!("rank 1")), "{named:?}");
        let clock = &json["otherData"]["ranks"][1];
        assert_eq!((clock["ahead_us_before_steps"].as_f64(), clock["uncertainty_us"].as_f64()), (Some(6.0), Some(0.9)));
    }

    #[test]
    fn nothing_done_is_a_trace_too() {
        let trace = Trace { ranks: Vec::new(), selection: String::new(), session: String::new() };
        assert_eq!(written(&trace)["traceEvents"], json!([]));
    }
}
