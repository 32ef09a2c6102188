//! Where what lies. Pure: paths in, paths out.

use std::path::{Path, PathBuf};

use super::super::key::Key;
use crate::config::CacheLayout;

/// Whose directory below the cache it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A rank's.
    Rank {
        /// The host.
        host: String,
        /// The rank among those of its host.
        local_rank: usize,
        /// Whether it has a directory of its own.
        layout: CacheLayout,
    },
    /// The layer behind all ranks' directories, which is filled beforehand.
    Shared {
        /// The host of who fills it.
        host: String,
    },
}

impl Place {
    /// The host.
    #[must_use]
    pub fn host(&self) -> &str {
        match self {
            Self::Rank { host, .. } | Self::Shared { host } => host,
        }
    }

    /// Its directory below `root`.
    #[must_use]
    pub fn own(&self, root: &Path) -> PathBuf {
        match self {
            Self::Rank { host, local_rank, layout: CacheLayout::PerRank } => {
                root.join(word(host)).join(format!("rank{local_rank}"))
            }
            Self::Rank { layout: CacheLayout::Flat, .. } => root.to_path_buf(),
            Self::Shared { .. } => shared(root),
        }
    }
}

/// The shared layer.
pub(super) fn shared(root: &Path) -> PathBuf {
    root.join("shared")
}

/// What every entry of a kernel begins with.
pub(super) fn prefix(name: &str) -> String {
    format!("kernel.{name}.")
}

/// An entry's directory.
pub(super) fn entry(name: &str, key: Key) -> String {
    format!("{}{key}", prefix(name))
}

/// A text as one component of a path: hosts may be called anything.
pub(super) fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let word: String = text.chars().map(|c| if is_plain(c) || c == '.' { c } else { '_' }).collect();
    // Neither `..` nor a name of the cache's own.
    if word.starts_with(is_plain) && !["shared"].contains(&word.as_str()) { word } else { format!("host-{word}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_directories_of_their_own_or_share_one() {
        let rank = |host: &str, layout| Place::Rank { host: host.to_owned(), local_rank: 3, layout };
        let root = Path::new("/c");
        assert_eq!(rank("node-1.x", CacheLayout::PerRank).own(root), Path::new("/c/node-1.x/rank3"));
        assert_eq!(rank("node-1.x", CacheLayout::Flat).own(root), Path::new("/c"));
        assert_eq!(Place::Shared { host: "a".to_owned() }.own(root), Path::new("/c/shared"));
        for (host, dir) in [("../x", "/c/host-.._x/rank3"), ("a/b", "/c/a_b/rank3"), ("shared", "/c/host-shared/rank3")]
        {
            assert_eq!(rank(host, CacheLayout::PerRank).own(root), Path::new(dir));
        }
    }
}
