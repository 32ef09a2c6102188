"""Dispatch and combine as torch has them: permute, exchange by all_to_all, permute to experts; the same way back.

A token goes out once for each of its slots, as in the dispatchers that are built on `all_to_all_single`. Nothing here is
specific to a GPU: with gloo the same code runs on CPUs, which is how it is checked without any.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

NUM_WARM = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """What tokens are made of."""

    hidden: int
    num_experts: int
    num_topk: int


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Those of one rank, each with `num_topk` different experts."""

    ids: torch.Tensor  # [num_tokens, num_topk]
    weights: torch.Tensor  # [num_tokens, num_topk], f32


@dataclasses.dataclass(frozen=True)
class Handle:
    """What combine needs of a dispatch."""

    to_slots: torch.Tensor  # where each slot's row lies among those sent
    to_experts: torch.Tensor  # which of the received rows stands where among the experts' rows
    num_sent: list[int]  # rows to each rank
    num_received: list[int]
    counts: torch.Tensor  # rows of each local expert


def route(shape: Shape, num_tokens: int, device: torch.device, seed: int) -> Tokens:
    """Every expert is as likely as any other."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator, device=device)
    ids = scores.topk(shape.num_topk).indices
    return Tokens(ids, torch.full(ids.shape, 1.0 / shape.num_topk, device=device))


def exchange(rows: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
    """Rows by rank to rows by rank. They travel as bytes, whatever they are."""
    sent = rows.contiguous().view(torch.uint8)
    received = sent.new_empty(sum(num_received), sent.shape[1])
    dist.all_to_all_single(received, sent, num_received, num_sent)
    return received.view(rows.dtype)


def dispatch(shape: Shape, rows: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Handle]:
    """rows [num_tokens, ...] of any form to rows that lie by local expert and then by source. Waits for the device once."""
    num_ranks = dist.get_world_size()
    num_local = shape.num_experts // num_ranks
    order = tokens.ids.flatten().argsort(stable=True)
    counts = tokens.ids.flatten().bincount(minlength=shape.num_experts)
    others = torch.empty_like(counts)
    dist.all_to_all_single(others, counts)
    by_source = others.view(num_ranks, num_local)
    sizes = torch.stack([counts.view(num_ranks, num_local).sum(1), by_source.sum(1)])
    num_sent, num_received = sizes.tolist()

    permuted = rows[order // shape.num_topk]
    received = exchange(permuted, num_sent, num_received)
    expert = torch.arange(num_local, device=counts.device).repeat(num_ranks)
    expert_of_row = expert.repeat_interleave(others, output_size=sum(num_received))
    to_experts = expert_of_row.argsort(stable=True)
    handle = Handle(order.argsort(), to_experts, num_sent, num_received, by_source.sum(0))
    return received[to_experts], handle


def combine(shape: Shape, rows: torch.Tensor, handle: Handle, tokens: Tokens) -> torch.Tensor:
    """The experts' rows [num_rows, hidden] in bf16 to sums [num_tokens, hidden] in f32."""
    back = torch.empty_like(rows)
    back[handle.to_experts] = rows
    home = exchange(back, handle.num_received, handle.num_sent)
    slots = home[handle.to_slots].view(-1, shape.num_topk, shape.hidden)
    return torch.einsum("tkh,tk->th", slots.float(), tokens.weights)


def check(shape: Shape, num_tokens: int, device: torch.device) -> None:
    """Experts multiply by a power of two that tells them apart; all sums have to be what they are without travelling."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tokens = route(shape, num_tokens, device, seed=rank)
    x = torch.randn(num_tokens, shape.hidden, device=device).to(torch.bfloat16)
    factors = 2.0 ** (torch.arange(shape.num_experts, device=device) % 5)
    rows, handle = dispatch(shape, x, tokens)
    num_local = shape.num_experts // num_ranks
    local = factors[rank * num_local :][:num_local].repeat_interleave(handle.counts)
    out = combine(shape, (rows.float() * local[:, None]).to(torch.bfloat16), handle, tokens)
    expected = x.float() * (factors[tokens.ids] * tokens.weights).sum(1, keepdim=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


class Clock:
    """Times of what is queued in a device's stream; on CPUs, of what is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def us(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        if isinstance(start, float):
            return (end - start) * 1e6
        return start.elapsed_time(end) * 1e3


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()


def time_travel(shape: Shape, num_tokens: int, row_bytes: int, device: torch.device, repeats: int) -> dict[str, object]:
    """Medians of the slowest rank, all ranks starting at once; tokens of `row_bytes` go out, bf16 rows come back."""
    clock = Clock(device)
    tokens = route(shape, num_tokens, device, seed=dist.get_rank())
    payload = torch.randint(256, (num_tokens, row_bytes), dtype=torch.uint8, device=device)
    dispatch_us, combine_us = [], []

    def timed(work: Callable[[], object]) -> tuple[object, float]:
        dist.barrier()
        clock.synchronise()
        start = clock.mark()
        made = work()
        end = clock.mark()
        clock.synchronise()
        return made, slowest(clock.us(start, end), device)

    for _ in range(NUM_WARM + repeats):
        (_, handle), us = timed(lambda: dispatch(shape, payload, tokens))
        dispatch_us.append(us)
        rows = torch.ones(sum(handle.num_received), shape.hidden, dtype=torch.bfloat16, device=device)
        _, us = timed(lambda: combine(shape, rows, handle, tokens))
        combine_us.append(us)
    return {
        "tokens": num_tokens,
        "dispatch_us": statistics.median(dispatch_us[NUM_WARM:]),
        "combine_us": statistics.median(combine_us[NUM_WARM:]),
        "counts": handle.counts.tolist(),
    }
