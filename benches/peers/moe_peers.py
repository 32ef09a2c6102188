#!/usr/bin/env python3
"""Times the experts of one MoE layer on one CUDA GPU: `lockstep bench` beside torch in bf16 and humming in NVFP4.

    cargo build --release && python3 benches/peers/moe_peers.py --geometry k3-ep16 --out results

Needs torch, and humming where it is to be had (the wheel `humming-kernels`). For each geometry the program runs lockstep in
both modes of activations, then the peers over the same rows of every expert, then lockstep again: a card that has become hot
meanwhile shows. RESULTS/GEOMETRY.json holds everything that was measured; the table made of it is printed and lies in
RESULTS/GEOMETRY.md. humming compiles a kernel for each size, some for minutes, and keeps them where HUMMING_CACHE_DIR says.

Every line is measured alone, after a rest: the card's clock follows its heat. cuBLAS (bf16, 8192^3) stands beside each.

A layer is FC1 (gate and up), the activation and FC2 over rows that lie sorted by expert. lockstep also gathers its rows by
index, and writes them in f32. Its weights are cold: four sets of them take turns. The peers have one set, of which the 60 MB
of L2 may keep a part.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import forms
import layers
import lockstep
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


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def make_lines(num_experts: int, options: argparse.Namespace) -> list[forms.Line]:
    even = [forms.even(num_experts, mean) for mean in numbers(options.even)]
    return even + [forms.skewed(form, num_experts, mean) for form in forms.SKEWED for mean in numbers(options.skewed)]


def say(what: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {what}", file=sys.stderr, flush=True)


class Measurement:
    """What is known of a geometry: RESULTS/GEOMETRY.json and its table, which a run that is cut off leaves as far as it came."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.geometry = name, options, GEOMETRIES[name]
        self.lines = make_lines(self.geometry.num_experts, options)
        self.result: dict[str, Any] = {
            "name": name,
            "geometry": dataclasses.asdict(self.geometry),
            "command": " ".join(sys.argv),
            "versions": layers.versions(),
            "lines": [dataclasses.asdict(line) for line in self.lines],
        }

    def run(self) -> None:
        self._keep("before", self._lockstep("bf16"))
        self._keep("quantised", self._lockstep("quantised"))
        say(f"{self.name}: peers")
        peers = layers.time_peers(self.geometry, [line.counts for line in self.lines], self.options.repeats)
        layers.give_memory_back()
        self._keep("peers", peers)
        self._keep("after", self._lockstep("bf16"))

    def _lockstep(self, activations: str) -> dict[str, Any]:
        say(f"{self.name}: lockstep, {activations}")
        options = self.options
        bench = [
            *("--backend", "wgmma", "--geometry", self.geometry.model, "--experts", str(self.geometry.num_experts)),
            *("--activations", activations, "--alone", "--repeats", str(options.repeats)),
        ]
        return lockstep.bench(options.lockstep, bench, [line.counts for line in self.lines], options.cache_dir)

    def _keep(self, key: str, value: Any) -> None:
        self.result[key] = value
        (self.options.out / f"{self.name}.json").write_text(json.dumps(self.result, indent=1))


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.geometry or GEOMETRIES:
        measurement = Measurement(name, options)
        measurement.run()
        table = tables.of_layer(measurement.result)
        (options.out / f"{name}.md").write_text(table)
        print(table, flush=True)


if __name__ == "__main__":
    main()
