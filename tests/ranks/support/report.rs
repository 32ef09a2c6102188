//! The JSON report of `run --report`, read by pointer so that a missing field is named.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// A report.
#[derive(Debug, Clone)]
pub struct Report(pub Value);

impl Report {
    pub fn read(path: &Path) -> Self {
        let text = fs::read(path).unwrap_or_else(|error| panic!("cannot read report {}: {error}", path.display()));
        Self(serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{} is no JSON: {error}", path.display())))
    }

    /// The value at a JSON pointer.
    #[track_caller]
    pub fn at(&self, pointer: &str) -> &Value {
        self.0.pointer(pointer).unwrap_or_else(|| panic!("the report has no {pointer}: {}", self.0))
    }

    #[track_caller]
    pub fn count(&self, pointer: &str) -> u64 {
        self.at(pointer).as_u64().unwrap_or_else(|| panic!("{pointer} is no count: {}", self.at(pointer)))
    }

    /// A field of every rank, in rank order.
    #[track_caller]
    pub fn by_rank(&self, field: &str) -> Vec<u64> {
        (0..self.num_ranks()).map(|rank| self.count(&format!("/ranks/{rank}/{field}"))).collect()
    }

    #[track_caller]
    pub fn num_ranks(&self) -> usize {
        let ranks = self.at("/ranks").as_array().expect("/ranks is a list");
        for (position, rank) in ranks.iter().enumerate() {
            assert_eq!(rank["rank"], position, "ranks are listed in order: {}", self.0);
        }
        ranks.len()
    }

    /// Rows that each rank's kernels computed for a layer.
    #[track_caller]
    pub fn computed_rows(&self, layer: usize) -> Vec<u64> {
        let of_rank = |rank| {
            let launches = self.at(&format!("/ranks/{rank}/launches")).as_array().expect("launches is a list");
            let of_layer = launches.iter().filter(|launch| launch["layer"] == layer);
            of_layer.map(|launch| launch["rows"].as_u64().expect("rows is a count")).sum()
        };
        (0..self.num_ranks()).map(of_rank).collect()
    }

    /// Rows of each expert of a layer, over all ranks.
    #[track_caller]
    pub fn rows_per_expert(&self, layer: usize) -> Vec<u64> {
        let rows = self.layer(layer)["rows_per_expert"].as_array().expect("rows_per_expert is a list");
        rows.iter().map(|rows| rows.as_u64().expect("a count")).collect()
    }

    /// The entry of a layer.
    #[track_caller]
    pub fn layer(&self, layer: usize) -> &Value {
        let layers = self.at("/layers").as_array().expect("/layers is a list");
        layers
            .iter()
            .find(|entry| entry["layer"] == layer)
            .unwrap_or_else(|| panic!("the report has no layer {layer}: {}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_found_or_named() {
        let launches = json!([{"layer": 1, "rows": 3}, {"layer": 1, "rows": 4}, {"layer": 2, "rows": 9}]);
        let report = Report(json!({
            "ranks": [{"rank": 0, "rows_sent": 5, "launches": launches}],
            "layers": [{"layer": 1, "rows_per_expert": [7, 0]}],
        }));
        assert_eq!(report.by_rank("rows_sent"), [5]);
        assert_eq!(report.computed_rows(1), [7]);
        assert_eq!(report.rows_per_expert(1), [7, 0]);
        let payload = std::panic::catch_unwind(|| report.count("/ranks/0/bytes")).expect_err("no such field");
        assert!(payload.downcast_ref::<String>().expect("text").contains("/ranks/0/bytes"));
    }
}
