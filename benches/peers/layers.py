"""The experts of one MoE layer as today's libraries compute them, recorded as CUDA graphs and timed in turns."""

import dataclasses
import functools
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

# Sizes differ from line to line; one that ran uncompiled would be no peer.
torch._dynamo.config.recompile_limit = 64
torch._dynamo.config.fail_on_recompile_limit_hit = True

NUM_PATTERNS = 4  # different experts, which repeat, as those of `lockstep bench` do
DENSE_WIDTH = 8192
NUM_WARM = 2
NUM_ROUNDS = 4  # layers in a graph, so that a short one's launch does not count
REST_S = 0.05  # before what is measured: the card's clock follows its heat

Work = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The experts of one rank."""

    model: str  # as lockstep calls it
    num_experts: int
    hidden: int
    intermediate: int
    activation: str


class Peer(Protocol):
    name: str

    def layer(self, x: torch.Tensor, counts: Sequence[int]) -> Work:
        """What computes the layer over rows [num_rows, hidden] that lie sorted by expert, `counts` of each."""


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Kimi K3's: beta 4, linear beta 25."""
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * 25.0 * torch.tanh(up / 25.0)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@functools.cache
def compiled_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """FC1's output [num_rows, 2 * intermediate] to FC2's input, one kernel for every number of rows."""
    gated = {"situ": situ, "swiglu": swiglu}[name]

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        return gated(*gate_up.float().chunk(2, -1)).to(torch.bfloat16)

    return torch.compile(apply, dynamic=True)


def of_all_experts(patterns: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[NUM_PATTERNS, ...] to [num_experts, ...]."""
    return patterns.repeat(num_experts // NUM_PATTERNS, *[1] * (patterns.ndim - 1))


class Bf16:
    """torch's grouped product over bf16 weights."""

    name = "torch bf16"

    def __init__(self, geometry: Geometry, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
        self.fc1, self.fc2 = (of_all_experts(fc, geometry.num_experts).transpose(-2, -1) for fc in (fc1, fc2))
        self.activation = compiled_activation(geometry.activation)

    def layer(self, x: torch.Tensor, counts: Sequence[int]) -> Work:
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)

        def work() -> torch.Tensor:
            inner = self.activation(torch._grouped_mm(x, self.fc1, offs=ends))
            return torch._grouped_mm(inner, self.fc2, offs=ends)

        return work


class Humming:
    """humming's grouped product over NVFP4 weights and bf16 activations, by the configurations that it chooses itself."""

    name = "humming"
    WEIGHTS = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}
    GEMM = "grouped_contiguous"
    MAX_ROWS = 65_408  # the last size in humming's own table of configurations

    def __init__(self, geometry: Geometry, fc1: torch.Tensor, fc2: torch.Tensor, sizes: Sequence[int]) -> None:
        self.products = [self._product(fc, geometry.num_experts, sizes) for fc in (fc1, fc2)]
        self.activation = compiled_activation(geometry.activation)

    @classmethod
    def _product(cls, patterns: torch.Tensor, num_experts: int, sizes: Sequence[int]) -> Callable[..., torch.Tensor]:
        from humming.layer import HummingLayer
        from humming.schema import HummingWeightSchema
        from humming.tune import get_heuristics_config

        _, shape_n, shape_k = patterns.shape
        with torch.device("cuda"):
            layer = HummingLayer(
                shape_n=shape_n,
                shape_k=shape_k,
                num_experts=num_experts,
                torch_dtype=torch.bfloat16,
                weight_config=dict(cls.WEIGHTS),
            )
        quantised = HummingWeightSchema.quant_tensor(patterns, layer.weight_schema, torch.bfloat16)
        layer.load_from_tensors({name: of_all_experts(tensor, num_experts) for name, tensor in quantised.items()})
        layer.transform()
        # Its whole table has some forty kernels: those of other sizes would be compiled for nothing.
        bounds = [0, *sorted(set(sizes))]
        choose = functools.partial(get_heuristics_config, layer.humming_config, gemm_type=cls.GEMM)
        tuning = [
            [low, high, choose(shape_m=min(high, cls.MAX_ROWS))] for low, high in zip(bounds, bounds[1:])
        ]
        return functools.partial(
            layer, compute_config=json.dumps({"gemm_type": cls.GEMM}), tuning_config=json.dumps(tuning)
        )

    def layer(self, x: torch.Tensor, counts: Sequence[int]) -> Work:
        starts = torch.tensor([0, *counts], device="cuda").cumsum(0)
        fc1, fc2 = self.products

        def work() -> torch.Tensor:
            inner = self.activation(fc1(x, expert_layout=starts))
            return fc2(inner, expert_layout=starts)

        return work


class Graph:
    """Recorded work."""

    def __init__(self, work: Work, num_rounds: int, pool: Any) -> None:
        """Records `work` so often in a row."""
        self.work = work  # which holds what the graph reads
        self.num_rounds = num_rounds
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool):
            for _ in range(num_rounds):
                work()

    def time(self, repeats: int) -> dict[str, float]:
        """Replays it alone, on a card that has rested."""
        time.sleep(REST_S)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times_us = []
        for _ in range(NUM_WARM + repeats):
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times_us.append(start.elapsed_time(end) * 1e3 / self.num_rounds)
        counted = times_us[NUM_WARM:]
        return {"median_us": statistics.median(counted), "min_us": min(counted)}


def dense_product() -> Work:
    """What the card's rate of bf16 products is measured with: cuBLAS, 8192 x 8192 x 8192."""
    a, b, out = (torch.randn(DENSE_WIDTH, DENSE_WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return lambda: torch.mm(a, b.t(), out=out)


def make_peers(geometry: Geometry, sizes: Sequence[int]) -> list[Peer]:
    """Those that are to be had."""
    torch.manual_seed(0)

    def patterns(out_features: int, in_features: int) -> torch.Tensor:
        shape = (NUM_PATTERNS, out_features, in_features)
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, in_features**-0.5)

    fc1 = patterns(2 * geometry.intermediate, geometry.hidden)
    fc2 = patterns(geometry.hidden, geometry.intermediate)
    peers: list[Peer] = [Bf16(geometry, fc1, fc2)]
    try:
        peers.append(Humming(geometry, fc1, fc2, sizes))
    except Exception:
        print(f"no humming:\n{traceback.format_exc()}", file=sys.stderr)
    return peers


def check_alike(peers: Sequence[Peer], x: torch.Tensor, counts: Sequence[int]) -> None:
    """That all compute one layer: NVFP4 rounds weights by a tenth."""
    first, *others = (peer.layer(x, counts)().float() for peer in peers)
    for peer, other in zip(peers[1:], others):
        error = ((other - first).norm() / first.norm()).item()
        if not error < 0.25:
            raise AssertionError(f"{peer.name} is {error:.2f} from {peers[0].name}, relative L2")


def time_peers(geometry: Geometry, lines: Sequence[Sequence[int]], repeats: int) -> list[dict[str, Any]]:
    """Figures of every peer, and of a dense product beside them, for each line of rows an expert."""
    sizes = [sum(counts) for counts in lines]
    peers = make_peers(geometry, sizes)
    x = torch.randn(max(sizes), geometry.hidden, device="cuda", dtype=torch.bfloat16)
    check_alike(peers, x[: sizes[0]], lines[0])
    pool = torch.cuda.graph_pool_handle()
    dense = Graph(dense_product(), 1, pool)
    figures = []
    for counts, num_rows in zip(lines, sizes):
        works = {peer.name: peer.layer(x[:num_rows], counts) for peer in peers}
        of_peers = {name: Graph(work, NUM_ROUNDS, pool).time(repeats) for name, work in works.items()}
        tflops = 2 * DENSE_WIDTH**3 / dense.time(repeats)["median_us"] / 1e6
        figures.append({"counts": list(counts), "peers": of_peers, "dense_tflops": tflops})
    return figures


def give_memory_back() -> None:
    """So that another process has it."""
    gc.collect()
    torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0].split(", ")
    try:
        humming = importlib.metadata.version("humming-kernels")
    except importlib.metadata.PackageNotFoundError:
        humming = "none"
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__, "CUDA": torch.version.cuda, "humming": humming}
