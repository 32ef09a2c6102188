//! Which of an implementation's tactics a session runs, chosen once from what every rank has timed.
//!
//! A tactic is a way to lay out the same computation: tiles, tasks, stages. Ranks that each took their own fastest would
//! differ where timings differ by less than noise; so timings are reduced over the ranks, and one is chosen by a pure
//! function of what all of them know. Pure: holds no clock, and knows no backend.

mod choice;
mod record;
mod rows;
mod shape;

pub use choice::{Choice, Dropped, Failure, TacticError, choose};
pub use record::{Ballot, NUM_WORDS, Timing};
pub use rows::RowBucket;
pub use shape::TunedShape;

/// The most tactics of an implementation: records are of fixed size.
pub const MAX_TACTICS: usize = 8;

/// The number of a tactic in its implementation's list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tactic(u8);

impl Tactic {
    /// What runs where nothing was tuned: the first.
    pub const UNTUNED: Self = Self(0);

    /// The tactic at a place of the list.
    ///
    /// # Panics
    /// If the place is [`MAX_TACTICS`] or beyond: a bug of the implementation that lists more.
    #[must_use]
    pub fn new(idx: usize) -> Self {
        assert!(idx < MAX_TACTICS, "tactic {idx} of at most {MAX_TACTICS}");
        Self(u8::try_from(idx).unwrap_or_default())
    }

    /// The place in the list.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
