//! What a rank tells the others about the tactics of one shape, in a fixed number of words.

use super::MAX_TACTICS;

/// Words of a [`Ballot`].
pub const NUM_WORDS: usize = 2 + MAX_TACTICS;

/// What one tactic took on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timing {
    /// Nothing to say: the rank holds no expert to time, or there is no such tactic.
    None,
    /// Nanoseconds.
    Took(u64),
    /// It can't run here.
    Failed,
}

/// One rank's timings of one shape, or that it has none. Fixed in size: a rank on which all failed sends one too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ballot {
    /// What the timings are about: [`super::TunedShape::digest`].
    pub about: u64,
    /// By tactic; absent where the rank has not timed it and remembers no timing.
    pub timings: Option<[Timing; MAX_TACTICS]>,
}

impl Ballot {
    /// The timings of the first tactics; of the others there is nothing to say.
    #[must_use]
    pub fn new(about: u64, timings: Option<&[Timing]>) -> Self {
        let timings = timings.map(|given| std::array::from_fn(|idx| given.get(idx).copied().unwrap_or(Timing::None)));
        Self { about, timings }
    }

    /// Whether the timings that ranks remember may stand for new ones: only if every rank remembers some, of the same.
    /// Where one rank alone would measure anew, it would measure beside idle ranks, and the others what once was.
    #[must_use]
    pub fn all_remember(ballots: &[Self]) -> bool {
        let of_first = ballots.first().map(|ballot| ballot.about);
        ballots.iter().all(|ballot| ballot.timings.is_some() && Some(ballot.about) == of_first)
    }

    /// As numbers.
    #[must_use]
    pub fn words(&self) -> [u64; NUM_WORDS] {
        let mut words = [0; NUM_WORDS];
        words[0] = self.about;
        words[1] = u64::from(self.timings.is_some());
        for (word, timing) in words[2..].iter_mut().zip(self.timings.iter().flatten()) {
            *word = match timing {
                Timing::None => 0,
                Timing::Took(ns) => (*ns).clamp(1, u64::MAX - 1),
                Timing::Failed => u64::MAX,
            };
        }
        words
    }

    /// Reads another rank's.
    #[must_use]
    pub fn from_words(words: &[u64; NUM_WORDS]) -> Self {
        let timing = |word| match word {
            0 => Timing::None,
            u64::MAX => Timing::Failed,
            ns => Timing::Took(ns),
        };
        let timings = (words[1] != 0).then(|| std::array::from_fn(|idx| timing(words[2 + idx])));
        Self { about: words[0], timings }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_timing() -> impl Strategy<Value = Timing> {
        prop_oneof![Just(Timing::None), Just(Timing::Failed), (1..u64::MAX).prop_map(Timing::Took)]
    }

    proptest! {
        #[test]
        fn words_read_back(
            about in any::<u64>(),
            timings in prop::option::of(prop::collection::vec(any_timing(), 0..=MAX_TACTICS)),
        ) {
            let ballot = Ballot::new(about, timings.as_deref());
            prop_assert_eq!(Ballot::from_words(&ballot.words()), ballot);
        }
    }

    #[test]
    fn no_time_is_still_a_time() {
        let ballot = Ballot::new(7, Some(&[Timing::Took(0), Timing::Took(u64::MAX)]));
        let read = Ballot::from_words(&ballot.words()).timings.expect("there");
        assert_eq!(read[..3], [Timing::Took(1), Timing::Took(u64::MAX - 1), Timing::None]);
    }

    #[test]
    fn memories_count_only_if_all_have_them() {
        let of = |about, remembers: bool| Ballot::new(about, remembers.then_some(&[Timing::Took(5)][..]));
        assert!(Ballot::all_remember(&[of(1, true), of(1, true)]));
        assert!(!Ballot::all_remember(&[of(1, true), of(1, false)]), "one rank has none");
        assert!(!Ballot::all_remember(&[of(1, true), of(2, true)]), "of something else");
        assert!(!Ballot::all_remember(&[of(1, false)]));
    }
}
