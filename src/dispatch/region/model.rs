//! The protocol of a region, tried: ranks as lists of stores, reads, flags and waits in two lanes, run in every order that two
//! ranks can come to, and in random ones for more. Every word in a region says of which chunk it is, and whoever reads one
//! of another chunk, hears of another, or waits for ever, has found a mistake. The model knows the order of a step from where the
//! layer has it ([`turns`]) and addresses from [`Region`]; what a dispatch and a combine do is written as `dispatch::device` queues
//! it. Stores are seen in the order in which they are made: that fences see to it is not tried here.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::dispatch::overlap::{Turn, set_of, turns};
use crate::random::Random;

/// A step of all ranks.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// In one stream, followed by hosts; chunks one after the other are no different.
    Whole,
    /// In one stream that no host follows: kernels that store and read wait themselves.
    Replayed,
    /// The same of few tokens, which travel tagged.
    Few,
    /// So many chunks in two lanes.
    Overlapped(usize),
}

/// What would be wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mistake {
    /// Rows of all chunks come home to the same place.
    OneHome,
    /// Rows of all chunks have the same flags.
    OneFlagOfRows,
    /// Tokens are stored before everybody's counts have come.
    PackedAtOnce,
    /// Counts are told before the last tokens are read.
    ToldAhead,
    /// Flags of tokens are raised before tokens are stored.
    RaisedFirst,
    /// Rows are given back when the tokens have come, before experts are through.
    NotComputed,
    /// The session's stream goes on before the last rows are home.
    NotMet,
    /// Tokens of chunks that overlap are tagged, for which there is one place.
    TaggedInTurns,
    /// A host that does not follow gets counts when the rows are home.
    HandedOnLast,
}

const MISTAKES: [Mistake; 9] = [
    Mistake::OneHome,
    Mistake::OneFlagOfRows,
    Mistake::PackedAtOnce,
    Mistake::ToldAhead,
    Mistake::RaisedFirst,
    Mistake::NotComputed,
    Mistake::NotMet,
    Mistake::TaggedInTurns,
    Mistake::HandedOnLast,
];

/// What a lane does next; addresses are those of a rank's region, or beside it of what it has for itself.
#[derive(Debug, Clone, Copy)]
enum Op {
    /// Into a rank's region, or for itself.
    Store { to: usize, at: usize, word: u64 },
    /// Of its own region.
    Read { at: usize, word: u64 },
    /// Waits for a flag in its own region.
    Hear { at: usize, word: u64 },
    /// Waits for a mark of its other lane.
    Follow { at: usize, word: u64 },
}

/// One rank's lanes: the session's stream and what travels beside it.
type Lanes = [Vec<Op>; 2];
const COMPUTE: usize = 0;
const TRAVEL: usize = 1;

/// Beside the region: marks between lanes, and rows that experts have made of a chunk's tokens.
const MARKS_AT: usize = 1 << 20;
const ROWS_AT: usize = 1 << 21;

struct Writer {
    region: Region,
    rank: usize,
    num_ranks: usize,
    mistake: Option<Mistake>,
    lanes: Lanes,
    num_marks: usize,
    /// What was to be read of the chunk before, where counts of the next are told ahead of it.
    held_back: Vec<Op>,
}

impl Writer {
    fn new((num_ranks, rank): (usize, usize), mistake: Option<Mistake>) -> Self {
        let rooms = Rooms { room_bytes: 1, home_bytes: [num_ranks; NUM_HOMES], tagged_bytes: 1 };
        let region = Region::new(num_ranks, 1, rooms);
        Self { region, rank, num_ranks, mistake, lanes: Lanes::default(), num_marks: 0, held_back: Vec::new() }
    }

    fn all(&mut self, lane: usize, op: impl Fn(usize) -> Op) {
        // Each begins with another one.
        let (rank, num_ranks) = (self.rank, self.num_ranks);
        self.lanes[lane].extend((0..num_ranks).map(|peer| op((rank + 1 + peer) % num_ranks)));
    }

    fn store_all(&mut self, lane: usize, at: usize, word: u64) {
        self.all(lane, |to| Op::Store { to, at, word });
    }

    fn raise(&mut self, lane: usize, (flag, home): (Flag, usize), word: u64) {
        let at = self.region.flags_at(flag, home) + 8 * self.rank;
        self.store_all(lane, at, word);
    }

    fn hear(&mut self, lane: usize, (flag, home): (Flag, usize), word: u64) {
        let at = self.region.flags_at(flag, home);
        self.all(lane, |from| Op::Hear { at: at + 8 * from, word });
    }

    fn mark(&mut self, lane: usize) -> (usize, u64) {
        self.num_marks += 1;
        let (at, word) = (MARKS_AT + self.num_marks, 1);
        self.lanes[lane].push(Op::Store { to: self.rank, at, word });
        (at, word)
    }

    fn follow(&mut self, lane: usize, (at, word): (usize, u64)) {
        self.lanes[lane].push(Op::Follow { at, word });
    }

    fn dispatch(&mut self, lane: usize, word: u64, is_followed: bool) {
        let (rank, region) = (self.rank, self.region);
        let counts = move |rank: usize| region.counts_at() + 4 * region.num_words() * rank;
        self.store_all(lane, counts(rank), word);
        self.raise(lane, (Flag::Counts, 0), word);
        let held_back = std::mem::take(&mut self.held_back);
        self.lanes[lane].extend(held_back);
        let pack = |writer: &mut Self| {
            if writer.mistake == Some(Mistake::RaisedFirst) {
                writer.raise(lane, (Flag::Tokens, 0), word);
            }
            writer.store_all(lane, region.room_at(rank), word);
            writer.raise(lane, (Flag::Tokens, 0), word);
        };
        let packed_at_once = self.mistake == Some(Mistake::PackedAtOnce);
        if packed_at_once {
            pack(self);
        }
        self.hear(lane, (Flag::Counts, 0), word);
        if is_followed {
            self.all(lane, |from| Op::Read { at: counts(from), word });
        }
        if !packed_at_once {
            pack(self);
        }
        self.hear(lane, (Flag::Tokens, 0), word);
        // What is recorded reads counts here: rows of the chunk come before the next counts then.
        if !is_followed {
            self.read_counts(lane, word);
        }
        if self.mistake == Some(Mistake::ToldAhead) && lane == TRAVEL {
            self.held_back = (0..self.num_ranks).map(|from| Op::Read { at: region.room_at(from), word }).collect();
        } else {
            self.all(lane, |from| Op::Read { at: region.room_at(from), word });
        }
        if !is_followed && self.mistake != Some(Mistake::HandedOnLast) {
            self.read_counts(lane, word);
        }
    }

    fn read_counts(&mut self, lane: usize, word: u64) {
        let region = self.region;
        self.all(lane, |from| Op::Read { at: region.counts_at() + 4 * region.num_words() * from, word });
    }

    fn dispatch_few(&mut self, lane: usize, word: u64) {
        let (rank, region) = (self.rank, self.region);
        let counts = move |rank: usize| region.counts_at() + 4 * region.num_words() * rank;
        self.store_all(lane, region.tagged_at(rank), word);
        self.store_all(lane, counts(rank), word);
        self.raise(lane, (Flag::Counts, 0), word);
        let take = |writer: &mut Self| writer.all(lane, |from| Op::Hear { at: region.tagged_at(from), word });
        // Blocks of one launch, in no order: some ranks come to either first.
        let takes_first = rank.is_multiple_of(2);
        if takes_first {
            take(self);
        }
        self.hear(lane, (Flag::Counts, 0), word);
        self.all(lane, |from| Op::Read { at: counts(from), word });
        if !takes_first {
            take(self);
        }
    }

    fn experts(&mut self, set: usize, word: u64) {
        self.lanes[COMPUTE].push(Op::Store { to: self.rank, at: ROWS_AT + set, word });
    }

    fn combine(&mut self, lane: usize, set: usize, word: u64) {
        let (rank, region) = (self.rank, self.region);
        let data = if self.mistake == Some(Mistake::OneHome) { 0 } else { set };
        let flags = if self.mistake == Some(Mistake::OneFlagOfRows) { 0 } else { set };
        self.lanes[lane].push(Op::Read { at: ROWS_AT + set, word });
        self.store_all(lane, region.home_at(data) + rank, word);
        self.raise(lane, (Flag::Rows, flags), word);
        self.hear(lane, (Flag::Rows, flags), word);
        self.all(lane, |from| Op::Read { at: region.home_at(data) + from, word });
    }

    /// As `layer::overlap` queues it.
    fn overlapped(&mut self, num_chunks: usize, word: impl Fn(usize) -> u64) {
        let part = self.mark(COMPUTE);
        self.follow(TRAVEL, part);
        let (mut unpacked, mut computed) = ([(0, 0); 2], [(0, 0); 2]);
        for turn in turns(num_chunks) {
            match turn {
                Turn::Dispatch(chunk) => {
                    if self.mistake == Some(Mistake::TaggedInTurns) {
                        self.dispatch_few(TRAVEL, word(chunk));
                    } else {
                        self.dispatch(TRAVEL, word(chunk), true);
                    }
                    unpacked[set_of(chunk)] = self.mark(TRAVEL);
                }
                Turn::Experts(chunk) => {
                    self.follow(COMPUTE, unpacked[set_of(chunk)]);
                    self.experts(set_of(chunk), word(chunk));
                    computed[set_of(chunk)] = self.mark(COMPUTE);
                }
                Turn::Combine(chunk) => {
                    if self.mistake != Some(Mistake::NotComputed) {
                        self.follow(TRAVEL, computed[set_of(chunk)]);
                    }
                    self.combine(TRAVEL, set_of(chunk), word(chunk));
                }
            }
        }
        let held_back = std::mem::take(&mut self.held_back);
        self.lanes[TRAVEL].extend(held_back);
        let meet = self.mark(TRAVEL);
        if self.mistake != Some(Mistake::NotMet) {
            self.follow(COMPUTE, meet);
        }
    }
}

fn lanes((num_ranks, rank): (usize, usize), steps: &[Step], mistake: Option<Mistake>) -> Lanes {
    let mut writer = Writer::new((num_ranks, rank), mistake);
    let mut epoch = 0;
    for (step, kind) in steps.iter().enumerate() {
        let word = |chunk: usize| {
            let chunk = u32::try_from(chunk).unwrap();
            ChunkTag::after(epoch + chunk, LayerIdx(0), step as u64).word()
        };
        match *kind {
            Step::Whole | Step::Replayed | Step::Few => {
                let is_replayed = matches!(kind, Step::Replayed);
                match kind {
                    Step::Few => writer.dispatch_few(COMPUTE, word(0)),
                    _ => writer.dispatch(COMPUTE, word(0), !is_replayed),
                }
                writer.experts(0, word(0));
                writer.combine(COMPUTE, 0, word(0));
                if is_replayed && mistake == Some(Mistake::HandedOnLast) {
                    writer.read_counts(COMPUTE, word(0));
                }
                epoch += 1;
            }
            Step::Overlapped(num_chunks) => {
                writer.overlapped(num_chunks, word);
                epoch += u32::try_from(num_chunks).unwrap();
            }
        }
    }
    writer.lanes
}

/// All ranks on their way.
struct Model {
    ranks: Vec<Lanes>,
    /// Where each lane of each rank is.
    places: Vec<u16>,
    memory: HashMap<(usize, usize), u64>,
}

/// What a lane comes to when it goes on.
enum Went {
    /// It went on; what a store overwrote can be put back.
    On(Option<((usize, usize), Option<u64>)>),
    Waits,
    Ended,
}

impl Model {
    fn new(num_ranks: usize, steps: &[Step], mistake: Option<Mistake>) -> Self {
        let ranks: Vec<Lanes> = (0..num_ranks).map(|rank| lanes((num_ranks, rank), steps, mistake)).collect();
        Self { places: vec![0; 2 * num_ranks], memory: HashMap::new(), ranks }
    }

    fn word(&self, rank: usize, at: usize) -> u64 {
        self.memory.get(&(rank, at)).copied().unwrap_or(0)
    }

    /// Lets a lane go on by one.
    fn go(&mut self, lane: usize) -> Result<Went, String> {
        let rank = lane / 2;
        let Some(&op) = self.ranks[rank][lane % 2].get(usize::from(self.places[lane])) else { return Ok(Went::Ended) };
        let mut undo = None;
        match op {
            Op::Store { to, at, word } => undo = Some(((to, at), self.memory.insert((to, at), word))),
            Op::Read { at, word } => {
                let found = self.word(rank, at);
                if found != word {
                    return Err(format!("rank {rank} reads {} at {at}, not {}", describe(found), describe(word)));
                }
            }
            Op::Follow { at, word } if self.word(rank, at) != word => return Ok(Went::Waits),
            Op::Hear { at, word } => {
                let seen = self.word(rank, at);
                // As kernels/hear.cuh takes it.
                let is_ahead = seen != 0 && ((seen >> 32) as u32).wrapping_sub((word >> 32) as u32) < 1 << 31;
                match seen == word {
                    false if is_ahead => return Err(format!("rank {rank} is ahead: {}", describe(seen))),
                    false => return Ok(Went::Waits),
                    true => {}
                }
            }
            Op::Follow { .. } => {}
        }
        self.places[lane] += 1;
        Ok(Went::On(undo))
    }

    /// In every order. How many places ranks can be at together.
    fn go_everywhere(&mut self) -> Result<usize, String> {
        let mut known = HashSet::from([self.places.clone()]);
        self.go_on_everywhere(&mut known)?;
        Ok(known.len())
    }

    fn go_on_everywhere(&mut self, known: &mut HashSet<Vec<u16>>) -> Result<(), String> {
        // Each word has one writer, so that places say what memory holds.
        let (mut has_gone, mut num_ended) = (false, 0);
        for lane in 0..self.places.len() {
            match self.go(lane)? {
                Went::Waits => {}
                Went::Ended => num_ended += 1,
                Went::On(undo) => {
                    has_gone = true;
                    if known.insert(self.places.clone()) {
                        self.go_on_everywhere(known)?;
                    }
                    self.places[lane] -= 1;
                    match undo {
                        Some((cell, Some(word))) => drop(self.memory.insert(cell, word)),
                        Some((cell, None)) => drop(self.memory.remove(&cell)),
                        None => {}
                    }
                }
            }
        }
        if has_gone || num_ended == self.places.len() { Ok(()) } else { Err("all wait".to_owned()) }
    }

    /// In a random order, in which now one lane and now another is far ahead.
    fn go_at_random(&mut self, random: &mut Random) -> Result<(), String> {
        let num_lanes = self.places.len();
        let mut ended = vec![false; num_lanes];
        let mut num_in_vain = 0;
        while !ended.iter().all(|ended| *ended) {
            let lane = random.below(num_lanes);
            for _ in 0..1 + random.below(60) {
                match self.go(lane)? {
                    Went::On(_) => num_in_vain = 0,
                    Went::Ended => ended[lane] = true,
                    Went::Waits => num_in_vain += 1,
                }
                if num_in_vain > 1000 * num_lanes {
                    return Err("all wait".to_owned());
                }
            }
        }
        Ok(())
    }
}

const STEPS: [&[Step]; 9] = [
    &[Step::Replayed, Step::Replayed],
    &[Step::Whole, Step::Replayed, Step::Few],
    &[Step::Few, Step::Few],
    &[Step::Whole, Step::Few],
    &[Step::Overlapped(2), Step::Few, Step::Whole],
    &[Step::Whole, Step::Whole],
    &[Step::Overlapped(2), Step::Whole],
    &[Step::Overlapped(1), Step::Overlapped(2)],
    &[Step::Whole, Step::Overlapped(3)],
];

#[test]
fn two_ranks_overwrite_nothing_in_any_order() {
    for steps in STEPS {
        let places = Model::new(2, steps, None).go_everywhere();
        let places = places.unwrap_or_else(|error| panic!("{steps:?}: {error}"));
        assert!(places > 500, "{steps:?}: {places} places");
    }
}

#[test]
fn a_mistake_shows_in_some_order() {
    for mistake in MISTAKES {
        let shows = |steps: &&[Step]| Model::new(2, steps, Some(mistake)).go_everywhere().is_err();
        assert!(STEPS.iter().any(shows), "{mistake:?}");
    }
}

fn random_steps(random: &mut Random) -> Vec<Step> {
    let num_steps = 1 + random.below(4);
    let step = |random: &mut Random| match random.below(7) {
        0 => Step::Whole,
        1 | 2 => Step::Few,
        3 => Step::Replayed,
        _ => Step::Overlapped(1 + random.below(5)),
    };
    (0..num_steps).map(|_| step(random)).collect()
}

#[test]
fn up_to_five_ranks_overwrite_nothing_in_random_orders() {
    let mut random = Random::new(1);
    for case in 0..1000 {
        let (num_ranks, steps) = (2 + random.below(4), random_steps(&mut random));
        let went = Model::new(num_ranks, &steps, None).go_at_random(&mut random);
        went.unwrap_or_else(|error| panic!("case {case}, {num_ranks} ranks, {steps:?}: {error}"));
    }
}

#[test]
fn random_orders_show_a_mistake_of_three_ranks_as_well() {
    let mut random = Random::new(2);
    for mistake in MISTAKES {
        let mut shows = || {
            let steps = [Step::Overlapped(3), Step::Replayed, Step::Whole, Step::Overlapped(2)];
            Model::new(3, &steps, Some(mistake)).go_at_random(&mut random).is_err()
        };
        assert!((0..2000).any(|_| shows()), "{mistake:?}");
    }
}
