//! Reading `hf_quant_config.json` and config.json's `quantization_config` into one set of declarations.
//!
//! Either may be absent. Where both exist they must agree on algorithm, group size and listed layers; differing exclusions
//! are reported, and the first file's are followed.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value};

use super::error::{ModelError, ModelWarning};
use super::fields::{CONFIG, Fields, parse_object, wrong_type};
use super::patterns::{ModulePattern, canonical};
use super::quantisation::{Format, Group, Quantisation};
use crate::numerics::nvfp4::BLOCK;

const HF_QUANT: &str = "hf_quant_config.json";

/// One file's declarations, as written.
struct Declaration {
    file: &'static str,
    algorithm: Option<String>,
    group_size: Option<u64>,
    excluded: Vec<String>,
    layers: HashMap<String, Format>,
    groups: Vec<Group>,
}

/// Reads both files; `hf_quant` is the text of `hf_quant_config.json` where there is one.
pub(super) fn quantisation(
    fields: &Fields,
    hf_quant: Option<&str>,
    warnings: &mut Vec<ModelWarning>,
) -> Result<Quantisation, ModelError> {
    let config = match fields.get("quantization_config") {
        None => None,
        Some(Value::Object(map)) => Some(from_config(map)?),
        Some(other) => return Err(wrong_type(CONFIG, "quantization_config", "an object", other)),
    };
    let hf = hf_quant.map(from_hf_quant).transpose()?;
    let declaration = match (hf, config) {
        (None, None) => return Ok(Quantisation::default()),
        (None, Some(config)) if config.algorithm.is_none() && !config.groups.is_empty() => {
            return Err(wrong_type(
                CONFIG,
                "quantization_config.quant_algo",
                "the algorithm of config_groups",
                &Value::Null,
            ));
        }
        (Some(one), None) | (None, Some(one)) => one,
        (Some(hf), Some(config)) => merge(hf, config, warnings)?,
    };
    assemble(declaration, warnings)
}

fn from_hf_quant(text: &str) -> Result<Declaration, ModelError> {
    let top = parse_object(HF_QUANT, text)?;
    match top.get("quantization") {
        Some(Value::Object(map)) => declaration(HF_QUANT, map),
        Some(other) => Err(wrong_type(HF_QUANT, "quantization", "an object", other)),
        None => Err(wrong_type(HF_QUANT, "quantization", "an object", &Value::Null)),
    }
}

/// `quantization_config` also tells other tools' formats by `quant_method`; theirs are refused by name.
fn from_config(map: &Map<String, Value>) -> Result<Declaration, ModelError> {
    let method = string(CONFIG, map, "quant_method")?;
    let reason = match method.as_deref() {
        None => None,
        Some(name) if name.starts_with("modelopt") => None,
        Some("compressed-tensors") => Some(
            "its weight_global_scale and input_global_scale are divisors where ModelOpt's weight_scale_2 and input_scale multiply",
        ),
        Some("mxfp4") => Some("MXFP4 experts (one e8m0 scale a block of 32) are out of scope"),
        Some("fp8") => Some("FP8 experts are out of scope"),
        Some(_) => Some("only ModelOpt's NVFP4 is read"),
    };
    if let Some(reason) = reason {
        return Err(ModelError::Algorithm { file: CONFIG, algorithm: method.unwrap_or_default(), reason });
    }
    declaration(CONFIG, map)
}

fn declaration(file: &'static str, map: &Map<String, Value>) -> Result<Declaration, ModelError> {
    let mut excluded = strings(file, map, "exclude_modules")?;
    excluded.extend(strings(file, map, "ignore")?);
    let mut layers = HashMap::new();
    for (name, entry) in object(file, map, "quantized_layers")?.into_iter().flatten() {
        let Value::Object(entry) = entry else { return Err(wrong_type(file, name, "an object", entry)) };
        let Some(algorithm) = string(file, entry, "quant_algo")? else { continue };
        let format = format(&algorithm, number(file, entry, "group_size")?);
        layers.insert(canonical(name).to_owned(), format);
    }
    let mut groups = Vec::new();
    for (name, entry) in object(file, map, "config_groups")?.into_iter().flatten() {
        let Value::Object(entry) = entry else { return Err(wrong_type(file, name, "an object", entry)) };
        groups.push(group(file, entry)?);
    }
    Ok(Declaration {
        file,
        algorithm: string(file, map, "quant_algo")?,
        group_size: number(file, map, "group_size")?,
        excluded,
        layers,
        groups,
    })
}

fn format(algorithm: &str, group_size: Option<u64>) -> Format {
    match (algorithm.to_ascii_uppercase().as_str(), group_size) {
        ("NVFP4" | "W4A16_NVFP4", Some(size)) if size != BLOCK as u64 => {
            Format::Other(format!("{algorithm} with group_size {size}"))
        }
        ("NVFP4", _) => Format::Nvfp4 { activations: true },
        ("W4A16_NVFP4", _) => Format::Nvfp4 { activations: false },
        _ => Format::Other(algorithm.to_owned()),
    }
}

fn group(file: &'static str, entry: &Map<String, Value>) -> Result<Group, ModelError> {
    let weights = object(file, entry, "weights")?;
    let activations = entry.get("input_activations").is_none_or(|value| !value.is_null());
    let input_bits =
        object(file, entry, "input_activations")?.map(|inputs| number(file, inputs, "num_bits")).transpose()?;
    if let Some(Some(bits)) = input_bits
        && bits != 4
        && weights.is_none_or(|weights| weights.get("num_bits").and_then(Value::as_u64) == Some(4))
    {
        return Ok(Group {
            targets: targets(file, entry)?,
            format: Format::Other(format!("4-bit weights with {bits}-bit activations")),
        });
    }
    let format = match weights {
        None => Format::Nvfp4 { activations },
        Some(weights) => {
            let num_bits = number(file, weights, "num_bits")?;
            let kind = string(file, weights, "type")?;
            let group_size = number(file, weights, "group_size")?;
            match (num_bits, kind.as_deref(), group_size) {
                (Some(4), Some("float"), Some(16) | None) => Format::Nvfp4 { activations },
                (Some(4), Some("float"), Some(size)) => Format::Other(format!("4-bit floats with group_size {size}")),
                (num_bits, kind, _) => Format::Other(format!(
                    "{}-bit {}",
                    num_bits.map_or("?".to_owned(), |n| n.to_string()),
                    kind.unwrap_or("?")
                )),
            }
        }
    };
    Ok(Group { targets: targets(file, entry)?, format })
}

/// A target without a dot or a star is a class of modules (`Linear`), not a name; classes stand for every linear module.
fn targets(file: &'static str, entry: &Map<String, Value>) -> Result<Vec<ModulePattern>, ModelError> {
    let names = strings(file, entry, "targets")?;
    let by_class = names.iter().any(|target| !target.contains(['.', '*', '?']));
    Ok(if by_class { Vec::new() } else { names.iter().map(|target| ModulePattern::new(target)).collect() })
}

fn merge(hf: Declaration, config: Declaration, warnings: &mut Vec<ModelWarning>) -> Result<Declaration, ModelError> {
    let disagree =
        |key: &str, hf: String, config: String| Err(ModelError::QuantFilesDisagree { key: key.to_owned(), hf, config });
    let shown =
        |algorithm: &Option<String>| algorithm.as_ref().map_or("nothing".to_owned(), |name| format!("`{name}`"));
    let upper = |algorithm: &Option<String>| algorithm.as_ref().map(|name| name.to_ascii_uppercase());
    // A quantization_config without quant_algo leaves it to the other file.
    if config.algorithm.is_some() && upper(&hf.algorithm) != upper(&config.algorithm) {
        return disagree("quant_algo", shown(&hf.algorithm), shown(&config.algorithm));
    }
    if let (Some(one), Some(other)) = (hf.group_size, config.group_size)
        && one != other
    {
        return disagree("group_size", one.to_string(), other.to_string());
    }
    if !hf.layers.is_empty() && !config.layers.is_empty() {
        let names: BTreeSet<_> = hf.layers.keys().chain(config.layers.keys()).collect();
        let differing = names.into_iter().find(|name| hf.layers.get(*name) != config.layers.get(*name));
        if let Some(name) = differing {
            let shown =
                |layers: &HashMap<String, Format>| layers.get(name).map_or("nothing".to_owned(), |f| format!("{f:?}"));
            return disagree(&format!("quantized_layers[{name}]"), shown(&hf.layers), shown(&config.layers));
        }
    }
    let set =
        |patterns: &[String]| -> BTreeSet<String> { patterns.iter().map(|name| canonical(name).to_owned()).collect() };
    let (ours, theirs) = (set(&hf.excluded), set(&config.excluded));
    if ours != theirs {
        let hf_only = ours.difference(&theirs).cloned().collect();
        let config_only = theirs.difference(&ours).cloned().collect();
        warnings.push(ModelWarning::ExclusionsDiffer { hf_only, config_only });
    }
    let layers = if hf.layers.is_empty() { config.layers } else { hf.layers };
    let groups = if hf.groups.is_empty() { config.groups } else { hf.groups };
    Ok(Declaration { group_size: hf.group_size.or(config.group_size), layers, groups, ..hf })
}

fn assemble(declaration: Declaration, warnings: &mut Vec<ModelWarning>) -> Result<Quantisation, ModelError> {
    let Declaration { file, algorithm, group_size, excluded, layers, groups } = declaration;
    let Some(algorithm) = algorithm else {
        return Ok(Quantisation::default());
    };
    let excluded: Vec<_> = excluded.iter().map(|text| ModulePattern::new(text)).collect();
    let regexes = excluded.iter().filter(|pattern| pattern.is_regex());
    warnings.extend(regexes.map(|pattern| ModelWarning::RegexPattern { pattern: pattern.text().to_owned() }));
    let default = match algorithm.to_ascii_uppercase().as_str() {
        "MIXED_PRECISION" => None,
        "NVFP4" | "W4A16_NVFP4" => {
            if let Some(found) = group_size.filter(|&size| size != BLOCK as u64) {
                return Err(ModelError::GroupSize { file, found });
            }
            if let Some(Format::Other(name)) =
                groups.iter().map(|group| &group.format).find(|f| matches!(f, Format::Other(_)))
            {
                return Err(ModelError::Algorithm {
                    file,
                    algorithm: format!("{algorithm} with {name}"),
                    reason: "NVFP4 is 4-bit floats in blocks of 16",
                });
            }
            Some(format(&algorithm, group_size))
        }
        other => return Err(ModelError::Algorithm { file, algorithm: algorithm.clone(), reason: reason(other) }),
    };
    Ok(Quantisation { algorithm: Some(algorithm), excluded, default, layers, groups })
}

fn reason(algorithm: &str) -> &'static str {
    if algorithm.contains("MXFP4") {
        "MXFP4 experts (one e8m0 scale a block of 32) are out of scope"
    } else if algorithm.contains("AWQ") || algorithm.contains("SVD") {
        "its weights need a correction of their inputs (pre_quant_scale or low-rank parts) that is not applied here"
    } else if algorithm.contains("FP8") {
        "FP8 experts are out of scope"
    } else {
        "it is not known"
    }
}

fn string(file: &'static str, map: &Map<String, Value>, key: &str) -> Result<Option<String>, ModelError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(wrong_type(file, key, "a string", other)),
    }
}

fn number(file: &'static str, map: &Map<String, Value>, key: &str) -> Result<Option<u64>, ModelError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| wrong_type(file, key, "a whole number", value)),
    }
}

fn object<'a>(
    file: &'static str,
    map: &'a Map<String, Value>,
    key: &str,
) -> Result<Option<&'a Map<String, Value>>, ModelError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(inner)) => Ok(Some(inner)),
        Some(other) => Err(wrong_type(file, key, "an object", other)),
    }
}

fn strings(file: &'static str, map: &Map<String, Value>, key: &str) -> Result<Vec<String>, ModelError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list
            .iter()
            .map(|item| {
                item.as_str().map(str::to_owned).ok_or_else(|| wrong_type(file, key, "a list of strings", item))
            })
            .collect(),
        Some(other) => Err(wrong_type(file, key, "a list of strings", other)),
    }
}
