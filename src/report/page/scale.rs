//! Shades for counts: none for zero, else one of eight from zero to the largest.

use maud::{Markup, html};

/// Shades that the style sheet has, `h0` to `h7`.
pub const NUM_SHADES: u64 = 8;

/// Shades of counts up to a largest.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    max: u64,
}

impl Scale {
    /// For counts of which none is above `max`.
    pub fn new(max: u64) -> Self {
        Self { max }
    }

    /// The shade of a count; `None` for zero.
    pub fn shade(self, count: u64) -> Option<u64> {
        let above = count.checked_sub(1)?;
        let shade = u128::from(above) * u128::from(NUM_SHADES) / u128::from(self.max.max(1));
        Some(u64::try_from(shade).unwrap_or(u64::MAX).min(NUM_SHADES - 1))
    }

    /// The class of a count's shade.
    pub fn class(self, count: u64) -> String {
        self.shade(count).map_or_else(|| "hz".to_owned(), |shade| format!("h{shade}"))
    }

    /// The class of text upon it.
    pub fn text_class(self, count: u64) -> String {
        self.shade(count).map_or_else(|| "tz".to_owned(), |shade| format!("t{shade}"))
    }

    /// The smallest count of a shade.
    fn first(self, shade: u64) -> u64 {
        let below = (u128::from(shade) * u128::from(self.max)).div_ceil(u128::from(NUM_SHADES));
        u64::try_from(below).unwrap_or(u64::MAX - 1) + 1
    }

    /// Every shade that some count has, with its counts, as `show` writes them.
    pub fn legend(self, show: &dyn Fn(u64) -> String) -> Markup {
        let ranges = (0..NUM_SHADES).map(|shade| (shade, self.first(shade), self.first(shade + 1) - 1));
        html! {
            ul.legend {
                li { span.swatch.hz {} (show(0)) }
                @for (shade, first, last) in ranges.filter(|(_, first, last)| first <= last) {
                    li {
                        span class={ "swatch h" (shade) } {}
                        (show(first))
                        @if first < last { "–" (show(last)) }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_cover_all_counts_and_the_legend_says_which() {
        for max in [1, 2, 7, 8, 9, 100, 1 << 40] {
            let scale = Scale::new(max);
            assert_eq!((scale.shade(0), scale.shade(max)), (None, Some((max - 1) * NUM_SHADES / max)));
            for shade in 0..NUM_SHADES {
                let (first, last) = (scale.first(shade), scale.first(shade + 1) - 1);
                if first <= last {
                    assert_eq!((scale.shade(first), scale.shade(last)), (Some(shade), Some(shade)), "{max}");
                }
            }
        }
        assert_eq!(Scale::new(0).shade(0), None);
        assert_eq!(Scale::new(u64::MAX).shade(u64::MAX), Some(NUM_SHADES - 1));
    }
}
