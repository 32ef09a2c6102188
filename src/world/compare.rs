//! What must be alike on all ranks, compared: a digest of fixed size, and the whole only where digests differ.
//!
//! Knows nothing of what the bytes mean.

use super::World;
use super::agree::{Record, judge, words};
use crate::exit::Classify;

use super::Refusal;

/// What a rank brings to a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sheet {
    /// Tells what is encoded from everything else.
    pub digest: [u8; 32],
    /// What is sent where digests differ.
    pub encoded: Vec<u8>,
}

/// What a comparison has shown; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compared {
    /// All digests are equal.
    Alike,
    /// They are not: what every rank brought, in rank order.
    Differing(Vec<Vec<u8>>),
}

impl World {
    /// Compares what the ranks bring; collective. One all-gather of 48 bytes a rank where it is alike.
    ///
    /// A rank that has nothing to bring because it failed takes part all the same.
    ///
    /// # Errors
    /// If any rank failed: the same on all of them.
    pub fn compare<E: Classify + Send + Sync + 'static>(&self, local: Result<Sheet, E>) -> Result<Compared, Refusal> {
        let [exit, message] = Record::of(&local).words();
        let digest = local.as_ref().map_or([0; 4], |sheet| words(&sheet.digest));
        let all = self.all_gather_u64([exit, message, digest[0], digest[1], digest[2], digest[3]]);
        let records: Vec<Record> = all.iter().map(|record| Record::from_words([record[0], record[1]])).collect();
        let sheet = self.settle(judge(&records), local)?;
        if all.iter().all(|record| record == &all[0]) {
            return Ok(Compared::Alike);
        }
        Ok(Compared::Differing(self.all_gather_bytes(&sheet.encoded)))
    }
}
