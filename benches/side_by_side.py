#!/usr/bin/env python3
"""Times `lockstep bench` beside torch.nn.functional.linear on one machine, in turns, and prints a Markdown table.

    cargo build --release && python3 benches/side_by_side.py

Every round times torch once and lockstep once for each line, so that a busy moment hits all of them; the medians of
the rounds are compared. torch does the three products of every expert over bf16 and over f32 weights, without the
activation; lockstep does them over NVFP4 weights, with it. Needs torch (CPU).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default="target/release/lockstep")
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--rows", default="1,4,16,64,256", help="rows an expert")
    parser.add_argument("--isas", default="avx2,avx512")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each turn, for idle threads to sleep")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait at most for a quiet moment")
    return parser.parse_args()


class Torch:
    """The experts' weights in one dtype."""

    def __init__(self, args, dtype):
        def weight(out_features, in_features):
            return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)

        self.dtype = dtype
        self.hidden = args.hidden
        self.experts = [
            (
                weight(args.intermediate, args.hidden),
                weight(args.intermediate, args.hidden),
                weight(args.hidden, args.intermediate),
            )
            for _ in range(args.experts)
        ]

    def time_us(self, num_rows):
        """The second of two calls: the first wakes torch's threads, as `lockstep bench` wakes its own."""
        x = torch.randn(num_rows, self.hidden).to(self.dtype)
        for _ in range(2):
            start = time.perf_counter()
            for gate, up, down in self.experts:
                F.linear(F.linear(x, gate), down)
                F.linear(x, up)
        return (time.perf_counter() - start) * 1e6


def lockstep(args, isa):
    command = [
        args.binary, "bench", "--hidden", str(args.hidden), "--intermediate", str(args.intermediate),
        "--experts", str(args.experts), "--rows-per-expert", args.rows, "--isa", isa,
        "--threads", str(args.threads), "--repeats", "1", "--json",
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def pause(args):
    """Lets idle threads sleep, and waits for a moment in which nothing else runs; says whether one came."""
    time.sleep(args.pause)
    deadline = time.monotonic() + args.patience
    while True:
        if max(num_running(0.1) for _ in range(6)) <= 1:
            return True
        if time.monotonic() >= deadline:
            return False


def num_running(seconds):
    time.sleep(seconds)
    with open("/proc/stat", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("procs_running"))


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))


def measure(args, rows, isas):
    """Times by (what, rows), the reports of every instruction set, and the share of quiet turns."""
    times, reports, quiet = {}, {isa: [] for isa in isas}, []
    peers = {"bf16": Torch(args, torch.bfloat16), "f32": Torch(args, torch.float32)}
    for turn in range(args.rounds):
        for name, peer in peers.items():
            quiet.append(pause(args))
            for num_rows in rows:
                times.setdefault((name, num_rows), []).append(peer.time_us(num_rows))
        for isa in isas:
            quiet.append(pause(args))
            report = lockstep(args, isa)
            reports[isa].append(report)
            for row in report["rows"]:
                times.setdefault((isa, row["rows_per_expert"]), []).append(row["median_us"])
        print(f"round {turn + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return times, reports, sum(quiet) / len(quiet)


def ceilings(reports):
    """FMA peak and read bandwidth, the best of the rounds."""
    return tuple(max(report[name] for report in reports) for name in ("fma_gflops", "read_gbyte_per_s"))


def print_table(args, rows, reports, time_ms):
    print("| rows/expert | torch bf16 ms | torch f32 ms | lockstep | ms | over torch bf16 | over torch f32 "
          "| GFLOPS | of FMA peak | GB/s | of read | of floor |")
    print("|--:|--:|--:|--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for num_rows in rows:
        for isa, of_isa in reports.items():
            peak, read = ceilings(of_isa)
            ms, bf16, f32 = (time_ms[(name, num_rows)] for name in (isa, "bf16", "f32"))
            gflops = 6 * args.hidden * args.intermediate * args.experts * num_rows / ms / 1e6
            gbytes = of_isa[0]["weight_bytes"] / ms / 1e6
            floor = max(gflops / peak, gbytes / read)
            print(f"| {num_rows} | {bf16:.2f} | {f32:.2f} | {isa} | {ms:.2f} | {ms / bf16:.2f} | {ms / f32:.2f} "
                  f"| {gflops:.1f} | {gflops / peak:.0%} | {gbytes:.1f} | {gbytes / read:.0%} | {floor:.0%} |")


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    rows = [int(count) for count in args.rows.split(",")]
    isas = args.isas.split(",")
    load_before = os.getloadavg()[0]
    times, reports, quiet = measure(args, rows, isas)

    print(f"{cpu_name()}, {args.threads} threads of {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; "
          f"torch {torch.__version__}; load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, "
          f"{quiet:.0%} of the turns began with nothing else running; {args.experts} experts of {args.hidden} x {args.intermediate}, medians of {args.rounds} rounds.\n")
    print_table(args, rows, reports, {key: statistics.median(values) / 1e3 for key, values in times.items()})
    print("\nThe same from the fastest round of each, which a busy machine disturbs least:\n")
    print_table(args, rows, reports, {key: min(values) / 1e3 for key, values in times.items()})
    print()
    for isa in isas:
        peak, read = ceilings(reports[isa])
        print(f"{isa}: FMA peak {peak:.1f} GFLOPS, read {read:.1f} GB/s, the best of {args.rounds} rounds.")
    print("flops = 2 * 3 * hidden * intermediate * experts * rows; bytes = packed weights, read once; "
          "floor = max(bytes / read, flops / peak).")


if __name__ == "__main__":
    main()
