"""Where an update's seconds go, operator by operator, and what the least is that each could take.

    python -m bench.operators [--model 3.4M] [--prompt 512] [--completion 128] [--group 8] [--threads N] [--repeats N]

The least: matrix products and attention at the rate of a large square sgemm; matrix products also alone, at their own
shapes; everything else by the bytes that it must read and write, at the rate of adding two large arrays.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import timing

# isort: split
import torch
from torch.profiler import ProfilerActivity, profile

from fastrl_fast import distributed
from fastrl_fast.memory import ModelSize
from fastrl_fast.model import build_policy
from fastrl_fast.trainer import Trainer

from .floor import SGEMM_FLOPS, attention_flops, sgemm, update_flops
from .load import MODELS, load_model, make_groups
from .step import CONFIG, Updates

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::bmm": 0}
"""Matrix products, and which input is their first factor."""
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
ROWS = "fastrl_fast::row_attention"
LAYERS = ("fastrl_fast::rms_norm", "fastrl_fast::swiglu")
ARRAY = 1 << 22
"""Numbers in each of the arrays whose sum sets the rate of memory: 16 MB, beyond the caches."""

Shape = tuple[int, ...]


@dataclass(slots=True)
class Part:
    """Operators of one kind in one update: seconds spent, and the least by multiplications or bytes."""

    calls: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    alone: float = 0.0
    """Seconds of the same products by themselves, results written where memory is ready."""


def product_shape(name: str, shapes: list[Any]) -> Shape:
    """Rows, inner size and columns of a matrix product."""
    a, b = shapes[PRODUCTS[name]], shapes[PRODUCTS[name] + 1]
    return (math.prod(a[:-1]), a[-1], b[-1])


def masked_flops(name: str, shapes: list[Any]) -> float:
    """Of torch's attention: of all scores, masked ones too: two products forward, five backward."""
    query, key = shapes[:2] if name == ATTENTION else (shapes[1], shapes[2])
    products = 2 if name == ATTENTION else 5
    return products * 2.0 * math.prod(query[:-1]) * key[-2] * query[-1]


def moved_bytes(shapes: list[Any]) -> float:
    """What an elementwise operator reads, and a result as large as its largest input, in float32."""
    sizes = [math.prod(shape) for shape in shapes if shape] or [0]
    return 4.0 * (sum(sizes) + max(sizes))


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of some calls, after one that warms up."""
    run()
    taken = []
    for _ in range(repeats):
        before = time.perf_counter()
        run()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def alone_seconds(shape: Shape, repeats: int) -> float:
    m, k, n = shape
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    return median_seconds(lambda: torch.mm(a, b, out=out), repeats)


def parts(run: Callable[[], Any], *, bandwidth: float, repeats: int, row_flops: float) -> tuple[dict[str, Part], float]:
    """Profile some updates: their parts by kind, and the seconds of one, the profiler's own included.

    What would move bytes at more than five times the rate of memory is a view and moves none. `row_flops` is what
    attention of whole rows computes in an update, which no shape tells.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        before = time.perf_counter()
        for _ in range(repeats):
            run()
        seconds = (time.perf_counter() - before) / repeats
    found: dict[str, Part] = defaultdict(Part)
    alone: dict[Shape, float] = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        if not event.key.startswith(("aten::", ROWS, *LAYERS)):
            continue
        calls, shapes = event.count / repeats, event.input_shapes
        own = event.self_cpu_time_total * 1e-6 / repeats
        kind = "elementwise and copies"
        if event.key in PRODUCTS:
            kind, shape = "matrix products", product_shape(event.key, shapes)
            if shape not in alone:
                alone[shape] = alone_seconds(shape, 9)
            found[kind].flops += calls * 2.0 * math.prod(shape)
            found[kind].alone += calls * alone[shape]
        elif event.key.startswith(ATTENTION):
            kind = "attention"
            found[kind].flops += calls * masked_flops(event.key, shapes)
        elif event.key.startswith(ROWS):
            kind = "attention"
            found[kind].flops = row_flops
        else:
            moved = calls * moved_bytes(shapes)
            kind = kind if moved <= 5 * bandwidth * own else "views"
            found[kind].bytes += moved if kind != "views" else 0.0
        found[kind].calls += calls
        found[kind].seconds += own
    rest = seconds - sum(part.seconds for part in found.values())
    return {**found, "between operators": Part(seconds=rest)}, seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.operators", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="3.4M")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    distributed.start()
    policy = build_policy(load_model(options.model), CONFIG.model, temperature=1.0)
    groups = make_groups(options.prompt, [[options.completion] * options.group])
    run = Updates(policy).run(groups, True, Trainer)
    seconds = median_seconds(run, options.repeats)
    rate = SGEMM_FLOPS / median_seconds(sgemm, options.repeats)
    a, b, out = (torch.ones(ARRAY) for _ in range(3))
    bandwidth = 3 * 4.0 * ARRAY / median_seconds(lambda: torch.add(a, b, out=out), options.repeats)
    size = ModelSize.of(policy.lm.config)
    row_flops = attention_flops(size, groups, shared=True)
    found, profiled = parts(run, bandwidth=bandwidth, repeats=options.repeats, row_flops=row_flops)
    floor = update_flops(size, groups, shared=True) / rate
    distributed.stop()
    print(
        f"{options.model} {options.group} x {options.prompt}/{options.completion}, {options.threads} threads: "
        f"{seconds:.3f} s, {profiled:.3f} s profiled; floor {floor:.3f} s ({floor / seconds:.0%}); sgemm "
        f"{rate / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s, load {timing.machine('cpu', 0)['load']:.1f}"
    )
    for name, part in sorted(found.items(), key=lambda item: -item[1].seconds):
        least = part.flops / rate + part.bytes / bandwidth
        own = f", alone at their shapes {part.alone:.4f} s" if part.alone else ""
        work = f"{part.flops / 1e9:.1f} GFLOP" if part.flops else f"{part.bytes / 1e6:.0f} MB"
        print(
            f"  {name:24} {part.seconds:.4f} s  {part.seconds / profiled:4.0%}  {part.calls:6.0f} calls  {work:>12}"
            f"  at least {least:.4f} s{own}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
