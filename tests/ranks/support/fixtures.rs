//! Where the project's fixtures lie, and what the expected files hold.

use std::path::PathBuf;

use super::places;

/// The directory of a fixture checkpoint.
pub fn checkpoint(name: &str) -> PathBuf {
    places::of_project("tests/fixtures").join(name)
}

/// A file of expected values.
pub fn expected(name: &str) -> PathBuf {
    checkpoint("expected").join(format!("{name}.safetensors"))
}

/// One layer of a fixture checkpoint, and where its expected values are.
#[derive(Debug, Clone)]
pub struct Layer {
    pub layer: usize,
    pub file: PathBuf,
    /// Before every tensor name in `file`.
    pub prefix: String,
}

impl Layer {
    pub fn tensor(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// A tensor of the expected files with the options that ask for it.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// Without the layer's prefix.
    pub tensor: String,
    pub part: &'static str,
    /// `--activations`
    pub activations: &'static str,
    /// `--activation`; absent: the checkpoint's own.
    pub activation: Option<&'static str>,
    /// The relative L2 that DESIGN.md section 11 allows.
    pub bound: f64,
}

/// A fixture checkpoint with all that is known of it.
#[derive(Debug, Clone)]
pub struct Fixture {
    pub name: &'static str,
    pub layers: Vec<Layer>,
    pub expectations: Vec<Expectation>,
}

/// The `--activations` of the modes in the expected files' tensor names.
const MODES: [(&str, &str); 2] = [("w4a16", "bf16"), ("w4a4", "quantised")];

/// Every layer of every fixture checkpoint, with every mode, activation and part that its expected file holds.
pub fn all() -> Vec<Fixture> {
    let mut fixtures: Vec<Fixture> = [
        ("modelopt-dsv3-tiny", [1, 2], &["routed", "shared"][..]),
        ("modelopt-dsv3-mixed", [1, 2], &["routed", "shared"]),
        ("modelopt-qwen3-tiny", [0, 1], &["routed"]),
    ]
    .into_iter()
    .map(|(name, layers, parts)| Fixture {
        name,
        layers: layers.map(|layer| modelopt_layer(name, layer)).to_vec(),
        expectations: modelopt_expectations(parts),
    })
    .collect();
    fixtures.push(Fixture { name: "k3-tiny", layers: [1, 2].map(k3_layer).to_vec(), expectations: k3_expectations() });
    fixtures
}

/// The fixture of that name.
pub fn named(name: &str) -> Fixture {
    all().into_iter().find(|fixture| fixture.name == name).unwrap_or_else(|| panic!("no fixture {name}"))
}

fn modelopt_layer(checkpoint: &str, layer: usize) -> Layer {
    Layer { layer, file: expected(&format!("{checkpoint}.layer{layer}")), prefix: String::new() }
}

fn k3_layer(layer: usize) -> Layer {
    Layer { layer, file: expected("k3-tiny"), prefix: format!("{layer}.") }
}

fn modelopt_expectations(parts: &[&'static str]) -> Vec<Expectation> {
    let mut list = Vec::new();
    for &part in parts {
        for (mode, activations) in MODES {
            for (name, activation) in [("swiglu", "swiglu"), ("situ", "situ:4,25")] {
                list.push(Expectation {
                    tensor: format!("{part}.{mode}.{name}"),
                    part,
                    activations,
                    activation: Some(activation),
                    bound: 1e-5,
                });
            }
        }
    }
    list
}

fn k3_expectations() -> Vec<Expectation> {
    let mut list = Vec::new();
    for (mode, activations) in MODES {
        for (part, stem) in [("routed", "routed_latent_sum"), ("block", "block")] {
            // The latent is computed before it is quantised: a last-bit difference may move a code.
            let bound = if mode == "w4a4" { 1e-2 } else { 1e-5 };
            list.push(Expectation { tensor: format!("{stem}.{mode}"), part, activations, activation: None, bound });
        }
        // The shared experts are bf16, so both modes give one answer.
        list.push(Expectation { tensor: "shared".into(), part: "shared", activations, activation: None, bound: 1e-5 });
    }
    list
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::safetensors;
    use super::*;

    /// So that an expected tensor which nobody compares is noticed.
    #[test]
    fn the_expectations_are_exactly_what_the_files_hold() {
        let inputs = ["x", "topk_idx", "topk_weights", "router_logits", "latent"];
        for fixture in all() {
            for layer in &fixture.layers {
                let held: BTreeSet<String> = safetensors::read(&layer.file)
                    .into_keys()
                    .filter_map(|name| Some(name.strip_prefix(&layer.prefix)?.to_string()))
                    .filter(|name| !inputs.contains(&name.as_str()))
                    .filter(|name| !name.starts_with(char::is_numeric))
                    .collect();
                let wanted = fixture.expectations.iter().map(|expectation| expectation.tensor.clone()).collect();
                assert_eq!(held, wanted, "{} layer {}", fixture.name, layer.layer);
            }
        }
    }
}
