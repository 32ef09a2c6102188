//! What a run is judged by, from what every rank counted: its rows, its values, and the code that computed them.

use serde::Serialize;

use super::{Decided, Launch, RankReport};

/// Something that was checked after the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What has to hold.
    pub name: String,
    /// Whether it does.
    pub pass: bool,
    /// The numbers.
    pub detail: String,
}

/// Nothing lost, nothing added: as many rows were computed as slots named an expert.
pub(super) fn check_rows(ranks: &[RankReport]) -> Check {
    let shares = || ranks.iter().flat_map(|rank| &rank.layers);
    let slots: u64 = shares().map(|share| share.slots).sum();
    let rows: u64 = shares().flat_map(|share| &share.rows_per_expert).sum();
    Check {
        name: "every routed slot was computed once".to_owned(),
        pass: slots == rows,
        detail: format!("{slots} slots, {rows} rows"),
    }
}

pub(super) fn check_finite(ranks: &[RankReport]) -> Check {
    let num: u64 = ranks.iter().flat_map(|rank| &rank.layers).map(|share| share.num_not_finite).sum();
    Check { name: "every output is finite".to_owned(), pass: num == 0, detail: format!("{num} values are not") }
}

/// Nothing but what all ranks agreed on computed: the winner of each layer, and its companions for the layer's other experts.
pub(super) fn check_identities(decided: &Decided, ranks: &[RankReport]) -> Check {
    let allowed = |launch: &Launch| {
        let layer = decided.layers.iter().find(|layer| layer.layer == launch.layer);
        layer.is_some_and(|layer| layer.identities.contains(&launch.identity))
    };
    let strangers: Vec<String> = ranks
        .iter()
        .flat_map(|rank| rank.launches.iter().map(move |launch| (rank.rank, launch)))
        .filter(|(_, launch)| !allowed(launch))
        .map(|(rank, launch)| format!("rank {rank} ran {} in layer {}", launch.identity, launch.layer))
        .collect();
    Check {
        name: "every rank ran the agreed implementation".to_owned(),
        pass: strangers.is_empty(),
        detail: if strangers.is_empty() { agreed(decided) } else { strangers.join("; ") },
    }
}

fn agreed(decided: &Decided) -> String {
    let mut identities: Vec<&str> =
        decided.layers.iter().flat_map(|layer| &layer.identities).map(String::as_str).collect();
    identities.sort_unstable();
    identities.dedup();
    identities.join(", ")
}
