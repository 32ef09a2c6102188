//! All tensors of a checkpoint by name, over its shards.

use super::header::{Shard, TensorEntry};

/// A position in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryIdx(u32);

/// The tensors of a checkpoint, sorted by name, each in one shard.
#[derive(Debug)]
pub(crate) struct TensorTable {
    entries: Vec<TensorEntry>,
    shards: Vec<Shard>,
}

impl TensorTable {
    /// Takes entries with distinct names.
    pub(super) fn new(mut entries: Vec<TensorEntry>, shards: Vec<Shard>) -> Self {
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Self { entries, shards }
    }

    pub(crate) fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    pub(crate) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub(crate) fn entry(&self, idx: EntryIdx) -> &TensorEntry {
        &self.entries[idx.0 as usize]
    }

    pub(crate) fn shard_of(&self, entry: &TensorEntry) -> &Shard {
        &self.shards[entry.shard as usize]
    }

    pub(crate) fn find(&self, name: &str) -> Option<EntryIdx> {
        self.entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok().map(index)
    }

    /// The tensors whose names start with `prefix`, in order of their names.
    pub(crate) fn under(&self, prefix: &str) -> impl Iterator<Item = (EntryIdx, &TensorEntry)> {
        let begin = self.entries.partition_point(|entry| &*entry.name < prefix);
        let matching = self.entries[begin..].iter().take_while(move |entry| entry.name.starts_with(prefix));
        matching.enumerate().map(move |(position, entry)| (index(begin + position), entry))
    }
}

/// A checkpoint has far fewer than 2^32 tensors: their names alone would fill 200 GB.
fn index(position: usize) -> EntryIdx {
    EntryIdx(u32::try_from(position).expect("fewer than 2^32 tensors"))
}
