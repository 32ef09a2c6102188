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
BEHIND, ABOVE, DEARER = "behind a peer", "more than 15 % over the floor", "quantised more than 5 % dearer"


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


def of_layer(result: dict[str, Any]) -> str:
    """A table of `moe_peers.py`, and the lines that lose. The slower of before and after is compared."""
    reports = [result["before"], *([result["after"]] if "after" in result else [])]
    names = list(result["peers"][0]["peers"])
    table = []
    losing: dict[str, list[str]] = {kind: [] for kind in (BEHIND, ABOVE, DEARER)}
    for index, line in enumerate(result["lines"]):
        ours = [report["rows"][index] for report in reports]
        quantised, beside = result["quantised"]["rows"][index], result["peers"][index]
        name = f"{line['form']} {line['mean']}"
        if any(row["counts"] != line["counts"] for row in (*ours, quantised, beside)):
            raise ValueError(f"{name} is not over the same rows everywhere")
        slower = max(ours, key=lambda row: row["median_us"])
        peers_us = [beside["peers"][peer]["median_us"] for peer in names]
        of_peer, of_floor = slower["median_us"] / min(peers_us), slower["floor_us"] / slower["median_us"]
        of_bf16 = quantised["median_us"] / ours[0]["median_us"]
        for kind, loses, figure in (
            (BEHIND, of_peer > 1, of_peer),
            (ABOVE, of_floor < 1 / 1.15, of_floor),
            (DEARER, of_bf16 > 1.05, of_bf16),
        ):
            if loses:
                losing[kind].append(f"{name} ({figure:.2f})")
        table.append(
            [
                line["form"],
                line["mean"],
                slower["num_experts_hit"],
                *(row["median_us"] for row in ours),
                min(row["min_us"] for row in ours),
                slower["floor_us"],
                "flops" if (slower["flops_floor_us"] or 0) > slower["memory_floor_us"] else "memory",
                f"{of_floor:.2f}",
                quantised["median_us"],
                *peers_us,
                beside["dense_tflops"],
                f"**{of_peer:.2f}**" if of_peer > 1 else f"{of_peer:.2f}",
            ]
        )
    head = [
        *("rows", "an expert", "hit", "ours", *(["after"] if len(reports) > 1 else []), "least"),
        *("floor", "by", "of floor", "quantised", *names, "cuBLAS TFLOPS", "of the better peer"),
    ]
    geometry = result["geometry"]
    copied, dense = (
        [report["ceilings"][key] or 0.0 for report in reports] for key in ("read_tbyte_per_s", "dense_tflops")
    )
    return (
        f"### {result['name']}: {geometry['num_experts']} experts of {geometry['hidden']} x {geometry['intermediate']}"
        "\n\n"
        f"    {result['command']}\n\n"
        f"{of_machine(result)}. us, medians. The floor is of {spans(copied, 2)} TB/s copied and {spans(dense, 0)} TFLOPS of\n"
        f"cublasLt in our own runs; cuBLAS stands beside the peers.\n\n"
        + markdown(head, table)
        + "\n"
        + "".join(listed(kind.capitalize(), lines) for kind, lines in losing.items())
    )


def of_machine(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in result["versions"].items())


def spans(values: Sequence[float], digits: int) -> str:
    return " to ".join(f"{value:.{digits}f}" for value in sorted(values))


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
    lists = (listed(f"Behind in {phase}, tokens a rank", tokens) for phase, tokens in behind.items())
    return (
        f"### {result['name']}, two ranks\n\n    {result['command']}\n\n"
        f"{of_machine(result)}. us, medians of the slowest rank.\n\n"
        + markdown(head, table)
        + "\n"
        + "".join(lists)
    )


if __name__ == "__main__":
    for path in sys.argv[1:]:
        result = json.loads(Path(path).read_text())
        print((of_travel if "torch" in result else of_layer)(result))
