#!/usr/bin/env python3
"""Times the experts of one MoE layer on one CUDA GPU: `lockstep bench` beside torch in bf16 and humming in NVFP4.

    cargo build --release && python3 benches/peers/moe_peers.py --geometry k3-ep16 --out results

Needs torch, and humming where it is to be had (the wheel `humming-kernels`). For each geometry the program runs lockstep in
both modes of activations, then the peers over the same rows of every expert, then lockstep again: a card that has become hot
meanwhile shows. RESULTS/GEOMETRY.json holds everything that was measured; the table made of it is printed and lies in
RESULTS/GEOMETRY.md.

Every line is measured alone, after a rest: the card's clock follows its heat. cuBLAS (bf16, 8192^3) stands beside each.

A layer is FC1 (gate and up), the activation and FC2 over rows that lie sorted by expert. lockstep also gathers its rows by
index, and writes them in f32. Its weights are cold: four sets of them take turns. The peers have one set, of which the 60 MB
of L2 may keep a part.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import layers
import tables
from layers import Geometry


GEOMETRIES = {
    "k3-ep16": Geometry("kimi-k3", 56, 3584, 3072, "situ"),
    "dsv3-ep8": Geometry("deepseek-v3", 32, 7168, 2048, "swiglu"),
    "qwen3-ep8": Geometry("qwen3-235b", 16, 4096, 1536, "swiglu"),
    "k3-ep8": Geometry("kimi-k3", 112, 3584, 3072, "situ"),
    "k3-ep2": Geometry("kimi-k3", 448, 3584, 3072, "situ"),
}
STARTED = time.monotonic()
SKEWED_FORMS = "log-normal,one-hot,third-empty,ragged"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", action="append", choices=GEOMETRIES, help="again for another; default: all")
    parser.add_argument("--even", default="1,4,8,16,32,64,128,256,1024", metavar="N,...", help="rows of every expert")
    parser.add_argument("--skewed", default="4,16,64,256", metavar="N,...", help="mean rows of the skewed forms")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of which the median counts")
    parser.add_argument("--lockstep", default="target/release/lockstep", metavar="BINARY")
    parser.add_argument("--cache-dir", metavar="DIR", help="compiled kernels of lockstep, as `lockstep warmup` makes them")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="RESULTS")
    return parser.parse_args()


def run_lockstep(geometry: Geometry, activations: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The reports of even and of skewed rows."""
    reports = []
    for forms, rows in (("uniform", options.even), (SKEWED_FORMS, options.skewed)):
        command = [
            *(options.lockstep, "bench", "--backend", "wgmma", "--json", "--geometry", geometry.model),
            *("--experts", str(geometry.num_experts), "--rows", forms, "--rows-per-expert", rows),
            *("--activations", activations, "--repeats", str(options.repeats), "--alone"),
            *(("--cache-dir", options.cache_dir) if options.cache_dir else ()),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        reports.append(json.loads(done.stdout))
    return reports


def say(what: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {what}", file=sys.stderr, flush=True)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is known of a geometry, as RESULTS/GEOMETRY.json has it."""
    geometry = GEOMETRIES[name]
    say(f"{name}: lockstep")
    before = run_lockstep(geometry, "bf16", options)
    quantised = run_lockstep(geometry, "quantised", options)
    say(f"{name}: peers")
    lines = [row["counts"] for report in before for row in report["rows"]]
    peers = layers.time_peers(geometry, lines, options.repeats)
    layers.give_memory_back()
    say(f"{name}: lockstep again")
    after = run_lockstep(geometry, "bf16", options)
    return {
        "name": name,
        "geometry": dataclasses.asdict(geometry),
        "command": " ".join(sys.argv),
        "versions": layers.versions(),
        "before": before,
        "quantised": quantised,
        "peers": peers,
        "after": after,
    }


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.geometry or GEOMETRIES:
        result = measure(name, options)
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
        table = tables.of_layer(result)
        (options.out / f"{name}.md").write_text(table)
        print(table, flush=True)


if __name__ == "__main__":
    main()
