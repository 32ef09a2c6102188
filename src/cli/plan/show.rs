//! A plan as tables for people.

use std::fmt;

use comfy_table::{CellAlignment, Table};

use crate::plan::floor::{Floors, RESOURCES};
use crate::plan::units::gigabytes;
use crate::plan::{LayerGroup, Plan, StepWay};
use crate::report::new_table;

/// Groups of ranks that are listed; the JSON has all.
const MAX_GROUPS: usize = 8;

/// A plan to be printed.
pub(super) struct Shown<'a>(pub &'a Plan);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.0;
        writeln!(
            f,
            "{} · {} · {} on {} ({})",
            plan.deployment,
            plan.model,
            count(plan.num_ranks, "rank"),
            count(plan.num_nodes, "node"),
            plan.device
        )?;
        writeln!(
            f,
            "{} of {} experts of {} x {}, top-{} · {} a rank in {}",
            count(plan.num_layers, "MoE layer"),
            plan.num_experts,
            plan.expert_hidden,
            plan.intermediate,
            plan.num_topk,
            count(plan.num_tokens_per_rank, "token"),
            count(plan.num_chunks, "chunk"),
        )?;
        writeln!(f, "\n{}", ranks(plan))?;
        if let Some(more) = plan.ranks.len().checked_sub(MAX_GROUPS).filter(|&more| more > 0) {
            writeln!(f, "and {} alike; --json lists them", count(more, "more group"))?;
        }
        match (plan.device_memory_bytes, plan.fits) {
            (Some(memory), Some(true)) => writeln!(f, "every rank fits its device's {}", gigabytes(memory))?,
            (Some(memory), _) => writeln!(f, "NOT every rank fits its device's {}", gigabytes(memory))?,
            (None, _) => writeln!(f, "--device-memory-gbyte holds this against the memory of a device")?,
        }
        destinations(f, plan)?;
        for group in &plan.layers {
            writeln!(f, "\n{}, {}:\n{}", names(group), group.quant, ways(group))?;
            if group.ways.iter().all(|way| way.payload != "nvfp4") {
                writeln!(f, "their activations are not quantised, so their tokens can't travel as nvfp4")?;
            }
        }
        writeln!(f, "\nthe most that a rank sends in a step of {}:\n{}", count(plan.num_layers, "layer"), sent(plan))?;
        writeln!(f, "\nthe least time (of the slowest rank; all that can overlap overlaps):\n{}", floors(plan))?;
        for key in &plan.missing {
            writeln!(f, "{key} is not set, so its floor is left out, which may be the largest")?;
        }
        writeln!(f, "* as the deployment chooses")
    }
}

fn count(number: usize, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}

/// `layers 1-92`; a list where there are gaps.
fn names(group: &LayerGroup) -> String {
    match group.layers[..] {
        [layer] => format!("layer {layer}"),
        [first, .., last] if (last - first) as usize + 1 == group.layers.len() => format!("layers {first}-{last}"),
        _ => format!("layers {}", group.layers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

fn starred(payload: &str, is_chosen: bool) -> String {
    format!("{payload}{}", if is_chosen { " *" } else { "" })
}

fn destinations(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    let to = plan.destinations_per_token;
    let groups = match (plan.topk_group, plan.num_groups) {
        (kept, all) if kept < all => format!(" over {kept} of {all} groups"),
        _ => String::new(),
    };
    writeln!(
        f,
        "\na token of rank 0 goes to {:.2} ranks, routed uniformly{groups}: its own {:.2}, over scale-up {:.2}, over \
         scale-out {:.2}",
        to.total(),
        to.local,
        to.scale_up,
        to.scale_out
    )?;
    if plan.levels == "two" {
        let sent = plan.dispatched_per_token;
        writeln!(
            f,
            "in two levels it crosses to {:.2} other nodes; within its own, rank 0 sends {:.2} tokens for each that it brings",
            sent.scale_out, sent.scale_up
        )?;
    }
    Ok(())
}

fn ranks(plan: &Plan) -> Table {
    let header = ["ranks", "experts", "expert weights", "replicated", "buffers ≤", "together"];
    let rows = plan.ranks.iter().take(MAX_GROUPS).map(|group| {
        let ranks = match (group.first_rank, group.last_rank) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        vec![
            ranks,
            group.num_experts.to_string(),
            gigabytes(group.expert_weight_bytes),
            gigabytes(group.replicated_weight_bytes),
            gigabytes(group.buffer_bytes),
            gigabytes(group.needed_bytes),
        ]
    });
    table(&header, rows)
}

fn ways(group: &LayerGroup) -> Table {
    let header =
        ["travels as", "B a token and destination", "= values + scales + ids and weights", "comes back as", "B a row"];
    let rows = group.ways.iter().map(|way| {
        let rows = if way.combine == "slot" { "a row a slot" } else { "a sum a rank" };
        vec![
            starred(way.payload, way.is_chosen),
            way.token_bytes.to_string(),
            format!("{} + {} + {}", way.values_bytes, way.scales_bytes, way.slots_bytes),
            format!("{}, {rows}", way.combine_dtype),
            way.row_bytes.to_string(),
        ]
    });
    table(&header, rows)
}

fn sent(plan: &Plan) -> Table {
    let header = ["travels as", "dispatch, scale-up", "dispatch, scale-out", "combine, scale-up", "combine, scale-out"];
    let rows = plan.steps.iter().map(|step| {
        vec![
            starred(step.payload, step.is_chosen),
            gigabytes(step.dispatch_scale_up_bytes),
            gigabytes(step.dispatch_scale_out_bytes),
            gigabytes(step.combine_scale_up_bytes),
            gigabytes(step.combine_scale_out_bytes),
        ]
    });
    table(&header, rows)
}

fn floors(plan: &Plan) -> Table {
    let header: Vec<String> =
        ["of", "travels as"].into_iter().map(str::to_owned).chain(RESOURCES.map(|name| format!("{name} us"))).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).chain(["floor us", "dominant"]).collect();
    let row = |of: String, travels: String, floors: &Floors| {
        let times = floors.by_resource().into_iter().chain([floors.floor_us]);
        let times = times.map(|time| time.map_or_else(|| "-".to_owned(), microseconds));
        let dominant = floors.dominant.unwrap_or("-").to_owned();
        [of, travels].into_iter().chain(times).chain([dominant]).collect::<Vec<String>>()
    };
    let of_layers = plan.layers.iter().flat_map(|group| {
        let of = if group.layers.len() == 1 { names(group) } else { format!("each of {}", names(group)) };
        group.ways.iter().map(move |way| row(of.clone(), starred(way.payload, way.is_chosen), &way.floors))
    });
    let of_step = |step: &StepWay| row("a step".to_owned(), starred(step.payload, step.is_chosen), &step.floors);
    table(&header, of_layers.chain(plan.steps.iter().map(of_step)))
}

fn microseconds(time_us: f64) -> String {
    if time_us < 100.0 { format!("{time_us:.1}") } else { format!("{time_us:.0}") }
}

/// A table whose columns but the first are numbers.
fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = new_table(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
