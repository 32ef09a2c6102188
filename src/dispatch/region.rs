//! The memory that a rank shows the other ranks of its NVLink domain, and what is written there: rooms for tokens and rows,
//! flags that say that they are there, alarms that say why they will not come. Pure.
//!
//! Every rank has one region, and all have the same layout:
//!
//! ```text
//! flags    [4, num_ranks] u64        raised by each rank: counts, tokens, rows of even chunks, rows of odd ones
//! alarms   [num_ranks, 4] u64        of each rank that has waited in vain
//! counts   [num_ranks, num_words] u32    what each rank tells: tokens, where its home begins, rows of each expert, and those
//!                                    of the whole step where it was cut
//! rooms    [num_ranks, room_bytes]   tokens from each rank
//! homes    [home_bytes] of even chunks, [home_bytes] of odd ones    rows that come home, by the rank that they come from
//! tagged   [num_ranks, tagged_bytes] few tokens from each rank, behind how many they are and where its home begins: words of 4
//!                                    bytes, each with its chunk's epoch behind it
//! ```
//!
//! Nothing is taken back and nothing is acknowledged. In a chunk a rank raises its three flags at every rank, itself included,
//! whether it has something for it or not, and waits for all of each kind before it goes on, in one stream. What it tells of a
//! chunk is behind all that it has read before: whoever has had everybody's counts of a chunk may store what that chunk has, and
//! that is all that keeps anything from being overwritten. One thing has to be there twice: the last two chunks of a step in
//! which chunks overlap send rows home with no counts between them ([`crate::dispatch::overlap::turns`]), so that homes, and the
//! flags of rows, take turns. `model` tries it.
//!
//! Few tokens of a whole step ([`are_tagged`]) don't wait for counts, and have no room: each word says of which chunk it is, and
//! whoever stores them has had everybody's rows of the chunk before, which are behind the taking of its tokens.

use crate::dispatch::capacity::BufferSizes;
use crate::dispatch::placement::Placement;
use crate::ids::{LayerIdx, Rank};

/// The most ranks that store into each other. `kMaxPeers` in `kernels/peers.cuh`.
pub const MAX_PEERS: usize = 64;

/// Words of an alarm's cell.
pub const ALARM_WORDS: usize = 4;

/// Tokens of a rank up to which a whole step's travel tagged: a word and its chunk's epoch in one store of 8 bytes, of which
/// both halves are seen or neither, so that no fence, no flag and no counts are between a token and who waits for it. It doubles
/// the bytes.
pub const MAX_TAGGED_TOKENS: usize = 16;

/// Slots of a tagged token, at most. `kMaxTopk` in `kernels/few.cuh`.
const MAX_TAGGED_TOPK: usize = 64;

/// Shared memory of a block that counts what leaves, or numbers what comes: less than every GPU has.
const MAX_TAGGED_SHARED_BYTES: usize = 64 << 10;

/// Whether tokens of a chunk of up to `chunk_tokens` tokens a rank, of `num_topk` slots, are tagged; where chunks take turns they
/// are not, nor where a block can't number them. All of it is equal on all ranks.
#[must_use]
pub fn are_tagged((chunk_tokens, num_topk): (usize, usize), placement: Placement, takes_turns: bool) -> bool {
    chunk_tokens <= MAX_TAGGED_TOKENS
        && num_topk <= MAX_TAGGED_TOPK
        && tagged_shared_bytes((chunk_tokens, num_topk), placement) <= MAX_TAGGED_SHARED_BYTES
        && !takes_turns
}

/// Dynamic shared memory of `kernels/few.cu`: rows of every expert for who tells; or for who makes the index, rows of each of a
/// rank's experts in each of 16 ranges of slots, and the expert of each slot.
#[must_use]
pub fn tagged_shared_bytes((chunk_tokens, num_topk): (usize, usize), placement: Placement) -> usize {
    let num_slots = chunk_tokens.saturating_mul(num_topk).saturating_mul(placement.num_ranks());
    let num_local_experts = placement.local_experts(Rank(0)).len();
    let index_bytes = (2 * 16 * num_local_experts).saturating_add(2 * num_slots);
    index_bytes.max(4 * placement.num_experts()).next_multiple_of(16)
}

/// Bytes of a tagged word for each of its own; of the two before a rank's tagged tokens.
const TAGGED_FACTOR: usize = 2;
const TAGGED_HEAD_BYTES: usize = 16;

/// Homes, which chunks of a step take turns in where they overlap; else all have the first.
pub const NUM_HOMES: usize = 2;

/// Parts of a region begin at multiples of this.
const ALIGN: usize = 256;

/// What a flag says is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    /// The counts of what leaves.
    Counts,
    /// Tokens.
    Tokens,
    /// Rows that come home.
    Rows,
}

impl Flag {
    const ALL: [Self; 3] = [Self::Counts, Self::Tokens, Self::Rows];

    /// For messages.
    fn name(self) -> &'static str {
        match self {
            Self::Counts => "counts",
            Self::Tokens => "tokens",
            Self::Rows => "rows",
        }
    }
}

/// What decides how much room a token takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSizes {
    /// Ranks of the world.
    pub num_ranks: usize,
    /// Slots of a token.
    pub num_topk: usize,
    /// Bytes of a travelling token with its ids and weights.
    pub token_bytes: usize,
    /// Bytes of a row that comes back.
    pub return_bytes: usize,
    /// Whether each slot's row comes back by itself.
    pub per_slot: bool,
}

/// Bytes of a rank's tagged tokens from all ranks, where steps bring up to `num_tokens` a rank.
#[must_use]
pub fn tagged_plan_bytes(sizes: &BufferSizes, num_tokens: usize) -> u64 {
    (Rooms::new(&RowSizes::from(sizes), [num_tokens, 0]).tagged_bytes * sizes.num_ranks) as u64
}

impl From<&BufferSizes> for RowSizes {
    fn from(sizes: &BufferSizes) -> Self {
        let BufferSizes { num_ranks, num_topk, token_bytes, return_bytes, per_slot, .. } = *sizes;
        Self { num_ranks, num_topk, token_bytes, return_bytes, per_slot }
    }
}

/// How much room chunks need: equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rooms {
    /// Bytes of the tokens that one rank sends to one other, at most.
    pub room_bytes: usize,
    /// Bytes of the rows that come home to a rank, at most, into either home.
    pub home_bytes: [usize; NUM_HOMES],
    /// Bytes of the tagged tokens that one rank sends to one other, at most.
    pub tagged_bytes: usize,
}

impl Rooms {
    /// What chunks need of which a rank brings up to `num_tokens[0]` tokens, and those that have the second home `num_tokens[1]`.
    #[must_use]
    pub fn new(sizes: &RowSizes, num_tokens: [usize; NUM_HOMES]) -> Self {
        let home_rows = if sizes.per_slot { sizes.num_topk } else { sizes.num_topk.min(sizes.num_ranks) };
        let most = num_tokens[0].max(num_tokens[1]);
        Self {
            room_bytes: most.saturating_mul(sizes.token_bytes),
            tagged_bytes: most.min(MAX_TAGGED_TOKENS).saturating_mul(TAGGED_FACTOR * sizes.token_bytes)
                + TAGGED_HEAD_BYTES,
            home_bytes: num_tokens.map(|tokens| tokens.saturating_mul(home_rows).saturating_mul(sizes.return_bytes)),
        }
    }

    /// Enough for both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            room_bytes: self.room_bytes.max(other.room_bytes),
            home_bytes: std::array::from_fn(|home| self.home_bytes[home].max(other.home_bytes[home])),
            tagged_bytes: self.tagged_bytes.max(other.tagged_bytes),
        }
    }

    /// Whether `other` fits in.
    #[must_use]
    pub fn hold(self, other: Self) -> bool {
        self.max(other) == self
    }
}

/// Where everything lies in a region, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    num_ranks: usize,
    num_local_experts: usize,
    rooms: Rooms,
}

impl Region {
    /// The layout for `num_ranks`, of which none has more than `num_local_experts`.
    #[must_use]
    pub fn new(num_ranks: usize, num_local_experts: usize, rooms: Rooms) -> Self {
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGN);
        let rooms = Rooms {
            room_bytes: aligned(rooms.room_bytes),
            home_bytes: rooms.home_bytes.map(aligned),
            tagged_bytes: aligned(rooms.tagged_bytes),
        };
        Self { num_ranks, num_local_experts, rooms }
    }

    /// Room there is.
    #[must_use]
    pub fn rooms(&self) -> Rooms {
        self.rooms
    }

    /// From rank to rank of counts, in words.
    #[must_use]
    pub fn num_words(&self) -> usize {
        self.num_told(true)
    }

    /// Words of what a rank tells, with rows of a whole step or without; a multiple of 4.
    #[must_use]
    pub fn num_told(&self, with_step: bool) -> usize {
        (2 + self.num_local_experts * if with_step { 2 } else { 1 }).next_multiple_of(4)
    }

    /// `[num_ranks]` flags; those of rows go with `home`.
    #[must_use]
    pub fn flags_at(&self, flag: Flag, home: usize) -> usize {
        let of_home = if flag == Flag::Rows { home } else { 0 };
        (flag as usize + of_home) * (8 * self.num_ranks).next_multiple_of(ALIGN)
    }

    /// `[num_ranks, 4]` words.
    #[must_use]
    pub fn alarms_at(&self) -> usize {
        self.flags_at(Flag::Rows, NUM_HOMES)
    }

    /// `[num_ranks, num_words]` words.
    #[must_use]
    pub fn counts_at(&self) -> usize {
        self.alarms_at() + (8 * ALARM_WORDS * self.num_ranks).next_multiple_of(ALIGN)
    }

    /// Where tokens of `source` lie.
    #[must_use]
    pub fn room_at(&self, source: usize) -> usize {
        self.counts_at()
            + (4 * self.num_words() * self.num_ranks).next_multiple_of(ALIGN)
            + source * self.rooms.room_bytes
    }

    /// Where rows come home.
    #[must_use]
    pub fn home_at(&self, home: usize) -> usize {
        self.room_at(self.num_ranks) + self.rooms.home_bytes[..home].iter().sum::<usize>()
    }

    /// Where tagged tokens of `source` lie.
    #[must_use]
    pub fn tagged_at(&self, source: usize) -> usize {
        self.home_at(NUM_HOMES) + source * self.rooms.tagged_bytes
    }

    /// Its size.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.tagged_at(self.num_ranks)
    }
}

/// Which chunk a flag belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkTag {
    /// Counts chunks of all layers; never 0.
    pub epoch: u32,
    /// The layer.
    pub layer: LayerIdx,
    /// Counts the steps of a run.
    pub step: u64,
}

/// Bits of a step in a flag.
const STEP_BITS: u32 = 20;

impl ChunkTag {
    /// The chunk behind one of `epoch`.
    #[must_use]
    pub fn after(epoch: u32, layer: LayerIdx, step: u64) -> Self {
        Self { epoch: epoch.wrapping_add(1).max(1), layer, step }
    }

    /// What a flag of it holds: the epoch, by which flags of chunks before are told from it, then layer and step, which have
    /// to be everybody's.
    #[must_use]
    pub fn word(self) -> u64 {
        let step = self.step & ((1 << STEP_BITS) - 1);
        u64::from(self.epoch) << 32 | u64::from(self.layer.0 & 0xfff) << STEP_BITS | step
    }
}

/// A flag's word for people.
fn describe(word: u64) -> String {
    if word == 0 {
        return "nothing".to_owned();
    }
    let (chunk, layer, step) = (word >> 32, word >> STEP_BITS & 0xfff, word & ((1 << STEP_BITS) - 1));
    format!("layer {layer}, step {step}, chunk {chunk} of the session")
}

/// What a rank has waited for in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alarm {
    kind: Kind,
    flag: Flag,
    /// Who waited.
    pub waiter: Rank,
    /// Whom for.
    pub missing: Rank,
    wanted: u64,
    seen: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It did not come in time.
    Late,
    /// It is at another place.
    Other,
}

impl Alarm {
    /// The first of the cells in which one is written; `cells` `[.., 4]`.
    #[must_use]
    pub fn first(cells: &[u64]) -> Option<Self> {
        cells.as_chunks::<ALARM_WORDS>().0.iter().find_map(Self::read)
    }

    fn read(&[state, wanted, seen, _]: &[u64; ALARM_WORDS]) -> Option<Self> {
        if state >> 63 == 0 {
            return None;
        }
        let rank = |bits: u64| Rank((bits & 0xff_ffff) as u32);
        Some(Self {
            kind: if state >> 56 & 0x7f == 1 { Kind::Late } else { Kind::Other },
            flag: Flag::ALL.into_iter().nth((state >> 48 & 0xff) as usize).unwrap_or(Flag::Rows),
            waiter: rank(state >> 24),
            missing: rank(state),
            wanted,
            seen,
        })
    }

    /// Whether ranks are at different places, rather than one late or gone.
    #[must_use]
    pub fn is_drift(&self) -> bool {
        self.kind == Kind::Other
    }
}

impl std::fmt::Display for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { waiter, missing, .. } = self;
        let (what, wanted, seen) = (self.flag.name(), describe(self.wanted), describe(self.seen));
        match self.kind {
            Kind::Late => write!(
                f,
                "{waiter} waited on its GPU for the {what} of {missing} at {wanted}, which have not come in time; the last \
                 it had was {seen}"
            ),
            Kind::Other => write!(
                f,
                "{waiter} waited on its GPU for the {what} of {missing} at {wanted}, but that rank is at {seen}: every rank \
                 must call the same layers in the same order"
            ),
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Parts follow one another, none reaches into the next, and all are aligned for 16-byte stores.
        #[test]
        fn parts_of_a_region_do_not_overlap(
            num_ranks in 1usize..=MAX_PEERS,
            num_local_experts in 0usize..900,
            room_bytes in 0usize..1 << 30,
            home_bytes in [0usize..1 << 30, 0..1 << 30],
            tagged_bytes in 0usize..1 << 20,
        ) {
            let rooms = Rooms { room_bytes, home_bytes, tagged_bytes };
            let region = Region::new(num_ranks, num_local_experts, rooms);
            let flags = [(Flag::Counts, 0), (Flag::Tokens, 0), (Flag::Rows, 0), (Flag::Rows, 1)];
            let mut parts: Vec<(usize, usize)> =
                flags.map(|(flag, home)| (region.flags_at(flag, home), 8 * num_ranks)).into();
            prop_assert_eq!(region.flags_at(Flag::Tokens, 1), region.flags_at(Flag::Tokens, 0));
            parts.push((region.alarms_at(), 8 * ALARM_WORDS * num_ranks));
            parts.push((region.counts_at(), 4 * num_ranks * (2 + 2 * num_local_experts)));
            parts.extend((0..num_ranks).map(|source| (region.room_at(source), room_bytes)));
            parts.extend((0..NUM_HOMES).map(|home| (region.home_at(home), home_bytes[home])));
            parts.extend((0..num_ranks).map(|source| (region.tagged_at(source), tagged_bytes)));
            parts.push((region.num_bytes(), 0));
            for pair in parts.windows(2) {
                prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            prop_assert!(parts[..parts.len() - 1].iter().all(|(at, _)| at % 256 == 0));
            prop_assert!(region.num_words() >= 2 + 2 * num_local_experts && region.num_words().is_multiple_of(4));
            prop_assert!(region.rooms().hold(rooms));
        }

        #[test]
        fn chunks_one_behind_the_other_have_other_words(epoch in any::<u32>(), layer in 0u32..4096, step in any::<u64>()) {
            let tag = ChunkTag::after(epoch, LayerIdx(layer), step);
            let next = ChunkTag::after(tag.epoch, LayerIdx(layer), step);
            prop_assert_ne!(tag.word(), next.word());
            prop_assert!(tag.word() >> 32 != 0, "0 is a flag that nobody has raised");
            // As kernels/hear.cuh tells ranks that are ahead from those that have not come yet.
            let ahead = (next.word() >> 32) as u32;
            prop_assert!(ahead.wrapping_sub(tag.epoch) < 0x8000_0000);
            prop_assert!(tag.epoch.wrapping_sub(ahead) >= 0x8000_0000);
        }
    }

    #[test]
    fn words_hold_layer_and_step() {
        let tag = ChunkTag { epoch: 7, layer: LayerIdx(3), step: 17 };
        assert_eq!(describe(tag.word()), "layer 3, step 17, chunk 7 of the session");
        for other in
            [ChunkTag { layer: LayerIdx(4), ..tag }, ChunkTag { step: 18, ..tag }, ChunkTag { epoch: 8, ..tag }]
        {
            assert_ne!(tag.word(), other.word());
        }
    }

    #[test]
    fn alarms_say_who_waits_for_whom() {
        let wanted = ChunkTag { epoch: 7, layer: LayerIdx(3), step: 17 }.word();
        let seen = ChunkTag { epoch: 6, layer: LayerIdx(2), step: 17 }.word();
        let late = [1 << 63 | 1 << 56 | 2 << 48 | 5 << 24 | 9, wanted, seen, 0];
        assert_eq!(Alarm::first(&[0; 8]), None);
        let alarm = Alarm::first(&[[0; 4], late].concat()).unwrap();
        assert_eq!((alarm.waiter, alarm.missing, alarm.is_drift()), (Rank(5), Rank(9), false));
        assert_eq!(
            alarm.to_string(),
            "rank 5 waited on its GPU for the rows of rank 9 at layer 3, step 17, chunk 7 of the session, which have not come \
             in time; the last it had was layer 2, step 17, chunk 6 of the session"
        );
        let other = Alarm::first(&[1 << 63 | 2 << 56, wanted, wanted + 1, 0]).unwrap();
        assert!(other.is_drift() && other.to_string().contains("is at layer 3, step 18"), "{other}");
        let never = Alarm::first(&[1 << 63 | 1 << 56 | 1, wanted, 0, 0]).unwrap();
        assert!(never.to_string().ends_with("the last it had was nothing"), "{never}");
    }

    /// Of the layers that are known all are, over any number of ranks; more than a block has room for is not.
    #[test]
    fn tokens_are_tagged_where_a_block_can_number_them() {
        for num_ranks in [1, 2, 8, 64] {
            for (num_experts, num_topk) in [(896, 16), (256, 8), (384, 8), (128, 8), (512, 10)] {
                let placement = Placement::new(num_experts, num_ranks);
                assert!(are_tagged((MAX_TAGGED_TOKENS, num_topk), placement, false), "{num_experts} over {num_ranks}");
                assert!(!are_tagged((MAX_TAGGED_TOKENS, num_topk), placement, true));
                assert!(!are_tagged((MAX_TAGGED_TOKENS + 1, num_topk), placement, false));
                assert!(!are_tagged((1, MAX_TAGGED_TOPK + 1), placement, false));
            }
        }
        assert!(!are_tagged((1, 1), Placement::new(3000, 1), false), "rows of so many experts");
        assert!(are_tagged((1, 1), Placement::new(3000, 2), false));
        assert!(!are_tagged((16, 64), Placement::new(64, 64), false), "so many slots");
        assert!(are_tagged((4, 64), Placement::new(64, 64), false));
    }

    #[test]
    fn rooms_are_what_the_plan_of_buffers_counts() {
        use crate::dispatch::capacity::BufferPlan;
        for per_slot in [false, true] {
            let (num_ranks, num_topk) = (3, 8);
            let sizes = BufferSizes {
                num_ranks,
                num_local_experts: 20,
                num_topk,
                hidden: 64,
                intermediate: 32,
                token_bytes: 192,
                return_bytes: 128,
                per_slot,
                forwards: None,
            };
            let (rooms, plan) = (Rooms::new(&RowSizes::from(&sizes), [100, 0]), BufferPlan::new(&sizes, 100));
            assert_eq!((rooms.room_bytes * num_ranks) as u64, plan.receive_bytes);
            for tokens in [1, MAX_TAGGED_TOKENS, MAX_TAGGED_TOKENS + 1, 100] {
                let rooms = Rooms::new(&RowSizes::from(&sizes), [tokens, 0]);
                let tagged = tagged_plan_bytes(&sizes, tokens);
                assert_eq!((rooms.tagged_bytes * num_ranks) as u64, tagged);
                let is_tagged = are_tagged((tokens, num_topk), Placement::new(60, num_ranks), false);
                assert_eq!(is_tagged, tokens <= MAX_TAGGED_TOKENS);
                assert!(!is_tagged || rooms.tagged_bytes >= 16 + 2 * tokens * sizes.token_bytes);
            }
            assert!(rooms.home_bytes[0] as u64 <= plan.return_bytes && rooms.home_bytes[1] == 0);
            // Half of it, or as many again, in a second home.
            for second in [50, 100] {
                let rooms = Rooms::new(&RowSizes::from(&sizes), [100, second]);
                let plan = BufferPlan::new(&sizes, 100 + second);
                assert!((rooms.room_bytes * num_ranks) as u64 <= plan.receive_bytes);
                assert!(rooms.home_bytes.iter().sum::<usize>() as u64 <= plan.return_bytes);
            }
        }
    }
}
