#!/usr/bin/env python3
"""Markdown of what the programs beside this one have measured.

    python3 tables.py RESULT.json...
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Cell = str | float | int | None
SLACK = 1.15  # of the floor
QUANTISED_SLACK = 1.05


def text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if cell >= 100 else f"{cell:.1f}"
    return str(cell)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose first column is text, the others figures."""
    lines = [head, ["--", *["--:"] * (len(head) - 1)], *([text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def listed(what: str, rows: Sequence[str]) -> str:
    return f"- {what}: {', '.join(rows) if rows else 'none'}.\n"


def line_name(row: dict[str, Any]) -> str:
    return f"{row['form'].replace('_', ' ')} {row['rows_per_expert']}"


def of_layer(result: dict[str, Any]) -> str:
    """A table of `moe_peers.py`, and the rows that lose."""

    def rows(key: str) -> list[dict[str, Any]]:
        return [row for report in result[key] for row in report["rows"]]

    names = list(result["peers"][0]["peers"])
    table, behind, above, dearer = [], [], [], []
    for before, after, quantised, beside in zip(
        rows("before"), rows("after"), rows("quantised"), result["peers"], strict=True
    ):
        if not before["counts"] == after["counts"] == quantised["counts"] == beside["counts"]:
            raise ValueError(f"{line_name(before)} is not over the same rows everywhere")
        slower = max(before, after, key=lambda row: row["median_us"])
        peers_us = [beside["peers"][name]["median_us"] for name in names]
        ratio = slower["median_us"] / min(peers_us)
        if ratio > 1:
            behind.append(line_name(before))
        if slower["median_us"] > SLACK * slower["floor_us"]:
            above.append(f"{line_name(before)} ({slower['floor_us'] / slower['median_us']:.2f})")
        if quantised["median_us"] > QUANTISED_SLACK * slower["median_us"]:
            dearer.append(f"{line_name(before)} ({quantised['median_us'] / slower['median_us']:.2f})")
        is_bound_by_flops = (before["flops_floor_us"] or 0) > before["memory_floor_us"]
        table.append(
            [
                before["form"].replace("_", " "),
                before["rows_per_expert"],
                before["num_experts_hit"],
                before["median_us"],
                after["median_us"],
                min(before["min_us"], after["min_us"]),
                slower["floor_us"],
                "flops" if is_bound_by_flops else "memory",
                f"{slower['floor_us'] / slower['median_us']:.2f}",
                quantised["median_us"],
                *peers_us,
                beside["dense_tflops"],
                f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}",
            ]
        )
    head = [
        *("rows", "an expert", "hit", "ours", "after", "least", "floor", "by", "of floor", "quantised"),
        *(*names, "cuBLAS TFLOPS", "of the better peer"),
    ]
    of_machine = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    geometry = result["geometry"]
    ceilings = [report["ceilings"] for key in ("before", "after") for report in result[key]]
    copied = "{:.2f} to {:.2f}".format(*span(ceiling["read_tbyte_per_s"] for ceiling in ceilings))
    dense = "{:.0f} to {:.0f}".format(*span(ceiling["dense_tflops"] or 0.0 for ceiling in ceilings))
    return (
        f"### {result['name']}: {geometry['num_experts']} experts of {geometry['hidden']} x {geometry['intermediate']}\n\n"
        f"    {result['command']}\n\n"
        f"{of_machine}. us, medians; copied at {copied} TB/s, cublasLt at {dense} TFLOPS between our lines.\n\n"
        + markdown(head, table)
        + "\n"
        + listed("Behind a peer", behind)
        + listed("More than 15 % over the floor", above)
        + listed("Quantised activations more than 5 % dearer", dearer)
    )


def of_travel(result: dict[str, Any]) -> str:
    """A table of `two_ranks.py`, and the numbers of tokens that lose."""
    transports = list(dict.fromkeys(row["transport"] for row in result["before"]["rows"]))
    names = list(result["peers"][0]["peers"])

    def ours(tokens: int, transport: str, phase: str) -> float:
        """The slower of before and after."""
        reports = (result["before"], result["after"])
        rows = [row for report in reports for row in report["rows"]]
        return max(row[phase] for row in rows if (row["tokens"], row["transport"]) == (tokens, transport))

    table = []
    behind: dict[str, list[str]] = {"dispatch": [], "layer": [], "combine": [], "all three": []}
    for beside, layer, peers in zip(result["torch"], result["layer"]["rows"], result["peers"], strict=True):
        tokens = beside["tokens"]
        dispatch = [ours(tokens, transport, "dispatch_us") for transport in transports]
        combine = [ours(tokens, transport, "combine_us") for transport in transports]
        peers_us = [peers["peers"][name]["median_us"] for name in names]
        whole = min(map(sum, zip(dispatch, combine))) + layer["median_us"]
        whole_of_torch = beside["dispatch_us"] + min(peers_us) + beside["combine_us"]
        for phase, mine, theirs in (
            ("dispatch", min(dispatch), beside["dispatch_us"]),
            ("layer", layer["median_us"], min(peers_us)),
            ("combine", min(combine), beside["combine_us"]),
            ("all three", whole, whole_of_torch),
        ):
            if mine > theirs:
                behind[phase].append(str(tokens))
        ratio = f"{whole / whole_of_torch:.2f}"
        table.append(
            [
                str(tokens),
                *(*dispatch, beside["dispatch_us"]),
                *(layer["median_us"], *peers_us),
                *(*combine, beside["combine_us"]),
                f"**{ratio}**" if whole > whole_of_torch else ratio,
            ]
        )
    head = [
        "tokens a rank",
        *(f"dispatch {transport}" for transport in transports),
        *("dispatch torch", "layer ours", *(f"layer {name}" for name in names)),
        *(f"combine {transport}" for transport in transports),
        *("combine torch", "all three, of the peers'"),
    ]
    of_machine = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lists = (listed(f"Behind in {phase}, tokens a rank", tokens) for phase, tokens in behind.items())
    return (
        f"### {result['name']}, two ranks\n\n    {result['command']}\n\n{of_machine}. us, medians of the slowest rank.\n\n"
        + markdown(head, table)
        + "\n"
        + "".join(lists)
    )


def span(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


if __name__ == "__main__":
    for path in sys.argv[1:]:
        result = json.loads(Path(path).read_text())
        print((of_travel if "torch" in result else of_layer)(result))
