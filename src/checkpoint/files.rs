//! Plain files of a checkpoint directory: what lies there, and the texts of its config files.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::error::CheckpointError;

/// No config file is longer; a wrong file must not size an allocation.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// The texts of a checkpoint's config files.
#[derive(Debug)]
pub(super) struct ConfigFiles {
    pub(super) config: String,
    pub(super) hf_quant_config: Option<String>,
}

/// Reads `config.json` and, where present, `hf_quant_config.json`.
pub(super) fn read_configs(dir: &Path) -> Result<ConfigFiles, CheckpointError> {
    let path = dir.join("config.json");
    let config = read_text_if_present(&path, MAX_CONFIG_BYTES)?
        .ok_or_else(|| CheckpointError::NoConfig { dir: dir.to_owned(), hint: hint(dir) })?;
    let hf_quant_config = read_text_if_present(&dir.join("hf_quant_config.json"), MAX_CONFIG_BYTES)?;
    Ok(ConfigFiles { config, hf_quant_config })
}

/// All `*.safetensors` of a directory, links followed, sorted by name.
pub(super) fn list_safetensors(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let failed = |source| CheckpointError::List { dir: dir.to_owned(), source };
    let mut found = Vec::new();
    for item in std::fs::read_dir(dir).map_err(failed)? {
        let path = item.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The text of a file, or nothing if there is no such file.
pub(super) fn read_text_if_present(path: &Path, max_bytes: u64) -> Result<Option<String>, CheckpointError> {
    let failed = |source| CheckpointError::ReadText { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        Ok(metadata) if !metadata.is_file() => return Err(failed(ErrorKind::InvalidInput.into())),
        Ok(metadata) if metadata.len() > max_bytes => {
            return Err(CheckpointError::TextTooLong { path: path.to_owned(), found_bytes: metadata.len(), max_bytes });
        }
        Ok(_) => {}
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(max_bytes).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

/// What a person probably meant who named a directory without a config.
fn hint(dir: &Path) -> String {
    let snapshots = dir.join("snapshots");
    let Ok(items) = std::fs::read_dir(&snapshots) else {
        return "name the directory that holds config.json".to_owned();
    };
    let mut names: Vec<_> = items.flatten().map(|item| item.path().display().to_string()).collect();
    names.sort_unstable();
    format!("it is a hub cache: name one of its snapshots: {}", names.join(", "))
}
