#!/usr/bin/env python3
"""Times the local expert computation of one MoE layer as today's libraries do it, on one CUDA GPU.

    python3 moe_peers.py [--geometry k3-ep16] [--rows-per-expert 1,8,16,32,64,128,256,1024] [--json out.json]
    lockstep bench --backend wgmma --geometry kimi-k3 --experts 56 --rows uniform,log-normal --json >ours.json
    python3 moe_peers.py --geometry k3-ep16 --rows-from ours.json

With --rows-from every expert has exactly the rows that it had in that report, and its figure stands beside the peers'.

A layer here is: FC1 grouped GEMM (gate and up stacked) -> SiTU -> FC2 grouped GEMM, over rows that are already
sorted by expert. Shapes: x [rows, H] bf16, w1 [E, 2I, H], w2 [E, H, I]. Peers:

* bf16      torch grouped_mm with bf16 weights, SiTU through torch.compile
* humming   NVFP4 weights (e2m1, e4m3 per 16, one fp32 scale), bf16 activations: wheel `humming-kernels` (0.6 MB, no dependencies beyond torch, triton, jinja2, tabulate, tqdm, filelock, cuda-bindings)

Every figure is the median of CUDA-graph replays in microseconds. Weights exceed L2, so each replay reads them from
HBM. The first lines print this machine's own ceilings: the bandwidth of a read-only pass and dense GEMM rates; cuBLAS's
bf16 product of 8192^3 is timed again beside each line, for the card's clock follows its heat.
"""
import argparse, json, os, sys, traceback
import torch

GEOMETRIES = {  # name: (local experts, hidden, intermediate)
    "k3-ep16": (56, 3584, 3072),   # Kimi K3: 896 experts, latent hidden 3584
    "k3-ep8": (112, 3584, 3072),
    "k3-ep2": (448, 3584, 3072),
    "dsv3-ep8": (32, 7168, 2048),  # DeepSeek-V3: 256 experts
    "qwen3-ep8": (16, 4096, 1536), # Qwen3-235B: 128 experts
}
BETA, LINEAR_BETA = 4.0, 25.0

def timed(fn, iters=30):
    for _ in range(3): fn()
    torch.cuda.synchronize()
    ts = []
    for _ in range(iters):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); fn(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[len(ts) // 2]

def graphed(fn):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): fn()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    return g.replay

def ceilings():
    x = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    read = x.numel() / timed(lambda: x.view(torch.int64).sum(), 10) / 1e6
    del x
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16); b = torch.randn_like(a)
    bf16 = 2 * 8192**3 / timed(lambda: a @ b.t()) / 1e6
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    fp8 = 2 * 8192**3 / timed(lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)) / 1e6
    return {"read_TBs": read, "bf16_TFLOPS": bf16, "fp8_TFLOPS": fp8}

def situ(gu):
    g, u = gu.float().chunk(2, -1)
    return (BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)).to(torch.bfloat16)

def main():
    p = argparse.ArgumentParser(); p.add_argument("--geometry", default="k3-ep16", choices=GEOMETRIES)
    p.add_argument("--rows-per-expert", default="1,8,16,32,64,128,256,1024"); p.add_argument("--json")
    p.add_argument("--rows-from", help="a report of lockstep bench --json")
    p.add_argument("--peers", default="bf16,humming")
    o = p.parse_args(); E, H, I = GEOMETRIES[o.geometry]; peers = o.peers.split(",")
    torch.manual_seed(0); c = ceilings(); print({k: round(v, 2) for k, v in c.items()}, flush=True)
    situ_c = torch.compile(situ, dynamic=False)
    w1 = torch.empty(E, 2 * I, H, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    w2 = torch.empty(E, H, I, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    layers = {}
    for name in ("humming",):
        if name not in peers: continue
        try:
            from humming.layer import HummingLayer
            def make(w):
                l = HummingLayer(shape_n=w.shape[1], shape_k=w.shape[2], num_experts=E, torch_dtype=torch.bfloat16,
                                 weight_config={"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}).cuda()
                l.load_from_unquantized(w); l.transform(); return l
            layers[name] = (make(w1), make(w2))
        except Exception: print(f"{name}: not available\n{traceback.format_exc()}", file=sys.stderr)
    if o.rows_from:
        ours = json.load(open(o.rows_from))
        wanted = [ours["num_experts"], ours["hidden"], ours["intermediate"]]
        if wanted != [E, H, I]: sys.exit(f"{o.rows_from} is of {wanted}, --geometry {o.geometry} of {[E, H, I]}")
        lines = [(r["form"], r["rows_per_expert"], r["counts"], r["median_us"]) for r in ours["rows"]]
    else:
        lines = [("uniform", per, [per] * E, None) for per in map(int, o.rows_per_expert.split(","))]
    rows = []
    a8k = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16); b8k = torch.randn_like(a8k); c8k = torch.empty_like(a8k)
    for form, per, counts, ours_us in lines:
        M = sum(counts); hit = sum(c > 0 for c in counts); flop = 6 * M * H * I; w4 = hit * 3 * H * I * 0.5625
        offs = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        lay = torch.cat([torch.zeros(1, device="cuda", dtype=torch.int64), offs.long()])
        x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16)
        r = {"form": form, "rows_per_expert": per, "rows": M, "lockstep_us": ours_us}
        def add(name, fc1, fc2):
            try:
                mid = situ_c(fc1(x)); full = lambda: fc2(situ_c(fc1(x)))
                r[name] = {"fc1_us": timed(graphed(lambda: fc1(x))), "fc2_us": timed(graphed(lambda: fc2(mid))), "layer_us": timed(graphed(full))}
                t = r[name]["layer_us"]; r[name]["TFLOPS"] = flop / t / 1e6; r[name]["w4_TBs"] = w4 / t / 1e6
            except Exception as e: r[name] = {"error": repr(e)[:300]}
        if "bf16" in peers: add("bf16", lambda a: torch._grouped_mm(a, w1.transpose(-2, -1), offs=offs), lambda a: torch._grouped_mm(a, w2.transpose(-2, -1), offs=offs))
        for name, (l1, l2) in layers.items():
            cc = {"gemm_type": "grouped_contiguous"}
            add(name, lambda a, l=l1: l(a, expert_layout=lay, compute_config=cc), lambda a, l=l2: l(a, expert_layout=lay, compute_config=cc))
        r["cublas_TFLOPS"] = 2 * 8192**3 / timed(lambda: torch.mm(a8k, b8k.t(), out=c8k), 10) / 1e6
        rows.append(r)
        print(f"{form:12s} rows/expert {per:5d} " + (f"lockstep: {ours_us:8.1f} us  " if ours_us else "") + "  ".join(f"{k}: {v['layer_us']:8.1f} us {v['TFLOPS']:6.1f} TF {v['w4_TBs']:.2f} TB/s(w4) [fc1 {v['fc1_us']:.0f} fc2 {v['fc2_us']:.0f}]" if "layer_us" in v else f"{k}: {v.get('error')}"
              for k, v in r.items() if isinstance(v, dict)) + f"  cuBLAS {r['cublas_TFLOPS']:.0f} TF", flush=True)
    if o.json: json.dump({"geometry": o.geometry, "E_H_I": [E, H, I], "ceilings": c, "rows": rows}, open(o.json, "w"), indent=1)

main()
