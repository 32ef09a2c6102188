//! Pages of made-up runs: their structure, their bounds, and that names from outside stay text.

use super::*;
use crate::dispatch::capacity::BufferPlan;
use crate::report::{Decided, DecidedLayer, LinkBytes, RankReport, StepReport};

/// A run of so many ranks, experts and layers; ranks lie eight on a host, and experts are as busy as their number's digits say.
struct Made {
    num_ranks: usize,
    num_experts: usize,
    num_layers: u32,
    name: &'static str,
}

impl Made {
    fn report(&self) -> RunReport {
        let ranks = (0..self.num_ranks).map(|rank| self.rank(rank)).collect();
        let decided = Decided {
            deployment: self.name.to_owned(),
            num_ranks: self.num_ranks,
            num_nodes: self.num_ranks.div_ceil(8),
            technique: "simd".to_owned(),
            isa: "avx2".to_owned(),
            selection: "5".repeat(64),
            session: "6".repeat(64),
            part: "block".to_owned(),
            has_latent: false,
            buffers: BufferPlan::default(),
            layers: (0..self.num_layers).map(|layer| self.decided(layer)).collect(),
            tactics: Vec::new(),
        };
        RunReport::join(decided, ranks, StepReport::new(vec![1e4, 2e4]))
    }

    fn decided(&self, layer: u32) -> DecidedLayer {
        DecidedLayer {
            layer,
            quant: "nvfp4".to_owned(),
            activation: "situ:4,25".to_owned(),
            transport: "host".to_owned(),
            levels: "two".to_owned(),
            payload: "bf16".to_owned(),
            combine: "slot".to_owned(),
            combine_dtype: "f32".to_owned(),
            identities: vec![format!("lockstep.simd.{}.nvfp4", self.name)],
            dense: Vec::new(),
            why: "preferred by backend auto".to_owned(),
            no_cuda_graph: None,
            no_overlap: Some("dispatch.overlap: off".to_owned()),
        }
    }

    fn rank(&self, rank: usize) -> RankReport {
        let experts = |rank: usize| rank * self.num_experts / self.num_ranks;
        let own = experts(rank)..experts(rank + 1);
        let rows: Vec<u64> = own.clone().map(|expert| (expert % 10) as u64).collect();
        let quant = serde_json::json!({"num_blocks": 0, "num_saturated": 0, "num_zeroed": 0});
        let of_layer = |layer: u32| {
            serde_json::json!({
                "layer": layer, "first_expert": own.start, "rows_per_expert": rows, "chunks": 1, "device_waits": 0,
                "graph_captures": 0, "graph_replays": 0,
                "tactics": [],
                "fc1_input": quant, "fc2_input": quant, "slots": rows.iter().sum::<u64>(), "num_not_finite": 0, "num_steps_off": 0,
            })
        };
        let launch = |layer: u32| {
            let identity = format!("lockstep.simd.{}.nvfp4", self.name);
            serde_json::json!({
                "layer": layer, "part": "routed", "identity": identity, "rows": rows.iter().sum::<u64>(), "calls": 2,
            })
        };
        let bytes_to: Vec<u64> = (0..self.num_ranks).map(|to| 1000 * (1 + to as u64)).collect();
        serde_json::from_value(serde_json::json!({
            "rank": rank, "host": format!("{}-{}", self.name, rank / 8), "num_tokens": 3, "num_threads": 1,
            "bytes_read": {"experts": 1, "replicated": 2}, "load_experts_s": 0.5, "weight_bytes": 3, "planned_bytes": 4, "peak_rss_bytes": 5,
            "rows_sent": 6, "rows_received": 7, "dispatch_bytes_sent": 8, "links": LinkBytes::default(), "bytes_to": bytes_to, "step_collectives": 9,
            "launches": (0..self.num_layers).map(launch).collect::<Vec<_>>(),
            "layers": (0..self.num_layers).map(of_layer).collect::<Vec<_>>(),
            "routed_s": 0.0, "phases": [["load", 1.5], ["dispatch", 0.25], ["experts", 0.5 + rank as f64]],
        }))
        .expect("a rank's report")
    }
}

const SMALL: Made = Made { num_ranks: 2, num_experts: 5, num_layers: 1, name: "laptop" };

/// The tags that open in a page, with ids and classes; every one is closed again, in order.
fn tags(page: &str) -> Vec<String> {
    let mut open: Vec<&str> = Vec::new();
    let mut tags = Vec::new();
    let body = page.split_once("</style>").map_or("", |(_, body)| body);
    for piece in body.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("a < that opens no tag: {piece}"));
        let name = tag.split_whitespace().next().unwrap_or_default();
        match name.strip_prefix('/') {
            // The head and the page itself were opened before.
            Some("head" | "html") => {}
            Some(closed) => assert_eq!(open.pop(), Some(closed), "{piece}"),
            None => {
                open.push(name);
                let attribute = |of: &str| {
                    let value = tag.split_once(&format!(" {of}=\"")).and_then(|(_, rest)| rest.split('"').next());
                    value.map(str::to_owned)
                };
                let id = attribute("id").map_or_else(String::new, |id| format!("#{id}"));
                let class =
                    attribute("class").map_or_else(String::new, |class| format!(".{}", class.replace(' ', ".")));
                tags.push(format!("{name}{id}{class}"));
            }
        }
    }
    assert_eq!(open, Vec::<&str>::new());
    tags
}

#[test]
fn a_small_page_has_this_structure() {
    let page = page(&SMALL.report());
    let shown = ["section", "h1", "h2", "h3", "details", "table", "svg", "rect", "ul"];
    let outline: Vec<String> = tags(&page)
        .into_iter()
        .filter(|tag| shown.contains(&tag.split(['#', '.']).next().unwrap_or_default()))
        .collect();
    insta::assert_snapshot!(outline.join(" "));
}

#[test]
fn names_from_outside_stay_text() {
    let name = "<script>alert(1)</script>\"' onload=x &amp; <b>";
    let report = Made { name, ..SMALL }.report();
    let page = page(&report);
    let planted = |tag: &String| tag.starts_with("script") || tag == "b";
    assert!(!tags(&page).iter().any(planted), "{page}");
    for place in ["<h1>", "<title>", "lockstep.simd."] {
        let (_, after) = page.split_once(place).unwrap_or_else(|| panic!("no {place}"));
        assert!(
            after.starts_with("&lt;script&gt;alert(1)&lt;/script&gt;&quot;' onload=x &amp;amp; &lt;b&gt;"),
            "{place}"
        );
    }
    let hosts = Made { name, num_ranks: 9, ..SMALL }.report();
    assert!(!super::page(&hosts).contains("<script"));
}

#[test]
fn nothing_is_fetched() {
    let page = page(&SMALL.report());
    for needle in ["http:", "https:", "url(", "@import", "src=", "<link", "<script"] {
        assert!(!page.contains(needle), "{needle}");
    }
    assert!(page.contains(POLICY), "the browser is told so too");
}

#[test]
fn any_number_of_ranks_makes_a_page_of_bounded_size() {
    for (num_ranks, num_experts, num_layers) in [(1, 896, 92), (3, 2, 1), (16, 896, 92), (300, 896, 3), (512, 896, 92)]
    {
        let report = Made { num_ranks, num_experts, num_layers, name: "x" }.report();
        let page = page(&report);
        let rects = tags(&page).iter().filter(|tag| tag.starts_with("rect")).count();
        // Experts, a matrix of layers and one of links at most, and bars.
        assert!(rects <= 30_000 + 2 * 96 * 96 + 3 * num_ranks, "{num_ranks} ranks: {rects}");
        assert!(page.len() < 16 << 20, "{num_ranks} ranks: {} bytes", page.len());
        let left_out = num_experts * num_layers as usize > 30_000;
        assert_eq!(page.contains("id=\"left-out\""), left_out, "{num_ranks} ranks");
    }
}

#[test]
fn a_failed_check_is_what_the_page_begins_with() {
    let mut report = SMALL.report();
    assert!(page(&report).contains("Every check passed"));
    report.checks[1].pass = false;
    let page = page(&report);
    assert!(page.contains("<h2 class=\"bad\">1 of 4 checks FAILED</h2>") && page.contains("FAIL</span>"), "{page}");
}

#[test]
fn bytes_are_summed_by_the_kind_of_their_way() {
    let report = Made { num_ranks: 9, ..SMALL }.report();
    let own: u64 = (0..9).map(|rank| 1000 * (rank + 1)).sum();
    let to_last = 8 * 9000;
    let from_last = (0..8).map(|rank| 1000 * (rank + 1)).sum::<u64>();
    let all: u64 = 9 * own;
    let between_hosts = to_last + from_last;
    assert_eq!(links::totals(&report), links::Totals { between_hosts, within_hosts: all - own - between_hosts, own });
}

#[test]
fn numbers_are_grouped() {
    assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    assert_eq!([counted(1, "host"), counted(2, "host")], ["1 host", "2 hosts"]);
}
