#!/usr/bin/env python3
"""Times the way of tokens to experts and back between two ranks: `lockstep bench --travel` beside torch's all_to_all.

    cargo build --release && python3 benches/peers/two_ranks.py --out results          # two GPUs of one host
    python3 benches/peers/two_ranks.py --check                                         # no GPU: the pipeline alone, on gloo

For Kimi K3 and DeepSeek-V3, bf16 and NVFP4 payload: lockstep over NCCL and nvlink, then torch (permute, exchange by
`all_to_all_single`, permute to experts, and back), then lockstep again. Both are queued by hosts, counts of rows crossing to the
host once, and timed by devices; the slowest rank, all starting at once. Rows come home in bf16. torch sends a token for each
slot and does not quantise: with NVFP4 payload it moves as many bytes. Between dispatch and combine stands the layer of rank 0
over the rows that it has then: lockstep's and torch's (bf16 weights), as `moe_peers.py` times them.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import layers
import lockstep
import pipeline
import tables

NUM_RANKS = 2
SHAPES = {
    "kimi-k3": pipeline.Shape(hidden=3584, num_experts=896, num_topk=16),
    "deepseek-v3": pipeline.Shape(hidden=7168, num_experts=256, num_topk=8),
}
# What one of the two ranks holds.
GEOMETRIES = {
    "kimi-k3": layers.Geometry("kimi-k3", 448, 3584, 3072, "situ"),
    "deepseek-v3": layers.Geometry("deepseek-v3", 128, 7168, 2048, "swiglu"),
}
ACTIVATIONS = {"bf16": "bf16", "nvfp4": "quantised"}
SMALL = pipeline.Shape(hidden=64, num_experts=12, num_topk=4)
# A token's bytes: two a value, or half a byte and a sixteenth of a scale's byte.
ROW_BYTES = {"bf16": lambda hidden: 2 * hidden, "nvfp4": lambda hidden: hidden // 2 + hidden // 16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check torch's pipeline on CPUs, and time nothing")
    parser.add_argument("--tokens", default="1,8,64,512,2048,8192", metavar="N,...", help="of a rank")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of which the median counts")
    parser.add_argument("--lockstep", default="target/release/lockstep", metavar="BINARY")
    parser.add_argument("--cache-dir", metavar="DIR", help="compiled kernels of lockstep, found and kept there")
    parser.add_argument("--transports", default="nccl,nvlink", metavar="NAME,...")
    parser.add_argument("--mpirun", default="mpirun --bind-to none", metavar="COMMAND")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="RESULTS")
    return parser.parse_args()


def time_travel(model: str, payload: str, options: argparse.Namespace) -> dict[str, Any]:
    """lockstep's report of dispatch and combine."""
    bench = [
        *("--travel", "--geometry", model, "--payload", payload, "--tokens", options.tokens),
        *("--transports", options.transports, "--repeats", str(options.repeats)),
    ]
    launcher = [*shlex.split(options.mpirun), "-n", str(NUM_RANKS)]
    return lockstep.bench(options.lockstep, bench, cache_dir=options.cache_dir, launcher=launcher)


def time_layer(model: str, payload: str, lines: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """lockstep's report of the layer over so many rows of each expert."""
    bench = [
        *("--backend", "wgmma", "--geometry", model, "--experts", str(GEOMETRIES[model].num_experts)),
        *("--activations", ACTIVATIONS[payload], "--alone", "--repeats", str(options.repeats)),
    ]
    return lockstep.bench(options.lockstep, bench, lines, options.cache_dir)


def torch_rank(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    """One of torch's two processes. Rank 0 writes what it has measured beside the rendezvous."""
    device = torch.device("cpu") if options.check else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if options.check else "nccl"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS)
    for num_tokens in (1, 3, 40):
        pipeline.check(SMALL, num_tokens, device)
    if not options.check:
        measured = {
            f"{model} {payload}": [
                pipeline.time_travel(shape, num_tokens, row_bytes(shape.hidden), device, options.repeats)
                for num_tokens in map(int, options.tokens.split(","))
            ]
            for model, shape in SHAPES.items()
            for payload, row_bytes in ROW_BYTES.items()
        }
        if rank == 0:
            Path(f"{rendezvous}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def run_torch(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        torch.multiprocessing.spawn(torch_rank, (rendezvous, options), nprocs=NUM_RANKS)
        return {} if options.check else json.loads(Path(f"{rendezvous}.json").read_text())


def main() -> None:
    options = parse()
    if options.check:
        run_torch(options)
        print("every sum is what it is without travelling")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [(model, payload) for model in SHAPES for payload in ROW_BYTES]
    before = {case: time_travel(*case, options) for case in cases}
    beside = run_torch(options)
    after = {case: time_travel(*case, options) for case in cases}
    for model in SHAPES:
        lines = [row["counts"] for row in beside[f"{model} bf16"]]
        peers = layers.time_peers(GEOMETRIES[model], lines, options.repeats)
        layers.give_memory_back()
        for payload in ROW_BYTES:
            result = {
                "name": f"{model} {payload}",
                "command": " ".join(sys.argv),
                "versions": layers.versions(),
                "before": before[model, payload],
                "after": after[model, payload],
                "torch": beside[f"{model} {payload}"],
                "layer": time_layer(model, payload, lines, options),
                "peers": peers,
            }
            (options.out / f"two-ranks-{model}-{payload}.json").write_text(json.dumps(result, indent=1))
            print(tables.of_travel(result), flush=True)


if __name__ == "__main__":
    main()
